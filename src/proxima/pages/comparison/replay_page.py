"""The page of a recorded step, alone or beside another. In: bundles and their comparison. Out: one HTML file
with the stages, every token under the microscope, and what the bundles hold."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from proxima.config import shareable
from proxima.core.json_record import Record
from proxima.pages.report import Page, cut, folded, heading, paragraph, table
from proxima.runs import Bundle, is_defined, number, with_unit
from proxima.tools.replay import Comparison, contents, note

BYTES = 1_500_000  # of the samples of one side
DIGITS = 7
SCORED = {"logprob": "logprob_policy", "logprob_ref": "logprob_ref"}
TRAINED = {
    "kl": "token_rewards/kl",
    "reward": "token_rewards/reward",
    "value": "values/value",
    "td_error": "advantages/td_error",
    "advantage": "whitened/advantage",
    "return": "advantages/return",
}
"""The microscope's columns, and the tensors that hold them."""


def write_replay_page(
    path: Path,
    sides: Sequence[tuple[str, Bundle]],
    comparison: Comparison | None = None,
) -> Path:
    """
    Args:
        sides: one bundle or two, each with its name.
        comparison: of the two.
    """
    steps = list(dict.fromkeys(bundle.step for _, bundle in sides))
    named = f"step{'s' if len(steps) > 1 else ''} {' and '.join(map(str, steps))}"
    page = Page(named, "replay")
    told = comparison.sentence if comparison else "not recomputed: the step as it was recorded"
    page.section("", heading(named.capitalize()), paragraph(_plain(f"{told[0].upper()}{told[1:]}.")))
    if comparison is not None:
        rows = [(stage.name, _plain(note(stage)), stage.result) for stage in comparison.stages]
        expected = (
            "Both come from the same kind of machine, versions and code, so the same bits are expected."
            if comparison.expects_bits
            else "They come from different machines, versions or code, so small differences are expected."
        )
        head = ("stage", "largest difference, or why it was not recomputed", "result")
        page.section("Stages", paragraph(expected, "soft"), table(head, rows, right=2))
    scope = [
        {"label": name, "step": place, "samples": samples(bundle)}
        for place, (name, bundle) in enumerate(sides)
    ]
    page.section(
        "Tokens", paragraph("Every token of the step with its numbers.", "soft"), page.microscope(scope)
    )
    page.section("Metrics", table(("metric", *(name for name, _ in sides)), _metrics([b for _, b in sides])))
    for title, differing in _differing(comparison):
        page.section(title, table(("name", *(name for name, _ in sides)), differing, right=3))
    inside = [folded(name, "".join(map(paragraph, contents(bundle)))) for name, bundle in sides]
    page.section("What the recordings hold", *inside)
    return page.write(path)


def _plain(text: str) -> str:
    """Without keys, and without the marks that would set a text as code."""
    return shareable(text).replace("`", "'")


def _differing(comparison: Comparison | None) -> list[tuple[str, list[tuple[str, ...]]]]:
    if comparison is None:
        return []
    both = (
        ("Settings that differ", comparison.settings),
        ("Versions and hardware that differ", comparison.environment),
    )
    return [(title, [tuple(map(shareable, row)) for row in rows]) for title, rows in both if rows]


def _metrics(bundles: Sequence[Bundle]) -> list[tuple[str, ...]]:
    """Every metric that all sides know, with the numbers of each."""
    names = [name for name in bundles[0].facts["metrics"] if isinstance(name, str) and is_defined(name)]
    rows = []
    for name in names:
        values = [number(bundle.facts["metrics"].get(name), None) for bundle in bundles]
        if not name.startswith("seconds") and None not in values:
            rows.append((with_unit(name), *(f"{value:.{DIGITS}g}" for value in values)))
    return rows


def samples(bundle: Bundle) -> list[Record]:
    """Sequences as the microscope shows them, as many as `BYTES` hold; without texts where they are
    redacted."""
    trained = {row: place for place, row in enumerate(bundle.tensors["rows"].tolist())}
    read = bundle.tensors["tokens/mask"] | bundle.tensors.get("tokens/observed", torch.tensor(False))
    found: list[Record] = []
    size = 0
    for row in range(len(read)):
        sample = cut(_sample(bundle, row, trained.get(row), read[row]))
        size += len(json.dumps(sample))
        if found and size > BYTES:
            break
        found.append(sample)
    return found


def _sample(bundle: Bundle, row: int, place: int | None, read: Tensor) -> Record:
    facts, count = bundle.facts, int(read.sum())
    columns = {
        name: _numbers(bundle.tensors.get(f"scoring/{own}"), row, read) for name, own in SCORED.items()
    } | {name: _numbers(bundle.tensors.get(own), place, read) for name, own in TRAINED.items()}
    rewards = bundle.tensors["rewards/by_name"][:, row].tolist()
    ids = bundle.tensors.get("tokens/response_ids")
    prompt = {"text": "(redacted)"} if bundle.is_redacted else facts["prompts"][row]
    tokens = ["▯"] * count if bundle.is_redacted else [str(each) for each in facts["tokens"][row]]
    return {
        "kind": "left out" if place is None else "trained",
        "prompt": prompt["text"],
        "turns": prompt.get("turns"),
        "tokens": tokens,
        "observed": _observed(bundle, row, read),
        "ids": None if ids is None else ids[row][read].tolist(),
        "reward": _finite(
            float(sum(rewards)) if len(rewards) == 1 else float(bundle.tensors["rewards/sequence"][row])
        ),
        "rewards": {
            str(name): _finite(each) for name, each in zip(facts["reward_names"], rewards, strict=True)
        },
        "ended": bool(bundle.tensors["tokens/ended"][row]),
        "columns": {name: values for name, values in columns.items() if values},
    }


def _observed(bundle: Bundle, row: int, read: Tensor) -> list[int]:
    """Places of the tokens that an environment or tools wrote."""
    observed = bundle.tensors.get("tokens/observed")
    return [] if observed is None else observed[row][read].nonzero().flatten().tolist()


def _numbers(column: Tensor | None, row: int | None, read: Tensor) -> list[float | None]:
    """A sequence's numbers; none where it has none."""
    if column is None or row is None:
        return []
    own = torch.zeros(len(read), dtype=torch.float64)
    own[: column.shape[1]] = column[row][: len(read)].double()
    return [_finite(each) for each in own[read].tolist()]


def _finite(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
