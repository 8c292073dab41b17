"""What all settings share: the YAML reader, types and ranges checked when made, former names still taken."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from proxima.config.reward_spec import RewardSpec
from proxima.config.setting_declaration import Declaration, declarations, former_names
from proxima.core.json_record import Record
from proxima.core.regular_files import read_given

LARGEST_FILE = 2**18  # bytes; some numbers of YAML take time that grows with the square of their length
Values = Record  # by name, as YAML and JSON hold them
Class = TypeVar("Class", bound="type[Settings]")


@dataclass_transform()
def settings_class(kind: Class) -> Class:
    """A dataclass of fields made by `setting`, which takes their former names as arguments too."""
    dataclass(kind)
    plain_init = kind.__init__

    @functools.wraps(plain_init)
    def init(self: Settings, *values: object, **named: object) -> None:
        plain_init(self, *values, **current_names(kind, named, DeprecationWarning))

    kind.__init__ = init  # type: ignore[method-assign, assignment]
    return kind


def current_names(kind: type, values: Mapping[str, object], warning: type[Warning] | None = None) -> Values:
    """Values by the settings' present names, with a warning for each former name where one is given.

    Where both names are given the former one wins: `dataclasses.replace(config, former=...)` gives both.
    """
    former = former_names(kind)
    found = {name: value for name, value in values.items() if name not in former}
    for name in values.keys() & former.keys():
        if warning is not None:
            warn_renamed(name, former[name], warning, 3)
        found[former[name]] = values[name]
    return found


def warn_renamed(old: str, new: str, warning: type[Warning], stacklevel: int) -> None:
    text = f"the setting {old} is now {new}; the old name will be removed in the next release"
    warnings.warn(text, warning, stacklevel + 1)


@dataclass
class Settings:
    """Base of every class of settings."""

    def __post_init__(self) -> None:
        """Every field in its type and range, or an error with name, value and range."""
        hints, declared = get_type_hints(type(self)), declarations(type(self))
        for name in declared:
            setattr(self, name, checked(name, getattr(self, name), hints[name], declared[name]))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            former = former_names(type(self))
            if name not in former:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warn_renamed(name, former[name], DeprecationWarning, 2)
            return getattr(self, former[name])

    def to_dict(self) -> Values:
        """Plain values, as YAML and JSON hold them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = [item.to_dict() if isinstance(item, RewardSpec) else item for item in value]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        known = {field.name for field in dataclasses.fields(cls)}
        values = current_names(cls, values, FutureWarning)
        if unknown := sorted(set(values) - known):
            near = get_close_matches(unknown[0], known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown setting {unknown[0]!r}{hint}")
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Settings from a YAML file; what it leaves out keeps its default."""
        return cls.from_dict(read_yaml(path))

    def to_yaml(self, path: str | Path) -> None:
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")


def read_yaml(path: str | Path) -> Values:
    """A YAML file of `setting: value` lines.

    Aliases are refused: a few lines of them can stand for more than memory holds.
    """
    import yaml

    class WithoutAliases(yaml.SafeLoader):
        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("it holds an alias (*name); write the value out")
            return super().compose_node(parent, index)

    try:
        content = read_given(path, LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise ValueError(f"it has more than {LARGEST_FILE:,} bytes: that is not a file of settings")
        values = WithoutAliases(content.decode()).get_single_data()
    except RecursionError:
        raise ValueError(f"cannot read the settings in {path}: it is nested too deeply") from None
    except LookupError:
        raise ValueError(f"cannot read the settings in {path}: a value is not what its !!tag says") from None
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        yaml.YAMLError,
    ) as error:  # PyYAML raises them all
        raise ValueError(f"cannot read the settings in {path}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{path} must hold `setting: value` lines, got {type(values).__name__}")
    return values


NOTHING_DECLARED = Declaration()


def checked(name: str, value: object, kind: Any, declared: Declaration = NOTHING_DECLARED) -> Any:
    """The value in its field's type and range, or an error with name, value and range."""
    found = _in_type(name, value, kind)
    check_value(name, found, declared)
    return float(found) if kind is float else found


def check_value(name: str, value: Any, declared: Declaration) -> None:
    """Nothing, or an error with name, value and range where a value is not as declared."""
    if declared.range is not None and value not in declared.range:
        raise ValueError(f"{name} ({value}) must be {declared.range}")
    if declared.not_empty and not value:
        raise ValueError(f"{name} must not be empty")
    if declared.check is not None:
        declared.check(name, value)


def _in_type(name: str, value: object, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        return _checked_list(name, value, get_args(kind)[0])
    if choices := get_args(kind):
        if value not in choices:
            raise ValueError(f"{name} ({value!r}) must be one of {', '.join(map(str, choices))}")
        return value
    if kind is float and isinstance(value, str):  # YAML reads 1e-5 as text
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{name} ({value!r}) must be a number") from None
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} ({value!r}) must be of type {kind.__name__}")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} is an integer of more than 64 bits")
    return value


def _checked_list(name: str, value: object, kind: object) -> tuple[str | RewardSpec, ...]:
    """One item or a list of them: rewards, or texts."""
    single = isinstance(value, (str, RewardSpec, Mapping)) or callable(value)
    items = [value] if single else value
    if not isinstance(items, (list, tuple)):
        raise ValueError(f"{name} ({value!r}) must be a list")
    if kind is RewardSpec:
        return tuple(RewardSpec.of(item) for item in items)
    if strange := [item for item in items if not isinstance(item, str)]:
        raise ValueError(f"{name} ({strange[0]!r}) must be a text")
    return tuple(items)
