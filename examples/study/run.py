# python -m examples.study.run --seeds 0 --methods ppo_2022 rloo --steps 1 --preferences 32
"""Methods compared on the embedded world, or on examples/instructions. In: methods and seeds. Out: a
Markdown table, a chart (`study.svg`: quality against KL), and runs that `proxima compare` draws.

    python -m examples.study.run --jobs 15                                      all methods, five seeds
    python -m examples.study.run --task instructions --seeds 0 1 2              SmolLM2, on a GPU
    proxima compare runs/study/seed-*/ppo_2022 runs/study/seed-*/preset_stable

Every seed has a reward model of its own, trained from preferences; no method sees the gold score, which
judges the trained policies. The instructions have a function as their reward, and what is judged is the
share of held-out answers that follow all that was asked. Runs are processes of one thread, `--jobs` at a
time. Started again, the study skips what is finished and resumes the rest.
"""

import argparse
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from examples.study import on_instructions
from examples.study.chart import JUDGED, measured, write_chart
from examples.study.methods import METHODS, VARIANTS, settings_of
from proxima import PPOConfig, PPOTrainer, Run
from proxima.pages.comparison.seed_groups import t_interval
from proxima.runs import write_json
from proxima.world.demo.demo_pipeline import demo_reward_model
from proxima.world.demo.gold_judge import judge
from proxima.world.posts import make_posts

HELD_OUT, VALIDATION = 300, 100
QUALITY = {"embedded": "gold score", "instructions": "success"}  # by task, what policies are judged by
STEPS = {"embedded": 40, "instructions": on_instructions.STEPS}


def train_rewards(home: Path, seed: int, preferences: int) -> None:
    """A reward model in `home/reward`, in place of one that was not finished."""
    shutil.rmtree(home / "reward", ignore_errors=True)
    write_json(home / "reward.json", demo_reward_model(home, seed, "cpu", count=preferences))


def train_method(home: Path, seed: int, method: str, steps: int) -> None:
    """One run in `home/METHOD`, judged by the gold score at its end."""
    os.chdir(
        home
    )  # the same settings for every seed, so that `proxima compare` knows them for one experiment
    config = PPOConfig(
        "embedded", rewards=("./reward",), device="cpu", run_dir=".", run_name=method, seed=seed,
        **settings_of(method),
    )  # fmt: skip
    trainer = PPOTrainer(config)
    prompts = [post.prompt for post in make_posts(steps * config.batch_size, "train", seed + 4)]
    posts = make_posts(HELD_OUT + VALIDATION, "eval", seed + 2)
    results = trainer.train(
        prompts, validation_prompts=[post.prompt for post in posts[HELD_OUT:]], resume=True
    )
    seconds = sum(filter(math.isfinite, Run(results.run_folder).metrics()["seconds"]))
    judged = judge(trainer, posts[:HELD_OUT]).summary()
    write_json(results.run_folder / JUDGED, {**judged, "seconds": seconds})


def run_all(given: argparse.Namespace) -> None:
    """All jobs that are not finished, reward models first; what failed is said at the end."""
    given.folder.mkdir(parents=True, exist_ok=True)
    trained = given.seeds if given.task == "embedded" else ()
    if given.task == "instructions":
        on_instructions.write_prompts(given.folder)
    with ThreadPoolExecutor(given.jobs) as pool:
        rewards = {seed: pool.submit(run_job, given, seed, "", None) for seed in trained}
        runs = [
            pool.submit(run_job, given, seed, method, rewards.get(seed))
            for method in given.methods
            for seed in given.seeds
        ]
        failed = [name for job in (*rewards.values(), *runs) if (name := job.result())]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; the log of each is NAME.log in {given.folder}")


