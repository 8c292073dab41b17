"""What `proxima reward` reports of a model on held-out pairs: accuracy by length, margin and confidence,
calibration, warnings. In: score differences and the pairs. Out: plain values for `reward.json`, and a few
lines.

Accuracy by length difference, by confidence, by how likely the answers are to the model that PPO starts from;
and baselines: a model that is hardly better than these has learned no more than they say.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from proxima.core.json_record import Record, RecordView
from proxima.data import Preference

SIMILAR = 0.1  # relative difference in length up to which two answers count as equally long
CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FEW = 100  # pairs, below which a share of them says little
ONE_SIDED = 0.97  # share of pairs that one side wins by its length, from which on it is said


@dataclass(frozen=True)
class Before:
    """What the reward model that training continues from made of pairs, before the first update."""

    sources: list[str]
    """Of each held-out pair: `new`, `earlier`, or `given` (as validation data)."""
    margins: Tensor
    """r(chosen) - r(rejected) (B,) of the held-out pairs."""
    new_margins: Tensor
    """The same of new pairs that are not ties, held out or not."""

    def of(self, decided: Tensor) -> Before:
        """Of some of the held-out pairs."""
        places = decided.nonzero()[:, 0].tolist()
        return replace(self, sources=[self.sources[i] for i in places], margins=self.margins[decided])


@dataclass(frozen=True)
class HeldOutPairs:
    """Held-out pairs that are not ties, as the report reads them."""

    margins: Tensor  # (B,) r(chosen) - r(rejected)
    margins_elsewhere: Tensor  # (B,) the same after another pair's prompt, nan if there is none that fits
    lengths: Tensor  # (B, 2) tokens of chosen and rejected
    likelihoods: Tensor  # (B,) mean log-probability per token of both, by the model before training, or nan
    longer_wins: bool  # whether the longer answer was chosen more often in training
    before: Before | None = None  # where training continued


def report(pairs: HeldOutPairs) -> Record:
    """Accuracies, each with the number of pairs it was measured on."""
    right = (pairs.margins > 0).double()
    elsewhere = pairs.margins_elsewhere[~pairs.margins_elsewhere.isnan()]
    return {
        "pairs": len(right),
        "by_length": _by_length(right, pairs.lengths),
        "by_confidence": _by_confidence(right, pairs.margins),
        "by_likelihood": _by_likelihood(right, pairs.likelihoods),
        "baselines": {
            "length_alone": length_accuracy(pairs.lengths, pairs.longer_wins),
            "prompt_alone": 0.5,  # both answers of a pair have the same prompt
            "another_prompt": float((elsewhere > 0).double().mean()) if len(elsewhere) else 0.5,
            "another_prompt_pairs": len(elsewhere),
        },
        **(_continued(right, pairs.before) if pairs.before else {}),
    }


def length_accuracy(lengths: Tensor, longer_wins: bool) -> float:
    """Accuracy of always choosing the longer answer (or the shorter one); equal lengths count half."""
    difference = (lengths[:, 0] - lengths[:, 1]).double()
    return float((difference.sign() * (1 if longer_wins else -1) / 2 + 0.5).mean())


def _part(right: Tensor, inside: Tensor) -> dict[str, float]:
    count = int(inside.sum())
    return {"pairs": count, "accuracy": float(right[inside].mean()) if count else math.nan}


def _by_length(right: Tensor, lengths: Tensor) -> dict[str, dict[str, float]]:
    chosen, rejected = lengths.double().unbind(1)
    change = (chosen - rejected) / torch.maximum(chosen, rejected)
    return _known(
        {
            "chosen is shorter": _part(right, change < -SIMILAR),
            "similar": _part(right, change.abs() <= SIMILAR),
            "chosen is longer": _part(right, change > SIMILAR),
        }
    )


def _by_confidence(right: Tensor, margins: Tensor) -> dict[str, dict[str, float]]:
    """Accuracy where the model is this sure, and how sure it is there: a calibrated one has both equal."""
    confidence = torch.sigmoid(margins.abs().double())
    table = {}
    for low, high in pairwise(CONFIDENCES):
        inside = (confidence >= low) & ((confidence < high) | (high == CONFIDENCES[-1]))
        part = _part(right, inside)
        if part["pairs"]:
            table[f"{low:g} to {high:g}"] = {**part, "confidence": float(confidence[inside].mean())}
    return table


def _by_likelihood(right: Tensor, likelihoods: Tensor) -> dict[str, dict[str, float]]:
    middle = likelihoods.nanmedian()
    return _known(
        {
            "likely to the base": _part(right, likelihoods >= middle),
            "unlikely to the base": _part(right, likelihoods < middle),
        }
    )


def _continued(right: Tensor, before: Before) -> Record:
    """Accuracy by where the pairs came from, and that of the model before, which had seen no new pair."""
    table = {}
    was_right, new = (before.margins > 0).double(), (before.new_margins > 0).double()
    for name in dict.fromkeys(before.sources):
        inside = torch.tensor([source == name for source in before.sources])
        table[name] = {**_part(right, inside), "accuracy_before": float(was_right[inside].mean())}
    return {"by_source": table, "before_on_new_pairs": _part(new, torch.ones_like(new).bool())}


def _known(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {name: part for name, part in table.items() if part["pairs"]}


def lines(accuracy: float, found: RecordView) -> list[str]:
    """The report for the terminal."""
    parts = [
        "; ".join(f"{name} {part['accuracy']:.3f} ({part['pairs']})" for name, part in found[table].items())
        for table in ("by_length", "by_likelihood")
    ]
    sure = "; ".join(
        f"{name}: {part['accuracy']:.2f} ({part['pairs']})" for name, part in found["by_confidence"].items()
    )
    base = found["baselines"]
    return [
        f"accuracy by length: {parts[0]}; by likelihood: {parts[1]}",
        f"accuracy by confidence: {sure}",
        f"against {accuracy:.3f}: length alone {base['length_alone']:.3f}, the answers after another prompt "
        f"{base['another_prompt']:.3f} ({base['another_prompt_pairs']}), the prompt alone "
        f"{base['prompt_alone']:.1f}",
        *_lines_of_continued(found),
        *_warnings(accuracy, found),
    ]


def _lines_of_continued(found: RecordView) -> list[str]:
    if "by_source" not in found:
        return []
    before = found["before_on_new_pairs"]
    new = f"accuracy {before['accuracy']:.3f} on new pairs ({before['pairs']}); " if before["pairs"] else ""
    sources = "; ".join(
        f"{name} {part['accuracy_before']:.3f}, now {part['accuracy']:.3f} ({part['pairs']})"
        for name, part in found["by_source"].items()
    )
    told = [f"before this training: {new}held-out pairs: {sources}"]
    if new and before["accuracy"] < 0.5 + 1 / math.sqrt(before["pairs"]):  # within two standard errors
        told.append(
            "the model was not clearly better than chance on the new pairs: what PPO gained by its scores up "
            "to there may not be quality"
        )
    return told


def _warnings(accuracy: float, found: RecordView) -> list[str]:
    base, count = found["baselines"], found["pairs"]
    moved = base["another_prompt_pairs"]
    spread = math.sqrt(max(accuracy * (1 - accuracy), 0.05))
    error = spread / math.sqrt(count)
    told = []
    if count < FEW:
        told.append(
            f"the held-out accuracy is known to about {error:.2f} only: it was measured on {count} pairs; "
            "give --validation or a larger --validation-share"
        )
    if accuracy < base["length_alone"] + 2 * error:
        told.append("the model is not clearly better than the length of the answers alone")
    if moved and base["another_prompt"] > accuracy - spread / math.sqrt(moved) and accuracy > 0.5 + 2 * error:
        told.append("the model hardly reads the prompt: its accuracy is the same with another one")
    return told


# --- the pairs themselves ---


@dataclass
class PairFacts:
    """What training pairs look like."""

    count: int = 0
    decided: int = 0  # pairs that are not ties
    longer: int = 0  # of these, how often the chosen answer has more characters
    differ: int = 0  # of these, how often the lengths differ
    constant: list[str] = field(default_factory=list)  # sides whose answer is always the same

    @classmethod
    def of(cls, pairs: Iterable[Preference]) -> PairFacts:
        facts, sides = cls(), (set[str](), set[str]())
        for item in pairs:
            facts.count += 1
            facts.decided += not item.tie
            facts.longer += not item.tie and len(item.chosen) > len(item.rejected)
            facts.differ += not item.tie and len(item.chosen) != len(item.rejected)
            for seen, text in zip(sides, (item.chosen, item.rejected), strict=True):
                if len(seen) < 2:
                    seen.add(text)
        facts.constant = [
            name for name, seen in zip(("chosen", "rejected"), sides, strict=True) if len(seen) == 1
        ]
        return facts

    def check(self) -> None:
        """A ValueError where there is nothing to learn; a warning where a model learns little."""
        if not self.decided:
            raise ValueError(
                f"all {self.count} pairs are ties; a reward model needs pairs with a better answer"
            )
        share = self.longer / self.differ if self.differ else 0.5
        if self.constant:
            _warn(f"the {' and the '.join(self.constant)} answer is the same in all {self.count} pairs")
        elif max(share, 1 - share) > ONE_SIDED and self.differ > FEW:
            _warn(
                f"the chosen answer is the {'longer' if share > 0.5 else 'shorter'} one in "
                f"{max(share, 1 - share):.0%} of the pairs"
            )
        if self.count < FEW:
            warnings.warn(
                f"{self.count} pairs are few to train a reward model on: expect a noisy one; some hundreds "
                "to thousands are usual",
                stacklevel=2,
            )


def _warn(what: str) -> None:
    warnings.warn(f"{what}: the reward model may learn that alone; give pairs of both kinds", stacklevel=3)
