"""`Evaluator`: evaluations; and `PPOTrainer.train`: it stops on them, and writes down what it did."""

import json
import math

import pytest

from proxima.config import PPOConfig
from proxima.evaluator import Evaluator, held_out
from proxima.evaluator.held_out import answer
from proxima.ppo_trainer import PPOTrainer
from proxima.runs.glossary import GLOSSARY, is_defined

NAN = float("nan")


def judge(rewards, validate=None, **settings):
    """Improved and should_continue after each of these average rewards."""
    evaluator = Evaluator(config=PPOConfig(**settings), validate=validate)
    evaluations = [
        evaluator.evaluate({"avg_reward": reward, "step": i}) for i, reward in enumerate(rewards, 1)
    ]
    improved = [performance["performance_improved"] for performance, _ in evaluations]
    return evaluator, improved, [convergence["should_continue"] for _, convergence in evaluations]


def test_improvement_is_beating_the_best_so_far_not_the_last():
    evaluator, improved, _ = judge([-5.0, -3.0, -4.0, -3.5, -3.0, -2.0])
    assert improved == [True, True, False, False, False, True]
    assert (evaluator.best_reward, evaluator.best_step) == (-2.0, 6)


@pytest.mark.parametrize("first", [-10.0, 0.0])
def test_min_improvement_must_be_exceeded_but_not_by_the_first_evaluation(first):
    gains = [0.0, 0.5, 1.0, 1.5, 2.0, 2.6]
    _, improved, _ = judge([first + gain for gain in gains], min_improvement=1.0)
    assert improved == [True, False, False, True, False, True]


def test_patience_counts_evaluations_in_a_row_and_improvement_starts_it_anew():
    evaluator, _, goes_on = judge([1, 0, 2, 1, 1, 1], patience=3)
    assert goes_on == [True] * 5 + [False]
    _, convergence = evaluator.evaluate({"avg_reward": 3.0})
    assert convergence == {"converged": False, "should_continue": True, "reason": ""}


def test_evaluations_of_a_policy_that_waits_for_its_critic_do_not_count():
    """The luckiest of them is not taken for a best that would be hard to beat, and none is a step without improvement."""
    evaluator = Evaluator(config=PPOConfig(patience=2))
    found = [evaluator.evaluate({"avg_reward": x}, policy_waits=True) for x in (1.0, 9.0, 0.5, 0.5, 0.5)]
    assert [each["performance_improved"] for each, _ in found] == [True] + [False] * 4
    assert all(each["should_continue"] and not each["converged"] for _, each in found)
    assert (evaluator.best_reward, evaluator.rewards, evaluator.evaluations_since_best) == (1.0, [1.0], 0)
    found = [evaluator.evaluate({"avg_reward": x}) for x in (1.5, 1.4, 1.3)]
    assert [each["performance_improved"] for each, _ in found] == [True, False, False]
    assert [each["should_continue"] for _, each in found] == [True, True, False]


def test_the_reason_names_the_best_and_how_long_ago():
    evaluator = Evaluator(config=PPOConfig(patience=2))
    for reward in (1.5, 1.0):
        evaluator.evaluate({"avg_reward": reward})
    _, convergence = evaluator.evaluate({"avg_reward": 1.5})
    assert convergence["converged"]
    assert convergence["reason"] == "no improvement over 1.5 (step 1) in 2 evaluations"


def test_a_slow_rise_under_a_lucky_evaluation_is_not_a_plateau_and_a_flat_line_under_it_is():
    noise = [0.0, 0.3, -0.2, 0.1, -0.3, 0.2]
    rising = [5.0] + [0.1 * i + noise[i % 6] for i in range(30)]
    flat = [5.0] + [noise[i % 6] for i in range(30)]
    evaluator, improved, goes_on = judge(rising, patience=10)
    assert improved == [True] + [False] * 30
    assert goes_on == [True] * 31
    performance, convergence = evaluator.evaluate({"avg_reward": 3.0})
    assert not convergence["converged"]
    assert 0.05 < performance["trend"]["slope"] < 0.15
    assert judge(flat, patience=10)[2] == [True] * 10 + [False] * 21


def test_a_rise_that_has_ended_is_a_plateau_a_little_later():
    rise = [float(i) for i in range(12)]
    _, _, goes_on = judge(rise + [11.0, 10.9] * 10, patience=4)
    assert all(goes_on[:16])  # patience alone would stop at 16
    stop = goes_on.index(False)
    assert 16 <= stop <= 19


def test_what_it_remembers_goes_through_json_and_back():
    config = PPOConfig(patience=3)
    rewards = [1.0, 3.0, NAN, 2.0, 2.1, 2.2, 2.3, 2.4]
    whole, first = Evaluator(config=config), Evaluator(config=config)
    for reward in rewards[:5]:
        first.evaluate({"avg_reward": reward})
    second = Evaluator(config=config)
    second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
    expected = [whole.evaluate({"avg_reward": reward}) for reward in rewards][5:]
    assert [second.evaluate({"avg_reward": reward}) for reward in rewards[5:]] == expected
    old = {"best": [1.0, 1], "verdicts": [1, 0]}  # a checkpoint from before there was a trend
    second.restore(old)
    assert second.rewards == []


