"""`proxima generate`: sample responses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from proxima.cli.command import Command
from proxima.config import PPOConfig, setting
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
    best_of: int = setting(1, at_least=1, at_most=1024)
    """Sample this many responses per prompt and print the one that scores best by `--rewards`, or by the
    rewards of the run that `--adapter` is from."""

    def run(self) -> None:
        from proxima.base_setup import BaseSetup
        from proxima.data import open_rows, read_prompts
        from proxima.ppo_trainer import SequenceGenerator, best_samples
        from proxima.runs import Run

        if not is_encodable(self.prompt):
            raise ValueError("a prompt (--prompt) is not UTF-8 text")
        rows = open_rows(self.data, self.limit) if self.data else None
        config = dataclasses.replace(self.ppo, sft_adapter=self.adapter) if self.adapter else self.ppo
        if self.best_of > 1:
            config = self._with_rewards(config)
        setup = BaseSetup(config)
        prompts = [*self.prompt, *(read_prompts(rows, setup.tokenizer) if rows is not None else [])]
        if self.best_of > 1:
            run = Run(self._run).results if (self._run / "config.yaml").is_file() else None
            found = best_samples(setup.models, setup.tokenizer, config, prompts, self.best_of, run)
        else:
            texts = SequenceGenerator(setup.models, setup.tokenizer, config).sample(prompts).texts()
            found = [(text, math.nan) for text in texts]
        self._show(prompts, found)

    @property
    def _run(self) -> Path:
        """Folder of the run that the adapter is from, where it is from one."""
        return Path(self.adapter).parent

    def _with_rewards(self, config: PPOConfig) -> PPOConfig:
        """The settings with rewards to choose by: the command line's, or those of the adapter's run."""
        from proxima.evaluator import run_config

        if config.rewards:
            return config
        named = {name: value for name in ("environment", "tools") if (value := getattr(config, name))}
        if not self.adapter or not (self._run / "config.yaml").is_file():
            if config.environment:
                return config
            raise ValueError(
                f"--best-of {self.best_of} chooses by a reward, and there is none; give --rewards, or as "
                "--adapter the policy/ of a run, whose rewards are then used"
            )
        return dataclasses.replace(config, rewards=run_config(self._run, **named).rewards)

    def _show(self, prompts: Sequence[str], found: Sequence[tuple[str, float]]) -> None:
        for prompt, (text, score) in zip(prompts, found, strict=True):
            answer = turn_line({"role": "assistant", "text": text}) if turns_of(prompt) else f"  -> {text}"
            scored = "" if self.best_of == 1 else f"\n     score {score:.4g}, the best of {self.best_of}"
            print(printable(f"{in_lines(prompt)}\n{answer}{scored}\n"))
