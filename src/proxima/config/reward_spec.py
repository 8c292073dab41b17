"""`RewardSpec`: one reward, its weight and its name. In: text, mapping or function. Out: a checked record."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RewardSpec:
    """One reward. As text: `SOURCE` or `WEIGHT*SOURCE`, for example `0.5*my_rewards:brevity`."""

    source: str | Callable[..., Any]
    """`module:function`; a folder or Hub id of a reward model; in Python also the function itself."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    name: str = ""
    """Name in the metrics; by default the function's or the folder's own."""

    def __post_init__(self) -> None:
        if not (callable(self.source) or (isinstance(self.source, str) and self.source.strip())):
            raise ValueError(f"a reward needs a source: module:function, a folder or a Hub id; got {self.source!r}")
        if not isinstance(self.weight, (int, float)) or not math.isfinite(self.weight):
            raise ValueError(f"the weight of reward {self.label!r} must be a finite number, got {self.weight!r}")

    @property
    def label(self) -> str:
        source = self.source if isinstance(self.source, str) else getattr(self.source, "__name__", "reward")
        return self.name or source.rstrip("/").split("/")[-1].split(":")[-1]

    @property
    def is_function(self) -> bool:
        """True for a Python function or a `module:function` text, False for a model's folder or Hub id."""
        return not isinstance(self.source, str) or (":" in self.source and not Path(self.source).exists())

    @classmethod
    def of(cls, value: Any) -> RewardSpec:
        """From a spec, a text, a mapping with `source`, or a function."""
        if isinstance(value, RewardSpec):
            return value
        if isinstance(value, Mapping):
            unknown = set(value) - {"source", "weight", "name"}
            if unknown or "source" not in value:
                raise ValueError(f"a reward has the keys source, weight and name; got {sorted(value)}")
            return cls(**value)
        if isinstance(value, str) and "*" in value:
            weight, source = value.split("*", 1)
            try:
                return cls(source.strip(), float(weight))
            except ValueError as error:
                raise ValueError(f"reward {value!r} is not SOURCE or WEIGHT*SOURCE: {error}") from None
        return cls(value)

    def to_dict(self) -> dict[str, Any]:
        source = self.source
        if not isinstance(source, str):
            source = f"{getattr(source, '__module__', '?')}:{getattr(source, '__qualname__', repr(source))}"
        return {"source": source, "weight": self.weight, "name": self.label}
