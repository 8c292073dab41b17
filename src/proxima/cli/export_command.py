"""`proxima export`: a trained model that other tools load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from proxima.cli.command import Command


@dataclass
class Export(Command):
    """Write a trained policy as an adapter or as a merged model that `transformers` loads on its own, with
    a model card."""

    words: ClassVar[tuple[str, ...]] = ("folder", "to")
    example: ClassVar[str] = "proxima export runs/first my-model --merge"
    writes: ClassVar[str] = (
        "The new folder: an adapter or a model, the tokenizer, and a model card in its README.md; with "
        "`--gguf` one file instead."
    )
    guide: ClassVar[str] = "evaluate.md"

    folder: Path
    """Folder of a run of `proxima train` or `proxima sft`; may be given without the flag."""
    to: Path
    """New folder to write (with `--gguf` a new file NAME.gguf); may be given without the flag."""
    merge: bool = False
    """Merge the adapter into the base: larger, but it needs neither peft nor the base."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of a merged model's weights; auto = the base's own."""
    gguf: Literal["f16", "q8_0"] | None = None
    """Write one merged GGUF file for llama.cpp instead of a folder: its matrices as f16, or as q8_0 (half
    the size). For Llama, Qwen2 and Qwen3."""

    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused, whatever the run's
    settings say."""

    def run(self) -> None:
        from proxima.tools import export

        to = export(self.folder, self.to, self.merge, self.dtype, self.trust_remote_code, self.gguf)
        print(f"written to {to}")
