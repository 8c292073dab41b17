"""Phase 3 of a PPO step: where scores come from, one file a kind of source.

In: `Samples`, what was generated. Out: `Outcome`, a number a sequence or a number a token, nan where it
    failed.
"""

from proxima.rewards.reward_outcome import Outcome
from proxima.rewards.reward_samples import Samples
from proxima.rewards.reward_sources import check_rewards, open_reward

__all__ = ["Outcome", "Samples", "check_rewards", "open_reward"]
