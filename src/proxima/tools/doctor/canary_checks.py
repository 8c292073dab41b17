"""`proxima doctor --canary`: does this setup learn, and if not, which part is suspect.

In: a config and prompts. Out: one finding. A planted reward (`canary_run`) must rise within a number of steps
and a KL. Where it does not, `SUSPECTS` read the cause from what was measured; where none is plain, the run is
repeated with one of `CHANGES` at a time, and the part whose change makes it rise is the suspect. A new
suspect is a function and a line in the one, or an entry of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import NamedTuple

from proxima.config import PPOConfig
from proxima.core.errors import EngineFailure
from proxima.core.json_record import Record
from proxima.tools.doctor.canary_run import RISE, SCORED_ON, STEPS, CanaryRun, NothingToPlant, run_canary
from proxima.tools.doctor.finding import Finding, fail, ok, warn
from proxima.tools.doctor.reward_checks import is_flat

FEW = 0.5  # of the sampled tokens; fewer trained on are suspect
LIKELY = 2  # standard errors
SLOWLY = 0.2  # of the rise that is needed; more is a warning, since the run would rise later
UNREACHED = 0.5  # of the trained weights; experts that no token went to are fewer
BARELY = 0.01  # nats that a token's log-probability moved, in all steps together
STALE, PART = 5, 0.1  # times the gap at the start, or rounding; and of how far the policy moved
VLLM_ADVICE = "restart vLLM and check that it serves this model; engine auto samples in this process"


class Suspect(NamedTuple):
    """A part that keeps the planted reward from rising."""

    part: str
    evidence: str
    advice: str


def suspect_engine(run: CanaryRun) -> Suspect | None:
    """vLLM reports weights that are not the policy's; or it sampled with others than were trained."""
    part = f"weights not synchronised to {'vLLM' if run.config.engine == 'vllm' else 'the sampler'}"
    if isinstance(run.error, EngineFailure):
        return Suspect(part, str(run.error), VLLM_ADVICE)
    gaps = [step["sampling_gap"] for step in run.steps]
    if gaps and gaps[-1] > max(STALE * gaps[0], STALE * run.rounding, PART * run.moved):
        text = (
            f"the log-probabilities with which tokens were sampled and trained differ by {gaps[-1]:.2g} nats "
            f"per token, and by {gaps[0]:.2g} at the start"
        )
        return Suspect(part, text, VLLM_ADVICE)
    return None


def suspect_mask(run: CanaryRun) -> Suspect | None:
    sampled = sum(step["tokens"] for step in run.steps)
    share = sum(run.trained) / max(1.0, sampled)
    finished = fmean(step["eos_rate"] for step in run.steps) if run.steps else 1.0
    if run.config.cut_responses == "bootstrap" and finished < FEW:
        text = f"only {finished:.0%} of the responses end with EOS and count their score"
        return Suspect("mask", text, "raise max_new_tokens, or set cut_responses to terminal")
    if run.steps and share < FEW:
        text = f"only {share:.0%} of the sampled tokens are trained on"
        return Suspect("mask", text, "see cut_responses, importance_mode and max_reward_failures")
    return None


def suspect_scores(run: CanaryRun) -> Suspect | None:
    if not is_flat(run.shaped):
        return None
    text = f"rewards that differ reach PPO as one number, {run.shaped[0]:.4g}"
    return Suspect("reward scale", text, "raise clip_rewards, or set normalize_rewards")


def suspect_updates(run: CanaryRun) -> Suspect | None:
    """Updates of the policy that did not happen."""
    skipped = sum(step["skipped_updates"] for step in run.steps)
    updated = [step for step in run.steps if step["grad_norm_policy"] == step["grad_norm_policy"]]
    if run.steps and not updated and skipped:
        text = f"all {skipped:.0f} updates were skipped, because a loss or a gradient was not finite"
        return Suspect("no gradient", text, "set dtype to float32, or clip_rewards")
    if run.steps and not updated:
        text = f"the policy was not updated in {len(run.steps)} steps"
        return Suspect("no gradient", text, "lower critic_warmup_until and critic_warmup_steps")
    return None


def suspect_gradient(run: CanaryRun) -> Suspect | None:
    """No gradient reaches the weights that the optimiser holds."""
    if run.error is None and any(step["grad_norm_policy"] > 0 for step in run.steps):
        if run.unreached <= UNREACHED:
            return None
        text = f"no gradient reaches {run.unreached:.0%} of the trained weights"
        return Suspect("no gradient", text, "set gradient_checkpointing to false, or use engine plain")
    if not run.depends:
        text = "no log-probability changes with the trained weights, and no gradient reaches them"
        return Suspect(
            "adapter not attached", text, "check lora_targets and sft_adapter, or use engine plain"
        )
    why = f"the update raised {type(run.error).__name__}: {run.error}" if run.error else "its norm is 0"
    return Suspect("no gradient", f"{why}, although log-probabilities follow the weights", "use engine plain")


def suspect_standstill(run: CanaryRun) -> Suspect | None:
    """Weights that do not move, or move without effect."""
    if not run.weights_changed:
        text = f"gradients came, and at a learning_rate of {run.config.learning_rate:g} no weight has changed"
        return Suspect("learning rate", text, "raise learning_rate")
    if run.moved == 0 and run.depends:
        text = "the trained weights have changed too little for any log-probability to follow"
        return Suspect("learning rate", text, "raise learning_rate, or max_grad_norm")
    if run.moved == 0:
        text = "the trained weights have changed, and no log-probability has"
        return Suspect(
            "adapter not attached", text, "check lora_targets and sft_adapter, or use engine plain"
        )
    return None


