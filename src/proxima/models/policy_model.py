"""`PolicyModel`: the model that PPO trains. In: prompts as ids. Out: sampled responses; logits for their log-probabilities."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from proxima.models.base_model import BaseModel
from proxima.sampling import Sampling, choose, hash_words, truncate
from proxima.types import KeptSet, Tokens


class PolicyModel(BaseModel):
    """Base plus the policy's adapter, or a trainable copy of the base."""

    @torch.no_grad()
    def generate(self, prompts: Tokens, sampling: Sampling) -> Tokens:
        """Sample one response a prompt, until its first EOS or `max_new_tokens`.

        Args:
            prompts: its prompt side is read; its response side is replaced.
        """
        if self.backbone.generation is not None:
            return self.backbone.generation.generate(prompts, sampling, self.adapter)
        return self.generate_plainly(prompts, sampling)

    @torch.no_grad()
    def generate_plainly(self, prompts: Tokens, sampling: Sampling) -> Tokens:
        """The same through `transformers`' own forward pass and cache, for any architecture."""
        network = self.backbone.network
        eos = torch.tensor(sampling.eos_ids, device=self.device, dtype=torch.long)
        mask, ids = prompts.prompt_mask, prompts.prompt_ids.masked_fill(~prompts.prompt_mask, 0)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        accepted = inspect.signature(network.forward).parameters
        running = torch.ones(len(ids), dtype=torch.bool, device=self.device)
        chosen, real, kept, cache = [], [], [], None
        with self.active():
            for position in range(sampling.max_new_tokens):
                given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask.long(), "past_key_values": cache}
                if "position_ids" in accepted:
                    given["position_ids"] = positions
                if "logits_to_keep" in accepted:
                    given["logits_to_keep"] = 1
                self.backbone.begin_pass()
                output = network(**given, use_cache=True)
                cache = output.past_key_values
                scaled = output.logits[:, -1].float() / sampling.temperature  # (B, V)
                kept_here = truncate(scaled, sampling.top_k, sampling.top_p)
                token = choose(scaled, kept_here, hash_words(prompts.keys, sampling.seed, sampling.step, position))
                chosen.append(token)
                real.append(running)
                kept.append(kept_here)
                running = running & ~torch.isin(token, eos)
                if not running.any():
                    break
                ids, positions = token.unsqueeze(1), positions[:, -1:] + 1
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        response_mask = torch.stack(real, 1)  # (B, R): True up to and including the first EOS
        response_ids = torch.stack(chosen, 1).masked_fill(~response_mask, 0)
        return replace(prompts, response_ids=response_ids, mask=response_mask, ended=~running, kept=_join(kept))


def _join(kept: list[KeptSet | None]) -> KeptSet | None:
    """The kept sets of all positions: (B, R, ...)."""
    ids = [item.ids for item in kept if item is not None and item.ids is not None]
    bits = [item.bits for item in kept if item is not None and item.bits is not None]
    if ids:
        return KeptSet(ids=torch.cat(ids, 1))
    return KeptSet(bits=torch.cat(bits, 1)) if bits else None
