"""`RewardTrainer`: a reward model from preferences. In: pairs of answers. Out: an adapter with a scalar head,
and its accuracy.

The loss is that of `reward_losses`; a score is read at the last token. `ScoreTrainer` is shared with ratings:
the head starts at N(0, 1/sqrt(d + 1)) with bias 0; after training it is scaled and shifted so that answers of
the model it started from, sampled on training prompts, have scores of mean 0 and unit variance.
"""

from __future__ import annotations

import logging
import random
import warnings
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from proxima.config import FinetuningConfig, RewardConfig
from proxima.core.json_record import Record
from proxima.core.tokenizer import Tokenizer
from proxima.data import Demonstration, Preference
from proxima.finetuning.encoded_examples import Encoded, Example, TokenRow
from proxima.finetuning.example_batches import collate, encode, encode_completion, token_losses
from proxima.finetuning.finetuning_trainer import FinetuningResults, FinetuningTrainer, Item
from proxima.finetuning.held_out_prompts import hold_out, prompt_key
from proxima.finetuning.own_samples import OwnSamples, sample_answers
from proxima.finetuning.reward_defaults import with_defaults
from proxima.finetuning.reward_losses import mean_by_answer, preference_loss, score_penalty
from proxima.finetuning.reward_report import Before, HeldOutPairs, PairFacts, lines, report
from proxima.models import REPORT_FILE, PolicyModel, RewardModel, ScoreUnit, saved_units, scalar_head
from proxima.runs import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

Row = tuple[list[int], list[int]]
BINS = 10  # of the calibration error
UNIT_SAMPLES = 256  # answers that the unit of the scores is measured on
LOOKED_AT = 256  # held-out pairs whose likelihood, and whose margin after another prompt, the report has
NEW_LOOKED_AT = 1024  # new pairs that a model whose training continues is measured on before it


class RowPair(NamedTuple):
    """A preference as token ids."""

    chosen: Row
    rejected: Row
    margin: float
    tie: bool
    mismatch: Row | None = None
    """The chosen answer to another prompt, after this prompt."""


