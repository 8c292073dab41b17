"""One page per command, and their index. In: the commands' classes. Out: Markdown by name.

The index runs every example in one session, in the order of the help; a command's page shows its part of it.
"""

from __future__ import annotations

import re
from itertools import chain

from proxima.cli.command import Command
from proxima.cli.commands import COMMANDS
from tools.reference.source import (
    CONFIGS,
    Field,
    configs_of,
    fields_of,
    guide_link,
    guides_with,
    linked,
    table,
)

UP = "../../"
SAMPLE = "proxima data sample my-data"
TRAIN = COMMANDS["train"].example
SECOND = TRAIN.replace("first", "second") + " --seed 1"
REWARD = COMMANDS["reward"].example
RECORDED = TRAIN.replace("first", "recorded") + " --record-steps 1"
MADE_BY = {
    **{r"my-data/": SAMPLE, r"runs/first| runs$": TRAIN, r"runs/second": SECOND, r"runs/reward": REWARD},
    r"runs/recorded": RECORDED,
}
"""What examples read, as a pattern -> the line that makes it."""


def needs(line: str) -> list[str]:
    """The lines that make what this one reads, in order."""
    direct = [maker for pattern, maker in MADE_BY.items() if re.search(pattern, line)]
    return list(dict.fromkeys([*chain.from_iterable(map(needs, direct)), *direct]))


def command_pages() -> dict[str, str]:
    return {"index": index(), **{name: page(name, kind) for name, kind in COMMANDS.items()}}


def index() -> str:
    rows = [(f"[`{name}`]({name}.md)", linked(kind.purpose(), UP)) for name, kind in COMMANDS.items()]
    slow = "\n".join(kind.example for kind in COMMANDS.values() if kind.slow)
    return "\n\n".join(
        [
            "# Commands",
            "`proxima COMMAND --help` lists a command's flags, with an example; these pages say the same, "
            "from the same code.",
            table(("command", "what it does"), rows),
            "## All of them, one after another",
            "On the model and data that come with the package, offline, in a few minutes. `--limit` keeps "
            "each short. To see "
            "something learned leave it out, and give [`train`](train.md) `--config my-data/ppo.yaml`, and "
            "[`sft`](sft.md) and "
            "[`reward`](reward.md) `--config my-data/reward.yaml`: settings that suit a model so small.",
            *_session(),
            "The others take longer, or need a script to read:",
            f"<!-- not run: {'; '.join(kind.slow for kind in COMMANDS.values() if kind.slow)} "
            f"-->\n```bash\n{slow}\n```",
            "## Exit codes",
            table(("code", "meaning"), [(f"`{code}`", meaning) for code, meaning in exit_codes("report")]),
            "[`data check`](data.md) and [`doctor`](doctor.md) also end with 1 where they found what would "
            "spoil a run. "
            "[`train`](train.md) finishes its step and writes a checkpoint before it ends with 130 (Ctrl-C) "
            "or 143 (SIGTERM). "
            "[`label`](label.md) and [`studio`](studio.md) end with 0 on Ctrl-C.",
            "## Flags that all take",
            table(
                ("flag", "meaning"),
                [
                    (
                        "`--config FILE.yaml`",
                        "Gives the command's flags new defaults: lines of `setting: value`; flags win.",
                    ),
                    ("`--debug`", "Shows the traceback of an error instead of one line."),
                    ("`--help`", "Lists the flags."),
                ],
            ),
        ]
    )


def _session() -> list[str]:
    """Every example that is quick, and before each what it needs; a server has a block of its own."""
    blocks: list[str] = []
    lines: list[str] = []
    done: set[str] = set()

    def close() -> None:
        if lines:
            blocks.append("```bash\n" + "\n".join(lines) + "\n```")
            lines.clear()

    for kind in COMMANDS.values():
        example = [*needs(kind.example), kind.example]
        wanted = [line for line in example if line not in done and not kind.slow]
        done |= set(wanted)
        if kind.serves:
            lines += wanted[:-1]
            close()
            blocks.append(f"<!-- server -->\n```bash\n{kind.example}   # Ctrl-C ends it\n```")
        else:
            lines += wanted
    close()
    return blocks


def page(name: str, kind: type[Command]) -> str:
    configs = configs_of(kind)
    why = kind.slow or "docs/reference/commands/index.md runs these lines"
    lines = "\n".join([*needs(kind.example), kind.example])
    own = [_row(field, kind.words) for field in fields_of(kind).values()]
    parts = [
        f"# `proxima {name}`",
        linked(kind.purpose(), UP),
        "## Example",
        f"<!-- not run: {why} -->\n```bash\n{lines}\n```",
        "## Flags",
        table(("flag", "default", "meaning"), own),
    ]
    for config in configs:
        count = len(fields_of(CONFIGS[config]))
        parts.append(
            f"And each of the {count} settings of `{CONFIGS[config].__name__}`: "
            "[settings](../settings/index.md)."
        )
    others = [
        link for link in guides_with(rf"proxima {name}\b(?!-)", UP) if link != guide_link(kind.guide, UP)
    ]
    parts += [
        "`--config FILE.yaml` gives every flag a new default; `--debug` shows tracebacks.",
        "## What it writes",
        linked(kind.writes, UP),
        "## Exit codes",
        "\n".join(f"- `{code}`: {meaning}" for code, meaning in exit_codes(name)),
        "## More",
        "\n".join(
            ["- " + guide_link(kind.guide, UP), *([f"- named in {', '.join(others)}"] if others else [])]
        ),
    ]
    return "\n\n".join(parts)


def exit_codes(name: str) -> list[tuple[str, str]]:
    kind = COMMANDS[name]
    defect = "something nobody expected: a defect; `--debug` shows the traceback"
    codes = {
        "0": "done",
        "1": f"{kind.fails}; or {defect}" if kind.fails else defect,
        "2": "something to correct: one line says what",
        "130": "interrupted",
    }
    if kind.serves:
        codes = {code: meaning for code, meaning in codes.items() if code not in ("0", "130")} | {
            kind.serves: "ended with Ctrl-C, or exported" if name == "label" else "ended with Ctrl-C"
        }
    if name == "train":
        codes["130"] = "Ctrl-C: the step was finished and a checkpoint written; `--resume` continues"
        codes["143"] = "SIGTERM: as Ctrl-C"
    return sorted(codes.items(), key=lambda item: int(item[0]))


def _row(field: Field, words: tuple[str, ...]) -> tuple[str, ...]:
    bare = {word.removesuffix("...") for word in words}
    flag = f"`{field.flag}`" + (" (or as a bare word)" if field.name.replace("_", "-") in bare else "")
    choices = (
        f" One of {', '.join(f'`{choice}`' for choice in field.choices if choice)}." if field.choices else ""
    )
    return flag, field.shown, linked(field.meaning, UP) + choices
