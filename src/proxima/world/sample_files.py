"""`proxima data sample`: files to try every command on. In: a folder. Out: one file per kind of data, from
the embedded world, and the demo's settings as YAML; the same bytes every time."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path

import yaml

from proxima.core.json_record import RecordView
from proxima.world.demo_settings import PPO_SETTINGS, REWARD_SETTINGS, STEPS
from proxima.world.demonstrations import write_summary
from proxima.world.gold import gold_score
from proxima.world.posts import make_posts

SHIPPED = Path(__file__).parent / "embedded" / "preferences_train.jsonl.gz"
SEED = 100  # not the posts that the demo trains on and is judged by
DEMONSTRATIONS = 500
HELD_OUT = 100
EVAL_EVERY = 5  # steps; the demo evaluates only at the end


def write_samples(folder: Path) -> dict[str, str]:
    """Write the files; returns file name -> what it is."""
    folder.mkdir(parents=True, exist_ok=True)
    posts = make_posts(DEMONSTRATIONS, "train", SEED)
    writer = random.Random(f"demonstrations {SEED}")
    prompts = [
        {"prompt": post.prompt} for post in make_posts(STEPS * PPO_SETTINGS["batch_size"], "train", SEED + 1)
    ]
    held_out = [{"prompt": post.prompt} for post in make_posts(HELD_OUT, "eval", SEED)]
    shown = [{"prompt": post.prompt, "completion": write_summary(post, writer)} for post in posts]
    rng = random.Random(f"ratings {SEED}")
    rated = [
        {
            **row,
            "rating": min(5, max(1, round(1 + 4 * gold_score(post, row["completion"]) + rng.gauss(0, 0.4)))),
        }
        for post, row in zip(posts, shown, strict=True)
    ]
    _lines(folder / "prompts.jsonl", prompts)
    _lines(folder / "held_out.jsonl", held_out)
    _lines(folder / "demonstrations.jsonl", shown)
    _lines(folder / "ratings.jsonl", rated)
    with gzip.open(SHIPPED, "rb") as shipped:
        (folder / "preferences.jsonl").write_bytes(shipped.read())
    _settings(folder / "reward.yaml", "proxima sft, proxima reward", REWARD_SETTINGS)
    _settings(folder / "ppo.yaml", "proxima train", {**PPO_SETTINGS, "eval_every": EVAL_EVERY})
    return {
        "prompts.jsonl": f"{len(prompts)} posts to summarise, for train",
        "held_out.jsonl": f"{HELD_OUT} posts that combine facts in new ways, for eval",
        "demonstrations.jsonl": f"{DEMONSTRATIONS} posts with a summary, for sft",
        "preferences.jsonl": "which of two summaries people prefer, for reward",
        "ratings.jsonl": "the demonstrations rated from 1 to 5, for reward",
        "reward.yaml": "settings for sft and reward on the embedded model",
        "ppo.yaml": "settings for train on the embedded model",
    }


def _lines(path: Path, rows: Iterable[RecordView]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _settings(path: Path, commands: str, values: RecordView) -> None:
    """The settings as YAML, for a newcomer to change."""
    head = f"# for {commands} on the model that ships; a model of another size needs other learning rates\n"
    path.write_text(
        head + yaml.safe_dump({"model_name": "embedded", **values}, sort_keys=False), encoding="utf-8"
    )