def run_job(given: argparse.Namespace, seed: int, method: str, first: Future[str] | None) -> str:
    """One job in a process of its own; its name where it failed.

    Args:
        method: empty for the reward model.
        first: the job that it needs.
    """
    home = given.folder / f"seed-{seed}"
    name = f"seed-{seed}/{method or 'reward'}"
    finished = home / method / JUDGED if method else home / "reward.json"
    if finished.exists():
        return ""
    if first is not None and first.result():
        return name
    home.mkdir(exist_ok=True)
    sizes = ["--steps", str(given.steps), "--preferences", str(given.preferences)]
    sizes += ["--task", given.task, "--model-name", given.model_name]
    command = [sys.executable, "-m", "examples.study.run", "--folder", str(given.folder), *sizes]
    command += ["--seeds", str(seed), "--one", method or "reward"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(home / f"{method or 'reward'}.log", "w", encoding="utf-8") as log:
        code = subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    print(f"{'failed' if code else 'done'}: {name}", flush=True)
    return name if code else ""


def table(folder: Path, methods: Sequence[str], seeds: Sequence[int], quality: str = "gold score") -> str:
    """Means over seeds with 95 % intervals (Student's t), in Markdown."""
    rows = [
        f"| method | seeds | {quality} | worst seed | KL (nats) | {quality} per nat | response length | "
        "seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, gold, kl, seconds, length in measured(folder, methods, seeds):
        per_nat = f"{fmean(gold) / fmean(kl):.2f}" if fmean(kl) > 0 else ""  # it may not have moved at all
        rows.append(
            f"| `{method}` | {len(gold)} | {shown(gold)} | {min(gold):.3f} | {shown(kl, 2)} | "
            f"{per_nat} | {fmean(length):.1f} | {fmean(seconds):.0f} |"
        )
    return "\n".join(rows)


def shown(values: Sequence[float], digits: int = 3) -> str:
    mean, low, high = t_interval(values)
    interval = "" if math.isnan(low) else f" ({low:.{digits}f} to {high:.{digits}f})"
    return f"{mean:.{digits}f}{interval}"


def run_one(given: argparse.Namespace) -> None:
    """One job, in the process of its own."""
    seed = given.seeds[0]
    home = given.folder / f"seed-{seed}"
    if given.one == "reward":
        train_rewards(home, seed, given.preferences)
    elif given.task == "embedded":
        train_method(home, seed, given.one, given.steps)
    else:
        run, judged = on_instructions.train_and_judge(home, seed, given.one, given.steps, given.model_name)
        write_json(run / JUDGED, judged)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare methods over several seeds.")
    parser.add_argument("--task", choices=QUALITY, default="embedded")
    parser.add_argument("--model-name", default="smollm2", help="of the instructions")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], help="of examples/study/methods.py")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, help=f"PPO steps of a run; by default {STEPS}")
    parser.add_argument("--preferences", type=int, default=3000, help="pairs for each reward model")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, one thread each")
    parser.add_argument("--folder", type=Path, help="by default runs/study, or runs/study-instructions")
    parser.add_argument("--table", action="store_true", help="run nothing: the table of what is finished")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # a job of this study
    given = parser.parse_args(arguments)
    usual = Path("runs/study" if given.task == "embedded" else "runs/study-instructions")
    given.folder = (given.folder or usual).resolve()
    given.steps = given.steps or STEPS[given.task]
    if Path(given.model_name).exists():  # a run looks for it from its own folder
        given.model_name = str(Path(given.model_name).resolve())
    if strange := set(given.methods) - {*METHODS, *VARIANTS}:
        parser.error(f"unknown method {min(strange)}; python -m examples.study.methods lists them")
    if given.task == "instructions" and "value_from_reward" in given.methods:
        parser.error("value_from_reward needs a reward model, and the instructions have none; leave it out")
    if given.one:
        run_one(given)
    else:
        if not given.table:
            run_all(given)
        elif not given.folder.is_dir():
            parser.error(f"there is no study in {given.folder}; leave out --table to run one")
        text = table(given.folder, given.methods, given.seeds, QUALITY[given.task])
        (given.folder / "study.md").write_text(text + "\n", encoding="utf-8")
        print(text)
        if measured(given.folder, given.methods, given.seeds):
            chart = write_chart(given.folder, given.methods, given.seeds, QUALITY[given.task])
            print(f"\nchart: {chart}")


if __name__ == "__main__":
    main()
