"""Every setting changes what it says it changes; and a setting that no test moves fails the last test
here."""

import dataclasses
import math

import pytest
import torch

from proxima.config import PPOConfig
from proxima.ppo_trainer import PPOTrainer
from proxima.training.schedule import learning_rate_factor
from tests import oracles
from tests.helpers import difference, shake, weights

# setting: (what both runs have, the value that must make a difference, role whose weights must differ)
CHANGES = {
    "lora_alpha": ({}, 64, "policy"),
    "quantize": ({"engine": "plain"}, "nf4", "policy"),
    "learning_rate": ({}, 2e-3, "policy"),
    "value_learning_rate": ({}, 2e-3, "value"),
    "max_new_tokens": ({}, 7, "policy"),
    "gamma": ({}, 0.5, "policy"),
    "lam": ({}, 0.5, "policy"),
    "kl_coef": ({}, 0.9, "policy"),
    "clip_epsilon": ({}, 0.001, "policy"),
    "temperature": ({}, 0.7, "policy"),
    "top_k": ({}, 5, "policy"),
    "top_p": ({}, 0.5, "policy"),
    "seed": ({}, 1, "policy"),
    "missing_eos_penalty": ({}, 3.0, "value"),
    "normalize_rewards": ({}, True, "value"),
    "clip_rewards": ({}, 0.1, "value"),
    "ppo_epochs": ({}, 1, "policy"),
    "minibatch_size": ({}, 2, "policy"),
    "value_clip": ({"value_learning_rate": 1e-2}, 0.01, "value"),
    "value_coef": ({"value_model": "policy"}, 5.0, "policy"),
    "value_target": ({"gamma": 0.9}, "lambda_return", "value"),
    "value_lam": ({"gamma": 0.9}, 0.5, "value"),
    "lam_alpha": ({}, 0.5, "policy"),
    "cut_responses": ({}, "bootstrap", "policy"),
    "adv_estimator": ({"value_learning_rate": 1e-4}, "reinforce_plus_plus", "policy"),
    "num_generations": ({}, 2, "policy"),
    "objective": ({}, "cispo", "policy"),
    "value_epochs": ({}, 1, "value"),
    "clip_epsilon_high": ({"clip_epsilon": 0.001}, 0.5, "policy"),
    "critic_warmup_until": ({}, 0.99, "policy"),
    "whiten_advantages": ({}, False, "policy"),
    "entropy_coef": ({}, 0.5, "policy"),
    "dual_clip": ({"learning_rate": 3e-2, "clip_epsilon": 0.1}, 1.01, "policy"),
    "kl_loss_coef": ({}, 0.5, "policy"),
    "kl_loss": ({"kl_loss_coef": 0.5}, "k2", "policy"),
    "kl_controller": ({"kl_target": 0.1, "kl_horizon": 10}, "adaptive", "policy"),
    "kl_target": ({"kl_controller": "adaptive", "kl_horizon": 10}, 0.1, "policy"),
    "kl_horizon": ({"kl_controller": "adaptive", "kl_target": 0.1}, 10, "policy"),
    "kl_stop": ({"learning_rate": 1e-2}, 1e-3, "policy"),
    "max_grad_norm": ({}, 1e-4, "policy"),
    "warmup_steps": ({}, 5, "policy"),
    "critic_warmup_steps": ({}, 1, "policy"),
    "buffer_sampling": ({"minibatch_size": 2}, "length_balanced", "policy"),
    "buffer_token_budget": ({"buffer_sampling": "token_budget"}, 60, "policy"),
}

