"""The best of several samples per prompt, by the rewards. In: prompts. Out: a text and its score each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxima.config import PPOConfig
from proxima.core.errors import RewardFailure
from proxima.core.json_record import Record, within
from proxima.core.tokenizer import Tokenizer
from proxima.ppo_trainer.generator import SequenceGenerator
from proxima.ppo_trainer.reward_computer import RewardComputer

if TYPE_CHECKING:
    from proxima.base_setup import ModelSet

ROWS = 256  # sampled at once


def best_samples(
    models: ModelSet,
    tokenizer: Tokenizer,
    config: PPOConfig,
    prompts: Sequence[str],
    count: int,
    run: Record | None = None,
) -> list[tuple[str, float]]:
    """Of `count` samples of the policy per prompt, the text that scores highest (the first of equals) and its
    score. Samples whose reward failed are left out; a RewardFailure where all of a prompt did.

    Args:
        run: results of the run that the policy is from: rewards of its names are in the units that it
            measured, and texts end as they did in it.
    """
    generator = SequenceGenerator(models, tokenizer, config)
    rewards = RewardComputer(models, tokenizer, config)
    rewards.restore_units(within(run, "units"))
    rewards.restore_endings(within(within(run, "endings"), "rewards"))
    found: list[tuple[str, float]] = []
    seen: dict[bytes, int] = {}  # equal prompts get other noise, in whatever part they are
    part = max(1, ROWS // count)
    for start in range(0, len(prompts), part):
        repeated = [prompt for prompt in prompts[start : start + part] for _ in range(count)]
        tokens = generator.sample_groups(generator.read_prompts(repeated, seen), count)
        rows = list(zip(tokens.texts(), rewards.score_tokens(tokens).total.tolist(), strict=True))
        for own in range(0, len(rows), count):
            known = [row for row in rows[own : own + count] if not math.isnan(row[1])]
            if not known:
                raise RewardFailure(
                    f"all {count} rewards of prompt {len(found) + 1} failed; the last reason: "
                    f"{rewards.last_failure}"
                )
            found.append(max(known, key=lambda row: row[1]))
    return found
