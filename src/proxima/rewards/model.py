"""Reward models. In: `Samples`. Out: one score a sequence.

`TrainedReward` is the system's own: it scores token ids, EOS included, never re-tokenised text. `ClassifierSource` is any
sequence classifier: it reads the decoded text with its own tokenizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proxima.base_setup.micro_batches import MicroBatches
from proxima.base_setup.model_setup import load_classifier
from proxima.config import PPOConfig
from proxima.models import ClassifierReward, RewardModel
from proxima.models.reward_model import reward_warning
from proxima.rewards.outcome import Outcome, read_rewards
from proxima.rewards.samples import Samples


class TrainedReward:
    """A reward adapter or network of this package, with its scalar head."""

    attempts = 2

    def __init__(self, model: RewardModel, tokenizer: Any, micro_batches: MicroBatches):
        self.model, self.tokenizer, self.micro_batches = model, tokenizer, micro_batches
        if model.source != "untrained" and (message := reward_warning(model.source)):
            warnings.warn(message, stacklevel=2)

    def check(self, prompts: Sequence[str]) -> None:
        """It needs no column."""

    @torch.no_grad()
    def __call__(self, samples: Samples) -> Outcome:
        if samples.tokens is not None:
            tokens = samples.tokens

            def measured() -> list[Tensor]:
                return [self.model.token_scores(tokens.select(rows)) for rows in self.micro_batches.rows(tokens)]

            scores = self.micro_batches.run(measured, tokens.longest)
            return read_rewards(torch.cat(scores), samples.lengths)
        batch = self.tokenizer(samples.full_texts, return_tensors="pt", padding=True, padding_side="left")
        ids, mask = batch["input_ids"].to(self.model.device), batch["attention_mask"].bool().to(self.model.device)
        size = self.micro_batches.size
        scores = [self.model.scores(ids[i : i + size], mask[i : i + size]) for i in range(0, len(ids), size)]
        return read_rewards(torch.cat(scores), samples.lengths)


class ClassifierSource:
    """Any `AutoModelForSequenceClassification`, by folder or Hub id."""

    attempts = 2

    def __init__(
        self,
        source: str,
        config: PPOConfig,
        device: torch.device,
        *,
        label: int | str | None = None,
        max_length: int = 0,
        chat: bool = False,
    ):
        """
        Args:
            label: index or name of the score among several labels.
            max_length: longer texts are cut on the left; 0 = a text that does not fit fails.
            chat: write prompt and completion as user and assistant turns of the tokenizer's chat template.
        """
        if max_length < 0:
            raise ValueError(f"max_length ({max_length}) of reward {source!r} must be 0 (off) or more")
        network, tokenizer = load_classifier(config, source, device)
        if chat and not tokenizer.chat_template:
            raise ValueError(f"the tokenizer of reward {source!r} has no chat template; leave the option chat out")
        try:
            self.classifier = ClassifierReward(network, tokenizer, label, max_length)
        except ValueError as error:
            raise ValueError(f"reward {source!r}: {error}") from None
        self.chat, self.size = chat, config.micro_batch_size

    def check(self, prompts: Sequence[str]) -> None:
        """It needs no column."""

    def __call__(self, samples: Samples) -> Outcome:
        texts = self._as_chats(samples) if self.chat else samples.full_texts
        parts = [texts[i : i + self.size] for i in range(0, len(texts), self.size)]
        scores = torch.cat([self.classifier.scores(part, special=not self.chat) for part in parts])
        outcome = read_rewards(scores, samples.lengths)
        why = f"a text is empty or longer than the {self.classifier.limit} tokens that the model reads"
        return Outcome(outcome.sequence, {}, why if outcome.failures else "")

    def _as_chats(self, samples: Samples) -> list[str]:
        turns = [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            for prompt, completion in zip(samples.prompts, samples.completions, strict=True)
        ]
        return [self.classifier.tokenizer.apply_chat_template(turn, tokenize=False) for turn in turns]
