"""The rewards that an environment gave during its episodes, as a source of rewards: each on its turn's last
token; nan where the episode failed."""

from __future__ import annotations

from collections.abc import Sequence

from proxima.core.ops import turn_ends
from proxima.rewards import RewardOutcome, Samples, counted

NAN = float("nan")


class EnvironmentReward:
    """Reads what sampling has kept; it calls nothing."""

    attempts = 1
    lacks_unit = False

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """`Environment.check` has asked for the columns."""

    def __call__(self, samples: Samples) -> RewardOutcome:
        tokens = samples.tokens
        if tokens is None or tokens.episodes is None:
            return RewardOutcome.failed(len(samples), "its rewards come with episodes; texts alone have none")
        ends = turn_ends(tokens.mask).cpu()
        sequence, token = [], {}
        for row, episode in enumerate(tokens.episodes):
            sequence.append(NAN if episode.failure else 0.0)
            if not episode.failure:
                rewards = [0.0] * len(samples.completion_ids[row])
                places = ends[row].nonzero().flatten().tolist()
                for place, reward in zip(places, episode.rewards, strict=True):
                    rewards[place] = reward
                token[row] = rewards
        reasons = [episode.failure for episode in tokens.episodes if episode.failure]
        return RewardOutcome(sequence, token, counted(reasons))
