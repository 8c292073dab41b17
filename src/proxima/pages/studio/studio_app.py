"""The studio's routes. In: a library of runs, and a feedback store if there is one. Out: an app with the page
and its routes.

    GET /api/runs                            one line per run
    GET /api/run?name=                       a run: config, environment, end, warnings, charts, logged steps
    GET /api/curves?name=&metric=&after=     points after a step, with what else is new; all of them where the
                                             run was cut back
    GET /api/findings?name=                  what the run shows, and what the doctor said
    GET /api/log?name=&after=                the log after a byte
    GET /api/samples?name=&step=             the same prompts at several steps
    GET /api/tokens?name=&step=              token records of a step
    GET /api/compare?name=&metric=           several runs over each other

The label page is at /label with routes of its own. Titles and units of metrics come from their declarations.
Replies are plain ASCII JSON, so that whatever a model wrote, half a surrogate pair included, arrives
unchanged.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.core.chat_turns import cut_text
from proxima.core.json_record import Record, RecordView
from proxima.pages.label import PAGE, Store, add_label_routes
from proxima.pages.report import find, held_out
from proxima.pages.studio.run_library import SHOWN, Library, Open, said, state_of
from proxima.pages.studio.sample_table import TEXT, follow, text_of
from proxima.pages.studio.studio_comparison import Member, compare
from proxima.pages.studio.studio_curves import band, curve, groups
from proxima.pages.web import Site, make_app
from proxima.runs import Run, plain, resume_command, title_of, unit_of

if TYPE_CHECKING:
    from fastapi import FastAPI, Response

STATIC = Path(__file__).parent / "static"
MOST = 12  # runs in one comparison
MESSAGES = 500  # alarms of a run that are shown, the newest
HEAD = {**SHOWN, "ppo": (*SHOWN["ppo"], "seconds")}  # metrics at the head of a run


def make_studio_app(library: Library, site: Site, store: Store | None = None) -> FastAPI:
    from fastapi import Query

    app = make_app(site, STATIC, **({"label": PAGE} if store else {}))
    if store:
        add_label_routes(app, store)

    @app.get("/api/runs")
    def runs() -> Response:
        titles = {name: title_of(name) for name in SHOWN["ppo"]}
        found = library.list()
        return answer(
            {"folder": str(library.folder), "label": store is not None, "titles": titles, "runs": found}
        )

    @app.get("/api/run")
    def run(name: str) -> Response:
        with library.open(name) as opened:
            return answer(run_of(opened))

    @app.get("/api/curves")
    def curves(name: str, metric: list[str] = Query([]), after: int = -1, edition: str = "") -> Response:  # noqa: B008
        with library.open(name) as opened:
            return answer(curves_of(opened, metric, after, edition))

    @app.get("/api/samples")
    def samples(name: str, step: list[int] = Query([])) -> Response:  # noqa: B008
        with library.open(name) as opened:
            return answer(follow(opened.run.samples(), step))

    @app.get("/api/tokens")
    def tokens(name: str, step: int) -> Response:
        with library.open(name) as opened:
            return answer({"step": step, "samples": opened.run.tokens(step)})

    @app.get("/api/compare")
    def compare_runs(name: list[str] = Query([]), metric: list[str] = Query([])) -> Response:  # noqa: B008
        if len(name) > MOST:
            raise ValueError(f"{len(name)} runs are too many to compare at once; choose {MOST} or fewer")
        members = []
        for each in dict.fromkeys(name):
            with library.open(each) as opened:
                run, metrics = opened.run, opened.run.metrics()
                members.append(Member(each, run.state, run.config, metrics))
        return answer(compare(members, metric))

    _add_reading_routes(app, library)
    return app


def _add_reading_routes(app: FastAPI, library: Library) -> None:
    """What is read rather than drawn."""

    @app.get("/api/findings")
    def findings(name: str) -> Response:
        with library.open(name) as opened:
            return answer(findings_of(opened.run))

    @app.get("/api/log")
    def log(name: str, after: int = -1) -> Response:
        with library.open(name) as opened:
            text, end = opened.run.log_text(after)
            return answer({"text": text, "end": end})


def answer(value: object) -> Response:
    from fastapi import Response

    try:
        return Response(
            json.dumps(plain(value), separators=(",", ":"), default=str), media_type="application/json"
        )
    except RecursionError:
        raise ValueError("a file of this run is nested too deep to be shown") from None


def head_of(opened: Open, metrics: dict[str, list[float]]) -> Record:
    """What may change from one look to the next, in few bytes."""
    run = opened.run
    last = {name: column[-1] for name, column in metrics.items() if column}
    steps = run.token_steps()
    return {
        "name": run.name,
        "state": state_of(run, last.get("seconds")),
        "edition": opened.edition,
        "metrics": len(metrics),
        "changed": run.changed,
        "step": int(last.get("step", 0)),
        "last": [
            {"name": name, "title": title_of(name), "unit": unit_of(name), "value": last.get(name)}
            for name in HEAD[run.kind]
        ],
        "warnings": len(run.warnings()),
        "token_steps": [len(steps), steps[-1] if steps else 0],
        **said(run),
    }


def run_of(opened: Open) -> Record:
    run = opened.run
    metrics = run.metrics()
    return {
        **head_of(opened, metrics),
        "kind": run.kind,
        "path": str(run.path),
        "command": command_of(run),
        "config": run.config,
        "environment": run.environment,
        "results": run.results,
        "evaluation": run.evaluation,
        "checkpoints": run.checkpoints(),
        "bundles": bundles_of(run),
        "messages": [_message(each) for each in run.warnings()[-MESSAGES:]],
        "tokens": run.token_steps(),
        "groups": groups(metrics),
    }


def bundles_of(run: Run) -> list[Record]:
    """Recorded steps, why each was recorded, and the commands that replay and show it."""
    alarms = run.warnings()
    return [
        {
            **each,
            "reason": _reason(each["step"], alarms) if each["alarmed"] else "",
            "command": shlex.join(["proxima", "replay", each["path"]]),
            "show": shlex.join(["proxima", "replay", each["path"], "--show"]),
        }
        for each in run.bundles()
    ]


def _reason(step: int, alarms: Sequence[RecordView]) -> str:
    """The alarm of a step, else that of the step after it, where there was one; else that step failed."""
    for place in (step, step + 1):
        if raised := [alarm for alarm in alarms if alarm["step"] == place]:
            told = _message(raised[0])
            where = "" if place == step else f", at step {place}"
            return f"alarm {told['guard']}{where}: {told['message']}"
    return f"step {step + 1} failed"


def _message(alarm: RecordView) -> Record:
    """An alarm as the page shows it."""
    words = {name: cut_text(text_of(alarm, name), TEXT) for name in ("guard", "message", "action")}
    return {"step": alarm["step"], **words}


def command_of(run: Run) -> Record:
    """The command line that made a run, where it was given, and the one that resumes it where it stopped."""
    words, stopped = run.origin.get("command", []), run.kind == "ppo" and run.state == "stopped"
    return {
        "line": shlex.join(words),
        "folder": run.origin.get("folder", ""),
        "resumed": [shlex.join(each) for each in run.origin.get("resumed", [])],
        "resume": resume_command(run.path) if stopped else "",
    }


def findings_of(run: Run) -> Record:
    metrics = run.metrics()
    given = (metrics, run.samples(), held_out(run, metrics), run.best_constants)
    found = find(*given) if run.kind == "ppo" else []
    return {
        "findings": [asdict(each) for each in found],
        "checks": run.origin.get("checks"),
        "examinations": run.examinations,
    }


def curves_of(opened: Open, names: list[str], after: int, edition: str) -> Record:
    """Points after a step if the page has the others of this edition; else all of them, and `anew` says
    so."""
    metrics = opened.run.metrics()
    steps = metrics["step"]
    anew = edition != opened.edition or after > (steps[-1] if steps else -1)
    since, there = -1 if anew else after, [name for name in names if name in metrics]
    return {
        **head_of(opened, metrics),
        "anew": anew,
        "curves": {name: curve(steps, metrics[name], since) for name in there},
        "bands": {name: rows for name in there if (rows := band(metrics, name, since))},
    }
