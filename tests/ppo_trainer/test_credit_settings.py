"""Estimators, objectives and critic settings in whole steps: what is trained on is what the formulas say."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from proxima.config import PPOConfig
from proxima.core.types import pad_to
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.distributed import Processes
from tests import oracles
from tests.conftest import count_e
from tests.helpers import difference, on_another_engine, rounding, shake, weights

NO_CRITIC = {"value_learning_rate": 1e-4, "num_generations": 3}


def expected_groups(outcome, kl_coef, centre, size=3):
    """Rows of advantages of the responses that were trained on."""
    groups, found = {}, {}
    for row in outcome["trained_rows"]:
        groups.setdefault(row // size, []).append(row)
    for rows in groups.values():
        centred = centre([outcome["rewards"][row] for row in rows])
        found.update(dict(zip(rows, centred, strict=True)))
    pairs = outcome["sa_pairs"]
    kl = pairs.column("logprob_policy") - pairs.column("logprob_ref")
    return [
        oracles.less_kl_to_go(found[row], (kl_coef * kl[i][pairs.mask[i]]).tolist())
        for i, row in enumerate(outcome["trained_rows"])
    ]


@pytest.mark.parametrize("name", oracles.CENTRED_SCORES)
def test_a_step_without_a_value_model(make_config, prompts, tmp_path, name):
    config = make_config(adv_estimator=name, whiten_advantages=False, **NO_CRITIC)
    trainer = shake(PPOTrainer(config))
    before = weights(trainer)
    outcome = trainer.ppo_step(prompts[:2])
    pairs = outcome["sa_pairs"]
    assert trainer.models.value is None
    assert trainer.model_trainer.value_optimizer is None
    assert pairs.tokens.prompts == [prompt for prompt in prompts[:2] for _ in range(3)]
    assert not {"value", "return"} & set(pairs.columns)
    for i, expected in enumerate(expected_groups(outcome, config.kl_coef, oracles.CENTRED_SCORES[name])):
        assert pairs.column("advantage")[i][pairs.mask[i]].tolist() == pytest.approx(
            expected, abs=1e-4, rel=1e-4
        )
    assert outcome["value_loss"] != outcome["value_loss"]
    assert outcome["explained_variance"] != outcome["explained_variance"]
    assert outcome["equal_groups"] == 0
    assert not torch.equal(before["policy"], weights(trainer)["policy"])
    folder = trainer.save(tmp_path / "saved")
    assert [path.name for path in folder.iterdir()] == ["policy"]
    again = PPOTrainer(config)
    again.load(folder)
    assert difference(weights(trainer), weights(again)) == 0
    with pytest.raises(ValueError, match=f"adv_estimator {name} has no value model"):
        trainer.model_trainer.train_value_model(pairs)


def test_a_reward_that_fails_leaves_its_group_and_the_others_are_compared_among_themselves(
    make_config, prompts
):
    def second_fails(prompts_, texts):
        return [float("nan") if i == 1 else float(i * i) for i in range(len(texts))]

    chosen = {"rewards": (second_fails,), "adv_estimator": "rloo", "whiten_advantages": False}
    outcome = PPOTrainer(make_config(kl_coef=0.0, **chosen, **NO_CRITIC)).ppo_step(prompts[:2])
    assert outcome["trained_rows"] == [0, 2, 3, 4, 5]
    assert outcome["sa_pairs"].column("advantage")[:, 0].tolist() == pytest.approx(
        [-4.0, 4.0, *oracles.rloo([9.0, 16.0, 25.0])]
    )


def test_equal_groups_are_counted_and_teach_nothing(make_config, prompts):
    def first_prompt_alone(prompts_, texts):
        return [0.97 if i < 3 else float(i) for i in range(len(texts))]

    chosen = {"rewards": (first_prompt_alone,), "adv_estimator": "grpo", "whiten_advantages": False}
    outcome = PPOTrainer(make_config(kl_coef=0.0, **chosen, **NO_CRITIC)).ppo_step(prompts[:2])
    assert outcome["equal_groups"] == 0.5
    assert not outcome["sa_pairs"].column("advantage")[:3].any()


def test_a_run_of_groups_has_its_samples_beside_their_prompts(make_config):
    def which(prompts_, texts):
        return [float(prompt == "b") for prompt in prompts_]

    config = make_config(
        rewards=(which,), batch_size=2, ppo_epochs=1, run_name="groups", adv_estimator="reinforce_plus_plus",
        **NO_CRITIC,
    )  # fmt: skip
    results = PPOTrainer(config).train(["a", "b"], validation_prompts=["a"])
    samples = results.evaluation["samples"]
    assert {(each["prompt"], each["reward"]) for each in samples} <= {("a", 0.0), ("b", 1.0)}
    assert len(results.metrics) == 1
    assert not (results.run_folder / "value").exists()


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_is_normalised_over_all_tokens_of_the_rollout(make_config, prompts, name, whiten):
    """Less its KL to go, then mean and biased deviation over the tokens of all groups; or neither."""
    config = make_config(
        adv_estimator=name, whiten_advantages=whiten, max_new_tokens=8, temperature=1.5, rewards=(count_e,),
        **NO_CRITIC,
    )  # fmt: skip
    trainer = shake(PPOTrainer(config))
    trainer.models.eos_ids = tuple(range(0, 200, 3))  # responses of several lengths: tokens count, not they
    outcome = trainer.ppo_step(prompts)
    pairs = outcome["sa_pairs"]
    assert len(set(pairs.lengths.tolist())) > 1
    rows = expected_groups(outcome, config.kl_coef, oracles.CENTRED_SCORES[name])
    expected = [number for row in rows for number in row]
    expected = oracles.whiten(expected) if whiten else expected
    assert pairs.column("advantage")[pairs.mask].tolist() == pytest.approx(expected, abs=1e-4, rel=1e-4)


# --- what cannot be
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adv_estimator": "grpo", "whiten_advantages": False}, "set num_generations to 2 or more"),
        ({"adv_estimator": "rloo", "num_generations": 2}, "set whiten_advantages to false"),
        (
            {"adv_estimator": "reinforce_plus_plus", "value_clip": 0.2},
            "no value model, which value_clip needs",
        ),
        (
            {"adv_estimator": "reinforce_plus_plus", "value_epochs": 2, "cut_responses": "bootstrap"},
            "which value_epochs, cut_responses bootstrap need: leave out, or set adv_estimator to gae",
        ),
        ({"value_epochs": 2, "value_model": "policy"}, "set value_epochs to 0"),
        ({"value_target": "lambda_return", "value_lam": 0.5}, "leave value_target out"),
        ({"cut_responses": "leave_out", "missing_eos_penalty": 1.0}, "set one of them to its default"),
        ({"objective": "dis", "importance_mode": "mask"}, "leave importance_mode out"),
        (
            {"objective": "dis", "importance_clip": 3.0, "importance_low": 0.9},
            "leave importance_low, importance_clip out",
        ),
        ({"objective": "cispo", "dual_clip": 3.0}, "dual_clip bounds the loss of objective ppo"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_in_one_line(settings, said):
    with pytest.raises(ValueError, match=said) as caught:
        PPOConfig(**settings)
    assert "\n" not in str(caught.value)


GAME = {"environment": "my_game:Game"}
VLLM = {"engine": "vllm"}
OF_EPISODES = {"max_turns": 3, "max_episode_tokens": 90, "step_seconds": 5.0, "step_memory_mb": 9}


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"adv_estimator": "reinforce_plus_plus", "lam": 0.8, "gamma": 0.9}, ["gamma", "lam"]),
        ({"adv_estimator": "reinforce_plus_plus", "lam": 1.0, "gamma": 1.0}, []),
        ({"lam_alpha": 1.5, "lam": 0.8, "gamma": 0.9}, ["lam"]),
        ({"importance_low": 0.9, **VLLM}, ["importance_low"]),
        ({"objective": "cispo", "clip_epsilon": 0.3, "clip_epsilon_high": 0.4}, ["clip_epsilon"]),
        ({"objective": "cispo", "clip_epsilon": 0.3}, []),
        ({"kl_target": 3.0, "kl_horizon": 400}, ["kl_target", "kl_horizon"]),
        ({"kl_target": 3.0, "kl_horizon": 400, "kl_controller": "budget"}, ["kl_horizon"]),
        ({"kl_target": 3.0, "kl_horizon": 400, "kl_controller": "adaptive"}, []),
        ({"kl_coef": 0.5, "kl_controller": "budget"}, ["kl_coef"]),
        ({"importance_mode": "sequence_mask", **VLLM}, ["importance_mode"]),
        ({"importance_mode": "sequence_mask", "importance_clip": 1.01, **VLLM}, []),
        ({"importance_mode": "sequence_mask", "importance_low": 0.99, **VLLM}, []),
        ({"importance_low": 0.9, "importance_mode": "mask", **VLLM}, []),
        ({"importance_mode": "mask", "importance_clip": 3.0}, ["importance_mode", "importance_clip"]),
        ({"value_coef": 0.5}, ["value_coef"]),
        ({"value_coef": 0.5, "value_model": "policy"}, []),
        ({**GAME, "discount": "turn", "gamma": 1.0, "lam": 1.0}, ["discount"]),
        ({**GAME, "discount": "turn", "gamma": 1.0, "lam": 1.0, "value_lam": 0.9}, []),
        ({"kl_loss": "k3"}, ["kl_loss"]),
        ({"kl_loss": "k3", "kl_loss_coef": 0.1}, []),
        ({**GAME, "normalize_rewards": True, "clip_rewards": 2.0}, ["normalize_rewards", "clip_rewards"]),
        ({**GAME, "normalize_rewards": True, "rewards": ("ends_with_eos",)}, []),
        ({**GAME, "clip_rewards": 2.0, "missing_eos_penalty": 1.0}, []),
        (OF_EPISODES, [*OF_EPISODES]),
        ({**GAME, **OF_EPISODES}, []),
        ({"tools": "my_tools:add", "max_turns": 3, "step_memory_mb": 9}, ["step_memory_mb"]),
        ({"buffer_token_budget": 60}, ["buffer_token_budget"]),
        ({"buffer_token_budget": 60, "buffer_sampling": "token_budget"}, []),
    ],
)
def test_settings_without_effect_are_named(settings, idle):
    found = PPOConfig(**settings).idle_settings
    assert list(found) == idle
    assert all("has no effect" in what and remedy for what, remedy in found.values())


# --- cut responses
# ----------------------------------------------------------------------------------------------------------


def some_ended(trainer, prompts):
    """A rollout of which some responses count as finished."""
    real = trainer.generator.generate_sequences

    def generate(*given):
        rollout, texts = real(*given)
        ended = torch.arange(rollout.batch_size) % 2 == 0
        storage = replace(rollout.storage, tokens=replace(rollout.tokens, ended=ended))
        return type(rollout)(storage), texts

    trainer.generator.generate_sequences = generate
    return trainer


def test_a_cut_response_is_worth_the_value_after_it(make_config, prompts):
    config = make_config(cut_responses="bootstrap", whiten_advantages=False, gamma=0.9)
    trainer = some_ended(shake(PPOTrainer(config)), prompts)
    seen = []
    real = trainer.value_adder.values_after_cut
    trainer.value_adder.values_after_cut = lambda pairs: seen.append(real(pairs)) or seen[-1]
    value_before = trainer.models.value
    first = trainer.generator.generate_sequences(prompts, 0)[0]
    tokens = first.tokens
    longer = replace(
        tokens, response_ids=pad_to(tokens.response_ids, 7), mask=pad_to(tokens.mask, 7, 1), kept=None
    )
    with torch.no_grad():
        expected_after = value_before.response_values(replace(longer, sampled_logprobs=None))[:, 6]
    outcome = trainer.ppo_step(prompts)
    pairs, ended = outcome["sa_pairs"], outcome["sa_pairs"].tokens.ended
    assert pairs.mask.all()  # every response has 6 tokens
    torch.testing.assert_close(seen[0], torch.where(ended, 0.0, expected_after), rtol=1e-4, atol=1e-5)
    kl = pairs.column("logprob_policy") - pairs.column("logprob_ref")
    for i, score in enumerate(outcome["rewards"]):
        own = oracles.adjusted_rewards(score if ended[i] else 0.0, kl[i].tolist(), config.kl_coef)
        assert pairs.column("reward")[i].tolist() == pytest.approx(own, abs=1e-5)
        if not ended[i]:
            own = oracles.bootstrapped(own, config.gamma, float(seen[0][i]))
        deltas = oracles.td_errors(own, pairs.column("value")[i].tolist(), config.gamma)
        assert pairs.column("advantage")[i].tolist() == pytest.approx(
            oracles.gae(deltas, config.gamma, config.lam), abs=1e-4
        )
        assert pairs.column("return")[i].tolist() == pytest.approx(
            oracles.reward_to_go(own, config.gamma), abs=1e-4
        )


def test_cut_responses_are_left_out_and_where_all_are_nothing_is_trained(make_config, prompts):
    config = make_config(cut_responses="leave_out")
    outcome = some_ended(PPOTrainer(config), prompts).ppo_step(prompts)
    assert outcome["trained_rows"] == [0, 2]
    assert outcome["sa_pairs"].batch_size == 2
    assert len(outcome["rewards"]) == len(prompts)
    trainer = PPOTrainer(make_config(cut_responses="leave_out", temperature=0.01))
    real = trainer.models.eos_ids
    trainer.models.eos_ids = ()  # nothing ends
    before = weights(trainer)
    outcome = trainer.ppo_step(prompts)
    assert (real != (), outcome["eos_rate"], outcome["optimizer_steps"]) == (True, 0, 0)
    assert outcome["policy_loss"] != outcome["policy_loss"]
    assert difference(before, weights(trainer)) == 0


# --- the critic's own practice
# ----------------------------------------------------------------------------------------------------------


def test_value_epochs_go_on_where_kl_stop_ends_the_policys(make_config, prompts):
    def step(**settings):
        return PPOTrainer(make_config(minibatch_size=2, **settings)).ppo_step(prompts)

    free = step(ppo_epochs=3, value_epochs=5)
    assert free["optimizer_steps"] == 2 * (3 + 5)
    stopped = step(learning_rate=1e-2, kl_stop=1e-3, ppo_epochs=3, value_epochs=5)
    assert stopped["kl_stopped"] == 1
    assert 2 * 5 < stopped["optimizer_steps"] < 2 * (3 + 5)


def test_as_many_value_epochs_as_the_policys_are_the_same_update(make_config, prompts):
    joint, apart = (shake(PPOTrainer(make_config(value_epochs=count))) for count in (0, 4))
    for trainer in (joint, apart):
        trainer.ppo_step(prompts)
    assert difference(weights(joint), weights(apart)) <= rounding(joint)


def test_the_policy_waits_for_the_explained_variance_and_then_trains_on(make_config, prompts):
    trainer = PPOTrainer(make_config(critic_warmup_until=0.5, critic_warmup_steps=1))
    before = weights(trainer)
    assert trainer.ppo_step(prompts)["explained_variance"] < 0.5
    assert torch.equal(before["policy"], weights(trainer)["policy"])
    assert [trainer._critic_is_warm(each) for each in (0.4, 0.6, 0.1, float("nan"))] == [
        False,
        True,
        True,
        True,
    ]
    trainer.ppo_step(prompts)
    assert not torch.equal(before["policy"], weights(trainer)["policy"])
    assert not PPOTrainer(make_config(critic_warmup_steps=1))._critic_is_warm(1.0)


# --- invariance
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["token", "sequence", "horizon"])
@pytest.mark.parametrize("objective", ["ppo", "cispo", "dis"])
def test_an_update_does_not_depend_on_micro_batches(make_config, prompts, weighting, objective):
    chosen = {"loss_weighting": weighting, "objective": objective, "max_new_tokens": 12, "temperature": 2.0}
    chosen |= {"kl_loss_coef": 0.1, "kl_loss": {"ppo": "k2", "cispo": "k3", "dis": "exact"}[objective]}
    found = []
    for size in (1, 64):
        trainer = shake(PPOTrainer(make_config(micro_batch_size=size, ppo_epochs=1, **chosen)))
        outcome = trainer.ppo_step(prompts)
        found.append((weights(trainer), outcome["policy_loss"]))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4, abs=1e-5)
    assert difference(found[0][0], found[1][0]) <= rounding(trainer)


def test_the_loss_of_a_step_is_weighted_as_the_setting_says(make_config, prompts):
    """At ratio 1 the loss of a token is minus its advantage."""
    for weighting in ("token", "sequence", "horizon"):
        config = make_config(
            loss_weighting=weighting, ppo_epochs=1, minibatch_size=8, max_new_tokens=12, rewards=(count_e,)
        )
        trainer = shake(PPOTrainer(config))
        trainer.models.eos_ids = tuple(range(0, 200, 3))  # responses of several lengths
        outcome = trainer.ppo_step(prompts)
        pairs = outcome["sa_pairs"]
        rows = [
            (-row[real]).tolist() for row, real in zip(pairs.column("advantage"), pairs.mask, strict=True)
        ]
        assert len({len(row) for row in rows}) > 1
        assert outcome["policy_loss"] == pytest.approx(
            oracles.weighted_loss(rows, weighting, 12), abs=1e-4, rel=1e-4
        )


@pytest.mark.parametrize("mode", ["mask", "sequence_mask"])
@pytest.mark.parametrize("weighting", ["token", "sequence", "horizon"])
def test_rejected_tokens_stay_in_the_denominator_over_micro_batches_and_processes(
    make_config, prompts, mode, weighting
):
    """Where the ratio is 1, the loss of a token is its weight times minus its advantage, and 0 if rejected."""
    more = {"importance_mode": mode, "importance_low": 0.95, "importance_clip": 1.05}
    more |= {"learning_rate": 1e-30, "max_new_tokens": 8, "temperature": 1.5, "loss_weighting": weighting}
    trainer = on_another_engine(shake(PPOTrainer(make_config(**more))))
    trainer.models.eos_ids = tuple(range(0, 200, 3))
    pairs = trainer.ppo_step(prompts)["sa_pairs"]
    kept, real = pairs.column("importance"), pairs.mask
    assert 0 < (kept[real] == 0).float().mean() < 1
    rows = [
        (-weight * advantage)[mask].tolist()
        for weight, advantage, mask in zip(kept, pairs.column("advantage"), real, strict=True)
    ]
    expected = oracles.weighted_loss(rows, weighting, 8)
    for size, count in product((1, 2, 64), (1, 2, 3)):
        trainer.models.micro_batches.size, shares = size, []
        for rank in range(count):
            trainer.models.processes = Processes(rank, count)
            shares.append(float(trainer.model_trainer._policy_backward(pairs)[0]["policy_loss"]))
        assert sum(shares) == pytest.approx(expected, abs=1e-5, rel=1e-4)


@pytest.mark.parametrize(("name", "of"), [("k2", lambda d: d**2 / 2), ("k3", lambda d: (-d).exp() - 1 + d)])
def test_the_kl_of_sampled_tokens_is_added_to_the_loss_of_a_step(make_config, prompts, name, of):
    chosen = {"kl_loss": name, "kl_loss_coef": 0.3, "ppo_epochs": 1, "minibatch_size": 8, "kl_coef": 0.0}
    trainer = shake(PPOTrainer(make_config(**chosen)))
    outcome = trainer.ppo_step(prompts)
    pairs = outcome["sa_pairs"]
    moved = (pairs.column("logprob_policy") - pairs.column("logprob_ref")).double()
    expected = (0.3 * of(moved) - pairs.column("advantage"))[pairs.mask].mean()
    assert float(of(moved)[pairs.mask].mean()) > 1e-4
    assert outcome["policy_loss"] == pytest.approx(float(expected), abs=1e-5, rel=1e-4)