def suspect_rate(run: CanaryRun) -> Suspect | None:
    """A policy that moved too far, or hardly."""
    rate = f"learning_rate is {run.config.learning_rate:g}"
    skipped = sum(step["skipped_updates"] for step in run.steps)
    if run.is_far or skipped:
        more = f", and {skipped:.0f} updates were skipped as not finite" if skipped else ""
        text = (
            f"{rate}: the KL is above {run.kl_allowed:.2g} nats per token, what the best policy needs{more}"
        )
        return Suspect("learning rate", text, "lower learning_rate, or ppo_epochs")
    if run.moved < BARELY:
        text = f"{rate}: after {len(run.steps)} steps log-probabilities have moved by {run.moved:.2g} nats"
        return Suspect("learning rate", text, "raise learning_rate")
    return None


SUSPECTS: list[Callable[[CanaryRun], Suspect | None]] = [
    suspect_engine,
    suspect_mask,
    suspect_scores,
    suspect_updates,
    suspect_gradient,
    suspect_standstill,
    suspect_rate,
]
"""In this order: the first that finds something is reported."""


@dataclass(frozen=True)
class Change:
    """Other settings under which the canary is run again."""

    part: str
    how: str  # what is changed
    advice: str
    settings: Callable[[PPOConfig], Record]  # none: nothing to change
    unit: bool = False  # whether the planted reward has mean 0 and unit variance


def unshaped(config: PPOConfig) -> Record:
    shaping = {"normalize_rewards": False, "clip_rewards": 0.0, "missing_eos_penalty": 0.0}
    return shaping if config.rewards or any(getattr(config, name) for name in shaping) else {}


def without_kl(config: PPOConfig) -> Record:
    if not config.kl_coef and not config.kl_loss_coef:
        return {}
    return {"kl_coef": 0.0, "kl_loss_coef": 0.0, "kl_controller": "fixed"}


def faster(config: PPOConfig) -> Record:
    return {"learning_rate": min(1.0, 10 * config.learning_rate)}


CHANGES = [
    Change(
        "reward scale",
        "with rewards of mean 0 and unit variance",
        "set normalize_rewards, or rescale the reward",
        unshaped,
        unit=True,
    ),
    Change(
        "KL coefficient",
        "without a KL penalty",
        "lower kl_coef or kl_loss_coef, or raise the reward's scale",
        without_kl,
    ),
    Change("learning rate", "with 10 times the learning rate", "raise learning_rate", faster),
]
"""In this order: the first with which the reward rises is reported."""


def canary(config: PPOConfig, prompts: Sequence[str]) -> Finding:
    try:
        run = run_canary(config, prompts)
    except NothingToPlant as error:
        return warn("canary", f"not measured: {error}", error.advice)
    except EngineFailure as error:
        return fail("canary", f"vLLM cannot be sampled from: {error}", VLLM_ADVICE)
    before = fmean(run.baseline)
    text = (
        f"a planted reward went from {before:.2f} to {run.share:.2f} in {len(run.steps)} steps, at a KL of "
        f"{run.kl:.2g} nats per token"
    )
    if run.passed and not run.like_rewards:
        same = f"this setup learns, but your rewards score all {SCORED_ON} responses the same"
        return warn(
            "canary", f"{text}: {same}", "run the doctor without --canary: it looks for two that differ"
        )
    if run.passed:
        return ok("canary", f"{text}: this setup learns")
    text += f"; it must rise by {RISE} within {STEPS} steps and {run.kl_allowed:.2g} nats"
    suspect = find_suspect(run, prompts)
    if suspect is None:
        return fail("canary", f"{text}. No part is plainly to blame", "try engine plain and dtype float32")
    slow = suspect.part in {change.part for change in CHANGES} and is_slow(run)
    level = warn if slow and (suspect.part != "KL coefficient" or rise_within_kl(run) >= RISE) else fail
    return level("canary", f"{text}. Suspect: {suspect.part} ({suspect.evidence})", suspect.advice)


def is_slow(run: CanaryRun) -> bool:
    """Whether the updates went the right way, beyond chance: what they did to tokens written before them, as
    a rise of the share."""
    before, sure = fmean(run.baseline), run.towards - LIKELY * run.towards_error
    return not run.is_far and before * (1 - before) * sure >= SLOWLY * RISE


def rise_within_kl(run: CanaryRun) -> float:
    """By how much the KL penalty lets the share rise, however long it trains: the best policy multiplies the
    odds of the class by exp(reward of one more such token / coefficient)."""
    before, step = fmean(run.baseline), run.steps[-1]
    gain = pstdev(run.shaped) / max(pstdev(run.baseline), 1e-9)
    coefficient = step["kl_coef"] + run.config.kl_loss_coef
    tilt = gain / max(1.0, step["response_length"]) / max(coefficient, 1e-9)
    return 1 / (1 + (1 / before - 1) * math.exp(-min(tilt, 700.0))) - before


def find_suspect(run: CanaryRun, prompts: Sequence[str]) -> Suspect | None:
    for look in SUSPECTS:
        if found := look(run):
            return found
    for change in CHANGES:
        if settings := change.settings(run.config):
            again = run_canary(replace(run.config, **settings), prompts, change.unit)
            if again.passed:
                text = f"{change.how} it rises to {again.share:.2f} in {len(again.steps)} steps"
                return Suspect(change.part, text, change.advice)
    return None
