"""The long experiments: `make learn`. In: seeds, or KL coefficients. Out: a table, and learn.json or
frontier.json in runs/learn.

python -m proxima.world.demo.learn              five seeds, each with its own reward model, PPO to convergence
python -m proxima.world.demo.learn --frontier   one seed, KL coefficients 0 to 0.3: both scores against KL
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxima.runs import write_json
from proxima.world.demo.demo_pipeline import run_demo

STEPS = 40
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3}
FRONTIER_STEPS = 26
COEFFICIENTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)


def learn(folder: Path, seeds: Sequence[int], device: str = "auto") -> list[dict[str, Any]]:
    """The whole pipeline for every seed."""
    return [
        _row(
            f"seed-{seed}",
            run_demo(seed, STEPS, run_dir=folder, run_name=f"seed-{seed}", device=device, ppo=SETTINGS),
        )
        for seed in seeds
    ]


def frontier(folder: Path, device: str = "auto") -> list[dict[str, Any]]:
    """The demo with one reward model and a smaller and smaller KL penalty."""
    rows: list[dict[str, Any]] = []
    for coef in sorted(COEFFICIENTS, reverse=True):
        first = folder / rows[0]["run"] if rows else None
        name = f"kl-{coef:g}"
        results = run_demo(
            0,
            FRONTIER_STEPS,
            run_dir=folder,
            run_name=name,
            device=device,
            ppo={"kl_coef": coef},
            reward_from=first,
        )
        rows.append(_row(name, results))
    return rows


def _row(name: str, results: dict[str, Any]) -> dict[str, Any]:
    kept = ("seed", "reward_model", "sft", "ppo", "win_rate_by_gold", "win_rate_by_reward_model", "seconds")
    return {"run": name, "kl_coef": results["settings"]["kl_coef"], **{key: results[key] for key in kept}}


def show(rows: list[dict[str, Any]]) -> None:
    print(
        f"\n{'run':>8} {'gold before':>12} {'after':>6} {'win rate':>9} {'score':>7} {'KL':>6} "
        f"{'length':>7} {'minutes':>8}"
    )
    for row in rows:
        ppo = row["ppo"]
        print(
            f"{row['run']:>8} {row['sft']['gold']:>12.3f} {ppo['gold']:>6.3f} "
            f"{row['win_rate_by_gold']['rate']:>9.3f} {ppo['score']:>7.2f} {ppo['kl']:>6.2f} "
            f"{ppo['response_length']:>7.1f} {row['seconds']['all'] / 60:>8.1f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frontier", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=Path("runs/learn"))
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    table = (
        frontier(given.folder, given.device)
        if given.frontier
        else learn(given.folder, given.seeds, given.device)
    )
    path = given.folder / ("frontier.json" if given.frontier else "learn.json")
    write_json(path, table)
    show(table)
    print(f"written to {path}")
