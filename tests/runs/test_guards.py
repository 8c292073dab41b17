"""Guards: each raises its alarm and no other, a healthy run none; and what follows: a warning, a stop, a
rollback."""

import json
import math

import pytest
import torch

from proxima.config import PPOConfig
from proxima.ppo_trainer import PPOTrainer, model_trainer
from proxima.runs import guards
from proxima.runs.guards import MAX_ROLLBACKS, alarms
from proxima.training import objectives
from tests.helpers import weights
from tests.ppo_trainer.test_resume import Crash, lines, same_run

NAN = float("nan")
NO_CRITIC = {"whiten_advantages": False, "value_learning_rate": 1e-4}
LIMITS = {
    "max_skipped_updates": 4,
    "kl_limit": 10.0,
    "min_entropy": 0.5,
    "length_limit": 3.0,
    "max_declining_evals": 3,
    "max_failed_rewards": 20.0,
    "critic_warmup_until": 0.3,
    "leaves_out_cut": True,
}
HEALTHY = {
    "skipped_updates": 0,
    "optimizer_steps": 8,
    "kl_stopped": 0,
    "kl_exact": 2.0,
    "entropy": 1.5,
    "response_length": 20.0,
    "eos_rate": 0.8,
    "avg_reward": 1.0,
    "failed_rewards": 1,
    "explained_variance": 0.5,
}


def history(steps: int = 12, **columns) -> list[dict[str, float]]:
    """Healthy steps, with these columns as given from the last step backwards."""
    made = [
        {**HEALTHY, "step": i + 1, "avg_reward": 0.1 * i, "validation/reward": 0.1 * i} for i in range(steps)
    ]
    for name, values in columns.items():
        for step, value in zip(made[-len(values) :], values, strict=True):
            step[name.replace("validation_", "validation/")] = value
    return made


def raised(given, **limits) -> list[str]:
    return [alarm.guard for alarm in alarms(given, **{**LIMITS, **limits})]


def test_a_healthy_run_raises_none_at_any_step():
    made = history(30)
    assert [raised(made[: i + 1]) for i in range(30)] == [[]] * 30


@pytest.mark.parametrize(
    ("columns", "guard"),
    [
        ({"skipped_updates": [4]}, "nonfinite"),
        ({"skipped_updates": [1, 1, 0, 0, 1, 1]}, "nonfinite"),
        ({"kl_exact": [10.1]}, "kl"),
        ({"kl_exact": [NAN]}, "kl"),
        ({"kl_exact": [math.inf]}, "kl"),
        ({"entropy": [0.49]}, "entropy"),
        ({"entropy": [NAN]}, "entropy"),
        ({"response_length": [61.0] * 3}, "length"),
        ({"eos_rate": [0.0] * 3}, "length"),
        ({"validation_reward": [0.9, 0.8, 0.7, 0.6]}, "overoptimization"),
        ({"validation_reward": [0.9, 0.8, NAN, 0.7, 0.6]}, "overoptimization"),
        ({"validation_win_rate/judge": [0.9, 0.8, 0.7, 0.6]}, "overoptimization"),  # its own reward rises
        ({"failed_rewards": [5] * 3}, "rewards"),
        ({"explained_variance": [0.29] * 20}, "critic"),
        ({"explained_variance": [-1.0, NAN] * 10}, "critic"),
        ({"optimizer_steps": [0] * 3}, "cut"),
    ],
)
def test_what_goes_wrong_raises_its_own_alarm_and_0_turns_it_off(columns, guard):
    made = history(max(12, *map(len, columns.values())), **columns)
    assert raised(made) == [guard]
    names = ["nonfinite", "kl", "entropy", "length", "overoptimization", "rewards", "critic", "cut"]
    limit = dict(zip(names, LIMITS, strict=True))[guard]
    assert raised(made, **{limit: 0}) == []


