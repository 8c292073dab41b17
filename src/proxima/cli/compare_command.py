"""`proxima compare`: several runs in one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from proxima.cli.command import Command
from proxima.config import RewardSpec
from proxima.core.tokenizer import Tokenizer


@dataclass
class Compare(Command):
    """Compare runs in one HTML file: their curves, reward against KL, means over seeds, and win rates between
    them."""

    words: ClassVar[tuple[str, ...]] = ("runs...",)
    example: ClassVar[str] = "proxima compare runs/first runs/second --data my-data/held_out.jsonl --limit 20"
    writes: ClassVar[str] = "`compare.html`, or `--out`."
    guide: ClassVar[str] = "evaluate.md"

    runs: tuple[str, ...]
    """Folders of the runs, two or more; may be given without the flag."""
    data: str = ""
    """Held-out prompts that every run answers, for win rates between them; without it no model is loaded."""
    rewards: tuple[RewardSpec, ...] = ()
    """Score answers by these; by default by the runs' own rewards, if they are the same and neither functions
    nor servers."""
    judges: tuple[RewardSpec, ...] = ()
    """Who else says which of two answers is better; docs/evaluate.md has the forms."""
    environment: tuple[RewardSpec, ...] = ()
    """The runs' environment, which is only used where it is named here; so are their `--tools`."""
    tools: tuple[RewardSpec, ...] = ()
    """The runs' tools."""
    limit: int = 0
    """Use only the first `limit` prompts; 0 = all."""
    out: Path = Path("compare.html")
    """Where the page goes."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused, whatever the run's
    settings say."""

    def run(self) -> None:
        from proxima.pages.comparison import compare_runs, lines

        named = (self.environment, self.tools)
        if any((self.rewards, self.judges, *named)) and not self.data:
            raise ValueError(
                "--rewards, --judges, --environment and --tools need answers to judge: give --data with "
                "held-out prompts"
            )
        read = self._read if self.data else None
        given = (self.rewards, self.judges, self.trust_remote_code, *named)
        result = compare_runs(self.runs, self.out, read, *given)
        print("\n".join(lines(result)))
        print(f"written to {self.out}")

    def _read(self, tokenizer: Tokenizer) -> Sequence[str]:
        from proxima.data import read_prompts

        return read_prompts(self.data, tokenizer, self.limit)
