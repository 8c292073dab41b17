"""A reward function that reads its episodes' environments, as TRL's do: `f(environments, **kwargs)`.

An environment lives until its episode ends, often in a process of its own. What the function gets of it are
the public attributes that it ended with, to be read only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NoReturn

import torch

from proxima.config import RewardSpec
from proxima.core.episode import Episode
from proxima.core.json_record import Record
from proxima.rewards.function_reward import (
    ENVIRONMENTS,
    OWN,
    TURNS,
    FunctionReward,
    load_function,
    parameters_of,
)
from proxima.rewards.reward_outcome import NAN, RewardOutcome
from proxima.rewards.reward_samples import Samples


class EnvironmentView:
    """The public attributes of an environment at the end of its episode."""

    def __init__(self, episode: Episode):
        self.__dict__.update(copy.deepcopy(episode.attributes))
        self.__dict__["_unreadable"] = episode.unreadable

    def __getattr__(self, name: str) -> NoReturn:
        reason = self.__dict__.get("_unreadable", {}).get(name)  # a copy being made has none yet
        raise AttributeError(
            f"the environment's attribute {name!r} {reason or 'does not exist, or is a method or private'}; "
            "keep what rewards read in public attributes that are numbers, texts, lists or dicts"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"the episode is over: its environment's {name!r} can be read only")

    def __repr__(self) -> str:
        return f"EnvironmentView({', '.join(name for name in vars(self) if not name.startswith('_'))})"


class EpisodeFunction(FunctionReward):
    """Is called with the episodes that did not fail."""

    filled = (*OWN, ENVIRONMENTS)

    def __init__(self, spec: RewardSpec, function: Callable[..., object]):
        super().__init__(spec, function)
        if self.takes_any and not self.positional:
            self.own = [name for name in OWN if name != TURNS]  # as TRL passes them

    def __call__(self, samples: Samples) -> RewardOutcome:
        tokens = samples.tokens
        if tokens is None or tokens.episodes is None:
            return RewardOutcome.failed(len(samples), "it reads environments; texts alone have none")
        rows = [row for row, episode in enumerate(tokens.episodes) if not episode.failure]
        sequence, token = [NAN] * len(samples), dict[int, list[float]]()
        reason = next((each.failure for each in reversed(tokens.episodes) if each.failure), "")
        if rows:
            chosen = Samples.of_tokens(tokens.select(torch.tensor(rows)))
            outcome = self.in_process(chosen)
            for row, score in zip(rows, outcome.sequence, strict=True):
                sequence[row] = score
            token = {rows[place]: numbers for place, numbers in outcome.token.items()}
            reason = outcome.reason or reason
        return RewardOutcome(sequence, token, reason)

    def arguments(self, samples: Samples) -> tuple[list[object], Record]:
        assert samples.tokens is not None
        positional, named = super().arguments(samples)
        views = [EnvironmentView(episode) for episode in samples.tokens.episodes or ()]
        return list(positional), {**named, ENVIRONMENTS: views}


def reads_environments(spec: RewardSpec) -> bool:
    """Whether it is a function with a parameter `environments`, which no option fills."""
    if not spec.is_function or ENVIRONMENTS in spec.options:
        return False
    function: Callable[..., object] = spec.source if callable(spec.source) else load_function(spec.source)
    return ENVIRONMENTS in [parameter.name for parameter in parameters_of(function)]
