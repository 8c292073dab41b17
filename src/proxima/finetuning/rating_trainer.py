"""`RatingTrainer`: a reward model from ratings. In: answers, each with a number. Out: the same folder as
`RewardTrainer`'s.

The head regresses the rating with a squared error; ratings are standardised by the mean and standard
deviation of the training set. The language-model loss is on answers rated above the mean; the score penalty
draws scores towards the mean rating. Held-out accuracy is the share of pairs with different ratings that the
scores put in the right order, as for a preference model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from proxima.core.json_record import Record
from proxima.core.regular_files import read_file
from proxima.data import Rating
from proxima.finetuning.encoded_examples import Encoded
from proxima.finetuning.example_batches import encode
from proxima.finetuning.finetuning_trainer import FinetuningResults
from proxima.finetuning.reward_losses import score_penalty
from proxima.finetuning.reward_trainer import Row, ScoreTrainer
from proxima.models import REPORT_FILE, ScoreUnit

Rated = tuple[Row, float]  # an answer, its rating


class RatingTrainer(ScoreTrainer[Rating, Rated]):
    """Learns how people rate an answer."""

    pairs_only = ("label_smoothing", "mismatch_coef")
    mean = 0.0
    deviation = 1.0

    def prepare(self, examples: Iterable[Rating], held_out: Iterable[Rating]) -> None:
        """Mean and standard deviation of the training ratings (Welford). All the same: nothing to learn."""
        count = 0
        squares = 0.0
        self.mean = 0.0
        for count, example in enumerate(examples, 1):
            difference = example.rating - self.mean
            self.mean += difference / count
            squares += difference * (example.rating - self.mean)
        self.deviation = math.sqrt(squares / max(count, 1))
        if not self.deviation:
            raise ValueError(
                f"all {count} ratings are {self.mean:g}; a reward model needs ratings that differ"
            )
        if len({example.rating for example in held_out}) < 2:
            raise ValueError(
                "the held-out ratings are all the same; hold out more (validation_share) or give validation "
                "data"
            )

    def settle(self, rows: Encoded[Rating, Rated], held_out: Encoded[Rating, Rated]) -> None:
        """Also: a model whose training continues was trained on ratings in another unit."""
        super().settle(rows, held_out)
        if self.continued and (before := saved_ratings(self.continued)) is not None:
            self.rescale([before.inverse.then(ScoreUnit(self.mean, self.deviation))])

    def encode(self, example: Rating) -> Rated:
        return encode(self.tokenizer, example.prompt, example.completion, example.ended), example.rating

    def answers(self, encoded: Rated) -> Sequence[Row]:
        return encoded[:1]

    def standardised(self, rows: Sequence[Rated]) -> list[float]:
        return [(rating - self.mean) / self.deviation for _, rating in rows]

    def squares(self, scores: Tensor, rows: Sequence[Rated]) -> Tensor:
        """Squared errors (B, heads)."""
        return (scores - scores.new_tensor(self.standardised(rows)).unsqueeze(1)).square()

    def loss(self, rows: Sequence[Rated]) -> Tensor:
        is_read = [rating > self.mean for _, rating in rows]
        scores, language = self.scores_and_language_losses([row for row, _ in rows], is_read)
        found = (self.shares(rows) * self.squares(scores, rows)).mean(1)
        penalty = self.config.score_penalty * score_penalty(scores)
        return found.sum() + self.config.lm_coef * language.sum() + penalty.sum()

    def measure(self, rows: Sequence[Rated]) -> dict[str, float]:
        parts = []
        for chunk in self.chunks(rows, self.tokens):
            scores = self.scores([row for row, _ in chunk])
            parts.append((scores, scores.new_tensor(self.standardised(chunk))))
        scores, ratings = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return {
            "validation_loss": float((scores - ratings).square().mean()),
            "accuracy": order_accuracy(scores, ratings),
        }

    def report(self, results: FinetuningResults) -> Record:
        """Also what turns a score in its unit back into a rating, in the same two steps backwards."""
        return {**super().report(results), "rating_mean": self.mean, "rating_deviation": self.deviation}


def saved_ratings(folder: str | Path) -> ScoreUnit | None:
    """The unit of the ratings that the reward model in a folder was trained on; None of a model of pairs."""
    try:
        noted = json.loads(read_file(Path(folder) / REPORT_FILE))
        return ScoreUnit(float(noted["rating_mean"]), float(noted["rating_deviation"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def order_accuracy(scores: Tensor, ratings: Tensor) -> float:
    """Share of all pairs with different ratings whose scores have the same order; nan without such a pair."""
    right = pairs = 0
    for i in range(len(scores) - 1):
        gaps = ratings[i] - ratings[i + 1 :]
        right += int(((scores[i] - scores[i + 1 :]) * gaps > 0).sum())
        pairs += int((gaps != 0).sum())
    return right / pairs if pairs else math.nan
