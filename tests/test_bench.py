"""The benchmark: its floors follow from shapes, its table shows what was measured, a small case runs, the peer is asked for."""

import json
from pathlib import Path

import pytest
import torch

import proxima
from proxima.bench import CASES, Case, Machine, bench, growth_plot, run_case, run_peer, scaling_table, table
from proxima.bench.floor import floors
from proxima.bench.random_model import SHAPES
from proxima.bench.scaling import growth, sized
from proxima.cli import main
from tests.helpers import LOGPROB_ROUNDING

MACHINE = Machine("CPU, test", 1e12, 1e11)
SMALL = Case("test", "tiny", batch=4, prompt=(6, 9), response=(3, 5), epochs=1)


@pytest.fixture(scope="module")
def result():
    torch.set_num_threads(1)
    return run_case(SMALL, MACHINE, steps=1)


def test_a_small_case_is_timed_phase_by_phase(result):
    assert set(result["phases"]) == {"generate", "score", "reward", "value", "update"}
    assert 0 < sum(result["phases"].values()) <= result["seconds"] * 1.01
    assert result["eager_decode_steps"] > 0 == result["graph_replays"]
    assert result["first_ratio_error"] < LOGPROB_ROUNDING
    shown = table(result)
    assert "prompts 6-9, responses 3-5" in shown
    assert f"{result['seconds']:.3f}" in shown


def test_the_table_says_what_is_unlike_in_the_peer(result):
    peer = {"version": "1.12.0", "seconds": 10 * result["seconds"], "generate": 1.0, "peak_gib": None}
    assert "10.0 times as long. It trains its value model in full" in table(result, peer)


def test_floors_grow_with_what_is_done():
    def step(**changes):
        case = Case(**{"size": "0.6B", **changes})
        return floors(case, SHAPES["0.6B"], case.response[1], MACHINE)

    plain = step()
    assert step(batch=128)["update"] == pytest.approx(2 * plain["update"])
    assert step(epochs=8)["update"] == pytest.approx(2 * plain["update"])
    assert step(prompt=(1024, 1024))["generate"] > plain["generate"]
    assert plain["step"] == pytest.approx(sum(plain[name] for name in bench.PHASES))


def test_the_embedded_shape_is_that_of_the_embedded_model():
    config = json.loads((Path(proxima.__file__).parent / "embedded" / "config.json").read_text(encoding="utf-8"))
    assert {name: config[name] for name in SHAPES["embedded"]} == SHAPES["embedded"]


def test_growth_is_measured_against_proportion():
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


def test_prompts_have_the_lengths_of_the_case():
    counts = {len(text.split()) for text in bench._prompts(Case(batch=64, prompt=(5, 7)), 0)}
    assert counts == {5, 6, 7}


def test_the_peer_needs_an_environment_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PROXIMA_TRL_PYTHON", raising=False)
    with pytest.raises(ValueError, match="make peer"):
        run_peer(CASES["standard"])
    monkeypatch.setenv("PROXIMA_TRL_PYTHON", "python-that-has-trl")
    with pytest.raises(ValueError, match="mixes them"):
        run_peer(CASES["mixed prompts"])


def test_the_command_writes_its_numbers(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(CASES, "test", SMALL)
    main(["bench", "--cases", "test", "--steps", "1", "--output", str(tmp_path / "b.json")])
    assert "whole step" in capsys.readouterr().out
    [written] = json.loads((tmp_path / "b.json").read_text())
    assert written["machine"]["flops"] > 0
    with pytest.raises(SystemExit):
        main(["bench", "--cases", "nothing"])
    assert "the cases are standard" in capsys.readouterr().err
