"""`proxima scaling`: estimates of the memory and time that a model size needs on a number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from proxima.cli.command import Command


@dataclass
class Scaling(Command):
    """Estimate memory and time of a PPO step for model sizes and numbers of GPUs, and what the bottleneck
    would be."""

    example: ClassVar[str] = "proxima scaling --sizes 8B 70B --gpus 8 64 --batch 512"
    writes: ClassVar[str] = "Nothing; it prints a table."
    guide: ClassVar[str] = "scaling.md"

    sizes: tuple[str, ...] = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "70B")
    """Model sizes."""
    gpus: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """Numbers of GPUs (H200; 8 in a machine)."""
    batch: int = 512
    """Prompts of a step, over all GPUs."""
    prompt: int = 512
    """Tokens of a prompt."""
    response: int = 53
    """Tokens of a response."""
    epochs: int = 4
    """Passes over a rollout."""
    minibatches: int = 1
    """Optimiser steps per epoch."""
    all_ways: bool = False
    """Show every way to run it, not only the fastest that fits."""

    def run(self) -> None:
        from proxima.tools.scaling import GIB, H200, SHAPES, StepWork, best_plan, plans

        if unknown := [size for size in self.sizes if size not in SHAPES]:
            raise ValueError(f"unknown size {unknown[0]!r}; the sizes are {', '.join(SHAPES)}")
        numbers = (*self.gpus, self.batch, self.prompt, self.response, self.epochs, self.minibatches)
        if min(numbers) < 1:
            raise ValueError(
                f"{min(numbers)} is too small: GPUs, batch, tokens, epochs and minibatches must be at least 1"
            )
        work = StepWork(self.batch, self.prompt, self.response, self.epochs, self.minibatches)
        print("On paper, from one measured H200; several GPUs were not measured (docs/scaling.md).\n")
        print(f"{'size':>5} {'GPUs':>5} {'GiB/GPU':>10} {'s/step':>9}  {'way':34} bottleneck")
        for size in self.sizes:
            for count in self.gpus:
                shape = SHAPES[size]
                for plan in plans(shape, count, work) if self.all_ways else [best_plan(shape, count, work)]:
                    memory = f"{plan.memory / GIB:.0f}" if plan.memory < 1e15 else "-"
                    step = f"{plan.seconds:.1f}" if plan.fits else "too large"
                    bottleneck = plan.bottleneck if plan.fits else ""
                    print(f"{size:>5} {count:>5} {memory:>10} {step:>9}  {plan.way:34} {bottleneck}")
        print(
            f"\nAssumed, not measured: {H200.link / 1e9:.0f} GB/s to GPUs in the same machine and "
            f"{H200.network / 1e9:.0f} GB/s to others (80 % of the makers' figures);"
        )
        print("vLLM samples as fast as the built-in engine. docs/scaling.md says what changes otherwise.")
