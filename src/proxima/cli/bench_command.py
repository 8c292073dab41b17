"""`proxima bench`: how fast a PPO step, or one of fine-tuning, is here."""

from __future__ import annotations

import json
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from proxima.cli.command import Command
from proxima.core.json_record import Record

if TYPE_CHECKING:
    from proxima.tools.bench import Case, FinetuningCase, Machine


@dataclass
class Bench(Command):
    """Time each phase of a PPO step, or a step of fine-tuning, on random weights, compared with the least
    time this machine's hardware allows."""

    example: ClassVar[str] = "proxima bench --cases small --steps 1"
    writes: ClassVar[str] = "`bench.json`, or `--output`."
    guide: ClassVar[str] = "performance.md"
    slow: ClassVar[str] = "the bench takes minutes, tests/tools/test_bench.py runs it"

    cases: tuple[str, ...] = ()
    """Cases by name, or `all`; by default `standard` on a GPU and `embedded` on a CPU."""
    steps: int = 3
    """Steps to time after the warm-up; the median counts."""
    scaling: bool = False
    """Also time the first case at half and twice its batch, prompt and response: how the time grows, as
    numbers and a page."""
    lengths: bool = False
    """Also time the first case with responses of 256, 1,024, 4,096 and 16,384 tokens, as far as the context
    allows: what a response token costs, as numbers and a page."""
    beside: int = 0
    """Also time the first case, with a quarter of its batch, alone and beside this many busy processes in
    turn: how much a busy machine slows a step."""
    peer: Literal["", "trl", "transformers", "vllm"] = ""
    """Also time another project on the same shapes, where all prompts are of one length and no weight is
    quantised: `trl`, the whole step of TRL 1.12, in an environment of its own (`make peer`); generation alone
    by `transformers` with a static cache, or by `vllm` in its environment."""
    output: Path = Path("bench.json")
    """File for all numbers."""
    micro_batch_tokens: int = 0
    """As in `train`: tokens in one forward pass, 0 = by the device's memory. Memory against speed."""
    gradient_checkpointing: bool = False
    """As in `train`: recompute layers in the backward pass. Memory against speed."""
    profile: bool = False
    """Also take a PPO step of each case under torch's profiler, after the timed ones: the kernels (on a CPU,
    the operations) by the time they take."""

    def run(self) -> None:
        from proxima.tools.bench import CASES, measure_machine

        warnings.filterwarnings("ignore", message="no reward is configured")
        names = self._names()
        machine = measure_machine()
        print(
            f"{machine.name}: {machine.flops / 1e12:.3g} TFLOP/s, {machine.bandwidth / 1e9:,.0f} GB/s, both "
            "measured\n"
        )
        results = _Results(self.output, asdict(machine))
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                time = self._time_step if name in CASES else self._time_finetuning
                time(name, folder, machine, results)
            if self.beside:
                self._time_beside(names[0], folder, results)
            if self.scaling:
                self._time_scaling(names[0], folder, machine, results)
            if self.lengths:
                self._time_lengths(names[0], folder, machine, results)
        print(f"all numbers: {self.output}")

    def _time_step(self, name: str, folder: str, machine: Machine, results: _Results) -> None:
        from proxima.tools.bench import CASES, profile_table, run_case, table

        case = CASES[name]
        result = run_case(case, machine, self.steps, folder, self.profile, **self._settings)
        peer = self._peer_of(case, folder) if self.peer and case.has_peer else None
        print(table(result, peer) + "\n", flush=True)
        if self.profile:
            print(profile_table(result["profile"]) + "\n", flush=True)
        results.add({**result, "peer": peer})

    def _peer_of(self, case: Case, folder: str) -> Record:
        from proxima.tools.bench import run_generation_peer, run_peer

        if self.peer == "trl":
            return run_peer(case, self.steps)
        return run_generation_peer(self.peer, case, Path(folder) / case.size, self.steps)

    def _time_finetuning(self, name: str, folder: str, machine: Machine, results: _Results) -> None:
        from proxima.tools.bench import FINETUNING_CASES, finetuning_table, run_finetuning_case, run_peer

        case = FINETUNING_CASES[name]
        result = run_finetuning_case(case, machine, self.steps, folder, **self._settings)
        peer = run_peer(case, self.steps) if self.peer == "trl" else None
        print(finetuning_table(result, peer) + "\n", flush=True)
        results.add({**result, "peer": peer})

    @property
    def _settings(self) -> Record:
        """Of a config, besides those of the cases."""
        return {
            "micro_batch_tokens": self.micro_batch_tokens,
            "gradient_checkpointing": self.gradient_checkpointing,
        }

    def _names(self) -> tuple[str, ...]:
        """The cases to time, checked."""
        import torch

        from proxima.tools.bench import CASES, CPU_SIZES, FINETUNING_CASES

        known: dict[str, Case | FinetuningCase] = {**CASES, **FINETUNING_CASES}
        gpu = torch.cuda.is_available()
        names = self.cases or (("standard",) if gpu else ("embedded",))
        if names == ("all",):
            names = tuple(name for name, case in known.items() if (case.size in CPU_SIZES) != gpu)
        if self.beside < 0:
            raise ValueError(f"beside ({self.beside}) must be at least 0")
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"unknown case {unknown[0]!r}; the cases are {', '.join(known)}")
        if (self.beside or self.scaling or self.lengths) and names[0] not in CASES:
            raise ValueError(
                f"beside, scaling and lengths time PPO steps, not {names[0]}; name another first"
            )
        if self.profile and not any(name in CASES for name in names):
            raise ValueError(f"profile shows PPO steps, and {', '.join(names)} is none; name another too")
        return names

    def _time_beside(self, name: str, folder: str, results: _Results) -> None:
        from proxima.tools.bench import CASES, beside_line, run_beside

        beside = run_beside(CASES[name], self.beside, self.steps, folder, **self._settings)
        print(beside_line(name, beside) + "\n", flush=True)
        results.add({"name": name, "beside": beside})

    def _time_scaling(self, name: str, folder: str, machine: Machine, results: _Results) -> None:
        from proxima.tools.bench import CASES, growth_plot, run_scaling, scaling_table

        seconds = results.rows[0]["seconds"]
        found = run_scaling(CASES[name], seconds, machine, self.steps, folder, **self._settings)
        print(f"{name}, growth\n{scaling_table(found)}\n", flush=True)
        results.add({"name": name, "scaling": found})
        print(f"as a picture: {growth_plot(found).save(self.output.with_suffix('.html'))}")

    def _time_lengths(self, name: str, folder: str, machine: Machine, results: _Results) -> None:
        from proxima.tools.bench import CASES, lengths_plot, lengths_table, run_lengths

        found: list[Record] = []
        results.add({"name": name, "lengths": found})
        for result in run_lengths(CASES[name], machine, self.steps, folder, **self._settings):
            found.append(result)
            results.write()
        print(f"{name}, by the length of its responses\n{lengths_table(found)}\n", flush=True)
        page = self.output.with_name(f"{self.output.stem}-lengths.html")
        print(f"as a picture: {lengths_plot(found).save(page)}")


class _Results:
    """All numbers so far, written to the file after each case."""

    def __init__(self, path: Path, machine: Record):
        self.rows: list[Record] = []
        self._path = path
        self._machine = machine

    def add(self, found: Record) -> None:
        self.rows.append({**found, "machine": self._machine})
        self.write()

    def write(self) -> None:
        self._path.write_text(json.dumps(self.rows, indent=2) + "\n", encoding="utf-8")
