"""The metrics of a step, computed.

In: finished pairs and what the update measured. Out: floats by the names declared in
`proxima.runs.metric_declarations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

import torch
from torch import Tensor

from proxima.core.ops import explained_variance, masked_mean, turn_ends
from proxima.core.pairs import SAPairs, TokenPairs
from proxima.core.types import Tokens
from proxima.runs.value_calibration import value_calibration

ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""How much a token's log-probability may differ between two ways of computing it in this type."""

UPDATE_MEANS = (
    "policy_loss",
    "value_loss",
    "clip_fraction",
    "approx_kl",
    "grad_norm_policy",
    "grad_norm_value",
)


def rollout_metrics(pairs: TokenPairs) -> dict[str, float]:
    """Metrics of the rollout alone: lengths, KL, entropy."""
    tokens, mask = pairs.tokens, pairs.mask
    numbers = {
        "kl": _sequence_mean(pairs.column("logprob_policy") - pairs.column("logprob_ref"), mask),
        "kl_exact": _sequence_mean(pairs.column("kl_exact"), mask),
        "truncation_cost": _sequence_mean(pairs.column("truncation_cost"), mask),
        "sampling_gap": sampling_gap(pairs),
        "outside_kept": (pairs.columns["outside_kept"] * mask).sum()
        if "outside_kept" in pairs.columns
        else 0,
        "entropy": masked_mean(pairs.column("entropy"), mask),
        "response_length": mask.sum() / len(mask),
        "eos_rate": tokens.ended.float().mean(),
        "truncated_prompts": tokens.truncated.sum(),
        "tokens": mask.sum(),
    }
    return {name: float(value) for name, value in {**numbers, **_episode_metrics(tokens)}.items()}


def _episode_metrics(tokens: Tokens) -> dict[str, Tensor | float]:
    """Nothing where a response is one turn."""
    if tokens.episodes is None or tokens.observed is None:
        return {}
    return {
        "episode_turns": turn_ends(tokens.mask).sum() / len(tokens.mask),
        "observed_tokens": tokens.observed.sum() / len(tokens.mask),
        "malformed_calls": sum(episode.malformed for episode in tokens.episodes),
    }


def sampling_gap(pairs: TokenPairs) -> Tensor | float:
    """nan where the sampling engine reported no log-probabilities."""
    sampled = pairs.tokens.sampled_logprobs
    return (
        float("nan")
        if sampled is None
        else masked_mean((sampled - pairs.column("logprob_policy")).abs(), pairs.mask)
    )


def score_metrics(
    scores: Tensor,
    by_name: dict[str, Tensor],
    spread: Tensor | None = None,
    failed_programs: Tensor | None = None,
) -> dict[str, float]:
    """Scores (B,), nan where failed; spread (B,) of an ensemble's heads, nan there too; (B,) 1 where a
    program came to no end."""
    valid = scores[~scores.isnan()]
    numbers = {f"reward/{name}": float(each.nanmean()) for name, each in by_name.items()}
    deviation = float(valid.std(correction=0)) if len(valid) else float("nan")
    failed = len(scores) - len(valid)
    if spread is not None:
        numbers["reward_spread"] = float(spread.nanmean())
    if failed_programs is not None:
        numbers["failed_programs"] = float(failed_programs.sum())
    return {"avg_reward": float(valid.mean()), "reward_std": deviation, "failed_rewards": failed, **numbers}


def advantage_metrics(pairs: SAPairs) -> dict[str, float]:
    """From pairs with advantages that are not whitened yet; nan of the values where there is no value
    model."""
    mask, advantages = pairs.mask, pairs.column("advantage")
    numbers: dict[str, Tensor | float]
    if {"value", "return"} <= set(pairs.columns):
        values, returns = pairs.column("value"), pairs.column("return")
        numbers = {
            "value_mean": masked_mean(values, mask),
            "return_mean": masked_mean(returns, mask),
            "explained_variance": explained_variance(values, returns, mask),
            **value_calibration(values, returns, mask),
        }
    else:
        numbers = dict.fromkeys(("value_mean", "return_mean", "explained_variance"), float("nan"))
    spread = masked_mean((advantages - masked_mean(advantages, mask)) ** 2, mask).sqrt()
    return {name: float(value) for name, value in {**numbers, "advantage_std": spread}.items()}


def update_metrics(history: list[dict[str, Tensor]]) -> dict[str, float]:
    """One number per metric from what each minibatch measured; nan for what no minibatch measured."""
    nan = float("nan")

    def seen(name: str) -> Tensor | None:
        values = [stats[name].float() for stats in history if name in stats]
        return torch.stack(values) if values else None

    numbers = {name: nan if (values := seen(name)) is None else float(values.mean()) for name in UPDATE_MEANS}
    ratios, errors = seen("ratio_max"), seen("ratio_error")
    numbers["ratio_max"] = nan if ratios is None else float(ratios.max())
    numbers["first_ratio_error"] = nan if errors is None else float(errors[0])
    return numbers


def numbers_of(outcome: Mapping[str, object]) -> dict[str, float]:
    """What a step logs: every number of its outcome. Texts, lists and pairs are results, not metrics."""
    scalars = {
        name: value
        for name, value in outcome.items()
        if isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0)
    }
    return {
        name: value if isinstance(value, (int, float)) else float(value) for name, value in scalars.items()
    }


def _sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over sequences of the sum over a sequence's real tokens."""
    return masked_mean(x, mask, total=len(mask))
