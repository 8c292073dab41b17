"""Opens reward sources: from a `RewardSpec` to what turns `Samples` into a `RewardOutcome`.

A new kind of reward is one file with a class like `RewardSource`, and one branch in `_open_without_model`
(or, where it holds a model, in `open_reward`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from proxima.base_setup import MicroBatches, has_head
from proxima.config import GYM_PREFIX, PPOConfig, RewardSpec
from proxima.core.tokenizer import Tokenizer
from proxima.models import RewardModel
from proxima.rewards.chat_reward import open_endpoint
from proxima.rewards.function_reward import FunctionReward, load_function
from proxima.rewards.model_reward import ClassifierSource, TrainedReward
from proxima.rewards.ready_made_rewards import READY_MADE
from proxima.rewards.reward_options import check_options, keyword_options, require_options
from proxima.rewards.reward_outcome import RewardOutcome
from proxima.rewards.reward_samples import Samples
from proxima.rewards.verifiers import VERIFIERS, open_verifier
from proxima.rewards.worker_reward import open_function

NAMES = (*READY_MADE, *VERIFIERS, f"{GYM_PREFIX}NAME")


class RewardSource(Protocol):
    """The interface of every kind of reward."""

    attempts: int
    """How often a call is attempted before its samples count as failed."""
    lacks_unit: bool
    """Whether it is a model whose scores have an arbitrary scale."""

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """Raise a ValueError where the prompts lack what the reward reads; it counts them from `first`."""

    def __call__(self, samples: Samples) -> RewardOutcome: ...


def is_ready_made(spec: RewardSpec) -> bool:
    """Whether it is chosen by its name alone: no model, function or server of the user's."""
    source = str(spec.source)
    return source in READY_MADE or source in VERIFIERS or source.startswith(GYM_PREFIX)


def check_rewards(config: PPOConfig) -> None:
    """Raise a ValueError for anything wrong with the rewards that can be found without loading a model."""
    for spec in config.rewards:
        if _open_without_model(spec, bool(config.environment)) is None:
            kind = TrainedReward if has_head(str(spec.source)) else ClassifierSource
            check_options(spec, keyword_options(kind))


def open_reward(
    spec: RewardSpec,
    model: RewardModel,
    tokenizer: Tokenizer,
    config: PPOConfig,
    micro_batches: MicroBatches | None = None,
) -> RewardSource:
    """
    Args:
        model: the trained reward model, for the spec that names its folder; other models share its device.
    """
    if spec.source == model.source:
        options = check_options(spec, keyword_options(TrainedReward))
        return TrainedReward(
            model, tokenizer, micro_batches or MicroBatches.of(config, config.minibatch_size), **options
        )
    if light := _open_without_model(spec, bool(config.environment)):
        return light
    options = check_options(spec, keyword_options(ClassifierSource))
    return ClassifierSource(str(spec.source), config, model.device, tokenizer, **options)


def _open_without_model(spec: RewardSpec, has_environment: bool) -> RewardSource | None:
    """The source where it holds no model; None for a reward model."""
    if spec.is_http:
        return open_endpoint(spec)
    if spec.is_function:
        function = spec.source if callable(spec.source) else load_function(spec.source)
        return open_function(spec, function, has_environment)
    source = str(spec.source)
    if has_head(source):
        return None
    if maker := READY_MADE.get(source):
        require_options(spec, maker)
        function = maker(**check_options(spec, keyword_options(maker)))
        return FunctionReward(RewardSpec(function, name=spec.label), function)
    if verifier := open_verifier(spec):
        return verifier
    if Path(source).is_file():
        raise ValueError(
            f"the reward {source!r} is a file; a function in it is MODULE:FUNCTION, a model is a folder"
        )
    if "/" not in source and not Path(source).exists():
        raise ValueError(
            f"unknown reward {source!r}: no folder here, and no ready-made reward ({', '.join(NAMES)}); "
            "give one of these, module:function, a URL, a folder or a Hub id (ORGANISATION/NAME)"
        )
    return None
