"""One PPO step that learns nothing. In: a trainer with learning rates of 0 and real prompts. Out: findings.

Before anything is learned, the policy is the reference: their KL is exactly what top-k and top-p cut off, and
the ratio of new to old probabilities is 1. Otherwise sampling and training disagree about what was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from proxima.config import PPOConfig
from proxima.core.json_record import RecordView
from proxima.core.ops import masked_mean
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import ROUNDING
from proxima.tools.doctor.finding import Finding, fail, ok, warn

UNMOVED = 1e-300  # a learning rate that changes no weight: 0 in the weights' precision


def unchanging(config: PPOConfig) -> PPOConfig:
    """The same settings, with learning and writing turned off, and every response in the update."""
    return replace(
        config,
        learning_rate=UNMOVED,
        value_learning_rate=UNMOVED if config.has_critic else config.value_learning_rate,
        critic_warmup_steps=0,
        critic_warmup_until=0.0,
        cut_responses="terminal",
        kl_stop=0.0,
        ppo_epochs=1,
        max_reward_failures=1.0,
        trackers=(),
    )


def tolerance_of(trainer: PPOTrainer) -> float:
    return ROUNDING.get(trainer.models.sft.backbone.network.dtype, 1e-3)


def check_deterministic(trainer: PPOTrainer, prompts: Sequence[str]) -> Finding:
    """The noise follows from seed, step and prompt, so the same call must give the same tokens."""
    first = trainer.generator.sample(prompts)
    again = trainer.generator.sample(prompts)
    if first.mask.shape == again.mask.shape and torch.equal(
        first.response_ids * first.mask, again.response_ids * again.mask
    ):
        return ok("sampling", "the same call twice gives the same tokens")
    different = sum(one != other for one, other in zip(first.texts(True), again.texts(True), strict=True))
    return fail(
        "sampling",
        f"the same call twice gave {different} of {len(prompts)} different responses: no run can be repeated",
        "look for dropout that is on, or set engine to plain",
    )


def check_kl(results: RecordView, tolerance: float) -> Finding:
    """At the start the KL is the cost of truncation: 0 without top-k and top-p."""
    pairs = results["sa_pairs"]
    policy, reference, cost = (
        pairs.column(name) for name in ("logprob_policy", "logprob_ref", "truncation_cost")
    )
    off = float(masked_mean((policy - reference - cost).abs(), pairs.mask))
    if off <= tolerance:
        return ok(
            "KL at the start",
            f"{results['kl']:.4f} nats, of which top-k and top-p cause {results['truncation_cost']:.4f}",
        )
    return fail(
        "KL at the start",
        f"policy and reference differ by {off:.3g} nats per token before anything is learned",
        "check sft_adapter and dtype; set engine to plain to see whether the fast engine is the cause",
    )


def check_gap(results: RecordView, config: PPOConfig, tolerance: float) -> Finding:
    """Tokens were sampled with the probabilities that training computes."""
    gap = results["sampling_gap"]
    if config.engine == "vllm":  # its arithmetic differs; importance weights correct for it
        return ok("sampled as scored", f"vLLM's log-probabilities differ by {gap:.1g} nats per token")
    if not gap > tolerance:
        return ok("sampled as scored", f"log-probabilities agree within {gap:.1g} nats per token")
    return fail(
        "sampled as scored",
        f"sampling and scoring differ by {gap:.3g} nats per token, more than rounding can",
        "check dtype; set engine to plain to see whether the fast engine is the cause",
    )


def check_ratio(results: RecordView, tolerance: float) -> Finding:
    """The ratio is 1 in every minibatch, because nothing is learned."""
    off = max(results["first_ratio_error"], results["ratio_max"] - 1)
    if off <= tolerance:
        return ok("ratio at the start", f"1 within {off:.1g}")
    return fail(
        "ratio at the start",
        f"the update's probabilities are off by {off:.3g} from those of the samples",
        "check dtype and dropout; set engine to plain to see whether the fast engine is the cause",
    )


def check_ends(results: RecordView, config: PPOConfig) -> Finding:
    """EOS that is never sampled, or always at once."""
    rate = results["eos_rate"]
    length = results["response_length"]
    count = len(results["generated_texts"])
    if rate == 1 and length <= 1 and config.max_new_tokens > 1:
        return fail(
            "EOS comes",
            f"all {count} responses ended at once: they are empty",
            "check the form of the prompts, or run `proxima sft` first",
        )
    if rate == 0:
        return warn(
            "EOS comes",
            f"none of {count} responses ended within max_new_tokens ({config.max_new_tokens}): all are cut "
            "off",
            "raise max_new_tokens, run `proxima sft` first, or set missing_eos_penalty",
        )
    return ok("EOS comes", f"{rate:.0%} of {count} responses ended with EOS, mean length {length:.1f}")
