"""Run folders are read as they are: whole, growing, cut back or broken; a broken file costs what it held
and no more."""

import fcntl
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run, find_runs, thin
from tests.fake_run import HOSTILE, append_step, metrics_at, token_sample, write_run, write_tokens

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "runs" / "one", 30)


def test_a_real_run_reads_as_what_train_returned(make_config, prompts):
    results = PPOTrainer(make_config(batch_size=2, run_name="real", eval_every=1)).train(
        prompts, num_epochs=1
    )
    run = Run(results.run_folder)
    metrics = run.metrics()
    assert metrics["step"] == [1, 2]
    for name in ("avg_reward", "kl", "policy_loss", "seconds"):
        assert metrics[name] == [step[name] for step in results.metrics]
    assert (run.name, run.state, run.problems) == ("real", "finished", [])
    assert run.config["batch_size"] == 2
    assert run.environment["proxima"]
    assert run.results["best_step"] == results.best_step
    assert {sample["step"] for sample in run.samples()} == {1, 2}
    assert [each["step"] for each in run.checkpoints()][-1] == 2
    assert sum(each["best"] for each in run.checkpoints()) == 1


def test_columns_are_as_long_as_the_steps_with_nan_where_a_step_has_none(folder):
    metrics = Run(folder).metrics()
    assert {len(column) for column in metrics.values()} == {30}
    held_out = metrics["validation/reward"]
    assert [place + 1 for place, reward in enumerate(held_out) if not math.isnan(reward)] == [10, 20, 30]
    assert metrics["kl"][4] == metrics_at(5, 30)["kl"]


def test_only_what_was_added_is_read_and_a_half_written_line_waits(folder):
    run = Run(folder)
    run.metrics()
    path, whole = folder / "metrics.jsonl", json.dumps(metrics_at(31)) + "\n"
    with path.open("a") as file:
        file.write(whole[:50])
    assert len(run.metrics()["step"]) == 30
    with path.open("a") as file:
        file.write(whole[50:])
    (folder / "samples.jsonl").unlink()
    metrics = run.metrics()
    assert metrics["step"][-1] == 31
    assert math.isnan(metrics["validation/reward"][-1])
    append_step(folder, 32, brand_new=7)
    metrics = run.metrics()
    assert math.isnan(metrics["brand_new"][30])
    assert metrics["brand_new"][31] == 7
    assert run.problems == []


def test_a_run_that_went_back_shows_the_steps_it_has_now(folder):
    run = Run(folder)
    run.metrics()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:12]))
    for step in range(13, 60):
        append_step(folder, step, 100, avg_reward=5.0)
    metrics = run.metrics()
    assert metrics["step"] == list(range(1, 60))
    assert metrics["avg_reward"][12:] == [5.0] * 47


def test_broken_lines_are_left_out_and_named(folder):
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 31, "avg_reward"\n')
        file.write(b"\xff\xfe\x00\n[1, 2]\nnull\n\n" + b"[" * 100_000 + b"\n")
        file.write(b'{"step": "<script>", "kl": 1}\n{"kl": 1}\n{"step": null}\n{"step": 1e400}\n')
        file.write(
            b'{"step": 32, "avg_reward": null, "kl": "<b>", "entropy": {"a": 1}, "tokens": 1'
            + b"0" * 400
            + b"}\n"
        )
    run = Run(folder)
    metrics = run.metrics()
    assert metrics["step"][-2:] == [30, 32]
    assert all(math.isnan(metrics[name][-1]) for name in ("avg_reward", "kl", "entropy", "tokens"))
    assert len(run.problems) == 10
    assert "metrics.jsonl line 31 is not a record" in run.problems[0]


