"""Options of a reward.

In: what a spec gives, and the function that takes them. Out: the same, in their types, or an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args, get_type_hints

from proxima.config import RewardSpec
from proxima.config.secrets import hide_options

PLAIN = (int, float, str, bool, NoneType)


def keyword_options(function: Callable[..., Any]) -> dict[str, Any]:
    """Name and type of every keyword-only parameter: the options of this package's own sources."""
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return typed(function, [parameter.name for parameter in keywords])


def typed(function: Callable[..., Any], names: list[str]) -> dict[str, Any]:
    """The types of these parameters; Any where nothing is said or it cannot be read."""
    try:
        target = (
            function
            if inspect.isroutine(function)
            else getattr(function, "__init__" if inspect.isclass(function) else "__call__")
        )
        hints = get_type_hints(target)
    except Exception:  # a user's annotations may name anything
        hints = {}
    return {name: hints.get(name, Any) for name in names}


def check_options(spec: RewardSpec, accepted: Mapping[str, Any], any_name: bool = False) -> dict[str, Any]:
    """The options in their types, or an error that names those the source takes."""
    spec.check_whole()
    takes = (
        f"it takes {', '.join(f'{name} ({_shown(kind)})' for name, kind in accepted.items())}"
        if accepted
        else "it takes none"
    )
    for name in spec.options:
        if name not in accepted and not any_name:
            raise ValueError(f"reward {spec.label!r} has no option {name!r}; {takes}")
    return {
        name: _checked(spec, name, value, accepted.get(name, Any), takes)
        for name, value in spec.options.items()
    }


def require_options(spec: RewardSpec, function: Callable[..., Any]) -> None:
    """Every keyword-only parameter without a default is given."""
    for name, parameter in inspect.signature(function).parameters.items():
        if (
            parameter.kind is parameter.KEYWORD_ONLY
            and parameter.default is parameter.empty
            and name not in spec.options
        ):
            raise ValueError(
                f"reward {spec.label!r} needs the option {name!r}, for example {spec.source},{name}=..."
            )


def _checked(spec: RewardSpec, name: str, value: Any, kind: Any, takes: str) -> Any:
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
        raise ValueError(
            f"option {name} ({shown!r}) of reward {spec.label!r} must be of type {_shown(kind)}; {takes}"
        )
    return float(value) if float in kinds and not isinstance(value, str) and value is not None else value


def _shown(kind: Any) -> str:
    return "any" if kind is Any else getattr(kind, "__name__", str(kind)) if not get_args(kind) else str(kind)
