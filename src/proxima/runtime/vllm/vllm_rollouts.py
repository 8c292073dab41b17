"""`VllmRollouts`: samples responses from the live policy on vLLM, now or in the background.

A policy update is a LoRA adapter of a few MB under a new name; base weights are never sent. With full
fine-tuning all weights are reloaded, in this process only. Each version is checked before it is sampled from.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from proxima.base_setup import ModelSet, is_gguf, model_path, pick_dtype
from proxima.config import PPOConfig
from proxima.core.sampling import Sampling, hash_words, log_softmax
from proxima.core.types import KeptSet, Tokens
from proxima.runtime.vllm.in_process_engine import InProcessEngine
from proxima.runtime.vllm.policy_versions import PolicyVersions
from proxima.runtime.vllm.rollout_job import (
    PolicyVersion,
    RolloutEngine,
    RolloutJob,
    SampledResponse,
    WeightCheck,
)
from proxima.runtime.vllm.server_pool import ServerPool

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CHECKED_TOKENS = 64
TOLERANCE = 0.1  # mean absolute difference of log-probabilities between vLLM and the training side
FLOAT32_TOLERANCE = 1e-3  # where both sides are known to compute in float32
LOWEST_TEMPERATURE = 0.01  # below it vLLM samples as at this one


@dataclass
class PendingRollout:
    """A rollout that is being sampled."""

    tokens: Tokens
    sampling: Sampling
    version: PolicyVersion
    responses: Future[list[SampledResponse]]


class VllmRollouts:
    """A rollout engine, and the versions of the policy that it has loaded."""

    def __init__(self, models: ModelSet, config: PPOConfig):
        network = models.policy.backbone.network
        text = network.config.get_text_config()
        check_settings(config, text)
        if models.policy.adapter and models.policy.backbone.adapts_head:
            raise ValueError(
                "engine vllm cannot follow an adapter on the output embeddings (or modules_to_save in an "
                "SFT adapter); take lm_head out of lora_targets, or use engine auto"
            )
        self.models = models
        self._retries = 0
        self.dtype = pick_dtype(config.dtype, models.device)
        both_float32 = self.dtype == torch.float32 and not config.engine_urls
        self.tolerance = FLOAT32_TOLERANCE if both_float32 else TOLERANCE
        self.vocabulary = network.get_input_embeddings().num_embeddings
        self.engine: RolloutEngine
        if config.engine_urls:
            self.engine = ServerPool(config.engine_urls, config.engine_timeout)
        else:
            self.engine = self._in_process(config, text)
        self.versions = PolicyVersions(models.policy, Path(config.run_dir), models.processes)

    def _in_process(self, config: PPOConfig, text: PretrainedConfig) -> InProcessEngine:
        if self.models.processes.is_distributed:
            raise ValueError(
                "vLLM in the training process cannot be shared by several; give engine_urls with torchrun"
            )
        policy = self.models.policy
        peft = policy.backbone.peft
        head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        context = self.models.context_length or 4096
        return InProcessEngine(
            model_path(config.model_name),
            self.models.device,
            self.dtype,
            lora_rank=int(peft.peft_config[policy.adapter].r) if peft is not None and policy.adapter else 0,
            gpu_memory=config.engine_memory,
            context=context,
            cache_bytes=2 * text.num_hidden_layers * kv_heads * head_size * self.dtype.itemsize * context,
            trust_remote_code=config.trust_remote_code,
            wants_masks=0 < config.top_k < self.vocabulary,
        )

    def begin(self, prompts: Tokens, own: Tokens, sampling: Sampling) -> PendingRollout:
        """Start to sample from the current policy; called by all processes.

        Args:
            prompts: the whole batch, the same on every process.
            own: the rows that this process samples.
        """
        version = self.publish(prompts)
        if sampling.top_k >= self.vocabulary:
            sampling = replace(sampling, top_k=0)
        rows = [
            ids[mask].tolist() for ids, mask in zip(own.prompt_ids.cpu(), own.prompt_mask.cpu(), strict=True)
        ]
        job = RolloutJob(
            rows, sequence_seeds(own.keys, sampling.seed, sampling.step), sampling, self.vocabulary
        )
        return PendingRollout(own, sampling, version, self.engine.sample(job, version))

    def finish(self, pending: PendingRollout) -> Tokens:
        """Wait for the responses."""
        return with_responses(pending.tokens, pending.responses.result(), pending.sampling.eos_ids)

    def new_retries(self) -> int:
        """Rows sent again since the last call."""
        before = self._retries
        self._retries = self.engine.retries
        return self._retries - before

    def is_stale(self, pending: PendingRollout) -> bool:
        """Whether the policy was updated after this rollout began."""
        return self.versions.digest() != pending.version.digest

    def publish(self, prompts: Tokens) -> PolicyVersion:
        """The current policy, loaded and checked by the engine."""
        processes = self.models.processes
        version, old = self.versions.publish()
        check = self.weight_check(prompts)
        processes.on_all(lambda: self.engine.load(version, check))
        for past in old:
            if processes.is_main:
                self.engine.unload(past)
            self.versions.remove(past)
        return version

    def release(self) -> None:
        """Remove all versions from the engine and the disk, at the end of a run.

        A later rollout publishes a new version.
        """
        if self.models.processes.is_main:
            for version in self.versions.kept:
                self.engine.unload(version)
        for version in self.versions.kept:
            self.versions.remove(version)
        self.versions.kept.clear()

    @torch.no_grad()
    def weight_check(self, prompts: Tokens) -> WeightCheck:
        """The first prompt and its log-probabilities on the training side."""
        ids = prompts.prompt_ids[:1][prompts.prompt_mask[:1]]
        ids = (ids if len(ids) > 1 else ids.repeat(2))[:CHECKED_TOKENS]
        one = replace(
            prompts.select(torch.tensor([0])),
            prompt_ids=ids[None, :1],
            prompt_mask=torch.ones_like(ids[None, :1], dtype=torch.bool),
            response_ids=ids.roll(-1)[None],  # any token after the last one: its place is the next token's
            mask=torch.ones_like(ids[None], dtype=torch.bool),
            kept=None,
            sampled_logprobs=None,
        )
        logprobs = log_softmax(self.models.policy.response_logits(one), 1.0)[0]
        chosen = logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1)
        following = logprobs[-1]
        likeliest = int((following >= following.max() - 4 * self.tolerance).sum())
        return WeightCheck(ids.tolist(), chosen.tolist(), self.tolerance, likeliest)


def check_settings(config: PPOConfig, text: PretrainedConfig) -> None:
    """Refuse settings that vLLM cannot follow.

    Args:
        text: the config of the language model.
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
            "engine vllm cannot follow full fine-tuning of a model with tied embeddings: reloading weights "
            "leaves its output head as it was; train adapters (lora_r above 0) or use engine auto"
        )


