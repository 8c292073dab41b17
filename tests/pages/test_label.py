"""Labelling without a browser: the store under threads, processes and kill, who sees what, agreement,
export, sampling."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from proxima.cli import main
from proxima.config import PPOConfig
from proxima.finetuning import read_preferences
from proxima.pages.label import (
    Item,
    Store,
    export,
    in_words,
    keep_least_sure,
    load_trained_reward,
    read_controls,
    summarize,
)
from proxima.pages.label.agreement import cohen_kappa, krippendorff_alpha, raw_agreement
from proxima.pages.label.label_export import rows_of
from proxima.pages.label.label_items import TRIES, read_items, sample_items
from proxima.pages.label.label_page import page_summary, state_of
from proxima.pages.label.label_store import CONTROL_EVERY
from proxima.pages.web import Conflict
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples
from tests.helpers import shake

SOURCE = Path(__file__).parents[2] / "src"


def pairs(count, start=0):
    return [
        Item(f"prompt {i}", f"left {i}", f"right {i}", True, i % 2 == 0, "one", "two")
        for i in range(start, start + count)
    ]


@pytest.fixture
def make_store(tmp_path):
    def make(items=(), **settings):
        store = Store(tmp_path / "f.db", **settings)
        store.add_items(items)
        return store

    return make


def choose(store, item, annotator, side):
    """Answer with the true side, as a person would who reads the texts."""
    state = state_of(store, annotator, store.item(item))
    texts = [shown["text"] for shown in state["item"]["sides"]]
    return store.add_answer(item, annotator, str(1 + texts.index(getattr(store.item(item), side))), 1.5)


# --- the store ---


def test_items_come_back_as_they_were_and_are_added_once(make_store, tmp_path):
    hostile = Item("<b>\x00é\u202e😀", "", "x" * 100_000, False, True, "m", "n")
    store = make_store([hostile, *pairs(2)])
    assert [item.prompt for item in store.items()] == [hostile.prompt, "prompt 0", "prompt 1"]
    first = store.items()[0]
    assert (first.a, first.b, first.a_ended, first.b_ended, first.a_model, first.b_model) == (
        "",
        "x" * 100_000,
        False,
        True,
        "m",
        "n",
    )
    turned = [Item(item.prompt, item.b, item.a, item.b_ended, item.a_ended, "other", "") for item in pairs(2)]
    assert store.add_items([*turned, *pairs(3)]) == 1
    assert len(Store(tmp_path / "f.db").items()) == 4


def test_an_answer_is_stored_once_refused_when_it_differs_and_free_again_after_undo(make_store):
    store = make_store(pairs(2))
    first = store.add_answer(1, "Ann", "1", 2.5)
    assert store.add_answer(1, "Ann", "1", 9) == first  # sent twice
    with pytest.raises(Conflict, match="already"):
        store.add_answer(1, "Ann", "tie")
    with pytest.raises(Conflict, match="already"):
        store.add_answer(1, "Ann", "2")
    second = store.add_answer(2, "Ann", "skip")
    with pytest.raises(Conflict, match="later answer"):
        store.undo("Ann", first)
    assert store.undo("Bob", second) is None  # not his
    assert store.undo("Ann", second) == 2
    assert store.undo("Ann", second) is None  # sent twice
    [answer] = store.answers()
    assert (answer.item, answer.annotator, answer.seconds) == (1, "Ann", 2.5)
    assert answer.choice == ("b" if answer.swapped else "a")
    assert store.add_answer(2, "Ann", "tie") > second
    assert time.strftime("%Y-%m-%dT", time.gmtime()) in answer.time


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, "Ann", "1"), "no item 3"),
        ((1, "Ann", "a"), "choice"),
        ((1, "Ann", "5"), "choice"),
        ((1, " ", "1"), "name"),
        ((1, "x" * 61, "1"), "name"),
        ((1, "a\nb\x07", "1"), "name"),
        ((1, "Ann", "1", float("nan")), "seconds"),
        ((1, "Ann", "1", -1), "seconds"),
        ((1, "Ann", "1", True), "seconds"),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(make_store, arguments, message):
    store = make_store(pairs(2))
    with pytest.raises(ValueError, match=message):
        store.add_answer(*arguments)
    assert store.answers() == []


def test_names_have_one_spelling(make_store):
    store = make_store(pairs(1))
    store.add_answer(1, "  Zoe\u0308  K ", "1")
    assert store.annotators() == ["Zoë K"]


def test_other_files_are_refused_in_words(tmp_path):
    (tmp_path / "text.db").write_text("not a database" * 100)
    with pytest.raises(ValueError, match=r"cannot use .*text\.db"):
        Store(tmp_path / "text.db")
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE t (x)")
    with pytest.raises(ValueError, match="something else"):
        Store(tmp_path / "other.db")
    Store(tmp_path / "new.db")
    with sqlite3.connect(tmp_path / "new.db") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ValueError, match="schema version 99"):
        Store(tmp_path / "new.db")
    with pytest.raises(ValueError, match="cannot use"):
        Store(tmp_path / "no" / "such" / "folder.db")


def test_a_file_keeps_its_mode_and_its_seed(make_store, tmp_path):
    make_store(mode="ratings", seed=7)
    again = Store(tmp_path / "f.db", seed=8)
    assert (again.mode, again.seed) == ("ratings", 7)
    with pytest.raises(ValueError, match="holds ratings; for pairs"):
        Store(tmp_path / "f.db", "pairs")
    with pytest.raises(ValueError, match="item 1 is one of pairs"):
        again.add_items(pairs(1))
    with pytest.raises(ValueError, match="lone surrogate"):
        again.add_items([Item("a", "ok"), Item("b", "\ud800")])
    assert again.items() == []
    for overlap in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="overlap"):
            Store(tmp_path / "f.db", overlap=overlap)


# --- many at once ---

WORKER = """
import sys
from proxima.pages.label import Store
store = Store(sys.argv[1], overlap=1)
while (item := store.next_item(sys.argv[2])) is not None:
    store.add_answer(item.id, sys.argv[2], "1", 0.1)
    print(item.id, flush=True)
