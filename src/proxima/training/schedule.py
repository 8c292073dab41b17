"""Learning-rate schedules: the factor of both learning rates at a PPO step."""

from __future__ import annotations

import math


def learning_rate_factor(
    schedule: str, step: int, total_steps: int | None, warmup_steps: int = 0, first_step: int = 0
) -> float:
    """Rises linearly over the warm-up, then stays, or falls to 0 at `total_steps` in a line or half a cosine.

    Args:
        step: steps done before this one (0 for the first).
        total_steps: None where no end is known: no fall.
        first_step: where this schedule begins.
    """
    done = step - first_step
    if done < warmup_steps:
        return (done + 1) / (warmup_steps + 1)
    if schedule == "constant" or total_steps is None:
        return 1.0
    progress = min((done - warmup_steps) / max(total_steps - first_step - warmup_steps, 1), 1.0)
    return 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