ELSEWHERE = {
    "model_name": "test_models.py",
    "lora_r": "below",
    "lora_dropout": "below",
    "lora_targets": "below",
    "sft_adapter": "test_models.py",
    "value_model": "test_models.py",
    "rewards": "test_models.py, test_bad_input.py",
    "environment": "test_episodes.py",
    "tools": "test_episodes.py, test_chat_templates.py",
    "max_turns": "test_episodes.py",
    "max_episode_tokens": "test_episodes.py",
    "step_seconds": "test_episodes.py",
    "step_memory_mb": "test_episodes.py",
    "discount": "test_episodes.py",
    "device": "below",
    "dtype": "below",
    "trust_remote_code": "below",
    "truncate_prompts": "test_bad_input.py",
    "max_reward_failures": "test_rewards.py",
    "batch_size": "below",
    "micro_batch_size": "test_step.py (it must change nothing)",
    "micro_batch_tokens": "test_step.py (it must change nothing)",
    "gradient_checkpointing": "test_engine.py (it must change nothing)",
    "engine": "test_engine.py (it must change nothing)",
    "engine_urls": "test_rollouts.py, tests/engines",
    "engine_memory": "tests/engines (it must change nothing)",
    "engine_timeout": "test_rollouts.py",
    "importance_clip": "test_rollouts.py",
    "loss_weighting": "test_credit_settings.py",
    "importance_mode": "test_rollouts.py",
    "importance_low": "test_rollouts.py",
    "overlap": "test_rollouts.py, tests/engines",
    "reward_units": "test_reward_units.py",
    "compile_layers": "tests/gpu (it must change nothing)",
    "shard_base": "test_processes.py (it must change nothing)",
    "process_timeout": "test_processes.py",
    "lr_schedule": "below",
    "buffer_storage": "below and test_buffer.py",
    "buffer_max_bytes": "below and test_buffer.py",
    "buffer_overflow": "below and test_buffer.py",
    "eval_every": "below",
    "judges": "test_judges.py",
    "token_samples": "test_token_records.py",
    "patience": "test_evaluator.py",
    "min_improvement": "test_evaluator.py",
    "checkpoint_every": "test_resume.py",
    "keep_checkpoints": "test_resume.py",
    "max_skipped_updates": "test_guards.py",
    "on_nonfinite": "test_guards.py",
    "kl_limit": "test_guards.py",
    "min_entropy": "test_guards.py",
    "length_limit": "test_guards.py",
    "max_declining_evals": "test_guards.py",
    "on_guard": "test_guards.py",
    "rollback_rate_factor": "test_guards.py",
    "record_steps": "test_step_recorder.py (it must change nothing)",
    "run_dir": "test_cli.py",
    "run_name": "below",
    "trackers": "test_cli.py",
}


def two_steps(config: PPOConfig, prompts: list[str]) -> dict[str, torch.Tensor]:
    trainer = shake(PPOTrainer(config))
    for _ in range(2):
        trainer.ppo_step(prompts)
    return weights(trainer)


@pytest.fixture(scope="module")
def outcomes():
    return {}


@pytest.mark.parametrize("name", CHANGES)
def test_the_setting_changes_the_outcome(make_config, prompts, outcomes, name):
    common, value, role = CHANGES[name]
    key = str(common)
    if key not in outcomes:
        outcomes[key] = two_steps(make_config(**common), prompts)
    changed = two_steps(make_config(**{**common, name: value}), prompts)
    assert outcomes[key][role].shape == changed[role].shape
    assert float((outcomes[key][role] - changed[role]).abs().max()) > 1e-7


def test_every_setting_is_moved_by_a_test():
    assert {field.name for field in dataclasses.fields(PPOConfig)} == set(CHANGES) | set(ELSEWHERE)
    assert not set(CHANGES) & set(ELSEWHERE)


@pytest.mark.parametrize("settings", [{"lora_r": 4}, {"lora_targets": "q_proj, v_proj"}])
def test_size_and_place_of_adapters(make_config, settings):
    sizes = [weights(PPOTrainer(make_config(**change)))["policy"].numel() for change in ({}, settings)]
    assert sizes[0] > sizes[1] > 0


def test_adapter_dropout_acts_when_a_stage_trains_with_it(make_config, prompts):
    trainer = shake(PPOTrainer(make_config(lora_dropout=0.5)))
    policy, (tokens) = trainer.models.policy, trainer.generator.generate(prompts)[1].tokens
    still = policy.response_logits(tokens)
    policy.backbone.network.train()
    assert not torch.equal(policy.response_logits(tokens), still)


def test_dtype_and_device(make_config):
    network = PPOTrainer(make_config(dtype="float16", device="cpu")).models.policy.backbone.network
    assert network.get_input_embeddings().weight.dtype == torch.float16
    with pytest.raises(ValueError, match=r"device 'nonsense' cannot be used"):
        PPOTrainer(make_config(device="nonsense"))


def test_remote_code_runs_only_when_asked_for(make_config, monkeypatch):
    from proxima.base_setup import loading, tokenizer_setup

    asked = []

    def spy(original):
        def load(*names, trust_remote_code, **rest):
            asked.append(trust_remote_code)
            return original(*names, trust_remote_code=trust_remote_code, **rest)

        return load

    for kind in (loading.AutoModelForCausalLM, tokenizer_setup.AutoTokenizer):
        monkeypatch.setattr(kind, "from_pretrained", spy(kind.from_pretrained))
    for wanted in (False, True):
        asked.clear()
        PPOTrainer(make_config(trust_remote_code=wanted))
        assert asked == [wanted, wanted]


