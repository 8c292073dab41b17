"""Two recordings of a step, stage by stage. In: two bundles, or a bundle and what was recomputed of it. Out:
for each stage the same bits, within the tolerance, or different; and the first that differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from proxima.core.json_record import Record, within
from proxima.runs import MATTERS, Bundle

Result = Literal["same bits", "within tolerance", "differs", "not recomputed"]
Tensors = Mapping[str, Tensor]

PROMPT = ("prompt_ids", "prompt_mask")
STAGES: dict[str, tuple[str, ...]] = {
    # its name, and the groups or tensors that it compares; in the order of a step
    "state before the step": ("before", "reference"),
    "prompt tokens": tuple(f"tokens/{name}" for name in PROMPT),
    "sampled tokens": ("tokens",),
    "log-probabilities": ("scoring",),
    "rewards": ("rewards", "rows"),
    "per-token rewards": ("token_rewards",),
    "values": ("values",),
    "advantages": ("advantages",),
    "whitened advantages": ("whitened",),
    "minibatches": ("update",),
    "adapters after": ("after",),
}
SWITCHES = 0.1  # how far the share of clipped tokens may move: each is in or out


@dataclass(frozen=True)
class Difference:
    """Where two recordings of a tensor are furthest apart."""

    tensor: str
    where: str
    left: str
    right: str
    size: float
    limit: float
    """What the tolerance allows."""

    @property
    def excess(self) -> float:
        """By which factor it is over the limit."""
        return self.size / self.limit if self.limit else math.inf

    def __str__(self) -> str:
        values = f": {self.left} and {self.right}" if self.left else ""
        return f"{self.tensor}{self.where}{values}"


@dataclass(frozen=True)
class Stage:
    """One stage of a step in both recordings."""

    name: str
    result: Result
    worst: Difference | None = None
    why: str = ""
    """Why it was not recomputed."""


@dataclass(frozen=True)
class Comparison:
    """All stages, and what else differs."""

    stages: list[Stage]
    tolerance: Record
    expects_bits: bool
    """Whether both come from the same kind of machine, so that anything but the same bits is a difference."""
    settings: list[tuple[str, str, str]] = field(default_factory=list)
    environment: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def first(self) -> Stage | None:
        """The first stage that differs; on the same kind of machine, the first that is not the same bits."""
        bad = ("differs", "within tolerance") if self.expects_bits else ("differs",)
        return next((stage for stage in self.stages if stage.result in bad), None)

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        if self.first is not None:
            told = f" ({self.first.worst})" if self.first.worst else ""
            return f"the first stage that differs: {self.first.name}{told}"
        done = [stage for stage in self.stages if stage.result != "not recomputed"]
        if all(stage.result == "same bits" for stage in done):
            return f"the same bits in all {len(done)} stages"
        return f"all {len(done)} stages agree within the tolerance"


def compare_bundles(
    left: Bundle,
    right: Bundle,
    sampled: Tensors | None = None,
    not_recomputed: Mapping[str, str] | None = None,
) -> Comparison:
    """
    Args:
        right: another recording, or what was recomputed of `left`.
        sampled: the tokens of the right side, where they are not those that its other stages are of.
        not_recomputed: stages that were taken from `left`, and why.
    """
    ours = left.tensors
    theirs = {**right.tensors, **(sampled or {})}
    tolerance = max(left.facts["tolerance"], right.facts["tolerance"], key=lambda each: each["numbers"])
    same_kind = same_machine(left, right)
    judge = _Judge(ours, theirs, tolerance, same_kind)
    skipped = not_recomputed or {}
    stages = [
        Stage(name, "not recomputed", None, skipped[name]) if name in skipped else judge.stage(name, names)
        for name, names in STAGES.items()
    ]
    environment = _rows(_flat(left.facts["environment"]), _flat(right.facts["environment"]))
    settings = _rows(left.facts["settings"], right.facts["settings"])
    return Comparison(stages, tolerance, same_kind, settings, environment)


def same_machine(left: Bundle, right: Bundle) -> bool:
    """Whether the same bits are expected: versions, processor, threads and device are the same."""
    first, second = left.facts["environment"], right.facts["environment"]
    kinds = [left.facts[name] == right.facts[name] for name in ("device", "dtype", "proxima")]
    return all(kinds) and all(first.get(name) == second.get(name) for name in MATTERS)


def _flat(values: Mapping[str, Any]) -> Record:
    packages = within(values, "packages")
    return {**{name: value for name, value in values.items() if name != "packages"}, **packages}


def _rows(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    names = sorted({*left, *right})
    return [
        (name, str(left.get(name, "-")), str(right.get(name, "-")))
        for name in names
        if left.get(name) != right.get(name)
    ]


class _Judge:
    """Both sides, and what may differ."""

    def __init__(self, left: Tensors, right: Tensors, tolerance: Record, expects_bits: bool):
        self.left, self.right, self.tolerance, self.expects_bits = left, right, tolerance, expects_bits
        self.numbers = float(tolerance["numbers"])

    def stage(self, name: str, groups: Sequence[str]) -> Stage:
        names = self._names(groups, leave=STAGES["prompt tokens"] if name == "sampled tokens" else ())
        if not names:
            return Stage(name, "not recomputed", None, "neither side holds it")
        if odd := [each for each in names if (each in self.left) != (each in self.right)]:
            side = "left" if odd[0] in self.left else "right"
            return Stage(
                name, "differs", Difference(odd[0], f" is only on the {side}", "", "", math.inf, 0.0)
            )
        if all(_same(self.left[each], self.right[each]) for each in names):
            return Stage(name, "same bits")
        worst = self._worst(name, names)
        result: Result = "within tolerance" if worst.size <= worst.limit else "differs"
        if name == "minibatches" and self.expects_bits:
            worst = self._first_minibatch(names, exact=True)
        return Stage(name, result, worst)

    def _names(self, groups: Sequence[str], leave: Sequence[str]) -> list[str]:
        found = {*self.left, *self.right}
        within_groups = tuple(f"{group}/" for group in groups)
        return sorted(
            each for each in found if (each in groups or each.startswith(within_groups)) and each not in leave
        )

    def _worst(self, stage: str, names: Sequence[str]) -> Difference:
        if stage == "adapters after":
            return max(self._updates(names), key=lambda each: each.excess)
        if stage == "sampled tokens" and (switched := self._switched()) is not None:
            return switched
        if stage == "minibatches":
            return self._first_minibatch(names, exact=False)
        odd = [each for each in names if not _same(self.left[each], self.right[each])]
        found = [self._kept(each) if "/kept_" in each else self._difference(each) for each in odd]
        return max(found, key=lambda each: each.excess)

    def _difference(self, name: str) -> Difference:
        left, right = self.left[name], self.right[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            return Difference(name, "", _kind(left), _kind(right), math.inf, 0.0)
        apart = _apart(left, right)
        place = int(apart.argmax())
        spots = torch.unravel_index(torch.tensor(place), left.shape) if left.ndim else ()
        where = f"[{', '.join(str(int(each)) for each in spots)}]"
        values = _shown(left.reshape(-1)[place]), _shown(right.reshape(-1)[place])
        return Difference(name, where, *values, float(apart.reshape(-1)[place]), self._limit(name))

    def _limit(self, name: str) -> float:
        """What a number may differ by; nothing where it is no number but an id, a mask or a weight."""
        left = self.left[name]
        group = name.split("/", maxsplit=1)[0]
        if not left.is_floating_point() or group in ("before", "reference"):
            return 0.0
        known = left[left.isfinite()]
        largest = max(1.0, float(known.abs().max())) if len(known) else 1.0
        if group == "update":
            if "grad_norm" in name:
                return float(self.tolerance["gradients"]) * largest
            moved = float(self.tolerance["update"]) * float(known.abs().max()) if len(known) else 0.0
            return self._scale() * largest + moved + (SWITCHES if name == "update/clip_fraction" else 0.0)
        return (self._scale() if group == "whitened" else self.numbers) * largest

    def _scale(self) -> float:
        """Whitening divides by the deviation of the advantages, and with them by that of their errors."""
        column, mask = self.left.get("advantages/advantage"), self.left["tokens/mask"]
        if column is None or not column.numel():
            return self.numbers
        real = column[mask[self.left["rows"]][:, : column.shape[1]]] if len(mask) else column
        return self.numbers * max(1.0, 1 / max(float(real.double().std(correction=0)), 1e-6))

    def _switched(self) -> Difference | None:
        """Of sampled tokens: the share of those, among the tokens up to the first other one of each
        sequence, that are another token; None where only numbers differ."""
        (ours, mask), (theirs, other) = (
            (side["tokens/response_ids"], side["tokens/mask"]) for side in (self.left, self.right)
        )
        if len(ours) != len(theirs):
            return None
        width = min(ours.shape[1], theirs.shape[1])
        differ = (ours[:, :width] != theirs[:, :width]) | (mask[:, :width] != other[:, :width])
        rows = differ.any(1)
        if not rows.any():
            return None
        before = torch.where(rows, differ.int().argmax(1) + 1, mask.sum(1))
        first = int(rows.nonzero()[0])
        place = int(differ[first].int().argmax())
        share = float(rows.sum()) / max(int(before.sum()), 1)
        where = f" ({int(rows.sum())} of {len(rows)} sequences; the first: sequence {first}, token {place})"
        values = _shown(ours[first, place]), _shown(theirs[first, place])
        return Difference("tokens/response_ids", where, *values, share, self.numbers)

    def _kept(self, name: str) -> Difference:
        """Of kept sets: the share of their tokens that are not in the other's."""
        ours, theirs = self.left[name], self.right[name]
        if ours.shape[:2] != theirs.shape[:2] or ours.dtype != theirs.dtype:
            return self._difference(name)
        pairs = [(_members(one), _members(other)) for one, other in zip(ours, theirs, strict=True)]
        alone = sum(len(one ^ other) for one, other in pairs)
        share = alone / max(sum(len(one) + len(other) for one, other in pairs), 1)
        where = f": {share:.3g} of the kept tokens are not in both"
        return Difference(name, where, "", "", share, self.numbers)

    def _first_minibatch(self, names: Sequence[str], exact: bool) -> Difference:
        """The worst number of the first minibatch that is over its limit, or that is not exactly the same;
        else the worst of all."""
        found = [self._difference(each) for each in names if not _same(self.left[each], self.right[each])]
        shapes = [each for each in found if each.limit == 0.0]
        if shapes:
            return shapes[0]
        for place in range(len(self.left[names[0]])):
            here = [self._minibatch(each, place) for each in names]
            if (worst := max(here, key=lambda each: each.excess)).size > (0 if exact else worst.limit):
                return worst
        return max(found, key=lambda each: each.excess)

    def _minibatch(self, name: str, place: int) -> Difference:
        left, right = self.left[name][place], self.right[name][place]
        where = f" of minibatch {place + 1}"
        size = float(_apart(left.reshape(1), right.reshape(1)))
        return Difference(name, where, _shown(left), _shown(right), size, self._limit(name))

    def _updates(self, names: Sequence[str]) -> list[Difference]:
        """By role, how far the two updates of its weights are apart, relative to the left one."""
        if odd := [each for each in names if self.left[each].shape != self.right[each].shape]:
            return [self._difference(odd[0])]
        found = []
        for role in sorted({each.split("/")[1] for each in names}):
            own = [each for each in names if each.split("/")[1] == role]
            before = [self.left.get(f"before/{each.removeprefix('after/')}") for each in own]
            apart = _norm([self.left[each].double() - self.right[each].double() for each in own])
            moved = _norm(
                [
                    self.left[each].double() - (0 if start is None else start.double())
                    for each, start in zip(own, before, strict=True)
                ]
            )
            size = apart / moved if moved else (math.inf if apart else 0.0)
            limit = float(self.tolerance["update"])
            where = f": the updates differ by {size:.3g} of their size"
            found.append(Difference(f"after/{role}", where, "", "", size, limit))
        return found


