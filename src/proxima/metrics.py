"""Every logged number, defined once. In: finished pairs and what the update measured. Out: floats by the glossary's names.

A test holds that what a step logs and what `GLOSSARY` defines are the same names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proxima.ops import explained_variance, masked_mean
from proxima.pairs import SAPairs

GLOSSARY: dict[str, str] = {
    "step": "PPO step, counted from 1.",
    "epoch": "Pass over the prompts, counted from 1 (in `train`).",
    "avg_reward": "Mean score of the step's sequences, before penalties, normalisation and clipping; failed ones left out.",
    "reward_std": "Standard deviation of these scores over the batch.",
    "reward/*": "Mean score of one reward by its name, before its weight.",
    "failed_rewards": "Sequences whose reward failed; they were left out of the update.",
    "kl": "Mean over sequences of the summed per-token logprob_policy - logprob_ref (nats): what the penalty acts on.",
    "kl_exact": "Mean over sequences of the summed exact KL(untruncated policy || reference) (nats): never negative.",
    "truncation_cost": "Mean over sequences of the summed -log(kept mass) (nats): the part of `kl` that top-k and top-p cause.",
    "sampling_gap": "Mean |log-probability when sampled - in the scoring pass| a token: how the engine that samples rounds.",
    "outside_kept": "Tokens outside the kept set that the training side computed for an engine that names none (vLLM).",
    "policy_lag": "1 if the step's responses were sampled from the policy before the last update (overlap), else 0.",
    "importance_truncated": "Share of tokens whose importance weight was cut at importance_clip; 0 where none was needed.",
    "engine_retries": "Responses that another vLLM server, or the same one later, was asked for again.",
    "kl_coef": "KL coefficient used in this step.",
    "entropy": "Mean entropy of the acting (truncated) policy a token (nats), at sampling time.",
    "response_length": "Mean number of response tokens, EOS included.",
    "eos_rate": "Share of responses that ended by themselves.",
    "truncated_prompts": "Prompts cut on the left to fit the context.",
    "tokens": "Response tokens of the step.",
    "value_mean": "Mean value a token before the update.",
    "return_mean": "Mean value target a token.",
    "explained_variance": "1 - Var(return - value) / Var(return) before the update: 1 perfect, 0 no better than a constant.",
    "advantage_std": "Standard deviation of the advantages a token before whitening.",
    "policy_loss": "PPO-clip loss with its extra terms, mean over the update's optimiser steps.",
    "value_loss": "Value loss (squared error), mean over the update's optimiser steps.",
    "clip_fraction": "Share of tokens whose gradient clipping stopped, mean over the update's optimiser steps.",
    "approx_kl": "KL(old || new) a token inside the update (k3 estimate), mean over the update's optimiser steps.",
    "ratio_max": "Largest policy ratio of the update.",
    "first_ratio_error": "Largest |ratio - 1| in the first minibatch, before any optimiser step: 0 up to rounding.",
    "grad_norm_policy": "Gradient norm of the policy before clipping, mean over optimiser steps.",
    "grad_norm_value": "Gradient norm of the value model before clipping, mean over optimiser steps.",
    "learning_rate": "Policy learning rate of the step.",
    "value_learning_rate": "Value learning rate of the step.",
    "optimizer_steps": "Optimiser steps taken (0 where a stop came first).",
    "skipped_updates": "Updates skipped because a loss or gradient was not finite; no other number counts them in.",
    "alarms": "Guards that raise an alarm at this step; warnings.jsonl names them (in `train`).",
    "kl_stopped": "1 if kl_stop ended the update early, else 0.",
    "buffer_bytes": "Bytes the experience buffer held in memory.",
    "seconds/generate": "Time of sampling.",
    "seconds/score": "Time of scoring the samples with policy and reference.",
    "seconds/reward": "Time of the rewards.",
    "seconds/value": "Time of values and advantages.",
    "seconds/update": "Time of the update.",
    "seconds": "Time of the whole step.",
    "validation/reward": "Mean score on the validation prompts, with the same sampling noise at every evaluation.",
    "validation/reward_low": "Lower end of the 95 % bootstrap interval of `validation/reward`.",
    "validation/reward_high": "Upper end of it.",
    "validation/reward/*": "Mean score of one reward by its name on the validation prompts, before its weight.",
    "validation/failed_rewards": "Validation answers whose reward failed; they were left out.",
    "validation/win_rate": "Share of validation prompts on which the policy's score beats the reference's (0.5: a tie).",
    "validation/win_rate_low": "Lower end of its 95 % bootstrap interval.",
    "validation/win_rate_high": "Upper end of it.",
    "validation/win_rate/*": "The same by the preference of a judge, by its name.",
    "validation/win_rate_low/*": "Lower end of its 95 % bootstrap interval.",
    "validation/win_rate_high/*": "Upper end of it.",
    "validation/unjudged/*": "Validation prompts that a judge, by its name, could not judge; they were left out.",
    "validation/kl": "Sequence KL on the validation prompts, as `kl`.",
    "validation/response_length": "Mean response length on the validation prompts.",
    "validation/eos_rate": "Share of validation responses that ended by themselves.",
    "validation/distinct_1": "Different words over all words of the validation answers.",
    "validation/distinct_2": "Different pairs of neighbouring words over all such pairs of the validation answers.",
    "validation/repetition": "Share of four-word runs that came before in the same answer, mean over the validation answers.",
}

UPDATE_MEANS = ("policy_loss", "value_loss", "clip_fraction", "approx_kl", "grad_norm_policy", "grad_norm_value")


def is_defined(name: str) -> bool:
    return name in GLOSSARY or any(name.startswith(known[:-1]) for known in GLOSSARY if known.endswith("/*"))


def rollout_metrics(pairs: SAPairs) -> dict[str, float]:
    """What the rollout shows by itself: lengths, KL, entropy."""
    tokens, mask = pairs.tokens, pairs.mask
    assert tokens is not None
    numbers = {
        "kl": _sequence_mean(pairs.column("logprob_policy") - pairs.column("logprob_ref"), mask),
        "kl_exact": _sequence_mean(pairs.column("kl_exact"), mask),
        "truncation_cost": _sequence_mean(pairs.column("truncation_cost"), mask),
        "sampling_gap": sampling_gap(pairs),
        "outside_kept": (pairs.columns["outside_kept"] * mask).sum() if "outside_kept" in pairs.columns else 0,
        "entropy": masked_mean(pairs.column("entropy"), mask),
        "response_length": mask.sum() / len(mask),
        "eos_rate": tokens.ended.float().mean(),
        "truncated_prompts": tokens.truncated.sum(),
        "tokens": mask.sum(),
    }
    return {name: float(value) for name, value in numbers.items()}


def sampling_gap(pairs: SAPairs) -> Tensor | float:
    """nan where whatever sampled did not say what it thought."""
    assert pairs.tokens is not None
    sampled = pairs.tokens.sampled_logprobs
    return float("nan") if sampled is None else masked_mean((sampled - pairs.column("logprob_policy")).abs(), pairs.mask)


def score_metrics(scores: Tensor, by_name: dict[str, Tensor]) -> dict[str, float]:
    """Scores (B,), nan where failed."""
    valid = scores[~scores.isnan()]
    numbers = {f"reward/{name}": float(each.nanmean()) for name, each in by_name.items()}
    deviation = float(valid.std(correction=0)) if len(valid) else float("nan")
    failed = len(scores) - len(valid)
    return {"avg_reward": float(valid.mean()), "reward_std": deviation, "failed_rewards": failed, **numbers}


def advantage_metrics(pairs: SAPairs) -> dict[str, float]:
    """From pairs with values, returns and advantages that are not whitened yet."""
    mask, values, returns, advantages = pairs.mask, *(pairs.column(name) for name in ("value", "return", "advantage"))
    spread = masked_mean((advantages - masked_mean(advantages, mask)) ** 2, mask).sqrt()
    numbers = {
        "value_mean": masked_mean(values, mask),
        "return_mean": masked_mean(returns, mask),
        "explained_variance": explained_variance(values, returns, mask),
        "advantage_std": spread,
    }
    return {name: float(value) for name, value in numbers.items()}


def update_metrics(history: list[dict[str, Tensor]]) -> dict[str, float]:
    """One number a metric from what each minibatch measured; nan for what no minibatch did."""
    nan = float("nan")

    def seen(name: str) -> Tensor | None:
        values = [stats[name].float() for stats in history if name in stats]
        return torch.stack(values) if values else None

    numbers = {name: nan if (values := seen(name)) is None else float(values.mean()) for name in UPDATE_MEANS}
    ratios, errors = seen("ratio_max"), seen("ratio_error")
    numbers["ratio_max"] = nan if ratios is None else float(ratios.max())
    numbers["first_ratio_error"] = nan if errors is None else float(errors[0])
    return numbers


def _sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over sequences of the sum over a sequence's real tokens."""
    return masked_mean(x, mask, total=len(mask))
