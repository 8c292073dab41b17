"""Records that training reads, one class for each kind; `Prompt` is in `proxima.core.types`."""

from __future__ import annotations

from dataclasses import dataclass

from proxima.core.types import Prompt


@dataclass(frozen=True)
class Demonstration:
    """How a prompt should be answered."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Preference:
    """Which of two answers is better; `*_ended` false for an answer that was cut off.

    `margin`: by how much the chosen answer's score should be higher at least. `tie`: neither is better.
    """

    prompt: str
    chosen: str
    rejected: str
    chosen_ended: bool = True
    rejected_ended: bool = True
    margin: float = 0.0
    tie: bool = False


@dataclass(frozen=True)
class Rating:
    """How good an answer is: any number, more is better; `ended` false for one that was cut off."""

    prompt: str
    completion: str
    rating: float
    ended: bool = True


AnyRecord = Prompt | Demonstration | Preference | Rating
