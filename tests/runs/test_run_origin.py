"""What made a run is written down with it, without keys, and a stopped run says how to go on."""

import contextlib
import json
import shlex

import pytest

from proxima.cli import main
from proxima.config import shareable_words
from proxima.runs import (
    Run,
    find_runs,
    live_folder,
    note_checks,
    noting_command,
    read_origin,
    resume_command,
    write_examination,
)
from proxima.runs.run_origin import write_origin

KEY = "s3cr3t-k3y"
LINES = [
    f"proxima train --rewards https://user:{KEY}@host/score",
    f"proxima train --rewards 0.5*https://host/score?q={KEY},timeout=3",
    f"proxima train --rewards=https://host/score?anything={KEY}",
    f"proxima train --rewards mine:score,api_key={KEY},low=3 --judges other:judge,hf_token={KEY}",
    f"proxima train --api-key {KEY} --data x.jsonl",
    f"proxima train --hf-token={KEY}",
    f"proxima train --data https://host/a.jsonl#{KEY}",
    f"proxima train --rewards Mine:score,API_KEY={KEY}",
    f"proxima train --rewards mine:score,db_pass={KEY},access_key_id={KEY},low=3",
]


@pytest.mark.parametrize("line", LINES)
def test_no_key_of_a_command_line_is_written_down(tmp_path, line):
    with noting_command(shlex.split(line)):
        write_origin(tmp_path, "ppo")
    assert KEY not in (tmp_path / "origin.json").read_text()
    assert "***" in (tmp_path / "origin.json").read_text()
    assert read_origin(tmp_path)["command"][:2] == ["proxima", "train"]


def test_what_is_not_a_key_stays_as_it_was():
    line = (
        "proxima train --rewards length_band,low=5,high=20 --run-name r --token-samples 4 --data a,b=c.jsonl"
    )
    assert shareable_words(line.split()) == line.split()


def test_a_run_outside_a_command_has_no_command(tmp_path):
    with noting_command(["proxima", "train"]):
        pass
    write_origin(tmp_path, "ppo")
    assert read_origin(tmp_path) == {"kind": "ppo"}


def test_a_resumed_run_keeps_what_began_it(tmp_path):
    for words in (["proxima", "train", "--data", "d"], ["proxima", "train", "--resume"]):
        with noting_command(words):
            note_checks([{"level": "warn", "name": "n", "text": "t", "advice": "a"}])
            write_origin(tmp_path, "ppo", resumed="--resume" in words)
    origin = read_origin(tmp_path)
    assert origin["command"] == ["proxima", "train", "--data", "d"]
    assert origin["resumed"] == [["proxima", "train", "--resume"]]
    assert origin["checks"] == [{"level": "warn", "name": "n", "text": "t", "advice": "a"}]


def test_an_older_run_was_not_made_by_the_command_that_resumes_it(tmp_path):
    with noting_command(["proxima", "train", "--resume"]):
        write_origin(tmp_path, "ppo", resumed=True)
    assert read_origin(tmp_path) == {"kind": "ppo", "resumed": [["proxima", "train", "--resume"]]}


@pytest.mark.parametrize(
    ("line", "resumed"),
    [
        ("proxima train --data d", "proxima train --data d --run-name NAME --resume"),
        ("proxima train --run-name=r --force", "proxima train --run-name=r --resume"),
        (
            "torchrun --nproc-per-node 2 -m proxima train --resume",
            "torchrun --nproc-per-node 2 -m proxima train --run-name NAME --resume",
        ),
    ],
)
def test_the_command_that_resumes(tmp_path, line, resumed):
    with noting_command(line.split()):
        write_origin(tmp_path, "ppo")
    assert resume_command(tmp_path) == resumed.replace("NAME", tmp_path.name)


def test_a_run_that_no_command_made_is_resumed_from_its_settings(tmp_path):
    assert f"--config {tmp_path}/config.yaml --data PROMPTS" in resume_command(tmp_path)


HOSTILE = [
    "[]",
    "{",
    "[" * 100_000,
    '{"command": "rm -rf"}',
    '{"command": [1]}',
    '{"checks": 3, "kind": "x"}',
]


@pytest.mark.parametrize("content", HOSTILE)
def test_a_file_by_another_hand_gives_nothing(tmp_path, content):
    (tmp_path / "origin.json").write_text(content)
    assert read_origin(tmp_path) == {}
    assert Run(tmp_path).kind == "ppo"


@pytest.mark.parametrize(
    "words",
    [
        ["rm", "-rf", "."],
        ["torchrun", "evil.py"],
        ["torchrun", "--nproc-per-node", "2", "-m", "evil"],
        ["proxima", "train", "\x1b[201~rm -rf .\n"],
        ["proxima", "train", "\u202e"],
        [],
    ],
)
def test_a_command_of_something_else_is_never_offered(tmp_path, words):
    (tmp_path / "origin.json").write_text(json.dumps({"kind": "ppo", "command": words, "resumed": [words]}))
    assert "command" not in read_origin(tmp_path)
    assert read_origin(tmp_path)["resumed"] == []
    assert resume_command(tmp_path).startswith("proxima train --config")


def test_a_key_that_another_hand_wrote_is_not_shown(tmp_path):
    (tmp_path / "origin.json").write_text(json.dumps({"command": ["proxima", f"https://u:{KEY}@h/"]}))
    assert KEY not in json.dumps(read_origin(tmp_path))


