"""The demo: preferences -> reward model -> PPO -> evaluation on held-out posts, judged by the world's gold
score.

The gold score labels preferences (once, in the shipped file, or live with `relabel`) and judges here;
training never sees it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proxima.base_setup.loading import EMBEDDED
from proxima.config import FinetuningConfig, PPOConfig, RewardSpec
from proxima.evaluator import win_rate
from proxima.finetuning import Preference, RewardTrainer, read_preferences
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run
from proxima.runs.run_files import write_json
from proxima.world.build_embedded import demonstrations, sample_preferences
from proxima.world.demo.demo_report import write_report
from proxima.world.demo.gold_judge import Judgement, accuracy_by_gap, judge
from proxima.world.demo_settings import MAX_NEW_TOKENS, PPO_SETTINGS, REWARD_SETTINGS, STEPS
from proxima.world.posts import Post, make_posts

EVALUATION_POSTS = 300
PREFERENCES = 3000


def run_demo(
    seed: int = 0,
    steps: int = STEPS,
    relabel: bool = False,
    run_dir: str | Path = "runs",
    run_name: str = "demo",
    device: str = "auto",
    preferences: int = PREFERENCES,
    ppo: dict[str, Any] | None = None,
    reward_from: Path | None = None,
) -> dict[str, Any]:
    """Walk the whole loop and say what happened.

    Args:
        steps: PPO steps.
        relabel: sample answers and ask the annotators anew instead of reading the shipped preferences.
        preferences: pairs to train the reward model on.
        ppo: changes to `PPO_SETTINGS`.
        reward_from: folder of an earlier demo whose reward model is used again.
    Returns: what is in results.json; everything but `seconds` follows from the arguments, bit for bit.
    """
    started = time.perf_counter()
    home = Path(run_dir) / run_name
    if (
        home.is_dir()
        and any(home.iterdir())
        and not any((home / part).exists() for part in ("results.json", "reward"))
    ):
        raise ValueError(
            f"{home} holds something else than a demo, which would go; choose another run_dir or move it away"
        )
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    if reward_from is None:
        reward_model = _train_reward_model(home, seed, relabel, preferences, device)
    else:
        reward_model = json.loads((reward_from / "results.json").read_text(encoding="utf-8"))["reward_model"]
    rewarded = time.perf_counter()

    print(f"\n3. PPO: {steps} steps; policy, reference, value and reward model share one base in memory")
    settings = {**PPO_SETTINGS, **(ppo or {})}
    rewards = (RewardSpec(str((reward_from or home) / "reward")),)
    config = PPOConfig(
        "embedded", rewards=rewards, device=device, seed=seed, run_dir=str(home), run_name="ppo", **settings
    )
    trainer = PPOTrainer(config)
    held_out = make_posts(EVALUATION_POSTS, "eval", seed + 2)
    before = judge(trainer, held_out)
    run = trainer.train([post.prompt for post in make_posts(steps * config.batch_size, "train", seed + 4)])
    trained = time.perf_counter()

    print(f"\n4. Evaluation on {len(held_out)} held-out posts, with combinations never seen in training")
    after = judge(trainer, held_out)
    results = {
        "seed": seed,
        "reward_model": reward_model,
        "sft": before.summary(),
        "ppo": after.summary(),
        "win_rate_by_gold": win_rate(after.gold, before.gold, seed),
        "win_rate_by_reward_model": win_rate(after.score, before.score, seed),
        "curve": [
            {name: metrics[name] for name in ("step", "avg_reward", "kl", "response_length")}
            for metrics in run.metrics
        ],
        "settings": {"steps": steps, **settings},
        "seconds": {
            "reward_model": rewarded - started,
            "ppo": trained - rewarded,
            "all": time.perf_counter() - started,
        },
    }
    write_json(home / "results.json", results)
    examples = list(zip(held_out[:4], before.texts, before.gold, after.texts, after.gold, strict=False))
    report = write_report(home / "report.html", results, held_out, before, after, Run(run.run_folder))
    _show(results, examples)
    print(f"\nresults: {home / 'results.json'}   trained adapter: {run.run_folder / 'policy'}")
    print(f"report, to open in a browser: {report.resolve()}")
    return results


def _train_reward_model(home: Path, seed: int, relabel: bool, count: int, device: str) -> dict[str, Any]:
    """Into `home/reward`; how good it is, by the people's own held-out choices and by gold gap."""
    print("1. Preferences: which of two summaries do people like better?")
    train, validation = _preferences(seed, relabel, count, device)
    _show_preference(train[0])
    print(f"\n2. Reward model: learns from {len(train)} preferences to score a summary")
    stage = FinetuningConfig(
        "embedded", device=device, seed=seed, run_dir=str(home), run_name="reward", **REWARD_SETTINGS
    )
    rewarder = RewardTrainer(stage, centre_on=demonstrations(make_posts(200, "train", seed + 3), seed))
    learned = rewarder.train(train, validation)
    by_gap = accuracy_by_gap(rewarder, validation)
    measured = {name: learned.best[name] for name in ("accuracy", "validation_loss", "calibration_error")}
    return {"preferences": len(train), "pairs": len(validation), **measured, "by_gold_gap": by_gap}


