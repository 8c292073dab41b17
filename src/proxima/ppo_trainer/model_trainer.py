"""`ModelTrainer`: the update: epochs, minibatches, gradient clipping, optimiser steps (phase 7 of a PPO
step). In: minibatches. Out: updated policy and value weights, and what the update measured.

One minibatch is one optimiser step. It is read in micro-batches whose losses are divided by the minibatch's
token count, so gradients do not depend on how it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from proxima.base_setup import ModelSet
from proxima.config import PPOConfig
from proxima.core.ops import entropy, exact_kl, masked_mean
from proxima.core.pairs import PairsLike, TokenPairs, as_pairs
from proxima.core.sampling import kept_logits, log_softmax
from proxima.core.tokenizer import Tokenizer
from proxima.experience_buffer import BatchedData
from proxima.models import by_chunks, flatten_column
from proxima.runs import update_metrics
from proxima.runtime.distributed import all_reduce_gradients, clip_gradients
from proxima.runtime.engine import head_logprobs, token_logprobs
from proxima.token_attribution import ensure_tokens
from proxima.training import (
    Moved,
    TokenWeights,
    approximate_kl,
    kl_loss,
    policy_objective,
    policy_ratio,
    token_weights,
    value_loss,
)

ADAM_EPS = 1e-5  # reference value of PPO for language models

MUST_BE_FINITE = ("policy_loss", "value_loss", "grad_norm_policy", "grad_norm_value")


class PolicyLosses(NamedTuple):
    """Of each response token of a micro-batch, packed (M,)."""

    loss: Tensor
    ratio: Tensor  # without a gradient
    stopped: Tensor  # where the objective stopped or capped a gradient


class ModelTrainer:
    """Two optimisers, one for the policy and one for the value model, if there is one."""

    def __init__(self, models: ModelSet, tokenizer: Tokenizer, config: PPOConfig):
        self.models, self.tokenizer, self.config = models, tokenizer, config
        self.policy_parameters = models.policy.parameters()
        self.value_parameters = models.value.parameters() if models.value else []
        self.policy_optimizer = _adamw(self.policy_parameters, config.learning_rate)
        self.value_optimizer = (
            _adamw(self.value_parameters, config.value_learning_rate) if models.value else None
        )
        self.history: list[dict[str, Tensor]] = []  # what each minibatch of the last step measured

    def train_policy_model(self, sa_pairs: PairsLike) -> float:
        """One optimiser step of the policy on these pairs; its loss."""
        return float(self._minibatch(self._pairs(sa_pairs), value=False)["policy_loss"])

    def train_value_model(self, sa_pairs: PairsLike) -> float:
        """One optimiser step of the value model on these pairs; its loss."""
        if self.models.value is None:
            raise ValueError(f"adv_estimator {self.config.adv_estimator} has no value model to train")
        return float(self._minibatch(self._pairs(sa_pairs), policy=False)["value_loss"])

    def train_step(self, batch: PairsLike) -> tuple[float, float]:
        """One optimiser step of each: (policy loss, value loss), the latter nan without a value model."""
        stats = self._minibatch(self._pairs(batch))
        return float(stats["policy_loss"]), float(stats.get("value_loss", float("nan")))

    def update_models(
        self, data: BatchedData | None, rate_factor: float, policy: bool = True
    ) -> dict[str, float]:
        """All epochs over a rollout, at this factor of both learning rates; what was measured.

        Args:
            data: None where there is nothing to train on.
            policy: False trains the value model alone (critic warm-up).
        """
        rates = self.set_learning_rates(rate_factor)
        history, stopped = ([], False) if data is None else self.update(data, policy)
        self.history = history
        taken = [stats for stats in history if "skipped" not in stats]
        return {
            **update_metrics(taken),
            "optimizer_steps": len(taken) - stopped,
            "skipped_updates": len(history) - len(taken),
            "kl_stopped": int(stopped),
            "learning_rate": rates[0],
            "value_learning_rate": rates[1],
        }

    def update(self, data: BatchedData, policy: bool = True) -> tuple[list[dict[str, Tensor]], bool]:
        """What each minibatch of all epochs measured, and whether kl_stop ended the policy's early."""
        config = self.config
        if not config.value_epochs:
            return self._epochs(data, config.ppo_epochs, policy=policy)
        history, stopped = self._epochs(data, config.ppo_epochs, value=False) if policy else ([], False)
        return history + self._epochs(data, config.value_epochs, policy=False)[0], stopped

    def _epochs(
        self, data: BatchedData, epochs: int, policy: bool = True, value: bool = True
    ) -> tuple[list[dict[str, Tensor]], bool]:
        history = []
        for epoch in range(epochs):
            for batch in data.epoch(epoch):
                history.append(self._minibatch(self._pairs(batch), policy, value))
                if "stopped" in history[-1]:
                    return history, True
        return history, False

    def set_learning_rates(self, factor: float) -> tuple[float, float]:
        """Both learning rates at this factor of the config's."""
        rates = (factor * self.config.learning_rate, factor * self.config.value_learning_rate)
        for optimizer, rate in zip((self.policy_optimizer, self.value_optimizer), rates, strict=True):
            for group in optimizer.param_groups if optimizer else ():
                group["lr"] = rate
        return rates

    def _pairs(self, sa_pairs: PairsLike) -> TokenPairs:
        """Pairs of a rollout as they are; plain dicts are given their token ids."""
        if isinstance(sa_pairs, TokenPairs):
            return sa_pairs
        return ensure_tokens(as_pairs(sa_pairs), self.tokenizer, self.models.device)

    def _minibatch(self, batch: TokenPairs, policy: bool = True, value: bool = True) -> dict[str, Tensor]:
        """Backward over all micro-batches, then the optimiser steps.

        Above kl_stop: no step, and "stopped" is set. With a loss or gradient that is not finite: no step of
        either optimiser, and "skipped" is set (the one question an update waits for the device to answer).
        """
        longest, value = batch.tokens.longest, value and self.models.value is not None
        processes, passes = self.models.processes, self.models.micro_batches
        stats: dict[str, Tensor] = {}
        if policy and value and self.models.value_shares_policy:
            # both add to the same gradients: repeated together
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
        decisive = torch.stack([stats[name].float() for name in MUST_BE_FINITE if name in stats])
        if not decisive.isfinite().all():
            return stats | {"skipped": torch.tensor(True)}
        if policy:
            self.policy_optimizer.step()
        if value and self.value_optimizer is not None:
            self.value_optimizer.step()
        return stats

    def _policy_backward(self, batch: TokenPairs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gradients of this process's share; numbers to add up and numbers of which the largest counts."""
        total, nothing = batch.mask.sum(), torch.zeros((), device=batch.mask.device)
        config = self.config
        horizon = config.max_new_tokens * (config.max_turns if config.has_episodes else 1)
        counted = token_weights(config.loss_weighting, batch.mask.sum(1), horizon)
        if counted.rows is not None:
            batch = batch.with_columns(loss_weight=counted.rows.unsqueeze(1).expand(batch.mask.shape))
        sums = dict.fromkeys(("policy_loss", "approx_kl", "clip_fraction"), nothing)
        peaks = dict.fromkeys(("ratio_max", "ratio_error"), nothing)
        self.policy_optimizer.zero_grad()
        with self.models.policy.training():
            for part in self._micro_batches(batch):
                losses, ratio, stopped = self._policy_losses(part)
                loss = _mean(counted, losses, part)
                loss.backward()
                with torch.no_grad():
                    measured = {
                        "policy_loss": loss.detach(),
                        "approx_kl": masked_mean(approximate_kl(ratio), None, total),
                        "clip_fraction": masked_mean(stopped.float(), None, total),
                    }
                    sums = {name: sums[name] + number for name, number in measured.items()}
                    worst = {"ratio_max": ratio.max(), "ratio_error": (ratio - 1).abs().max()}
                    peaks = {name: torch.maximum(peaks[name], peak) for name, peak in worst.items()}
        return sums, peaks

    def _policy_losses(self, part: TokenPairs) -> PolicyLosses:
        config, tokens = self.config, part.tokens
        # the reference first: the policy's backward follows its forward
        whole = config.kl_loss_coef > 0 and config.kl_loss == "exact"
        reference = [self.models.sft.response_hidden(tokens)] if whole else []
        states = [self.models.policy.response_hidden(tokens), *reference]
        head, chunk = self.models.policy.frozen_head(states[0]), self.models.micro_batches.chunk
        if head is not None and tokens.kept is None and not whole and config.entropy_coef == 0:

            def by_head(hidden: Tensor, ids: Tensor, _: None) -> tuple[Tensor]:
                return (head_logprobs(hidden, head, ids, config.temperature),)

            (logprobs,) = by_chunks(by_head, tokens, states[0], recompute=False, chunk=chunk)
            extra = torch.zeros_like(logprobs)
        else:
            logprobs, extra = by_chunks(self._chunk_losses, tokens, *states, chunk=chunk)
        old, advantages = (
            flatten_column(part.column(name), tokens) for name in ("logprob_policy", "advantage")
        )
        sampled = tokens.sampled_logprobs
        moved = Moved(logprobs, old, advantages, None if sampled is None else flatten_column(sampled, tokens))
        band = (config.clip_epsilon, config.clip_epsilon_high, config.dual_clip)
        losses, stopped = policy_objective(config.objective, moved, *band)
        ratio = policy_ratio(logprobs, old)
        if config.kl_loss_coef > 0 and not whole:  # of the tokens that were sampled, as the objective
            ref_logprobs = flatten_column(part.column("logprob_ref"), tokens)
            losses = losses + config.kl_loss_coef * kl_loss(config.kl_loss, logprobs, ref_logprobs, ratio)
        if "importance" in part.columns:  # another engine, or an older policy, chose the tokens
            losses = losses * flatten_column(part.column("importance"), tokens)
        return PolicyLosses(losses + extra, ratio.detach(), stopped)

    def _chunk_losses(self, hidden: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        """Log-probabilities (m,), and the loss terms that need whole distributions."""
        *ref_hidden, ids, kept = given
        config = self.config
        logits = self.models.policy.logits(hidden)
        logprobs = token_logprobs(logits, ids, kept, config.temperature)
        extra = torch.zeros_like(logprobs)
        if config.entropy_coef > 0:
            acting = kept_logits(logits.unsqueeze(1).float() / config.temperature, kept)
            extra = extra - config.entropy_coef * entropy(acting).squeeze(1)
        if ref_hidden:
            ref_logits = self.models.sft.logits(ref_hidden[0])
            both = (log_softmax(each, config.temperature) for each in (logits, ref_logits))
            extra = extra + config.kl_loss_coef * exact_kl(*both)
        return logprobs, extra

    def _is_far(self, stats: Mapping[str, Tensor]) -> bool:
        """Whether the policy has moved further than kl_stop allows."""
        return (
            self.config.kl_stop > 0
            and "approx_kl" in stats
            and bool(stats["approx_kl"] > self.config.kl_stop)
        )

    def _value_backward(self, batch: TokenPairs) -> dict[str, Tensor]:
        total, value = batch.mask.sum(), self.models.value
        assert value is not None
        assert self.value_optimizer is not None
        weight = self.config.value_coef if value.shares_policy else 1.0
        summed = torch.zeros((), device=batch.mask.device)
        self.value_optimizer.zero_grad()
        with value.training() if not value.shares_policy else self.models.policy.training():
            for part in self._micro_batches(batch):
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

    def _micro_batches(self, batch: TokenPairs) -> Iterator[TokenPairs]:
        if self.models.processes.is_distributed:
            sizes = batch.tokens.prompt_sizes + batch.tokens.sizes
            batch = batch.select(self.models.processes.balanced_rows(sizes))
        for rows in self.models.micro_batches.rows(batch.tokens):
            yield batch.select(rows)


def _mean(counted: TokenWeights, losses: Tensor, part: TokenPairs) -> Tensor:
    """A micro-batch's share in the policy loss of its minibatch."""
    weights = part.columns.get("loss_weight")
    return counted.mean(losses, None if weights is None else flatten_column(weights, part.tokens))


def _adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.AdamW:
    make = partial(torch.optim.AdamW, parameters, lr=rate, eps=ADAM_EPS, weight_decay=0.0)
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        # sharded and whole ones: one at a time
        return make(foreach=False)
    return make(fused=all(parameter.is_cuda for parameter in parameters))