def sequence_seeds(keys: Tensor, seed: int, step: int) -> list[int]:
    """One 62-bit seed per sequence, from its key and not its row: (B,) keys -> B integers."""
    lanes = hash_words(keys.cpu(), seed, step)
    return ((lanes[:, 0] << 30) ^ lanes[:, 1]).tolist()


def with_responses(prompts: Tokens, responses: list[SampledResponse], eos_ids: tuple[int, ...]) -> Tokens:
    """The batch with its responses; with kept sets where the engine returned them for all."""
    device = prompts.prompt_ids.device
    width = max((len(response.ids) for response in responses), default=0)
    ids = torch.zeros(len(responses), width, dtype=torch.long)
    logprobs = torch.zeros(len(responses), width)
    mask = torch.zeros(len(responses), width, dtype=torch.bool)
    for row, response in enumerate(responses):
        size = len(response.ids)
        ids[row, :size] = torch.tensor(response.ids)
        logprobs[row, :size] = torch.tensor(response.logprobs)
        mask[row, :size] = True
    ended = torch.tensor([response.ended(eos_ids) for response in responses], dtype=torch.bool)
    return replace(
        prompts,
        response_ids=ids.to(device),
        mask=mask.to(device),
        ended=ended.to(device),
        kept=kept_sets([response.kept for response in responses], width, device),
        sampled_logprobs=logprobs.clamp(max=0).to(device),
    )


def kept_sets(masks: list[list[list[int]] | None], width: int, device: torch.device) -> KeptSet | None:
    """Sampling masks as kept sets of `width` positions; None where a response came without."""
    known = [mask for mask in masks if mask is not None]
    if not masks or len(known) < len(masks):
        return None
    sizes = torch.zeros(len(known), width, dtype=torch.long)
    for row, mask in enumerate(known):
        sizes[row, : len(mask)] = torch.tensor([len(ids) for ids in mask])
    ids = torch.full((len(known), width, int(sizes.max())), -1, dtype=torch.int32)
    places = [ids for mask in known for ids in mask]
    listed = [token for ids in places for token in ids]
    ids[torch.arange(ids.shape[2]) < sizes.unsqueeze(-1)] = torch.tensor(listed, dtype=torch.int32)
    return KeptSet(ids=ids.to(device))