def _preferences(
    seed: int, relabel: bool, count: int, device: str
) -> tuple[Sequence[Preference], Sequence[Preference]]:
    """Training and held-out pairs: the shipped ones, or sampled from the model and labelled now."""
    if not relabel:
        shipped = [
            read_preferences(EMBEDDED / f"preferences_{split}.jsonl.gz") for split in ("train", "eval")
        ]
        if count > len(shipped[0]):
            raise ValueError(
                f"preferences ({count}) is more than the {len(shipped[0])} that ship; --relabel samples new "
                "ones"
            )
        return shipped[0][:count], shipped[1]
    from proxima.base_setup import BaseSetup
    from proxima.ppo_trainer import SequenceGenerator

    config = PPOConfig(
        "embedded", max_new_tokens=MAX_NEW_TOKENS, top_k=0, top_p=1.0, device=device, seed=seed
    )
    setup = BaseSetup(config)
    generator = SequenceGenerator(setup.models, setup.tokenizer, config)
    posts: list[tuple[list[Post], int]] = [
        (make_posts(count, "train", seed + 1), 1),
        (make_posts(500, "eval", seed + 1), 2),
    ]
    rows = [sample_preferences(generator, group, seed, step) for group, step in posts]
    return [Preference(**row) for row in rows[0]], [Preference(**row) for row in rows[1]]


def _show_preference(item: Preference) -> None:
    print(f"   {item.prompt.splitlines()[2]}\n   better: {item.chosen}\n   worse:  {item.rejected}")


def _show(results: dict[str, Any], examples: list[tuple[Post, str, float, str, float]]) -> None:
    """Summaries side by side, then the table."""
    for post, old, old_gold, new, new_gold in examples:
        print(
            f"\n   {post.prompt.splitlines()[2]}\n   SFT {old_gold:.2f}: {old}\n   PPO {new_gold:.2f}: {new}"
        )
    print(f"\n   {'':24}{'SFT':>10}{'PPO':>10}")
    for label, name in Judgement.ROWS.items():
        print(f"   {label:24}{results['sft'][name]:>10.3f}{results['ppo'][name]:>10.3f}")
    for judge_name in ("gold", "reward_model"):
        rate = results[f"win_rate_by_{judge_name}"]
        label = f"win rate by {judge_name.replace('_', ' ')}"
        print(f"   {label:24}{'':>10}{rate['rate']:>10.3f}   (95 %: {rate['low']:.3f} to {rate['high']:.3f})")
    seconds = results["seconds"]
    print(f"   {seconds['all']:.0f} s: reward model {seconds['reward_model']:.0f}, PPO {seconds['ppo']:.0f}")
