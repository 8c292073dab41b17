"""`SequenceGenerator`: stages 1 and 2. In: prompts as text. Out: sampled texts, and pairs with both log-probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proxima.base_setup import ModelSet
from proxima.config import PPOConfig
from proxima.models import PolicyModel, Sampling
from proxima.models.base_model import by_chunks, unpack
from proxima.pairs import SAPairs
from proxima.ppo_trainer.shares import join_tokens, own_share
from proxima.sampling import score_tokens, sequence_keys
from proxima.token_attribution import TokenAttributor
from proxima.types import KeptSet, Prompt, Rollout, Tokens, pad_to


class Stopwatch:
    """Seconds between laps; a lap on a GPU ends when its work has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self._laps[f"seconds/{name}"] = now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        return {**self._laps, "seconds": time.perf_counter() - self._start}


class SequenceGenerator:
    """Samples from the policy, then scores the sample with policy and reference in training-side forward passes."""

    def __init__(self, models: ModelSet, tokenizer: Any, config: PPOConfig):
        self.models, self.tokenizer, self.config = models, tokenizer, config
        self.attributor = TokenAttributor(tokenizer)

    def generate_sequences(
        self, prompts: Sequence[str], step: int = 0, clock: Stopwatch | None = None
    ) -> tuple[SAPairs, list[str]]:
        """Pairs and texts, one sequence a prompt. Noise follows from (seed, step, prompt): the same call, the same sample."""
        texts, rollout = self.generate(prompts, step, clock)
        return self.attributor.extract_pairs(texts, rollout), texts

    def generate(self, prompts: Sequence[str], step: int = 0, clock: Stopwatch | None = None) -> tuple[list[str], Rollout]:
        """Texts, and the record of their tokens and log-probabilities."""
        tokens = self.sample(prompts, step)
        if clock is not None:
            clock.lap("generate")
        return tokens.texts(), Rollout(tokens, self.score(tokens))

    def sample(self, prompts: Sequence[str], step: int = 0, reference: bool = False) -> Tokens:
        """One response a prompt, not scored; by the reference instead of the policy where asked."""
        settings = self.config
        sampling = Sampling(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            eos_ids=self.models.eos_ids,
            seed=settings.seed,
            step=step,
        )
        policy, sft, processes = self.models.policy, self.models.sft, self.models.processes
        model = PolicyModel(sft.backbone, sft.adapter) if reference else policy
        tokens = self.read_prompts(prompts)
        own = own_share(tokens, processes)
        sampled = model.generate(own, sampling) if len(own.prompts) else own
        if model.backbone is not policy.backbone:
            model.backbone.forget_generation()
        return join_tokens(tokens, sampled, processes) if processes.many else sampled

    def tokenize(self, prompts: Sequence[str], first: int = 0) -> tuple[list[str], list[list[int]], Tensor]:
        """Prompts with their ids, and which were cut to fit (B,). Refuses what would spoil the rollout.

        Args:
            first: number of the first prompt, where these are a part of a set; errors count from it.
        """
        prompts = check_prompts(prompts, first)
        rows: list[list[int]] = self.tokenizer(prompts)["input_ids"]
        if empty := [i for i, row in enumerate(rows) if not row]:
            raise ValueError(f"prompt {first + empty[0]} has no tokens: {prompts[empty[0]]!r}")
        truncated = torch.zeros(len(rows), dtype=torch.bool)
        if self.models.context_length is not None:
            room = self.models.context_length - self.config.max_new_tokens
            if room < 1:
                raise ValueError(
                    f"max_new_tokens ({self.config.max_new_tokens}) leaves no room for a prompt in the model's context "
                    f"of {self.models.context_length} tokens"
                )
            for i, row in enumerate(rows):
                if len(row) <= room:
                    continue
                if not self.config.truncate_prompts:
                    raise ValueError(
                        f"prompt {first + i} has {len(row)} tokens; with max_new_tokens ({self.config.max_new_tokens}) the "
                        f"context of {self.models.context_length} leaves {room}. Shorten it, or set truncate_prompts"
                    )
                rows[i] = row[-room:]
                prompts[i] = Prompt(self.tokenizer.decode(rows[i]), getattr(prompts[i], "columns", None))
                truncated[i] = True
        return prompts, rows, truncated

    def read_prompts(self, prompts: Sequence[str]) -> Tokens:
        """Prompts as left-padded ids on the device, still without responses."""
        prompts, rows, truncated = self.tokenize(prompts)
        width = max(len(row) for row in rows)
        pad_id = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad_id] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        nothing = torch.zeros(len(rows), 0, dtype=torch.long)
        tokens = Tokens(
            prompts=prompts,
            prompt_ids=ids,
            prompt_mask=mask,
            response_ids=nothing,
            mask=nothing.bool(),
            ended=torch.zeros(len(rows), dtype=torch.bool),
            truncated=truncated,
            keys=sequence_keys(rows),
            tokenizer=self.tokenizer,
        )
        return tokens.map(lambda tensor: tensor.to(self.models.device))

    @torch.no_grad()
    def score(self, tokens: Tokens) -> dict[str, Tensor]:
        """The columns of a rollout: log-probabilities of policy and reference, exact KL, entropy, truncation's cost."""
        policy, reference, micro_batches = self.models.policy, self.models.sft, self.models.micro_batches
        own = own_share(tokens, self.models.processes)

        def measured() -> dict[str, Tensor]:
            parts: dict[str, list[Tensor]] = {
                name: [tokens.mask.new_zeros(0, tokens.mask.shape[1]).float()] for name in MEASURED
            }
            for rows in micro_batches.rows(own):
                part = own.select(rows)
                states = policy.response_hidden(part), reference.response_hidden(part)
                columns = by_chunks(self._measure, part, *states)
                for name, column in zip(MEASURED, columns, strict=True):
                    parts[name].append(pad_to(unpack(column, part), tokens.mask.shape[1]))
            return {name: torch.cat(columns) for name, columns in parts.items()}

        columns = micro_batches.run(measured, tokens.longest)
        return {name: self.models.processes.join(column, len(tokens.prompts)) for name, column in columns.items()}

    def _measure(self, hidden: Tensor, ref_hidden: Tensor, ids: Tensor, kept: KeptSet | None) -> tuple[Tensor, ...]:
        """Numbers (M,) of each response token, from its hidden states."""
        logits, ref_logits = self.models.policy.backbone.head(hidden), self.models.sft.backbone.head(ref_hidden)
        given = (logits.unsqueeze(1), ref_logits.unsqueeze(1), ids.unsqueeze(1), kept, self.config.temperature)
        return tuple(column.squeeze(1) for column in score_tokens(*given))


MEASURED = ("logprob_policy", "logprob_ref", "kl_exact", "entropy", "truncation_cost")


def check_prompts(prompts: Sequence[str], first: int = 0) -> list[str]:
    """A non-empty list of non-empty texts, or an error that names the first bad one."""
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of texts, got one text; put it in a list")
    prompts = list(prompts)
    if not prompts:
        raise ValueError("there are no prompts; give at least one")
    for i, prompt in enumerate(prompts, first):
        if not isinstance(prompt, str):
            raise ValueError(f"prompt {i} is a {type(prompt).__name__}, not a text")
        if not prompt.strip():
            raise ValueError(f"prompt {i} is empty")
    return prompts
