"""Two recordings of a step, stage by stage. In: two bundles, or a bundle and what was recomputed of it. Out:
for each stage the same bits, within the tolerance, or different; and the first that differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from proxima.core.json_record import Record, RecordView, within
from proxima.runs import DECIDES, Bundle
from proxima.tools.replay.bundle_contents import redacted
from proxima.tools.replay.stage_differences import Difference, Differences, Tensors, same

Result = Literal["same bits", "within tolerance", "differs", "not recomputed"]
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
    if left.is_redacted != right.is_redacted:
        left, right = redacted(left), redacted(right)
    tolerance = max(left.facts["tolerance"], right.facts["tolerance"], key=lambda each: each["numbers"])
    apart = Differences(left.tensors, {**right.tensors, **(sampled or {})}, tolerance)
    expects_bits, skipped = same_machine(left, right), not_recomputed or {}
    stages = [
        Stage(name, "not recomputed", None, skipped[name])
        if name in skipped
        else _stage(name, apart, expects_bits)
        for name in STAGES
    ]
    settings, environment = (_rows(flat(left.facts), flat(right.facts)) for flat in (_settings, _environment))
    return Comparison(stages, tolerance, expects_bits, settings, environment)


def _stage(name: str, apart: Differences, expects_bits: bool) -> Stage:
    left = apart.left
    right = apart.right
    names = _names(name, apart)
    if not names:
        return Stage(name, "not recomputed", None, "not recorded")
    if odd := [each for each in names if (each in left) != (each in right)]:
        only = f" is only on the {'left' if odd[0] in left else 'right'}"
        return Stage(name, "differs", Difference(odd[0], only, "", "", math.inf, 0.0))
    if all(same(left[each], right[each]) for each in names):
        return Stage(name, "same bits")
    worst = apart.worst(name, names)
    result: Result = "within tolerance" if worst.size <= worst.limit else "differs"
    if name == "minibatches" and expects_bits:
        worst = apart.first_minibatch(names, exact=True)
    return Stage(name, result, worst)


def _names(stage: str, apart: Differences) -> list[str]:
    """The tensors of a stage that either side has."""
    groups = STAGES[stage]
    leave = STAGES["prompt tokens"] if stage == "sampled tokens" else ()
    inside = tuple(f"{group}/" for group in groups)
    found = {*apart.left, *apart.right}
    return sorted(each for each in found - {*leave} if each in groups or each.startswith(inside))


def same_machine(left: Bundle, right: Bundle) -> bool:
    """Whether the same bits are expected: code, versions, processor, threads and device are known to be the
    same."""
    first, second = left.facts["environment"], right.facts["environment"]
    kinds = [left.facts[name] == right.facts[name] for name in ("device", "dtype", "proxima")]
    return (
        all(kinds)
        and "code" in first  # else it is from before it was recorded
        and all(first.get(name) == second.get(name) for name in DECIDES)
    )


def _environment(facts: Record) -> Record:
    found = facts["environment"]
    return {
        **{name: value for name, value in found.items() if name != "packages"},
        **within(found, "packages"),
    }


def _settings(facts: Record) -> Record:
    """Settings, and what the step began with; not what judges began with, which no step asks."""
    state = {**facts["state"], "endings": within(facts["state"], "endings").get("rewards", {})}
    return {**facts["settings"], **{f"state {name}": value for name, value in state.items()}}


def _rows(left: RecordView, right: RecordView) -> list[tuple[str, str, str]]:
    names = sorted({*left, *right})
    return [
        (name, str(left.get(name, "-")), str(right.get(name, "-")))
        for name in names
        if left.get(name) != right.get(name)
    ]
