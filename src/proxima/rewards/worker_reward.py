"""A Python function as a reward, in worker processes: one call per sample, each with a deadline.

A sample that hangs, runs out of memory, crashes, exits or raises gets nan; all others keep their score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from proxima.config import RewardSpec
from proxima.rewards.episode_function import EpisodeFunction, reads_environments
from proxima.rewards.function_reward import FunctionReward, parameters_of
from proxima.rewards.reward_options import check_options, keyword_options
from proxima.rewards.reward_outcome import NAN, RewardOutcome, read_rewards
from proxima.rewards.reward_samples import Samples, columns_of
from proxima.rewards.worker_pool import WorkerPool, summarize
from proxima.rewards.worker_process import JsonValue, WorkerFailure, check_sendable

WORKERS = "workers"  # the option that asks for them; 0 or none = the function runs in the trainer
WORKER_OPTIONS = (WORKERS, "timeout", "memory_mb", "retries")


class WorkerReward(FunctionReward):
    """Calls a function with what its parameters name, sample by sample."""

    attempts = 1  # the pool retries each sample itself

    def __init__(self, spec: RewardSpec, function: Callable[..., object], pool: WorkerPool):
        super().__init__(spec, function)
        self.pool = pool

    def check(self, prompts: Sequence[str], first: int = 0) -> None:
        """Columns go to the processes as JSON."""
        super().check(prompts, first)
        named = {*self.needed, *self.optional}
        for number, prompt in enumerate(prompts, first):
            sent = {
                name: value
                for name, value in columns_of(prompt).items()
                if name in named or (self.takes_any and name not in self.reserved)
            }
            check_sendable(sent, f"the reward {self.label!r}", number)

    def __call__(self, samples: Samples) -> RewardOutcome:
        alone = [samples.part(i, i + 1) for i in range(len(samples))]
        return read_replies(self.pool.map([self.arguments(one) for one in alone]), samples.lengths)


def open_function(
    spec: RewardSpec, function: Callable[..., object], has_environment: bool = False
) -> FunctionReward:
    """The reward, in worker processes where the option `workers` asks for them.

    Args:
        has_environment: which a function may read.
    """
    asked = {name: spec.options[name] for name in WORKER_OPTIONS if name in spec.options}
    own = [parameter.name for parameter in parameters_of(function)]
    reads = has_environment and reads_environments(spec)
    in_trainer = EpisodeFunction if reads else FunctionReward
    if WORKERS in own or WORKERS not in asked:
        return in_trainer(spec, function)
    rest = replace(spec, options={name: value for name, value in spec.options.items() if name not in asked})
    if asked[WORKERS] == 0:
        return in_trainer(rest, function)
    if reads:
        raise ValueError(
            f"the reward {spec.label!r} reads environments, which are not sent to worker processes; leave "
            "out workers, or give the environment a get_reward(), which runs where it does (step_seconds)"
        )
    for name in WORKER_OPTIONS:
        if name in own:
            raise ValueError(
                f"the reward {spec.label!r} takes an option {name!r} of its own, which worker processes "
                "need; rename the function's parameter"
            )
    accepted = {name: kind for name, kind in keyword_options(WorkerPool).items() if name in WORKER_OPTIONS}
    limits = check_options(replace(spec, options=asked), accepted)
    source = spec.source if isinstance(spec.source, str) else function
    return WorkerReward(rest, function, WorkerPool(source, **limits))


def in_workers(spec: RewardSpec, source: FunctionReward) -> WorkerReward:
    """The same function in one worker process; a ValueError where it cannot be sent there."""
    if isinstance(source, EpisodeFunction):
        raise ValueError("it reads environments, which are not sent to worker processes")
    target = spec.source if isinstance(spec.source, str) else source.function
    return WorkerReward(spec, source.function, WorkerPool(target))


def read_replies(replies: Sequence[JsonValue | WorkerFailure], lengths: Sequence[int]) -> RewardOutcome:
    """The rewards in what the calls returned, a list of one entry each; nan for those that failed."""
    parts = [_read(reply, length) for reply, length in zip(replies, lengths, strict=True)]
    failures = [
        reply if isinstance(reply, WorkerFailure) else WorkerFailure("reply", part.reason)
        for reply, part in zip(replies, parts, strict=True)
        if part.failures
    ]
    joined = RewardOutcome.join(parts)
    return replace(joined, reason=summarize(failures)) if failures else joined


def _read(reply: JsonValue | WorkerFailure, length: int) -> RewardOutcome:
    if isinstance(reply, WorkerFailure):
        return RewardOutcome([NAN], {}, reply.message)
    try:
        return read_rewards(reply, [length])
    except ValueError as error:
        return RewardOutcome([NAN], {}, str(error))
