"""The demo: preferences, reward model, PPO, and an evaluation on held-out posts by the world's gold score.

The gold score labels the preferences (once, in the shipped file, or live with `relabel`) and judges here;
training never sees it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from proxima.base_setup import EMBEDDED
from proxima.config import PPOConfig, RewardConfig, RewardSpec
from proxima.core.json_record import Record
from proxima.evaluator import win_rate
from proxima.finetuning import Preference, RewardTrainer, read_preferences
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run, write_json
from proxima.world.build_embedded import sample_preferences
from proxima.world.demo.demo_report import write_report
from proxima.world.demo.gold_judge import Judgement, accuracy_by_gap, judge
from proxima.world.demo_settings import MAX_NEW_TOKENS, MISMATCH_COEF, PPO_SETTINGS, REWARD_SETTINGS, STEPS
from proxima.world.posts import Post, make_posts

EVALUATION_POSTS = 300
PREFERENCES = 3000
FEWEST_HELD_OUT = 100  # pairs that a reward model is measured on, however few it is trained on
SHOWN = 4  # posts whose summaries are printed
RESULTS_FILE = "results.json"
MARK = ".demo"
"""Empty file in a demo's folder: the next demo may take its place."""
CURVE = ("step", "avg_reward", "kl", "response_length")


def run_demo(
    seed: int = 0,
    steps: int = STEPS,
    relabel: bool = False,
    run_dir: str | Path = "runs",
    run_name: str = "demo",
    device: str = "auto",
    preferences: int = PREFERENCES,
    ppo: Record | None = None,
    reward_from: Path | None = None,
) -> Record:
    """Run the whole pipeline and print what happens; returns what is in results.json. The same arguments
    give the same bits, apart from `seconds`.

    Args:
        relabel: sample answers and ask the annotators again, instead of reading the shipped preferences.
        preferences: pairs to train the reward model on; no more are held out (`FEWEST_HELD_OUT` at least).
        ppo: changes to `PPO_SETTINGS`.
        reward_from: folder of an earlier demo whose reward model is reused.
    """
    times = [time.perf_counter()]
    home = fresh_folder(Path(run_dir) / run_name)
    if reward_from is None:
        reward_model = demo_reward_model(home, seed, device, relabel, preferences)
    else:
        reward_model = _read_results(reward_from)["reward_model"]
    times.append(time.perf_counter())
    print(f"\n3. PPO: {steps} steps; policy, reference, value and reward model share one base in memory")
    settings = {**PPO_SETTINGS, **(ppo or {})}
    trainer = make_trainer(home, (reward_from or home) / "reward", seed, device, settings)
    held_out = make_posts(EVALUATION_POSTS, "eval", seed + 2)
    before = judge(trainer, held_out)
    run = trainer.train(training_prompts(steps * trainer.config.batch_size, seed))
    times.append(time.perf_counter())
    print(f"\n4. Evaluation on {len(held_out)} held-out posts that combine facts in ways never trained on")
    after = judge(trainer, held_out)
    times.append(time.perf_counter())
    results = {
        "seed": seed,
        "reward_model": reward_model,
        **_compare(before, after, seed),
        "curve": [{name: metrics[name] for name in CURVE} for metrics in run.metrics],
        "settings": {"steps": steps, **settings},
        "seconds": _seconds(times),
    }
    _show(results, held_out[:SHOWN], before, after)
    write_json(home / RESULTS_FILE, results)
    report = write_report(home / "report.html", results, held_out, before, after, Run(run.run_folder))
    _show_files(home / RESULTS_FILE, run.run_folder / "policy", report)
    return results


def training_prompts(count: int, seed: int) -> list[str]:
    return [post.prompt for post in make_posts(count, "train", seed + 4)]


def _read_results(folder: Path) -> Record:
    return json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))


def _seconds(times: Sequence[float]) -> dict[str, float]:
    started, rewarded, trained, finished = times
    return {"reward_model": rewarded - started, "ppo": trained - rewarded, "all": finished - started}


def _compare(before: Judgement, after: Judgement, seed: int) -> Record:
    return {
        "sft": before.summary(),
        "ppo": after.summary(),
        "win_rate_by_gold": win_rate(after.gold, before.gold, seed),
        "win_rate_by_reward_model": win_rate(after.score, before.score, seed),
    }


def fresh_folder(home: Path) -> Path:
    """An empty folder in place of an earlier demo's; anything else is never removed."""
    is_demo = (home / RESULTS_FILE).exists() or (home / MARK).exists()
    if home.is_dir() and any(home.iterdir()) and not is_demo:
        raise ValueError(
            f"{home} holds something other than a demo, which would be deleted; choose another run_dir or "
            "move it away"
        )
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    (home / MARK).touch()
    return home


