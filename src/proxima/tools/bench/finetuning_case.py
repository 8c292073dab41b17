"""Times optimiser steps of supervised fine-tuning and of reward training.

In: a case. Out: seconds per step, the floor, memory.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import torch

from proxima.config import FinetuningConfig, RewardConfig
from proxima.core.json_record import Record
from proxima.finetuning import Demonstration, FinetuningTrainer, Preference, RewardTrainer, SFTTrainer
from proxima.tools.bench.hardware_floor import Machine, finetuning_floor
from proxima.tools.bench.random_model import SHAPES, free_memory, make_random_model

WARM_UP = 2  # optimiser steps
AnyTrainer: TypeAlias = FinetuningTrainer[Any, Any]


@dataclass(frozen=True)
class FinetuningCase:
    """What one optimiser step trains on: demonstrations, or preference pairs with the plain preference
    loss."""

    name: str
    kind: Literal["sft", "reward"]
    size: str = "0.6B"
    batch: int = 16
    prompt: int = 256
    """Tokens of each prompt."""
    response: int = 256
    """Tokens of each answer, EOS included."""

    @property
    def sequences(self) -> int:
        """In one optimiser step."""
        return self.batch * (2 if self.kind == "reward" else 1)

    @property
    def tokens(self) -> int:
        """In one optimiser step."""
        return self.sequences * (self.prompt + self.response)


FINETUNING_CASES = {
    case.name: case
    for case in (
        FinetuningCase("sft", "sft"),
        FinetuningCase("reward", "reward"),
        FinetuningCase("small sft", "sft", "tiny", prompt=64, response=64),
        FinetuningCase("small reward", "reward", "tiny", prompt=64, response=64),
    )
}
"""The reported cases; the last two suit a CPU."""


def run_finetuning_case(
    case: FinetuningCase, machine: Machine, steps: int, folder: str | Path, **settings: object
) -> Record:
    """Train a random model for `steps` optimiser steps after a warm-up; their median.

    Args:
        settings: of `FinetuningConfig`, besides those of the case.
    """
    gpu = torch.cuda.is_available()
    model = Path(folder) / case.size
    if not (model / "config.json").is_file():
        make_random_model(model, case.size, "cuda" if gpu else "cpu")
    with tempfile.TemporaryDirectory() as home:
        trainer, examples = _trainer(case, str(model), steps, {**settings, "run_dir": home})
        with timed_steps(trainer, gpu) as times:
            trainer.train(examples, examples[: case.batch])
    seconds = median(times[WARM_UP:])
    floor = finetuning_floor(case, SHAPES[case.size], machine)
    found = {
        **asdict(case),
        "seconds": seconds,
        "floor": floor,
        "ratio_to_floor": seconds / floor,
        "tokens_per_second": case.tokens / seconds,
        "warm_up": sum(times[:WARM_UP]),
        "peak_gib": torch.accelerator.max_memory_allocated() / 2**30 if gpu else None,
        "held_gib": torch.accelerator.memory_reserved() / 2**30 if gpu else None,
    }
    del trainer
    free_memory()
    return found


def _trainer(case: FinetuningCase, model: str, steps: int, given: Record) -> tuple[AnyTrainer, list[Any]]:
    """A trainer, and the examples of the steps, of random words."""
    rng, top = random.Random("bench"), SHAPES[case.size]["vocab_size"] - 1

    def words(count: int) -> str:
        return "".join(f"t{rng.randint(3, top)} " for _ in range(count))

    count = case.batch * (WARM_UP + steps)
    settings: Record = {
        "batch_size": case.batch,
        "micro_batch_size": case.batch,
        "epochs": 1,
        "eval_every": count,
        "max_length": case.prompt + case.response,
        **given,
    }
    if case.kind == "sft":
        shown = [Demonstration(words(case.prompt), words(case.response - 1)) for _ in range(count)]
        return SFTTrainer(FinetuningConfig(model, **settings)), shown
    terms: Record = dict.fromkeys(("lm_coef", "score_penalty", "mismatch_coef"), 0.0)
    pairs = [
        Preference(words(case.prompt), words(case.response - 1), words(case.response - 1))
        for _ in range(count)
    ]
    return RewardTrainer(RewardConfig(model, **settings, **terms)), pairs


@contextmanager
def timed_steps(trainer: AnyTrainer, gpu: bool) -> Iterator[list[float]]:
    """Seconds of each optimiser step inside the block. Memory is counted from the first one on."""
    seconds: list[float] = []
    step = trainer.train_step

    def timed(*given: Any) -> torch.Tensor:
        if gpu:
            torch.accelerator.synchronize()
            if not seconds:
                torch.accelerator.reset_peak_memory_stats()
        started = time.perf_counter()
        loss = step(*given)
        if gpu:
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - started)
        return loss

    trainer.train_step = timed  # type: ignore[method-assign, assignment]
    try:
        yield seconds
    finally:
        trainer.train_step = step  # type: ignore[method-assign]
