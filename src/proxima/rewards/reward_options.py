"""Options of a reward: checks what a spec gives against the types that the source takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeAlias, get_args, get_type_hints

from proxima.config import RewardSpec, hide_options

PLAIN = (int, float, str, bool, NoneType)

OptionType: TypeAlias = Any
"""An annotation as `get_type_hints` returns it; `typing.Any` where a parameter has none."""
Options: TypeAlias = dict[str, Any]
"""Values by name, as YAML or the command line gives them."""


def keyword_options(function: Callable[..., object]) -> dict[str, OptionType]:
    """Name and type of every keyword-only parameter: these are the options of this package's own sources."""
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return typed(function, [parameter.name for parameter in keywords])


def typed(function: Callable[..., object], names: list[str]) -> dict[str, OptionType]:
    """The types of these parameters; Any where there is no annotation or it cannot be read."""
    try:
        target: object = function
        if not inspect.isroutine(function):
            target = getattr(function, "__init__" if inspect.isclass(function) else "__call__")
        hints = get_type_hints(target)
    except Exception:  # a user's annotations may name anything
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def check_options(
    spec: RewardSpec, accepted: Mapping[str, OptionType], any_name: bool = False, what: str = "reward"
) -> Options:
    """The options, converted to their types; raises a ValueError that lists those the source takes."""
    spec.check_whole()
    whose = f"{what} {spec.label!r}"
    listed = ", ".join(f"{name} ({_type_name(kind)})" for name, kind in accepted.items())
    takes = f"it takes {listed or 'none'}"
    for name in spec.options:
        if name not in accepted and not any_name:
            raise ValueError(f"{whose} has no option {name!r}; {takes}")
    return {
        name: _checked(whose, name, value, accepted.get(name, Any), takes)
        for name, value in spec.options.items()
    }


def require_options(spec: RewardSpec, function: Callable[..., object]) -> None:
    """Raise a ValueError where a keyword-only parameter without a default is not given."""
    for name, parameter in inspect.signature(function).parameters.items():
        if (
            parameter.kind is parameter.KEYWORD_ONLY
            and parameter.default is parameter.empty
            and name not in spec.options
        ):
            raise ValueError(
                f"reward {spec.label!r} needs the option {name!r}, for example {spec.source},{name}=..."
            )


def check_limits(what: str, timeout: float, **counts: tuple[int, int]) -> None:
    """Refuse a time-out that is not a positive number of seconds, and counts below what they must be.

    Args:
        what: whose options they are, for the message.
        counts: each option's value and its least one.
    """
    for name, (value, low) in counts.items():
        if value < low:
            raise ValueError(f"option {name} ({value}) of {what} must be at least {low}")
    if not 0 < timeout < math.inf:
        raise ValueError(f"option timeout ({timeout}) of {what} must be a positive number of seconds")


def _checked(whose: str, name: str, value: object, kind: OptionType, takes: str) -> object:
    kinds = get_args(kind) or (kind,)
    if not all(item in PLAIN for item in kinds):
        return value
    if float in kinds and isinstance(value, str):  # YAML reads 1e-5 as text
        try:
            return float(value)
        except ValueError:
            pass
    accepted = (*kinds, int) if float in kinds else kinds
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in kinds):
        shown = hide_options({name: value})[name]
        raise ValueError(f"option {name} ({shown!r}) of {whose} must be of type {_type_name(kind)}; {takes}")
    return float(value) if float in kinds and isinstance(value, (int, float)) else value


def _type_name(kind: OptionType) -> str:
    if kind is Any:
        return "any"
    return str(kind) if get_args(kind) else getattr(kind, "__name__", str(kind))
