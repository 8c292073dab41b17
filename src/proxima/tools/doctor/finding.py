"""`Finding`: what one check found; `ok`, `warn` and `fail` make one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    level: Literal["ok", "warn", "fail"]
    """`fail` would spoil the run, `warn` might, `ok` is sound."""
    name: str
    text: str
    advice: str = ""
    """What to do about it."""

    @property
    def sentence(self) -> str:
        return f"{self.name}: {self.text}" + (f"; {self.advice}" if self.advice else "")


def ok(name: str, text: str) -> Finding:
    return Finding("ok", name, text)


def warn(name: str, text: str, advice: str) -> Finding:
    return Finding("warn", name, text, advice)


def fail(name: str, text: str, advice: str) -> Finding:
    return Finding("fail", name, text, advice)
