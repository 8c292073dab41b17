"""`RewardComputer`: stage 3. In: what was generated. Out: one score a sequence, nan where a reward failed.

The system's own reward model scores token ids, EOS included; other rewards read text. No failure is ever replaced by a number.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxima.base_setup import ModelSet
from proxima.base_setup.model_setup import load_classifier
from proxima.config import PPOConfig, RewardSpec
from proxima.models.reward_model import reward_warning
from proxima.pairs import SAPairs
from proxima.reward_kl import shape_scores
from proxima.types import Tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """Scores of a batch: their weighted sum, and each reward by name."""

    total: Tensor  # (B,), nan where any reward failed
    by_name: dict[str, Tensor]  # (B,) each


class RewardComputer:
    """Adds up the configured rewards; without any, the reward model's untrained head stands in and says so."""

    def __init__(self, models: ModelSet, tokenizer: Any, config: PPOConfig):
        self.models, self.tokenizer, self.config = models, tokenizer, config
        self.last_failure = ""
        self._rewards = [(spec, self._scorer(spec)) for spec in config.rewards]
        if not self._rewards:
            warnings.warn(
                "no reward is configured: scores come from an untrained head and mean nothing; set `rewards`", stacklevel=2
            )
            self._rewards = [(RewardSpec("untrained"), self._score_with_reward_model)]

    @property
    def reward_source(self) -> str:
        """Where the scores come from, for logs and results."""
        return ", ".join(spec.label for spec, _ in self._rewards)

    def compute_rewards(
        self, prompts: Sequence[str], generated_texts: Sequence[str] | None = None, normalize: bool | None = None
    ) -> list[float]:
        """One score a sequence, on prompt + generated text; nan where it failed.

        Args:
            prompts: prompts; or, without `generated_texts`, the full texts.
            normalize: shift and scale over the batch; by default as the config says.
        """
        prompts = list(prompts)
        texts = [""] * len(prompts) if generated_texts is None else list(generated_texts)
        if len(prompts) != len(texts):
            raise ValueError(f"{len(texts)} generated texts for {len(prompts)} prompts")
        if not prompts:
            raise ValueError("there are no texts to score")
        total = self._score(prompts, texts, None).total
        chosen = self.config.normalize_rewards if normalize is None else normalize
        return shape_scores(total, torch.ones_like(total, dtype=torch.bool), normalize=chosen).tolist()

    def score_pairs(self, pairs: SAPairs) -> Scores:
        """Scores of a rollout, from its own token ids wherever the reward model is ours."""
        assert pairs.tokens is not None
        return self._score(pairs.tokens.prompts, pairs.tokens.texts(), pairs.tokens)

    def _score(self, prompts: list[str], texts: list[str], tokens: Tokens | None) -> Scores:
        by_name = {}
        total = torch.zeros(len(prompts), dtype=torch.float64)
        for spec, scorer in self._rewards:
            scores = self._attempt(spec.label, scorer, prompts, texts, tokens)
            by_name[spec.label] = scores
            total = total + spec.weight * scores
        return Scores(total, by_name)

    def _attempt(self, name: str, scorer: Callable[..., Any], prompts: list[str], texts: list[str], tokens: Any) -> Tensor:
        """Scores (B,) on the CPU; a failed call is tried once more, then its samples are nan."""
        count = len(prompts)
        for attempt in (1, 2):
            try:
                returned = scorer(prompts, texts, tokens)
                if isinstance(returned, (list, tuple)):
                    returned = [float("nan") if score is None else score for score in returned]
                scores = torch.as_tensor(returned, dtype=torch.float64).detach().cpu()
                if scores.shape != (count,):
                    raise ValueError(f"it returned shape {tuple(scores.shape)} for {count} sequences")
                return scores.masked_fill(~scores.isfinite(), float("nan"))
            except Exception as error:  # a user's reward may raise anything; the samples are counted as failed
                self.last_failure = f"{name}: {type(error).__name__}: {error}"
                log.warning("reward failed (attempt %d of 2): %s", attempt, self.last_failure)
        return torch.full((count,), float("nan"), dtype=torch.float64)

    def _scorer(self, spec: RewardSpec) -> Callable[[list[str], list[str], Tokens | None], Any]:
        if spec.is_function:
            function = spec.source if callable(spec.source) else load_function(spec.source)
            return lambda prompts, texts, tokens: function(prompts, texts)
        if spec.source == self.models.reward.source:
            if message := reward_warning(str(spec.source)):
                warnings.warn(message, stacklevel=2)
            return self._score_with_reward_model
        classifier = load_classifier(self.config, str(spec.source), self.models.device)
        size = self.config.micro_batch_size

        def score(prompts: list[str], texts: list[str], tokens: Tokens | None) -> Tensor:
            full = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
            return torch.cat([classifier.scores(full[i : i + size]) for i in range(0, len(full), size)])

        return score

    @torch.no_grad()
    def _score_with_reward_model(self, prompts: list[str], texts: list[str], tokens: Tokens | None) -> Tensor:
        if tokens is None:
            full = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
            batch = self.tokenizer(full, return_tensors="pt", padding=True, padding_side="left").to(self.models.device)
            ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        else:
            ids, mask = tokens.input_ids, tokens.input_mask
        size = self.config.micro_batch_size
        return torch.cat([self.models.reward.scores(ids[i : i + size], mask[i : i + size]) for i in range(0, len(ids), size)])


def load_function(source: str) -> Callable[..., Any]:
    """`module:function`, looked up on the Python path and in the current folder."""
    module_name, _, function_name = source.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"cannot load the reward {source!r}: {error}; give module:function") from error
    finally:
        sys.path.remove(here)
    if not callable(function):
        raise ValueError(f"the reward {source!r} is a {type(function).__name__}, not a function")
    return function
