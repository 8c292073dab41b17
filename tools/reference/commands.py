"""One page a command, and their index. In: the commands' dataclasses, and the notes below. Out: Markdown by
name.

The index runs every example in one session, in the order of the help; a command's page shows its part of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from proxima.cli.command_line import GENERAL
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
RUN = "`runs/NAME`"


@dataclass(frozen=True)
class Notes:
    """What the code of a command does not say by itself."""

    writes: str
    guide: str
    needs: tuple[str, ...] = (SAMPLE,)
    """Lines that make what the example reads."""
    fails: str = ""
    """What exit code 1 means where it is no defect."""
    serves: str = ""
    """For a server, its exit code after Ctrl-C."""
    slow: str = ""
    """Why the index does not run it."""


NOTES = {
    "demo": Notes(
        "`runs/demo`: the reward model, the run, `results.json` and `report.html`, a page that tells all of "
        "it.",
        "embedded.md",
        (),
        slow="the demo takes minutes, tests/world/test_demo.py runs it",
    ),
    "data": Notes(
        "`check` writes nothing. `sample` writes the folder it is given.",
        "data.md",
        fails="the data cannot be used",
    ),
    "sft": Notes(
        f"{RUN}: the adapter (with `lora_r` 0 the model), the tokenizer, `finetuning.yaml` with the "
        "settings, `sft.json` with the best measurement. Later commands take it: `--sft-adapter runs/NAME`.",
        "data.md",
    ),
    "label": Notes(
        "`feedback.db` (`--db`); with `--export` a .jsonl file for [`reward`](reward.md).",
        "label.md",
        serves="0",
    ),
    "reward": Notes(
        f"{RUN}: the adapter (with `lora_r` 0 the model), its head, the tokenizer, `finetuning.yaml` with "
        "the settings, `reward.json` with the held-out accuracy. Later commands: `--rewards runs/NAME`.",
        "rewards.md",
    ),
    "train": Notes(
        f"{RUN}: settings, metrics, samples, checkpoints, the trained `policy/` and `value/`, "
        "`results.json` and "
        "`report.html`; [all files](../../resume.md#what-is-in-runsname).",
        "resume.md",
    ),
    "doctor": Notes("Nothing.", "doctor.md", fails="something would spoil the run"),
    "eval": Notes("`evaluation.json` in the run's folder.", "evaluate.md", (SAMPLE, TRAIN)),
    "report": Notes("`report.html` in the run's folder, or `--output`.", "report.md", (SAMPLE, TRAIN)),
    "compare": Notes("`compare.html`, or `--out`.", "evaluate.md", (SAMPLE, TRAIN, SECOND)),
    "generate": Notes("Nothing; it prints prompts and responses.", "data.md"),
    "export": Notes(
        "The new folder: an adapter or a model, the tokenizer, and a model card in its README.md; with "
        "`--gguf` one file instead.",
        "evaluate.md",
        (SAMPLE, TRAIN),
    ),
    "serve-reward": Notes("Nothing.", "rewards.md", (SAMPLE, REWARD), serves="130"),
    "studio": Notes("Nothing in the runs' folders.", "studio.md", (SAMPLE, TRAIN), serves="0"),
    "bench": Notes(
        "`bench.json`, or `--output`.",
        "performance.md",
        (),
        slow="the bench takes minutes, tests/tools/test_bench.py runs it",
    ),
    "scaling": Notes("Nothing; it prints a table.", "scaling.md", ()),
    "migrate": Notes(
        "The settings file, with `--out`.",
        "migrate.md",
        (),
        slow="it reads an old script, docs/migrate.md has one and runs it",
    ),
}


def command_pages() -> dict[str, str]:
    return {"index": index(), **{name: page(name, kind) for name, kind in COMMANDS.items()}}


def index() -> str:
    rows = [(f"[`{name}`]({name}.md)", linked(_one_line(kind), UP)) for name, kind in COMMANDS.items()]
    slow = "\n".join(kind.example for name, kind in COMMANDS.items() if NOTES[name].slow)
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
            f"<!-- not run: {'; '.join(notes.slow for notes in NOTES.values() if notes.slow)} "
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

    for name, kind in COMMANDS.items():
        notes = NOTES[name]
        wanted = [line for line in (*notes.needs, kind.example) if line not in done and not notes.slow]
        done |= set(wanted)
        if notes.serves:
            lines += wanted[:-1]
            close()
            blocks.append(f"<!-- server -->\n```bash\n{kind.example}   # Ctrl-C ends it\n```")
        else:
            lines += wanted
    close()
    return blocks


def page(name: str, kind: Any) -> str:
    notes, configs = NOTES[name], configs_of(kind)
    why = notes.slow or "docs/reference/commands/index.md runs these lines"
    lines = "\n".join((*notes.needs, kind.example))
    own = [_row(field, getattr(kind, "words", ())) for field in fields_of(kind).values()]
    parts = [
        f"# `proxima {name}`",
        linked(_one_line(kind), UP),
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
        link for link in guides_with(rf"proxima {name}\b(?!-)", UP) if link != guide_link(notes.guide, UP)
    ]
    parts += [
        f"`{GENERAL.split(' ')[0]} FILE.yaml` gives every flag a new default; `--debug` shows tracebacks.",
        "## What it writes",
        linked(notes.writes, UP),
        "## Exit codes",
        "\n".join(f"- `{code}`: {meaning}" for code, meaning in exit_codes(name)),
        "## More",
        "\n".join(
            ["- " + guide_link(notes.guide, UP), *([f"- named in {', '.join(others)}"] if others else [])]
        ),
    ]
    return "\n\n".join(parts)


def exit_codes(name: str) -> list[tuple[str, str]]:
    notes = NOTES[name]
    defect = "something nobody expected: a defect; `--debug` shows the traceback"
    codes = {
        "0": "done",
        "1": f"{notes.fails}; or {defect}" if notes.fails else defect,
        "2": "something to mend: one line says what",
        "130": "interrupted",
    }
    if notes.serves:
        codes = {code: meaning for code, meaning in codes.items() if code not in ("0", "130")} | {
            notes.serves: "ended with Ctrl-C, or exported" if name == "label" else "ended with Ctrl-C"
        }
    if name == "train":
        codes["130"] = "Ctrl-C: the step was finished and a checkpoint written; `--resume` goes on"
        codes["143"] = "SIGTERM: as Ctrl-C"
    return sorted(codes.items(), key=lambda item: int(item[0]))


def _row(field: Field, words: tuple[str, ...]) -> tuple[str, ...]:
    bare = {word.removesuffix("...") for word in words}
    flag = f"`{field.flag}`" + (" (or as a bare word)" if field.name.replace("_", "-") in bare else "")
    choices = (
        f" One of {', '.join(f'`{choice}`' for choice in field.choices if choice)}." if field.choices else ""
    )
    return flag, field.shown, linked(field.meaning, UP) + choices


def _one_line(kind: Any) -> str:
    return re.sub(r"\s+", " ", kind.__doc__).strip()
