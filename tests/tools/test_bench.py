"""The benchmark: its floors follow from shapes, its table shows what was measured, a small case runs, the
peer is asked for."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import proxima
from proxima.cli import main
from proxima.cli.bench_command import Bench
from proxima.ppo_trainer import PPOTrainer
from proxima.tools.bench import (
    CASES,
    Case,
    FinetuningCase,
    Machine,
    beside,
    beside_line,
    finetuning_table,
    growth_plot,
    make_random_model,
    profile_table,
    run_case,
    run_finetuning_case,
    run_generation_peer,
    run_peer,
    scaling_table,
    table,
)
from proxima.tools.bench import bench_case as bench
from proxima.tools.bench import growth as bench_growth
from proxima.tools.bench.generation_peers import generation_peer_line
from proxima.tools.bench.growth import growth, sized
from proxima.tools.bench.hardware_floor import finetuning_floor, floors
from proxima.tools.bench.random_model import SHAPES
from tests.helpers import LOGPROB_ROUNDING

MACHINE = Machine("CPU, test", 1e12, 1e11)
SMALL = Case("test", "tiny", batch=4, prompt=(6, 9), response=(3, 5), epochs=1)


@pytest.fixture(scope="module")
def result():
    torch.set_num_threads(1)
    return run_case(SMALL, MACHINE, steps=1)


def test_a_profile_shows_what_a_step_spends_its_time_in():
    found = run_case(SMALL, MACHINE, steps=1, profile=True)["profile"]
    kernels = found["kernels"]
    assert sum(each["milliseconds"] for each in kernels) <= found["milliseconds"] * (1 + 1e-9)
    assert [each["share"] for each in kernels] == sorted((each["share"] for each in kernels), reverse=True)
    products = [each for each in kernels if each["name"] in ("aten::mm", "aten::addmm")]
    assert products
    assert all(each["calls"] > 0 and each["milliseconds"] > 0 for each in products)
    lines = profile_table(found).splitlines()
    assert len(lines) == 14
    assert kernels[0]["name"] in lines[1]
    assert lines[-1].startswith("others")
    shares = [float(line.split()[-1].rstrip("%")) for line in lines[1:]]
    assert sum(shares) == pytest.approx(100, abs=1)


def test_a_profile_of_fine_tuning_is_refused():
    with pytest.raises(ValueError, match="profile shows PPO steps, and small sft is none"):
        Bench(cases=("small sft",), profile=True).run()


def test_a_small_case_is_timed_phase_by_phase(result):
    assert set(result["phases"]) == {"generate", "score", "reward", "value", "update"}
    assert 0 < sum(result["phases"].values()) <= result["seconds"] * 1.01
    assert result["eager_decode_steps"] > 0 == result["graph_replays"]
    assert result["first_ratio_error"] < LOGPROB_ROUNDING
    assert 0 <= result["waiting_slots"] < 1
    shown = table(result)
    assert "prompts 6-9, responses 3-5" in shown
    assert f"{result['waiting_slots']:.0%} of their slots waited" in shown
    assert "checkpointing" not in shown
    assert f"{result['seconds']:.3f}" in shown


def test_the_table_says_how_the_peer_differs(result):
    peer = {"version": "1.12.0", "seconds": 10 * result["seconds"], "generate": 1.0, "peak_gib": None}
    assert "10.0 times as long. It trains its value model in full" in table(result, peer)


def test_the_table_says_that_the_peer_samples_from_all_tokens(result):
    peer = {"version": "1.12.0", "seconds": 1.0, "generate": 1.0, "peak_gib": None}
    assert "samples from all tokens" in table({**result, "top_k": 50}, peer)
    assert "samples from all tokens" not in table(result, peer)


def test_all_cases_are_those_that_suit_the_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set(Bench(cases=("all",))._names()) == {"embedded", "small", "small sft", "small reward"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert {"standard", "very long", "8B nf4", "sft"} <= set(Bench(cases=("all",))._names())


@pytest.mark.long
def test_plain_generation_by_transformers_is_timed(tmp_path):
    case = replace(SMALL, prompt=(6, 6), response=(5, 5))
    make_random_model(tmp_path / "tiny", "tiny")
    found = run_generation_peer("transformers", case, tmp_path / "tiny", steps=1)
    assert found["generate"] > 0
    result = {"phases": {"generate": found["generate"] / 2}}
    assert "2.00 times ours" in generation_peer_line(result, found)


def test_a_generation_peer_that_fails_is_a_row_that_says_why(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="vLLM needs an environment of its own"):
        run_generation_peer("vllm", SMALL, tmp_path)
    monkeypatch.setenv("PROXIMA_VLLM_PYTHON", sys.executable)
    found = run_generation_peer("vllm", SMALL, tmp_path, steps=1)
    assert "No module named 'vllm'" in found["failed"]
    assert "vllm failed: " in generation_peer_line({}, found)


def test_a_slot_waits_while_its_sequence_has_ended_and_others_run():
    uneven = run_case(replace(SMALL, batch=16, response=(2, 40)), MACHINE, steps=1)
    assert 0 < uneven["waiting_slots"] < 0.5  # on a CPU slots are given up when a quarter of them wait
    even = run_case(replace(SMALL, response=(5, 5)), MACHINE, steps=1, gradient_checkpointing=True)
    assert even["waiting_slots"] == 0
    assert table(even).splitlines()[0].endswith("optimiser steps each, checkpointing")


def test_a_case_with_groups_is_timed_without_a_value_model():
    case = Case("test", "tiny", batch=2, prompt=(6, 6), response=(3, 3), epochs=1, generations=3)
    found = run_case(case, MACHINE, steps=1)
    assert (found["response_tokens"], case.settings["minibatch_size"]) == (18, 6)
    assert (found["floor"]["value"], found["floor"]["reward"]) == (0, 0)
    peer = {"version": "1.12.0", "seconds": found["seconds"], "generate": 1.0, "peak_gib": None}
    shown = table(found, peer)
    assert "batch 2 x 3" in shown
    assert shown.endswith("1.0 times as long.")


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_steps_of_fine_tuning_are_timed_after_a_warm_up(kind, tmp_path):
    case = FinetuningCase("test", kind, "tiny", batch=2, prompt=6, response=4)
    found = run_finetuning_case(case, MACHINE, 1, tmp_path, gradient_checkpointing=True)
    assert case.tokens == (20 if kind == "sft" else 40)
    assert found["tokens_per_second"] == pytest.approx(case.tokens / found["seconds"])
    assert found["ratio_to_floor"] == pytest.approx(found["seconds"] / found["floor"])
    peer = {"version": "1.12.0", "seconds": 3 * found["seconds"], "generate": 0.0, "peak_gib": 2.0}
    shown = finetuning_table(found, peer)
    assert f"{found['seconds']:>9.3f}" in shown
    assert shown.endswith("(allocated 2.0 GiB): 3.0 times as long.")


def test_floors_grow_with_what_is_done():
    def step(**changes):
        case = Case(**{"size": "0.6B", **changes})
        return floors(case, SHAPES["0.6B"], case.response[1], MACHINE)

    plain = step()
    assert step(batch=128)["update"] == pytest.approx(2 * plain["update"])
    assert step(epochs=8)["update"] == pytest.approx(2 * plain["update"])
    assert step(prompt=(1024, 1024))["generate"] > plain["generate"]
    grouped = step(batch=8, generations=8)  # the same responses to fewer prompts
    assert grouped["generate"] < plain["generate"]
    assert grouped["score"] == pytest.approx(plain["score"])
    assert grouped["update"] < plain["update"]
    assert plain["step"] == pytest.approx(sum(plain[name] for name in bench.PHASES))
    few = {"batch": 1, "prompt": (1, 1)}  # little cache: weights are most of what a decode step reads
    assert step(**few, quantize="nf4")["decode_step"] < 0.4 * step(**few)["decode_step"]
    assert step(quantize="nf4")["update"] == plain["update"]
    fine = FinetuningCase("sft", "sft")
    times = [
        finetuning_floor(one, SHAPES["0.6B"], MACHINE)
        for one in (fine, replace(fine, batch=32), replace(fine, kind="reward"))
    ]
    assert times[1] == pytest.approx(2 * times[0])
    assert times[0] < times[2] < times[1]  # twice the sequences, without the head


def test_a_case_in_4_bits_is_trained_so_and_shown_so(monkeypatch):
    configs = []

    def make(config):
        configs.append(config)
        return PPOTrainer(config)

    monkeypatch.setattr(bench, "PPOTrainer", make)
    found = run_case(replace(SMALL, quantize="nf4"), MACHINE, steps=1)
    assert [config.quantize for config in configs] == ["nf4"]
    assert table(found).startswith("test: tiny in nf4, batch 4")
    assert CASES["8B nf4"] == replace(CASES["8B"], name="8B nf4", quantize="nf4")


def test_the_embedded_shape_is_that_of_the_embedded_model():
    config = json.loads(
        (Path(proxima.__file__).parent / "world" / "embedded" / "config.json").read_text(encoding="utf-8")
    )
    assert {name: config[name] for name in SHAPES["embedded"]} == SHAPES["embedded"]


def test_growth_is_measured_against_linear_growth():
    assert growth([(1, 1.0), (2, 2.0), (4, 4.0)]) == 1.0
    assert growth([(1, 1.0), (2, 1.5), (4, 3.6)]) == pytest.approx(1.2)
    case = Case(batch=8, prompt=(4, 6), response=(5, 5))
    assert sized(case, "batch", 0.5) == (4, Case(batch=4, prompt=(4, 6), response=(5, 5)))
    assert sized(case, "prompt", 2) == (12, Case(batch=8, prompt=(12, 12), response=(5, 5)))


def test_growth_is_shown_as_a_table_and_beside_a_straight_line():
    found = {"batch": {"points": [(2, 1.0), (4, 1.5)], "growth": 0.75}}
    assert "2: 1.000   4: 1.500" in scaling_table(found)
    (chart,) = growth_plot(found).charts
    assert chart["series"][1]["points"] == [[2, 1.0], [4, 2.0]]


def test_the_cost_of_a_response_token_is_timed_by_length(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(CASES, "test", SMALL)
    monkeypatch.setattr(bench_growth, "LENGTHS", (3, 6, 10_000))  # the last is beyond the context
    output = tmp_path / "b.json"
    main(["bench", "--cases", "test", "--steps", "1", "--lengths", "--output", str(output)])
    found = json.loads(output.read_text())[1]["lengths"]
    assert [result["response"] for result in found] == [[3, 3], [6, 6]]
    assert [result["response_tokens"] for result in found] == [12, 24]
    shown = capsys.readouterr().out
    for result in found:
        cost = 1e6 * result["seconds"] / result["response_tokens"]
        assert f"{result['seconds']:>10.3f}" in shown
        assert f"{cost:.1f}" in shown
    assert "microseconds per response token" in (tmp_path / "b-lengths.html").read_text()


def test_a_length_that_does_not_fit_is_a_row_and_each_is_written_at_once(monkeypatch, tmp_path, capsys):
    written, run, output = [], bench_growth.run_case, tmp_path / "b.json"

    def limited(case, *given, **named):
        written.append(json.loads(output.read_text())[-1].get("lengths"))
        if case.response[1] == 6:
            raise torch.cuda.OutOfMemoryError("made up")
        return run(case, *given, **named)

    monkeypatch.setitem(CASES, "test", SMALL)
    monkeypatch.setattr(bench_growth, "LENGTHS", (3, 6, 9, 10_000))
    monkeypatch.setattr(bench_growth, "run_case", limited)
    main(["bench", "--cases", "test", "--steps", "1", "--lengths", "--output", str(output)])
    found = json.loads(output.read_text())[-1]["lengths"]
    assert [row.get("error") for row in found] == [None, "out of memory", None]
    assert [len(rows) for rows in written] == [0, 1, 2]
    shown = capsys.readouterr().out
    assert "         6      4    out of memory" in shown
    assert [point[0] for point in bench_growth.lengths_plot(found).charts[0]["series"][0]["points"]] == [3, 9]


def test_long_responses_are_timed_in_small_batches_up_to_the_whole_context():
    sizes = [(case.response[1], case.batch) for case in bench_growth.by_length(CASES["long"])]
    assert sizes == [(256, 64), (1024, 64), (4096, 32), (16_384, 8), (32_512, 4)]


def test_prompts_have_the_lengths_of_the_case():
    counts = {len(text.split()) for text in bench.make_prompts(Case(batch=64, prompt=(5, 7)), 0)}
    assert counts == {5, 6, 7}


def test_the_peer_needs_an_environment_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PROXIMA_TRL_PYTHON", raising=False)
    with pytest.raises(ValueError, match="make peer"):
        run_peer(CASES["standard"])
    monkeypatch.setenv("PROXIMA_TRL_PYTHON", "python-that-has-trl")
    for name in ("mixed prompts", "8B nf4"):
        with pytest.raises(ValueError, match=f"of one length and weights in full, which case '{name}'"):
            run_peer(CASES[name])


def test_steps_alone_and_beside_busy_processes_take_turns(monkeypatch):
    load = [1]

    @contextmanager
    def loaded(count):
        load.append(count + 1)
        yield
        load.append(1)

    monkeypatch.setattr(beside, "busy_processes", loaded)
    trainer = SimpleNamespace(ppo_step=lambda prompts: {"seconds": 0.5 * load[-1]})
    asked = []

    def other(step):
        asked.append((step, load[-1]))
        return 0.4

    found = beside._in_turn(trainer, SMALL, count=2, steps=3, other=other)
    assert asked == [(step, 1) for step in range(5)]  # never beside the busy processes
    assert found["quiet_ratio"] == pytest.approx(1.25)
    assert "alone with OpenMP's default waits 0.40 s: ours takes 1.25 times" in beside_line("test", found)
    assert load == [1, 3, 1, 3, 1, 3, 1]
    assert found["ratio"] == 3.0
    assert "test, batch 4, 2 busy processes beside it" in beside_line("test", found)
    assert "1.50 s per step, alone 0.50 s: 3.0 times as long" in beside_line("test", found)


def test_the_other_process_waits_as_openmp_does_by_default_and_ends_with_the_block(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    answers = "import json, os, sys\nfor line in sys.stdin: print(len(os.environ['GOMP_SPINCOUNT']) + int(line) + ('OMP_WAIT_POLICY' in os.environ), flush=True)"
    monkeypatch.setattr(beside, "OTHER", answers)
    with beside.other_process(SMALL, None, {}) as other:
        assert [other(1), other(2)] == [7.0, 8.0]
    monkeypatch.setattr(beside, "OTHER", "raise SystemExit(3)")
    with beside.other_process(SMALL, None, {}) as other, pytest.raises(RuntimeError, match="ended with 3"):
        other(1)


def test_busy_processes_end_with_the_block_whatever_ends_it():
    seen = []

    def interrupted():
        with beside.busy_processes(2) as started:
            seen.extend((process, process.poll(), os.getsid(process.pid)) for process in started)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [process.returncode for process, _, _ in seen] == [-signal.SIGKILL] * 2
    assert [poll for _, poll, _ in seen] == [None, None]
    assert os.getsid(0) not in {
        session for _, _, session in seen
    }  # Ctrl-C in the terminal does not reach them


PARENT = """
import os, subprocess, sys, time
code = sys.argv[1].format(parent=os.getpid())
print(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
def test_a_busy_process_does_not_outlive_a_parent_that_was_killed():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, beside.BUSY], stdout=subprocess.PIPE, text=True
    ) as process:
        status = Path(f"/proc/{int(process.stdout.readline())}/stat")
        assert runs(status)
        process.kill()
    deadline = time.monotonic() + 60
    while runs(status):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(status: Path) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.long
