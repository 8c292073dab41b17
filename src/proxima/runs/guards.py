"""Guards that watch a run. In: the metrics of all steps so far. Out: alarms, in words.

Each guard is a function of the metrics alone, so a resumed run, which reads them from its file, decides as an
uninterrupted one. What the run does about an alarm is decided elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from proxima.runs.evidence import held_out_evidence, judges_in

History = Sequence[Mapping[str, float]]

WINDOW = 10  # steps over which skipped updates are counted
CONSECUTIVE = 3  # steps with too long responses, or too many failures; one batch may be chance
FAILED_PART = 0.2  # of the failed rewards that would stop a run: the alarm comes long before
LONGEST_WAIT = 20  # steps after `critic_warmup_steps` in which the policy waits for `critic_warmup_until`
UPDATES = ("optimizer_steps", "skipped_updates", "kl_stopped")  # all 0 where there was nothing to train on
MAX_ROLLBACKS = 3  # after these the run stops


@dataclass(frozen=True)
class Alarm:
    """One guard's alarm at one step."""

    guard: str
    message: str


def alarms(
    history: History,
    max_skipped_updates: int = 0,
    kl_limit: float = 0.0,
    min_entropy: float = 0.0,
    length_limit: float = 0.0,
    max_declining_evals: int = 0,
    max_failed_rewards: float = 0.0,
    start: Mapping[str, float] | None = None,
    critic_warmup_until: float = 0.0,
    critic_warmup_steps: int = 0,
    last_step: int | None = None,
    leaves_out_cut: bool = False,
) -> list[Alarm]:
    """The alarms of the last step; a limit of 0 turns its guard off.

    Args:
        max_failed_rewards: responses per step; with more the run stops.
        start: the evaluation before the first step, where there was one; the first that can decline.
        critic_warmup_until: explained variance that the policy still waits for.
        critic_warmup_steps: number of the last step in which it would wait anyway.
        last_step: with which the run ends.
        leaves_out_cut: whether responses that were cut are not trained on.
    """
    waits = critic_warmup_steps, last_step
    messages = {
        "nonfinite": nonfinite(history, max_skipped_updates) if max_skipped_updates else "",
        "kl": too_far(history, kl_limit) if kl_limit else "",
        "entropy": collapsed(history, min_entropy) if min_entropy else "",
        "length": too_long(history, length_limit) if length_limit else "",
        "overoptimization": overoptimized(history, max_declining_evals, start) if max_declining_evals else "",
        "rewards": failing(history, FAILED_PART * max_failed_rewards) if max_failed_rewards else "",
        "critic": waited(history, critic_warmup_until, *waits) if critic_warmup_until else "",
        "cut": all_cut(history) if leaves_out_cut else "",
    }
    return [Alarm(guard, message) for guard, message in messages.items() if message]


def nonfinite(history: History, limit: int) -> str:
    skipped = sum(int(step["skipped_updates"]) for step in history[-WINDOW:])
    if skipped < limit:
        return ""
    return (
        f"{skipped} updates of the last {min(len(history), WINDOW)} steps had a loss or gradient that is "
        "not finite"
    )


def too_far(history: History, limit: float) -> str:
    kl = history[-1]["kl_exact"]
    return (
        ""
        if kl <= limit
        else f"the policy is {kl:.4g} nats per response from the reference, the limit is {limit:g}"
    )


def collapsed(history: History, limit: float) -> str:
    entropy = history[-1]["entropy"]
    return (
        ""
        if entropy >= limit
        else f"the policy's entropy is {entropy:.4g} nats per token, the minimum is {limit:g}"
    )


def too_long(history: History, limit: float) -> str:
    """Longer than `limit` times those of the first step, or none finishes any more where half did."""
    first, recent = history[0], history[-CONSECUTIVE:]
    if len(history) <= CONSECUTIVE:
        return ""
    if all(step["response_length"] > limit * first["response_length"] for step in recent):
        now = recent[-1]["response_length"]
        return (
            f"responses have {now:.4g} tokens, more than {limit:g} times the first step's "
            f"{first['response_length']:.4g}"
        )
    if first["eos_rate"] >= 0.5 and all(step["eos_rate"] == 0 for step in recent):
        return (
            f"no response of the last {CONSECUTIVE} steps finished with EOS; in the first step "
            f"{first['eos_rate']:.0%} did"
        )
    return ""


