"""Times one case: a model's shape, a batch, lengths.

In: a case. Out: seconds per phase, memory, floors, counts.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from proxima.config import PPOConfig
from proxima.core.json_record import Record
from proxima.ppo_trainer import PPOTrainer
from proxima.tools.bench.hardware_floor import Machine, floors
from proxima.tools.bench.random_model import SHAPES, free_memory, make_random_model
from proxima.tools.bench.step_profile import step_profile

PHASES = ("generate", "score", "reward", "value", "update")


@dataclass(frozen=True)
class Case:
    """What one PPO step does."""

    name: str = "standard"
    size: str = "0.6B"
    batch: int = 64
    prompt: tuple[int, int] = (512, 512)
    """Shortest and longest prompt, in tokens."""
    response: tuple[int, int] = (53, 53)
    """Shortest and longest response, in tokens; where they differ, sequences end at random."""
    epochs: int = 4
    minibatches: int = 1
    """Optimiser steps per epoch."""
    top_k: int = 0
    top_p: float = 1.0
    generations: int = 1
    """Responses per prompt; above 1 the step is GRPO's, with a function as the reward and no value model."""
    quantize: str = "none"

    @property
    def responses(self) -> int:
        """In one step."""
        return self.batch * self.generations

    @property
    def settings(self) -> Record:
        """Of `PPOConfig`."""
        given: Record = {
            "batch_size": self.batch,
            "max_new_tokens": self.response[1],
            "minibatch_size": -(-self.responses // self.minibatches),
            "ppo_epochs": self.epochs,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "rewards": (),
            "quantize": self.quantize,
        }
        if self.generations > 1:
            given |= {"adv_estimator": "grpo", "num_generations": self.generations, "rewards": (even_words,)}
            given |= {"whiten_advantages": False, "kl_coef": 0.0}
        return given

    @property
    def has_peer(self) -> bool:
        """Whether TRL is timed too: prompts have one length, responses too, and no weight is quantised."""
        even = self.prompt[0] == self.prompt[1] and self.response[0] == self.response[1]
        return even and self.quantize == "none"


def even_words(prompts: list[str], texts: list[str]) -> list[float]:
    """A reward that differs between responses of random words such as `t12`: the share of even numbers."""
    return [
        sum(word[-1:] in set("02468") for word in text.split()) / max(1, len(text.split())) for text in texts
    ]


CASES = {
    case.name: case
    for case in (
        Case(),
        Case("user's default", batch=32, response=(10, 10), minibatches=4, top_k=50, top_p=0.95),
        Case("large batch", batch=256, minibatches=4),
        Case("mixed prompts", prompt=(64, 512)),
        Case("mixed responses", response=(8, 256)),
        Case("long", prompt=(256, 256), response=(1024, 1024), epochs=1),
        Case("long mixed", prompt=(64, 512), response=(1, 1024), epochs=1),
        Case("very long", batch=8, prompt=(256, 256), response=(8192, 8192), epochs=1),
        Case("grpo", batch=8, response=(256, 256), epochs=1, generations=8),
        Case("4B", size="4B", batch=32),
        Case("8B", size="8B", batch=16),
        Case("8B nf4", size="8B", batch=16, quantize="nf4"),
        Case("14B", size="14B", batch=8),
        Case("embedded", size="embedded", batch=64, prompt=(60, 60), response=(40, 40)),
        Case("small", size="tiny", batch=32, prompt=(128, 128), response=(53, 53)),
    )
}
"""The reported cases; the last two suit a CPU."""


def run_case(
    case: Case,
    machine: Machine,
    steps: int = 3,
    folder: str | Path | None = None,
    profile: bool = False,
    **settings: object,
) -> Record:
    """Build, warm up, then time `steps` PPO steps; the median of each phase.

    Args:
        folder: keeps the model with random weights for the next case; by default it is temporary.
        profile: take one more step under the profiler.
        settings: of `PPOConfig`, besides those of the case.
    """

    def measure(trainer: PPOTrainer) -> Record:
        found = _timed(trainer, case, machine, steps)
        more = {"profile": step_profile(trainer, make_prompts(case, 2 + steps))} if profile else {}
        return {**found, **more}

    return {
        **asdict(case),
        "checkpointing": bool(settings.get("gradient_checkpointing")),
        **measured(case, measure, folder, **settings),
    }


def measured(
    case: Case,
    measure: Callable[[PPOTrainer], Record],
    folder: str | Path | None = None,
    **settings: object,
) -> Record:
    """What `measure` finds on a trainer for this case, with random weights; the trainer's memory is freed
    afterwards."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as home:
        model = Path(folder or home) / case.size
        if not (model / "config.json").is_file():
            make_random_model(model, case.size, device)
        given: Record = settings
        config = PPOConfig(str(model), run_dir=home, **case.settings, **given)
        trainer = PPOTrainer(config)
        if case.response[0] != case.response[1]:  # otherwise no response ends early
            trainer.models.eos_ids = eos_ids(case)
        found = measure(trainer)
    del trainer
    free_memory()
    return found


def _timed(trainer: PPOTrainer, case: Case, machine: Machine, steps: int) -> Record:
    gpu = trainer.models.device.type == "cuda"
    if gpu:
        torch.accelerator.reset_peak_memory_stats()
    started = time.perf_counter()
    for step in range(2):  # the second shape, if any, is compiled too
        trainer.ppo_step(make_prompts(case, step))
    warm_up = time.perf_counter() - started
    engine = trainer.models.policy.backbone.generation
    before = (engine.replays, engine.eager_steps, engine.slot_steps) if engine else (0, 0, 0)
    results = [trainer.ppo_step(make_prompts(case, 2 + step)) for step in range(steps)]
    after = (engine.replays, engine.eager_steps, engine.slot_steps) if engine else (0, 0, 0)
    decoded = sum(result["tokens"] - case.responses for result in results)  # the prefill samples the first
    phases = {name: median(result[f"seconds/{name}"] for result in results) for name in PHASES}
    seconds = median(result["seconds"] for result in results)
    tokens = median(result["tokens"] for result in results)
    floor = floors(case, SHAPES[case.size], tokens / case.responses, machine)
    return {
        "seconds": seconds,
        "phases": phases,
        "floor": floor,
        "ratio_to_floor": seconds / floor["step"],
        "tokens_per_second": tokens / seconds,
        "response_tokens": tokens,
        "decode_step": engine.clock.seconds() if engine else float("nan"),
        "warm_up": warm_up,
        "peak_gib": torch.accelerator.max_memory_allocated() / 2**30 if gpu else None,
        "held_gib": torch.accelerator.memory_reserved() / 2**30 if gpu else None,
        "graph_replays": after[0] - before[0],
        "eager_decode_steps": after[1] - before[1],
        "waiting_slots": 1 - decoded / max(1, after[2] - before[2]),
        "first_ratio_error": max(result["first_ratio_error"] for result in results),
    }


def make_prompts(case: Case, step: int) -> list[str]:
    """Prompts of random words, with the lengths of the case; different ones at every step."""
    rng = random.Random(f"bench {step}")
    top = SHAPES[case.size]["vocab_size"] - 1
    return [
        " ".join(f"t{rng.randint(3, top)}" for _ in range(rng.randint(*case.prompt)))
        for _ in range(case.batch)
    ]


def eos_ids(case: Case) -> tuple[int, ...]:
    """EOS tokens, enough of them that lengths spread between the bounds (random weights sample evenly)."""
    vocabulary = SHAPES[case.size]["vocab_size"]
    mean = (case.response[0] + case.response[1]) / 2
    return tuple(range(1, 1 + max(1, round(vocabulary / mean))))