def test_the_command_writes_its_numbers(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(CASES, "test", SMALL)
    busy, started = beside.busy_processes, []

    @contextmanager
    def watched(count):
        with busy(count) as processes:
            started.extend(processes)
            yield

    monkeypatch.setattr(beside, "busy_processes", watched)
    main(["bench", "--cases", "test", "--steps", "1", "--beside", "1", "--output", str(tmp_path / "b.json")])
    shown = capsys.readouterr().out
    assert "whole step" in shown
    written, slowed = json.loads((tmp_path / "b.json").read_text())
    assert written["machine"]["flops"] > 0
    found = slowed["beside"]
    assert (found["processes"], found["batch"]) == (1, 1)
    assert found["ratio"] == pytest.approx(found["beside"] / found["alone"])
    assert f"{found['ratio']:.1f} times as long" in shown
    assert [process.returncode for process in started] == [-signal.SIGKILL]
    if not torch.cuda.is_available():
        assert found["quiet_ratio"] == pytest.approx(found["alone"] / found["alone_with_default_waits"])


def test_flags_that_cannot_be_are_refused(capsys):
    for flags, reason in (
        (["--cases", "nothing"], "the cases are standard"),
        (["--beside", "-1"], "must be at least 0"),
        (["--cases", "sft", "--lengths"], "time PPO steps, not sft"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", *flags])
        assert reason in capsys.readouterr().err
