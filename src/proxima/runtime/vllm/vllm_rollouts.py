"""`VllmRollouts`: what all ways to vLLM share. In: prompts, the live policy. Out: sampled `Tokens`, now or in
the background.

A policy update is a LoRA adapter of a few MB under a new name; no base weights travel. With full fine-tuning
all weights are loaded again, in this process only, and every time proven right before they are sampled from.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxima.base_setup import ModelSet
from proxima.base_setup.gguf_files import is_gguf
from proxima.base_setup.loading import model_path, pick_dtype
from proxima.config import PPOConfig
from proxima.core.sampling import Sampling, hash_words, log_softmax
from proxima.core.types import Tokens
from proxima.runtime.vllm.in_process_engine import InProcess
from proxima.runtime.vllm.policy_versions import Versions
from proxima.runtime.vllm.rollout_job import Answer, Engine, Job, Probe, Version
from proxima.runtime.vllm.server_pool import Servers

PROBE_TOKENS = 64
TOLERANCE = (
    0.1  # of the mean difference between log-probabilities; smaller where both sides are known to be float32:
)
TIGHT_TOLERANCE = 1e-3
LOWEST_TEMPERATURE = 0.01  # below it vLLM samples as at this one


@dataclass
class Pending:
    """A rollout under way."""

    tokens: Tokens
    sampling: Sampling
    version: Version
    answers: Future[list[Answer]]


class VllmRollouts:
    """One engine, and the versions of the policy that it was given."""

    def __init__(self, models: ModelSet, config: PPOConfig):
        network = models.policy.backbone.network
        text = network.config.get_text_config()
        check_settings(config, text)
        if models.policy.adapter and models.policy.backbone.adapts_head:
            raise ValueError(
                "engine vllm cannot follow an adapter on the output embeddings (or modules_to_save in an "
                "SFT adapter); "
                "take lm_head out of lora_targets, or use engine auto"
            )
        self.models, self._retries = models, 0
        self.dtype = pick_dtype(config.dtype, models.device)
        self.tolerance = (
            TIGHT_TOLERANCE if self.dtype == torch.float32 and not config.engine_urls else TOLERANCE
        )
        self.vocabulary = network.get_input_embeddings().num_embeddings
        self.engine: Engine
        if config.engine_urls:
            self.engine = Servers(config.engine_urls, config.engine_timeout)
        else:
            if models.processes.is_distributed:
                raise ValueError(
                    "vLLM in the training process cannot be shared by several; give engine_urls with torchrun"
                )
            peft, adapter = models.policy.backbone.peft, models.policy.adapter
            rank = int(peft.peft_config[adapter].r) if peft is not None and adapter else 0
            size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
            context = models.context_length or 4096
            self.engine = InProcess(
                model_path(config.model_name),
                models.device,
                self.dtype,
                rank=rank,
                memory=config.engine_memory,
                context=context,
                cache=2 * text.num_hidden_layers * heads * size * self.dtype.itemsize * context,
                trust=config.trust_remote_code,
            )
        self.versions = Versions(models.policy, Path(config.run_dir), models.processes)

    def begin(self, prompts: Tokens, own: Tokens, sampling: Sampling) -> Pending:
        """Start to sample from the policy as it is now; called by all processes.

        Args:
            prompts: the whole batch, the same in every process.
            own: this process's rows, for which it asks.
        """
        version = self.publish(prompts)
        if sampling.top_k >= self.vocabulary:
            sampling = replace(sampling, top_k=0)
        rows = [
            ids[mask].tolist() for ids, mask in zip(own.prompt_ids.cpu(), own.prompt_mask.cpu(), strict=True)
        ]
        job = Job(rows, sequence_seeds(own.keys, sampling.seed, sampling.step), sampling, self.vocabulary)
        return Pending(own, sampling, version, self.engine.sample(job, version))

    def finish(self, pending: Pending) -> Tokens:
        """Wait for the answers."""
        return with_answers(pending.tokens, pending.answers.result(), pending.sampling.eos_ids)

    def new_retries(self) -> int:
        """Since it was last asked."""
        before, self._retries = self._retries, self.engine.retries
        return self._retries - before

    def is_old(self, pending: Pending) -> bool:
        """Whether the policy has moved since it was begun."""
        return self.versions.digest() != pending.version.digest

    def publish(self, prompts: Tokens) -> Version:
        """The policy as it is now, loaded by the engine and proven there."""
        processes = self.models.processes
        version, old = self.versions.publish()
        probe = self.probe(prompts)
        processes.on_all(lambda: self.engine.use(version, probe))
        for past in old:
            if processes.is_main:
                self.engine.drop(past)
            self.versions.remove(past)
        return version

    def release(self) -> None:
        """At the end of a run: nothing is left on servers and disk.

        A later rollout begins with a new version.
        """
        if self.models.processes.is_main:
            for version in self.versions.kept:
                self.engine.drop(version)
        for version in self.versions.kept:
            self.versions.remove(version)
        self.versions.kept.clear()

    @torch.no_grad()
    def probe(self, prompts: Tokens) -> Probe:
        """The first prompt, and what the training side thinks of it."""
        ids = prompts.prompt_ids[:1][prompts.prompt_mask[:1]]
        ids = (ids if len(ids) > 1 else ids.repeat(2))[:PROBE_TOKENS]
        one = replace(
            prompts.select(torch.tensor([0])),
            prompt_ids=ids[None, :1],
            prompt_mask=torch.ones_like(ids[None, :1], dtype=torch.bool),
            response_ids=ids[None, 1:],
            mask=torch.ones_like(ids[None, 1:], dtype=torch.bool),
            kept=None,
            sampled_logprobs=None,
        )
        logprobs = log_softmax(self.models.policy.response_logits(one), 1.0)[0]
        chosen = logprobs.gather(-1, ids[1:, None]).squeeze(-1)
        return Probe(ids.tolist(), chosen.tolist(), self.tolerance)


def check_settings(config: PPOConfig, text: Any) -> None:
    """Refuse what vLLM would not do as asked.

    Args:
        text: the model's own config.
    """
    if is_gguf(model_path(config.model_name)) and not config.engine_urls:
        raise ValueError(
            f"engine vllm does not read the GGUF file {config.model_name!r}; train with engine auto, or give "
            "a folder: `proxima export RUN FOLDER --merge` writes one from a run on this file"
        )
    if config.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"temperature ({config.temperature}) is below what vLLM samples with ({LOWEST_TEMPERATURE})"
        )
    if not config.lora_r and text.tie_word_embeddings:
        raise ValueError(
            "engine vllm cannot follow full fine-tuning of a model with tied embeddings: loading weights "
            "again leaves its "
            "output head as it was; train adapters (lora_r above 0) or use engine auto"
        )


def sequence_seeds(keys: Tensor, seed: int, step: int) -> list[int]:
    """One seed a sequence, from what it is and not from its place: (B,) keys -> B integers of 62 bits."""
    lanes = hash_words(keys.cpu(), seed, step)
    return ((lanes[:, 0] << 30) ^ lanes[:, 1]).tolist()


def with_answers(prompts: Tokens, answers: list[Answer], eos_ids: tuple[int, ...]) -> Tokens:
    """The batch with its responses; no kept sets, for vLLM does not say them."""
    device = prompts.prompt_ids.device
    width = max((len(answer.ids) for answer in answers), default=0)
    ids, logprobs = torch.zeros(len(answers), width, dtype=torch.long), torch.zeros(len(answers), width)
    mask = torch.zeros(len(answers), width, dtype=torch.bool)
    for row, answer in enumerate(answers):
        size = len(answer.ids)
        ids[row, :size], logprobs[row, :size] = torch.tensor(answer.ids), torch.tensor(answer.logprobs)
        mask[row, :size] = True
    ended = torch.tensor([answer.ended(eos_ids) for answer in answers], dtype=torch.bool)
    return replace(
        prompts,
        response_ids=ids.to(device),
        mask=mask.to(device),
        ended=ended.to(device),
        kept=None,
        sampled_logprobs=logprobs.clamp(max=0).to(device),
    )
