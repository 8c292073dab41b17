"""`SequenceGenerator`: rollouts and their log-probabilities (phases 1 and 2 of a PPO step).

In: prompts as text. Out: sampled texts, and pairs with both log-probabilities; importance weights where
another engine sampled.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from proxima.base_setup import ModelSet
from proxima.config import PPOConfig
from proxima.core.episode import Conversation
from proxima.core.pairs import TokenPairs
from proxima.core.sampling import include_sampled, kept_shape, truncate
from proxima.core.tokenizer import Tokenizer
from proxima.core.types import KeptSet, Prompt, Rollout, TokenColumns, Tokens, pad_to
from proxima.environments import Environment, EpisodeRunner, max_response_tokens
from proxima.models import PolicyModel, Sampling, by_chunks, unpack
from proxima.ppo_trainer.environment_seeds import environment_seeds
from proxima.ppo_trainer.process_shares import join_tokens, own_share
from proxima.ppo_trainer.prompt_tokens import tokenize, without_responses
from proxima.ppo_trainer.read_ahead import ReadAhead
from proxima.ppo_trainer.stopwatch import Stopwatch
from proxima.runs import ROUNDING
from proxima.runtime.engine import score_tokens
from proxima.runtime.vllm import PendingRollout, VllmRollouts
from proxima.token_attribution import TokenAttributor
from proxima.training import add_importance_weights

Prompts = Sequence[str] | Tokens
"""Texts, or what `SequenceGenerator.read_prompts` made of them."""


@dataclass(frozen=True)
class Prefetch:
    """The rollout of a step that was begun before its time."""

    step: int
    prompts: Tokens
    pending: PendingRollout


class Speaker(Protocol):
    """Takes the turns of episodes: the policy, or another in its place."""

    def generate(self, prompts: Tokens, sampling: Sampling, conversation: Conversation) -> Tokens:
        """One episode per prompt, as the conversation answers them."""


class SequenceGenerator:
    """Samples from the policy, then scores the sample with policy and reference in training-side forward
    passes."""

    def __init__(self, models: ModelSet, tokenizer: Tokenizer, config: PPOConfig):
        self.models, self.tokenizer, self.config = models, tokenizer, config
        self.attributor = TokenAttributor(tokenizer)
        self.rollouts = VllmRollouts(models, config) if config.engine == "vllm" else None
        self.environment = Environment(config, tokenizer) if config.has_episodes else None
        self.policy_lag = 0  # updates between the policy that the last sample came from and the one of now
        self._prefetch: Prefetch | None = None
        self.read_ahead = ReadAhead(self._read)

    def generate_sequences(
        self,
        prompts: Prompts,
        step: int = 0,
        clock: Stopwatch | None = None,
        next_prompts: Sequence[str] | None = None,
    ) -> tuple[TokenPairs, list[str]]:
        """Pairs and texts, one sequence per prompt. Noise follows from (seed, step, prompt): the same call
        gives the same sample.

        Args:
            next_prompts: of the next step, sampled in the background from now on (with `overlap`).
        """
        texts, rollout = self.generate(prompts, step, clock, next_prompts)
        return self.attributor.extract_pairs(texts, rollout), texts

    def generate(
        self,
        prompts: Prompts,
        step: int = 0,
        clock: Stopwatch | None = None,
        next_prompts: Sequence[str] | None = None,
    ) -> tuple[list[str], Rollout]:
        """Texts, and the record of their tokens and log-probabilities."""
        tokens = self.sample(prompts, step)
        if clock is not None:
            clock.lap("generate")
        if next_prompts is not None and self.config.overlap:
            self.cancel()
            self._prefetch = self._begin(next_prompts, step + 1)
        self.models.micro_batches.plan(tokens, self.models.processes.world_size)
        columns = self.score(tokens)
        tokens = with_kept_sets(tokens, columns.pop("kept", None))
        return tokens.texts(), Rollout(TokenColumns(tokens, columns))

    def add_importance_weights(self, rollout: TokenPairs) -> tuple[TokenPairs, dict[str, float]]:
        """Weights where vLLM sampled with probabilities other than the training side's; what was measured."""
        measured: dict[str, float] = {"policy_lag": self.policy_lag, "importance_truncated": 0.0}
        if self.rollouts is None:
            return rollout, {**measured, "engine_retries": 0}
        config = self.config
        measured["engine_retries"] = self.models.processes.all_reduce_sum(self.rollouts.new_retries())
        if config.corrects_sampling:
            band = (config.importance_mode, config.importance_low, config.importance_clip)
            rollout, measured["importance_truncated"] = add_importance_weights(
                rollout, *band, is_old=self.policy_lag > 0
            )
        return rollout, measured

    def check_sampling_gap(self, gap: float) -> None:
        """Warn where the built-in sampling and the scoring pass differ by more than rounding (vLLM's
        sampling is corrected by importance weights instead)."""
        limit = ROUNDING.get(self.models.sft.backbone.network.dtype, 1e-3)
        if self.rollouts is None and gap > limit:
            warnings.warn(
                f"tokens were sampled with log-probabilities that are {gap:.3g} nats per token off those "
                f"they are trained with, where rounding explains {limit:g}; run `proxima doctor`, and try "
                "engine: plain",
                stacklevel=2,
            )

    def cancel(self) -> None:
        """Throw away what was begun ahead: it is sampled again when its step comes."""
        if self._prefetch is not None:
            self._prefetch.pending.responses.cancel()
        self._prefetch = None

    def release(self) -> None:
        """At the end of a run: nothing is left with vLLM's servers."""
        self.cancel()
        if self.rollouts is not None:
            self.rollouts.release()

    def _sampling(self, step: int) -> Sampling:
        settings = self.config
        return Sampling(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            eos_ids=self.models.eos_ids,
            seed=settings.seed,
            step=step,
            max_episode_tokens=max_response_tokens(settings) if settings.has_episodes else 0,
        )

    def sample(self, prompts: Prompts, step: int = 0, reference: bool = False) -> Tokens:
        """One response per prompt, not scored; by the reference instead of the policy where asked."""
        return self.sample_groups(prompts, 1 if step < 0 else self.config.num_generations, step, reference)

    def sample_groups(self, prompts: Prompts, group: int, step: int = 0, reference: bool = False) -> Tokens:
        """`sample`, where this many equal prompts, one after the other, meet the same environment."""
        evaluates = step < 0  # with the reference's noise
        if self.rollouts is not None and not reference and not evaluates:
            return self._sample_on_vllm(prompts, step)
        policy = self.models.policy
        sft = self.models.sft
        processes = self.models.processes
        model = PolicyModel(sft.backbone, sft.adapter) if reference else policy
        tokens, sampling = self.read_prompts(prompts), self._sampling(step)
        if self.environment is not None:
            tokens, sampled = self._sample_episodes(self.environment, model, tokens, sampling, group)
        else:
            own = own_share(tokens, processes)
            sampled = self._generate(model, own, sampling) if len(own.prompts) else own
        if model.backbone is not policy.backbone:
            model.backbone.release_generation()
        return join_tokens(tokens, sampled, processes) if processes.is_distributed else sampled

    def _generate(self, model: PolicyModel, prompts: Tokens, sampling: Sampling) -> Tokens:
        """One response per prompt, again in fewer slots when memory runs out."""
        longest = int(prompts.prompt_sizes.max()) + sampling.width
        run = self.models.micro_batches.run
        return run(lambda: model.generate(prompts, sampling), longest, samples=True)

    def _sample_episodes(
        self, environment: Environment, model: Speaker, tokens: Tokens, sampling: Sampling, group: int
    ) -> tuple[Tokens, Tokens]:
        """The prompts as the environments opened them, and this process's episodes."""
        processes, context = self.models.processes, self.models.context_length
        own = own_share(tokens, processes)
        seeds = environment_seeds(tokens, sampling, group)[processes.rows(len(tokens.prompts))]
        room = None if context is None else context - max_response_tokens(self.config)
        given = own.prompts

        def begin() -> EpisodeRunner:
            return EpisodeRunner(environment, given, seeds.tolist(), room, sampling.eos_ids)

        runner = begin()
        try:
            opened, is_first = [str(prompt) for prompt in runner.prompts], True
            tokens = self._opened(tokens, runner.prompts)
            own = own_share(tokens, processes)
            if not len(own.prompts):
                return tokens, own

            def play() -> Tokens:
                nonlocal runner, is_first
                if not is_first:  # memory ran out in the midst of these
                    runner.close()
                    runner = begin()
                    check_opened(opened, runner.prompts)
                is_first = False
                return model.generate(own, sampling, runner)

            longest = int(own.prompt_sizes.max()) + sampling.width
            sampled = self.models.micro_batches.run(play, longest, samples=True)
            episodes = runner.episodes
        finally:
            runner.close()
        ended = torch.tensor([episode.done for episode in episodes], device=sampled.mask.device)
        return tokens, replace(sampled, ended=ended, episodes=episodes)

    def play(self, prompts: Sequence[str], speaker: Speaker, step: int) -> Tokens:
        """Episodes in which another takes the turns, in the environments that the policy meets at this
        step."""
        assert self.environment is not None
        given = (self.read_prompts(prompts), self._sampling(step), self.config.num_generations)
        return self._sample_episodes(self.environment, speaker, *given)[1]

    def _opened(self, tokens: Tokens, own: list[str]) -> Tokens:
        """The batch with the prompts of all processes; a sequence stays what it is, so it keeps its key."""
        plain = [
            (str(prompt), list(getattr(prompt, "turns", ())), list(getattr(prompt, "messages", ())))
            for prompt in own
        ]
        parts = self.models.processes.all_gather_object(plain)
        given = [each for part in parts for each in part]
        if all(text == str(old) for (text, *_), old in zip(given, tokens.prompts, strict=True)):
            return tokens
        opened = [
            Prompt(text, getattr(old, "columns", None), turns, messages)
            for (text, turns, messages), old in zip(given, tokens.prompts, strict=True)
        ]
        return replace(self.read_prompts(opened), keys=tokens.keys)

    def _begin(self, prompts: Prompts, step: int) -> Prefetch:
        assert self.rollouts is not None
        tokens = self.read_prompts(prompts)
        own = own_share(tokens, self.models.processes)
        return Prefetch(step, tokens, self.rollouts.begin(tokens, own, self._sampling(step)))

    def _sample_on_vllm(self, prompts: Prompts, step: int) -> Tokens:
        assert self.rollouts is not None
        begun = self._prefetch
        rollouts = self.rollouts
        processes = self.models.processes
        tokens = self.read_prompts(prompts)
        if begun is not None and begun.step == step and begun.prompts.prompts == tokens.prompts:
            self._prefetch = None
        else:
            begun = self._begin(tokens, step)
        pending = begun.pending
        own = processes.on_all(lambda: rollouts.finish(pending))
        self.policy_lag = int(rollouts.is_stale(pending))
        return join_tokens(begun.prompts, own, processes) if processes.is_distributed else own

    def tokenize(self, prompts: Sequence[str], first: int = 0) -> tuple[list[str], list[list[int]], Tensor]:
        """Prompts with their ids, and which were cut to fit (B,), as `prompt_tokens.tokenize` gives them."""
        config = self.config
        given = (
            self.tokenizer,
            self.models.context_length,
            max_response_tokens(config),
            config.truncate_prompts,
        )
        limit = "max_episode_tokens" if config.has_episodes else "max_new_tokens"
        tools = [] if self.environment is None else list(self.environment.schemas.values())
        return tokenize(prompts, *given, first, limit, tools)

    def read_prompts(self, prompts: Prompts, seen: dict[bytes, int] | None = None) -> Tokens:
        """Prompts as left-padded ids on the device, still without responses; what was read before stays as it
        is.

        Args:
            seen: where these are a part of a set, what counts its equal prompts (`sequence_keys`).
        """
        if isinstance(prompts, Tokens):
            return prompts
        known = self.read_ahead.take(prompts) if seen is None else None
        read = self._read(prompts, seen) if known is None else known
        return read.map(lambda tensor: tensor.to(self.models.device))

    def _read(self, prompts: Sequence[str], seen: dict[bytes, int] | None = None) -> Tokens:
        return without_responses(*self.tokenize(prompts), self.tokenizer, seen)

    @torch.no_grad()
    def score(self, tokens: Tokens) -> dict[str, Tensor]:
        """The columns of a rollout: log-probabilities of policy and reference, exact KL, entropy,
        truncation's cost; where kept sets are missing, which tokens lie outside those computed here, and
        `kept`, the sets (B, R, K)."""
        policy = self.models.policy
        reference = self.models.sft
        micro_batches = self.models.micro_batches
        own, width = own_share(tokens, self.models.processes), tokens.mask.shape[1]
        missing = self._missing_kept_sets(tokens)

        def measured() -> dict[str, Tensor]:
            names = MEASURED if missing is None else (*MEASURED, "outside_kept")
            empty = tokens.mask.new_zeros(0, width)
            parts: dict[str, list[Tensor]] = {name: [empty.float()] for name in names}
            if missing is not None:
                parts["kept"] = [empty.unsqueeze(-1).expand(-1, -1, missing[0]).to(missing[1])]
            for rows in micro_batches.rows(own):
                part = own.select(rows)
                states = policy.response_hidden(part), reference.response_hidden(part)
                columns = by_chunks(self._measure, part, *states, chunk=micro_batches.chunk)
                for name, column in zip(parts, columns, strict=True):
                    parts[name].append(pad_to(unpack(column, part), width))
            return {name: torch.cat(columns) for name, columns in parts.items()}

        columns = micro_batches.run(measured, tokens.longest)
        return {
            name: self.models.processes.all_gather(column, len(tokens.prompts))
            for name, column in columns.items()
        }

    def _missing_kept_sets(self, tokens: Tokens) -> tuple[int, torch.dtype] | None:
        """Size and type of the kept sets that whatever sampled did not name."""
        if tokens.kept is not None:
            return None
        rows = self.models.policy.backbone.passes.vocabulary
        shape = kept_shape(self.config.top_k, self.config.top_p, rows)
        if shape is None or shape[1] != torch.int32:
            return shape
        return shape[0] + 1, shape[1]  # `include_sampled` may add a token

    def _measure(
        self, hidden: Tensor, ref_hidden: Tensor, ids: Tensor, kept: KeptSet | None
    ) -> tuple[Tensor, ...]:
        """Numbers (M,) of each response token, from its hidden states."""
        logits, ref_logits = self.models.policy.logits(hidden), self.models.sft.logits(ref_hidden)
        config = self.config
        found: tuple[Tensor, ...] = ()
        named = None
        if kept is None and kept_shape(config.top_k, config.top_p, logits.shape[-1]) is not None:
            named = truncate(logits.float() / config.temperature, config.top_k, config.top_p)
        if named is not None:
            kept, outside = include_sampled(named, ids)
            packed = kept.ids if kept.ids is not None else kept.bits
            assert packed is not None
            found = outside.float(), packed.squeeze(1)
        return *score_tokens(logits, ref_logits, ids, kept, config.temperature), *found


MEASURED = ("logprob_policy", "logprob_ref", "kl_exact", "entropy", "truncation_cost")


def with_kept_sets(tokens: Tokens, kept: Tensor | None) -> Tokens:
    """The tokens with the sets that the scoring pass computed, ids or bits (B, R, K), where they came
    without."""
    if kept is None:
        return tokens
    nowhere = ~tokens.mask.unsqueeze(-1)
    if kept.dtype == torch.int32:
        return replace(tokens, kept=KeptSet(ids=kept.masked_fill(nowhere, -1)))
    return replace(tokens, kept=KeptSet(bits=kept.masked_fill(nowhere, 0)))


def check_opened(before: Sequence[str], now: Sequence[str]) -> None:
    """A ValueError where environments that begin again do not ask the same."""
    if any(one != str(other) for one, other in zip(before, now, strict=True)):
        raise ValueError(
            "memory ran out while episodes were sampled, and they cannot begin again: reset of the "
            "environment returned another text for the same seed; draw from the seed, or lower batch_size"
        )