class ScoreTrainer(FinetuningTrainer[Example, TokenRow]):
    """Trains a scalar head: an answer's score, read at its last token."""

    name, judged_by, higher_is_better = "reward", "validation_loss", False
    pairs_only: ClassVar[tuple[str, ...]] = ()
    """Settings that have no meaning for its examples, and are refused where they are given."""
    config: RewardConfig
    role: RewardModel

    def __init__(
        self,
        config: FinetuningConfig,
        network: PreTrainedModel | None = None,
        tokenizer: Tokenizer | None = None,
        centre_on: Sequence[Demonstration] | None = None,
    ):
        """
        Args:
            config: a `RewardConfig`; a `FinetuningConfig` trains by the plain preference loss, as it says.
            centre_on: demonstrations that should score 0 on average, instead of sampled answers.
        """
        if not isinstance(config, RewardConfig):
            config = RewardConfig(**config.to_dict(), lm_coef=0.0, score_penalty=0.0, mismatch_coef=0.0)
        for name in self.pairs_only:
            if (value := getattr(config, name)) not in (0, getattr(RewardConfig, name)):
                raise ValueError(f"{name} ({value:g}) is for pairs, and these are ratings; leave it out")
        super().__init__(config, network, tokenizer)
        self.centre_on = centre_on
        self.unit = ScoreUnit()
        """Of the trained scores, the mean of the heads."""
        self.units: list[ScoreUnit] = []
        """That each head's scores have been given, in all its steps; empty before training ends."""
        self.samples: OwnSamples | None = None
        self.continued: str | Path = ""
        """Folder of a reward model whose weights training starts from; empty = none."""
        self.new_examples: int | None = None
        """How many of the examples, the first, that model was not trained on; None = all."""
        self.held_out_before: set[int] = set()
        """Keys of the prompts that were held out when it was trained."""
        self.held_out: set[int] = set()
        """Keys of the prompts that were held out of the examples."""

    def make_role(self) -> RewardModel:
        adapter = self.adapter("reward")
        size = self.backbone.hidden_size
        head = scalar_head(size, (size + 1) ** -0.5, self.backbone.device, self.config.ensemble)
        return RewardModel(self.backbone, adapter, head, "training")

    @abstractmethod
    def answers(self, encoded: TokenRow) -> Sequence[Row]:
        """The answers in an encoded example."""

    def length(self, encoded: TokenRow) -> int:
        return max(map(row_tokens, self.answers(encoded)))

    def count(self, encoded: TokenRow) -> int:
        return 1

    def split(self, examples: Sequence[Example]) -> tuple[array[int], array[int]]:
        """Whole prompts are held out, as `held_out_prompts` says."""
        keys = array("Q", (prompt_key(examples[i].prompt) for i in range(len(examples))))
        order, new = self.shuffled(len(keys)), len(keys) if self.new_examples is None else self.new_examples
        self.held_out = hold_out(keys, order, self.held_out_count(new), new, self.held_out_before)
        if not self.held_out:
            warnings.warn(
                "each prompt has so many examples that held-out ones share prompts with those that are "
                "trained on, and the held-out accuracy may be too high: give --validation",
                stacklevel=2,
            )
            return super().split(examples)
        places = (
            array("Q", (i for i in order if (keys[i] in self.held_out) == out)) for out in (False, True)
        )
        return next(places), next(places)

    def settle(self, rows: Encoded[Example, TokenRow], held_out: Encoded[Example, TokenRow]) -> None:
        """Fill in the settings that are left to rules, and sample the model as it is before training."""
        self.ends_when_stale = not self.config.epochs
        self.config = with_defaults(self.config, self.backbone.network.num_parameters(), len(rows))
        log.info("learning rate %g, at most %d epochs", self.config.learning_rate, self.config.epochs)
        examples = [self.answers(rows[i]) for i in spread(range(len(rows)), UNIT_SAMPLES)]
        given = self.backbone, self.start_adapter, self.tokenizer, self.config, examples
        self.samples = self.passes.run(lambda: sample_answers(*given), self.config.max_length, samples=True)
        self.look(held_out)
        if self.continued:  # only now: with all weights, it takes the place of the model that was sampled
            self.role.load(self.continued)
            units = saved_units(self.continued) or [ScoreUnit()]
            self.rescale([unit.inverse for unit in units])

    def look(self, held_out: Sequence[TokenRow]) -> None:
        """See what the report needs of the model as it is before training."""

    def members(self, rows: Sequence[Row]) -> Tensor:
        """Scores (B, heads) of answers."""
        batch = collate(rows, self.role.device, read_last=True)
        return self.role.member_scores(self.backbone.hidden(batch.ids, batch.layout, self.role.adapter))

    def scores(self, rows: Sequence[Row]) -> Tensor:
        """Scores (B,) of answers: the mean of the heads."""
        return self.members(rows).mean(1)

    def shares(self, rows: Sequence[TokenRow]) -> Tensor:
        """Weights (B, heads) of examples in each head's loss: 1 for a single head, and for each of several
        1.5 in its own two thirds of the examples and 0 in the others, which depend on the content alone."""
        count = self.config.ensemble
        if count == 1:
            return torch.ones(len(rows), 1, device=self.role.device)
        drawn = [random.Random(f"{self.config.seed} {self.answers(row)}") for row in rows]
        inside = [[rng.random() < 2 / 3 for _ in range(count)] for rng in drawn]
        return 1.5 * torch.tensor(inside, dtype=torch.float32, device=self.role.device)

    def tokens(self, encoded: TokenRow) -> int:
        return sum(map(row_tokens, self.answers(encoded)))

    def all_scores(self, rows: Sequence[Row]) -> Tensor:
        return torch.cat(self.by_passes(rows, row_tokens, self.scores))

    def scores_and_language_losses(
        self, rows: Sequence[Row], is_read: Sequence[bool]
    ) -> tuple[Tensor, Tensor]:
        """Scores (B, heads) of answers, and the mean loss per token (A,) of those that `is_read`, in one
        pass."""
        if not self.config.lm_coef or not any(is_read):
            return self.members(rows), torch.zeros(0, device=self.role.device)
        last = collate(rows, self.role.device, read_last=True)
        batch = collate(rows, self.role.device)
        device = batch.ids.device
        sizes = torch.tensor([len(response) for _, response in rows], device=device)
        read = torch.tensor(is_read, device=device)
        tokens = torch.repeat_interleave(read, sizes)  # (M,) whether a response token is read
        layout = replace(last.layout, read=torch.cat([last.layout.read, batch.layout.read[tokens]]))
        hidden = self.backbone.hidden(batch.ids, layout, self.role.adapter)
        losses = token_losses(self.role, hidden[len(rows) :], batch.response_ids[tokens], self.passes.chunk)
        return self.role.member_scores(hidden[: len(rows)]), mean_by_answer(losses, sizes[read])

    @torch.no_grad()
    def likelihoods(self, rows: Sequence[Row], adapter: str | None) -> Tensor:
        """Mean log-probability per token (B,) of answers."""
        batch = collate(rows, self.role.device)
        hidden = self.backbone.hidden(batch.ids, batch.layout, adapter)
        policy = PolicyModel(self.backbone, adapter)
        losses = token_losses(policy, hidden, batch.response_ids, self.passes.chunk)
        sizes = torch.tensor([len(response) for _, response in rows], device=self.role.device)
        return -mean_by_answer(losses, sizes)

    @torch.no_grad()
    def finish(self, held_out: Sequence[TokenRow]) -> None:
        """Give the scores their unit: to each head its own, then to their mean, which varies less."""
        assert self.samples is not None
        members = torch.cat(self.by_passes(self.samples.rows, row_tokens, self.members))
        self.unit = ScoreUnit.of(members.mean(1), "the trained reward model")
        self.units = [self.unit]
        if self.config.ensemble > 1:
            self.units = [ScoreUnit.of(column, "a head of the ensemble") for column in members.T]
        self.rescale(self.units)
        if self.config.ensemble > 1:
            self._add_unit(ScoreUnit.of(self.all_scores(self.samples.rows), "the ensemble"))
        if self.centre_on:
            shown = [encode(self.tokenizer, item.prompt, item.completion) for item in self.centre_on]
            self._add_unit(ScoreUnit(float(self.all_scores(shown).mean())))

    def _add_unit(self, unit: ScoreUnit) -> None:
        """A further step for all heads."""
        self.rescale([unit])
        self.units = [each.then(unit) for each in self.units]

    @torch.no_grad()
    def rescale(self, units: Sequence[ScoreUnit]) -> None:
        """Put one unit into each head, or the same into all."""
        head = self.role.head
        assert head is not None
        means, deviations = (
            head.bias.new_tensor(column)
            for column in zip(*((unit.mean, unit.deviation) for unit in units), strict=True)
        )
        head.weight /= deviations.unsqueeze(1)
        head.bias.copy_((head.bias - means) / deviations)

    def save(self, folder: Path, results: FinetuningResults) -> None:
        super().save(folder, results)
        write_json(folder / REPORT_FILE, self.report(results))

    def report(self, results: FinetuningResults) -> Record:
        """What the folder says about the model; its accuracy decides whether PPO warns."""
        assert self.samples is not None
        named = ("accuracy", "validation_loss", "calibration_error")
        return {
            **{name: results.best[name] for name in named if name in results.best},
            "left_out": results.left_out,
            "unit": {
                "mean": self.unit.mean,
                "deviation": self.unit.deviation,
                "heads": [{"mean": unit.mean, "deviation": unit.deviation} for unit in self.units],
                "centred_on": "demonstrations" if self.centre_on else "samples",
                **self.samples.how,
            },
        }


