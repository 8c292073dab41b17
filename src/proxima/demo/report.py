"""The demo's report. In: results and examples. Out: one self-contained HTML file. All model text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from proxima.demo.judge import Judgement
from proxima.world.posts import Post

Example = tuple[Post, str, float, str, float]  # post, summary and gold before, summary and gold after

STYLE = """
:root { color-scheme: light dark; --line: #8884; --new: #0a7; --old: #888; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .35rem .6rem; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } th { text-align: left; }
.big { display: flex; gap: 1rem; flex-wrap: wrap; } .big div { flex: 1 9rem; border: 1px solid var(--line); border-radius: 8px;
padding: .7rem 1rem; } .big b { display: block; font-size: 1.7rem; } .post { color: var(--old); font-size: .9rem; }
.example { border-left: 3px solid var(--line); padding-left: .8rem; margin: 1rem 0; } .after { color: var(--new); }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
"""


def write_report(path: Path, results: dict[str, Any], examples: Sequence[Example]) -> Path:
    """Write the page and return its path."""
    sft, ppo, win = results["sft"], results["ppo"], results["win_rate_by_gold"]
    model, curve = results["reward_model"], results["curve"]
    body = f"""<h1>A language model that learned from preferences</h1>
<p>A small model had learned to summarise posts by imitating people who do it well and badly. It was then shown
{results["reward_model"]["preferences"]:,} choices between two of its own summaries, a reward model learned to predict them, and
{results["settings"]["steps"]} steps of PPO trained the model to write what the reward model likes. The <em>gold score</em>
below is the true quality of a summary (facts kept, none invented, short, finished), which training never saw.</p>
<div class="big"><div>gold score<b>{sft["gold"]:.2f} → {ppo["gold"]:.2f}</b>of at most 1</div>
<div>wins against before<b>{100 * win["rate"]:.0f} %</b>95 %: {100 * win["low"]:.0f} to {100 * win["high"]:.0f} %</div>
<div>distance travelled<b>{ppo["kl"]:.1f} nats</b>KL a summary</div></div>
<h2>Before and after, on posts it had never seen</h2>{"".join(_example(item) for item in examples)}
<h2>All numbers</h2><table><tr><th></th><th class="n">before (SFT)</th><th class="n">after (PPO)</th></tr>
{"".join(_row(label, sft[name], ppo[name]) for label, name in Judgement.ROWS.items())}</table>
<h2>Reward while training</h2>{_plot([(item["step"], item["avg_reward"]) for item in curve], "PPO step", "reward-model score")}
<h2>How good is the reward model?</h2>
<p>On {model["pairs"]} held-out choices it agrees with the people {100 * model["accuracy"]:.1f} % of the time; with the gold
score, the further two summaries lie apart the more often:</p>
<table><tr><th>gold scores differ by</th><th class="n">pairs</th><th class="n">ordered right</th></tr>
{"".join(_gap(name, row) for name, row in model["by_gold_gap"].items())}</table>
<p class="post">Seed {results["seed"]}. The people have one weakness: they like summaries that open with “basically,” more than
they should. Watch for it in the examples: a reward model learns its teachers' weaknesses too.</p>"""
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Proxima demo</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")
    return path


def _example(item: Example) -> str:
    post, old, old_gold, new, new_gold = item
    told = escape(post.prompt.splitlines()[2].removeprefix("POST: "))
    return (
        f'<div class="example"><div class="post">{told}</div><div>before ({old_gold:.2f}): {escape(old)}</div>'
        f'<div class="after">after ({new_gold:.2f}): {escape(new)}</div></div>'
    )


def _row(label: str, before: float, after: float) -> str:
    return f'<tr><td>{escape(label)}</td><td class="n">{before:.3f}</td><td class="n">{after:.3f}</td></tr>'


def _gap(name: str, row: dict[str, float]) -> str:
    return f'<tr><td>{escape(name)}</td><td class="n">{row["pairs"]}</td><td class="n">{100 * row["accuracy"]:.1f} %</td></tr>'


def _plot(points: Sequence[tuple[float, float]], across: str, up: str) -> str:
    """A line chart as SVG."""
    width, height, margin = 640, 240, 44
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high = min(ys), max(ys)
    span_x, span_y = (max(xs) - min(xs)) or 1, (high - low) or 1

    def place(x: float, y: float) -> tuple[float, float]:
        inside = (width - 2 * margin, height - 2 * margin)
        return margin + (x - min(xs)) / span_x * inside[0], height - margin - (y - low) / span_y * inside[1]

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    levels = {y: f"{place(min(xs), y)[1]:.1f}" for y in (low, (low + high) / 2, high)}
    ticks = "".join(
        f'<text x="{margin - 6}" y="{at}" dy="4" text-anchor="end">{y:.2f}</text>'
        f'<line x1="{margin}" x2="{width - margin}" y1="{at}" y2="{at}" stroke="#8884"/>'
        for y, at in levels.items()
    )
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(up)} by {escape(across)}">{ticks}'
        f'<polyline points="{line}" fill="none" stroke="#0a7" stroke-width="2"/>'
        f'<text x="{margin}" y="{height - margin + 18}">{min(xs):g}</text>'
        f'<text x="{width - margin}" y="{height - margin + 18}" text-anchor="end">{max(xs):g}</text>'
        f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">{escape(across)}</text>'
        f'<text x="{margin}" y="16">{escape(up)}</text></svg>'
    )
