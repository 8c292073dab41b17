"""`proxima bench`: how fast a PPO step is here."""

from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal


@dataclass
class Bench:
    """Time each phase of a PPO step on random weights, beside the least time this machine's hardware
    allows."""

    example: ClassVar[str] = "proxima bench --cases small --steps 1"

    cases: tuple[str, ...] = ()
    """Cases by name, or `all`; by default `standard` on a GPU and `embedded` on a CPU."""
    steps: int = 3
    """Steps to time after the warm-up; the median counts."""
    scaling: bool = False
    """Also time the first case at half and twice its batch, prompt and response: how the time grows, as
    numbers and a page."""
    beside: int = 0
    """Also time the first case, with a quarter of its batch, alone and beside so many busy processes in
    turn: how much a busy machine slows a step."""
    peer: Literal["", "trl"] = ""
    """Also time TRL 1.12 on the same shapes where all prompts are of one length, in an environment of its
    own (`make peer`)."""
    output: Path = Path("bench.json")
    """File for all numbers."""
    micro_batch_tokens: int = 8192
    """As in `train`: tokens in one forward pass. Memory against speed."""

    def run(self) -> None:
        import torch

        from proxima.tools.bench import (
            CASES,
            beside_line,
            growth_plot,
            measure_machine,
            run_beside,
            run_case,
            run_peer,
            run_scaling,
            scaling_table,
            table,
        )

        warnings.filterwarnings("ignore", message="no reward is configured")
        gpu = torch.cuda.is_available()
        names = self.cases or (("standard",) if gpu else ("embedded",))
        if names == ("all",):
            names = tuple(name for name, case in CASES.items() if (case.size == "0.6B") == gpu)
        if self.beside < 0:
            raise ValueError(f"beside ({self.beside}) must be at least 0")
        if unknown := [name for name in names if name not in CASES]:
            raise ValueError(f"unknown case {unknown[0]!r}; the cases are {', '.join(CASES)}")
        machine = measure_machine()
        print(
            f"{machine.name}: {machine.flops / 1e12:.3g} TFLOP/s, {machine.bandwidth / 1e9:,.0f} GB/s, both "
            "measured\n"
        )
        written: list[dict[str, Any]] = []

        def keep(found: dict[str, Any]) -> None:
            written.append({**found, "machine": asdict(machine)})
            self.output.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")

        settings = {"micro_batch_tokens": self.micro_batch_tokens}
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                result = run_case(CASES[name], machine, self.steps, folder, **settings)
                peer = run_peer(CASES[name], self.steps) if self.peer and CASES[name].even else None
                print(table(result, peer) + "\n", flush=True)
                keep({**result, "peer": peer})
            if self.beside:
                beside = run_beside(CASES[names[0]], self.beside, self.steps, folder, **settings)
                print(beside_line(names[0], beside) + "\n", flush=True)
                keep({"name": names[0], "beside": beside})
            if self.scaling:
                found = run_scaling(
                    CASES[names[0]], written[0]["seconds"], machine, self.steps, folder, **settings
                )
                print(f"{names[0]}, growth\n{scaling_table(found)}\n", flush=True)
                keep({"name": names[0], "scaling": found})
                print(f"as a picture: {growth_plot(found).save(self.output.with_suffix('.html'))}")
        print(f"all numbers: {self.output}")
