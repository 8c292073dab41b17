"""`proxima migrate`: from a PPO script of TRL 1.12 to settings for `proxima train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from proxima.cli.command import Command
from proxima.core.terminal_text import printable


@dataclass
class Migrate(Command):
    """Turn a PPO script of TRL 1.12 into settings for `train`: what maps, what differs, what is dropped."""

    words: ClassVar[tuple[str, ...]] = ("script",)
    example: ClassVar[str] = "proxima migrate old_ppo.py --out ppo.yaml"
    writes: ClassVar[str] = "The settings file, with `--out`."
    guide: ClassVar[str] = "migrate.md"
    slow: ClassVar[str] = "it reads an old script, docs/migrate.md has one and runs it"

    script: str
    """The Python script (.py), the shell script that starts it (.sh), or a file of TRL's settings
    (.yaml). Read, never run."""
    out: str = ""
    """Write the settings here; without it they are printed after the account."""
    processes: int = 0
    """How many processes (GPUs) ran it, for the batch size; 0 = what the script says, else 1."""
    rows: int = 0
    """How many rows the data has, so that episodes can be converted to epochs; 0 = unknown."""

    def run(self) -> None:
        from proxima.tools.migrate import account, migrate, to_yaml

        if self.out and Path(self.out).exists():
            raise ValueError(f"{self.out} is there already; name another file with --out")
        migration = migrate(self.script, self.processes, self.rows)
        text = to_yaml(migration)
        if self.out:
            Path(self.out).write_text(text, encoding="utf-8")
        print(printable(account(migration, self.out)))
        if not self.out:
            print(f"\n{text}", end="")
