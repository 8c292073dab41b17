"""`proxima demo`: the whole of RLHF, offline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from proxima.cli.command import Command


@dataclass
class Demo(Command):
    """See all of RLHF work, offline, in minutes: preferences, reward model, PPO, evaluation, on the
    embedded model."""

    example: ClassVar[str] = "proxima demo --steps 5"
    writes: ClassVar[str] = (
        "`runs/demo`: the reward model, the run, `results.json` and `report.html`, a page that tells "
        "all of it."
    )
    guide: ClassVar[str] = "embedded.md"
    slow: ClassVar[str] = "the demo takes minutes, tests/world/test_demo.py runs it"

    seed: int = 0
    """Seed of the whole demo: the same seed gives the same results.json, except for times."""
    steps: int = 20
    """PPO steps."""
    preferences: int = 3000
    """Pairs that the reward model learns from; 5532 ship."""
    relabel: bool = False
    """Sample answers and ask the simulated annotators now, instead of reading the shipped preferences."""
    device: str = "auto"
    """`auto` = cuda if there is one, else cpu, which suits the small model better than Apple's GPU."""
    engine: Literal["auto", "plain", "vllm"] = "auto"
    """What PPO samples with; `vllm` in this process or, with --engine-urls, on servers (docs/engines.md)."""
    engine_urls: tuple[str, ...] = ()
    """vLLM servers of the embedded model."""
    run_dir: Path = Path("runs")
    """Folder of all runs; this one is `demo` in it."""

    def run(self) -> None:
        from proxima.runtime import default_device
        from proxima.world.demo import run_demo

        if self.steps < 1:
            raise ValueError(f"steps ({self.steps}) must be at least 1")
        if self.preferences < 1:
            raise ValueError(f"preferences ({self.preferences}) must be at least 1")
        on_mps = self.device == "auto" and default_device().type == "mps"
        ppo = {"engine": self.engine, "engine_urls": self.engine_urls}
        run_demo(
            self.seed,
            self.steps,
            self.relabel,
            self.run_dir,
            device="cpu" if on_mps else self.device,
            preferences=self.preferences,
            ppo=ppo,
        )
