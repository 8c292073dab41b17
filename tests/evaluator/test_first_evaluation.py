"""The evaluation before the first step: what the run began with, on every curve, in every file, and free of
influence on training."""

import json
import math

import pytest

from proxima.evaluator import held_out
from proxima.pages.report import summary, write_report
from proxima.pages.report.report_samples import before_and_after
from proxima.pages.report.run_facts import short, tell
from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.training_run import TrainingRun
from proxima.runs import Alarm, Run, alarms, plain
from proxima.runs.run_writer import RunFolder
from tests.helpers import difference, shake, weights
from tests.ppo_trainer.test_resume import Crash, lines, same_run

PROMPTS = [f"prompt {i}" for i in range(6)]


@pytest.fixture
def settings(make_config):
    base = {"batch_size": 2, "max_new_tokens": 4, "ppo_epochs": 1, "minibatch_size": 2, "eval_every": 99}
    return lambda **more: make_config(**{**base, **more})


def test_the_model_is_evaluated_before_the_first_step_whatever_eval_every_is(settings):
    results = PPOTrainer(settings()).train(PROMPTS, 1, ["held out"])
    folder = results.run_folder
    written = lines(folder)
    assert [line["step"] for line in written] == [0, 1, 2, 3]
    assert [line["step"] for line in written if "validation/reward" in line] == [0, 3]
    assert written[0] == plain(results.start)
    assert written[0]["validation/win_rate"] == 0.5  # against itself
    assert [step["step"] for step in results.metrics] == [1, 2, 3]
    assert Run(folder).token_steps() == [0, 3]
    assert [(row["step"], row["kind"]) for row in lines(folder, "samples.jsonl")][:2] == [
        (0, "followed"),
        (3, "followed"),
    ]


def test_it_changes_nothing_in_training_and_without_validation_prompts_there_is_none(settings):
    with_it, without = PPOTrainer(settings()), PPOTrainer(settings())
    evaluated = with_it.train(PROMPTS, 1, ["held out"])
    alone = without.train(PROMPTS, 1)
    assert difference(weights(with_it), weights(without)) == 0
    assert alone.start == {}
    assert [line["step"] for line in lines(alone.run_folder)] == [1, 2, 3]
    assert Run(alone.run_folder).steps == Run(evaluated.run_folder).steps == 3


def test_a_second_call_begins_with_an_evaluation_of_its_own(settings):
    trainer = PPOTrainer(settings())
    trainer.train(PROMPTS, 1, ["held out"])
    again = trainer.train(PROMPTS, 1, ["held out"])
    assert again.start["step"] == 3
    assert [step["step"] for step in again.metrics] == [4, 5, 6]


@pytest.fixture(scope="module")
def wholes():
    """Runs that nothing interrupted, by `checkpoint_every`."""
    return {}


@pytest.mark.parametrize("dies", ["before it", "before its line", "after its line", "in its checkpoint"])
@pytest.mark.parametrize("checkpoint_every", [1, 0])
def test_killed_around_it_the_run_resumes_as_if_nothing_had_happened(
    settings, monkeypatch, wholes, dies, checkpoint_every
):
    def die(*given, **more):
        raise Crash

    def die_after(*given):
        write(*given)
        raise Crash

    write = RunFolder.write_metrics
    whole, cut = (settings(run_name=name, checkpoint_every=checkpoint_every) for name in ("whole", "cut"))
    if checkpoint_every not in wholes:
        wholes[checkpoint_every] = PPOTrainer(whole).train(PROMPTS, 1, ["held out"])
    expected = wholes[checkpoint_every]
    with monkeypatch.context() as patch:
        place, what = {
            "before it": (held_out.HeldOut, "__call__"),
            "before its line": (RunFolder, "write_metrics"),
            "after its line": (RunFolder, "write_metrics"),
            "in its checkpoint": (TrainingRun, "checkpoint" if checkpoint_every else "advance"),
        }[dies]
        patch.setattr(place, what, die_after if dies == "after its line" else die)
        with pytest.raises(Crash):
            PPOTrainer(cut).train(PROMPTS, 1, ["held out"])
    results = PPOTrainer(cut).train(PROMPTS, 1, ["held out"], resume=True)
    assert results.start == expected.start
    assert same_run(expected.run_folder, results.run_folder)


