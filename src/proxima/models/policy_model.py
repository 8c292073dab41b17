"""`PolicyModel`: the model that PPO trains. It samples responses and gives the logits of their tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from proxima.core.episode import Conversation
from proxima.core.sampling import Sampling, choose, fold, hash_words, token_logprobs, truncate
from proxima.core.types import KeptSet, Tokens
from proxima.models.base_model import BaseModel
from proxima.models.reference_episodes import sample_episodes
from proxima.models.weight_files import adapter_tensors


class PolicyModel(BaseModel):
    """The base with the policy's adapter, or a trainable copy of the base."""

    @property
    def replays_experts(self) -> bool:
        return True

    @torch.no_grad()
    def is_still(self, reference: BaseModel) -> bool:
        """Whether its weights are provably those of the reference, so that both give the same answers.

        True before the first update where both are one network: with an adapter that is a copy of the
        reference's, or with a new one, whose up projections are zero. False where it cannot be said.
        """
        peft = self.backbone.peft
        if peft is None or self.backbone is not reference.backbone or self.backbone.sharded:
            return False
        if self.adapter is None:
            return reference.adapter is None
        own = adapter_tensors(peft, self.adapter)
        if reference.adapter is not None:
            theirs = adapter_tensors(peft, reference.adapter)
            return own.keys() == theirs.keys() and all(torch.equal(own[name], theirs[name]) for name in own)
        up = [name for name in own if ".lora_B." in name]
        known = all(".lora_A." in name or ".lora_B." in name for name in own)
        return known and not any(own[name].any() for name in up)

    @torch.no_grad()
    def generate(
        self, prompts: Tokens, sampling: Sampling, conversation: Conversation | None = None
    ) -> Tokens:
        """Sample one response per prompt, until its first EOS or `max_new_tokens`; or, where something
        answers, one episode of such turns.

        Args:
            prompts: the prompts are read; the responses are replaced.
        """
        if self.backbone.generation is not None:
            return self.backbone.generation.generate(prompts, sampling, self.adapter, conversation)
        if conversation is not None:
            return sample_episodes(self.generate_reference, prompts, sampling, conversation)
        return self.generate_reference(prompts, sampling)

    @torch.no_grad()
    def generate_reference(
        self, prompts: Tokens, sampling: Sampling, starts: Tensor | None = None, limits: Tensor | None = None
    ) -> Tokens:
        """The same on the reference path (`transformers`' forward pass and cache), for any architecture.

        Args:
            starts: (B,) columns in which the responses begin, where they continue episodes.
            limits: (B,) columns before which they must end.
        """
        starts = torch.zeros_like(prompts.keys) if starts is None else starts
        limits = starts + sampling.max_new_tokens if limits is None else limits
        if self.backbone.passes.decoding != "grouped":
            return self._sample(prompts, sampling, starts, limits)
        sizes = prompts.prompt_sizes
        groups = [(sizes == size).nonzero().flatten() for size in sizes.unique()]
        parts = [self._sample(prompts.select(rows), sampling, starts[rows], limits[rows]) for rows in groups]
        return Tokens.cat(parts).select(torch.cat(groups).argsort())

    def _sample(self, prompts: Tokens, sampling: Sampling, starts: Tensor, limits: Tensor) -> Tokens:
        eos = torch.tensor(sampling.eos_ids, device=self.device, dtype=torch.long)
        running = torch.ones(len(prompts.prompts), dtype=torch.bool, device=self.device)
        ended = ~running
        lanes = hash_words(prompts.keys, sampling.seed, sampling.step)
        chosen: list[Tensor] = []
        real: list[Tensor] = []
        kept: list[KeptSet | None] = []
        logprobs: list[Tensor] = []
        with self.active():
            steps = self.backbone.passes.steps(
                prompts.prompt_ids, prompts.prompt_mask, self.backbone.begin_pass
            )
            logits = next(steps)  # (B, V)
            for position in range(sampling.max_new_tokens):
                scaled = logits.float() / sampling.temperature
                kept_here = truncate(scaled, sampling.top_k, sampling.top_p)
                token = choose(scaled, kept_here, fold(lanes, starts + position))
                chosen.append(token)
                real.append(running)
                kept.append(kept_here)
                logprobs.append(token_logprobs(scaled.unsqueeze(1), token.unsqueeze(1), kept_here, 1.0))
                ended = ended | (running & torch.isin(token, eos))
                running = running & ~ended & (starts + position + 1 < limits)
                if not running.any():
                    break
                logits = steps.send(token)
        mask = torch.stack(real, 1)  # (B, R): True up to and including the first EOS
        return replace(
            prompts,
            response_ids=torch.stack(chosen, 1).masked_fill(~mask, 0),
            mask=mask,
            ended=ended,
            kept=_stack_positions(kept),
            sampled_logprobs=torch.cat(logprobs, 1).masked_fill(~mask, 0),
        )


def _stack_positions(kept: list[KeptSet | None]) -> KeptSet | None:
    """The kept sets of all positions: (B, R, ...)."""
    ids = [item.ids for item in kept if item is not None and item.ids is not None]
    bits = [item.bits for item in kept if item is not None and item.bits is not None]
    if ids:
        return KeptSet(ids=torch.cat(ids, 1))
    return KeptSet(bits=torch.cat(bits, 1)) if bits else None
