"""The studio without a browser: who is let in, what is answered about runs that live, end, break, vanish
or attack."""

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from proxima.cli import main, parse
from proxima.cli.studio_command import Studio
from proxima.pages.label import Item, Store
from proxima.pages.studio import Library, make_studio_app
from proxima.pages.studio.run_library import KEPT, state_of
from proxima.pages.studio.sample_table import choose, follow, nearest
from proxima.pages.studio.sparkline import glance
from proxima.pages.studio.studio_comparison import Member, compare
from proxima.pages.studio.studio_curves import band, curve, groups
from proxima.pages.web import Site, running
from proxima.runs import Run
from tests.fake_run import HOSTILE, append_step, metrics_at, token_sample, write_run, write_tokens

SOURCE = Path(__file__).parents[2] / "src"


def busy():
    """How many times longer than alone something takes on this machine now: other tests and programs share
    its cores."""
    wall, own = time.monotonic(), time.thread_time()
    while time.thread_time() < own + 0.2:
        pass
    return max((time.monotonic() - wall) / 0.2, 1.0)


@pytest.fixture
def runs(tmp_path):
    """A folder with a finished run, one that attacks and one in a folder of its own."""
    folder = tmp_path / "runs"
    write_run(folder / "plain", steps=30)
    write_run(folder / "evil", steps=10, hostile=True)
    write_run(folder / "sweep" / "seed-0", steps=20)
    return folder


@pytest.fixture
def ask(runs):
    site = Site()
    with (
        running(make_studio_app(Library(runs), site), site),
        httpx.Client(base_url=site.address, timeout=60) as client,
    ):
        assert client.get(site.url).status_code == 200

        def get(path, expected=200, **asked):
            response = client.get(f"/api/{path}", params=asked)
            assert response.status_code == expected, response.text
            return response.json()

        get.client, get.site = client, site
        yield get


# --- who is let in ---


@pytest.mark.parametrize(
    "path", ["/", "/api/runs", "/api/run?name=plain", "/static/studio.js", "/api/tokens?name=plain&step=10"]
)
def test_without_the_token_nothing_is_told(ask, path):
    response = httpx.get(ask.site.address + path, timeout=60)
    assert response.status_code == 403
    assert "plain" not in response.text
    assert ask.client.get(path).status_code == 200


ELSEWHERE = [
    "..",
    "../outside",
    "plain/../../outside",
    "/etc",
    "%2e%2e/outside",
    "plain/tokens",
    ".",
    "",
    "plain\x00",
    "\ud800",
    "c:\\",
    "link",
]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_reaches_only_what_the_list_shows(ask, runs, name):
    write_run(runs.parent / "outside", steps=3)
    (runs / "link").symlink_to(runs.parent / "outside")
    quoted = quote(name, errors="surrogatepass")
    for path in ("run", "curves", "findings", "log", "samples", "tokens", "compare"):
        response = ask.client.get(f"/api/{path}?name={quoted}&step=1")
        assert response.status_code == 404, path
        assert "avg_reward" not in response.text
    assert {run["name"] for run in ask("runs")["runs"]} == {"plain", "evil", "sweep/seed-0"}


def test_a_request_of_another_form_is_refused_in_words(ask):
    for path, asked in (
        ("run", {}),
        ("tokens", {"name": "plain", "step": "x"}),
        ("curves", {"name": "plain", "after": "1e9999"}),
    ):
        assert "form" in ask(path, 422, **asked)["error"]
    assert "logged steps are 10, 20, 30" in ask("tokens", 400, name="plain", step=11)["error"]
    assert "12 or fewer" in ask("compare", 400, name=[f"run-{i}" for i in range(13)])["error"]


# --- what is told ---


