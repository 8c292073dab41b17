"""The long experiments. In: seeds. Out: a table, and NAME.json in runs/learn. Runs that are there are kept.

python -m proxima.world.demo.learn                each seed its own reward model, PPO to convergence
python -m proxima.world.demo.learn --frontier     KL coefficients 0 to 0.3 and best-of-n: scores against KL
python -m proxima.world.demo.learn --controllers  fixed and adaptive KL coefficients, and KL budgets
python -m proxima.world.demo.learn --rounds       labels in one round, or in two, the second of PPO's samples
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from proxima.core.json_record import Record
from proxima.runs import Run, write_json
from proxima.world.demo.demo_pipeline import (
    EVALUATION_POSTS,
    RESULTS_FILE,
    demo_reward_model,
    make_trainer,
    run_demo,
)
from proxima.world.demo.gold_judge import judge_best_of
from proxima.world.demo.parallel_jobs import in_jobs
from proxima.world.demo.rounds import one_round, two_rounds
from proxima.world.demo_settings import PPO_SETTINGS
from proxima.world.posts import make_posts

Row = Record

SEEDS = (0, 1, 2, 3, 4)
COEFFICIENTS = (0.3, 0.2, 0.1, 0.05, 0.02, 0.0)
BEST_OF = 64
CONSTANT = {"lr_schedule": "constant"}  # a KL that is held, not one that stops because the learning rate does
CONTROLLERS: dict[str, Record] = {
    "fixed-0.1": {"kl_coef": 0.1},
    "fixed-0.02": {"kl_coef": 0.02},
    "adaptive-2": {"kl_controller": "adaptive", "kl_target": 2.0, "kl_horizon": 400, "kl_coef": 0.05},
    "budget-1": {"kl_controller": "budget", "kl_target": 1.0},
    "budget-2": {"kl_controller": "budget", "kl_target": 2.0},
    "budget-4": {"kl_controller": "budget", "kl_target": 4.0},
}
ROUNDS = {"one-round": one_round, "two-rounds": two_rounds}
LABELS = 3000
ROUNDS_SETTINGS = {"kl_controller": "budget", "kl_target": 3.0}


@dataclass(frozen=True)
class Trial:
    """One run of the demo."""

    name: str
    seed: int
    steps: int
    ppo: Record = field(default_factory=dict)


def run_trials(folder: Path, trials: Sequence[Trial], jobs: int, device: str) -> list[Row]:
    """All of them, `jobs` at a time, after one reward model for each seed; what is there is kept."""
    seeds = sorted({trial.seed for trial in trials})
    in_jobs(jobs, [partial(train_reward, folder, seed, device) for seed in seeds])
    return in_jobs(jobs, [partial(run_trial, folder, trial, device) for trial in trials])


def train_reward(folder: Path, seed: int, device: str) -> Path:
    """The reward model of a seed, in the form of a demo that has only that."""
    home = folder / f"reward-seed-{seed}"
    if not (home / RESULTS_FILE).exists():
        with _told_in(folder / f"{home.name}.log"):
            write_json(home / RESULTS_FILE, {"reward_model": demo_reward_model(home, seed, device)})
    return home


def run_trial(folder: Path, trial: Trial, device: str) -> Row:
    done = folder / trial.name / RESULTS_FILE
    if not done.exists():
        shutil.rmtree(folder / trial.name / "ppo", ignore_errors=True)  # of a trial that was stopped
        with _told_in(folder / f"{trial.name}.log"):
            run_demo(
                trial.seed,
                trial.steps,
                run_dir=folder,
                run_name=trial.name,
                device=device,
                ppo=trial.ppo,
                reward_from=folder / f"reward-seed-{trial.seed}",
            )
    results = json.loads(done.read_text(encoding="utf-8"))
    kept = ("seed", "reward_model", "sft", "ppo", "win_rate_by_gold", "win_rate_by_reward_model", "seconds")
    curve = Run(folder / trial.name / "ppo").metrics()["kl_exact"]
    held = curve[len(curve) // 2 :]
    during = {"peak": max(curve), "mean": statistics.fmean(held), "low": min(held), "high": max(held)}
    return {
        "run": trial.name,
        "kl_coef": results["settings"]["kl_coef"],
        **{key: results[key] for key in kept},
        "kl_second_half": during,
    }


def run_best_of(folder: Path, seed: int, device: str) -> list[Row]:
    """Best-of-n of the SFT model by the reward model of a seed, as rows beside those of runs."""
    with _told_in(folder / f"best-of-seed-{seed}.log"):
        reward = folder / f"reward-seed-{seed}" / "reward"
        trainer = make_trainer(folder, reward, seed, device, PPO_SETTINGS)
        rows = judge_best_of(trainer, make_posts(EVALUATION_POSTS, "eval", seed + 2), BEST_OF)
    return [{"run": f"best-of-{row['n']}-seed-{seed}", "seed": seed, "ppo": row} for row in rows]


def learn(folder: Path, seeds: Sequence[int], steps: int, jobs: int, device: str) -> list[Row]:
    trials = [Trial(f"seed-{seed}", seed, steps, {"learning_rate": 1e-3}) for seed in seeds]
    return run_trials(folder, trials, jobs, device)


def frontier(folder: Path, seeds: Sequence[int], steps: int, jobs: int, device: str) -> list[Row]:
    """One reward model per seed, and a smaller and smaller KL penalty; then best-of-n."""
    trials = [
        Trial(f"kl-{coef:g}-seed-{seed}", seed, steps, {"kl_coef": coef})
        for seed in seeds
        for coef in COEFFICIENTS
    ]
    rows = run_trials(folder, trials, jobs, device)
    best = in_jobs(jobs, [partial(run_best_of, folder, seed, device) for seed in seeds])
    return rows + [row for several in best for row in several]


def controllers(
    folder: Path, seeds: Sequence[int], steps: int, jobs: int, device: str, only: Sequence[str] = ()
) -> list[Row]:
    trials = [
        Trial(f"{name}-seed-{seed}", seed, steps, {**CONSTANT, **ppo})
        for seed in seeds
        for name, ppo in CONTROLLERS.items()
        if not only or name in only
    ]
    return run_trials(folder, trials, jobs, device)


def rounds(folder: Path, seeds: Sequence[int], steps: int, jobs: int, device: str) -> list[Row]:
    calls = [partial(run_rounds, folder, name, seed, steps, device) for seed in seeds for name in ROUNDS]
    return in_jobs(jobs, calls)


def run_rounds(folder: Path, name: str, seed: int, steps: int, device: str) -> Row:
    run = f"{name}-seed-{seed}"
    done = folder / run / RESULTS_FILE
    if not done.exists():
        ppo = {**PPO_SETTINGS, **ROUNDS_SETTINGS}
        with _told_in(folder / f"{run}.log"):
            write_json(done, ROUNDS[name](folder / run, seed, steps, LABELS, ppo, device))
    return {"run": run, "ppo": json.loads(done.read_text(encoding="utf-8"))}


@contextlib.contextmanager
def _told_in(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield


def show(rows: Sequence[Row]) -> None:
    """One line per run, and the mean and worst gold over the seeds of each kind."""
    print(f"\n{'run':>24} {'gold':>6} {'score':>7} {'KL':>6} {'length':>7}   KL in the second half")
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        ppo, held = row["ppo"], row.get("kl_second_half")
        during = f"{held['mean']:.2f} ({held['low']:.2f} to {held['high']:.2f})" if held else ""
        print(
            f"{row['run']:>24} {ppo['gold']:>6.3f} {ppo['score']:>7.2f} {ppo['kl']:>6.2f} "
            f"{ppo['response_length']:>7.1f}   {during}"
        )
        kinds.setdefault(row["run"].rpartition("seed-")[0].rstrip("-") or "all", []).append(ppo)
    print(f"\n{'over seeds':>24} {'gold':>6} {'worst':>7} {'KL':>6}")
    for kind, several in kinds.items():
        golds = [ppo["gold"] for ppo in several]
        kl = statistics.fmean(ppo["kl"] for ppo in several)
        print(f"{kind:>24} {statistics.fmean(golds):>6.3f} {min(golds):>7.3f} {kl:>6.2f}")


EXPERIMENTS: dict[str, tuple[Callable[..., list[Row]], int]] = {
    "learn": (learn, 40),
    "frontier": (frontier, 26),
    "controllers": (controllers, 50),
    "rounds": (rounds, 40),
}
"""What it is called, the function, and PPO steps of a run."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    for name in EXPERIMENTS:
        which.add_argument(f"--{name}", dest="name", action="store_const", const=name, default="learn")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--only", nargs="+", choices=CONTROLLERS, help="of --controllers, these")
    parser.add_argument("--steps", type=int, default=0, help="PPO steps of a run; 0 = as usual")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    parser.add_argument("--folder", type=Path, default=Path("runs/learn"))
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    run, steps = EXPERIMENTS[given.name]
    more = {"only": given.only} if given.name == "controllers" and given.only else {}
    rows = run(given.folder, given.seeds, given.steps or steps, given.jobs, given.device, **more)
    path = given.folder / f"{given.name}.json"
    write_json(path, rows)
    show(json.loads(path.read_text(encoding="utf-8")))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