def test_without_patience_a_plateau_is_said_but_never_stops():
    evaluator, _, goes_on = judge([1.0] * 30)
    assert all(goes_on)
    assert evaluator.evaluate({"avg_reward": 1.0})[1]["converged"]


def test_a_nan_reward_is_never_an_improvement_and_never_the_best():
    evaluator, improved, goes_on = judge([NAN, 1.0, NAN, NAN], patience=2)
    assert improved == [False, True, False, False]
    assert (evaluator.best_reward, evaluator.best_step) == (1.0, 2)
    assert goes_on == [True, True, True, False]


def test_validation_decides_over_the_training_reward():
    held_out = iter([{"reward": 1.0, "kl": 0.1}, {"reward": 0.5, "kl": 0.2}, {"reward": NAN, "kl": 0.3}])
    evaluator, improved, _ = judge([0.0, 5.0, 9.0], validate=lambda: next(held_out))
    assert improved == [True, False, False]
    assert evaluator.best_reward == 1.0
    performance, _ = Evaluator(validate=lambda: {"reward": 2.0, "kl": 0.1}).evaluate({"avg_reward": 0.0})
    assert performance["reward"] == 2.0
    assert performance["validation"] == {"validation/reward": 2.0, "validation/kl": 0.1}


def test_samples_pair_prompts_texts_and_rewards_and_are_few():
    metrics = {
        "avg_reward": 0.0,
        "prompts": list("abcdef"),
        "generated_texts": list("ABCDEF"),
        "rewards": list(range(6)),
    }
    performance, _ = Evaluator().evaluate({**metrics, "policy_loss": 0.1, "value_loss": 0.2})
    assert performance["samples"] == [
        {"prompt": p, "text": p.upper(), "reward": i} for i, p in enumerate("abcd")
    ]
    assert (performance["policy_loss"], performance["value_loss"]) == (0.1, 0.2)
    assert Evaluator().evaluate({"avg_reward": 0.0})[0]["samples"] == []


def test_metrics_without_avg_reward_are_refused():
    with pytest.raises(ValueError, match=r"need avg_reward, got \['kl'\]"):
        Evaluator().evaluate({"kl": 1.0})


# --- train ---


def constant(prompts, texts):
    return [0.25] * len(texts)


def longer(prompts, ours, theirs):
    return [(len(a) > len(b)) - (len(a) < len(b)) for a, b in zip(ours, theirs, strict=True)]


@pytest.fixture(scope="module")
def run(tiny_folders, tmp_path_factory):
    """A run whose reward never rises, its config and results."""
    config = PPOConfig(
        model_name=tiny_folders["qwen3"],
        rewards=(constant,),
        judges=(longer,),
        batch_size=2,
        max_new_tokens=3,
        ppo_epochs=1,
        patience=2,
        run_dir=str(tmp_path_factory.mktemp("runs")),
        run_name="stops",
    )
    trainer = PPOTrainer(config)
    return trainer, trainer.train(["a", "b", "c"], num_epochs=5, validation_prompts=["held out"])


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_train_stops_on_the_evaluators_evaluation_and_says_why(run):
    trainer, results = run
    assert trainer.step == len(results.metrics) == 2  # of 10
    assert results.best_step == 0
    assert results.stop_reason == "no improvement over 0.5 by judges (step 0) in 2 evaluations"
    assert not results.evaluation["should_continue"]
    assert [metrics["epoch"] for metrics in results.metrics] == [1, 1]


def test_the_run_folder_holds_config_metrics_samples_and_adapters(run):
    trainer, results = run
    folder = results.run_folder
    assert folder.name == "stops"
    written = PPOConfig.from_yaml(folder / "config.yaml")
    assert written.to_dict() == trainer.config.to_dict()
    assert written.judges[0].source.endswith("test_evaluator:longer")
    metrics = read_lines(folder / "metrics.jsonl")
    finite = [
        {name: value if math.isfinite(value) else None for name, value in step.items()}
        for step in (results.start, *results.metrics)
    ]
    assert metrics == finite
    samples = read_lines(folder / "samples.jsonl")
    trained, followed = (
        [sample for sample in samples if sample["kind"] == kind] for kind in ("trained", "followed")
    )
    assert [sample["step"] for sample in trained] == [1, 1, 2]
    assert {sample["prompt"] for sample in trained} == {"a", "b", "c"}
    assert [(sample["step"], sample["prompt"]) for sample in followed] == [
        (step, "held out") for step in (0, 1, 2)
    ]
    assert all(sample["reward"] == 0.25 for sample in samples)
    for role in ("policy", "value"):
        assert (folder / role / "adapter_model.safetensors").is_file()


