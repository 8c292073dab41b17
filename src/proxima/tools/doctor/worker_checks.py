"""What worker processes cost and keep out, and which constant answer wins a verifiable reward. In: a trainer,
samples. Out: findings."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import fmean

from proxima.config import PPOConfig, RewardSpec
from proxima.core.json_record import RecordView
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import (
    CODE_MEMORY_MB,
    MEMORY_MB,
    FunctionReward,
    RewardOutcome,
    Samples,
    WorkerFailure,
    WorkerProcess,
    WorkerReward,
    in_workers,
)
from proxima.tools.doctor.audit_checks import spoken
from proxima.tools.doctor.finding import Finding, ok, warn
from proxima.tools.doctor.reward_calls import call_reward

EASY = 0.5  # a constant answer that scores this much is what PPO finds first
PROBE_SECONDS = 30.0
OPEN = {
    "processes": "a fork bomb",
    "signals": "signals to your other processes",
    "network": "the network",
    "files": "files that you can write",
    "memory": "memory without limit",
}
OF_FUNCTIONS = ("processes", "signals", "memory")
"""What a function, an environment or a tool is kept from: you wrote it, and it may use the rest."""
REMEDY = (
    "install bubblewrap, or allow user namespaces (a container may need --security-opt seccomp=unconfined); "
    "or run in a container or an account of its own"
)


def check_protections(config: PPOConfig) -> list[Finding]:
    """For each kind of worker that the settings ask for: what code in it can reach on this machine."""
    found = []
    programs = [spec for spec in config.rewards if spec.source == "code"]
    if programs:
        found.append(_kept_from("programs of the policy", _memory_of(programs, CODE_MEMORY_MB), sandbox=True))
    functions = [spec for spec in config.rewards if spec.options.get("workers") and spec not in programs]
    if functions:
        found.append(_kept_from("rewards in workers", _memory_of(functions, MEMORY_MB)))
    if config.has_episodes and config.step_seconds:
        found.append(_kept_from("environments and tools", config.step_memory_mb))
    return found


def _memory_of(specs: Sequence[RewardSpec], default: int) -> int:
    """The loosest of their limits; 0 = none."""
    limits = [int(spec.options.get("memory_mb", default)) for spec in specs]
    return 0 if 0 in limits else max(limits)


def _kept_from(who: str, memory_mb: int, sandbox: bool = False) -> Finding:
    """A worker of this kind is started, and says what it was given."""
    name = "worker protections"
    try:
        with WorkerProcess(
            os.getpid, memory_mb=memory_mb or None, network=not sandbox, sandbox=sandbox
        ) as worker:
            worker.start(PROBE_SECONDS)
            closed = {**worker.protections, "memory": sys.platform == "linux" and memory_mb > 0}
    except (WorkerFailure, ValueError, OSError) as error:
        return warn(name, f"no worker process could be started: {error}", f"{who} will fail")
    asked = {kind: words for kind, words in OPEN.items() if sandbox or kind in OF_FUNCTIONS}
    left = [words for kind, words in asked.items() if not closed[kind]]
    shut = [words for kind, words in asked.items() if closed[kind]]
    text = f"{who} are kept from: {', '.join(shut) or 'nothing'}"
    if not left:
        return ok(name, text)
    text += f"; open on this machine: {', '.join(left)}"
    return warn(name, text, REMEDY) if sandbox else ok(name, text)


def cost_findings(trainer: PPOTrainer, samples: Samples, with_worker: bool) -> list[Finding]:
    """For each function: what a sample costs in the trainer and in a worker process.

    Args:
        with_worker: also of functions that run in the trainer; a worker imports all that they need.
    """
    return [
        check_cost(spec, source, samples, with_worker)
        for spec, source in trainer.reward_computer.rewards
        if isinstance(source, FunctionReward) and spec.is_function
    ]


def check_cost(
    spec: RewardSpec, source: FunctionReward, samples: Samples, with_worker: bool = True
) -> Finding:
    """In a worker first: a function that hangs there is not called in this process."""
    name = f"cost {spec.label}"
    if not with_worker and not isinstance(source, WorkerReward):
        return ok(
            name, f"{_timed(source, samples)} per sample in the trainer (--audit: in a worker process too)"
        )
    try:
        apart = source if isinstance(source, WorkerReward) else in_workers(spec, source)
    except ValueError as error:
        return ok(name, f"{_timed(source, samples)} per sample in the trainer; {error}")
    apart(samples.part(0, 1))  # the first call starts the process
    seconds, outcome = _measured(apart, samples)
    if apart is not source:
        apart.pool.close()
    text = f"{spoken(seconds)} per sample in a worker process"
    if not outcome.failures:
        return ok(name, f"{_timed(source.in_process, samples)} per sample in the trainer, {text}")
    text += (
        f", where {outcome.failures} of {len(samples)} failed ({outcome.reason}); in the trainer not measured"
    )
    if apart is source:
        return ok(name, text)
    return warn(name, text, "set workers: a sample that hangs or crashes then costs itself alone")


def _timed(score: Callable[[Samples], RewardOutcome], samples: Samples) -> str:
    return spoken(_measured(score, samples)[0])


def _measured(score: Callable[[Samples], RewardOutcome], samples: Samples) -> tuple[float, RewardOutcome]:
    """Seconds per sample, and the outcome."""
    began = time.perf_counter()
    outcome = call_reward(score, samples)
    return (time.perf_counter() - began) / len(samples), outcome


def constant_findings(trainer: PPOTrainer, prompts: Sequence[str], results: RecordView) -> list[Finding]:
    """For each verifiable reward: its best constant answer, beside what the model scores now."""
    found = []
    for name, best in trainer.reward_computer.best_constants(prompts).items():
        known = [score for score in results["rewards_by_name"][name] if not math.isnan(score)]
        text = (
            f"the constant answer {best.answer!r} scores {best.score:.3g}, samples of the model "
            f"{fmean(known or [0.0]):.3g}"
        )
        advice = "PPO may learn to say only this: take references that differ more, or a harder task"
        label = f"best constant {name}"
        found.append(warn(label, text, advice) if best.score >= EASY else ok(label, text))
    return found
