"""Environments and tools (phase 1 of a PPO step): what answers the policy's turns.

In: the text of a turn. Out: tokens to read, rewards, and whether the episode is done.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.environments.environment_reward import EnvironmentReward
    from proxima.environments.episode_environment import Environment, check_environments
    from proxima.environments.episode_limits import max_chosen_tokens, max_response_tokens, response_limit
    from proxima.environments.episode_runner import EpisodeRunner
    from proxima.environments.step import Step

__all__, __getattr__ = lazy_exports(__name__)