@pytest.mark.parametrize(
    "columns",
    [
        {"skipped_updates": [3]},
        {"optimizer_steps": [0] * 2},
        {"optimizer_steps": [0, 8, 0, 0]},
        {"optimizer_steps": [0] * 3, "skipped_updates": [1] * 3},
        {"optimizer_steps": [0] * 3, "kl_stopped": [1, 1, 1]},  # it was stopped, not without a response
        {"skipped_updates": [4] + [0] * 10},  # long ago
        {"kl_exact": [10.0]},
        {"entropy": [0.5]},
        {"response_length": [100.0] * 2},  # not for long enough
        {"response_length": [61.0, 61.0, 20.0]},  # over again
        {"eos_rate": [0.0, 0.0, 0.1]},
        {"failed_rewards": [4] * 3},
        {"failed_rewards": [9, 9, 0]},
        {"failed_rewards": [9, 9]},
        {"validation_reward": [0.9, 0.8, 0.7, 0.75]},
        {
            "validation_reward": [0.9, 0.8, 0.7, 0.6],
            "avg_reward": [0.9, 0.8, 0.7, 0.6],
        },  # both fall: worse, but not hacked
        {"validation_reward": [NAN] * 4},
        {"validation_win_rate": [0.9, 0.8, 0.7, 0.6]},  # by the rewards, not by a judge
        {"validation_win_rate/one": [0.9, 0.8, 0.7, 0.6], "validation_win_rate/other": [0.1, 0.2, 0.3, 0.5]},
    ],
)
def test_what_is_within_its_limits_raises_none(columns):
    assert raised(history(**columns)) == []


def test_a_policy_waits_for_its_critic_a_while_and_then_it_is_said():
    made = history(40, explained_variance=[0.1] * 40)
    assert [raised(made[:count]) for count in (19, 20, 21)] == [[], ["critic"], []]
    assert raised(made[:20], critic_warmup_steps=10) == []  # until then the policy waits in any case
    [alarm] = alarms(made[:30], critic_warmup_until=0.3, critic_warmup_steps=10)
    assert alarm.message == (
        "the policy has waited 20 steps for the value model, whose explained variance was at most 0.1, and "
        "critic_warmup_until is 0.3; the policy trains from the next step on: raise value_learning_rate or "
        "value_epochs, or lower critic_warmup_until; to let it wait longer, raise critic_warmup_steps"
    )
    [alarm] = alarms(made[:7], critic_warmup_until=0.3, critic_warmup_steps=2, last_step=7)
    assert "waited 5 steps" in alarm.message
    assert "; the run ends before the policy trained: raise" in alarm.message
    made[15]["explained_variance"] = 0.3
    assert raised(made[:20]) == []
    assert raised(made[:36], critic_warmup_steps=16) == ["critic"]  # what came before does not count


def test_runs_that_never_ended_responses_are_not_blamed_for_it():
    made = history(eos_rate=[0.0] * 3)
    made[0]["eos_rate"] = 0.4
    assert raised(made) == []


def test_a_message_names_the_numbers():
    [alarm] = alarms(history(kl_exact=[12.5]), kl_limit=10)
    assert alarm.message == "the policy is 12.5 nats per response from the reference, the limit is 10"
    [alarm] = alarms(history(validation_reward=[0.9, 0.8, 0.7, 0.6]), max_declining_evals=3)
    assert (
        "fell 3 evaluations in a row (0.9 to 0.6) while the training reward rose (0.85 to 1.05)"
        in alarm.message
    )


# --- in a run ---


def test_a_policy_whose_critic_never_gets_good_trains_after_a_stated_wait(make_config, monkeypatch):
    """One warning, a line in the log, and evaluations of a policy that did not move are not counted."""
    monkeypatch.setattr(guards, "LONGEST_WAIT", 2)
    more = {"critic_warmup_until": 0.999, "critic_warmup_steps": 1, "on_guard": "stop", "patience": 1}
    config = make_config(
        batch_size=2, max_new_tokens=4, run_name="waits", min_improvement=1e3, rewards=(flat,), **more
    )
    results = PPOTrainer(config).train(PROMPTS * 2)
    assert [math.isnan(step["policy_loss"]) for step in results.metrics] == [True] * 3 + [False]
    assert [step["alarms"] for step in results.metrics] == [0, 0, 1, 0]
    assert results.stop_reason.startswith("no improvement over")  # by the evaluation after the wait
    [warning] = lines(results.run_folder, "warnings.jsonl")
    assert (warning["step"], warning["guard"], warning["action"]) == (3, "critic", "warn")
    written = (results.run_folder / "log.txt").read_text()
    assert "step 4: the policy trains from here on; the explained variance" in written
    assert "has not reached critic_warmup_until (0.999)" in written


