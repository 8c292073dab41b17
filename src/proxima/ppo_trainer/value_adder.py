"""`ValueAdder`: value estimates V(s) (phase 4 of a PPO step).

In: pairs or states. Out: V(s) of each, read at the token before the action.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proxima.base_setup import ModelSet
from proxima.config import PPOConfig
from proxima.core.encoding import encode_prompts, pad_rows
from proxima.core.pairs import PairsLike, SAPairs, TokenPairs, as_pairs
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import pad_to
from proxima.models import ValueModel
from proxima.ppo_trainer.process_shares import own_share
from proxima.ppo_trainer.prompt_tokens import check_prompts


class ValueAdder:
    """Adds `value` to state-action pairs."""

    def __init__(self, models: ModelSet, tokenizer: Tokenizer, config: PPOConfig):
        self.models, self.tokenizer, self.config = models, tokenizer, config

    @torch.no_grad()
    def add_values_to_sa_pairs(self, sa_pairs: PairsLike) -> SAPairs:
        """Pairs with `value`, unchanged where there is no value model; plain dicts are read through their
        `state` texts."""
        pairs, value = as_pairs(sa_pairs), self.models.value
        if value is None:
            return pairs
        if not isinstance(pairs, TokenPairs):
            values = torch.zeros(pairs.mask.shape, dtype=torch.float64)
            values[pairs.cells[:, 0], pairs.cells[:, 1]] = torch.tensor(
                self.add_values([pair["state"] for pair in pairs]), dtype=torch.float64
            )
            return pairs.with_columns(value=values)
        tokens, processes = pairs.tokens, self.models.processes
        width = tokens.mask.shape[1]
        own = own_share(tokens, processes)

        def measured() -> Tensor:
            passes = [own.select(rows) for rows in self.models.micro_batches.rows(own)]
            nothing = torch.zeros(0, width, device=pairs.mask.device)
            return torch.cat([nothing, *(pad_to(value.response_values(part), width) for part in passes)])

        values = self.models.micro_batches.run(measured, tokens.longest)
        return pairs.with_columns(value=processes.all_gather(values, len(tokens.prompts)))

    @torch.no_grad()
    def values_after_cut(self, pairs: TokenPairs) -> Tensor:
        """V after the last token (B,) of each response that was cut, 0 after a finished one."""
        value = self._value
        processes = self.models.processes
        micro_batches = self.models.micro_batches
        own = own_share(pairs.tokens, processes)
        cut = (~own.ended).nonzero().flatten().cpu()

        def measured() -> Tensor:
            after = torch.zeros(len(own.prompts), device=pairs.mask.device)
            chosen = own.select(cut)
            for rows in micro_batches.rows(chosen) if len(cut) else []:
                part = chosen.select(rows)
                found = value.last_values(part.input_ids, part.input_mask, part.experts)
                after[cut[rows.cpu()].to(after.device)] = found.to(after)
            return after

        return processes.all_gather(
            micro_batches.run(measured, pairs.tokens.longest), len(pairs.tokens.prompts)
        )

    @property
    def _value(self) -> ValueModel:
        if self.models.value is None:
            raise ValueError(f"adv_estimator {self.config.adv_estimator} has no value model")
        return self.models.value

    @torch.no_grad()
    def add_values(self, states: Sequence[str]) -> list[float]:
        """The value of each state given as text."""
        states = check_prompts(states)
        values: list[float] = []
        for start in range(0, len(states), self.models.micro_batches.size):
            chunk = states[start : start + self.models.micro_batches.size]
            rows = encode_prompts(self.tokenizer, chunk)
            ids, mask = pad_rows(rows, self.tokenizer.pad_token_id, left=True)
            values += self._value.last_values(
                ids.to(self.models.device), mask.to(self.models.device)
            ).tolist()
        return values