def test_batch_size_eval_every_and_run_name_shape_a_run(make_config):
    config = make_config(batch_size=2, eval_every=2, run_name="five")
    results = PPOTrainer(config).train([f"prompt {i}" for i in range(5)], num_epochs=1)
    assert [metrics["step"] for metrics in results.metrics] == [1, 2, 3]
    assert results.metrics[-1]["tokens"] <= config.max_new_tokens  # the last batch is short: one prompt
    assert results.run_folder.name == "five"
    samples = (results.run_folder / "samples.jsonl").read_text().splitlines()
    assert {line[: len('{"step": 2')] for line in samples} == {
        '{"step": 2',
        '{"step": 3',
    }  # every second step, and the last
    with pytest.raises(ValueError, match="already holds a run"):
        PPOTrainer(config).train(["again"])


def test_buffer_storage_changes_nothing_but_the_place(make_config, prompts):
    plain = two_steps(make_config(), prompts)
    for settings in (
        {"buffer_storage": "cpu"},
        {"buffer_storage": "disk"},
        {"buffer_max_bytes": 10, "buffer_overflow": "disk"},
    ):
        assert difference(plain, two_steps(make_config(**settings), prompts)) == 0
    with pytest.raises(MemoryError, match="at most 10"):
        PPOTrainer(make_config(buffer_max_bytes=10)).ppo_step(prompts)
    with pytest.warns(UserWarning, match="acts as error"), pytest.raises(MemoryError, match="at most 10"):
        PPOTrainer(make_config(buffer_max_bytes=10, buffer_overflow="drop_oldest")).ppo_step(prompts)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1, 0.8536, 0.5, 0.1464]),
    ],
)
def test_schedules(make_config, schedule, expected):
    assert [learning_rate_factor(schedule, step, 5, 1) for step in range(5)] == pytest.approx(
        expected, abs=1e-4
    )
    config = make_config(lr_schedule=schedule, warmup_steps=1, batch_size=1, ppo_epochs=1)
    metrics = PPOTrainer(config).train(["a", "b", "c", "d", "e"]).metrics
    assert [step["learning_rate"] / config.learning_rate for step in metrics] == pytest.approx(
        expected, abs=1e-4
    )
    assert [step["value_learning_rate"] / config.value_learning_rate for step in metrics] == pytest.approx(
        expected, abs=1e-4
    )


def test_the_schedule_counts_ppo_steps_whatever_is_trained_in_them_and_how_often(make_config):
    """Critic warm-up uses up its steps, and `value_epochs` are at the rate of their step."""
    more = {"critic_warmup_steps": 2, "warmup_steps": 1, "ppo_epochs": 1, "value_epochs": 3}
    trainer, taken = PPOTrainer(make_config(batch_size=1, **more)), []
    model_trainer = trainer.model_trainer
    for name, base in (("policy", 1e-3), ("value", 1e-3)):
        optimizer = getattr(model_trainer, f"{name}_optimizer")
        real = optimizer.step
        optimizer.step = lambda name=name, base=base, optimizer=optimizer, real=real: (
            taken.append((trainer.step + 1, name, optimizer.param_groups[0]["lr"] / base)) or real()
        )
    trainer.train(["a", "b", "c", "d", "e"])
    factors = {1: 0.5, 2: 1.0, 3: 0.75, 4: 0.5, 5: 0.25}
    expected = [
        (step, name, pytest.approx(factor))
        for step, factor in factors.items()
        for name in (["value"] * 3 if step <= 2 else ["policy"] + ["value"] * 3)
    ]
    assert taken == expected


def test_a_step_without_an_end_in_sight_keeps_the_full_rate(make_config, prompts):
    trainer = PPOTrainer(make_config(lr_schedule="linear"))
    assert [trainer.ppo_step(prompts)["learning_rate"] for _ in range(3)] == [
        trainer.config.learning_rate
    ] * 3


def test_every_train_is_a_schedule_of_its_own_and_a_step_after_it_has_the_full_rate(make_config):
    trainer = PPOTrainer(make_config(batch_size=2, ppo_epochs=1, warmup_steps=1, checkpoint_every=0))
    base, falling = trainer.config.learning_rate, [0.5, 1, 2 / 3, 1 / 3]

    def train():
        return [step["learning_rate"] / base for step in trainer.train(["a", "b", "c", "d"], 2).metrics]

    assert train() == pytest.approx(falling)
    assert trainer.ppo_step(["a"])["learning_rate"] == base
    assert train() == pytest.approx(falling)
    with pytest.raises(ValueError, match="is empty"):
        trainer.train(["a", " "])
    trainer.reward_computer.score_pairs = None  # a run that fails in its first step
    with pytest.raises(TypeError):
        train()
    del trainer.reward_computer.score_pairs
    assert trainer.ppo_step(["a"])["value_learning_rate"] == trainer.config.value_learning_rate


