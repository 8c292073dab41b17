"""A run in a few lines. In: a `Run`. Out: text for a terminal, without any character that could steer it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from proxima.config import shareable
from proxima.core.terminal_text import visible
from proxima.pages.report.run_facts import tell
from proxima.runs import Run, title_of

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
CURVES = ("avg_reward", "kl_exact", "response_length")


def summary(run: Run) -> str:
    story, metrics = tell(run), run.metrics()
    lines = [f"{run.name}: {run.state}, {run.steps} steps", story.conclusion]
    for name in CURVES:
        if line := sparkline(metrics.get(name, ())):
            lines.append(f"  {title_of(name):32}{line}")
    lines += [f"  {card.label:32}{card.value:20}  {card.note}" for card in story.cards]
    lines += [f"  {each.question} {each.answer}. {each.sentence}" for each in story.findings[1:]]
    lines += [
        f"  warning at step {w['step']}, {w.get('guard', '')}: {w.get('message', '')}"
        for w in story.warnings[:3]
    ]
    if len(story.warnings) > 3:
        lines.append(f"  and {len(story.warnings) - 3} more warnings")
    lines += [f"  {problem}" for problem in run.problems[:3]]
    return "\n".join(visible(shareable(line))[:500] for line in lines)


def sparkline(values: Sequence[float]) -> str:
    """A curve in one line of text."""
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return ""
    width = min(WIDTH, len(known))
    parts = [known[i * len(known) // width : (i + 1) * len(known) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), (max(means) - min(means)) or 1.0
    return "".join(BARS[min(int((mean - low) / span * len(BARS)), len(BARS) - 1)] for mean in means)
