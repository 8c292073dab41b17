"""The page of metrics. In: the glossary. Out: Markdown, in its groups, with links to what it names."""

from __future__ import annotations

from collections.abc import Mapping

from proxima.runs.glossary import GROUPS, STAGES, Metric
from tools.reference.source import anchor, linked

UP = "../"
HEAD = """# Metrics

What a run logs at every step, in `metrics.jsonl`, on its report and in the studio (behind the question mark
of a chart): what it is, what healthy looks like, and what to do when it is not. Numbers under *healthy* are
what the tests and the demo show, or rules of thumb of the field; a trend says more than a number. A name
that ends in `/*` stands for every name that begins so. `nan` means that there was nothing to measure.
"""


def metrics_page() -> str:
    stages = (
        "What [`proxima sft`](commands/sft.md) and [`proxima reward`](commands/reward.md) measure and print."
    )
    return "\n\n".join(
        [
            HEAD,
            *(_group(title, metrics) for title, metrics in GROUPS.items()),
            _group("Stages before PPO", STAGES, stages),
        ]
    )


def _group(title: str, metrics: Mapping[str, Metric], text: str = "") -> str:
    whole = [_entry(name, metric) for name, metric in metrics.items() if metric.healthy]
    short = "\n".join(
        f"- `{name}`: {linked(metric.meaning, UP)}" for name, metric in metrics.items() if not metric.healthy
    )
    counts = f"Beside these:\n\n{short}" if short else ""
    return "\n\n".join(part for part in (f"## {title}", text, *whole, counts) if part)


def _entry(name: str, metric: Metric) -> str:
    return (
        f'<a id="{anchor(name)}"></a>\n\n### `{name}`\n\n{linked(metric.meaning, UP, name)}\n\n'
        f"- **Healthy:** {linked(metric.healthy, UP)}\n- **Otherwise:** {linked(metric.otherwise, UP)}"
    )
