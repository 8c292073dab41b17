"""`proxima data check`: look at data before training on it; `proxima data sample`: files to try everything
on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from proxima.cli.command import Command
from proxima.config import setting


@dataclass
class Data(Command):
    """Show what data holds and which commands take it (`proxima data check FILE`), or write files to try
    (`proxima data sample DIR`)."""

    words: ClassVar[tuple[str, ...]] = ("action", "source")
    example: ClassVar[str] = "proxima data check my-data/prompts.jsonl --model-name embedded"
    writes: ClassVar[str] = "`check` writes nothing. `sample` writes the folder it is given."
    guide: ClassVar[str] = "data.md"
    fails: ClassVar[str] = "the data cannot be used"

    action: Literal["check", "sample"]
    """`check` reads all rows: what was recognised, counts, lengths, duplicates, bad rows, three examples.
    `sample` writes a file of each kind, from the embedded world, into a folder, and settings that suit the
    embedded model."""
    source: str
    """To check: a file, a folder or OWNER/NAME[/CONFIG][:SPLIT] (docs/data.md lists the forms). To
    sample: a new folder."""
    model_name: str = ""
    """Measure lengths in this model's tokens, render conversations by its chat template; without it,
    characters and words."""
    max_length: int = setting(1024, at_least=2)
    """Longest example in tokens, as `sft` and `reward` will have it."""
    limit: int = 0
    """Look at only the first `limit` rows; 0 = all."""
    trust_remote_code: bool = False
    """Run Python code that comes with the tokenizer. Off: such tokenizers are refused."""

    def run(self) -> None:
        if self.action == "sample":
            self._sample()
        else:
            self._check()

    def _sample(self) -> None:
        from proxima.world import write_samples

        folder = Path(self.source)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is there already; name a folder that is new or empty")
        for name, meaning in write_samples(folder).items():
            print(f"{folder / name!s:32} {meaning}")

    def _check(self) -> None:
        from proxima.data import check, show

        tokenizer, context = None, None
        if self.model_name:
            from proxima.base_setup import load_context_length, load_tokenizer

            tokenizer = load_tokenizer(self.model_name, self.trust_remote_code)
            context = load_context_length(self.model_name, self.trust_remote_code)
        report = check(self.source, tokenizer, context, self.max_length, self.limit)
        show(report)
        if not report.usable:
            raise SystemExit(1)
