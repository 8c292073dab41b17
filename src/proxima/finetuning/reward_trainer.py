"""`RewardTrainer`: a reward model from preferences. In: pairs of answers. Out: an adapter with a scalar head,
and its accuracy.

The loss is that of `reward_losses`; a score is read at the last token. `ScoreTrainer` is shared with ratings:
the head starts at N(0, 1/sqrt(d + 1)) with bias 0; after training it is scaled and shifted so that answers of
the model it started from, sampled on training prompts, have scores of mean 0 and unit variance.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxima.config import FinetuningConfig, RewardConfig
from proxima.core.sampling import token_logprobs
from proxima.core.tokenizer import Tokenizer
from proxima.data import Demonstration, Preference
from proxima.finetuning.example_batches import collate, encode
from proxima.finetuning.finetuning_trainer import Example, FinetuningResults, FinetuningTrainer
from proxima.finetuning.own_samples import OwnSamples, sample_answers
from proxima.finetuning.reward_defaults import with_defaults
from proxima.finetuning.reward_losses import mean_by_answer, preference_loss, score_penalty
from proxima.models import REPORT_FILE, RewardModel, ScoreUnit, scalar_head
from proxima.runs import write_json

log = logging.getLogger(__name__)

Row = tuple[list[int], list[int]]
BINS = 10  # of the calibration error
UNIT_SAMPLES = 256  # answers that the unit of the scores is measured on


class RowPair(NamedTuple):
    """A preference as token ids."""

    chosen: Row
    rejected: Row
    margin: float
    tie: bool


class ScoreTrainer(FinetuningTrainer[Example]):
    """Trains a scalar head: an answer's score, read at its last token."""

    name, judged_by, higher_is_better = "reward", "validation_loss", False
    config: RewardConfig

    def __init__(
        self,
        config: FinetuningConfig,
        network: Any = None,
        tokenizer: Tokenizer | None = None,
        centre_on: Sequence[Demonstration] | None = None,
    ):
        """
        Args:
            config: a `RewardConfig`; a `FinetuningConfig` trains by the plain preference loss, as it says.
            centre_on: demonstrations that should score 0 on average, instead of sampled answers.
        """
        if not isinstance(config, RewardConfig):
            config = RewardConfig(**config.to_dict(), lm_coef=0.0, score_penalty=0.0)
        super().__init__(config, network, tokenizer)
        self.centre_on = centre_on
        self.unit = ScoreUnit()
        self.samples: OwnSamples | None = None

    def make_role(self) -> RewardModel:
        adapter = self.adapter("reward")
        size = self.backbone.hidden_size
        return RewardModel(
            self.backbone, adapter, scalar_head(size, (size + 1) ** -0.5, self.backbone.device), "training"
        )

    @abstractmethod
    def answers(self, encoded: Any) -> Sequence[Row]:
        """The answers in an encoded example."""

    def length(self, encoded: Any) -> int:
        return max(len(prompt) + len(response) for prompt, response in self.answers(encoded))

    def count(self, encoded: Any) -> int:
        return 1

    def settle(self, rows: Sequence[Any]) -> None:
        """Fill in the settings that are left to rules, and sample the model as it is before training."""
        self.ends_when_stale = not self.config.epochs
        self.config = with_defaults(self.config, self.backbone.network.num_parameters(), len(rows))
        log.info("learning rate %g, at most %d epochs", self.config.learning_rate, self.config.epochs)
        every = max(1, len(rows) // UNIT_SAMPLES)
        examples = [self.answers(rows[i]) for i in range(0, len(rows), every)][:UNIT_SAMPLES]
        self.samples = sample_answers(
            self.backbone, self.start_adapter, self.tokenizer, self.config, examples
        )

    def scores(self, rows: Sequence[Row]) -> Tensor:
        batch = collate(rows, self.role.device, read_last=True)
        return self.role.head_values(self.backbone.hidden(batch.ids, batch.layout, self.role.adapter))

    def chunks(self, rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
        size = self.config.micro_batch_size
        return (rows[i : i + size] for i in range(0, len(rows), size))

    def all_scores(self, rows: Sequence[Row]) -> Tensor:
        return torch.cat([self.scores(chunk) for chunk in self.chunks(rows)])

    def scores_and_language_losses(
        self, rows: Sequence[Row], is_read: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """Scores (B,) of answers, and the mean loss per token (A,) of those that `is_read`, in one pass."""
        last = collate(rows, self.role.device, read_last=True)
        if not self.config.lm_coef or not any(is_read):
            return self.scores(rows), torch.zeros(0, device=self.role.device)
        batch = collate(rows, self.role.device)
        device = batch.ids.device
        sizes = torch.tensor([len(response) for _, response in rows], device=device)
        read = torch.tensor(is_read, device=device)
        tokens = torch.repeat_interleave(read, sizes)  # (M,) whether a response token is read
        layout = replace(last.layout, read=torch.cat([last.layout.read, batch.layout.read[tokens]]))
        hidden = self.backbone.hidden(batch.ids, layout, self.role.adapter)
        logits = self.backbone.head(hidden[len(rows) :], self.role.adapter)
        losses = -token_logprobs(logits, batch.response_ids[tokens], None, 1.0)
        return self.role.head_values(hidden[: len(rows)]), mean_by_answer(losses, sizes[read])

    @torch.no_grad()
    def finish(self, rows: Sequence[Any]) -> None:
        """Give the scores their unit."""
        assert self.samples is not None
        assert self.role.head is not None
        self.unit = ScoreUnit.of(self.all_scores(self.samples.rows), "the trained reward model")
        head = self.role.head
        head.weight.data /= self.unit.deviation
        head.bias.data = self.unit(head.bias.data)
        if self.centre_on:
            shown = [encode(self.tokenizer, item.prompt, item.completion) for item in self.centre_on]
            head.bias.data -= self.all_scores(shown).mean()

    def save(self, folder: Path, results: FinetuningResults) -> None:
        super().save(folder, results)
        write_json(folder / REPORT_FILE, self.report(results))

    def report(self, results: FinetuningResults) -> dict[str, Any]:
        """What the folder says about the model; its accuracy decides whether PPO warns."""
        assert self.samples is not None
        named = ("accuracy", "validation_loss", "calibration_error")
        return {
            **{name: results.best[name] for name in named if name in results.best},
            "left_out": results.left_out,
            "unit": {
                "mean": self.unit.mean,
                "deviation": self.unit.deviation,
                "centred_on": "demonstrations" if self.centre_on else "samples",
                **self.samples.how,
            },
        }


class RewardTrainer(ScoreTrainer[Preference]):
    """Learns which of two answers people prefer (Bradley-Terry)."""

    def prepare(self, examples: Iterable[Preference], held_out: Iterable[Preference]) -> None:
        """Refuse pairs that say nothing."""
        for name, pairs in (("", examples), ("held-out ", held_out)):
            ties = [item.tie for item in pairs]
            if ties and all(ties):
                raise ValueError(
                    f"all {len(ties)} {name}pairs are ties; a reward model needs pairs with a better answer"
                )

    def encode(self, example: Preference) -> RowPair:
        chosen = encode(self.tokenizer, example.prompt, example.chosen, example.chosen_ended)
        rejected = encode(self.tokenizer, example.prompt, example.rejected, example.rejected_ended)
        return RowPair(chosen, rejected, example.margin, example.tie)

    def answers(self, encoded: RowPair) -> Sequence[Row]:
        return encoded[:2]

    def margins(self, pairs: Sequence[RowPair]) -> Tensor:
        """r(chosen) - r(rejected), (B,)."""
        scores = self.scores([row for pair in pairs for row in self.answers(pair)])
        return scores[0::2] - scores[1::2]

    def loss(self, rows: Sequence[RowPair]) -> Tensor:
        config = self.config
        answers = [row for pair in rows for row in self.answers(pair)]
        is_read = [flag for pair in rows for flag in (not pair.tie, False)]
        scores, language = self.scores_and_language_losses(answers, is_read)
        found = self.preference(rows, scores[0::2] - scores[1::2], config.label_smoothing).sum()
        if config.lm_coef:
            found = found + config.lm_coef * language.sum()
        if config.score_penalty:
            found = found + config.score_penalty * score_penalty(scores.unflatten(0, (-1, 2))).sum()
        return found

    def preference(self, rows: Sequence[RowPair], differences: Tensor, smoothing: float = 0.0) -> Tensor:
        margins = differences.new_tensor([pair.margin for pair in rows])
        ties = torch.tensor([pair.tie for pair in rows], device=differences.device)
        return preference_loss(differences, margins, ties, smoothing)

    def measure(self, rows: Sequence[RowPair]) -> dict[str, float]:
        parts = []
        for chunk in self.chunks(rows):
            margins = self.margins(chunk)
            is_decided = torch.tensor([not pair.tie for pair in chunk], device=margins.device)
            parts.append((margins[is_decided], self.preference(chunk, margins)))
        decided, losses = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return {
            "validation_loss": float(losses.mean()),
            "accuracy": float((decided > 0).float().mean()),
            "calibration_error": calibration_error(decided),
            "margin": float(decided.mean()),
        }


def calibration_error(margins: Tensor) -> float:
    """Expected calibration error: mean |confidence - accuracy| over bins of confidence max(p, 1 - p), where
    p is sigmoid(margin)."""
    confidence = torch.sigmoid(margins.abs())
    right = (margins > 0).float()
    bins = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    error = 0.0
    for number in range(BINS):
        inside = bins == number
        if inside.any():
            error += float((confidence[inside].mean() - right[inside].mean()).abs() * inside.float().mean())
    return error
