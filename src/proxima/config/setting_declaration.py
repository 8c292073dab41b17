"""`setting`: the one declaration of a setting. Its field has the type, the docstring below it the meaning.

    kl_coef: float = setting(0.1, at_least=0)
    \"\"\"Weight of the per-token KL penalty in the reward.\"\"\"

Range checks, flags and their help, reference pages, what a resumed run may change, which runs count as seeds
of one experiment, and former names all follow from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")
KEY = "proxima.setting"


@dataclass(frozen=True)
class Range:
    """The numbers that a setting takes; a round bracket leaves its end out."""

    low: float
    high: float
    brackets: str
    or_off: bool = False
    """Takes 0 too, which turns it off."""

    def __contains__(self, value: float) -> bool:
        if self.or_off and value == 0:
            return True
        above = value >= self.low if self.brackets[0] == "[" else value > self.low
        below = value <= self.high if self.brackets[1] == "]" else value < self.high
        return above and below  # nan is neither

    def __str__(self) -> str:
        """As an error shows it."""
        if self.or_off:
            return self.in_words.replace(",", "", 1)
        return f"in {self.brackets[0]}{self.low}, {self.high}{self.brackets[1]}"

    @property
    def in_words(self) -> str:
        """As a page shows it."""
        parts = ["0 (off)"] if self.or_off else []
        if self.low > -math.inf:
            least = f"{self.low:,g} or more" if self.brackets[0] == "[" else f"above {self.low:,g}"
            parts.append(f"or {least}" if self.or_off else least)
        if self.high < math.inf:
            parts.append(f"{'at most' if self.brackets[1] == ']' else 'below'} {self.high:,.10g}")
        return ", ".join(parts) or "any finite number"


@dataclass(frozen=True)
class Declaration:
    """What a setting says of itself besides its type, default and meaning."""

    range: Range | None = None
    """None for what is not a number."""
    not_empty: bool = False
    check: Callable[..., None] | None = None
    """Takes name and value, and raises a ValueError that says what is wrong; for what a range cannot say."""
    values: str = ""
    """What `check` and the rules between settings allow, in words, for the reference page."""
    changes_results: bool = True
    """Whether a training step computes something else with it, rounding aside.

    False for where, how fast, how carefully and until when a run trains: a resumed run may change it.
    """
    defines_experiment: bool = True
    """Whether runs that differ in it are different experiments.

    False for the seed, for where a run trains and lies, and for what it writes down.
    """
    formerly: str = ""
    """The name it had in the release before, which is still taken, with a warning."""


def setting(
    default: Value,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    or_off: bool = False,
    not_empty: bool = False,
    check: Callable[[str, Value], None] | None = None,
    values: str = "",
    changes_results: bool = True,
    defines_experiment: bool = True,
    formerly: str = "",
) -> Value:
    """A dataclass field with its declaration; `Declaration` and `Range` say what the arguments mean.

    A number declares the ends of its range; `above=-math.inf` says that it has none.
    """
    declaration = Declaration(
        range=_range(at_least, above, at_most, below, or_off),
        not_empty=not_empty,
        check=check,
        values=values,
        changes_results=changes_results,
        defines_experiment=defines_experiment,
        formerly=formerly,
    )
    made: Value = dataclasses.field(default=default, metadata={KEY: declaration})
    return made


def _range(
    at_least: float | None, above: float | None, at_most: float | None, below: float | None, or_off: bool
) -> Range | None:
    if at_least is above is at_most is below is None:
        return None
    low = -math.inf if above is None else above
    high = math.inf if below is None else below
    left = ("(", low) if at_least is None else ("[", at_least)
    right = (")", high) if at_most is None else ("]", at_most)
    return Range(left[1], right[1], left[0] + right[0], or_off)


def declarations(kind: type) -> dict[str, Declaration]:
    """Every field's declaration by name; an empty one for a field that has none."""
    return {field.name: field.metadata.get(KEY, Declaration()) for field in dataclasses.fields(kind)}


def former_names(kind: type) -> dict[str, str]:
    """Former name -> name."""
    return {each.formerly: name for name, each in declarations(kind).items() if each.formerly}
