"""How far two recordings of a tensor are apart, and the tolerances: how far they may be. In: tensors of
both sides, a tolerance. Out: the largest difference, with its place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proxima.core.json_record import Record

Tensors = Mapping[str, Tensor]

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


class Differences:
    """Both sides, and by how much they may differ."""

    def __init__(self, left: Tensors, right: Tensors, tolerance: Record):
        self.left, self.right, self.tolerance = left, right, tolerance
        self.numbers = float(tolerance["numbers"])

    def worst(self, stage: str, names: Sequence[str]) -> Difference:
        """The largest difference between these tensors of a stage, which are not all the same."""
        if stage == "adapters after":
            return max(self._updates(names), key=lambda each: each.excess)
        if stage == "sampled tokens" and (switched := self._switched()) is not None:
            return switched
        if stage == "minibatches":
            return self.first_minibatch(names, exact=False)
        odd = [each for each in names if not same(self.left[each], self.right[each])]
        return max(map(self._worst, odd), key=lambda each: each.excess)

    def _worst(self, name: str) -> Difference:
        if "/experts_" in name:
            return self._experts(name)
        return self._kept(name) if "/kept_" in name else self._difference(name)

    def _difference(self, name: str) -> Difference:
        left, right = self.left[name], self.right[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            return Difference(name, "", _kind(left), _kind(right), math.inf, 0.0)
        apart = _apart(left, right)
        place = int(apart.argmax() if apart.any() else (~_same_bits(left, right)).int().argmax())
        spots = torch.unravel_index(torch.tensor(place), left.shape) if left.ndim else ()
        where = f"[{', '.join(str(int(each)) for each in spots)}]"
        values = _shown(left.reshape(-1)[place]), _shown(right.reshape(-1)[place])
        return Difference(name, where, *values, float(apart.reshape(-1)[place]), self._limit(name))

    def _limit(self, name: str) -> float:
        """What a number may differ by; nothing where it is not a number but an id, a mask or a weight."""
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
        if not all("tokens/response_ids" in side for side in (self.left, self.right)):
            return None
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

    def _experts(self, name: str) -> Difference:
        """Of the experts of a mixture: the share that are others."""
        ours, theirs = self.left[name], self.right[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return self._difference(name)
        share = float((ours != theirs).float().mean())
        return Difference(name, f": {share:.3g} of the experts are others", "", "", share, self.numbers)

    def first_minibatch(self, names: Sequence[str], exact: bool) -> Difference:
        """The worst number of the first minibatch that is over its limit, or that is not exactly the same;
        else the worst of all."""
        found = [self._difference(each) for each in names if not same(self.left[each], self.right[each])]
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


def same(left: Tensor, right: Tensor) -> bool:
    """The same bits; any nan is the same as any other."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(_same_bits(left, right).all())


def _same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Number by number; 0 and -0 are equal, but not the same bits."""
    if not left.is_floating_point():
        return left == right
    return ((left == right) & (left.signbit() == right.signbit())) | (left.isnan() & right.isnan())


def _apart(left: Tensor, right: Tensor) -> Tensor:
    """How far numbers are apart; infinite where only one of them is a number."""
    apart = (left.double() - right.double()).abs()
    same = (left == right) | (left.isnan() & right.isnan())
    return torch.where(same, 0.0, apart.nan_to_num(nan=math.inf))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _shown(number: Tensor) -> str:
    return f"{float(number):.9g}" if number.is_floating_point() else str(int(number))
