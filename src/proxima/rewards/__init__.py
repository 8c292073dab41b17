"""Reward sources (phase 3 of a PPO step): one file per kind of source.

In: `Samples`, the generated responses. Out: `RewardOutcome`, one reward per sequence or per token, nan where
it failed.
"""

from typing import TYPE_CHECKING

from proxima.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from proxima.rewards.chat_reward import ChatReward, open_endpoint
    from proxima.rewards.coroutines import run_async
    from proxima.rewards.endings import ENDING_SAMPLES
    from proxima.rewards.episode_function import reads_environments
    from proxima.rewards.function_reward import FunctionReward, load_function, parameters_of
    from proxima.rewards.http_reward import EndpointReward, UnusableReply
    from proxima.rewards.model_reward import ClassifierSource, TrainedReward
    from proxima.rewards.ready_made_rewards import READY_MADE
    from proxima.rewards.reward_options import check_options, keyword_options, require_options, typed
    from proxima.rewards.reward_outcome import (
        LARGEST,
        RewardOutcome,
        call_with_retries,
        counted,
        in_one_line,
    )
    from proxima.rewards.reward_samples import Samples, columns_of, tokens_of
    from proxima.rewards.reward_server import RewardServer, check_exposure, load_scorer
    from proxima.rewards.reward_sources import RewardSource, check_rewards, is_ready_made, open_reward
    from proxima.rewards.verifiers import CODE_MEMORY_MB, BestConstant, VerifierReward
    from proxima.rewards.worker_child import ATTRIBUTES, public_attributes
    from proxima.rewards.worker_pool import MEMORY_MB
    from proxima.rewards.worker_process import WorkerFailure, WorkerProcess, check_sendable
    from proxima.rewards.worker_reward import WorkerReward, in_workers

__all__, __getattr__ = lazy_exports(__name__)
