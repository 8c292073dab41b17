"""What the code says of itself.

In: source files and docs as text. Out: meanings of fields, readers of settings, links.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from inspect import getsourcefile
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from proxima.cli.commands import COMMANDS
from proxima.config import FinetuningConfig, PPOConfig, RewardConfig
from proxima.config.setting_declaration import Declaration, declarations
from proxima.runs.glossary import FINETUNING, GLOSSARY

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CONFIGS: dict[str, Any] = {"ppo": PPOConfig, "finetuning": FinetuningConfig, "reward_training": RewardConfig}
HOLDERS = ("config", "settings", *CONFIGS)
WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path"}


@dataclass(frozen=True)
class Field:
    """One field of a config or a command."""

    name: str
    meaning: str
    kind: Any
    default: Any
    section: str
    declared: Declaration

    @property
    def flag(self) -> str:
        switched_off = "no-" if self.default is True else ""
        return f"--{switched_off}{self.name.replace('_', '-')}"

    @property
    def choices(self) -> tuple[Any, ...]:
        kinds = (self.kind, *get_args(self.kind))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    @property
    def type(self) -> str:
        if self.choices:
            return " or ".join(f"`{choice}`" if choice else "nothing" for choice in self.choices)
        if get_origin(self.kind) is tuple:
            return f"list of {WORDS.get(get_args(self.kind)[0], 'reward')}s"
        return next((WORDS[kind] for kind in (self.kind, *get_args(self.kind)) if kind in WORDS), "reward")

    @property
    def shown(self) -> str:
        """The default, as a table shows it."""
        if self.default is MISSING:
            return "required"
        if self.default in ("", (), None):
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, tuple):
            return f"`{' '.join(map(str, self.default))}`"
        return f"`{self.default}`"


@cache
def fields_of(kind: Any) -> dict[str, Field]:
    """By name: the text under each field, and the `# --- section ---` that it stands in."""
    meanings, sections = {}, {}
    for base in reversed([one for one in kind.__mro__ if is_dataclass(one)]):
        for name, (meaning, section) in _told(base).items():
            meanings[name], sections[name] = meaning, section
    hints, declared = get_type_hints(kind), declarations(kind)
    return {
        field.name: Field(
            field.name,
            meanings[field.name],
            hints[field.name],
            field.default,
            sections[field.name],
            declared[field.name],
        )
        for field in fields(kind)
        if field.name not in CONFIGS
    }


def _told(kind: Any) -> dict[str, tuple[str, str]]:
    """Meaning and section of the fields that a class itself declares."""
    source = Path(str(getsourcefile(kind))).read_text(encoding="utf-8")
    body = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    ).body
    found = {}
    for node, after in pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            before = re.findall(r"^    # --- (.+) ---$", "\n".join(source.split("\n")[: node.lineno]), re.M)
            meaning = " ".join(str(after.value.value).split())
            found[str(node.target.id)] = meaning, before[-1] if before else ""  # type: ignore[union-attr]
    return found


def configs_of(command: Any) -> list[str]:
    """`ppo`, `finetuning`: the configs whose settings are flags of a command."""
    return [field.name for field in fields(command) if field.name in CONFIGS]


SETTINGS = {name for kind in CONFIGS.values() for name in fields_of(kind)}


@cache
def readers() -> dict[str, list[str]]:
    """Setting -> source files that read it, outside `config/`."""
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        if path.parent.name == "config":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                holder = (
                    node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
                )
                if holder in HOLDERS and node.attr in SETTINGS:
                    found.setdefault(node.attr, set()).add(path.relative_to(ROOT).as_posix())
    return {name: sorted(paths) for name, paths in found.items()}


@cache
def guides() -> dict[str, str]:
    """Page of docs/ -> its text, generated pages left out."""
    found = sorted(path for path in DOCS.rglob("*.md") if "reference" not in path.relative_to(DOCS).parts)
    return {path.relative_to(DOCS).as_posix(): path.read_text(encoding="utf-8") for path in found}


def guides_with(pattern: str, up: str) -> list[str]:
    """Links to the guides in which a pattern occurs."""
    return [guide_link(page, up) for page, text in guides().items() if re.search(pattern, text)]


def guide_link(page: str, up: str) -> str:
    title = re.search(r"^# (.+)$", guides()[page], re.M)
    return f"[{title[1] if title else page}]({up}{page})"


def linked(text: str, up: str, but: str = "") -> str:
    """Names of settings, metrics, commands and pages as links; `up` leads from the page to docs/.

    Code in them stays code.
    """

    here = up.removesuffix("../")  # docs/reference

    def link(match: re.Match[str]) -> str:
        word = match[1]
        command = re.fullmatch(r"proxima ([a-z-]+)( [a-z]+)?", word)
        if word == but:
            return match[0]
        if word in SETTINGS:
            return f"[`{word}`]({here}settings/{word}.md)"
        if word in GLOSSARY or word in FINETUNING:
            return f"[`{word}`]({here}metrics.md#{anchor(word)})"
        if command and command[1] in COMMANDS:
            return f"[`{word}`]({here}commands/{command[1]}.md)"
        return match[0]

    paged = re.sub(r"docs/([a-z/-]+\.md)", lambda page: f"[{page[1]}]({up}{page[1]})", text)
    return re.sub(r"`([^`]+)`", link, paged)


def anchor(metric: str) -> str:
    name = "finetuning-" + metric if metric in FINETUNING and metric not in GLOSSARY else metric
    return name.replace("/*", "/name").replace("/", "-")


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [
        head,
        tuple("---" for _ in head),
        *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def listed(items: Mapping[str, list[str]]) -> str:
    """A list of `name: links`, without those that have none."""
    return "\n".join(f"- {name}: {', '.join(links)}" for name, links in items.items() if links)
