"""Pairs that are worth a label. In: pairs, and a reward model. Out: those on which it is least sure.

Its heads doubt their order most; with one head, its scores are closest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from proxima.base_setup import MicroBatches, load_network, load_reward, load_tokenizer, pick_device
from proxima.config import PPOConfig, RewardSpec, saved_settings, settings_in
from proxima.models import Backbone, least_sure
from proxima.pages.label.label_store import Item
from proxima.rewards import Samples, TrainedReward

POOL = 5
"""Pairs that are sampled for each one that is kept."""


def load_trained_reward(folder: str, device: str = "auto", trust_remote_code: bool = False) -> TrainedReward:
    """A reward model by the folder that `proxima reward` wrote, on its own base."""
    settings = settings_in(Path(folder))
    if settings is None or not (Path(folder) / "reward.json").is_file():
        raise ValueError(f"--least-sure {folder}: not a folder that `proxima reward` wrote")
    saved = saved_settings(settings)
    config = PPOConfig(
        model_name=saved.model_name,
        quantize=saved.quantize,
        rewards=(RewardSpec(folder),),
        device=device,
        trust_remote_code=trust_remote_code,
    )
    network = load_network(config, config.model_name, pick_device(device))
    tokenizer = load_tokenizer(config.model_name, trust_remote_code)
    return TrainedReward(
        load_reward(config, Backbone(network)), tokenizer, MicroBatches.of(config, config.minibatch_size)
    )


def keep_least_sure(items: Sequence[Item], reward: TrainedReward, count: int) -> list[Item]:
    """At most `count` of these pairs, in their order."""
    if not items:
        return []
    sides = [
        reward.members(replace(Samples.of_texts(prompts, texts, reward.tokenizer), ended=ended))
        for prompts, texts, ended in (
            ([item.prompt for item in items], [item.a for item in items], [item.a_ended for item in items]),
            (
                [item.prompt for item in items],
                [item.b or "" for item in items],
                [bool(item.b_ended) for item in items],
            ),
        )
    ]
    doubts: list[float] = least_sure(*sides).tolist()
    places = sorted(range(len(items)), key=lambda place: -doubts[place])[:count]
    return [items[place] for place in sorted(places)]
