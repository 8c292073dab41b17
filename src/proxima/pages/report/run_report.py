"""The report of a run. In: a `Run`, finished or not. Out: report.html."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from proxima.config import PPOConfig, shareable, trusted_flags
from proxima.core.chat_turns import in_lines
from proxima.core.json_record import Record
from proxima.pages.report.findings import RunFinding
from proxima.pages.report.report_curves import charts_by_group, constants, frontier
from proxima.pages.report.report_page import (
    Page,
    code,
    conclusion,
    findings,
    folded,
    heading,
    numbers,
    pairs,
    paragraph,
    settings,
    table,
)
from proxima.pages.report.report_samples import before_and_after, embedded_tokens
from proxima.pages.report.run_facts import Story, read_data, tell
from proxima.pages.report.short_numbers import short
from proxima.pages.report.signs_against_kl import signs_against_kl
from proxima.runs import Run, title_of, unit_of

CAUTION = "# only if you trust whoever made the run: these run code, or call servers, that its settings name"
STATES = {
    "training": "This run is still training: the report shows it as it is now.",
    "stopped": "This run stopped early (interrupted, killed or failed).",
}


def write_report(run: Run, path: str | Path | None = None) -> Path:
    """Into the run's own folder where no path is given."""
    story, page = tell(run), Page(run.name, "run report")
    _first_screen(page, run, story)
    _findings(page, story.findings)
    marks = [{"x": warning["step"], "text": _warning(warning)} for warning in story.warnings]
    groups = charts_by_group(run.metrics(), marks, run.best_constants)
    for group, charts in groups[:1]:
        page.section(group.title, paragraph(group.text, "soft"), page.plots(charts))
    if (traded := frontier(run.metrics(), run.evaluation)) is not None:
        page.section("Reward against KL", page.plots([traded, *signs_against_kl(run.metrics())]))
    _samples(page, run)
    for group, charts in groups[1:]:
        page.section(group.title, paragraph(group.text, "soft"), page.plots(charts))
    if same := constants(run.metrics()):
        rows = [(title_of(name), name, short(value), unit_of(name)) for name, value in same.items()]
        told = table(("metric", "name", "value", "unit"), rows, right=4)
        page.section("Constant metrics", folded(f"{len(rows)} metrics had one value at every step", told))
    _warnings(page, story)
    _how(page, run)
    return page.write(Path(path) if path else run.path / "report.html")


def _first_screen(page: Page, run: Run, story: Story) -> None:
    state = STATES.get(run.state, "")
    reason = str((run.results or {}).get("stop_reason") or "") if run.state == "finished" else ""
    page.section(
        "",
        heading(run.name),
        paragraph(state, "state") if state else "",
        conclusion(story.conclusion, story.better),
        *(paragraph(sentence) for sentence in story.what),
        numbers(story.cards),
        paragraph(f"Why it ended: {shareable(reason)}.", "soft") if reason else "",
        paragraph(_alarm_words(len(story.warnings)), "soft"),
    )


def _findings(page: Page, found: Sequence[RunFinding]) -> None:
    """The questions that a run is trained to answer, with the numbers that answer them."""
    drawn = [quality_chart(each.points) for each in found if len(each.points) > 1]
    page.section("Findings", findings(found), page.plots(drawn) if drawn else "")


def quality_chart(points: Sequence[tuple[float, float, float]]) -> Record:
    """Win rate by judges against KL, in order of steps."""
    return {
        "title": "Win rate by judges against KL",
        "note": "Judges are not trained on: where this curve turns down, more reward is no more quality.",
        "x": f"{title_of('validation/kl')} ({unit_of('validation/kl')})",
        "y": unit_of("validation/win_rate"),
        "free": True,
        "series": [{"name": "win rate", "points": [[x, y, f"step {step:g}"] for x, y, step in points]}],
    }


def _alarm_words(count: int) -> str:
    if not count:
        return "No guard raised an alarm."
    return f"The guards raised {count} alarm{'s' if count > 1 else ''}: see “Warnings”."


