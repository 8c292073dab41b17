"""`ModelTrainer`: stage 7. In: minibatches. Out: updated policy and value weights, and what the update
measured.

One minibatch is one optimiser step. It is read in micro-batches whose losses are divided by the minibatch's
token count, so gradients do not depend on how it is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from proxima.base_setup import ModelSet
from proxima.config import PPOConfig
from proxima.core.ops import entropy, exact_kl, masked_mean
from proxima.core.pairs import SAPairs, as_pairs
from proxima.core.sampling import kept_logits, token_logprobs
from proxima.core.tokenizer import Tokenizer
from proxima.experience_buffer import BatchedData
from proxima.models.response_tokens import by_chunks, flatten_column
from proxima.runtime.distributed.gradient_sync import all_reduce_gradients, clip_gradients
from proxima.token_attribution.sa_pair_builder import ensure_tokens
from proxima.training import approximate_kl, clipped, policy_loss, policy_ratio, value_loss

ADAM_EPS = 1e-5  # reference value of PPO for language models

MUST_BE_FINITE = ("policy_loss", "value_loss", "grad_norm_policy", "grad_norm_value")

Pairs = SAPairs | Iterable[Mapping[str, Any]]


class ModelTrainer:
    """Two optimisers, one for the policy and one for the value model."""

    def __init__(self, models: ModelSet, tokenizer: Tokenizer, config: PPOConfig):
        self.models, self.tokenizer, self.config = models, tokenizer, config
        self.policy_parameters = models.policy.parameters()
        self.value_parameters = models.value.parameters()
        self.policy_optimizer = _adamw(self.policy_parameters, config.learning_rate)
        self.value_optimizer = _adamw(self.value_parameters, config.value_learning_rate)

    def train_policy_model(self, sa_pairs: Pairs) -> float:
        """One optimiser step of the policy on these pairs; its loss."""
        return float(self._minibatch(self._pairs(sa_pairs), value=False)["policy_loss"])

    def train_value_model(self, sa_pairs: Pairs) -> float:
        """One optimiser step of the value model on these pairs; its loss."""
        return float(self._minibatch(self._pairs(sa_pairs), policy=False)["value_loss"])

    def train_step(self, batch: Pairs) -> tuple[float, float]:
        """One optimiser step of each: (policy loss, value loss)."""
        stats = self._minibatch(self._pairs(batch))
        return float(stats["policy_loss"]), float(stats["value_loss"])

    def update(self, data: BatchedData, policy: bool = True) -> tuple[list[dict[str, Tensor]], bool]:
        """All epochs over a rollout: what each minibatch measured, and whether kl_stop ended it early.

        Args:
            policy: False trains the value model alone (critic warm-up).
        """
        history = []
        for epoch in range(self.config.ppo_epochs):
            for batch in data.epoch(epoch):
                history.append(self._minibatch(batch, policy=policy))
                if "stopped" in history[-1]:
                    return history, True
        return history, False

    def set_learning_rates(self, factor: float) -> tuple[float, float]:
        """Both learning rates at this factor of the config's."""
        rates = (factor * self.config.learning_rate, factor * self.config.value_learning_rate)
        for optimizer, rate in zip((self.policy_optimizer, self.value_optimizer), rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
        return rates

    def _pairs(self, sa_pairs: Pairs) -> SAPairs:
        return ensure_tokens(as_pairs(sa_pairs), self.tokenizer, self.models.device)

    def _minibatch(self, batch: SAPairs, policy: bool = True, value: bool = True) -> dict[str, Tensor]:
        """Backward over all micro-batches, then the optimiser steps.

        Above kl_stop: no step, and "stopped" is set. With a loss or gradient that is not finite: no step of
        either optimiser, and "skipped" is set (the one question an update waits for the device to answer).
        """
        assert batch.tokens is not None
        longest, processes = batch.tokens.longest, self.models.processes
        stats: dict[str, Tensor] = {}
        passes = self.models.micro_batches
        if (
            policy and value and self.models.value.shares_policy
        ):  # both add to the same gradients: repeated together
            (sums, peaks), more = passes.run(
                lambda: (self._policy_backward(batch), self._value_backward(batch)), longest
            )
            stats |= processes.sum({**sums, **more}) | processes.max(peaks)
        else:
            if policy:
                sums, peaks = passes.run(lambda: self._policy_backward(batch), longest)
                stats |= processes.sum(sums) | processes.max(peaks)
            if value and not self._is_far(stats):
                stats |= processes.sum(passes.run(lambda: self._value_backward(batch), longest))
        if self._is_far(stats):
            return stats | {"stopped": torch.tensor(True)}
        if policy:
            stats["grad_norm_policy"] = self._clip(self.policy_parameters)
        if value:
            stats["grad_norm_value"] = self._clip(self.value_parameters)
        if (
            not torch.stack([stats[name].float() for name in MUST_BE_FINITE if name in stats])
            .isfinite()
            .all()
        ):
            return stats | {"skipped": torch.tensor(True)}
        if policy:
            self.policy_optimizer.step()
        if value:
            self.value_optimizer.step()
        return stats

    def _policy_backward(self, batch: SAPairs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients of this process's share; numbers to add up and numbers of which the largest counts."""
        config, total = self.config, batch.mask.sum()
        sums = dict.fromkeys(
            ("policy_loss", "approx_kl", "clip_fraction"), torch.zeros((), device=batch.mask.device)
        )
        peaks = dict.fromkeys(("ratio_max", "ratio_error"), torch.zeros((), device=batch.mask.device))
        self.policy_optimizer.zero_grad()
        with self.models.policy.training():
            for part in self._micro_batches(batch):
                ratio, losses, advantages = self._policy_losses(part)
                loss = losses.sum() / total
                loss.backward()
                with torch.no_grad():
                    measured = {
                        "policy_loss": loss.detach(),
                        "approx_kl": approximate_kl(ratio).sum() / total,
                        "clip_fraction": clipped(ratio, advantages, config.clip_epsilon).float().sum()
                        / total,
                    }
                    sums = {name: sums[name] + number for name, number in measured.items()}
                    worst = {"ratio_max": ratio.max(), "ratio_error": (ratio - 1).abs().max()}
                    peaks = {name: torch.maximum(peaks[name], peak) for name, peak in worst.items()}
        return sums, peaks

    def _policy_losses(self, part: SAPairs) -> tuple[Tensor, Tensor, Tensor]:
        """Ratio, loss and advantage (M,) of each response token."""
        config, tokens = self.config, part.tokens
        assert tokens is not None
        reference = [self.models.sft.response_hidden(tokens)] if config.kl_loss_coef > 0 else []
        states = [
            self.models.policy.response_hidden(tokens),
            *reference,
        ]  # the policy last: its backward follows
        logprobs, extra = by_chunks(self._chunk_losses, tokens, *states)
        old, advantages = (
            flatten_column(part.column(name), tokens) for name in ("logprob_policy", "advantage")
        )
        ratio = policy_ratio(logprobs, old)
        losses = policy_loss(ratio, advantages, config.clip_epsilon, config.dual_clip)
        if "importance" in part.columns:  # another engine, or an older policy, chose the tokens
            losses = losses * flatten_column(part.column("importance"), tokens)
        return ratio, losses + extra, advantages

    def _chunk_losses(self, hidden: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        """Log-probabilities (m,), and the loss terms that need whole distributions."""
        *ref_hidden, ids, kept = given
        config = self.config
        logits = self.models.policy.logits(hidden).unsqueeze(1)
        logprobs = token_logprobs(logits, ids.unsqueeze(1), kept, config.temperature)
        extra = torch.zeros_like(logprobs)
        if config.entropy_coef > 0:
            extra = extra - config.entropy_coef * entropy(
                kept_logits(logits.float() / config.temperature, kept)
            )
        if ref_hidden:
            ref_logits = self.models.sft.logits(ref_hidden[0]).unsqueeze(1)
            kl = exact_kl(logits.float() / config.temperature, ref_logits.float() / config.temperature)
            extra = extra + config.kl_loss_coef * kl
        return logprobs.squeeze(1), extra.squeeze(1)

    def _is_far(self, stats: Mapping[str, Tensor]) -> bool:
        """Whether the policy has moved further than kl_stop allows."""
        return (
            self.config.kl_stop > 0
            and "approx_kl" in stats
            and bool(stats["approx_kl"] > self.config.kl_stop)
        )

    def _value_backward(self, batch: SAPairs) -> dict[str, Tensor]:
        total, value = batch.mask.sum(), self.models.value
        weight = self.config.value_coef if value.shares_policy else 1.0
        summed = torch.zeros((), device=batch.mask.device)
        self.value_optimizer.zero_grad()
        with value.training() if not value.shares_policy else self.models.policy.training():
            for part in self._micro_batches(batch):
                assert part.tokens is not None
                values = value.response_values(part.tokens)
                losses = value_loss(
                    values, part.column("return"), part.columns.get("value"), self.config.value_clip
                )
                loss = masked_mean(losses, part.mask, total)
                (weight * loss).backward()
                summed = summed + loss.detach()
        return {"value_loss": summed}

    def _clip(self, parameters: list[nn.Parameter]) -> Tensor:
        """Add up the shares of all processes, clip, and say how large the gradient was."""
        all_reduce_gradients(parameters, self.models.processes)
        return clip_gradients(parameters, self.config.max_grad_norm or float("inf"), self.models.processes)

    def _micro_batches(self, batch: SAPairs) -> Iterator[SAPairs]:
        assert batch.tokens is not None
        if self.models.processes.is_distributed:
            batch = batch.select(
                self.models.processes.balanced_rows(batch.tokens.prompt_sizes + batch.tokens.sizes)
            )
        assert batch.tokens is not None
        for rows in self.models.micro_batches.rows(batch.tokens):
            yield batch.select(rows)


def _adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.AdamW:
    settings: dict[str, Any] = {"lr": rate, "eps": ADAM_EPS, "weight_decay": 0.0}
    if any(
        isinstance(parameter, DTensor) for parameter in parameters
    ):  # sharded and whole ones: one at a time
        return torch.optim.AdamW(parameters, foreach=False, **settings)
    return torch.optim.AdamW(parameters, fused=all(parameter.is_cuda for parameter in parameters), **settings)
