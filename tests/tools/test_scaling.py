"""The scaling estimate: against what was measured on one H200, against the bench's own floors, and a simulation
by hand."""

from dataclasses import replace

import pytest

from proxima.cli import main
from proxima.tools.bench.bench_case import Case
from proxima.tools.bench.hardware_floor import Machine, floors
from proxima.tools.scaling import SHAPES, best_plan, plans
from proxima.tools.scaling.pipeline_simulation import PipelinePhase, apart, simulate, together
from proxima.tools.scaling.step_costs import FAST, GIB, PLAIN, Gpu, StepWork, decode_step, memory, phases

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
    assert len(lines) == 7
    assert "too large" in lines[5]
    for wrong in (["--sizes", "3B"], ["--batch", "0"], ["--gpus", "0"]):
        with pytest.raises(SystemExit) as stop:
            main(["scaling", *wrong])
        assert stop.value.code == 2