def make_trainer(
    home: Path, reward: Path, seed: int, device: str, settings: Record, name: str = "ppo"
) -> PPOTrainer:
    run: Record = {"run_dir": str(home), "run_name": name, "seed": seed, "device": device}
    return PPOTrainer(PPOConfig("embedded", rewards=(RewardSpec(str(reward)),), **run, **settings))


def demo_reward_model(
    home: Path, seed: int, device: str = "auto", relabel: bool = False, count: int = PREFERENCES
) -> Record:
    """Train it into `home/reward`; returns its accuracy, overall and by gap in gold score."""
    print("1. Preferences: which of two summaries do people prefer?")
    train, validation = _preferences(seed, relabel, count, device)
    _show_preference(train[0])
    print(f"\n2. Reward model: learns to score a summary from {len(train):,} preferences")
    return train_reward_model(home, "reward", seed, train, validation, device)


def train_reward_model(
    home: Path,
    name: str,
    seed: int,
    train: Sequence[Preference],
    validation: Sequence[Preference],
    device: str,
    start_from: Path | None = None,
) -> Record:
    """Train it into `home/name`; returns its accuracy, overall and by gap in gold score.

    Args:
        start_from: folder of a reward model whose training continues.
    """
    config = RewardConfig(
        "embedded",
        device=device,
        seed=seed,
        run_dir=str(home),
        run_name=name,
        mismatch_coef=MISMATCH_COEF,
        **REWARD_SETTINGS,
    )
    rewarder = RewardTrainer(config)
    if start_from is not None:
        rewarder.continued = start_from
    learned = rewarder.train(train, validation)
    by_gap = accuracy_by_gap(rewarder.held_out_margins.tolist(), validation)
    measured = {name: learned.best[name] for name in ("accuracy", "validation_loss", "calibration_error")}
    return {"preferences": len(train), "pairs": len(validation), **measured, "by_gold_gap": by_gap}


def _preferences(
    seed: int, relabel: bool, count: int, device: str
) -> tuple[Sequence[Preference], Sequence[Preference]]:
    """Training and held-out pairs: the shipped ones, or sampled from the model and labelled now."""
    held_out = max(count, FEWEST_HELD_OUT)
    if not relabel:
        train = read_preferences(EMBEDDED / "preferences_train.jsonl.gz")
        if count > len(train):
            raise ValueError(
                f"preferences ({count}) is more than the {len(train)} that ship; --relabel samples new ones"
            )
        return train[:count], read_preferences(EMBEDDED / "preferences_eval.jsonl.gz")[:held_out]
    from proxima.base_setup import BaseSetup
    from proxima.ppo_trainer import SequenceGenerator

    config = PPOConfig(
        "embedded", max_new_tokens=MAX_NEW_TOKENS, top_k=0, top_p=1.0, device=device, seed=seed
    )
    setup = BaseSetup(config)
    generator = SequenceGenerator(setup.models, setup.tokenizer, config)
    labelled = sample_preferences(generator, make_posts(count, "train", seed + 1), seed, 1)
    others = sample_preferences(generator, make_posts(min(held_out, 500), "eval", seed + 1), seed, 2)
    return [Preference(**row) for row in labelled], [Preference(**row) for row in others]


def _show_preference(item: Preference) -> None:
    print(f"   {item.prompt.splitlines()[2]}\n   chosen:   {item.chosen}\n   rejected: {item.rejected}")


def _show(results: Record, posts: Sequence[Post], before: Judgement, after: Judgement) -> None:
    """The first summaries, before and after, each with its gold score; then the table."""
    sides = zip(before.gold, before.texts, after.gold, after.texts, strict=True)
    for post, (old_gold, old, new_gold, new) in zip(posts, sides, strict=False):
        print(f"\n   {post.prompt.splitlines()[2]}")
        print(f"   SFT {old_gold:.2f}: {old}")
        print(f"   PPO {new_gold:.2f}: {new}")
    _show_numbers(results)


def _show_files(results: Path, adapter: Path, report: Path) -> None:
    print(f"\nresults: {results}   trained adapter: {adapter}")
    print(f"report, to open in a browser: {report.resolve()}")


def _show_numbers(results: Record) -> None:
    print(f"\n   {'':24}{'SFT':>10}{'PPO':>10}")
    for label, name in Judgement.ROWS.items():
        print(f"   {label:24}{results['sft'][name]:>10.3f}{results['ppo'][name]:>10.3f}")
    for label, judge_name in (
        ("win rate by gold score", "gold"),
        ("win rate by reward model", "reward_model"),
    ):
        rate = results[f"win_rate_by_{judge_name}"]
        print(f"   {label:24}{'':>10}{rate['rate']:>10.3f}   (95 %: {rate['low']:.3f} to {rate['high']:.3f})")
    seconds = results["seconds"]
    print(
        f"   {seconds['all']:.0f} s in total: reward model {seconds['reward_model']:.0f} s, PPO "
        f"{seconds['ppo']:.0f} s"
    )