def test_the_list_has_a_line_per_run(ask, runs):
    said = ask("runs")
    assert said["folder"] == str(runs)
    assert said["label"] is False
    lines = {line["name"]: line for line in said["runs"]}
    last = metrics_at(30, 30)
    assert (
        lines["plain"] | {"step": 30, "avg_reward": last["avg_reward"], "kl": last["kl"], "state": "finished"}
        == lines["plain"]
    )
    assert lines["plain"]["spark"] == [[step, metrics_at(step, 30)["avg_reward"]] for step in range(1, 31)]
    assert said["runs"][0]["name"] == "sweep/seed-0"  # the newest first


def test_a_run_is_told_whole_and_the_numbers_are_those_on_disk(ask, runs):
    said = ask("run", name="plain")
    assert said["config"]["model_name"] == "embedded"
    assert said["environment"]["python"] == "3.11.9"
    assert said["tokens"] == [10, 20, 30]
    assert [one["name"] for one in said["checkpoints"]] == ["step-00000020", "step-00000030"]
    shown = [name for one in said["groups"] for chart in one["charts"] for name in chart["names"]]
    logged = set(Run(runs / "plain").metrics()) - {"step", "epoch"}
    assert sorted(shown) == sorted(
        name for name in logged if not name.endswith(("_low", "_high"))
    )  # every metric in one chart
    curves = ask("curves", name="plain", metric=["avg_reward", "validation/reward", "nothing"])
    assert curves["curves"]["avg_reward"] == [
        [s, pytest.approx(metrics_at(s, 30)["avg_reward"], rel=1e-5)] for s in range(1, 31)
    ]
    assert [step for step, _ in curves["curves"]["validation/reward"]] == [10, 20, 30]
    assert "nothing" not in curves["curves"]
    stored = json.loads((runs / "plain" / "tokens" / "step-00000020.json").read_text())["samples"]
    assert ask("tokens", name="plain", step=20)["samples"] == stored