class RewardTrainer(ScoreTrainer[Preference, RowPair]):
    """Learns which of two answers people prefer (Bradley-Terry)."""

    longer_wins = True
    held_out_margins: Tensor
    """Of the best weights (B,): r(chosen) - r(rejected) of the held-out pairs that fit max_length, in order,
    before the scores get their unit."""
    held_out_report: Record
    before: Before | None = None
    """What the reward model that training continues from made of the pairs."""
    _looked_at: Sequence[int]  # places of held-out pairs
    _likelihoods: Tensor  # of these pairs
    _measured: Tensor  # margins of the last evaluation

    def prepare(self, examples: Iterable[Preference], held_out: Iterable[Preference]) -> None:
        """Refuse pairs that say nothing, and warn of those that say little."""
        facts = PairFacts.of(examples)
        facts.check()
        if all(item.tie for item in held_out):
            raise ValueError("all held-out pairs are ties; hold out more, or give --validation")
        self.longer_wins = 2 * facts.longer >= facts.differ

    def settle(self, rows: Encoded[Preference, RowPair], held_out: Encoded[Preference, RowPair]) -> None:
        super().settle(rows, held_out)
        if self.continued:
            self.before = self._look_before(rows, held_out)

    @torch.no_grad()
    def _look_before(
        self, rows: Encoded[Preference, RowPair], held_out: Encoded[Preference, RowPair]
    ) -> Before:
        """New pairs are evidence whether they are held out or not, since that model saw none of them."""
        count = len(rows.examples) if self.new_examples is None else self.new_examples
        is_split = held_out.examples is rows.examples
        parts = (rows, held_out) if is_split else (rows,)
        places = [(part, i) for part in parts for i, place in enumerate(part.places) if place < count]
        new = [part[i] for part, i in spread(places, NEW_LOOKED_AT)]
        sources = ["new" if place < count else "earlier" for place in held_out.places]
        return Before(
            sources if is_split else ["given"] * len(held_out),
            self.all_margins(held_out[:]),
            self.all_margins([pair for pair in new if not pair.tie]),
        )

    def look(self, held_out: Sequence[RowPair]) -> None:
        """How likely the answers of some held-out pairs are to it."""
        self._looked_at = spread([i for i, pair in enumerate(held_out) if not pair.tie], LOOKED_AT)
        if not self._looked_at:
            raise ValueError(
                f"all held-out pairs that fit max_length ({self.config.max_length} tokens) are ties; raise "
                "it, or give --validation"
            )
        self.backbone.network.eval()

        def likelihoods(pairs: Sequence[RowPair]) -> Tensor:
            return self.likelihoods([row for pair in pairs for row in self.answers(pair)], self.start_adapter)

        parts = self.by_passes([held_out[i] for i in self._looked_at], self.tokens, likelihoods)
        self._likelihoods = torch.cat(parts).unflatten(0, (-1, 2)).mean(1).cpu()

    def keep(self) -> None:
        self.held_out_margins = self._measured

    @torch.no_grad()
    def finish(self, held_out: Sequence[RowPair]) -> None:
        """Report on the held-out pairs while scores are still the logits of choices; then the unit."""
        pairs = held_out[:]
        decided = torch.tensor([not pair.tie for pair in pairs])
        lengths = torch.tensor([[len(row[1]) for row in self.answers(pair)] for pair in pairs])
        elsewhere, likelihoods = torch.full((2, len(pairs)), torch.nan)
        elsewhere[self._looked_at] = self.margins_elsewhere([pairs[i] for i in self._looked_at])
        likelihoods[self._looked_at] = self._likelihoods
        self.held_out_report = report(
            HeldOutPairs(
                self.held_out_margins[decided],
                elsewhere[decided],
                lengths[decided],
                likelihoods[decided],
                self.longer_wins,
                self.before and self.before.of(decided),
            )
        )
        super().finish(held_out)

    def margins_elsewhere(self, pairs: Sequence[RowPair]) -> Tensor:
        """Margins (B,) of the answers after the next pair's prompt; nan where that is the same or too
        long."""
        prompts = [pair.chosen[0] for pair in pairs]
        found = torch.full((len(pairs),), torch.nan)
        there: dict[int, RowPair] = {}
        for i, (pair, prompt) in enumerate(zip(pairs, prompts[1:] + prompts[:1], strict=True)):
            moved = pair._replace(chosen=(prompt, pair.chosen[1]), rejected=(prompt, pair.rejected[1]))
            if prompt != pair.chosen[0] and self.length(moved) <= self.config.max_length:
                there[i] = moved
        if there:
            found[list(there)] = self.all_margins(list(there.values()))
        return found

    def report(self, results: FinetuningResults) -> Record:
        return {**super().report(results), "held_out": self.held_out_report}

    def report_lines(self, results: FinetuningResults) -> list[str]:
        """The report for the terminal."""
        return lines(results.best["accuracy"], self.held_out_report)

    def encode(self, example: Preference) -> RowPair:
        prompt, chosen = encode(self.tokenizer, example.prompt, example.chosen, example.chosen_ended)
        rejected = encode_completion(self.tokenizer, example.rejected, example.rejected_ended)
        return RowPair((prompt, chosen), (prompt, rejected), example.margin, example.tie)

    def answers(self, encoded: RowPair) -> Sequence[Row]:
        return encoded[:2]

    def tokens(self, encoded: RowPair) -> int:
        return super().tokens(encoded) + (row_tokens(encoded.mismatch) if encoded.mismatch else 0)

    def margins(self, pairs: Sequence[RowPair]) -> Tensor:
        """r(chosen) - r(rejected), (B,)."""
        scores = self.scores([row for pair in pairs for row in self.answers(pair)])
        return scores[0::2] - scores[1::2]

    def all_margins(self, pairs: Sequence[RowPair]) -> Tensor:
        parts = self.by_passes(pairs, self.tokens, lambda chunk: self.margins(chunk).cpu())
        return torch.cat([torch.zeros(0), *parts])

    def batches(self, rows: Encoded[Preference, RowPair], epoch: int) -> Iterator[list[RowPair]]:
        """Whole batches, before they are cut into micro-batches: each pair gets the next one's answer."""
        for batch in super().batches(rows, epoch):
            yield self.with_mismatches(batch) if self.config.mismatch_coef else batch

    def with_mismatches(self, batch: Sequence[RowPair]) -> list[RowPair]:
        found = []
        for pair, other in zip(batch, [*batch[1:], *batch[:1]], strict=True):
            prompt, answer = pair.chosen[0], other.chosen[1]
            fits = len(prompt) + len(answer) <= self.config.max_length
            differs = prompt != other.chosen[0] and answer not in (pair.chosen[1], pair.rejected[1])
            found.append(pair._replace(mismatch=(prompt, answer) if fits and differs else None))
        return found

    def loss(self, rows: Sequence[RowPair]) -> Tensor:
        config, count = self.config, len(rows)
        mismatched = [i for i, pair in enumerate(rows) if pair.mismatch]
        answers = [row for pair in rows for row in self.answers(pair)]
        answers += [pair.mismatch for pair in rows if pair.mismatch]
        is_read = [flag for pair in rows for flag in (not pair.tie, False)] + [False] * len(mismatched)
        scores, language = self.scores_and_language_losses(answers, is_read)
        chosen = scores[0 : 2 * count : 2]
        rejected = scores[1 : 2 * count : 2]
        others = scores[2 * count :]
        shares = self.shares(rows)
        found = (shares * self.preference(rows, chosen - rejected, config.label_smoothing)).mean(1).sum()
        if mismatched:
            off = -logsigmoid(chosen[mismatched] - others)
            found = found + config.mismatch_coef * (shares[mismatched] * off).mean(1).sum()
        if config.lm_coef:
            found = found + config.lm_coef * language.sum()
        if config.score_penalty:
            found = found + config.score_penalty * score_penalty(scores[: 2 * count].reshape(count, -1)).sum()
        return found

    def preference(self, rows: Sequence[RowPair], differences: Tensor, smoothing: float = 0.0) -> Tensor:
        """Loss of pairs, of the shape of the differences: (B,), or (B, heads)."""
        shape = (len(rows), *[1] * (differences.ndim - 1))
        margins = differences.new_tensor([pair.margin for pair in rows]).view(shape)
        ties = torch.tensor([pair.tie for pair in rows], device=differences.device).view(shape)
        return preference_loss(differences, margins, ties, smoothing)

    def measure(self, rows: Sequence[RowPair]) -> dict[str, float]:
        parts = []
        for chunk in self.chunks(rows, self.tokens):
            margins = self.margins(chunk)
            is_decided = torch.tensor([not pair.tie for pair in chunk], device=margins.device)
            parts.append((margins, margins[is_decided], self.preference(chunk, margins)))
        margins, decided, losses = (torch.cat(columns) for columns in zip(*parts, strict=True))
        self._measured = margins.cpu()
        return {
            "validation_loss": float(losses.mean()),
            "accuracy": float((decided > 0).float().mean()),
            "calibration_error": calibration_error(decided),
            "margin": float(decided.mean()),
        }


def row_tokens(row: Row) -> int:
    return len(row[0]) + len(row[1])


def spread(places: Sequence[Item], count: int) -> Sequence[Item]:
    """At most `count` of these places: every n-th."""
    return places[:: max(1, len(places) // count)][:count]


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