def test_critic_warmup_trains_the_value_model_alone(make_config, prompts):
    trainer = PPOTrainer(make_config(critic_warmup_steps=1))
    before = weights(trainer)
    results = trainer.ppo_step(prompts)
    after = weights(trainer)
    assert torch.equal(before["policy"], after["policy"])
    assert not torch.equal(before["value"], after["value"])
    assert results["policy_loss"] != results["policy_loss"]  # nan: nothing was measured, so nothing is shown
    trainer.ppo_step(prompts)
    assert not torch.equal(after["policy"], weights(trainer)["policy"])


def test_the_adaptive_coefficient_waits_for_the_policy_to_train(make_config, prompts):
    trainer = PPOTrainer(make_config(critic_warmup_steps=2, kl_controller="adaptive", kl_horizon=4))
    assert [trainer.ppo_step(prompts)["kl_coef"] for _ in range(4)] == pytest.approx([0.1, 0.1, 0.1, 0.08])


def test_a_budget_begins_with_the_spread_of_the_rewards_and_waits_for_the_policy_to_train(
    make_config, prompts
):
    kinds = {"kl_controller": "budget", "kl_target": 2.0, "critic_warmup_steps": 2}
    trainer, steps = PPOTrainer(make_config(**kinds)), []
    for _ in range(5):
        steps.append(trainer.ppo_step(prompts))
    spread = steps[0]["reward_std"]
    began = spread / math.sqrt(2 * 2.0) * math.exp(-2 / 3)
    assert [step["kl_coef"] for step in steps[:3]] == pytest.approx([began] * 3)
    assert trainer.kl_budget.steps == 3  # those in which the policy trained
    expected = oracles.kl_budget(spread, 2.0, [step["kl_exact"] for step in steps[2:]])
    assert [step["kl_coef"] for step in steps[2:]] == pytest.approx(expected[:3])
    assert trainer.kl_coef == pytest.approx(expected[3])
    assert PPOTrainer(make_config(**kinds, kl_coef=7.0)).ppo_step(prompts)["kl_coef"] == steps[0]["kl_coef"]


def test_a_budget_waits_for_rewards_that_differ(make_config, prompts):
    def constant(prompts, texts):
        return [1.0] * len(texts)

    trainer = PPOTrainer(make_config(kl_controller="budget", rewards=(constant,)))
    assert [trainer.ppo_step(prompts)["kl_coef"] for _ in range(2)] == [0.1, 0.1]


def test_settings_that_do_nothing_are_said_and_old_files_that_have_them_still_load(make_config, tmp_path):
    for change, said in (
        (
            {"kl_controller": "adaptive", "kl_coef": 0.0},
            "kl_controller adaptive multiplies kl_coef, and 0 stays 0",
        ),
        ({"buffer_overflow": "drop_oldest"}, "buffer_overflow drop_oldest acts as error"),
    ):
        with pytest.warns(UserWarning, match=said):
            PPOTrainer(make_config(**change))
        (tmp_path / "old.yaml").write_text("".join(f"{name}: {value}\n" for name, value in change.items()))
        assert list(PPOConfig.from_yaml(tmp_path / "old.yaml").idle_settings) == [next(iter(change))]
    for change in ({}, {"kl_controller": "adaptive"}, {"kl_coef": 0.0}, {"buffer_overflow": "disk"}):
        assert make_config(**change).idle_settings == {}


def test_kl_stop_ends_the_update_before_the_step_that_would_go_too_far(make_config, prompts):
    free = PPOTrainer(make_config(learning_rate=1e-2)).ppo_step(prompts)
    stopped = PPOTrainer(make_config(learning_rate=1e-2, kl_stop=0.02)).ppo_step(prompts)
    assert (free["kl_stopped"], stopped["kl_stopped"]) == (0, 1)
    assert 0 < stopped["optimizer_steps"] < free["optimizer_steps"]
    assert stopped["approx_kl"] < free["approx_kl"]


def test_the_adaptive_coefficient_follows_the_formula(make_config, prompts):
    trainer = shake(PPOTrainer(make_config(kl_controller="adaptive", kl_target=0.5, kl_horizon=100)))
    results = trainer.ppo_step(prompts)
    error = min(max(results["kl"] / 0.5 - 1, -0.2), 0.2)
    assert trainer.kl_coef == pytest.approx(0.1 * (1 + error * 4 / 100))
    assert results["kl_coef"] == 0.1
    assert trainer.ppo_step(prompts)["kl_coef"] == pytest.approx(0.1 * (1 + error * 4 / 100))
