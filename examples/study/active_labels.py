# python -m examples.study.active_labels
# not run: half an hour on two cores, some minutes on ten
"""Which pairs to label next: chosen at random, or where the reward model is least sure. In: seeds. Out:
held-out accuracy by number of labels, for either choice, and the labels that active choice needs for it.

    python -m examples.study.active_labels --jobs 10

Both begin with the same random pairs. Then, in rounds, a reward model is trained from the start on the pairs
that are labelled so far, and the next ones are taken from a pool: at random, or those whose order its heads
doubt most (or, with one head, whose scores are closest). Nobody sees a label before the pair is chosen.
Accuracy is measured on pairs outside the pool.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import proxima  # noqa: F401 - before torch: it says how waiting threads wait

# isort: split
import torch
from torch import Tensor

from examples.study.learn import in_jobs
from proxima.base_setup import EMBEDDED
from proxima.config import RewardConfig
from proxima.core.json_record import Record
from proxima.finetuning import Preference, RewardTrainer, read_preferences
from proxima.models import least_sure
from proxima.runs import write_json
from proxima.world.demo.demo_pipeline import fresh_folder
from proxima.world.demo_settings import REWARD_SETTINGS

BUDGETS = (100, 140, 200, 280, 400, 560)  # labels after each round; each is about 70 % of the next
POOL, HELD_OUT = 2000, 1000
HEADS = 4
SETTINGS: Record = {**REWARD_SETTINGS, "epochs": 3, "micro_batch_size": 32, "mismatch_coef": 0.0}
WATCHED = 32  # held-out pairs that the trainer evaluates by itself
CHOICES = ("random", "active")


def curve(
    home: Path, seed: int, choice: str, budgets: Sequence[int], pool: int, heads: int, device: str
) -> Record:
    """Held-out accuracy after each round of labels."""
    fresh_folder(home)
    shipped, held_out = (
        list(read_preferences(EMBEDDED / f"preferences_{part}.jsonl.gz")) for part in ("train", "eval")
    )
    random.Random(f"active labels {seed}").shuffle(shipped)
    left, held_out = shipped[:pool], [*held_out, *shipped[pool:]][:HELD_OUT]
    labelled: list[Preference] = []
    accuracies: dict[int, float] = {}
    trainer: RewardTrainer | None = None
    for budget in budgets:
        wanted = budget - len(labelled)
        order = doubtful(trainer, left) if trainer is not None and choice == "active" else range(len(left))
        chosen = set(list(order)[:wanted])
        labelled += [left[place] for place in sorted(chosen)]
        left = [pair for place, pair in enumerate(left) if place not in chosen]
        run: Record = {"device": device, "seed": seed, "run_dir": str(home), "run_name": f"reward-{budget}"}
        trainer = RewardTrainer(RewardConfig("embedded", ensemble=heads, **run, **SETTINGS))
        trainer.train(labelled, held_out[:WATCHED])
        accuracies[budget] = accuracy(trainer, held_out)
    return {"seed": seed, "choice": choice, "heads": heads, "accuracy": accuracies}


@torch.no_grad()
def scores(trainer: RewardTrainer, pairs: Sequence[Preference]) -> tuple[Tensor, Tensor]:
    """What each head gives the chosen and the rejected sides (B, heads)."""
    encoded = [trainer.encode(pair) for pair in pairs]
    with trainer.role.active():
        chosen, rejected = (
            torch.cat([trainer.members(chunk) for chunk in trainer.chunks(rows)])
            for rows in ([each.chosen for each in encoded], [each.rejected for each in encoded])
        )
    return chosen, rejected


def accuracy(trainer: RewardTrainer, pairs: Sequence[Preference]) -> float:
    chosen, rejected = scores(trainer, pairs)
    return float((chosen.mean(1) > rejected.mean(1)).double().mean())


def doubtful(trainer: RewardTrainer, pairs: Sequence[Preference]) -> list[int]:
    """The places of the pairs, the least sure first; which side was chosen makes no difference."""
    return least_sure(*scores(trainer, pairs)).argsort(descending=True, stable=True).tolist()


def show(rows: Sequence[Record]) -> None:
    """Mean accuracies over seeds, the standard error of their difference, and the labels that active choice
    needs for what random choice reaches."""
    by_choice = {choice: [row["accuracy"] for row in rows if row["choice"] == choice] for choice in CHOICES}
    means = {
        choice: {int(budget): statistics.fmean(each[budget] for each in own) for budget in own[0]}
        for choice, own in by_choice.items()
    }
    print(f"{'labels':>8}{'random':>9}{'active':>9}{'difference':>18}{'active needs':>14}")
    for budget, reached in means["random"].items():
        apart = [
            one[str(budget)] - other[str(budget)] for other, one in zip(*by_choice.values(), strict=True)
        ]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        needs = labels_for(reached, means["active"])
        told = "more" if needs is None else f"{needs:.0f} ({needs / budget:.0%})"
        difference = f"{statistics.fmean(apart):+.4f} +- {error:.4f}"
        print(f"{budget:>8}{reached:>9.4f}{means['active'][budget]:>9.4f}{difference:>18}{told:>14}")


def labels_for(accuracy: float, reached: dict[int, float]) -> float | None:
    """The number of labels from which on a curve has at least this accuracy, between its points by a line."""
    points = sorted(reached.items())
    last: float | None = None
    for (few, low), (many, high) in pairwise(points):
        if high < accuracy:
            last = None
        elif low < accuracy:
            last = few + (many - few) * (accuracy - low) / (high - low)
        elif last is None:
            last = float(few)
    return last


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS, help="labels after each round")
    parser.add_argument("--pool", type=int, default=POOL, help="pairs to choose from")
    parser.add_argument("--heads", type=int, default=HEADS, help="of the reward model")
    parser.add_argument(
        "--jobs", type=int, default=1, help="curves at a time, each in a process with one thread"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/active"))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    calls = [
        partial(
            curve,
            given.folder / f"{choice}-{seed}",
            seed,
            choice,
            tuple(given.budgets),
            given.pool,
            given.heads,
            given.device,
        )
        for seed in given.seeds
        for choice in CHOICES
    ]
    path = given.folder / "active.json"
    rows = in_jobs(given.jobs, calls)
    write_json(path, rows)
    show(json.loads(path.read_text(encoding="utf-8")))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