def write_finetuning(folder, kind, finished=True, command=("proxima", "sft")):
    """A folder as `proxima sft` or `proxima reward` leaves it."""
    folder.mkdir(parents=True)
    more = {"accuracy": 0.7, "calibration_error": 0.1, "margin": 0.4} if kind == "reward" else {}
    lines = [
        {"step": step, "epoch": 1, "train_loss": 2.0 - step / 10, "validation_loss": 2.1 - step / 10, **more}
        for step in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    origin = {"kind": kind, "command": list(command), "folder": "/home/me"}
    (folder / "origin.json").write_text(json.dumps(origin))
    (folder / "log.txt").write_text(f"2026-11-16 10:00:00,000 INFO {kind} began\n")
    if finished:
        (folder / f"{kind}.json").write_text(json.dumps({"best": lines[-1]}))
        (folder / "finetuning.yaml").write_text("model_name: embedded\n")
    return folder


def test_fine_tuning_runs_stand_beside_ppo_runs(ask, runs):
    write_finetuning(runs / "sft", "sft")
    write_finetuning(runs / "reward", "reward", finished=False)
    lines = {line["name"]: line for line in ask("runs")["runs"]}
    assert {name: line["kind"] for name, line in lines.items()} == {
        "plain": "ppo",
        "evil": "ppo",
        "sweep/seed-0": "ppo",
        "sft": "sft",
        "reward": "reward",
    }
    assert lines["sft"]["shown"][0] == ["validation_loss", "Validation loss", 1.6]
    assert lines["reward"]["shown"][0][0::2] == ["accuracy", 0.7]
    assert (lines["sft"]["state"], lines["reward"]["state"]) == ("finished", "stopped")
    said = ask("run", name="sft")
    assert (said["kind"], said["config"]) == ("sft", {"model_name": "embedded"})
    assert [group["title"] for group in said["groups"]] == ["Fine-tuning"]
    assert said["command"] == {"line": "proxima sft", "folder": "/home/me", "resumed": [], "resume": ""}
    assert ask("findings", name="sft") == {"findings": [], "checks": None, "examinations": []}
    assert ask("log", name="sft")["text"].endswith("sft began\n")


def test_findings_checks_commands_and_bundles_are_told(ask, runs):
    folder = runs / "plain"
    checks = [{"level": "warn", "name": "memory", "text": "it is tight", "advice": "lower batch_size"}]
    command = ["proxima", "train", "--data", "my file.jsonl", "--rewards", "https://u:pass@h/?key=s3cr3t"]
    (folder / "origin.json").write_text(json.dumps({"kind": "ppo", "command": command, "checks": checks}))
    (folder / "replay").mkdir()
    (folder / "replay" / "step-00000010.safetensors").write_bytes(b"x" * 100)
    (folder / "replay" / "link.safetensors").symlink_to("/etc/passwd")
    found = ask("findings", name="plain")
    assert [each["question"][:7] for each in found["findings"]] == [
        "Did it ",
        "What di",
        "Did it ",
        "Is the ",
        "What to",
    ]
    assert found["checks"] == checks
    said = ask("run", name="plain")
    assert said["command"]["line"] == (
        "proxima train --data 'my file.jsonl' --rewards 'https://***@h/?key=***'"
    )
    assert said["command"]["resume"] == ""
    assert [each["name"] for each in said["bundles"]] == ["step-00000010.safetensors"]
    assert said["bundles"][0]["command"].startswith("proxima replay ")
    assert said["bundles"][0]["show"] == f"{said['bundles'][0]['command']} --show"
    (folder / "results.json").unlink()
    assert ask("run", name="plain")["command"]["resume"].endswith("--run-name plain --resume")


def test_recorded_steps_are_told_by_step_reason_and_age(ask, runs):
    (runs / "plain" / "replay").mkdir()
    alarms = [
        {"step": 12, "guard": "kl", "message": "too far", "action": "warn"},
        {"step": 13, "guard": "entropy", "message": "too little", "action": "warn"},
    ]
    lines = "".join(json.dumps(each) + "\n" for each in alarms)
    (runs / "plain" / "warnings.jsonl").write_text(lines)
    names = ("step-00000010", "alarm-00000011", "alarm-00000012", "alarm-00000013", "alarm-00000029", "mine")
    for age, name in enumerate(reversed(names)):
        path = runs / "plain" / "replay" / f"{name}.safetensors"
        path.write_bytes(b"x")
        os.utime(path, (1e9 - age, 1e9 - age))
    found = ask("run", name="plain")["bundles"]
    assert [(each["step"], each["reason"]) for each in found] == [
        (10, ""),
        (11, "alarm kl, at step 12: too far"),
        (12, "alarm kl: too far"),
        (13, "alarm entropy: too little"),
        (29, "step 30 failed"),
        (None, ""),
    ]
    assert [each["changed"] for each in found] == [1e9 - 5 + place for place in range(6)]


def test_a_log_travels_in_parts(ask, runs):
    path = runs / "plain" / "log.txt"
    path.write_text("one\n")
    first = ask("log", name="plain")
    assert first == {"text": "one\n", "end": 4}
    path.write_text("one\ntwo\n")
    assert ask("log", name="plain", after=4) == {"text": "two\n", "end": 8}
    assert ask("log", name="plain", after=10**9)["text"] == "one\ntwo\n"
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert ask("log", name="plain") == {"text": "", "end": 0}


def test_hostile_text_arrives_as_the_text_it_was(ask, runs):
    samples = ask("tokens", name="evil", step=10)["samples"]
    assert "".join(samples[0]["tokens"]) == samples[0]["text"]
    assert samples[0]["text"].startswith(HOSTILE)
    assert len(samples[0]["tokens"][-1]) > 100_000
    table = ask("samples", name="evil")
    assert table["rows"][0]["prompt"].startswith(HOSTILE)
    assert len(table["rows"][0]["cells"][0]["text"]) < 3000
    half = token_sample(30, text="half \ud800 a pair")
    write_tokens(runs / "plain", 30, [half])
    response = ask.client.get("/api/tokens", params={"name": "plain", "step": 30})
    assert response.content.isascii()
    assert response.json()["samples"][0]["text"] == "half \ud800 a pair"


BROKEN = [
    (b"\xff\xfe\x00", "bytes"),
    (b"{]\nnull\n[1]\n42\n", "no objects"),
    (b'{"step": 1e400}\n{"step": "x"}\n{"step": true}\n', "odd steps"),
    (b'{"step": 1, "avg_reward": "high", "kl": [1], "x\\ud800": 1}\n', "odd numbers"),
    (b'{"step": 1, "avg_reward": NaN, "kl": Infinity}\n', "not finite"),
    (b"[" * 100_000 + b"\n", "deep"),
    (b'{"step": 1, "deep": ' + b"[" * 900 + b"]" * 900 + b"}\n", "deep but legal"),
    (b'{"step": 3}\n{"step": 2}\n{"step": 3}\n', "out of order"),
    (b'{"step": 1, "avg_reward": 1', "a line under way"),
    (b"seed: 2024-01-01\nlam: !!binary aGk=\n1: {2: 3}\n", "odd settings"),
]


@pytest.mark.parametrize(("content", "what"), BROKEN, ids=[what for _, what in BROKEN])
@pytest.mark.parametrize(
    "file",
    [
        "metrics.jsonl",
        "samples.jsonl",
        "warnings.jsonl",
        "config.yaml",
        "results.json",
        "tokens/step-00000030.json",
    ],
)
def test_broken_files_never_fail_a_request(ask, runs, file, content, what):
    (runs / "plain" / file).write_bytes(content)
    assert len(ask("runs")["runs"]) == 3
    for path in ("run", "curves", "samples", "tokens", "compare"):
        response = ask.client.get(
            f"/api/{path}", params={"name": "plain", "metric": "avg_reward", "step": 30}
        )
        assert response.status_code in (200, 400), response.text  # 400: a sentence
        json.loads(response.text, parse_constant=pytest.fail)  # JSON has no NaN


SECRET = "a secret of this machine"
OWN_FILES = {
    "metrics.jsonl": {"step": 30, "avg_reward": 1.0, SECRET: 2.0},
    "samples.jsonl": {"step": 30, "prompt": SECRET, "text": SECRET, "reward": 1.0},
    "warnings.jsonl": {"step": 30, "guard": SECRET, "message": SECRET, "action": "warn"},
    "config.yaml": {"model_name": SECRET},
    "results.json": {"stop_reason": SECRET},
    "environment.json": {"cpu": SECRET},
    "evaluation.json": {"reward": SECRET},
    "origin.json": {"kind": "ppo", "command": ["proxima", SECRET], "folder": SECRET},
    "doctor.json": [{"how": SECRET, "checks": []}],
    "best_constants.json": {SECRET: {"answer": SECRET, "score": 1.0}},
    "log.txt": SECRET,
    "tokens": {"samples": [{**token_sample(3), "prompt": SECRET}]},
    "replay": {},
}
ROUTES = ("run", "curves", "findings", "log", "samples", "tokens", "compare")


@pytest.mark.parametrize("name", OWN_FILES)
def test_links_inside_a_run_are_not_followed(ask, runs, name):
    """The folder of a run may come from elsewhere, and name any file of this machine."""
    own, outside = runs / "plain" / name, runs.parent / "outside"
    outside.mkdir()
    if name in ("tokens", "replay"):
        shutil.rmtree(own, ignore_errors=True)
        (outside / "step-00000030.json").write_text(json.dumps(OWN_FILES[name]))
        (outside / f"{SECRET}.safetensors").touch()
        own.symlink_to(outside)
    else:
        own.unlink(missing_ok=True)
        (outside / "file").write_text(json.dumps(OWN_FILES[name]) + "\n")
        own.symlink_to(outside / "file")
    ask("runs")
    for path in ROUTES:
        response = ask.client.get(f"/api/{path}", params={"name": "plain", "step": 30})
        assert response.status_code in (200, 400)
        assert SECRET not in response.text, path
    if name.endswith((".json", ".jsonl", ".yaml")):
        assert any(
            "is a link, which is not followed" in each for each in ask("run", name="plain")["problems"]
        )


def test_what_is_large_is_cut_before_it_travels(ask, runs):
    """60 MB of alarms, a file of results and a name per number would keep the page and the server busy."""
    alarms = [{"step": i, "guard": "kl", "message": "m" * 5000, "action": "warn"} for i in range(1000)]
    (runs / "plain" / "warnings.jsonl").write_text("".join(json.dumps(each) + "\n" for each in alarms))
    (runs / "plain" / "results.json").write_text(json.dumps({"stop_reason": "x" * 20_000_000}))
    rows = [{"step": i, **{f"m{i}.{j}": 1.0 for j in range(300)}} for i in range(1, 31)]
    (runs / "plain" / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    response = ask.client.get("/api/run", params={"name": "plain"})
    said = response.json()
    assert len(response.content) < 3_000_000
    assert (said["warnings"], len(said["messages"]), said["messages"][-1]["step"]) == (1000, 500, 999)
    assert len(said["messages"][0]["message"]) < 2100
    assert said["metrics"] == 5000
    assert any("more than 5,000 metrics" in each for each in said["problems"])
    assert any("results.json cannot be read: it has more than" in each for each in said["problems"])


# --- runs that change ---


def test_only_new_points_travel(ask, runs):
    first = ask("curves", name="plain", metric="kl")
    assert first["anew"]
    again = ask("curves", name="plain", metric="kl", after=30, edition=first["edition"])
    assert (again["anew"], again["curves"]["kl"]) == (False, [])
    for step in (31, 32):
        append_step(runs / "plain", step)
    with (runs / "plain" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 33, "kl": 1')  # under way
    more = ask("curves", name="plain", metric="kl", after=30, edition=first["edition"])
    assert (more["anew"], [step for step, _ in more["curves"]["kl"]], more["step"]) == (False, [31, 32], 32)


def test_metrics_that_came_between_two_requests_are_noticed(ask, runs):
    write_run(runs / "new", steps=0, finished=False)
    about = ask("run", name="new")
    assert about["groups"] == []
    append_step(runs / "new", 1)
    assert ask("curves", name="new")["metrics"] > about["metrics"]  # the page then asks for the groups anew


def cut_back(folder, step):
    """As a run that rolls back does it: another file in its place."""
    lines = [
        line
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["step"] <= step
    ]
    part = folder / "part"
    part.write_text("".join(line + "\n" for line in lines))
    part.rename(folder / "metrics.jsonl")


@pytest.mark.parametrize("grown", [0, 40])
def test_a_run_that_was_cut_back_is_told_anew(ask, runs, grown):
    first = ask("curves", name="plain", metric="kl")
    cut_back(runs / "plain", 12)
    for step in range(13, 13 + grown):
        append_step(runs / "plain", step, kl=-step)
    after = ask("curves", name="plain", metric="kl", after=30, edition=first["edition"])
    assert after["anew"]
    assert [step for step, _ in after["curves"]["kl"]] == list(range(1, 13 + grown))
    assert all(value == -step for step, value in after["curves"]["kl"][12:])
    assert (
        ask("curves", name="plain", metric="kl", after=after["step"], edition=after["edition"])["anew"]
        is False
    )


def test_runs_that_vanish_and_come_back(ask, runs):
    assert ask("curves", name="plain", metric="kl")["step"] == 30
    shutil.move(runs / "plain", runs.parent / "away")
    assert "moved or removed" in ask("curves", 404, name="plain", metric="kl")["error"]
    assert "plain" not in {run["name"] for run in ask("runs")["runs"]}
    write_run(runs / "plain", steps=5)
    assert ask("curves", name="plain", metric="kl", after=30)["curves"]["kl"][-1][0] == 5
    shutil.rmtree(runs)
    assert ask("runs")["runs"] == []


def test_the_state_follows_the_lock_and_a_silent_run_is_stale(runs):
    fcntl = pytest.importorskip("fcntl")
    run = Run(runs / "plain")
    assert state_of(run, 1.0) == "finished"
    with (runs / "plain" / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state_of(run, 1.0) == "training"
        assert state_of(run, 1.0, now=time.time() + 100) == "stale"
        assert state_of(run, 60.0, now=time.time() + 100) == "training"  # its steps are long
        assert state_of(run, None, now=time.time() + 100) == "stale"
    (runs / "plain" / "results.json").unlink()
    assert state_of(run, 1.0) == "stopped"


def test_looking_at_a_run_keeps_no_trainer_from_taking_it(tmp_path):
    """Whether a run trains is asked by its lock: a look holds it for a moment, which is not the same as
    being in use."""
    fcntl = pytest.importorskip("fcntl")
    from proxima.runs.run_writer import lock_folder

    folder = write_run(tmp_path / "run", steps=3)
    look = (folder / ".lock").open("a+")
    fcntl.flock(look, fcntl.LOCK_SH)
    end = threading.Timer(0.03, look.close)
    end.start()
    with lock_folder(folder), pytest.raises(ValueError, match="in use by process"):
        lock_folder(folder)
    end.join()


def test_many_requests_at_once_read_a_growing_run_right(ask, runs):
    from concurrent.futures import ThreadPoolExecutor

    def look(step):
        if step % 4 == 0:
            append_step(runs / "plain", 31 + step // 4)
        found = ask("curves", name="plain", metric="kl")["curves"]["kl"]
        return [step for step, _ in found] == list(range(1, len(found) + 1))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change as often as they can
    try:
        with ThreadPoolExecutor(1) as writer, ThreadPoolExecutor(4) as readers:
            looks = [writer.map(look, range(40)), readers.map(look, [1] * 40)]
            assert all(right for each in looks for right in each)
    finally:
        sys.setswitchinterval(interval)
    assert ask("curves", name="plain", metric="kl")["step"] == 40


def test_a_folder_of_many_runs_is_read_in_parts(tmp_path):
    for number in range(5):
        write_run(tmp_path / f"run-{number}", steps=2, samples=False)
    library = Library(tmp_path)
    unread = [sum("unread" in line for line in library.list(seconds=0)) for _ in range(6)]
    assert unread == [4, 3, 2, 1, 0, 0]
    assert all(line["state"] == "finished" for line in library.list())


def test_only_a_few_runs_stay_in_memory(tmp_path):
    for number in range(KEPT + 3):
        write_run(tmp_path / f"run-{number}", steps=2, samples=False)
    library = Library(tmp_path)
    for number in range(KEPT + 3):
        with library.open(f"run-{number}") as opened:
            assert opened.run.metrics()["step"] == [1, 2]
    assert len(library._open) == KEPT


# --- ten thousand steps ---


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    write_run(folder / "long", steps=10_000, eval_every=10)
    return folder


def test_a_long_run_is_thinned_and_a_look_at_it_is_cheap(long_run):
    site = Site()
    with (
        running(make_studio_app(Library(long_run), site), site),
        httpx.Client(base_url=site.address, timeout=60) as client,
    ):
        client.get(site.url)
        crowd, began = busy(), time.monotonic()
        about = client.get("/api/run", params={"name": "long"}).json()
        names = [
            name
            for one in about["groups"]
            if one["open"]
            for chart in one["charts"]
            for name in chart["names"]
        ]
        asked = {"name": "long", "metric": names}
        response = client.get("/api/curves", params=asked)
        opened = time.monotonic() - began
        assert len(response.content) < 300_000
        curves = response.json()["curves"]
        assert all(len(points) <= 700 for points in curves.values())
        rewards = [metrics_at(step, 10_000)["avg_reward"] for step in range(1, 10_001)]
        assert max(y for _, y in curves["avg_reward"]) == pytest.approx(max(rewards), rel=1e-5)
        asked |= {"after": 10_000, "edition": response.json()["edition"]}
        before = time.process_time()
        for _ in range(10):
            assert client.get("/api/curves", params=asked).json()["anew"] is False
        look = (time.process_time() - before) / 10
        print(
            f"\nopened in {opened:.2f} s, {len(response.content)} bytes; a look takes {look * 1000:.0f} ms "
            "of a core"
        )
        assert opened < 2.0 * crowd
        assert look < 0.1  # every two seconds


def test_a_glance_reads_little_of_a_long_file(long_run):
    path = long_run / "long" / "metrics.jsonl"
    points = glance(path, "avg_reward")
    assert 40 <= len(points) <= 50
    assert points[0][0] == 1
    assert points[-1][0] == 10_000
    assert all(value == metrics_at(step, 10_000)["avg_reward"] for step, value in points)
    before = time.process_time()
    glance(path, "avg_reward")
    assert time.process_time() - before < 0.1
    assert glance(path.parent / "nothing", "kl") == []


# --- pure parts ---


def test_a_curve_leaves_out_what_is_absent_and_keeps_the_peaks():
    steps = list(range(1, 5001))
    values = [math.nan if step % 3 else float(step == 2100) for step in steps]
    points = curve(steps, values)
    assert len(points) <= 602
    assert [2100, 1.0] in points
    assert curve(steps, values, after=4997) == [[4998, 0.0]]
    assert curve([], []) == []


def test_a_metric_with_an_interval_has_a_band_and_no_curve_of_its_ends():
    metrics = {"step": [1, 2, 3], "validation/win_rate": [0.5, math.nan, 0.7]}
    metrics |= {
        "validation/win_rate_low": [0.4, math.nan, 0.6],
        "validation/win_rate_high": [0.6, math.nan, 0.8],
    }
    assert band(metrics, "validation/win_rate") == [[1, 0.4, 0.6], [3, 0.6, 0.8]]
    assert band(metrics, "validation/win_rate", after=1) == [[3, 0.6, 0.8]]
    shown = [name for one in groups(metrics) for chart in one["charts"] for name in chart["names"]]
    assert shown == ["validation/win_rate"]
    [told] = groups(metrics)[0]["charts"][0]["about"]
    assert told["healthy"].startswith("Above 0.5")


def test_runs_that_differ_in_the_seed_alone_are_one_series():
    def member(name, seed, offset, **settings):
        metrics = {
            "step": [1.0, 2.0, 3.0],
            "kl": [0.0, 1.0, 2.0],
            "avg_reward": [offset, offset + 1, math.nan],
            "own": [1.0, 2.0, 3.0],
        }
        return Member(name, "finished", {"seed": seed, "run_name": name, "lam": 0.9, **settings}, metrics)

    empty = Member("d", "stopped", {}, {"step": []})
    said = compare([member("a-0", 0, 0.0), member("a-1", 1, 4.0), member("c", 0, 9.0, lam=0.5), empty])
    assert said["groups"] == {"a (2 seeds)": ["a-0", "a-1"]}
    assert [row["run"] for row in said["rows"]] == ["a-0", "a-1", "c", "a (2 seeds)"]
    assert said["more"] == {"own": "own"}
    charts = {chart["title"]: chart["series"] for chart in said["charts"]}
    both, *alone = charts["Training reward"]
    assert both["points"] == [[1, 2], [2, 3]]
    assert all(
        low < mean < high for (_, mean), (_, low, high) in zip(both["points"], both["band"], strict=True)
    )
    assert [one["points"] for one in alone if one["name"] == "c"] == [[[1, 9], [2, 10]]]
    seconds = [one["points"][1][:2] for one in charts["Training reward against KL"]]
    assert seconds == [[1, 3], [1, 1], [1, 5], [1, 10]]  # the mean first
    assert [chart["title"] for chart in compare([member("a", 0, 0.0)], ["own"])["charts"]][-1] == "own"
    assert compare([]) == {"columns": {}, "rows": [], "groups": {}, "charts": [], "notes": [], "more": {}}


def test_ten_thousand_steps_of_several_seeds_compare_quickly():
    steps = [float(step) for step in range(1, 10_001)]
    columns = {
        name: [math.sin(step) for step in steps]
        for name in ("avg_reward", "kl", "entropy", "response_length", "eos_rate")
    }
    members = [
        Member(f"r-{seed}", "finished", {"seed": seed, "lam": 1}, {"step": steps, **columns})
        for seed in range(4)
    ]
    before = time.process_time()
    charts = compare(members)["charts"]
    assert time.process_time() - before < 3
    assert all(len(series["points"]) <= 700 for chart in charts for series in chart["series"])
    assert charts[1]["series"][0]["points"][-1][0] == 10_000


def test_prompts_are_followed_through_the_steps():
    rows = [
        {"step": step, "kind": kind, "prompt": prompt, "text": f"{prompt} at {step}", "reward": step}
        for step in (5, 10, 15, 20, 25)
        for kind, prompt in (
            ("trained", f"only {step}"),
            ("followed", "p"),
            ("followed", "q"),
            ("trained", "twice"),
            ("trained", "twice"),
        )
    ]
    table = follow(rows)
    assert table["chosen"] == [5, 10, 15, 25]
    assert [(row["kind"], row["prompt"]) for row in table["rows"][:4]] == [
        ("followed", "p"),
        ("followed", "q"),
        ("trained", "twice"),
        ("trained", "twice"),
    ]
    assert [cell["text"] for cell in table["rows"][0]["cells"]] == ["p at 5", "p at 10", "p at 15", "p at 25"]
    assert follow(rows, [14, 999])["chosen"] == [15, 25]
    assert follow([]) == {"steps": [], "chosen": [], "rows": [], "left": 0}
    assert choose([7], []) == [7]
    assert [nearest([2, 4, 8], step) for step in (-1, 3, 5, 7, 99)] == [2, 2, 4, 8, 8]


# --- the command and the label page ---


def test_the_label_page_is_there_with_a_database_and_only_then(runs, tmp_path, ask):
    assert ask.client.get("/label").status_code == 404
    store = Store(tmp_path / "f.db", overlap=1)
    store.add_items([Item("p", "a", "b", True, True, "m", "m")])
    site = Site()
    with (
        running(make_studio_app(Library(runs), site, store), site),
        httpx.Client(base_url=site.address, timeout=60) as client,
    ):
        assert client.get("/label").status_code == 403
        client.get(site.url)
        assert "label.js" in client.get("/label").text
        assert "studio.js" in client.get("/").text
        assert client.get("/api/runs").json()["label"] is True
        item = client.get("/api/state", params={"annotator": "Ann"}).json()["item"]
        body = {"annotator": "Ann", "item": item["id"], "choice": "tie", "seconds": 1}
        assert client.post("/api/answer", json=body).status_code == 403  # not from the page
        assert client.post("/api/answer", json=body, headers={"origin": site.address}).json()["done"] == 1
        assert [answer.choice for answer in store.answers()] == ["tie"]


def test_the_command_names_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(["studio", "elsewhere"]).run_dir == Path("elsewhere")
    for arguments, words in (
        (["studio"], "there is no folder runs"),
        (["studio", "--run-dir", ".", "--label-db", "no.db"], "there is no no.db"),
        (["studio", "--run-dir", ".", "--host", "0.0.0.0"], "every address"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "no.db").exists()
    (tmp_path / "feedback.db").write_text("something else")
    assert Studio()._store() is None
    assert "without a label page" in capsys.readouterr().err
    (tmp_path / "feedback.db").unlink()
    Store("feedback.db")
    assert Studio()._store() is not None


def test_the_studio_needs_no_torch(runs):
    """Importing it takes seconds, for which the first page of a run would stay empty."""
    (runs / "plain" / "replay").mkdir()
    (runs / "plain" / "replay" / "step-00000001.safetensors").touch()
    code = (
        "import sys\nimport proxima.cli.studio_command\nfrom proxima.pages.studio import Library\n"
        "from proxima.pages.studio.studio_app import findings_of, run_of\n"
        f"with Library({str(runs)!r}).open('plain') as opened:\n"
        "    assert len(run_of(opened)['bundles']) == 1\n    findings_of(opened.run)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(SOURCE), "PATH": ""})
