"""`proxima generate`: sample responses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from proxima.cli.command import Command
from proxima.config import PPOConfig
from proxima.core.chat_turns import in_lines, turn_line, turns_of
from proxima.core.terminal_text import is_encodable, printable


@dataclass
class Generate(Command):
    """Sample responses from a model, with or without a trained adapter."""

    example: ClassVar[str] = "proxima generate --model-name embedded --data my-data/held_out.jsonl --limit 3"
    writes: ClassVar[str] = "Nothing; it prints prompts and responses, conversations as turns."
    guide: ClassVar[str] = "data.md"

    ppo: PPOConfig
    prompt: tuple[str, ...] = ()
    """Prompts to answer."""
    data: str = ""
    """More prompts: a file, a folder or a Hugging Face dataset, as for `train`."""
    limit: int = 0
    """Use only the first `limit` rows of the data; 0 = all."""
    adapter: str = ""
    """Folder of a trained policy adapter, for example runs/NAME/policy."""

    def run(self) -> None:
        from proxima.base_setup import BaseSetup
        from proxima.data import open_rows, read_prompts
        from proxima.ppo_trainer import SequenceGenerator

        if not is_encodable(self.prompt):
            raise ValueError("a prompt (--prompt) is not UTF-8 text")
        rows = open_rows(self.data, self.limit) if self.data else None
        config = dataclasses.replace(self.ppo, sft_adapter=self.adapter) if self.adapter else self.ppo
        setup = BaseSetup(config)
        prompts = [*self.prompt, *(read_prompts(rows, setup.tokenizer) if rows is not None else [])]
        texts = SequenceGenerator(setup.models, setup.tokenizer, config).sample(prompts).texts()
        for prompt, text in zip(prompts, texts, strict=True):
            answer = turn_line({"role": "assistant", "text": text}) if turns_of(prompt) else f"  -> {text}"
            print(printable(f"{in_lines(prompt)}\n{answer}\n"))