def test_a_checkpoint_of_step_0_without_an_evaluation_gets_one(settings, monkeypatch):
    """As an older version wrote it."""
    config = settings(run_name="old", checkpoint_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "evaluate_start", lambda *_: None)
        patch.setattr(TrainingRun, "advance", lambda *_: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            PPOTrainer(config).train(PROMPTS, 1, ["held out"])
    results = PPOTrainer(config).train(PROMPTS, 1, ["held out"], resume=True)
    assert [line["step"] for line in lines(results.run_folder)] == [0, 1, 2, 3]


@pytest.mark.parametrize("engine", ["plain", "auto"])
def test_the_reference_is_not_sampled_where_the_policy_is_still_the_reference(settings, monkeypatch, engine):
    trainer = PPOTrainer(settings(engine=engine))
    expected = held_out.reference_answers(trainer, PROMPTS)
    with monkeypatch.context() as patch:
        patch.setattr(held_out, "reference_answers", None)  # calling it fails
        measure = held_out.HeldOut(trainer, PROMPTS)
        measure()
    assert (measure.reference.texts, measure.reference.scores) == (expected.texts, expected.scores)


def test_the_policy_is_still_the_reference_only_while_no_weight_differs(settings, tmp_path):
    trainer = PPOTrainer(settings())
    models = trainer.models
    assert models.policy.is_still(models.sft)
    shake(trainer)
    assert not models.policy.is_still(models.sft)
    trainer.save(tmp_path / "sft")
    tuned = PPOTrainer(settings(sft_adapter=str(tmp_path / "sft" / "policy"))).models
    assert tuned.policy.is_still(tuned.sft)
    next(iter(tuned.policy.parameters())).data[0, 0] += 1e-3
    assert not tuned.policy.is_still(tuned.sft)
    full = PPOTrainer(settings(lora_r=0)).models  # a float32 copy: it cannot be said without comparing it all
    assert not full.policy.is_still(full.sft)


def getting_worse(prompts, texts):
    getting_worse.calls += 1
    return [-float(getting_worse.calls)] * len(texts)


def test_the_best_may_be_the_model_the_run_began_with(settings):
    getting_worse.calls = 0
    results = PPOTrainer(settings(rewards=(getting_worse,), eval_every=1, patience=2)).train(
        PROMPTS, 2, ["held out"]
    )
    assert results.best_step == 0
    assert results.stop_reason == "no improvement over -1 (step 0) in 2 evaluations"
    assert json.loads((results.run_folder / "results.json").read_text())["best_checkpoint"] == "step-00000000"


@pytest.mark.parametrize(("eval_every", "back"), [(99, 2), (1, 0)])
def test_a_guard_goes_back_to_the_start_only_where_a_later_step_was_evaluated(
    settings, monkeypatch, eval_every, back
):
    """With an evaluation of the start alone nothing says that the steps after it are worse."""

    def once(history, **limits):
        return [Alarm("kl", "too far")] if len(history) == 4 and not fired.append(4) and fired == [4] else []

    fired = []
    getting_worse.calls = 0
    monkeypatch.setattr("proxima.ppo_trainer.training_run.alarms", once)
    config = settings(
        rewards=(getting_worse,),
        on_guard="rollback",
        checkpoint_every=1,
        keep_checkpoints=9,
        eval_every=eval_every,
    )
    results = PPOTrainer(config).train(PROMPTS, 2, ["held out"])
    assert f"rolled back to step {back};" in (results.run_folder / "log.txt").read_text()
    assert [line["step"] for line in lines(results.run_folder)] == list(range(7))


def test_falling_evaluations_count_from_the_start():
    def history(*rewards):
        return [
            {"avg_reward": float(i), "validation/reward": reward, "skipped_updates": 0}
            for i, reward in enumerate(rewards)
        ]

    def raised(start, *rewards):
        return [alarm.guard for alarm in alarms(history(*rewards), max_declining_evals=2, start=start)]

    assert raised(None, 3.0, 2.0) == []
    assert raised({}, 3.0, 2.0) == []
    assert raised({"validation/reward": math.nan}, 3.0, 2.0) == []
    assert raised({"validation/reward": 4.0}, 3.0, 2.0) == ["overoptimization"]
    assert raised({"validation/reward": 2.5}, 3.0, 2.0) == []
    assert raised({"validation/reward": 0.0}, 4.0, 3.0, 2.0) == ["overoptimization"]


def test_before_in_a_report_is_the_model_the_run_began_with(settings):
    trainer = shake(PPOTrainer(settings(kl_coef=0.0)))  # not the reference
    results = trainer.train(PROMPTS, 1, ["held out", "another"])
    run = Run(results.run_folder)
    began = results.start["validation/reward"]
    assert began != results.start["validation/reference_reward"]
    shown = tell(run)
    assert shown.cards[0].value.startswith(f"{short(began)} → ")
    assert shown.what[0].endswith("3 steps of 2 prompts, 6 responses in all.")
    assert "3 steps" in summary(run).splitlines()[0]
    told, pairs = before_and_after(run)
    assert told == "The same prompts, answered before the first step and at step 3."
    assert [pair.before for pair in pairs] == [sample["text"] for sample in run.tokens(0)]
    assert told in write_report(run).read_text()
