"""The page's side on the server. In: a store. Out: an app with the page and its routes.

    GET  /api/annotators         the mode, the instructions, and the names that have answered
    GET  /api/state?annotator=   what to show: the next item with its sides in shown order, progress, the last
    answer
    POST /api/answer             {annotator, item, choice, seconds, note} -> the next state
    POST /api/undo               {annotator, answer} -> the state with the item that lost its answer
    GET  /api/summary            counts and agreement

The page never learns which side is a and which is b, which model wrote it, nor which item is a control
question.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from proxima.core.chat_turns import turns_of
from proxima.core.json_record import Record
from proxima.pages.label.label_export import agreement_of
from proxima.pages.label.label_store import Item, Store, check_annotator
from proxima.pages.web import Conflict, Site, make_app

if TYPE_CHECKING:
    from fastapi import FastAPI


PAGE = Path(__file__).parent / "static"


def make_label_app(store: Store, site: Site) -> FastAPI:
    app = make_app(site, PAGE)
    add_label_routes(app, store)
    return app


def add_label_routes(app: FastAPI, store: Store) -> None:
    """What the page asks for; the studio has these routes too."""

    @app.get("/api/state")
    def state(annotator: str) -> Record:
        return state_of(store, check_annotator(annotator))

    @app.get("/api/annotators")
    def annotators() -> Record:
        return {
            "mode": store.mode,
            "annotators": store.annotators(),
            "instructions": store.instructions,
        }

    @app.get("/api/summary")
    def summary() -> Record:
        return page_summary(store)

    @app.post("/api/answer")
    def answer(body: Record) -> Record:
        annotator = check_annotator(body.get("annotator"))
        item, choice = store.item_of(_number(body, "item")), str(body.get("choice"))
        try:
            store.add_answer(item, annotator, choice, body.get("seconds", 0), body.get("note", ""))
        except Conflict as error:
            raise Conflict(str(error), state_of(store, annotator)) from None
        return state_of(store, annotator)

    @app.post("/api/undo")
    def undo(body: Record) -> Record:
        annotator = check_annotator(body.get("annotator"))
        try:
            item = store.undo(annotator, _number(body, "answer"))
        except Conflict as error:
            raise Conflict(str(error), state_of(store, annotator)) from None
        return state_of(store, annotator, None if item is None else store.item(item))


def page_summary(store: Store) -> Record:
    """Counts and agreement as annotators may see them: a control question counts as any other item, and
    nothing says which side or model was chosen. Agreement moves with settled answers only."""
    items, answers = store.counts()
    return {
        "items": items,
        "answers": answers,
        "annotators": dict(Counter(answer.annotator for answer in store.answers())),
        **agreement_of(store.settled_answers(), store.mode),
        "mode": store.mode,
        "db": str(store.path),
    }


def state_of(store: Store, annotator: str, item: Item | None = None) -> Record:
    """What the page shows to one annotator."""
    item = item or store.next_item(annotator)
    done, left = store.progress(annotator)
    return {
        "mode": store.mode,
        "annotator": annotator,
        "done": done,
        "total": done + left,
        "last": store.last_answer(annotator),
        "item": None if item is None else shown(store, item, annotator),
    }


def shown(store: Store, item: Item, annotator: str) -> Record:
    """An item as this annotator sees it."""
    sides = [{"text": item.a, "ended": item.a_ended}]
    if item.b is not None:
        sides.append({"text": item.b, "ended": bool(item.b_ended)})
    return {
        "id": store.handle(item.id),
        "prompt": item.prompt,
        "turns": turns_of(item.prompt, item.turns),
        "sides": sides[::-1] if store.is_swapped(item.id, annotator) else sides,
    }


def _number(body: Record, name: str) -> int:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{name} must be an integer of at least 0")
    return value
