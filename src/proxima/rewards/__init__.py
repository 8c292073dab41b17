"""Reward sources (phase 3 of a PPO step): one file per kind of source.

In: `Samples`, the generated responses. Out: `Outcome`, one reward per sequence or per token, nan where it
failed.
"""

from proxima.rewards.reward_outcome import Outcome
from proxima.rewards.reward_samples import Samples
from proxima.rewards.reward_sources import check_rewards, open_reward

__all__ = ["Outcome", "Samples", "check_rewards", "open_reward"]
