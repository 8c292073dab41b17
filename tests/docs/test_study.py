"""examples/study: every method is one that PPO takes, all get as many responses, and what is finished is
neither run again nor lost from the table."""

import json
import subprocess
from argparse import Namespace
from statistics import fmean
from xml.etree import ElementTree

import pytest
from gguf_cases import small_network, write_small

from examples.instructions.prompts import write
from examples.study import chart, on_instructions, run
from examples.study.methods import METHODS, RESPONSES, VARIANTS, settings_of
from proxima.config import PRESETS, PPOConfig

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_every_method_gets_as_many_responses_per_step(method):
    config = PPOConfig("embedded", **settings_of(method))
    assert config.batch_size * config.num_generations == RESPONSES
    assert not {"lam", "gamma"} & {*config.idle_settings} or config.lam_alpha


def test_every_preset_is_in_the_study():
    methods = {name: values for name, values in PRESETS.items() if name != "16gb"}  # memory, not method
    assert {f"preset_{name}" for name in methods} <= {*METHODS}
    for name, values in methods.items():
        chosen = settings_of(f"preset_{name}")
        assert {key: chosen[key] for key in values} == values


@pytest.fixture
def finished(tmp_path):
    """Two seeds of two methods; the third seed of one is missing."""
    for method, shift in (("ppo_2022", 0.0), ("rloo", 0.1)):
        for seed in (0, 1):
            folder = tmp_path / f"seed-{seed}" / method
            folder.mkdir(parents=True)
            judged = {"gold": 0.8 + shift + 0.02 * seed, "kl": 2.0, "response_length": 18.0, "seconds": 90.0}
            (folder / run.JUDGED).write_text(json.dumps(judged))
            (tmp_path / f"seed-{seed}" / "reward.json").write_text("{}")
    return tmp_path


def test_the_table_has_means_intervals_and_the_worst_seed(finished):
    rows = run.table(finished, ["ppo_2022", "rloo", "grpo"], [0, 1, 2]).splitlines()
    assert len(rows) == 4, "a method without runs has no row"
    cells = [cell.strip() for cell in rows[3].strip("|").split("|")]
    half = 12.706205 * 0.01  # t(0.975, 1) * s / sqrt(2), s = 0.02 / sqrt(2)
    assert cells[:2] == ["`rloo`", "2"]
    assert cells[2] == f"{fmean([0.9, 0.92]):.3f} ({0.91 - half:.3f} to {0.91 + half:.3f})"
    assert cells[3:5] == ["0.900", "2.00 (2.00 to 2.00)"]


def test_the_chart_has_a_point_with_intervals_per_method_and_a_dot_per_seed(finished):
    drawn = chart.draw(chart.measured(finished, ["ppo_2022", "rloo", "grpo"], [0, 1, 2]), "gold score")
    tree = ElementTree.fromstring(drawn)
    texts = [node.text for node in tree.iter(f"{SVG}text")]
    assert {"ppo_2022", "rloo", "0.810", "0.910", "90"} <= {*texts}
    assert "grpo" not in texts, "a method without runs is left out"
    circles = [*tree.iter(f"{SVG}circle")]
    seeds = [node for node in circles if node.get("r") == "2.5"]
    marks = [node for node in circles if node.get("r") == "9" and float(node.get("cx")) < chart.RIGHT]
    assert (len(seeds), len(marks)) == (4, 2)
    assert "nan" not in drawn
    # the better method stands higher, and each mark between its own seeds
    assert float(marks[1].get("cy")) < float(marks[0].get("cy"))
    for mark, own in zip(marks, (seeds[:2], seeds[2:]), strict=True):
        assert abs(float(mark.get("cy")) - fmean(float(node.get("cy")) for node in own)) <= 0.1
    bars = [node for node in tree.iter(f"{SVG}line") if node.get("stroke-width") == "2"]
    assert len(bars) == 4
    chart.main([str(finished)])
    assert (finished / "study.svg").read_text() == drawn
    with pytest.raises(ValueError, match="nothing to draw"):
        chart.draw([], "gold score")
    with pytest.raises(SystemExit):
        chart.main([str(finished / "seed-0")])