def _samples(page: Page, run: Run) -> None:
    source, rows = before_and_after(run)
    if rows:
        page.section("Before and after", paragraph(source, "soft"), pairs(rows))
    elif latest := run.samples():
        last = latest[-1]["step"]
        shown = [
            (
                in_lines(str(s.get("prompt", "")), s.get("turns")),
                str(s.get("text", "")),
                short(_number(s.get("reward"))),
            )
            for s in run.samples(last)
        ]
        told = f"Responses of step {last}. No earlier responses were logged to compare them with."
        page.section(
            "Responses of the last step",
            paragraph(told, "soft"),
            table(("prompt", "response", "reward"), shown[:8], right=2),
        )
    steps = embedded_tokens(run)
    if steps:
        logged = len(run.token_steps())
        which = ", ".join(str(step["step"]) for step in steps)
        held = (
            f"{len(steps)} of {logged} logged; `proxima studio` shows all"
            if len(steps) < logged
            else "all logged steps"
        )
        if left_out := sum(step["left_out"] for step in steps):
            held += f"; {left_out} of their samples are too large for this file"
        page.section(
            "Token microscope",
            paragraph(
                "What training saw in each token of a response: its log-probability, reward, value and "
                "advantage. Choose a step, a sample, and a second step to compare with.",
                "soft",
            ),
            page.microscope(steps),
            paragraph(f"Steps in this file: {which} ({held}).", "soft"),
        )


def _warnings(page: Page, story: Story) -> None:
    if not story.warnings:
        return
    rows = [
        (str(w["step"]), str(w.get("guard", "")), str(w.get("message", "")), str(w.get("action", "")))
        for w in story.warnings
    ]
    most = 200
    more = paragraph(f"{len(rows) - most} more are in warnings.jsonl.", "soft") if len(rows) > most else ""
    page.section("Warnings", table(("step", "guard", "message", "action"), rows[:most], right=4), more)


def _how(page: Page, run: Run) -> None:
    """Settings, environment, checkpoints, and the commands that repeat the run."""
    config = {name: shareable(str(value)) for name, value in run.config.items()}
    defaults = {name: str(value) for name, value in PPOConfig().to_dict().items()}
    changed = {name: value for name, value in config.items() if value != defaults.get(name)}
    rest = {name: value for name, value in config.items() if name not in changed}
    page.section(
        "Settings",
        paragraph("Settings that differ from the defaults:", "soft"),
        settings(changed),
        folded(f"{len(rest)} settings at their defaults", settings(rest)) if rest else "",
    )
    if run.environment:
        page.section("Environment", folded("Versions and hardware", settings(_flat(run.environment))))
    if checkpoints := run.checkpoints():
        rows = [
            (
                c["name"],
                str(c["step"]),
                "" if c["eval_reward"] is None else short(c["eval_reward"], 4),
                "best" if c["best"] else "",
            )
            for c in checkpoints
        ]
        page.section("Checkpoints", table(("folder", "step", "evaluation", ""), rows))
    page.section("How to repeat it", code(repeat_commands(run)))
    if run.problems:
        page.section("What could not be read", *(paragraph(problem) for problem in run.problems))


def repeat_commands(run: Run) -> str:
    """Shell lines; they say what the run did not record."""
    data, commit = read_data(run), run.environment.get("git_commit")
    lines = []
    if commit:
        dirty = "   # with uncommitted changes" if run.environment.get("git_changes") else ""
        lines.append(f"git checkout {shlex.quote(str(commit))}{dirty}")
    words = [
        "proxima",
        "train",
        "--config",
        str(run.path / "config.yaml"),
        "--run-name",
        f"{run.path.resolve().name}-again",
    ]
    for name in ("data", "validation", "limit", "epochs"):
        if data.get(name):
            words += [f"--{name}", str(data[name])]
    if not data.get("data"):
        words += ["--data", "PROMPTS"]
        lines.append("# trained from Python: replace PROMPTS by the prompts that were used there")
    trust = ["--trust-remote-code"] if run.config.get("trust_remote_code") is True else []
    named = _named(run)
    if named or trust:
        lines.append(CAUTION)
    lines.append(shlex.join([*words, *trust]))
    again = ["proxima", "eval", str(run.path), "--data", "HELD_OUT", *named, *trust]
    lines.append(f"{shlex.join(again)}   # compared with the reference")
    return shareable("\n".join(lines))


def _named(run: Run) -> list[str]:
    """Functions and servers, which `eval` only calls where the command line names them."""
    try:
        return trusted_flags(PPOConfig.from_dict(run.config))
    except (ValueError, TypeError):  # a broken run has a report too
        return []


def _flat(values: Record, before: str = "") -> Record:
    flat: Record = {}
    for name, value in values.items():
        flat |= _flat(value, f"{before}{name} ") if isinstance(value, dict) else {f"{before}{name}": value}
    return flat


def _warning(warning: Record) -> str:
    return f"{warning.get('guard', 'guard')}: {warning.get('message', '')}"[:200]


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
