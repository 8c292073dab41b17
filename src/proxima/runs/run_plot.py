"""`Plot`: curves for a notebook.

In: metrics and names. Out: an object that shows itself as charts; nothing to install.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from pathlib import Path

from proxima.core.json_record import Record
from proxima.pages.web import LOOK, PARTS, make_page, read_script, read_style
from proxima.runs.glossary import chart_of
from proxima.runs.thin_curves import thin

DEFAULT = ("avg_reward", "kl", "response_length")
HEIGHT = 340  # of one chart with its legend, in pixels
SCRIPT = """
for (const spec of JSON.parse(byId("data").textContent).charts) {
  const place = element("div", { className: "plot" });
  document.body.append(place);
  drawChart(place, spec);
}
"""
STYLE = "body { display: grid; gap: 1rem; padding: 0.5rem; min-height: 0; background: var(--card); }"


@dataclass(frozen=True, repr=False)
class Plot:
    """Charts below each other, as one page inside a frame that can neither load anything nor touch the
    notebook."""

    charts: list[Record]

    @classmethod
    def of(cls, metrics: Mapping[str, Sequence[float]], names: Sequence[str | Sequence[str]] = ()) -> Plot:
        groups = [[name] if isinstance(name, str) else list(name) for name in names or DEFAULT]
        for name in (name for group in groups for name in group):
            if name not in metrics and (names or not metrics["step"]):
                near = get_close_matches(name, metrics, 3, 0.4)
                hint = (
                    f"did you mean {' or '.join(near)}?"
                    if near
                    else f"there are {', '.join(list(metrics)[:8])}"
                )
                raise ValueError(f"the run has logged no {name!r}; {hint}")
        return cls([_chart(metrics, group) for group in groups if all(name in metrics for name in group)])

    @property
    def html(self) -> str:
        """A whole page."""
        return make_page(
            "Run", "", read_script(*PARTS) + SCRIPT, read_style(*LOOK) + STYLE, {"charts": self.charts}
        )

    def save(self, path: str | Path) -> Path:
        target = Path(path)
        target.write_text(self.html, encoding="utf-8")
        return target

    def __repr__(self) -> str:
        return f"Plot of {'; '.join(chart['title'] for chart in self.charts)}"

    def _repr_html_(self) -> str:
        height = HEIGHT * max(len(self.charts), 1)
        return (
            f'<iframe srcdoc="{escape(self.html)}" sandbox="allow-scripts" title="Curves of a run" '
            f'style="width: 100%; height: {height}px; border: 0"></iframe>'
        )


def _chart(metrics: Mapping[str, Sequence[float]], names: Sequence[str]) -> Record:
    chart = chart_of(names)
    series = [{"name": name, "points": thin(metrics["step"], metrics[name])} for name in names]
    return {"title": chart.title, "x": "step", "y": chart.unit, "series": series}
