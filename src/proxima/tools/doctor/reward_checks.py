"""Whether the rewards can be trusted. In: specs, sources, scores. Out: findings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, mode, pstdev

import torch

from proxima.base_setup import has_head
from proxima.config import PPOConfig, RewardSpec
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import Prompt
from proxima.environments import EnvironmentReward
from proxima.models import reward_warning
from proxima.rewards import (
    ClassifierSource,
    RewardSource,
    Samples,
    TrainedReward,
    columns_of,
    in_one_line,
    open_endpoint,
    reads_environments,
    tokens_of,
)
from proxima.tools.doctor.finding import Finding, fail, ok, warn
from proxima.tools.doctor.reward_calls import HANGS, limited

FLAT = 1e-6  # a standard deviation below this multiple of the mean counts as 0
HUGE = 100.0


def reads_episodes(spec: RewardSpec, source: RewardSource) -> bool:
    """Whether it scores episodes: without an environment's answers a text has no score."""
    return isinstance(source, EnvironmentReward) or reads_environments(spec)


def check_endpoint(spec: RewardSpec, prompt: str, tokenizer: Tokenizer) -> Finding:
    """Send one sample and check that a score comes back."""
    name = f"endpoint {spec.label}"
    source = open_endpoint(spec)
    outcome = source(Samples.of_texts([prompt], ["A test."], tokenizer))
    if outcome.failures:
        return fail(
            name,
            f"one sample was sent and no score came back: {outcome.reason}",
            "start it, or fix its address",
        )
    return ok(name, "one sample was sent, a score came back")


def check_reward_model(spec: RewardSpec) -> Finding:
    """A trained reward model's held-out accuracy, as its own report states it."""
    if message := reward_warning(str(spec.source)):
        return warn(
            f"reward model {spec.label}",
            message,
            "train it on more or cleaner preferences; its reward.json has the details",
        )
    return ok(f"reward model {spec.label}", "better than chance on held-out pairs")


def is_reward_model(spec: RewardSpec) -> bool:
    return isinstance(spec.source, str) and not spec.is_http and has_head(spec.source)


def is_flat(scores: Sequence[float]) -> bool:
    """Whether all scores are the same; nan does not count."""
    good = [score for score in scores if not math.isnan(score)]
    return len(good) < 2 or pstdev(good) <= FLAT * max(1.0, abs(fmean(good)))


def check_reward_scale(scores: Sequence[float], config: PPOConfig, first: int | None = None) -> list[Finding]:
    """Failures, spread and scale of the scores of real samples; a failed one is nan.

    Args:
        first: size of the first round; there were more rounds if all its scores were the same.
    """
    good = [score for score in scores if not math.isnan(score)]
    failed = len(scores) - len(good)
    findings = []
    if failed:
        text = f"{failed} of {len(scores)} samples got no score"
        advice = "fix the reward: such samples are left out of the update"
        too_many = failed > config.max_reward_failures * len(scores)
        findings.append(
            fail("reward failures", text, advice) if too_many else warn("reward failures", text, advice)
        )
    if len(good) < 2:
        return findings
    mean = fmean(good)
    deviation = pstdev(good)
    nonzero = sum(score != 0 for score in good)
    text = f"mean {mean:.4g}, standard deviation {deviation:.3g} over {len(good)} samples"
    text += f", {nonzero} of them not 0" if nonzero < len(good) else ""
    if is_flat(good):
        advice = (
            "a reward that cannot tell answers apart teaches nothing; fix it (or sample more with --samples)"
        )
        return [
            *findings,
            fail("reward spread", f"every sample scores {mean:.4g}, all {len(good)} of them", advice),
        ]
    if first is not None and first < len(scores):
        findings.append(sparse(good, config))
    models_alone = not any(spec.is_function or spec.is_http for spec in config.rewards)
    in_units = models_alone and config.reward_units == "standard"  # measured before the first step
    tamed = config.normalize_rewards or config.clip_rewards or in_units
    if max(abs(mean), deviation) > HUGE and not tamed:
        advice = (
            "set normalize_rewards, or rescale the reward: the KL penalty and the value model expect "
            "scores of a few units"
        )
        return [*findings, warn("reward scale", text, advice)]
    return [*findings, ok("reward scale", text)]


def sparse(scores: Sequence[float], config: PPOConfig) -> Finding:
    """A warning for scores that are mostly the same."""
    common = mode(scores)
    others = sum(not is_flat((score, common)) for score in scores)
    text = f"only {others} of {len(scores)} samples score anything but {common:.4g}"
    rate = others / len(scores) * config.batch_size
    advice = (
        f"expect {rate:.2g} in a batch of {config.batch_size}: raise batch_size, or reward partial success "
        "too"
    )
    return warn("reward spread", text, advice)


def padded_samples(
    prompt: str, completion: list[int], tokenizer: Tokenizer, device: torch.device
) -> tuple[Samples, Samples]:
    """A short sample on its own, and the same one in a batch with a longer one."""
    short = Prompt(prompt[: max(1, len(prompt) // 2)].rstrip() or prompt, columns_of(prompt))
    ids = [completion[: max(1, len(completion) // 2)], completion]
    both = tokens_of([short, prompt], ids, [False, False], tokenizer, device)
    return Samples.of_tokens(both.select(torch.tensor([0]))), Samples.of_tokens(both)


def check_padding(
    spec: RewardSpec, source: RewardSource, alone: Samples, beside: Samples, tolerance: float
) -> Finding:
    """A text must score the same whatever else is in its batch."""
    name = f"padding {spec.label}"
    try:
        with limited():
            first, again, padded = (source(samples).totals[0] for samples in (alone, alone, beside))
    except (Exception, SystemExit) as error:  # a user's reward may raise anything
        if HANGS in str(error):
            raise ValueError(f"the reward {spec.label}: {error}") from error
        return fail(name, f"it raised {in_one_line(error)}", "fix the reward")
    if any(map(math.isnan, (first, again, padded))):
        return warn(name, "the sample to compare got no score", "fix the reward")
    if not close(first, again, tolerance):
        text = f"the same text twice scored {first:.6g} and {again:.6g}"
        return warn(name, text, "a noisy reward slows learning; make it deterministic where you can")
    if close(first, padded, tolerance):
        return ok(name, f"a text scores {first:.4g} alone and beside a longer one")
    text = f"a text scores {first:.6g} alone and {padded:.6g} beside a longer one"
    if isinstance(source, (TrainedReward, ClassifierSource)):
        return fail(
            name, text, "the model reads padding: give its tokenizer a pad token that the model knows"
        )
    return warn(name, text, "a score should depend on its own text, not on the rest of the batch")


def check_ending(spec: RewardSpec, source: ClassifierSource) -> Finding:
    """How a classifier reads the end of a finished response; known once a step has run."""
    ending = source.ending_now
    text = (
        f"it reads {'the sampled ids' if source.reads_ids else 'the text, with its own tokenizer'}; {ending}"
    )
    if ending.is_guess:
        return warn(
            f"ending {spec.label}",
            text,
            "say how it was trained: option eos=append or eos=leave of the reward",
        )
    return ok(f"ending {spec.label}", text)


def close(left: float, right: float, tolerance: float) -> bool:
    return abs(left - right) <= tolerance * max(1.0, abs(left), abs(right))