def test_a_folder_with_a_run_is_not_written_over(run):
    trainer, results = run
    before = (results.run_folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="already holds a run"):
        trainer.train(["a"], validation_prompts=["v"])
    assert (results.run_folder / "metrics.jsonl").read_bytes() == before


def test_what_is_logged_is_what_the_glossary_defines(run):
    _, results = run
    logged = set().union(*results.metrics)
    assert {name for name in logged if not is_defined(name)} == set()
    own = {
        "custom/*",
        "validation/custom/*",
        "equal_groups",
        "reward_spread",
        "episode_turns",
        "observed_tokens",
        "malformed_calls",
        "failed_programs",
    }  # users' own; groups; ensembles; episodes; programs
    families = {
        known
        for known in GLOSSARY
        if known.endswith("/*") and any(name.startswith(known[:-1]) for name in logged)
    }
    assert set(GLOSSARY) - logged - families == own


def test_a_step_returns_no_number_that_the_glossary_does_not_define(run):
    trainer, _ = run
    outcome = trainer.ppo_step(["a"])
    beside = {"generated_texts", "rewards", "rewards_by_name", "reward_source", "sa_pairs", "trained_rows"}
    assert {name for name in outcome if not is_defined(name)} == beside


@pytest.mark.parametrize(("eval_every", "judged"), [(2, [2, 4, 5]), (9, [5])])
def test_evaluations_come_every_so_often_and_always_after_the_last_step(run, tmp_path, eval_every, judged):
    trainer, _ = run
    trainer.step = 0
    trainer.config = PPOConfig(
        **{**vars(trainer.config), "eval_every": eval_every, "patience": 0, "run_dir": str(tmp_path)}
    )
    results = trainer.train(["a", "b"], num_epochs=5, validation_prompts=["v"])
    assert results.stop_reason == "all epochs done"
    evaluated = [metrics["step"] for metrics in results.metrics if "validation/reward" in metrics]
    assert evaluated == judged
    assert results.start["step"] == results.best_step == 0  # all are worth the same
    assert {"performance_improved", "converged"} <= set(results.evaluation)


def test_num_epochs_below_one_is_refused(run):
    with pytest.raises(ValueError, match=r"num_epochs \(0\) must be at least 1"):
        run[0].train(["a"], num_epochs=0)


@pytest.mark.parametrize("engine", ["plain", "auto"])
def test_answers_to_equal_prompts_do_not_depend_on_the_batches(make_config, monkeypatch, engine):
    monkeypatch.setattr(held_out, "FAST_BATCH", 1)
    prompts, said = ["same", "other", "same", "same", "other"], []
    for size in (1, 2, 5):
        trainer = PPOTrainer(make_config(batch_size=size, engine=engine))
        said.append([answer(trainer, prompts).texts, held_out.reference_answers(trainer, prompts).texts])
    assert said[0] == said[1] == said[2]
    texts, reference = said[0]
    assert texts == reference  # nothing is trained, and both have the same noise
    assert len(set(texts)) == 5  # of equal prompts each has noise of its own


def test_judges_decide_if_there_are_any_and_a_resumed_run_keeps_who_decided():
    rewards, rates = iter([1.0, 2.0, 3.0, 4.0, 5.0]), iter([0.5, 0.6, 0.55, 0.5, 0.7])

    def validate():
        return {
            "reward": next(rewards),
            "win_rate": 0.9,
            "win_rate/a": (rate := next(rates)),
            "win_rate/b": rate,
        }

    evaluator, improved, _ = judge([0.0] * 3, validate)
    assert improved == [True, True, False]
    assert (evaluator.best_reward, evaluator.best_step) == (0.6, 2)
    again = Evaluator(validate=validate)
    again.restore(json.loads(json.dumps(evaluator.state())))
    performance, _ = again.evaluate({"avg_reward": 0.0})
    assert (performance["evidence"], performance["reward"], performance["decided_by"]) == (0.5, 4.0, "judges")
    old = Evaluator(validate=validate)
    old.restore(
        {"best": [3.0, 3], "evaluations": [3, 0], "rewards": [1.0, 2.0, 3.0]}
    )  # before judges decided
    performance, _ = old.evaluate({"avg_reward": 0.0})
    assert (performance["evidence"], performance["performance_improved"]) == (5.0, True)


def test_without_its_judges_a_run_begins_to_look_for_its_best_anew():
    evaluator, _, _ = judge([0.0], lambda: {"reward": -5.0, "win_rate/a": 0.8})
    evaluator.validate = lambda: {"reward": -4.0}
    performance, _ = evaluator.evaluate({"avg_reward": 0.0})
    assert (performance["best_reward"], performance["decided_by"]) == (-4.0, "reward")


def test_a_judge_that_could_not_be_asked_is_not_evidence():
    evaluator, improved, _ = judge([0.0], lambda: {"reward": 9.0, "win_rate/a": 0.8, "win_rate/b": NAN})
    assert improved == [False]
    assert math.isnan(evaluator.rewards[-1])