"""


def start_worker(path, name):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(path), name], env=environment, stdout=subprocess.PIPE, text=True
    )


def test_processes_and_threads_together_lose_and_double_nothing(make_store):
    store = make_store(pairs(30), overlap=1)
    processes = [start_worker(store.path, name) for name in ("Ann", "Ann", "Bob")]  # two tabs of one person
    refused = []

    def label(name):
        while (item := store.next_item(name)) is not None:
            try:
                store.add_answer(item.id, name, "2" if name == "Eve" else "1")
            except Conflict:
                refused.append(item.id)

    threads = [threading.Thread(target=label, args=[name]) for name in ("Cy", "Cy", "Eve")]
    for thread in threads:
        thread.start()
    for worker in (*threads, *processes):
        worker.join() if isinstance(worker, threading.Thread) else worker.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert Counter(answer.annotator for answer in store.answers()) == {
        "Ann": 30,
        "Bob": 30,
        "Cy": 30,
        "Eve": 30,
    }
    assert len({(answer.item, answer.annotator) for answer in store.answers()}) == 120
    assert not refused
    with (
        pytest.raises(sqlite3.IntegrityError),
        sqlite3.connect(store.path) as db,
    ):  # the file itself refuses a second one
        db.execute(
            "INSERT INTO answers SELECT id + 1000, item, annotator, choice, swapped, seconds, time FROM "
            "answers"
        )


def test_what_was_confirmed_survives_kill_9(make_store):
    store = make_store(pairs(400), overlap=1)
    worker = start_worker(store.path, "Ann")
    confirmed = [int(worker.stdout.readline()) for _ in range(20)]
    worker.send_signal(signal.SIGKILL)
    confirmed += [int(line) for line in worker.stdout.read().split()]
    worker.wait()
    again = Store(store.path)
    stored = [answer.item for answer in again.answers()]
    assert 20 <= len(confirmed) < 400
    assert stored[: len(confirmed)] == confirmed
    assert len(stored) <= len(confirmed) + 1  # one may have been written but not confirmed
    with sqlite3.connect(store.path) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    again.add_answer(again.next_item("Ann").id, "Ann", "tie")


# --- who sees what ---


def test_sides_are_shuffled_evenly_the_same_every_time_and_put_right_again(make_store):
    store = make_store(pairs(100), overlap=1)
    orders = {}
    for name in ("Ann", "Bob"):
        for item in range(1, 101):
            state = state_of(store, name, store.item(item))
            assert state == state_of(store, name, store.item(item))
            texts = [side["text"] for side in state["item"]["sides"]]
            orders[item, name] = texts[0].startswith("right")
            ended = {side["text"]: side["ended"] for side in state["item"]["sides"]}
            assert ended == {f"left {item - 1}": True, f"right {item - 1}": item % 2 == 1}
            choose(store, item, name, "a")
    for name in ("Ann", "Bob"):
        assert 25 < sum(orders[item, name] for item in range(1, 101)) < 75
    assert 25 < sum(orders[item, "Ann"] != orders[item, "Bob"] for item in range(1, 101)) < 75
    assert {answer.choice for answer in store.answers()} == {"a"}
    assert {(answer.item, answer.annotator): answer.swapped for answer in store.answers()} == orders
    assert not {"one", "two"} & set(json.dumps(state).split('"'))  # who wrote it is not told


def test_each_annotator_has_an_order_of_their_own(make_store):
    store = make_store(pairs(30), overlap=1)
    orders = {}
    for name in ("Ann", "Bob"):
        lone = make_store(overlap=1)
        orders[name] = []
        while (item := lone.next_item(name)) is not None:
            orders[name].append(item.id)
            lone.add_answer(item.id, name, "tie")
        while (last := lone.last_answer(name)) is not None:
            lone.undo(name, last)
    assert sorted(orders["Ann"]) == sorted(orders["Bob"]) == list(range(1, 31))
    assert orders["Ann"] != orders["Bob"] != sorted(orders["Bob"])
    assert store.answers() == []


@pytest.mark.parametrize(("overlap", "shared"), [(0, 0), (0.2, 10), (0.5, 25), (0.01, 1), (1, 50)])
def test_the_overlap_is_answered_by_everyone_and_the_rest_once(make_store, overlap, shared):
    store = make_store(pairs(50), overlap=overlap)
    people = ["Ann", "Bob", "Cy"]
    assert [store.progress(name) for name in people] == [(0, 50)] * 3
    open_people = list(people)
    while open_people:
        for name in list(open_people):
            item = store.next_item(name)
            if item is None:
                open_people.remove(name)
            else:
                store.add_answer(item.id, name, "tie")
    counts = Counter(answer.item for answer in store.answers())
    assert sorted(counts.values()) == [1] * (50 - shared) + [3] * shared
    assert all(store.progress(name)[1] == 0 for name in people)
    if 0 < overlap < 1:  # the shared ones came first
        first = {answer.item for answer in store.answers()[: 3 * shared]}
        assert first == {item for item, count in counts.items() if count == 3}


def test_items_with_fewer_answers_come_first_and_a_skipped_one_goes_to_someone_else(make_store):
    store = make_store(pairs(10), overlap=1)
    for item in range(1, 10):
        store.add_answer(item, "Ann", "tie")
    assert store.next_item("Bob").id == 10
    alone = make_store(overlap=0)
    alone.add_answer(10, "Ann", "skip")
    assert alone.next_item("Bob").id == 10
    assert alone.next_item("Ann") is None


# --- agreement ---

# Krippendorff (2011), "Computing Krippendorff's Alpha-Reliability", section C: four observers, twelve units
PUBLISHED = {
    "A": "1 2 3 3 2 1 4 1 2 . . .",
    "B": "1 2 3 3 2 2 4 1 2 5 . 3",
    "C": ". 3 3 3 2 3 4 2 2 5 1 .",
    "D": "1 2 3 3 2 4 4 1 2 5 1 .",
}
UNITS = [
    {name: int(row.split()[i]) for name, row in PUBLISHED.items() if row.split()[i] != "."} for i in range(12)
]


@pytest.mark.parametrize(("metric", "alpha"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)])
def test_alpha_is_the_published_one(metric, alpha):
    assert krippendorff_alpha(UNITS, metric) == pytest.approx(alpha, abs=5e-4)
    assert krippendorff_alpha([*UNITS[::-1], {}, {"A": 3}], metric) == pytest.approx(
        alpha, abs=5e-4
    )  # alone, it says nothing


def test_alpha_by_hand():
    # values a a / a b: n = 4, n_a = 3, n_b = 1; D_o = 2 of 4, D_e = 6 of 12: alpha = 1 - 3 * 2 / 6 = 0
    assert krippendorff_alpha([{"x": "a", "y": "a"}, {"x": "a", "y": "b"}]) == pytest.approx(0)
    assert krippendorff_alpha([{"x": "a", "y": "a"}, {"x": "b", "y": "b"}]) == 1
    with pytest.raises(ValueError, match="metric"):
        krippendorff_alpha(UNITS, "ratio")


def test_kappa_by_hand():
    # 50 applications, two readers: 20 both yes, 5 and 10 apart, 15 both no; p_o 0.7, p_e 0.5
    table = [("yes", "yes", 20), ("yes", "no", 5), ("no", "yes", 10), ("no", "no", 15)]
    items = [{"A": left, "B": right} for left, right, count in table for _ in range(count)]
    assert cohen_kappa(items) == pytest.approx(0.4)
    assert cohen_kappa([*items, {"A": "yes"}, {}]) == pytest.approx(0.4)
    assert raw_agreement(items) == pytest.approx(0.7)
    assert cohen_kappa([*items, {"A": "yes", "C": "no"}]) is None  # three people


@pytest.mark.parametrize("items", [[], [{}], [{"A": 1}], [{"A": 1, "B": 1}, {"A": 1, "B": 1}]])
def test_what_is_not_defined_is_none(items):
    assert cohen_kappa(items) is None
    assert krippendorff_alpha(items) is None
    assert raw_agreement(items) == (1 if items and len(items[0]) == 2 else None)


def test_three_answers_count_as_three_pairs():
    assert raw_agreement([{"A": "a", "B": "a", "C": "tie"}]) == pytest.approx(1 / 3)


# --- export ---


def test_majority_decides_and_ties_and_skips_leave_no_pair(make_store, tmp_path):
    store = make_store(pairs(7), overlap=1)
    votes = ["a b a", "b b a", "a b", "tie tie a", "tie a", "skip b", "skip skip tie"]
    for item, said in enumerate(votes, 1):
        for name, choice in zip(("Ann", "Bob", "Cy"), said.split(), strict=False):
            if choice in "ab":
                choose(store, item, name, choice)
            else:
                store.add_answer(item, name, choice)
    path = tmp_path / "out.jsonl"
    assert export(store, path) == 3
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {
        "prompt": "prompt 0",
        "chosen": "left 0",
        "rejected": "right 0",
        "chosen_ended": True,
        "rejected_ended": True,
        "annotator": "Ann, Bob, Cy",
        "votes": {"chosen": 2, "rejected": 1, "tie": 0},
    }
    assert [(row["chosen"], row["chosen_ended"], row["rejected_ended"]) for row in rows[1:]] == [
        ("right 1", False, True),
        ("right 5", False, True),
    ]
    assert [(one.chosen, one.chosen_ended) for one in read_preferences(path)] == [
        (row["chosen"], row["chosen_ended"]) for row in rows
    ]
    assert export(store, path, every_answer=True) == 11
    assert Counter(json.loads(line)["annotator"] for line in path.read_text().splitlines()) == {
        "Ann": 3,
        "Bob": 5,
        "Cy": 3,
    }
    assert sorted(path.name for path in tmp_path.iterdir() if "jsonl" in path.name) == ["out.jsonl"]


def test_ratings_are_the_mean_over_annotators(make_store, tmp_path):
    store = make_store(
        [Item("p", "one", a_ended=False), Item("p", "two"), Item("p", "three")], mode="ratings", overlap=1
    )
    for item, name, choice in [
        (1, "Ann", "5"),
        (1, "Bob", "2"),
        (2, "Ann", "skip"),
        (2, "Bob", "1"),
        (3, "Bob", "skip"),
    ]:
        store.add_answer(item, name, choice)
    assert export(store, tmp_path / "r.jsonl") == 2
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [(row["completion"], row["rating"], row["ended"], row["votes"]) for row in rows] == [
        ("one", 3.5, False, 2),
        ("two", 1.0, True, 1),
    ]
    assert len(rows_of(store.items(), store.answers(), every_answer=True)) == 3
    with pytest.raises(ValueError, match="choice"):
        store.add_answer(3, "Ann", "tie")


def test_an_export_that_fails_leaves_the_old_file(make_store, tmp_path, monkeypatch):
    store = make_store(pairs(1))
    with pytest.raises(ValueError, match="no item has a winner yet"):
        export(store, tmp_path / "o.jsonl")
    with pytest.raises(ValueError, match=r"must end in \.jsonl"):
        export(store, tmp_path / "o.csv")
    choose(store, 1, "Ann", "b")
    (tmp_path / "o.jsonl").write_text("old")
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export(store, tmp_path / "o.jsonl")
    assert (tmp_path / "o.jsonl").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir() if "jsonl" in path.name) == ["o.jsonl"]


def test_the_summary_counts_and_measures(make_store):
    store = make_store(pairs(4), overlap=1)
    for item, left, right in [(1, "a", "a"), (2, "b", "b"), (3, "a", "b")]:
        choose(store, item, "Ann", left)
        choose(store, item, "Bob", right)
    store.add_answer(4, "Ann", "tie")
    store.add_answer(4, "Bob", "skip")
    summary = summarize(store)
    assert (summary["items"], summary["answers"], summary["shared"], summary["rows"]) == (4, 8, 3, 2)
    assert summary["raw"] == pytest.approx(2 / 3)
    assert summary["kappa"] == pytest.approx((2 / 3 - 4 / 9) / (1 - 4 / 9))
    assert summary["wins"] == {"one": 3, "two": 3}
    firsts = [(answer.choice == "b") == answer.swapped for answer in store.answers() if answer.choice in "ab"]
    assert summary["first_share"] == sum(firsts) / 6
    text = "\n".join(in_words(summary))
    assert "8 answers to 4 items (Ann 4, Bob 4)" in text
    assert "agreement on 3 shared items: raw 0.67, Cohen's kappa 0.40" in text
    assert "not measured" in "\n".join(in_words(summarize(Store(store.path.with_name("empty.db")))))


# --- items from a model and from a file ---


def test_pairs_are_sampled_with_different_noise_the_same_every_time(tiny):
    config = PPOConfig(model_name=tiny, max_new_tokens=6)
    prompts = ["first", "second", "first"]
    items = sample_items(prompts, config, "pairs")
    assert [item.prompt for item in items] == prompts
    assert all(item.a != item.b for item in items)
    assert items[0].a != items[2].a  # the same prompt again: other noise
    assert items == sample_items(prompts, config, "pairs")
    assert items[1:2] == sample_items(prompts[1:2], config, "pairs")  # whatever stands beside it
    assert {(item.a_model, item.b_model) for item in items} == {(tiny, tiny)}
    rated = sample_items(prompts, config, "ratings")
    assert [(item.a, item.a_ended, item.b) for item in rated] == [
        (item.a, item.a_ended, None) for item in items
    ]


def test_pairs_that_stay_the_same_are_left_out(tiny, monkeypatch):
    import proxima.pages.label.label_items as module

    steps = []

    def sampler(config):
        def sample(prompts, step):
            steps.append((step, len(prompts)))
            return [("same" if prompt == "stuck" or step < 3 else f"new {step}", True) for prompt in prompts]

        return sample

    monkeypatch.setattr(module, "model_sampler", sampler)
    [item] = sample_items(["stuck", "slow"], PPOConfig(model_name=tiny), "pairs")
    assert (item.prompt, item.a, item.b) == ("slow", "same", "new 3")
    assert steps == [(0, 2), (1, 2), (2, 2), (3, 2), (4, 1), (5, 1)]
    assert TRIES == 5


def test_ready_pairs_are_read_in_both_forms(tmp_path):
    path = tmp_path / "p.jsonl"
    rows = [
        {"prompt": "p", "a": "x", "b": "y", "b_ended": False},
        {"prompt": "q", "chosen": "c", "rejected": "r"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    first, second = read_items(path, "pairs")
    assert (first.a, first.b, first.a_ended, first.b_ended) == ("x", "y", True, False)
    assert (second.a, second.b, second.a_model, second.b_model) == ("c", "r", "chosen", "rejected")
    path.write_text('{"prompt": "p", "completion": "c", "ended": false}')
    [rated] = read_items(path, "ratings")
    assert (rated.a, rated.a_ended, rated.mode) == ("c", False, "ratings")
    for row, message in [
        ('{"prompt": "p", "a": "x"}', "line 1: `b`"),
        ("[1]", "line 1"),
        ('{"a": "x", "b": "y"}', "`prompt`"),
    ]:
        path.write_text(row)
        with pytest.raises(ValueError, match=message):
            read_items(path, "pairs")


# --- the command ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no feedback.db yet; give --data PROMPTS"),
        (["--export", "o.jsonl"], "there is no feedback.db to export from"),
        (["--export", "o.jsonl", "--data", "p.txt"], "leave out --data"),
        (["--data", "p.txt", "--host", "0.0.0.0"], "every address"),
        (["--data", "p.txt", "--overlap", "2"], "overlap (2.0) must be in [0, 1]"),
        (["--data", "p.txt", "--count", "-1"], "count (-1)"),
        (["--data", "p.txt", "--temperature", "0"], "temperature"),
        (["--pairs", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.txt").write_text("a prompt\n")
    with pytest.raises(SystemExit) as end:
        main(["label", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_exports_and_prints_the_agreement(make_store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    store = make_store(pairs(2), overlap=1)
    for name in ("Ann", "Bob"):
        choose(store, 1, name, "a")
        choose(store, 2, name, "b")
    main(["label", "--db", "f.db", "--export", "o.jsonl"])
    out = capsys.readouterr().out
    assert (
        "agreement on 2 shared items: raw 1.00, Cohen's kappa 1.00, Krippendorff's alpha 1.00 (nominal)"
        in out
    )
    assert "2 rows in o.jsonl" in out
    assert [one.chosen for one in read_preferences("o.jsonl")] == ["left 0", "right 1"]


def test_an_adapter_can_be_compared_with_the_base(make_config, tmp_path):
    trainer = shake(PPOTrainer(make_config()), size=0.3)
    trainer.models.policy.save(tmp_path / "policy")
    folder = str(tmp_path / "policy")
    config = make_config()
    first = sample_items(["a", "b", "c"], config, "pairs", folder, "")
    assert {(item.a_model, item.b_model) for item in first} == {(folder, config.model_name)}
    base = sample_items(["a", "b", "c"], config, "pairs", "", folder)
    assert {(item.a_model, item.b_model) for item in base} == {(config.model_name, folder)}
    assert [item.a for item in first] != [item.a for item in base]
    assert [item.a for item in base] == [item.a for item in sample_items(["a", "b", "c"], config, "ratings")]


@pytest.mark.parametrize(
    "damage",
    ["DROP TABLE answers", "DELETE FROM settings", None],
    ids=["a table less", "no settings", "torn pages"],
)
def test_a_damaged_database_is_refused_in_one_sentence(tmp_path, damage):
    path = tmp_path / "a.db"
    Store(path).add_items([Item(f"prompt {i}", "x" * 500, "y" * 500) for i in range(50)])
    if damage:
        db = sqlite3.connect(path)
        db.execute(damage)
        db.commit()
        db.close()
    else:
        content = bytearray(path.read_bytes())
        content[8192:24576] = b"\xaa" * 16384
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot use .*a\.db as a feedback database"):
        Store(path)


def test_whether_a_ready_completion_ended_is_read_from_csv_too(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("prompt,a,b,a_ended,b_ended\nq,x,y,false,true\n")
    [item] = read_items(path, "pairs")
    assert (item.a_ended, item.b_ended) == (False, True)
    path.write_text("prompt,completion,ended\nq,x,perhaps\n")
    with pytest.raises(ValueError, match=r"line 2: `ended` \('perhaps'\) is neither true nor false"):
        read_items(path, "ratings")


# --- instructions, notes, control questions, the least sure pairs ---


def test_instructions_are_kept_and_bounded(make_store, tmp_path):
    store = make_store(pairs(3))
    assert store.instructions == ""
    store.instructions = "Prefer what is true.\n<b>Not</b> what is long."
    assert Store(store.path).instructions == "Prefer what is true.\n<b>Not</b> what is long."
    with pytest.raises(ValueError, match="at most 20,000 characters, got 20,001"):
        store.instructions = "x" * 20_001


def test_a_note_goes_with_its_answer_and_with_undo(make_store, tmp_path):
    store = make_store(pairs(3))
    first = store.add_answer(1, "ann", "1", note="  both are wrong <b>  ")
    store.add_answer(2, "ann", "2", note="   ")
    assert [answer.note for answer in store.answers()] == ["both are wrong <b>", ""]
    export(store, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row.get("notes") for row in rows] == [["both are wrong <b>"], None]
    store.undo("ann", store.last_answer("ann"))
    store.undo("ann", first)
    assert store.answers() == []
    store.add_answer(1, "ann", "1")
    assert store.answers()[0].note == ""
    for note in ("x" * 2001, 3, None, "\ud800"):
        with pytest.raises(ValueError, match="the note must be text"):
            store.add_answer(2, "ann", "1", note=note)


def controls(count):
    return [Item(f"control {i}", f"right {i}", f"wrong {i}", True, True) for i in range(count)]


def test_control_questions_come_among_the_others_to_everyone_and_are_neither_exported_nor_counted(
    make_store, tmp_path
):
    store = make_store(pairs(20), overlap=1)
    assert store.add_controls(controls(2), ["a", "a"]) == 2
    assert store.add_controls(controls(2), ["a", "a"]) == 0
    known = store.controls()
    for name, knows in (("ann", True), ("bob", False)):
        places = []
        while item := store.next_item(name):
            if item.id in known:
                places.append(store.progress(name)[0])
            first = "1" if not store.is_swapped(item.id, name) else "2"
            second = "2" if first == "1" else "1"
            store.add_answer(item.id, name, first if knows or item.id not in known else second)
        blocks = [place // CONTROL_EVERY for place in places]
        assert blocks == [0, 1]
    said = summarize(store)
    assert said["controls"] == {"ann": {"asked": 2, "right": 2}, "bob": {"asked": 2, "right": 0}}
    assert (said["items"], said["answers"]) == (20, 40)
    assert "control questions: bob 0 of 2 right" in in_words(said)
    assert export(store, tmp_path / "out.jsonl") == 20
    assert "control" not in (tmp_path / "out.jsonl").read_text()


def labelled(store, names):
    """Answers of some people in turns, to their own next items; the numbers that the page shows after each,
    and which of them were control questions."""
    known, seen = store.controls(), []
    waiting = list(names)
    while waiting:
        for name in list(waiting):
            state = state_of(store, name)
            if state["item"] is None:
                waiting.remove(name)
                continue
            item = store.item_of(state["item"]["id"])
            store.add_answer(item, name, "1")
            seen.append((name, item in known, state["item"]["id"], page_summary(store)))
    return seen


def test_agreement_on_the_page_does_not_move_with_a_control_question(make_store):
    """Only these have two answers here, so that live figures would tell each of them."""
    store = make_store(pairs(60), overlap=0)
    store.add_controls(controls(3), ["a"] * 3)
    seen = labelled(store, ["ann", "bob"])
    figures = [{name: said[name] for name in ("shared", "raw", "kappa", "alpha")} for *_, said in seen]
    given = Counter()
    for place, (name, _, _, said) in enumerate(seen):
        given[name] += 1
        assert said["answers"] == place + 1  # counts are live
        if place and figures[place] != figures[place - 1]:
            assert given[name] % CONTROL_EVERY == 0
    assert figures[-1]["shared"] > 0
    assert not {"controls", "choices", "wins", "rows"} & set(seen[-1][-1])  # nor which side is whose


def test_without_control_questions_agreement_is_live(make_store):
    store = make_store(pairs(3), overlap=1)
    assert [said["shared"] for *_, said in labelled(store, ["ann", "bob"])][-1] == 3


def test_neither_number_nor_place_tells_a_control_question(make_store):
    """The numbers of the page are in no order, and the first control of ten may come anywhere among them."""
    store = make_store(pairs(200), overlap=1)
    store.add_controls(controls(1), ["a"])
    numbers = [store.handle(item.id) for item in store.items()]
    rises = sum(one < other for one, other in pairwise(numbers))
    assert 60 < rises < 140  # 100 are expected, with a deviation of 4
    assert len(set(numbers)) == 201
    assert max(numbers) < 2**53  # a browser keeps it
    assert Store(store.path).handle(1) == numbers[0]  # an answer on its way survives a restart
    places = Counter()
    for i in range(25):
        with sqlite3.connect(store.path) as db:
            for place in range(CONTROL_EVERY):
                if store.next_item(f"ann {i}").id in store.controls():
                    places[place] += 1
                given = (place + 1, f"ann {i}")
                db.execute(
                    "INSERT INTO answers (item, annotator, choice, swapped, seconds, time) "
                    "VALUES (?, ?, 'a', 0, 0, '')",
                    given,
                )
                db.commit()
    assert sum(places.values()) == 25
    assert len(places) >= 5  # 25 draws out of ten fall on fewer places with probability below 1e-7


def test_nobodys_answer_changes_how_many_items_the_page_counts_for_others(make_store):
    """An answer to an item of one annotator takes it from the others, one to a control question does not."""
    store = make_store(pairs(15), overlap=0)
    store.add_controls(controls(3), ["a"] * 3)
    before = state_of(store, "spy")["total"]
    for item in store.items():
        own, total = f"someone {item.id}", state_of(store, f"someone {item.id}")["total"]
        store.add_answer(item.id, own, "1")
        ordinary = {each.id for each in store.items()} - set(store.controls())
        over = ordinary <= {answer.item for answer in store.answers()}
        assert state_of(store, "spy")["total"] == (0 if over else before)
        assert state_of(store, own)["total"] == (1 if over else total)


def test_surplus_control_questions_are_not_asked(make_store):
    store = make_store(pairs(25), overlap=1)
    store.add_controls(controls(40), ["a"] * 40)
    asked = {name: [] for name in ("ann", "bob", "cem")}
    for name, kinds in asked.items():
        while (state := state_of(store, name))["item"]:
            assert state["done"] == len(kinds) < state["total"]
            item = store.item_of(state["item"]["id"])
            kinds.append(item in store.controls())
            store.add_answer(item, name, "1")
            total = state["total"]
        assert (state["done"], state["total"]) == (len(kinds), len(kinds)) == (total, total)
        assert len(kinds) - sum(kinds) == 25
        blocks = [sum(kinds[i : i + CONTROL_EVERY]) for i in range(0, len(kinds), CONTROL_EVERY)]
        assert blocks[:-1] == [1, 1]
        assert blocks[-1] <= 1
        assert not kinds[-1]


def test_a_control_question_that_was_an_item_with_its_sides_the_other_way_keeps_its_answer(make_store):
    store = make_store(pairs(0))
    [item] = controls(1)
    store.add_items([Item(item.prompt, item.b, item.a, True, True)])
    store.add_controls([item], ["a"])
    assert store.controls() == {1: "b"}


def test_a_control_question_whose_sides_differ_only_in_their_end_keeps_its_answer(make_store):
    store = make_store()
    store.add_items([Item("a prompt", "same", "same", True, False)])
    store.add_controls([Item("a prompt", "same", "same", False, True)], ["a"])
    assert store.controls() == {1: "b"}


def test_skips_ties_and_ratings_of_control_questions(tmp_path):
    store = Store(tmp_path / "r.db", "ratings")
    store.add_controls([Item(f"p{i}", f"text {i}") for i in range(3)], ["4", "1", "5"])
    for item, rating in zip(store.items(), ("5", "3", "skip"), strict=True):
        store.add_answer(item.id, "ann", rating)
    assert summarize(store)["controls"] == {"ann": {"asked": 2, "right": 1}}
    (tmp_path / "c.jsonl").write_text('{"prompt": "p", "completion": "c", "rating": 4}\n')
    assert read_controls(tmp_path / "c.jsonl", "ratings")[1] == ["4"]
    (tmp_path / "c.jsonl").write_text('{"prompt": "p", "completion": "c", "rating": "great"}\n')
    with pytest.raises(ValueError, match="needs a `rating` from 1 to 5"):
        read_controls(tmp_path / "c.jsonl", "ratings")
    (tmp_path / "c.jsonl").write_text('{"prompt": "p", "a": "c", "b": "d"}\n')
    with pytest.raises(ValueError, match="needs `chosen` and `rejected`"):
        read_controls(tmp_path / "c.jsonl", "pairs")


def test_a_file_of_an_older_version_gains_the_tables(make_store):
    store = make_store(pairs(2))
    store.add_answer(1, "ann", "1")
    with sqlite3.connect(store.path) as db:
        db.execute("DROP TABLE notes")
        db.execute("DROP TABLE controls")
    again = Store(store.path)
    assert [answer.note for answer in again.answers()] == [""]
    assert again.controls() == {}


def test_the_least_sure_pairs_are_those_whose_order_heads_doubt_or_whose_scores_are_close():
    import torch

    from proxima.models import least_sure

    nothing = torch.zeros(5, 2)
    first = torch.tensor([[1.0, 1.0], [3.0, -3.0], [5.0, 4.0], [50.0, 47.0], [0.2, -0.1]])
    assert least_sure(first, nothing).argsort(descending=True).tolist() == [1, 4, 2, 3, 0]
    assert least_sure(first[:, :1], nothing[:, :1]).argsort(descending=True).tolist() == [4, 0, 1, 2, 3]
    assert torch.equal(least_sure(first, nothing), least_sure(nothing, first))
    assert least_sure(nothing, nothing).tolist() == [0.0] * 5  # the same answer twice: no label is worth it


class FakeReward:
    """Scores by the number in a text: with two heads that disagree by it about what is worth 1."""

    def tokenizer(self, texts, **options):
        return {"input_ids": [[0] for _ in texts]}

    def members(self, samples):
        import torch

        numbers = [float(text.split()[-1]) for text in samples.completions]
        return torch.tensor([[1 + number, 1 - number] if number else [0.0, 0.0] for number in numbers])


def test_keeping_the_least_sure_keeps_their_order():
    items = [Item("p", f"a {number}", "b 0", True, True) for number in (1, 9, 2, 8, 3)]
    kept = keep_least_sure(items, FakeReward(), 2)
    assert [item.a for item in kept] == ["a 9", "a 8"]
    assert keep_least_sure([], FakeReward(), 2) == []
    assert len(keep_least_sure(items, FakeReward(), 99)) == 5


def test_a_real_reward_model_chooses_and_is_refused_where_it_is_none(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"p{i}", "chosen": f" good {i}", "rejected": f" bad {i}"} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--batch-size", "4", "--epochs", "1", "--ensemble", "2", "--run-name", "reward"]
    main(["reward", "--model", tiny, "--data", "pairs.jsonl", *flags])
    reward = load_trained_reward("runs/reward", "cpu")
    assert reward.members(Samples.of_texts(["p"], [" good"], reward.tokenizer)).shape == (1, 2)
    items = read_items("pairs.jsonl", "pairs")
    assert len(keep_least_sure(items, reward, 5)) == 5
    with pytest.raises(ValueError, match="not a folder that `proxima reward` wrote"):
        load_trained_reward(tiny)
    for given in (["--least-sure", "runs/reward"], ["--least-sure", "runs/reward", "--pairs", "pairs.jsonl"]):
        with pytest.raises(SystemExit):
            main(["label", "--db", "new.db", "--controls", "pairs.jsonl", *given])
        assert "--least-sure chooses --count pairs" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--mode", "ratings"], []], ids=["a new file", "one that holds ratings"])
def test_the_least_sure_of_ratings_are_refused_in_one_line(tmp_path, monkeypatch, capsys, given):
    monkeypatch.chdir(tmp_path)
    if not given:
        Store("f.db", "ratings")
    flags = ["--db", "f.db", "--pairs", "p.jsonl", "--count", "2", "--least-sure", "none"]
    with pytest.raises(SystemExit):
        main(["label", *flags, *given])
    assert "--least-sure chooses pairs to compare; leave it out with ratings" in capsys.readouterr().err
    assert Path("f.db").exists() == (not given)