@pytest.mark.parametrize(
    "missing", ["config.yaml", "environment.json", "metrics.jsonl", "samples.jsonl", "results.json"]
)
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00{", b"[1]", b"{" * 5000, b"a: &a [1]\nb: *a\n"])
def test_a_missing_or_broken_file_costs_only_what_it_held(folder, missing, content):
    (folder / missing).unlink()
    if content is not None:
        (folder / missing).write_bytes(content)
    run = Run(folder)
    seen = (
        run.config,
        run.environment,
        run.metrics(),
        run.samples(),
        run.results,
        run.warnings(),
        run.checkpoints(),
        repr(run),
    )
    assert sum(map(bool, seen)) >= 6
    assert run.state in ("finished", "stopped")
    for problem in run.problems:
        assert missing in problem


def test_training_finished_stopped(folder, tmp_path):
    run = Run(folder)
    assert run.state == "finished"
    append_step(folder, 31)  # went on after its end, and was killed
    assert run.state == "stopped"
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run.state == "training"
    assert run.state == "stopped"
    assert Run(write_run(tmp_path / "cut", 3, finished=False)).state == "stopped"


def test_asking_for_the_state_never_stops_a_run_from_starting(make_config, prompts):
    config = make_config(batch_size=4, run_name="asked")
    asking = (
        "import fcntl, sys, time\nfile = open(sys.argv[1], 'rb')\nfcntl.flock(file, "
        "fcntl.LOCK_SH)\nprint('held', flush=True)\n"
        "time.sleep(0.05)\n"
    )
    lock = Path(config.run_dir) / "asked" / ".lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with subprocess.Popen([sys.executable, "-c", asking, lock], stdout=subprocess.PIPE, text=True) as reader:
        trainer = PPOTrainer(config)
        assert reader.stdout.readline() == "held\n"
        assert trainer.train(prompts).stop_reason == "all epochs done"


def test_tokens_are_as_stored(folder):
    run = Run(folder)
    assert run.token_steps() == [10, 20, 30]
    samples = run.tokens(20)
    assert [sample["kind"] for sample in samples] == ["followed", "trained"]
    assert samples[1]["columns"] == token_sample(20, "trained")["columns"]
    assert "".join(samples[0]["tokens"]) == samples[0]["text"]
    with pytest.raises(ValueError, match="no tokens of step 7; logged steps are 10, 20, 30"):
        run.tokens(7)


def test_broken_token_files_cost_their_step(folder):
    run = Run(folder)
    for step, content in {
        40: "",
        50: "[]",
        60: '{"samples": [1]}',
        70: '{"samples": [{"tokens": ["a"]}]}',
    }.items():
        (folder / "tokens" / f"step-{step:08d}.json").write_text(content)
        assert run.tokens(step) == []
        assert f"step-{step:08d}.json is not a file of token records" in run.problems[-1]
    (folder / "tokens" / "step-x.json").write_text("{}")
    (folder / "tokens" / ".step-00000080.part").write_text("{}")
    assert run.token_steps() == [10, 20, 30, 40, 50, 60, 70]
    odd = {
        "tokens": ["a", 5, HOSTILE],
        "columns": {"kl": [1, None, "<b>"], "value": [1], "reward": "no"},
        "reward": "much",
    }
    write_tokens(folder, 80, [odd])
    [sample] = run.tokens(80)
    assert sample["tokens"] == ["a", "5", HOSTILE]
    assert sample["columns"] == {"kl": [1.0, None, None]}
    assert sample["reward"] is None


def test_what_was_observed_is_read_from_its_list_and_in_older_files_from_missing_numbers(folder):
    lost = {"tokens": ["a", "b", "c"], "columns": {"logprob": [None, None, None]}}
    lists = [[], [1], [True, "0", [2], None, -1, 3, 10**30], "no"]
    write_tokens(folder, 40, [lost, *({**lost, "observed": each} for each in lists)])
    samples = Run(folder).tokens(40)
    assert [sample["observed"] for sample in samples] == [[0, 1, 2], [], [1], [], [0, 1, 2]]
    assert "replies" not in samples[1]
    assert [turn["role"] for turn in samples[2]["replies"]] == ["assistant", "environment", "assistant"]


def test_data_frames(folder):
    run = Run(folder)
    assert run.metrics_frame().loc[4, "kl"] == metrics_at(5, 30)["kl"]
    assert len(run.samples_frame()) == 6
    frame, sample = run.tokens_frame(10), token_sample(10, "trained")
    trained = frame[frame["kind"] == "trained"]
    assert list(trained["ratio"]) == sample["columns"]["ratio"]
    assert list(trained["token"]) == sample["tokens"]
    empty = Run(write_run(folder.parent / "empty", 0))
    assert len(empty.metrics_frame()) == len(empty.samples_frame()) == 0


def test_runs_are_found_newest_first_however_broken(tmp_path):
    home = tmp_path / "runs"
    for number, name in enumerate(("old", "demo/ppo", "learn/seed-0/ppo")):
        write_run(home / name, 2)
        for path in ("metrics.jsonl", "config.yaml"):
            os.utime(home / name / path, (1000 + number, 1000 + number))
    broken = home / "broken"
    broken.mkdir()
    (broken / "config.yaml").write_bytes(b"\xff{")
    (home / "empty").mkdir()
    (home / "notes.txt").write_text("x")
    (home / ".hidden").mkdir()
    (home / ".hidden" / "config.yaml").touch()
    (home / "loop").symlink_to(home)
    found = find_runs(home)
    assert [run.name for run in found] == ["broken", "learn/seed-0/ppo", "demo/ppo", "old"]
    assert found[0].config == {}
    assert "config.yaml cannot be read" in found[0].problems[0]
    assert find_runs(tmp_path / "nowhere") == []
    with pytest.raises(ValueError, match="is not the folder of a run"):
        Run(tmp_path / "nowhere")


def test_ten_thousand_steps_are_quick(tmp_path):
    run = Run(write_run(tmp_path / "long", 10_000, eval_every=100))
    started = time.process_time()
    metrics = run.metrics()
    samples = run.samples()
    first = time.process_time() - started
    append_step(run.path, 10_001, 10_001)
    started = time.process_time()
    assert run.metrics()["step"][-1] == 10_001
    assert run.last()["step"] == 10_001
    assert (len(metrics["kl"]), len(samples)) == (10_000, 200)
    assert first < 3
    assert time.process_time() - started < 1


def test_thinning_keeps_ends_peaks_and_dips():
    xs = list(range(10_000))
    ys = [math.sin(x / 500) for x in xs]
    ys[777], ys[4321], ys[5000] = 9.0, -9.0, math.nan
    points = thin(xs, ys, 200)
    assert len(points) <= 202
    assert points == sorted(points)
    assert [777, 9.0] in points
    assert [4321, -9.0] in points
    assert (points[0][0], points[-1][0]) == (0, 9999)
    assert thin([1, 2, 3], [1.0, math.nan, math.inf], 100) == [[1, 1.0], [2, None], [3, None]]
    assert thin([], []) == []
    assert len(thin(xs, [math.nan] * 10_000, 100)) <= 52


def test_reading_runs_needs_neither_torch_nor_pandas():
    code = (
        "import sys\nsys.modules['pandas'] = None\nimport proxima.runs\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    )
