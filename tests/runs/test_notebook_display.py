"""What a notebook shows of our objects: one readable line, a run that draws itself, progress bars."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxima.config import FinetuningConfig
from proxima.core.progress import no_bars
from proxima.data import Demonstration
from proxima.finetuning import SFTTrainer
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run
from tests.fake_run import write_run


def test_a_trainer_and_its_results_read_in_one_line(make_config, prompts):
    trainer = PPOTrainer(make_config(batch_size=4, run_name="r"))
    said = repr(trainer)
    assert re.fullmatch(
        r"PPOTrainer\('.*'\): step 0, gae with ppo, [\d,]+ trained parameters on cpu; rewards: count_e", said
    )
    results = trainer.train(prompts)
    assert repr(trainer).replace("step 1", "step 0") == said
    assert re.fullmatch(
        r"TrainingResults: 1 step, reward (\S+) to \1, best step 1; all epochs done; in .*runs/r",
        repr(results),
    )


def test_fine_tuning_reads_in_one_line_and_draws_its_curves(tiny, tmp_path):
    trainer = SFTTrainer(FinetuningConfig(tiny, run_dir=str(tmp_path), epochs=2, eval_every=1))
    assert re.fullmatch(r"SFTTrainer\('.*'\): [\d,]+ trained parameters on cpu", repr(trainer))
    results = trainer.train([Demonstration("Why? TL;DR:", f" because {i}") for i in range(4)])
    assert re.fullmatch(
        r"FinetuningResults: all epochs done; best: step .*validation_loss \S+; in .*", repr(results)
    )
    plot = results.plot()
    assert repr(plot).startswith("Plot of ")
    assert [len(series["points"]) for series in plot.charts[0]["series"]] == [2, 2]


def test_a_run_draws_itself(tmp_path):
    run = Run(write_run(tmp_path / "a<b>", 12, hostile=True))
    shown = run._repr_html_()
    assert shown.startswith("<p><b>a&lt;b&gt;</b>: ")
    assert shown.count("<iframe ") == 1
    outside = re.sub(r'srcdoc="[^"]*"', "", shown)
    assert "<script" not in outside
    assert "&lt;script&gt;" in outside  # the sample, as text
    with (run.path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": "<script>"}\n')
    assert "step <script>" not in Run(run.path)._repr_html_()


def test_a_run_without_steps_says_so(tmp_path):
    Path(tmp_path / "new").mkdir()
    assert Run(tmp_path / "new")._repr_html_() == "<p><b>new</b>: stopped, step 0</p>"


@pytest.mark.parametrize(
    ("shell", "expected"),
    [(None, None), (SimpleNamespace(), None), (SimpleNamespace(kernel="a kernel"), False)],
    ids=["no IPython running", "IPython in a terminal", "a notebook"],
)
def test_bars_are_shown_in_a_notebook_and_left_to_tqdm_elsewhere(monkeypatch, shell, expected):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert no_bars() is expected


def test_training_in_a_notebook_shows_its_bar(monkeypatch, make_config, prompts, capsys):
    trainer = PPOTrainer(make_config(batch_size=4))
    trainer.train(prompts)
    assert "PPO:" not in capsys.readouterr().err  # a log file
    notebook = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel="a kernel"))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    trainer.train(prompts)
    assert "PPO: 100%" in capsys.readouterr().err
