"""The page of metrics. In: their declarations. Out: Markdown in groups, with links to what they name."""

from __future__ import annotations

from collections.abc import Sequence

from proxima.runs.glossary import FINETUNING, GLOSSARY, GROUPS, Metric
from tools.reference.source import anchor, linked

UP = "../"
HEAD = """# Metrics

What a run logs at every step: in `metrics.jsonl`, in its report and in the studio (behind the question mark
of a chart). Each metric has a title and a unit, as charts show them, and says what it means, what is healthy
and what to do otherwise. The numbers under *healthy* come from the tests and the demo, or are rules of thumb
of the field; a trend says more than a number. A name that ends in `/*` stands for every name that begins so.
`nan` means that there was nothing to measure.

## Metrics of your own

A subclass of `PPOTrainer`, or a worker of your own, may log more numbers: `train` logs every number in what
`ppo_step` returns. A name must be declared, so that a typo does not go unnoticed: an undeclared one stops the
run with an error that names the nearest declared metric. There are two ways to add a name.

- Log it as `custom/NAME` (on validation prompts, `custom/NAME` becomes `validation/custom/NAME`). Every page
  draws it under *Other metrics*, without a unit.
- Declare it once, before training. Pages that this process writes show it with its title, unit and meaning;
  other processes, which do not know the declaration, draw it under its name.

```python
from proxima.runs.glossary import Metric, declare

declare(
    Metric(
        "reading_ease",
        title="Reading ease",
        unit="Flesch score",
        group="responses",
        meaning="Mean Flesch reading ease of the step's responses.",
    )
)
```

A metric of the package itself is declared in `src/proxima/runs/metric_declarations.py`, and nowhere else:
report, comparison, evaluation, studio and this page take titles, units and groups from there. Old run
folders open whatever names they hold.
"""
FINETUNING_TEXT = (
    "What [`proxima sft`](commands/sft.md) and [`proxima reward`](commands/reward.md) measure and print."
)


def metrics_page() -> str:
    sections = []
    for key, group in GROUPS.items():
        metrics = [metric for metric in GLOSSARY.values() if metric.group == key]
        if metrics:
            sections.append(_section(group.title, group.text, metrics))
    sections.append(_section(GROUPS["finetuning"].title, FINETUNING_TEXT, [*FINETUNING.values()]))
    return "\n\n".join([HEAD.strip(), *sections])


def _section(title: str, text: str, metrics: Sequence[Metric]) -> str:
    entries = [_entry(metric) for metric in metrics if metric.healthy]
    short = [
        f"- `{metric.name}` ({_label(metric)}): {linked(metric.meaning, UP)}"
        for metric in metrics
        if not metric.healthy
    ]
    rest = "\n".join([*(["Besides these:\n"] if entries else []), *short]) if short else ""
    return "\n\n".join(part for part in (f"## {title}", text, *entries, rest) if part)


def _label(metric: Metric) -> str:
    return f"{metric.title}, {metric.unit}" if metric.unit else metric.title


def _entry(metric: Metric) -> str:
    return (
        f'<a id="{anchor(metric.name)}"></a>\n\n### `{metric.name}`\n\n*{_label(metric)}.* '
        f"{linked(metric.meaning, UP, metric.name)}\n\n"
        f"- **Healthy:** {linked(metric.healthy, UP)}\n- **Otherwise:** {linked(metric.otherwise, UP)}"
    )
