"""`RewardSpec`: one reward, its weight, name and options.

In: text, mapping or function. Out: a checked record.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from proxima.config.secrets import HIDDEN, OPTION, hide_address, hide_options, shareable
from proxima.core.json_record import Record

LARGEST = sys.float_info.max
GYM_PREFIX = "reasoning_gym:"  # a verifiable reward by name, no function to import
KEYS = ("source", "weight", "name", "options")


@dataclass(frozen=True)
class RewardSpec:
    """One reward.

    As text: `[WEIGHT*]SOURCE[,KEY=VALUE...]`, such as `0.5*my_rewards:brevity` or `length_band,low=5,high=9`.
    """

    source: str | Callable[..., object]
    """A ready-made reward's name, `module:function`, a URL, a model's folder or Hub id; in Python also the
    function itself."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    name: str = ""
    """Name in the metrics; by default the function's, the folder's or the URL's own."""
    options: Record = field(default_factory=dict, hash=False)
    """Settings of the source by name; `proxima.rewards` checks them."""

    def __post_init__(self) -> None:
        if not (callable(self.source) or (isinstance(self.source, str) and self.source.strip())):
            raise ValueError(
                f"a reward needs a source: module:function, a URL, a folder or a Hub id; got {self.source!r}"
            )
        if not isinstance(self.name, str):
            raise ValueError(f"the name of a reward must be a text, got {self.name!r}")
        if not isinstance(self.weight, (int, float)) or not abs(self.weight) <= LARGEST:
            raise ValueError(
                f"the weight of reward {self.label!r} must be a finite number, got {self.weight!r}"
            )
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise ValueError(
                f"the options of reward {self.label!r} must be `name: value`, got a "
                f"{type(self.options).__name__}"
            )
        object.__setattr__(self, "options", dict(self.options))

    def check_whole(self) -> None:
        """A key that was hidden when a run wrote its settings down must be given again."""
        hidden = [name for name, value in self.options.items() if value == HIDDEN]
        if self.is_http and HIDDEN in str(self.source):
            hidden.append("the address")
        if hidden:
            raise ValueError(
                f"reward {self.label!r}: {hidden[0]} holds {HIDDEN}, for a key is not written down; give "
                "the reward again with "
                "--rewards or --judges, and its key in an environment variable where it can be (token_env)"
            )

    @property
    def label(self) -> str:
        if self.name:
            return self.name
        if self.is_chat:
            return "judge"
        if self.is_http:
            parts = urlsplit(str(self.source))
            return parts.path.rstrip("/").split("/")[-1] or parts.hostname or "http"
        source = self.source if isinstance(self.source, str) else getattr(self.source, "__name__", "reward")
        return source.rstrip("/").split("/")[-1].split(":")[-1]

    @property
    def is_http(self) -> bool:
        return isinstance(self.source, str) and self.source.lower().startswith(("http://", "https://"))

    @property
    def is_chat(self) -> bool:
        """A language model as a judge, behind an OpenAI-compatible chat endpoint."""
        return self.is_http and urlsplit(str(self.source)).path.rstrip("/").endswith("/chat/completions")

    @property
    def is_function(self) -> bool:
        """True for a Python function or a `module:function` text."""
        if not isinstance(self.source, str):
            return True
        if self.is_http or self.source.startswith(GYM_PREFIX):
            return False
        return ":" in self.source and not Path(self.source).exists()

    @property
    def runs_code(self) -> bool:
        """Whether code that somebody else chose may run: a function, or the policy's own programs."""
        return self.is_function or self.source == "code"

    @classmethod
    def of(cls, value: object) -> RewardSpec:
        """From a spec, a text, a mapping with `source`, or a function."""
        if isinstance(value, RewardSpec):
            return value
        if isinstance(value, Mapping):
            if set(value) - set(KEYS) or "source" not in value:
                raise ValueError(f"a reward has the keys {', '.join(KEYS)}; got {sorted(map(str, value))}")
            return cls(**value)
        return _from_text(value) if isinstance(value, str) else cls(value)  # type: ignore[arg-type]

    def to_dict(self) -> Record:
        """As it is written down: without keys, of which `***` is left."""
        source = self.source
        if not isinstance(source, str):
            source = f"{getattr(source, '__module__', '?')}:{getattr(source, '__qualname__', repr(source))}"
        plain = {
            "source": hide_address(source) if self.is_http else source,
            "weight": self.weight,
            "name": self.label,
        }
        return {**plain, "options": hide_options(self.options)} if self.options else plain

    def to_text(self) -> str:
        """As the command line takes it, without keys."""
        plain = self.to_dict()
        options = {"name": plain["name"], **plain.get("options", {})}
        return f"{self.weight!r}*{plain['source']}" + "".join(
            f",{key}={_shown(value)}" for key, value in options.items()
        )

    def __repr__(self) -> str:
        return f"RewardSpec({self.to_text()!r})"


def _from_text(text: str) -> RewardSpec:
    """`[WEIGHT*]SOURCE[,KEY=VALUE...]`; a comma separates only before `key=`, so that sources may hold
    commas."""
    source, *pairs = re.split(OPTION, text)
    options = {key: _scalar(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    name = "" if options.get("name") is None else str(options["name"])
    options.pop("name", None)
    weight = "1"
    if "*" in source.partition("://")[0]:  # the query of an address may hold a star too
        weight, source = source.split("*", 1)
    try:
        return RewardSpec(source.strip(), float(weight), name, options)
    except ValueError as error:
        raise ValueError(
            f"reward {shareable(text)!r} is not [WEIGHT*]SOURCE[,KEY=VALUE...]: {error}"
        ) from None


PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null")}


def _scalar(text: str) -> object:
    """One YAML scalar: a number, true, false, null; all else is text, and quotes make text of anything."""
    import yaml

    try:
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            return str(yaml.safe_load(text))
        loader = yaml.SafeLoader("")
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        return loader.construct_object(yaml.ScalarNode(tag, text)) if tag in PLAIN_TAGS else text
    except (ValueError, yaml.YAMLError):
        raise ValueError(f"{text!r} is not a value; put text in quotes, '' for one quote in it") from None


def _shown(value: object) -> str:
    """A value as `_scalar` reads it back."""
    import yaml

    if isinstance(value, str):
        return value if _scalar(value) == value else "'" + value.replace("'", "''") + "'"
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
