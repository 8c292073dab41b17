"""`proxima doctor`: what would spoil a run, before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from proxima.cli.command import Command
from proxima.config import PPOConfig, Preset, setting


@dataclass
class Doctor(Command):
    """Find what would spoil a run before it starts; takes the flags of `train`."""

    example: ClassVar[str] = (
        "proxima doctor --model-name embedded --data my-data/prompts.jsonl --rewards ends_with_eos"
    )
    writes: ClassVar[str] = (
        "With --run-name, `doctor.json` in that run's folder, for the studio; else nothing."
    )
    guide: ClassVar[str] = "doctor.md"
    fails: ClassVar[str] = "something would spoil the run"

    ppo: PPOConfig
    data: str
    """Prompts, as `train` takes them."""
    validation: str = ""
    """Held-out prompts; the same forms."""
    preset: Preset = ""
    """Defaults by name, as `train` takes them."""
    limit: int = 0
    """Use only the first `limit` rows of the data; 0 = all."""
    epochs: int = setting(1, at_least=1)
    """Passes over the prompts that are planned."""
    samples: int = 16
    """Prompts to sample and score; more say more about the reward. While all score the same, up to 16
    times as many are."""
    audit: bool = False
    """Also probe the rewards: are they repeatable, do they depend on batch, length or prompt, and does a
    cheap trick (an empty, copied, repeated, flattering ... answer) score above honest answers."""
    canary: bool = False
    """Run up to 30 steps with these settings on a planted reward that any sound setup learns; if it does
    not rise, say which part is suspect."""

    fit: bool = False
    """Instead of the checks, find by trial the largest micro-batch, batch and response that fit this
    device's memory, and print the settings."""
    memory: float = setting(0.0, at_least=0)
    """GiB that a trial of --fit may take; 0 = what is free."""

    def run(self) -> None:
        from proxima.runs import write_examination
        from proxima.tools.doctor import examine, find_fit, show

        if self.fit:
            print(find_fit(self.ppo, self.data, self.limit, self.memory))
            return
        planned = (self.limit, self.epochs, self.samples, self.validation)
        findings = examine(self.ppo, self.data, *planned, with_audit=self.audit, with_canary=self.canary)
        show(findings)
        if self.ppo.run_name:
            flags = [name for name in ("audit", "canary") if getattr(self, name)]
            how = " ".join(["proxima doctor", *(f"--{name}" for name in flags)])
            write_examination(Path(self.ppo.run_dir) / self.ppo.run_name, how, map(vars, findings))
        if any(item.level == "fail" for item in findings):
            raise SystemExit(1)
