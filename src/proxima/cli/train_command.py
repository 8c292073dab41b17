"""`proxima train`: PPO on a file of prompts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from proxima.cli.command import Command
from proxima.config import PPOConfig, Preset, setting
from proxima.core.terminal_text import visible
from proxima.core.tokenizer import Tokenizer


@dataclass
class Train(Command):
    """Train a policy with PPO on a file of prompts."""

    example: ClassVar[str] = (
        "proxima train --model-name embedded --data my-data/prompts.jsonl --rewards ends_with_eos --limit "
        "64 --run-name first"
    )
    writes: ClassVar[str] = (
        "`runs/NAME`: settings, metrics, samples, checkpoints, the trained `policy/` and `value/`, "
        "`results.json` and `report.html`; [all files](../../resume.md#what-is-in-runsname)."
    )
    guide: ClassVar[str] = "resume.md"

    ppo: PPOConfig
    data: str
    """Prompts: a file, a folder or a Hugging Face dataset, OWNER/NAME[/CONFIG][:SPLIT]; docs/data.md lists
    the forms."""
    validation: str = ""
    """Held-out prompts that decide what is best and when to stop; the same forms."""
    preset: Preset = ""
    """Defaults by name, over which --config and flags win; docs/methods.md says which suits what."""
    limit: int = 0
    """Use only the first `limit` rows of the data; 0 = all."""
    epochs: int = setting(1, at_least=1)
    """Passes over the prompts."""
    resume: bool = False
    """Resume from the newest good checkpoint of --run-name (docs/resume.md); without one, start the run."""
    force: bool = False
    """Resume even if settings that change results were changed."""
    skip_checks: bool = False
    """Start even where the quick checks of `proxima doctor` fail."""

    def run(self) -> None:
        from proxima.ppo_trainer import PPOTrainer
        from proxima.runtime.distributed import init_distributed

        processes = init_distributed(self.ppo.device, self.ppo.process_timeout)
        if processes.is_distributed:
            way = "NCCL" if processes.uses_nccl else "gloo"
            print(
                f"{processes.world_size} processes ({way}), layers "
                f"{'sharded' if self.ppo.shard_base else 'replicated'}"
            )
        prompts, held_out, tokenizer = processes.on_all(self._read)
        if not self.skip_checks:
            processes.on_main(lambda: self._check(prompts, tokenizer))
        trainer = processes.on_all(lambda: PPOTrainer(self.ppo))
        results = trainer.train(prompts, self.epochs, held_out, self.resume, self.force)
        began = ", the model it began with" if results.start.get("step") == results.best_step else ""
        print(
            f"stopped: {visible(results.stop_reason)}; best step {results.best_step}{began}; results in "
            f"{results.run_folder}"
        )
        if processes.is_main:
            self._report(results.run_folder, len(prompts))
        processes.close()

    def _read(self) -> tuple[Sequence[str], Sequence[str] | None, Tokenizer]:
        """Prompts, validation prompts where there are some, and the tokenizer."""
        from proxima.base_setup import load_tokenizer
        from proxima.data import open_rows, read_prompts

        if not self.ppo.rewards and not self.ppo.environment:
            raise ValueError(
                "no reward is configured; give --rewards module:function, a reward model's folder, a Hub "
                "id, a URL or a "
                "ready-made one such as ends_with_eos (docs/rewards.md has them all)"
            )
        rows = open_rows(self.data, self.limit)
        held_out_rows = open_rows(self.validation) if self.validation else None
        tokenizer = load_tokenizer(self.ppo.model_name, self.ppo.trust_remote_code)
        held_out = read_prompts(held_out_rows, tokenizer) if held_out_rows is not None else None
        return read_prompts(rows, tokenizer), held_out, tokenizer

    def _report(self, folder: Path, prompts: int) -> None:
        """Note what the data was, and write the report; what was trained stays good where this fails."""
        from proxima.pages.report import write_report
        from proxima.runs import Run, write_json

        noted = {
            "data": self.data,
            "prompts": prompts,
            "validation": self.validation,
            "limit": self.limit,
            "epochs": self.epochs,
        }
        try:
            write_json(folder / "data.json", noted)
            print(f"report: {visible(str(write_report(Run(folder))))}")
        except Exception as error:  # whatever it is, the run is done
            print(
                f"proxima: warning: the report could not be written: {visible(str(error))}", file=sys.stderr
            )

    def _check(self, prompts: Sequence[str], tokenizer: Tokenizer) -> None:
        """Say what the quick checks warn of; refuse to start where one fails."""
        from proxima.runs import note_checks
        from proxima.tools.doctor import quick_findings

        findings = quick_findings(self.ppo, prompts, tokenizer, self.epochs)
        note_checks(map(vars, findings))
        for finding in findings:
            if finding.level == "fail":
                raise ValueError(f"{finding.sentence} (--skip-checks starts all the same)")
        for finding in findings:
            if finding.level == "warn":
                print(f"proxima: warning: {visible(finding.sentence)}", file=sys.stderr)