def _members(kept: Tensor) -> set[tuple[int, int]]:
    """Position and id of every token that a sequence's kept sets (R, K) hold; of bits, each byte's value."""
    spots = (kept >= 0) if kept.dtype == torch.int32 else kept != 0
    places = spots.nonzero()[:, 0].tolist()
    values = kept[spots] if kept.dtype == torch.int32 else spots.nonzero()[:, 1] * 256 + kept[spots]
    return set(zip(places, values.tolist(), strict=True))


def _norm(tensors: Sequence[Tensor]) -> float:
    total = math.sqrt(sum(float(each.square().sum()) for each in tensors))
    return math.inf if math.isnan(total) else total


def _same(left: Tensor, right: Tensor) -> bool:
    """The same bits; any nan is the same as any other."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_floating_point():
        return bool(((left == right) | (left.isnan() & right.isnan())).all())
    return torch.equal(left, right)


def _apart(left: Tensor, right: Tensor) -> Tensor:
    """How far numbers are apart; infinite where only one of them is a number."""
    apart = (left.double() - right.double()).abs()
    same = (left == right) | (left.isnan() & right.isnan())
    return torch.where(same, 0.0, apart.nan_to_num(nan=math.inf))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _shown(number: Tensor) -> str:
    return f"{float(number):.9g}" if number.is_floating_point() else str(int(number))