def test_an_axis_has_round_ticks_within_its_ends():
    for numbers in ([0.85, 0.87], [2.0, 2.0], [0.0, 310.0], [-3.0, 4e-3]):
        scale = chart.Scale.of(numbers, 0.0, 100.0)
        ticks = [*scale.ticks()]
        assert 3 <= len(ticks) <= 10
        assert scale.low <= ticks[0] < ticks[-1] <= scale.high
        assert [scale(scale.low), scale(scale.high)] == [0.0, 100.0]


def test_what_is_finished_is_not_run_again_and_what_failed_is_named(finished, monkeypatch):
    started = []

    def fail(command, **_):
        started.append(command[-1])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(run.subprocess, "run", fail)
    given = Namespace(
        folder=finished, jobs=2, seeds=[0, 1], methods=["ppo_2022", "rloo"], steps=1, preferences=1,
        task="embedded", model_name="",
    )  # fmt: skip
    run.run_all(given)
    assert started == []
    (finished / "seed-1" / "rloo" / run.JUDGED).unlink()
    with pytest.raises(SystemExit, match=r"seed-1/rloo; the log of each is NAME\.log in"):
        run.run_all(given)
    assert started == ["rloo"]
    assert (finished / "seed-1" / "rloo.log").is_file(), "as the message says"
    (finished / "seed-1" / "reward.json").unlink()
    with pytest.raises(SystemExit, match="seed-1/reward, seed-1/rloo"):
        run.run_all(given)
    assert started == ["rloo", "reward"], "without its reward model a method is not started"


def test_a_table_of_no_study_is_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run.main(["--table", "--folder", str(tmp_path / "nothing")])
    assert "there is no study in" in capsys.readouterr().err


# --- the instructions ---


@pytest.mark.parametrize("method", [*METHODS, *VARIANTS])
def test_every_method_runs_on_the_instructions_with_as_many_responses(method):
    config = PPOConfig(**{**on_instructions.settings_of(method), "model_name": "smollm2"})
    assert config.batch_size * config.num_generations == on_instructions.COMMON["batch_size"]
    assert (config.gamma, config.max_new_tokens) == (1.0, 48)


def test_one_command_studies_the_instructions(tmp_path, monkeypatch, capsys):
    """A method with a value model and one without, on a tiny model; started again it trains nothing."""
    write_small(tmp_path / "tiny.gguf", small_network("llama", max_position_embeddings=512))
    small = {**on_instructions.COMMON, "batch_size": 4, "minibatch_size": 4, "max_new_tokens": 8}
    monkeypatch.setattr(on_instructions, "COMMON", small)
    monkeypatch.setattr(on_instructions, "write", lambda path: write(path, train=6, held_out=4))
    monkeypatch.chdir(tmp_path)
    started, real = [], subprocess.run

    def here(command, **more):
        if "examples.study.run" not in command:
            return real(command, **more)
        started.append(command[-1])
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            run.main(command[3:])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(run.subprocess, "run", here)
    words = ["--task", "instructions", "--model-name", "tiny.gguf", "--seeds", "0", "--steps", "2"]
    words += ["--methods", "budget", "rloo", "--folder", str(tmp_path / "study")]
    for _ in range(2):
        run.main(words)
    assert started == ["budget", "rloo"]
    shown = capsys.readouterr().out
    assert "| method | seeds | success | worst seed |" in shown
    for method in ("budget", "rloo"):
        folder = tmp_path / "study" / "seed-0" / method
        judged = json.loads((folder / run.JUDGED).read_text())
        assert 0 <= judged["gold"] <= 1
        assert judged["seconds"] > 0
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [0, 1, 2]


def test_a_method_that_needs_a_reward_model_is_refused_on_the_instructions(capsys):
    with pytest.raises(SystemExit):
        run.main(["--task", "instructions", "--methods", "value_from_reward"])
    assert "needs a reward model, and the instructions have none" in capsys.readouterr().err
