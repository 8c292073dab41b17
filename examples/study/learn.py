# python -m examples.study.learn
# not run: an hour on two cores
"""The long experiments. In: seeds. Out: a table, and NAME.json in runs/learn. Runs that are there are kept.

python -m examples.study.learn                each seed its own reward model, PPO to convergence
python -m examples.study.learn --frontier     KL coefficients 0 to 0.3 and best-of-n: scores against KL
python -m examples.study.learn --controllers  fixed and adaptive KL coefficients, and KL budgets
python -m examples.study.learn --rounds       labels in one round, or in two, the second on PPO's samples
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import shutil
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import proxima  # noqa: F401 - before torch: it says how waiting threads wait

# isort: split
import torch

from proxima.base_setup import EMBEDDED
from proxima.core.json_record import Record
from proxima.finetuning import Preference, read_preferences
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run, write_json
from proxima.world.build_embedded import sample_preferences
from proxima.world.demo.demo_pipeline import (
    EVALUATION_POSTS,
    RESULTS_FILE,
    demo_reward_model,
    fresh_folder,
    make_trainer,
    run_demo,
    train_reward_model,
    training_prompts,
)
from proxima.world.demo.gold_judge import judge, judge_best_of
from proxima.world.demo_settings import PPO_SETTINGS
from proxima.world.posts import make_posts

Row = Record
Result = TypeVar("Result")

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
LABELS = 3000
NEW_POSTS = 10  # added to a seed: posts that nothing else is trained on
ROUNDS_TARGET = 3.0  # nats of each round


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


def one_round(home: Path, seed: int, steps: int, labels: int, ppo: Record, device: str) -> Record:
    """Reward model and PPO on the first `labels` shipped pairs."""
    fresh_folder(home)
    shipped, held_out = _shipped()
    accuracy = train_reward_model(home, "reward", seed, shipped[:labels], held_out, device)["accuracy"]
    trainer = _train(home, "reward", "ppo", seed, steps, ppo, device)
    return {"seed": seed, "labels": labels, "accuracy": accuracy, **_measured(trainer, seed)}


def two_rounds(
    home: Path, seed: int, steps: int, labels: int, ppo: Record, device: str, against_reference: bool = False
) -> Record:
    """Half of the labels, PPO, the other half on what its policy writes; reward model and PPO again."""
    fresh_folder(home)
    shipped, held_out = _shipped()
    old = shipped[: labels // 2]
    train_reward_model(home, "reward", seed, old, held_out, device)
    first = _train(home, "reward", "ppo", seed, steps, ppo, device)
    new = label_samples(first, labels - len(old), seed, against_reference)
    accuracy = train_reward_model(
        home, "reward-2", seed, [*old, *new], held_out, device, start_from=home / "reward"
    )["accuracy"]
    second = _train(home, "reward-2", "ppo-2", seed, steps, ppo, device)
    before = _measured(first, seed)
    return {
        "seed": seed,
        "labels": len(old) + len(new),
        "accuracy": accuracy,
        "gold_after_round_one": before["gold"],
        **_measured(second, seed),
    }


def label_samples(
    trainer: PPOTrainer, count: int, seed: int, against_reference: bool = False
) -> list[Preference]:
    """This many pairs of the policy's samples on new posts, each with an annotator's choice.

    Args:
        against_reference: pairs of a sample of the policy and one of the reference.
    """
    found: list[Record] = []
    step = 1
    while len(found) < count:  # pairs of equal samples are left out
        posts = make_posts(count - len(found), "train", seed + NEW_POSTS + step)
        found += sample_preferences(trainer.generator, posts, seed + step, step, against_reference)
        step += 1
    return [Preference(**row) for row in found]


def _shipped() -> tuple[Sequence[Preference], Sequence[Preference]]:
    names = ("preferences_train.jsonl.gz", "preferences_eval.jsonl.gz")
    train, held_out = (read_preferences(EMBEDDED / name) for name in names)
    return train, held_out


def _train(home: Path, reward: str, name: str, seed: int, steps: int, ppo: Record, device: str) -> PPOTrainer:
    trainer = make_trainer(home, home / reward, seed, device, ppo, name)
    trainer.train(training_prompts(steps * trainer.config.batch_size, seed))
    return trainer


def _measured(trainer: PPOTrainer, seed: int) -> dict[str, float]:
    return judge(trainer, make_posts(EVALUATION_POSTS, "eval", seed + 2)).summary()


ROUNDS: dict[str, Callable[..., Record]] = {
    "one-round": one_round,
    "two-rounds": two_rounds,
    "two-rounds-against-reference": partial(two_rounds, against_reference=True),
}


def rounds(
    folder: Path,
    seeds: Sequence[int],
    steps: int,
    jobs: int,
    device: str,
    labels: int = LABELS,
    target: float = ROUNDS_TARGET,
    only: Sequence[str] = (),
) -> list[Row]:
    calls = [
        partial(run_rounds, folder, name, seed, steps, labels, target, device)
        for seed in seeds
        for name in only or ROUNDS
    ]
    return in_jobs(jobs, calls)


def run_rounds(
    folder: Path, name: str, seed: int, steps: int, labels: int, target: float, device: str
) -> Row:
    run = f"{name}-of-{labels}-to-{target:g}-nats-seed-{seed}"
    done = folder / run / RESULTS_FILE
    if not done.exists():
        ppo = {**PPO_SETTINGS, "kl_controller": "budget", "kl_target": target}
        with _told_in(folder / f"{run}.log"):
            write_json(done, ROUNDS[name](folder / run, seed, steps, labels, ppo, device))
    return {"run": run, "ppo": json.loads(done.read_text(encoding="utf-8"))}


def in_jobs(jobs: int, calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of these calls, in order; several at a time, each in a process with one thread."""
    if jobs == 1:
        return [call() for call in calls]
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawned, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


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
    parser.add_argument(
        "--only", nargs="+", choices=[*CONTROLLERS, *ROUNDS], help="of --controllers or --rounds, these"
    )
    parser.add_argument("--labels", type=int, default=LABELS, help="of --rounds, in all rounds together")
    parser.add_argument("--target", type=float, default=ROUNDS_TARGET, help="of --rounds, nats of each")
    parser.add_argument("--steps", type=int, default=0, help="PPO steps of a run; 0 = as usual")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each on one thread")
    parser.add_argument("--folder", type=Path, default=Path("runs/learn"))
    parser.add_argument("--device", default="auto")
    given = parser.parse_args(arguments)
    run, steps = EXPERIMENTS[given.name]
    own: dict[str, Record] = {
        "rounds": {"labels": given.labels, "target": given.target, "only": given.only or ()},
        "controllers": {"only": given.only or ()},
    }
    more = own.get(given.name, {})
    rows = run(given.folder, given.seeds, given.steps or steps, given.jobs, given.device, **more)
    path = given.folder / f"{given.name}.json"
    write_json(path, rows)
    show(json.loads(path.read_text(encoding="utf-8")))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