def test_train_notes_its_command_and_what_the_doctor_said(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    line = f"train --model {tiny} --data prompts.txt --rewards length_band,low=1,high=9 --max-new-tokens 2"
    words = [*line.split(), "--batch-size", "2", "--minibatch-size", "2", "--run-name", "r"]
    main(words)
    origin = Run("runs/r").origin
    assert origin["command"] == ["proxima", *words]
    assert origin["folder"] == str(tmp_path)
    assert {each["level"] for each in origin["checks"]} <= {"ok", "warn"}
    assert origin["checks"]
    assert Run("runs/r").log_text()[0].count("\n") > 0


def test_the_doctor_notes_what_it_found_where_it_is_given_a_run_that_then_begins(
    tmp_path, tiny, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    line = f"--model {tiny} --data prompts.txt --rewards length_band,low=1,high=9 --max-new-tokens 2"
    words = [*line.split(), "--batch-size", "2", "--minibatch-size", "2"]

    def ask(*more):
        with contextlib.suppress(SystemExit):  # what it finds is not the matter here
            main(["doctor", *words, *more])

    ask()
    assert not (tmp_path / "runs").exists()
    ask("--run-name", "r", "--audit")
    assert find_runs(tmp_path / "runs") == []  # nothing has begun
    main(["train", *words, "--run-name", "r"])
    (said,) = Run("runs/r").examinations
    assert said["how"] == "proxima doctor --audit"
    assert "cheap tricks" in {each["name"] for each in said["checks"]}
    assert {each["level"] for each in said["checks"]} <= {"ok", "warn", "fail"}


def test_an_examination_replaces_the_one_of_the_same_kind_alone(tmp_path):
    found = [{"level": "ok", "name": str(number), "text": "", "advice": ""} for number in range(3)]
    hows = ("proxima doctor --audit", "proxima doctor", "proxima doctor --audit")
    for how, one in zip(hows, found, strict=True):
        write_examination(tmp_path, how, [one])
    said = Run(tmp_path).examinations
    assert [(each["how"], each["checks"][0]["name"]) for each in said] == [(hows[1], "1"), (hows[0], "2")]


def test_no_key_of_a_finding_is_written_down(tmp_path):
    found = {"level": "fail", "name": "endpoint", "text": f"https://u:{KEY}@h/ is down", "advice": "a"}
    write_examination(tmp_path / "new", "proxima doctor", [found])
    assert KEY not in (tmp_path / "new" / "doctor.json").read_text()


@pytest.mark.parametrize(
    "content", ["{}", "[" * 100_000, "[1, {}]", '[{"checks": 3}]', '{"a": [{"checks": []}]}']
)
def test_an_examination_by_another_hand_gives_nothing(tmp_path, content):
    (tmp_path / "doctor.json").write_text(content)
    assert Run(tmp_path).examinations == []


# --- fine-tuning, live ---


def test_a_fine_tuning_run_is_seen_while_it_trains_and_after(tmp_path):
    folder = tmp_path / "sft"
    folder.mkdir()
    run = Run(folder)
    with live_folder(folder, "sft") as write:
        write({"step": 5, "epoch": 1, "train_loss": 2.0, "validation_loss": 2.5})
        assert (run.kind, run.state, run.last()["validation_loss"]) == ("sft", "training", 2.5)
        assert [each.name for each in find_runs(tmp_path)] == ["sft"]
        with pytest.raises(ValueError, match="is in use by process"), live_folder(folder, "sft"):
            pass
    assert run.metrics()["step"] == [5.0]
    assert run.state == "stopped"
    (folder / "sft.json").write_text("{}")
    assert run.state == "finished"


def test_a_run_that_fails_before_its_first_evaluation_leaves_nothing(tmp_path):
    (tmp_path / "sft").mkdir()
    with pytest.raises(RuntimeError), live_folder(tmp_path / "sft", "sft"):
        raise RuntimeError
    assert not (tmp_path / "sft").exists()
    (tmp_path / "sft").mkdir()
    with pytest.raises(ValueError, match="not declared"), live_folder(tmp_path / "sft", "sft") as write:
        [write({"step": 1, name: 1.0}) for name in ("train_loss", "what_is_this")]
    assert Run(tmp_path / "sft").metrics()["train_loss"] == [1.0]


def test_sft_and_reward_runs_have_metrics_a_log_and_their_command(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"p{i}", "completion": f" c{i}"} for i in range(8)]
    pairs = [{"prompt": f"p{i}", "chosen": f" good {i}", "rejected": f" bad {i}"} for i in range(8)]
    for name, data in (("sft", rows), ("reward", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        flags = ["--batch-size", "4", "--eval-every", "1", "--epochs", "1", "--run-name", name]
        main([name, "--model", tiny, "--data", f"{name}.jsonl", *flags])
        run = Run(tmp_path / "runs" / name)
        assert (run.kind, run.state) == (name, "finished")
        assert run.origin["command"][:2] == ["proxima", name]
        assert run.config["epochs"] == 1
        assert len(run.metrics()["validation_loss"]) >= 2
        assert f"{name}: step 1/" in run.log_text()[0]
        with pytest.raises(SystemExit):
            main(["report", f"runs/{name}"])
        assert "fine-tuning run" in capsys.readouterr().err
    assert {run.name for run in find_runs(tmp_path / "runs")} == {"sft", "reward"}


def test_the_log_is_read_from_where_it_was_left_and_again_where_it_was_cut(tmp_path):
    run = Run(tmp_path)
    assert run.log_text() == ("", 0)
    (tmp_path / "log.txt").write_bytes(b"one\n")
    text, end = run.log_text()
    assert (text, end) == ("one\n", 4)
    (tmp_path / "log.txt").write_bytes(b"one\ntwo \xff\n")
    assert run.log_text(end) == ("two \ufffd\n", 10)
    assert run.log_text(99)[0].startswith("one")  # it is shorter than it was
    (tmp_path / "log.txt").write_bytes(b"x" * 200_000)
    assert len(run.log_text()[0]) == 65536
