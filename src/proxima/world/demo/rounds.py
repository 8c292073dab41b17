"""One round of labels or two, at the same number of labels. In: a seed. Out: the gold score after PPO.

One round: all labels are of pairs that the SFT model wrote. Two: half of them; then a reward model, PPO, and
the other half are of pairs that the PPO policy wrote on new posts, after which the reward model is trained
further on all of them, and PPO begins again from the SFT model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proxima.base_setup import EMBEDDED
from proxima.core.json_record import Record
from proxima.finetuning import Preference, read_preferences
from proxima.ppo_trainer import PPOTrainer
from proxima.world.build_embedded import sample_preferences
from proxima.world.demo.demo_pipeline import (
    EVALUATION_POSTS,
    fresh_folder,
    make_trainer,
    train_reward_model,
    training_prompts,
)
from proxima.world.demo.gold_judge import judge
from proxima.world.posts import make_posts

NEW_POSTS = 10  # added to a seed: posts that nothing else is trained on


def one_round(home: Path, seed: int, steps: int, labels: int, ppo: Record, device: str) -> Record:
    """Reward model and PPO on the first `labels` shipped pairs."""
    fresh_folder(home)
    shipped, held_out = _shipped()
    accuracy = train_reward_model(home, "reward", seed, shipped[:labels], held_out, device)["accuracy"]
    trainer = _train(home, "reward", "ppo", seed, steps, ppo, device)
    return {"seed": seed, "labels": labels, "accuracy": accuracy, **_measured(trainer, seed)}


def two_rounds(home: Path, seed: int, steps: int, labels: int, ppo: Record, device: str) -> Record:
    """Half of the labels, PPO, the other half on what its policy writes; reward model and PPO again."""
    fresh_folder(home)
    shipped, held_out = _shipped()
    old = shipped[: labels // 2]
    train_reward_model(home, "reward", seed, old, held_out, device)
    first = _train(home, "reward", "ppo", seed, steps, ppo, device)
    new = label_samples(first, labels - len(old), seed)
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


def label_samples(trainer: PPOTrainer, count: int, seed: int) -> list[Preference]:
    """So many pairs of the policy's samples on new posts, each with an annotator's choice."""
    found: list[Record] = []
    step = 1
    while len(found) < count:  # pairs of equal samples are left out
        posts = make_posts(count - len(found), "train", seed + NEW_POSTS + step)
        found += sample_preferences(trainer.generator, posts, seed + step, step)
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