@pytest.mark.parametrize("method", [{}, {"adv_estimator": "rloo", "num_generations": 2, **NO_CRITIC}])
def test_a_run_whose_responses_are_all_cut_and_left_out_says_so_and_changes_nothing(make_config, method):
    more = {"batch_size": 2, "max_new_tokens": 4, "cut_responses": "leave_out", "run_name": "cut", **method}
    trainer = PPOTrainer(make_config(**more))
    trainer.models.eos_ids = ()
    before = weights(trainer)
    results = trainer.train(PROMPTS * 2)
    assert [step["alarms"] for step in results.metrics] == [0, 0, 1, 1, 1, 1]
    assert all(step["optimizer_steps"] == step["eos_rate"] == 0 for step in results.metrics)
    assert all(math.isfinite(step[name]) for step in results.metrics for name in ("avg_reward", "kl"))
    assert all(torch.equal(before[name], now) for name, now in weights(trainer).items())
    assert not optimizer_states(trainer)
    [warning] = warnings_of(results.run_folder)
    assert (warning["step"], warning["guard"], warning["action"]) == (3, "cut", "warn")
    written = (results.run_folder / "log.txt").read_text()
    assert written.count("no update, as none of") == 6


def flat(prompts, texts):
    return [float(i) for i in range(len(texts))]


PROMPTS = [f"prompt {i}" for i in range(6)]


@pytest.fixture
def settings(make_config):
    base = {"batch_size": 2, "max_new_tokens": 4, "ppo_epochs": 2, "minibatch_size": 2, "checkpoint_every": 2}
    return lambda **more: make_config(**{**base, **more})


@pytest.fixture
def nan_when(monkeypatch):
    """Make the policy loss nan whenever `condition(trainer)` holds."""

    def patch(trainer: PPOTrainer, condition) -> PPOTrainer:
        real = objectives.policy_loss
        monkeypatch.setattr(
            objectives, "policy_loss", lambda *given: real(*given) * (NAN if condition(trainer) else 1.0)
        )
        return trainer

    return patch


def warnings_of(folder) -> list[dict]:
    return lines(folder, "warnings.jsonl")


def optimizer_states(trainer):
    parts = (trainer.model_trainer.policy_optimizer, trainer.model_trainer.value_optimizer)
    return [
        value.clone()
        for part in parts
        if part is not None
        for each in part.state_dict()["state"].values()
        for value in each.values()
    ]


@pytest.mark.parametrize("loss", ["policy_loss", "value_loss"])
@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_an_update_that_is_not_finite_is_skipped_by_both_optimisers(settings, monkeypatch, loss, bad):
    trainer = PPOTrainer(settings())
    trainer.ppo_step(PROMPTS)
    before, states = weights(trainer), optimizer_states(trainer)
    home = objectives if loss == "policy_loss" else model_trainer
    with monkeypatch.context() as patch:
        real = getattr(home, loss)
        patch.setattr(home, loss, lambda *given: real(*given) * bad)
        outcome = trainer.ppo_step(PROMPTS)
    assert (outcome["skipped_updates"], outcome["optimizer_steps"]) == (6, 0)
    assert math.isnan(outcome["policy_loss"])  # nothing was measured
    assert all(torch.equal(before[role], weights(trainer)[role]) for role in before)
    assert all(torch.equal(old, new) for old, new in zip(states, optimizer_states(trainer), strict=True))
    outcome = trainer.ppo_step(PROMPTS)  # and it goes on
    assert (outcome["skipped_updates"], outcome["optimizer_steps"]) == (0, 6)
    assert math.isfinite(outcome["policy_loss"])


def test_one_bad_update_among_good_ones_is_counted_and_leaves_the_numbers_finite(settings, monkeypatch):
    trainer, calls, real = PPOTrainer(settings()), [], objectives.policy_loss

    def sometimes(*given):
        calls.append(given)
        return real(*given) * (NAN if len(calls) == 2 else 1.0)

    monkeypatch.setattr(objectives, "policy_loss", sometimes)
    results = trainer.train(PROMPTS)
    assert [step["skipped_updates"] for step in results.metrics] == [1, 0, 0]
    assert all(
        math.isfinite(step["policy_loss"]) and math.isfinite(step["grad_norm_policy"])
        for step in results.metrics
    )
    assert warnings_of(results.run_folder) == []


