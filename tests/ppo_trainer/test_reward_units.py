"""The unit of reward models that bring none: measured once, before the first step, and kept by the run."""

import json

import pytest
import torch

from proxima.evaluator import evaluate_run
from proxima.models.reward_model import REPORT_FILE
from proxima.models.score_unit import ScoreUnit
from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.reward_units import FIRST_STEP, SAMPLES, measure_units
from proxima.ppo_trainer.trainer_state import load_state
from tests.conftest import count_e
from tests.helpers import Crash, crash_at, weights


def prompts_of(count):
    return [f"prompt number {i}" for i in range(count)]


def test_the_unit_is_that_of_the_references_answers_and_scores_are_in_it(make_config, judge):
    trainer = PPOTrainer(make_config(rewards=judge, batch_size=16))
    prompts = prompts_of(200)
    raw = torch.cat(
        [
            trainer.reward_computer.score_tokens(
                trainer.generator.sample(prompts[i : i + 16], FIRST_STEP, reference=True)
            ).total
            for i in range(0, SAMPLES, 16)
        ]
    )
    measure_units(trainer, prompts)
    [unit] = trainer.reward_computer.units.values()
    assert unit.mean == pytest.approx(float(raw.mean()), rel=1e-9)
    assert unit.deviation == pytest.approx(float(raw.std(unbiased=False)), rel=1e-9)
    tokens = trainer.generator.sample(prompts[:4], 3)
    trainer.reward_computer.units = {}
    before = trainer.reward_computer.score_tokens(tokens)
    measure_units(trainer, prompts)
    after = trainer.reward_computer.score_tokens(tokens)
    assert torch.allclose(after.total, (before.total - unit.mean) / unit.deviation)
    assert next(iter(after.by_name.values())).tolist() == after.total.tolist()


def test_functions_and_raw_models_have_no_unit_and_weights_act_on_the_unit(
    make_config, judge, prompts, monkeypatch
):
    assert PPOTrainer(make_config()).reward_computer.lacking_units() == []
    assert PPOTrainer(make_config(rewards=judge, reward_units="raw")).reward_computer.lacking_units() == []
    mixed = PPOTrainer(make_config(rewards=({"source": judge, "weight": 2.0, "name": "judge"}, count_e)))
    assert mixed.reward_computer.lacking_units() == ["judge"]
    function = mixed.reward_computer.rewards[1][1]
    with monkeypatch.context() as patched:
        patched.setattr(
            function, "function", lambda *given, **named: pytest.fail("it has no unit to measure")
        )
        measure_units(mixed, prompts_of(8))  # fewer prompts than samples: each is answered several times
    scores = mixed.reward_computer.score_tokens(mixed.generator.sample(prompts, 3))
    assert torch.allclose(scores.total, 2 * scores.by_name["judge"] + scores.by_name["count_e"])
    assert abs(float(scores.by_name["judge"].mean())) < 4


def test_a_run_measures_once_records_it_and_resumes_with_it_bit_exactly(make_config, judge, tmp_path):
    settings = {"rewards": judge, "batch_size": 4, "checkpoint_every": 1}
    whole = PPOTrainer(make_config(**settings, run_name="whole"))
    whole.train(prompts_of(12))
    with pytest.raises(Crash):
        crash_at(PPOTrainer(make_config(**settings, run_name="cut")), 2).train(prompts_of(12))
    resumed = PPOTrainer(make_config(**settings, run_name="cut"))
    resumed.train(prompts_of(12), resume=True)
    assert resumed.reward_computer.units == whole.reward_computer.units
    left, right = weights(whole), weights(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)
    recorded = json.loads((tmp_path / "runs" / "cut" / "results.json").read_text())["units"]
    assert {name: ScoreUnit(*unit) for name, unit in recorded.items()} == whole.reward_computer.units
    [unit] = whole.reward_computer.units.values()
    found, raw = (
        evaluate_run(tmp_path / "runs" / "cut", prompts_of(4), reward_units=units)["policy"]["avg_reward"]
        for units in ("standard", "raw")
    )
    assert found == pytest.approx((raw - unit.mean) / unit.deviation, abs=1e-5)


def test_a_run_that_recorded_no_unit_resumes_without_one(make_config, judge, tmp_path):
    """Run folders of versions before this setting."""
    settings = {"rewards": judge, "batch_size": 4, "checkpoint_every": 1}
    with pytest.raises(Crash):
        crash_at(PPOTrainer(make_config(**settings, run_name="old")), 2).train(prompts_of(12))
    [file] = (tmp_path / "runs" / "old" / "checkpoints").glob("*1/state.json")
    state = json.loads(file.read_text())
    trainer = PPOTrainer(make_config(**settings, run_name="old"))
    load_state(trainer, file.parent, state)
    assert list(trainer.reward_computer.units) == ["judge"]
    del state["units"], state["config"]["reward_units"]
    load_state(trainer, file.parent, state)
    assert trainer.reward_computer.units == {}


@pytest.mark.parametrize("spoilt", [{"j": 3}, {"j": [1.0]}, {"j": [0.0, 0.0]}, {"j": ["a", 1.0]}])
def test_a_recorded_unit_that_is_none_is_not_used(make_config, spoilt):
    computer = PPOTrainer(make_config()).reward_computer
    computer.restore_units(spoilt)
    assert computer.units == {}


def test_constant_scores_are_refused_in_one_line_before_training(make_config, judge, monkeypatch):
    trainer = PPOTrainer(make_config(rewards=judge, batch_size=4))
    source = trainer.reward_computer.rewards[0][1]
    monkeypatch.setattr(source, "_score", lambda rows: torch.full((len(rows),), 0.5))
    with pytest.raises(ValueError, match=r"scores all 128 sampled answers 0\.5: there is nothing to learn"):
        trainer.train(prompts_of(4))
    assert trainer.step == 0


def test_a_value_model_that_starts_from_the_reward_model_starts_in_its_unit(make_config, tiny, tmp_path):
    from proxima.config import RewardConfig
    from proxima.finetuning import Preference, RewardTrainer

    pairs = [Preference(f"prompt {i}", " yes", " no") for i in range(12)]
    config = RewardConfig(tiny, learning_rate=1e-2, epochs=1, run_dir=str(tmp_path), run_name="rm")
    folder = RewardTrainer(config).train(pairs).folder
    trained = PPOTrainer(make_config(rewards=str(folder)))
    assert trained.reward_computer.lacking_units() == []
    assert torch.equal(trained.models.value.head.weight, trained.models.reward.head.weight)
    report = json.loads((folder / REPORT_FILE).read_text())
    del report["unit"]
    (folder / REPORT_FILE).write_text(json.dumps({**report, "accuracy": 0.9}))  # of an earlier version
    older = PPOTrainer(make_config(rewards=str(folder), batch_size=4))
    before = older.models.value.head.weight.clone(), older.models.value.head.bias.clone()
    measure_units(older, prompts_of(20))
    [unit] = older.reward_computer.units.values()
    assert torch.allclose(older.models.value.head.weight, before[0] / unit.deviation)
    assert torch.allclose(older.models.value.head.bias, (before[1] - unit.mean) / unit.deviation)
