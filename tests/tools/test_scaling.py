"""The scaling estimate: against what was measured on one H200, against the bench's own floors, and a simulation
by hand."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from proxima.cli import main
from proxima.tools.bench.bench_case import Case
from proxima.tools.bench.hardware_floor import Machine, floors
from proxima.tools.scaling import H200, SHAPES, best_plan, plans, scaling_plan
from proxima.tools.scaling.pipeline_simulation import PipelinePhase, apart, simulate, together
from proxima.tools.scaling.step_costs import (
    FAST,
    GIB,
    PLAIN,
    VLLM,
    Gpu,
    StepWork,
    decode_step,
    memory,
    phases,
)

# one H200, `proxima bench`, tied embeddings: seconds per phase, and GiB in use at the peak
MEASURED = {
    ("0.6B", 64): (
        {"generate": 0.306, "score": 0.202, "reward": 0.098, "value": 0.098, "update": 1.881},
        13.5,
    ),
    ("0.6B", 8): (
        {"generate": 0.194, "score": 0.031, "reward": 0.0169, "value": 0.0178, "update": 0.290},
        7.10,
    ),
    ("4B", 32): ({"generate": 0.565, "score": 0.527, "reward": 0.265, "value": 0.282, "update": 4.801}, 31.5),
    ("8B", 16): ({"generate": 0.584, "score": 0.446, "reward": 0.222, "value": 0.236, "update": 3.902}, 35.5),
}


@pytest.mark.parametrize(("size", "batch"), MEASURED)
def test_the_model_is_near_what_was_measured(size, batch):
    seconds, used = MEASURED[size, batch]
    shape, work = replace(SHAPES[size], tied=True), StepWork(batch=batch)
    told = {name: phase.total for name, phase in phases(shape, work, 1, Gpu(), FAST).items()}
    assert sum(told.values()) == pytest.approx(sum(seconds.values()), rel=0.13)
    for name in ("generate", "update"):
        assert told[name] == pytest.approx(seconds[name], rel=0.15)
    assert sum(memory(shape, work, 1, FAST).values()) / GIB == pytest.approx(used, rel=0.07)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (StepWork(batch=32), 1.47),
        (StepWork(batch=128), 5.22),
        (StepWork(prompt=256), 1.53),
        (StepWork(prompt=1024), 5.42),
        (StepWork(response=26), 2.36),
        (StepWork(response=106), 3.07),
        (StepWork(batch=256, minibatches=4), 9.84),
    ],
)
def test_the_model_is_near_steps_that_it_was_not_fitted_to(work, seconds):
    """Those of docs/performance.md, at 0.6B."""
    told = phases(SHAPES["0.6B"], work, 1, Gpu(), FAST)
    assert sum(phase.total for phase in told.values()) == pytest.approx(seconds, rel=0.07)


def test_the_reference_path_is_near_its_measured_times():
    """Eager transformers at 0.6B: a scoring pass 0.21 s, an epoch of one LoRA model 0.62 s, a decode step
    32 ms."""
    shape, work = SHAPES["0.6B"], StepWork()
    told = phases(shape, work, 1, Gpu(), PLAIN)
    assert told["value"].total == pytest.approx(0.21, rel=0.1)
    assert told["update"].total / (2 * work.epochs) == pytest.approx(0.62, rel=0.1)
    assert decode_step(shape, 64, work, Gpu(), PLAIN).total == pytest.approx(0.032, rel=0.1)


@pytest.mark.parametrize("size", ["0.6B", "8B"])
def test_arithmetic_is_that_of_the_bench(size):
    shape, work, gpu = SHAPES[size], StepWork(batch=32), Gpu()
    names = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.inner,
        "vocab_size": shape.vocabulary,
    }
    floor = floors(Case(batch=32), names, work.response, Machine("H200", gpu.flops, gpu.bandwidth))
    told = phases(shape, work, 1, gpu, FAST)
    for name in ("score", "value", "update"):
        assert told[name].parts["arithmetic"] == pytest.approx(floor[name], rel=1e-6)


@pytest.mark.parametrize(
    ("size", "billions"),
    [
        ("0.6B", 0.596),
        ("1.7B", 1.72),
        ("4B", 4.02),
        ("8B", 8.19),
        ("14B", 14.8),
        ("32B", 32.8),
        ("70B", 70.6),
    ],
)
def test_sizes_have_the_weights_their_makers_count(size, billions):
    assert SHAPES[size].weights / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_simulation_by_hand():
    line = simulate(together({"a": 1.0, "b": 2.0}))
    assert (line.step_seconds, line.busy) == (pytest.approx(3.0), {"GPUs": pytest.approx(1.0)})
    seconds = {"score": 1.0, "reward": 0.5, "value": 0.5, "update": 4.0}
    one_by_one = simulate(apart(seconds, rollout=3.0, overlap=False))
    assert one_by_one.step_seconds == pytest.approx(9.0)
    assert one_by_one.bottleneck == "training GPUs"
    assert simulate(apart(seconds, rollout=3.0, overlap=True)).step_seconds == pytest.approx(
        6.0
    )  # training never waits
    slow = simulate(apart(seconds, rollout=10.0, overlap=True))
    assert (slow.step_seconds, slow.bottleneck) == (pytest.approx(10.0), "rollout GPUs")
    assert slow.busy["training GPUs"] == pytest.approx(0.6)
    with_server = [
        PipelinePhase("a", "GPUs", 1.0, (("b", 1),)),
        PipelinePhase("b", "reward server", 5.0, (("a", 0),)),
    ]
    assert simulate(with_server).bottleneck == "reward server"


def test_more_gpus_are_never_slower_and_what_does_not_fit_is_said():
    for size in ("0.6B", "8B", "70B"):
        found = [best_plan(SHAPES[size], count, StepWork(batch=512)) for count in (1, 2, 4, 8, 16, 32, 64)]
        times = [plan.seconds for plan in found if plan.fits]
        assert times == sorted(times, reverse=True)
    assert not best_plan(SHAPES["70B"], 1).fits
    assert best_plan(SHAPES["70B"], 8).fits
    alone = {plan.way: plan for plan in plans(SHAPES["70B"], 8)}
    assert alone["sharded, checkpointed"].memory < alone["replicated, checkpointed"].memory / 2


def test_the_command_prints_a_table(capsys):
    main(["scaling", "--sizes", "0.6B", "70B", "--gpus", "1", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10
    assert "too large" in lines[5]
    assert "360 GB/s" in lines[8]
    for wrong in (["--sizes", "3B"], ["--batch", "0"], ["--gpus", "0"]):
        with pytest.raises(SystemExit) as stop:
            main(["scaling", *wrong])
        assert stop.value.code == 2


PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text(encoding="utf-8")
WORK = StepWork(batch=512)


def rows_of(heading):
    """The cells of the table of the page that begins with this line."""
    lines = PAGE.partition(heading)[2].lstrip("\n").splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[1 : lines.index("")]]


def test_the_predictions_of_the_page_are_those_of_the_model():
    rows = rows_of("| | 1 GPU | 2 | 4 | 8 | 16 | 32 | 64 |")
    assert [row[0] for row in rows] == list(SHAPES)
    for size, *cells in rows:
        for count, cell in zip((1, 2, 4, 8, 16, 32, 64), cells, strict=True):
            plan = best_plan(SHAPES[size], count, WORK)
            shown = re.match(r"[\d.]+", cell)
            assert bool(shown) == plan.fits, (size, count)
            if shown:
                digits = len(shown[0].partition(".")[2])
                assert float(shown[0]) == pytest.approx(plan.seconds, abs=0.51 * 10**-digits), (size, count)


def test_the_page_says_what_becomes_of_them_if_an_assumption_fails(monkeypatch):
    places = [("0.6B", 64), ("8B", 8), ("8B", 64), ("70B", 8), ("70B", 64)]
    half = replace(H200, link=H200.link / 2, network=H200.network / 2)
    far = replace(H200, network=H200.network / 5)
    slow = replace(VLLM, forward=2 * VLLM.forward, decode=2 * VLLM.decode)
    rows = rows_of("| assumption | value | 0.6B on 64 | 8B on 8 | 8B on 64 | 70B on 8 | 70B on 64 |")
    assert len(rows) == 4
    for (_, _, *cells), gpu, vllm in zip(
        rows, (H200, half, far, H200), (VLLM, VLLM, VLLM, slow), strict=True
    ):
        monkeypatch.setattr(scaling_plan, "VLLM", vllm)
        found = [best_plan(SHAPES[size], count, WORK, gpu).seconds for size, count in places]
        assert [float(cell) for cell in cells] == pytest.approx(found, rel=0.02)