def test_after_too_many_bad_updates_the_run_goes_back_with_smaller_rates(settings, nan_when):
    """Nan from step 5 on at the full rate, none at half of it: one rollback to the checkpoint of step 4."""
    config = settings(max_skipped_updates=3, lr_schedule="constant", run_name="back")
    trainer = nan_when(PPOTrainer(config), lambda trainer: trainer.step >= 4 and trainer.rate_factor == 1)
    results = trainer.train(PROMPTS, 3)
    assert [step["step"] for step in results.metrics] == list(range(1, 10))
    assert [step["learning_rate"] for step in results.metrics] == pytest.approx([1e-3] * 4 + [5e-4] * 5)
    assert sum(step["skipped_updates"] for step in results.metrics) == 0  # that time line is gone
    assert lines(results.run_folder) == [
        {name: value for name, value in step.items() if not name.startswith("seconds")}
        for step in results.metrics
    ]
    [warning] = warnings_of(results.run_folder)
    assert (warning["step"], warning["guard"], warning["action"]) == (6, "nonfinite", "rollback")
    assert warning["message"] == "4 updates of the last 6 steps had a loss or gradient that is not finite"
    assert (
        "rolled back to step 4; learning rates are now x 0.5" in (results.run_folder / "log.txt").read_text()
    )
    assert json.loads((results.run_folder / "results.json").read_text())["rollbacks"] == 1


@pytest.mark.parametrize("step", [5, 7])
def test_a_run_that_rolled_back_and_then_died_resumes_bit_exactly(settings, nan_when, step):
    def bad(trainer):
        return trainer.step >= 4 and trainer.rate_factor == 1

    whole = nan_when(PPOTrainer(settings(max_skipped_updates=3, run_name="whole")), bad).train(PROMPTS, 3)
    config = settings(max_skipped_updates=3, run_name="cut")
    trainer = PPOTrainer(config)

    def die(_):
        if trainer.step == step and trainer.rate_factor < 1:
            raise Crash

    trainer.generator.check_sampling_gap = die  # after the update
    with pytest.raises(Crash):
        nan_when(trainer, bad).train(PROMPTS, 3)
    again = PPOTrainer(config)
    results = nan_when(again, bad).train(PROMPTS, 3, resume=True)
    assert again.rate_factor == 0.5
    assert same_run(whole.run_folder, results.run_folder)


def test_a_run_that_stays_bad_stops_after_a_few_rollbacks(settings, nan_when):
    config = settings(max_skipped_updates=1, rollback_rate_factor=0.1, lr_schedule="constant")
    results = nan_when(PPOTrainer(config), lambda trainer: trainer.step == 2).train(PROMPTS, 3)
    assert results.stop_reason.startswith("guard nonfinite: ")
    assert results.stop_reason.endswith(f"again after {MAX_ROLLBACKS} rollbacks")
    assert len(warnings_of(results.run_folder)) == MAX_ROLLBACKS + 1
    assert len(results.metrics) == 2
    assert (results.run_folder / "policy").is_dir()
    again = PPOTrainer(config)
    assert again.rate_factor == 1


def test_bad_updates_can_stop_the_run_and_without_checkpoints_must(settings, nan_when):
    stopped = nan_when(
        PPOTrainer(settings(max_skipped_updates=1, on_nonfinite="stop")), lambda trainer: trainer.step == 2
    )
    results = stopped.train(PROMPTS, 3)
    assert (
        results.stop_reason
        == "guard nonfinite: 2 updates of the last 3 steps had a loss or gradient that is not finite"
    )
    assert len(results.metrics) == 3
    alone = nan_when(
        PPOTrainer(settings(max_skipped_updates=1, checkpoint_every=0)), lambda trainer: trainer.step == 2
    )
    assert alone.train(PROMPTS, 3).stop_reason.endswith("there is no checkpoint to go back to")
    off = nan_when(PPOTrainer(settings(max_skipped_updates=0)), lambda trainer: trainer.step == 2)
    assert off.train(PROMPTS, 3).stop_reason == "all epochs done"


FAST = {
    "learning_rate": 3e-2,
    "kl_coef": 0.0,
    "lr_schedule": "constant",
    "ppo_epochs": 4,
}  # soon far from the reference


def test_a_rising_kl_is_said_once_and_logged_while_it_lasts(settings, caplog):
    results = PPOTrainer(settings(kl_limit=1.0, **FAST)).train(PROMPTS, 3)
    beyond = [step["kl_exact"] > 1 for step in results.metrics]
    assert beyond[0] is False
    assert any(beyond)
    assert [step["alarms"] for step in results.metrics] == [int(each) for each in beyond]
    begins = [i + 1 for i, each in enumerate(beyond) if each and not (i and beyond[i - 1])]
    said = warnings_of(results.run_folder)
    assert [(warning["step"], warning["guard"], warning["action"]) for warning in said] == [
        (i, "kl", "warn") for i in begins
    ]
    shown = [record.getMessage() for record in caplog.records if "guard kl" in record.getMessage()]
    assert len(shown) == len(begins)
    assert f"step {begins[0]}, guard kl: the policy is" in shown[0]
    assert results.stop_reason == "all epochs done"


