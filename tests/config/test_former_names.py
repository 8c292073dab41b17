"""Names of the release before are still taken: in Python, YAML, flags, checkpoints and folders of runs."""

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import yaml

import proxima.config
from proxima.cli import main, parse
from proxima.config import FinetuningConfig, PPOConfig
from proxima.finetuning import Demonstration, Preference, RewardTrainer, SFTTrainer
from proxima.ppo_trainer import PPOTrainer
from proxima.runs import Run
from proxima.runs.checkpoint import write_folder
from proxima.tools.model_export import export
from tests.helpers import Crash, crash_at, difference, weights

ENV = {**os.environ, "PYTHONPATH": str(Path(proxima.config.__file__).parents[2])}
NEW_NAME = "max_falling_verdicts is now max_declining_evals"
PROMPTS = ["first", "second", "third", "fourth"]


def test_python_takes_a_former_name_with_a_warning():
    with pytest.warns(DeprecationWarning, match=NEW_NAME):
        config = PPOConfig(max_falling_verdicts=3)
    assert config.max_declining_evals == 3
    with pytest.warns(DeprecationWarning, match=NEW_NAME):
        assert config.max_falling_verdicts == 3
    with pytest.warns(DeprecationWarning, match=NEW_NAME):
        assert dataclasses.replace(config, max_falling_verdicts=5).max_declining_evals == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
        assert "max_falling_verdicts" not in config.to_dict()
    with pytest.raises(AttributeError, match="no attribute 'max_rising_evals'"):
        config.max_rising_evals  # noqa: B018
    with pytest.raises(TypeError, match="max_rising_evals"):
        PPOConfig(max_rising_evals=3)


def test_a_file_of_settings_may_have_a_former_name(tmp_path):
    (tmp_path / "old.yaml").write_text("max_falling_verdicts: 7\ngamma: 0.5\n")
    with pytest.warns(FutureWarning, match=NEW_NAME):
        config = PPOConfig.from_yaml(tmp_path / "old.yaml")
    assert config == PPOConfig(max_declining_evals=7, gamma=0.5)
    (tmp_path / "both.yaml").write_text("max_declining_evals: 2\nmax_falling_verdicts: 7\n")
    with pytest.warns(FutureWarning, match=NEW_NAME):
        assert PPOConfig.from_yaml(tmp_path / "both.yaml").max_declining_evals == 7
    (tmp_path / "bad.yaml").write_text("max_falling_verdicts: -1\n")
    with (
        pytest.warns(FutureWarning, match=NEW_NAME),
        pytest.raises(ValueError, match=r"max_declining_evals \(-1\) must be in"),
    ):
        PPOConfig.from_yaml(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    "words",
    [
        ("--max-falling-verdicts", "3"),
        ("--max_falling_verdicts=3",),
        ("--max-falling-verdicts=3",),
    ],
)
def test_a_flag_may_have_a_former_name(words):
    with pytest.warns(FutureWarning, match=NEW_NAME):
        assert parse(["train", "--data", "x", *words]).ppo.max_declining_evals == 3


def test_the_command_line_says_a_former_name_in_one_line(tmp_path):
    (tmp_path / "old.yaml").write_text("max_falling_verdicts: 7\n")
    words = ["proxima", "train", "--config", "old.yaml", "--help"]
    done = subprocess.run(
        [sys.executable, "-m", *words], check=True, cwd=tmp_path, env=ENV, capture_output=True, text=True
    )
    line = f"proxima: the setting {NEW_NAME}; the old name will be removed in the next release\n"
    assert done.stderr == line
    assert "(default: 7)" in done.stdout


def test_stage_config_is_finetuning_config():
    with pytest.warns(DeprecationWarning, match="StageConfig is now FinetuningConfig"):
        assert proxima.config.StageConfig is FinetuningConfig
    with pytest.raises(AttributeError, match="no attribute 'PhaseConfig'"):
        proxima.config.PhaseConfig  # noqa: B018


def put_back(values: dict, new: str, old: str) -> None:
    values[old] = values.pop(new)


def as_the_release_before(run):
    """Rename in a run's folder what had another name when an earlier version wrote it."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    put_back(settings, "max_declining_evals", "max_falling_verdicts")
    (run / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    for folder in sorted((run / "checkpoints").iterdir()):
        state = json.loads((folder / "state.json").read_text())
        put_back(state, "eval_reward", "verdict")
        put_back(state["evaluator"], "evaluations", "verdicts")
        put_back(state["config"], "max_declining_evals", "max_falling_verdicts")
        (folder / "manifest.json").unlink()
        (folder / "state.json").write_text(json.dumps(state))
        whole = folder.rename(folder.with_name("renamed"))
        write_folder(
            folder, lambda new, whole=whole: [path.rename(new / path.name) for path in whole.iterdir()]
        )
        whole.rmdir()


def test_a_run_of_the_release_before_resumes_bit_exactly(make_config):
    def settings(name):
        return make_config(
            run_name=name,
            batch_size=2,
            max_new_tokens=4,
            ppo_epochs=1,
            checkpoint_every=1,
            max_declining_evals=3,
        )

    expected = PPOTrainer(settings("whole"))
    results = expected.train(PROMPTS, 2, ["held out"])
    with pytest.raises(Crash):
        crash_at(PPOTrainer(settings("cut")), 3).train(PROMPTS, 2, ["held out"])
    run = results.run_folder.with_name("cut")
    as_the_release_before(run)
    assert Run(run).config["max_declining_evals"] == 3
    assert "verdict" in (run / "checkpoints" / "step-00000002" / "state.json").read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = PPOTrainer(settings("cut"))
        again = resumed.train(PROMPTS, 2, ["held out"], resume=True)
    assert len(again.metrics) == 4
    assert (again.best_step, again.stop_reason) == (results.best_step, results.stop_reason)
    assert difference(weights(expected), weights(resumed)) == 0
    changed = dataclasses.replace(settings("cut"), gamma=0.5)
    with pytest.raises(ValueError, match=r"another run: gamma"):
        PPOTrainer(changed).train(PROMPTS, 2, ["held out"], resume=True)


def test_a_fine_tuning_run_of_the_release_before_is_still_read(tiny, tmp_path, capsys):
    def settings(name):
        return FinetuningConfig(tiny, batch_size=2, run_dir=str(tmp_path), run_name=name)

    sft = SFTTrainer(settings("sft")).train([Demonstration("say a:", " a")] * 6).folder
    reward = RewardTrainer(settings("reward")).train([Preference("q", " yes", " no")] * 6).folder
    for folder in (sft, reward):
        (folder / "finetuning.yaml").rename(folder / "stage.yaml")
    card = (export(sft, tmp_path / "out") / "README.md").read_text()
    assert "supervised" in card
    with pytest.raises(SystemExit):
        main(["report", str(sft)])
    assert "holds a fine-tuning run" in capsys.readouterr().err
    with pytest.raises(ValueError, match="already holds a run"):
        SFTTrainer(settings("sft")).train([Demonstration("say a:", " a")] * 6)
    trainer = PPOTrainer(PPOConfig(tiny, sft_adapter=str(sft), rewards=str(reward), max_new_tokens=2))
    assert trainer.models.reward.source == str(reward)
