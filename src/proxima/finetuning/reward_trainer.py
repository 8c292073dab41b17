"""`RewardTrainer`: a reward model from preferences. In: pairs of answers. Out: an adapter with a scalar head,
and its accuracy.

The loss is -log sigmoid(r(chosen) - r(rejected)); a score is read at the last token. `ScoreTrainer` is shared
with ratings: the head starts at N(0, 1/sqrt(d + 1)) with bias 0; after training the bias is shifted so that
demonstrations (or, without any, the training answers) score 0 on average.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from proxima.config import FinetuningConfig
from proxima.core.tokenizer import Tokenizer
from proxima.data import Demonstration, Preference
from proxima.finetuning.example_batches import collate, encode
from proxima.finetuning.finetuning_trainer import Example, FinetuningResults, FinetuningTrainer
from proxima.models import REPORT_FILE, RewardModel, scalar_head
from proxima.runs import write_json

Row = tuple[list[int], list[int]]
RowPair = tuple[Row, Row]  # chosen, rejected
BINS = 10  # of the calibration error
CENTRE_EXAMPLES = 500  # training examples whose answers are centred where there are no demonstrations


class ScoreTrainer(FinetuningTrainer[Example]):
    """Trains a scalar head: an answer's score, read at its last token."""

    name, judged_by, higher_is_better = "reward", "validation_loss", False

    def __init__(
        self,
        config: FinetuningConfig,
        network: Any = None,
        tokenizer: Tokenizer | None = None,
        centre_on: Sequence[Demonstration] | None = None,
    ):
        """
        Args:
            centre_on: demonstrations that should score 0 on average.
        """
        super().__init__(config, network, tokenizer)
        self.centre_on = centre_on

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

    def scores(self, rows: Sequence[Row]) -> Tensor:
        batch = collate(rows, self.role.device, read_last=True)
        return self.role.head_values(self.backbone.hidden(batch.ids, batch.layout, self.role.adapter))

    @torch.no_grad()
    def finish(self, rows: Sequence[Any]) -> None:
        """Shift the bias so that demonstrations, or the first training answers, score 0 on average."""
        size = self.config.micro_batch_size
        if self.centre_on:
            answers = [encode(self.tokenizer, item.prompt, item.completion) for item in self.centre_on]
        else:
            answers = [row for example in rows[:CENTRE_EXAMPLES] for row in self.answers(example)]
        scores = torch.cat([self.scores(answers[i : i + size]) for i in range(0, len(answers), size)])
        assert self.role.head is not None
        self.role.head.bias.data -= scores.mean()

    def save(self, folder: Path, results: FinetuningResults) -> None:
        super().save(folder, results)
        write_json(folder / REPORT_FILE, self.report(results))

    def report(self, results: FinetuningResults) -> dict[str, float]:
        """What the folder says about the model; its accuracy decides whether PPO warns."""
        named = ("accuracy", "validation_loss", "calibration_error")
        return {
            **{name: results.best[name] for name in named if name in results.best},
            "left_out": results.left_out,
        }


class RewardTrainer(ScoreTrainer[Preference]):
    """Learns which of two answers people prefer (Bradley-Terry)."""

    def encode(self, example: Preference) -> RowPair:
        chosen = encode(self.tokenizer, example.prompt, example.chosen, example.chosen_ended)
        return chosen, encode(self.tokenizer, example.prompt, example.rejected, example.rejected_ended)

    def answers(self, encoded: RowPair) -> Sequence[Row]:
        return encoded

    def margins(self, pairs: Sequence[RowPair]) -> Tensor:
        """r(chosen) - r(rejected), (B,)."""
        scores = self.scores([row for pair in pairs for row in pair])
        return scores[0::2] - scores[1::2]

    def loss(self, rows: Sequence[RowPair]) -> Tensor:
        return -logsigmoid(self.margins(rows)).sum()

    def measure(self, rows: Sequence[RowPair]) -> dict[str, float]:
        size = self.config.micro_batch_size
        margins = torch.cat([self.margins(rows[i : i + size]) for i in range(0, len(rows), size)])
        return {
            "validation_loss": float(-logsigmoid(margins).mean()),
            "accuracy": float((margins > 0).float().mean()),
            "calibration_error": calibration_error(margins),
            "margin": float(margins.mean()),
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