def test_a_rising_kl_can_stop_the_run(settings):
    results = PPOTrainer(settings(kl_limit=1.0, on_guard="stop", **FAST)).train(PROMPTS, 3)
    assert "guard kl: the policy is" in results.stop_reason
    assert results.metrics[-1]["kl_exact"] > 1
    assert all(step["kl_exact"] <= 1 for step in results.metrics[:-1])
    name = results.run_folder.name
    same = PPOTrainer(settings(kl_limit=1.0, on_guard="stop", run_name=name, **FAST)).train(
        PROMPTS, 3, resume=True
    )
    assert same.stop_reason == results.stop_reason  # an ended run stays ended, until a setting changes
    freed = PPOTrainer(settings(kl_limit=0.0, on_guard="stop", run_name=name, **FAST)).train(
        PROMPTS, 3, resume=True
    )
    assert freed.stop_reason == "all epochs done"


def test_a_rising_kl_can_take_the_run_back_to_its_best(settings):
    config = settings(
        kl_limit=1.0, on_guard="rollback", rollback_rate_factor=0.01, checkpoint_every=1, **FAST
    )
    results = PPOTrainer(config).train(PROMPTS, 3)
    assert warnings_of(results.run_folder)[0]["action"] == "rollback"
    assert all(step["kl_exact"] <= 1 for step in results.metrics)
    assert results.metrics[-1]["learning_rate"] < config.learning_rate
    assert results.stop_reason == "all epochs done"
    assert len(results.metrics) == 9


def test_a_reward_hack_is_seen_on_the_held_out_reward(settings):
    """Rewards rise on what is trained on and fall on what is held out."""

    def hacked(prompts, texts):
        hacked.calls += 1
        return [-float(hacked.calls) if prompt == "held out" else float(hacked.calls) for prompt in prompts]

    hacked.calls = 0
    results = PPOTrainer(settings(rewards=(hacked,), on_guard="stop")).train(PROMPTS, 5, ["held out"])
    assert results.stop_reason.startswith(
        "guard overoptimization: the validation reward fell 4 evaluations in a row"
    )
    assert len(results.metrics) == 4  # the first fall is from the model that the run began with
    assert warnings_of(results.run_folder)[0]["guard"] == "overoptimization"


def test_rewards_that_go_on_failing_are_an_alarm_long_before_they_stop_the_run(settings):
    """Whatever `on_guard` says: what stops a run is `max_reward_failures`."""

    def sometimes(prompts, texts):
        return [NAN if text.startswith("prompt 0") else 1.0 for text in prompts]

    config = settings(rewards=(sometimes,), on_guard="stop", batch_size=6, minibatch_size=6)
    results = PPOTrainer(config).train(PROMPTS, num_epochs=4)
    assert results.stop_reason == "all epochs done"
    assert [step["alarms"] for step in results.metrics] == [0, 0, 1, 1]
    [warned] = warnings_of(results.run_folder)
    assert (warned["step"], warned["guard"], warned["action"]) == (3, "rewards", "warn")
    assert "of the last 3 steps failed (1, 1, 1)" in warned["message"]


def test_collapsing_entropy_and_exploding_lengths(settings):
    results = PPOTrainer(settings(min_entropy=20.0, on_guard="stop")).train(PROMPTS)
    assert results.stop_reason.startswith("guard entropy: the policy's entropy is")
    trainer = PPOTrainer(
        settings(max_new_tokens=1, rewards=(lambda prompts, texts: longer(texts),), on_guard="stop")
    )

    def longer(texts):
        trainer.config.max_new_tokens = 8
        return [0.0 + len(text) for text in texts]

    results = trainer.train(PROMPTS, 3)
    assert "more than 4 times the first step's 1" in results.stop_reason
    assert len(results.metrics) == 4


def test_a_healthy_run_raises_no_alarm_with_every_guard_on(settings):
    config = settings(kl_limit=10.0, min_entropy=0.1, on_guard="stop", batch_size=6, minibatch_size=6)
    results = PPOTrainer(config).train(PROMPTS, 20, ["held out"])
    assert results.stop_reason == "all epochs done"
    assert {(step["alarms"], step["skipped_updates"]) for step in results.metrics} == {(0, 0)}
    assert warnings_of(results.run_folder) == []


def test_length_limit_below_one_is_refused():
    with pytest.raises(ValueError, match=r"length_limit \(0.5\) must be 0 \(off\) or above 1"):
        PPOConfig(length_limit=0.5)