def failing(history: History, limit: float) -> str:
    """More rewards than the limit failed in each of the last steps. What fails is left out, so that a policy
    can learn to make its grader fail."""
    failed = [int(step.get("failed_rewards", 0)) for step in history[-CONSECUTIVE:]]
    if len(failed) < CONSECUTIVE or min(failed) <= limit:
        return ""
    return (
        f"rewards of the last {CONSECUTIVE} steps failed ({', '.join(map(str, failed))}), and their "
        "responses were left out; if the number grows, the policy may be hiding in them"
    )


def waited(history: History, until: float, warmup_steps: int, last_step: int | None) -> str:
    """The policy has waited as long as it may, or to the run's end, and the value model has not reached what
    it waited for."""
    step = history[-1]["step"]
    if step not in (warmup_steps + LONGEST_WAIT, last_step):
        return ""
    reached = [each["explained_variance"] for each in history if each["step"] > warmup_steps]
    if any(each >= until for each in reached):
        return ""
    known = [each for each in reached if not math.isnan(each)]
    ends = step == last_step
    return (
        f"the policy has waited {len(reached)} steps for the value model, whose explained variance was at "
        f"most {max(known, default=math.nan):.3g}, and critic_warmup_until is {until:g}; "
        f"{'the run ends before the policy trained' if ends else 'the policy trains from the next step on'}: "
        "raise value_learning_rate or value_epochs, or lower critic_warmup_until"
        f"{'' if ends else '; to let it wait longer, raise critic_warmup_steps'}"
    )


def all_cut(history: History) -> str:
    """No response of the last steps was finished, and so none was trained on."""
    recent = history[-CONSECUTIVE:]
    updated = any(step[name] for step in recent for name in UPDATES)
    if len(recent) < CONSECUTIVE or updated:
        return ""
    return (
        f"nothing was trained in the last {CONSECUTIVE} steps: no response finished, and cut_responses "
        "leave_out trains on finished ones alone; raise max_new_tokens, or set cut_responses to terminal"
    )


def overoptimized(history: History, evaluations: int, start: Mapping[str, float] | None = None) -> str:
    """The win rate by judges, or the held-out reward, fell at each of the last evaluations while the training
    reward rose over the same steps."""
    for name, measure in HELD_OUT.items():
        if message := _declined(history, evaluations, start or {}, name, measure):
            return message
    return ""


def _declined(
    history: History,
    evaluations: int,
    start: Mapping[str, float],
    name: str,
    measure: Callable[[Mapping[str, float]], float],
) -> str:
    if math.isnan(measure(history[-1])):
        return ""
    judged = (i for i in reversed(range(len(history))) if not math.isnan(measure(history[i])))
    places = list(islice(judged, evaluations + 1))[::-1]
    held_out = [measure(history[i]) for i in places]
    if len(places) == evaluations and not math.isnan(began := measure(start)):
        places, held_out = [0, *places], [began, *held_out]
    if len(places) <= evaluations:
        return ""
    trained = [step["avg_reward"] for step in history[places[0] : places[-1] + 1]]
    half = len(trained) // 2
    if not half:  # one step: no training reward to compare its own with
        return ""
    before, after = _mean(trained[:half]), _mean(trained[-half:])
    falls = all(later < earlier for earlier, later in pairwise(held_out))
    if not falls or not after > before:
        return ""
    return (
        f"the {name} fell {evaluations} evaluations in a row ({held_out[0]:.4g} to {held_out[-1]:.4g}) while "
        f"the training reward rose ({before:.4g} to {after:.4g})"
    )


def _by_judges(step: Mapping[str, float]) -> float:
    """The mean win rate by judges at an evaluation; nan where there was none, or no judge."""
    own = {name.removeprefix(EVALUATION): step[name] for name in judges_in(step, EVALUATION)}
    return held_out_evidence(own) if own else math.nan


EVALUATION = "validation/"  # before the name of what an evaluation measured
HELD_OUT: dict[str, Callable[[Mapping[str, float]], float]] = {
    "win rate by judges": _by_judges,
    "validation reward": lambda step: step.get("validation/reward", math.nan),
}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
