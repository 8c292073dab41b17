"""The doctor: every seeded mistake is found by the check that should find it, and a sound setup passes
clean."""

import json
import math
import random
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen3Config,
)

from proxima.base_setup import adapter_size, lora_config
from proxima.cli import main
from proxima.config import PPOConfig, RewardConfig, RewardSpec
from proxima.finetuning import RewardTrainer
from proxima.ppo_trainer import PPOTrainer, SequenceGenerator
from proxima.ppo_trainer.step_recorder import most_bytes
from proxima.tools.doctor import estimate_memory, examine, resource_checks
from proxima.tools.doctor import examination as doctor
from proxima.tools.doctor import memory_estimate as memory
from proxima.tools.doctor.examination import step_findings
from proxima.tools.doctor.memory_estimate import GIB, network_size
from proxima.tools.doctor.role_weights import count_weights
from proxima.tools.doctor.settings_checks import check_batches, check_learning_rates, check_reach
from proxima.tools.doctor.show_findings import show
from proxima.tools.doctor.step_checks import check_ratio, tolerance_of, unchanging
from proxima.tools.doctor.tokenizer_checks import check_context, check_pad
from tests.families.networks import tiny_network
from tests.helpers import shake, weights

TEXTS = [f"Prompt {i} about {'many ' * i}things. TL;DR:" for i in range(8)]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": text, "answer": str(i)}) + "\n" for i, text in enumerate(TEXTS))
    )
    return str(path)


@pytest.fixture
def ask(make_config, data):
    """All findings by name for these settings."""

    def run(source=None, samples=8, **settings):
        sound = {"learning_rate": 0.0, "value_learning_rate": 0.0, "batch_size": 4, "minibatch_size": 2}
        findings = examine(make_config(**{**sound, **settings}), source or data, samples=samples)
        assert len({item.name for item in findings}) == len(findings)
        return {item.name: item for item in findings}

    return run


def levels(findings):
    return {name: item.level for name, item in findings.items() if item.level != "ok"}


def spoil(folder, target, name, **changes):
    """A copy of a model's folder with other entries in one of its JSON files; None takes an entry out."""
    copied = Path(shutil.copytree(folder, target, dirs_exist_ok=True))
    values = json.loads((copied / name).read_text()) | changes
    (copied / name).write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return str(copied)


# --- sound ---

EMBEDDED = {"model_name": "embedded", "max_new_tokens": 48, "rewards": ("length_band,low=3,high=6",)}


def test_a_sound_setup_has_nothing_to_say_and_leaves_no_trace(ask, tmp_path):
    findings = ask(**EMBEDDED)
    assert levels(findings) == {}
    assert {
        "KL at the start",
        "ratio at the start",
        "sampling",
        "padding length_band",
        "reward scale",
    } <= set(findings)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 0, "top_p": 1.0},
        {"lora_r": 0},
        {"value_model": "policy"},
        {"engine": "plain"},
        {"temperature": 0.7},
    ],
    ids=str,
)
def test_sound_settings_of_other_kinds_pass_the_step_too(ask, settings):
    findings = ask(**EMBEDDED, **settings)
    assert levels(findings) == {}
    cost = float(findings["KL at the start"].text.split()[-1])
    assert (cost == 0) == ("top_k" in settings)


def test_the_step_learns_nothing(make_config):
    trainer = PPOTrainer(unchanging(make_config(learning_rate=0.1, critic_warmup_steps=3, ppo_epochs=3)))
    before = weights(trainer)
    results = trainer.ppo_step(TEXTS)
    assert all(torch.equal(before[name], now) for name, now in weights(trainer).items())
    assert not math.isnan(results["first_ratio_error"])


# --- tokenizer, model, data ---


def test_a_pad_token_that_is_eos_is_found_raw_and_fixed_when_loaded(tiny, tmp_path, ask):
    folder = spoil(tiny, tmp_path / "model", "tokenizer_config.json", pad_token="<|endoftext|>")
    assert check_pad(AutoTokenizer.from_pretrained(folder)).level == "fail"
    found = ask(model_name=folder)["pad token"]
    assert found.level == "ok"
    assert "one is added" in found.text


def test_a_vocabulary_that_is_too_small_is_found_before_a_model_is_loaded(tiny, tmp_path, ask):
    findings = ask(model_name=spoil(tiny, tmp_path / "model", "config.json", vocab_size=200))
    assert levels(findings)["vocabulary"] == "fail"
    assert "ids up to 256, the model reads 200" in findings["vocabulary"].text
    assert "sampling" not in findings


def test_a_model_without_eos_is_found(tiny, tmp_path, ask):
    folder = spoil(tiny, tmp_path / "one", "config.json", eos_token_id=None)
    folder = spoil(folder, tmp_path / "two", "generation_config.json", eos_token_id=None)
    findings = ask(model_name=spoil(folder, tmp_path / "three", "tokenizer_config.json", eos_token=None))
    assert levels(findings) == {"EOS": "warn", "EOS comes": "warn"}


def test_conversations_without_a_chat_template_are_found(tmp_path, ask):
    path = tmp_path / "chat.jsonl"
    path.write_text(
        json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]})
        + "\n"
    )
    assert levels(ask(str(path))) == {"chat template": "fail"}


@pytest.mark.parametrize(
    ("settings", "level", "text"),
    [
        ({"max_new_tokens": 200}, "fail", "2 of 8 prompts have more than the 56 tokens"),
        ({"max_new_tokens": 200, "truncate_prompts": True}, "warn", "they are cut"),
        ({"max_new_tokens": 256}, "fail", "leaves no room"),
    ],
)
def test_prompts_over_the_context_are_counted(ask, settings, level, text):
    findings = ask(samples=2, **settings)
    assert findings["context"].level == level
    assert text in findings["context"].text
    assert ("sampling" in findings) == (settings["max_new_tokens"] < 256)


def test_data_or_models_that_cannot_be_read_are_findings(ask):
    assert "no such file" in ask("nowhere.jsonl")["setup"].text
    assert "no/such-model" in ask(model_name="no/such-model")["setup"].text


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"learning_rate": 0.05}, "learning rate"),
        ({"lora_r": 0, "learning_rate": 1e-3}, "learning rate"),
        ({"value_learning_rate": 1e-9}, "learning rate"),
        ({"minibatch_size": 8}, "batches"),
        ({"minibatch_size": 3}, "batches"),
        ({"batch_size": 64}, "batches"),
        ({"trust_remote_code": True}, "remote code"),
        ({"max_new_tokens": 53}, "reach of the score"),
        ({"buffer_overflow": "drop_oldest"}, "idle settings"),
    ],
)
def test_settings_that_are_seldom_meant_are_warned_of(ask, monkeypatch, settings, name):
    monkeypatch.setattr(doctor, "step_findings", lambda *given: [])  # they are seen without weights
    assert levels(ask(**{**EMBEDDED, **settings})) == {name: "warn"}


def test_the_advice_on_batches_is_followed_by_no_warning():
    found = check_batches(PPOConfig(batch_size=30, minibatch_size=8), 100)
    assert found.advice == "take batch_size 24 or 32"
    assert all(
        check_batches(PPOConfig(batch_size=size, minibatch_size=8), 100).level == "ok" for size in (24, 32)
    )
    assert check_batches(PPOConfig(), 100, epochs=3).text.startswith("100 prompts, 12 steps of 32")


def test_a_learning_rate_is_compared_with_the_one_by_size():
    assert check_learning_rates(PPOConfig(), 600_000_000).level == "ok"
    assert check_learning_rates(PPOConfig.from_preset("stable"), 1_000_000).level == "ok"
    found = check_learning_rates(PPOConfig(), 1_000_000)
    assert (found.level, found.advice) == ("warn", "use about 0.00089, or 0, which stands for that")
    assert "learning_rate (1e-05) is 89 times below what suits adapters of a model" in found.text
    found = check_learning_rates(PPOConfig(learning_rate=1e-3, value_learning_rate=1.0), 1_000_000)
    assert "value_learning_rate (1) is 556 times above" in found.text
    without_critic = PPOConfig.from_preset("grpo", learning_rate=1e-3)
    assert check_learning_rates(without_critic, 1_000_000).level == "ok"


def test_the_reach_of_a_final_score_is_gamma_times_lam_over_the_tokens_between_and_its_advice_fixes_it():
    found = check_reach(PPOConfig(max_new_tokens=101))
    assert found.level == "warn"
    assert (
        "lets 0.0022 of a final score enter the advantage 100 tokens earlier" in found.text
    )  # 0.9405 ** 100
    assert found.advice == "set gamma to 1 and lam to 0.971 or more, or lower max_new_tokens"
    assert check_reach(PPOConfig(max_new_tokens=101, gamma=1.0, lam=0.971)).level == "ok"
    assert check_reach(PPOConfig(max_new_tokens=101, gamma=1.0, lam=0.97)).level == "warn"
    assert (
        check_reach(PPOConfig(max_new_tokens=53, gamma=1.0, lam=0.95)).level == "ok"
    )  # the published TL;DR setup
    assert check_reach(PPOConfig(max_new_tokens=1, gamma=0.0, lam=0.0)).level == "ok"  # nothing lies between
    assert check_reach(PPOConfig()).level == "ok"


def test_an_adaptive_kl_coefficient_of_0_is_refused_before_a_run(ask):
    assert levels(ask(**EMBEDDED, kl_controller="adaptive", kl_coef=0.0)) == {"idle settings": "warn"}


def test_no_reward_is_found(ask):
    assert levels(ask(rewards=()))["reward"] == "fail"


# --- memory and disk ---


def test_too_little_memory_is_found_before_a_model_is_loaded(ask, monkeypatch):
    monkeypatch.setattr(resource_checks, "free_memory", lambda device: 2**28)
    findings = ask()
    assert levels(findings)["memory"] == "fail"
    assert "0.2 GiB free" in findings["memory"].text
    assert "sampling" not in findings


def test_on_a_gpu_passes_that_can_be_halved_are_only_warned_of(make_config, tiny, monkeypatch):
    monkeypatch.setattr(resource_checks, "pick_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(resource_checks, "device_memory", lambda device: None)
    network, config = AutoConfig.from_pretrained(tiny), make_config(batch_size=64, minibatch_size=64)
    whole, least = (
        estimate_memory(config, network, 200, smallest=smallest).total for smallest in (False, True)
    )
    assert least < whole
    for free, level in ((whole + 1, "ok"), (whole - 1, "warn"), (least + 1, "warn"), (least - 1, "fail")):
        monkeypatch.setattr(resource_checks, "free_memory", lambda device, free=free: free)
        assert resource_checks.check_memory(config, network, 200).level == level


def test_a_full_disk_is_found(ask, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(total=2**30, used=2**30, free=2**20)
    )
    assert levels(ask(**EMBEDDED)) == {"disk": "fail"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 0, "top_p": 0.9},
        {"adv_estimator": "rloo", "num_generations": 2, "whiten_advantages": False},
    ],
    ids=["top-k", "top-p alone", "no value model"],
)
def test_recorded_steps_are_counted_as_the_run_counts_them(make_config, tiny, settings):
    own = {"value_learning_rate": 1e-4} if "adv_estimator" in settings else {}
    config = make_config(record_steps=2, **settings, **own)
    network = AutoConfig.from_pretrained(tiny)
    assert resource_checks.bundle_bytes(config, network) == most_bytes(PPOTrainer(config))
    [found] = resource_checks.check_recording(config, network)
    assert (found.level, "at most 18 stay" in found.text) == ("ok", True)
    assert resource_checks.check_recording(replace(config, record_steps=0), network) == []


def test_the_experts_and_the_reference_of_recorded_steps_are_counted(make_config, mixture, tmp_path):
    first = PPOTrainer(make_config(model_name=mixture, lora_r=2))
    first.save(tmp_path / "saved")
    config = make_config(model_name=mixture, sft_adapter=str(tmp_path / "saved" / "policy"), record_steps=1)
    expected = most_bytes(PPOTrainer(config))
    assert resource_checks.bundle_bytes(config, AutoConfig.from_pretrained(mixture)) == expected


@pytest.mark.parametrize(
    ("settings", "text", "advice"),
    [
        ({"batch_size": 60_000_000}, "a recorded step would take up to", "lower lora_r, batch_size or"),
        ({"value_model": "tiny"}, "needs the value model on the policy's base", "set value_model to adapter"),
    ],
)
def test_steps_that_cannot_be_recorded_are_refused_before_a_model_is_loaded(
    ask, tiny, monkeypatch, settings, text, advice
):
    monkeypatch.setattr(doctor, "PPOTrainer", lambda config: pytest.fail("a model was loaded"))
    own = {name: tiny if value == "tiny" else value for name, value in settings.items()}
    found = ask(record_steps=1, **own)["recorded steps"]
    assert found.level == "fail"
    assert text in found.text
    assert found.advice.startswith(advice)


def test_a_disk_without_room_for_recorded_steps_is_a_warning(make_config, tiny, monkeypatch):
    network = AutoConfig.from_pretrained(tiny)
    config = make_config(record_steps=1, batch_size=100_000)
    recorded = 18 * sum(resource_checks.bundle_bytes(config, network))
    free = 2**28 + recorded // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=free, used=0, free=free))
    found = resource_checks.check_disk(config, network)
    assert (found.level, found.advice) == (
        "warn",
        "free some space: a step that does not fit is not recorded",
    )
    assert f"up to {recorded / GIB:.2f} GiB of recorded steps" in found.text
    assert resource_checks.check_disk(replace(config, record_steps=0), network).level == "ok"


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj", "gate_proj,up_proj,down_proj"])
def test_adapters_on_every_expert_are_counted(targets):
    network = tiny_network("qwen3_moe")
    found = adapter_size(network, lora_config(PPOConfig(lora_r=3, lora_targets=targets), network))
    names = targets if targets == "all-linear" else targets.split(",")
    adapted = get_peft_model(network, LoraConfig(r=3, target_modules=names))
    own = {name: p.numel() for name, p in adapted.named_parameters() if "lora_" in name}
    assert found == sum(own.values())


def test_a_pass_runs_the_experts_that_a_token_is_sent_to():
    config = tiny_network("qwen3_moe").config
    one, two = (network_size(tiny_network("qwen3_moe", num_experts_per_tok=count)).widths for count in (1, 2))
    assert two - one == config.num_hidden_layers * (32 + 32 + 16 + 32)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2"])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_estimate_counts_what_is_there(make_config, tiny_folders, architecture, rank):
    """Weights, adapters and optimiser to the byte; what the forward pass keeps, roughly."""
    config = make_config(model_name=tiny_folders[architecture], lora_r=rank, batch_size=4, minibatch_size=4)
    trainer = PPOTrainer(config)
    network = trainer.models.sft.backbone.network
    estimate = estimate_memory(config, AutoConfig.from_pretrained(config.model_name), 40, on_gpu=False)
    trained = [
        weight for role in ("policy", "value") for weight in getattr(trainer.models, role).parameters()
    ]
    heads = sum(weight.numel() for weight in trainer.models.value.head.parameters())
    bases = [p for name, p in network.named_parameters() if "lora" not in name]
    learned = sum(weight.numel() for weight in trained)
    assert estimate.optimizer == 12 * learned
    assert estimate.weights == 4 * sum(p.numel() for p in bases) + (0 if rank else 4 * (learned - heads))
    assert estimate.adapters == (4 * (learned - heads) if rank else 0)

    pairs, _ = trainer.generator.generate_sequences(["x" * 40] * 4)
    kept, known = {}, {weight.untyped_storage().data_ptr() for weight in network.parameters()}

    def note(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        trainer.models.policy.training(),
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
    ):
        hidden = trainer.models.policy.response_hidden(pairs.tokens)
    measured = sum(size for place, size in kept.items() if place not in known)
    assert hidden.requires_grad
    if rank:  # with all weights trained these are kept too
        assert 0.15 < measured / estimate.activations < 1


def test_the_estimate_follows_the_settings():
    network = Qwen3Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=12, num_attention_heads=4, vocab_size=5000
    )

    def of(longest=156, on_gpu=True, **settings):
        base = {"batch_size": 32, "minibatch_size": 16, "max_new_tokens": 100}
        return estimate_memory(PPOConfig(**{**base, **settings}), network, longest, on_gpu)

    plain = of()
    assert of(on_gpu=False).weights == 2 * plain.weights
    assert of(lora_r=32).optimizer == pytest.approx(2 * plain.optimizer, rel=0.01)
    assert of(lora_targets="q_proj,v_proj").optimizer < plain.optimizer / 2
    assert of(batch_size=64).cache == 2 * plain.cache
    assert of(412).cache == 2 * plain.cache
    assert of(minibatch_size=8).activations == pytest.approx(plain.activations / 2, rel=0.01)
    assert of(micro_batch_tokens=2048).activations == pytest.approx(plain.activations / 2, rel=0.01)
    assert of(gradient_checkpointing=True).activations < plain.activations / 2
    head = 12 * (network.hidden_size + 1)
    assert of(value_model="policy").optimizer - head == (plain.optimizer - head) // 2
    assert of(lora_r=0).optimizer - head == 2 * 12 * count_weights(AutoModelForCausalLM.from_config(network))
    assert plain.total == sum(vars(plain).values())


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("where", ["value", "reward"])
def test_the_estimate_counts_a_value_model_with_a_network_of_its_own(
    make_config, tiny_folders, tmp_path, rank, where
):
    """Another architecture's, or a copy of a reward model's: once, frozen as `dtype` says or trained in
    float32."""
    if where == "reward":
        RewardTrainer(RewardConfig(tiny_folders["qwen3"], lora_r=0)).role.save(tmp_path / "reward")
    given = {
        "value": {"value_model": tiny_folders["llama"]},
        "reward": {"rewards": str(tmp_path / "reward"), "value_model": "adapter"},
    }
    config = make_config(model_name=tiny_folders["qwen3"], lora_r=rank, dtype="bfloat16", **given[where])
    models = PPOTrainer(config).models
    roles = [models.policy, models.sft, models.value, models.reward]
    networks = {id(role.backbone.network): role.backbone.network for role in roles}.values()
    held = sum(
        weight.numel() * weight.element_size()
        for network in networks
        for name, weight in network.named_parameters()
        if "lora" not in name
    )
    network = AutoConfig.from_pretrained(config.model_name)
    others = resource_checks.other_networks(config)
    estimate = estimate_memory(config, network, 40, on_gpu=False, others=others)
    assert estimate.weights == pytest.approx(held, rel=0.01)


def test_free_memory_is_at_most_what_the_machine_has():
    free = memory.free_memory(torch.device("cpu"))
    assert 0 < free < 64 * 1024 * GIB


# --- rewards ---


def constant(prompts, texts):
    return [3.0] * len(texts)


def rare(prompts, texts):
    """Nothing for the prompts that are looked at first."""
    return [0.5 * (prompt == TEXTS[5]) for prompt in prompts]


def huge(prompts, texts):
    return [1e4 + 1e3 * len(text.encode()) for text in texts]


def some_nan(prompts, texts):
    return [math.nan if "many" not in prompt else float(len(prompt)) for prompt in prompts]


def most_nan(prompts, texts):
    return [
        math.nan if "many" in prompt else float(len(text))
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def raises(prompts, texts):
    raise RuntimeError("the judge is away")


def noisy(prompts, texts):
    return [random.random() for _ in texts]


def ranked(prompts, texts):
    return [len(text) / max(map(len, texts)) + len(texts) for text in texts]


def wants_a_column(prompts, completions, difficulty):
    return [float(value) for value in difficulty]


def wants_the_answer(prompts, completions, answer):
    return [float(value) for value in answer]


@pytest.mark.parametrize(
    ("reward", "name", "level", "text"),
    [
        (constant, "reward spread", "fail", "every sample scores 3, all 128 of them"),
        (huge, "reward scale", "warn", "mean"),
        (some_nan, "reward failures", "warn", "1 of 8 samples"),
        (most_nan, "reward failures", "fail", "7 of 8 samples"),
        (raises, "reward failures", "fail", "the judge is away"),
        (raises, "padding raises", "fail", "RuntimeError"),
        (noisy, "padding noisy", "warn", "the same text twice"),
        (ranked, "padding ranked", "warn", "beside a longer one"),
        (wants_a_column, "one step", "fail", "'difficulty'"),
    ],
)
def test_rewards_that_cannot_teach_are_found(ask, reward, name, level, text):
    findings = ask(rewards=(reward,))
    assert findings[name].level == level
    assert text in findings[name].text


def test_rewards_that_are_tamed_or_read_a_column_are_fine(ask):
    assert ask(rewards=(huge,), normalize_rewards=True)["reward scale"].level == "ok"
    assert ask(rewards=(wants_the_answer,))["reward scale"].level == "ok"


def test_a_sparse_reward_is_sampled_until_it_shows_itself(ask):
    found = ask(samples=2, rewards=(rare,))
    assert "reward failures" not in found
    assert (found["reward spread"].level, found["reward scale"].level) == ("warn", "ok")
    assert found["reward spread"].text == "only 1 of 4 samples score anything but 0"
    assert "expect 1 in a batch of 4" in found["reward spread"].advice
    assert found["reward scale"].text.endswith("over 4 samples, 1 of them not 0")


def test_one_prompt_is_sampled_with_other_noise_until_a_score_differs(ask, tmp_path):
    path, seen = tmp_path / "one.txt", []

    def first_text_only(prompts, texts):
        seen.extend(texts)
        return [float(text != seen[0]) for text in texts]

    path.write_text("One prompt\n")
    found = ask(str(path), samples=1, **{**EMBEDDED, "rewards": (first_text_only,)})
    assert found["reward spread"].level == "warn"


def test_a_dead_endpoint_is_found(ask):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score,retries=0"
    findings = ask(rewards=(url,))
    assert findings["endpoint score"].level == "fail"
    assert "ConnectError" in findings["endpoint score"].text
    assert "no usable token" in ask(rewards=(f"{url},token_env=NO_SUCH_TOKEN",))["setup"].text


def test_a_reward_model_near_chance_is_found(ask, make_config, tmp_path):
    folder = PPOTrainer(make_config()).save(tmp_path / "saved") / "value"
    assert "nothing is known" in ask(rewards=(str(folder),))["reward model value"].text
    for accuracy, level in ((0.51, "warn"), (0.8, "ok")):
        (folder / "reward.json").write_text(json.dumps({"accuracy": accuracy}))
        findings = ask(rewards=(str(folder),))
        assert findings["reward model value"].level == level
        assert findings["padding value"].level == "ok"


@pytest.fixture
def classifier(tiny, tmp_path):
    """A sequence classifier with a tokenizer that pads."""
    folder = tmp_path / "classifier"
    network = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    torch.nn.init.normal_(network.score.weight)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return str(folder)


def test_a_classifier_that_reads_padding_is_found(ask, classifier, monkeypatch):
    assert ask(rewards=(classifier,))["padding classifier"].level == "ok"
    real = doctor.PPOTrainer

    def broken(config):
        trainer = real(config)
        decoder = trainer.reward_computer.rewards[0][1].classifier.decoder
        right = decoder.scores
        decoder.scores = lambda ids, mask: right(
            ids.clamp(max=256), torch.ones_like(mask)
        )  # as if padding were text
        return trainer

    monkeypatch.setattr(doctor, "PPOTrainer", broken)
    found = ask(rewards=(classifier,))["padding classifier"]
    assert found.level == "fail"
    assert "the model reads padding" in found.advice


def test_how_a_classifier_is_read_is_said_and_a_guess_is_warned_of(ask, classifier, tmp_path):
    found = ask(rewards=(classifier,))["ending classifier"]
    assert found.level == "ok"
    assert (
        "it reads the sampled ids; EOS ends a finished response: its tokenizer is the policy's" in found.text
    )
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    tokenizer.add_tokens(["word"])  # another vocabulary
    tokenizer.save_pretrained(classifier)
    found = ask(samples=2, rewards=(classifier,))["ending classifier"]  # too few to compare
    assert found.level == "warn"
    assert "it reads the text" in found.text
    assert "eos=append or eos=leave" in found.advice
    assert ask(samples=2, rewards=(f"{classifier},eos=leave",))["ending classifier"].level == "ok"


# --- the step ---


def test_a_sampler_that_is_not_deterministic_is_found(ask, monkeypatch):
    real, calls = SequenceGenerator.sample, []

    def forgetful(self, prompts, step=0):
        calls.append(step)
        return real(self, prompts, len(calls))

    monkeypatch.setattr(SequenceGenerator, "sample", forgetful)
    assert ask()["sampling"].level == "fail"


def test_a_policy_that_is_not_its_reference_is_found(make_config, monkeypatch):
    real = doctor.PPOTrainer
    monkeypatch.setattr(doctor, "PPOTrainer", lambda config: shake(real(config)))
    findings = {item.name: item.level for item in step_findings(make_config(), TEXTS)}
    assert findings["KL at the start"] == "fail"
    assert findings["ratio at the start"] == "ok"


def test_old_probabilities_of_another_model_are_found(make_config, monkeypatch):
    real = SequenceGenerator.score

    def off(self, tokens):
        columns = real(self, tokens)
        return columns | {
            "logprob_policy": columns["logprob_policy"] + 0.02,
            "logprob_ref": columns["logprob_ref"] + 0.02,
        }

    monkeypatch.setattr(SequenceGenerator, "score", off)
    findings = {item.name: item.level for item in step_findings(make_config(), TEXTS)}
    assert findings["ratio at the start"] == "fail"
    assert findings["KL at the start"] == "ok"


def test_eos_that_never_comes_and_eos_that_comes_at_once_are_found(ask, monkeypatch):
    assert ask()["EOS comes"].level == "warn"
    real = doctor.PPOTrainer

    def hasty(config):
        trainer = real(config)
        trainer.models.eos_ids = tuple(range(257))
        return trainer

    monkeypatch.setattr(doctor, "PPOTrainer", hasty)
    assert ask()["EOS comes"].level == "fail"


# --- the command ---


@pytest.fixture
def call(data, tmp_path, monkeypatch, capsys):
    (tmp_path / "doctor_reward.py").write_text(
        "def same(prompts, texts):\n    return [1.0] * len(texts)\n"
        "def size(prompts, texts):\n    return [float(len(text)) for text in texts]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(command, *more, reward="doctor_reward:size"):
        flags = ["--model", "embedded", "--data", data, "--rewards", reward, "--max-new-tokens", "32"]
        flags += ["--batch-size", "4", "--minibatch-size", "2"]
        flags += ["--learning-rate", "0", "--value-learning-rate", "0"]
        code = 0
        try:
            main([command, *flags, *map(str, more)])
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_the_command_prints_a_table_and_says_by_its_exit_code_whether_to_start(call):
    code, out, err = call("doctor", "--samples", 4)
    assert code == 0, out + err
    assert "23 checks found nothing that would spoil the run; 0 warnings" in out
    assert "\x1b" not in out
    code, out, _ = call("doctor", "--samples", 4, reward="doctor_reward:same")
    assert code == 1
    assert "every sample scores 1, all 64 of them" in out
    assert "1 of 23 checks found something that would spoil the run" in out
    assert call("doctor", "--samples", 0)[0] == 2


def test_a_settings_file_of_train_serves_the_doctor(call, tmp_path):
    (tmp_path / "run.yaml").write_text("epochs: 3\nlimit: 4\nvalidation: prompts.jsonl\n")
    code, out, _ = call("doctor", "--config", "run.yaml", "--samples", 2)
    assert code == 0, out
    assert "4 prompts, 3 steps of 4" in out
    assert "validation context" in out


def test_training_refuses_to_start_on_a_fail_and_says_warnings(call, tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(total=2**30, used=2**30, free=2**20)
    )
    code, _, err = call("train", "--run-name", "one")
    assert code == 2
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("proxima: disk: 0.0 GiB free")
    assert "--skip-checks" in err
    assert not (tmp_path / "runs").exists()
    code, _, err = call("train", "--run-name", "one", "--skip-checks", "--ppo-epochs", 1, "--limit", 4)
    assert code == 0, err
    assert (tmp_path / "runs" / "one" / "metrics.jsonl").is_file()


def test_warnings_go_to_stderr_and_training_continues(call, tmp_path, monkeypatch):
    code, _, err = call("train", "--run-name", "two", "--learning-rate", 0.5, "--ppo-epochs", 1, "--limit", 4)
    assert code == 0, err
    assert (
        "proxima: warning: learning rate: learning_rate (0.5) is 581 times above what suits adapters of a "
        "model of this size; use about 0.00086, or 0, which stands for that" in err
    )


def test_a_length_adaptive_lambda_that_is_0_for_short_answers_is_said():
    found = check_reach(PPOConfig(max_new_tokens=53, lam_alpha=0.05))
    assert found.level == "warn"
    assert "lambda 0 for responses of up to 20 tokens and 0.62 for the longest (53)" in found.text
    for fine in ({"max_new_tokens": 4096, "lam_alpha": 0.05}, {"max_new_tokens": 53, "lam_alpha": 1.5}):
        assert check_reach(PPOConfig(**fine)).level == "ok"
    game = {"environment": ("game:Game",), "max_new_tokens": 64, "max_turns": 5, "lam_alpha": 0.05}
    assert check_reach(PPOConfig(**game)).level == "ok"  # 320 tokens
    found = check_reach(PPOConfig(**game, discount="turn"))
    assert found.level == "warn"
    assert "lambda 0 for responses of up to 20 turns and 0 for the longest (5)" in found.text


@pytest.mark.parametrize(
    ("settings", "level", "shown"),
    [
        ({}, "warn", "0.0079 of a final score enter the advantage 79 tokens"),  # 8 turns of 10
        ({"max_episode_tokens": 40}, "ok", "0.091 of a final score enters the advantage 39 tokens"),
        ({"max_episode_tokens": 400}, "warn", "79 tokens earlier"),  # what is read is not discounted
        (
            {"discount": "turn", "max_new_tokens": 4000},
            "ok",
            "0.65 of a final score enters the advantage 7 turns",
        ),
        (
            {"discount": "turn", "max_turns": 101},
            "warn",
            "0.0022 of a final score enter the advantage 100 turns",
        ),
    ],
)
def test_in_an_episode_the_reach_is_counted_over_all_its_tokens_or_its_turns(settings, level, shown):
    found = check_reach(PPOConfig(environment=("game:Game",), **settings))
    assert found.level == level
    assert shown in found.text
    if level == "warn":
        remedy = "lower max_turns" if settings.get("discount") else "set discount to turn"
        assert found.advice.endswith(f"or {remedy}")


def test_estimates_count_the_tokens_of_whole_episodes():
    """8 turns of 10 tokens that are chosen, and 32 read after each."""
    network = Qwen3Config(
        hidden_size=128, intermediate_size=256, num_hidden_layers=12, num_attention_heads=4, vocab_size=5000
    )
    game = PPOConfig(environment="game:Game")
    whole, one = (estimate_memory(config, network, 64) for config in (game, PPOConfig(max_new_tokens=336)))
    assert (whole.cache, whole.activations) == (one.cache, one.activations)
    assert whole.logits < one.logits
    found = check_context(game, [64, 65], 400)
    assert found.level == "fail"
    assert "1 of 2 prompts have more than the 64 tokens that an episode of max_turns (8) x" in found.text
    assert check_context(replace(game, max_episode_tokens=40), [64, 360], 400).level == "ok"
    found = check_context(game, [1], 336)
    assert found.level == "fail"
    assert "max_turns" in found.advice


def test_a_length_adaptive_lambda_counts_what_is_chosen_in_an_episode():
    found = check_reach(PPOConfig(environment="game:Game", lam_alpha=0.05))
    assert found.level == "warn"
    assert "0.75 for the longest (80)" in found.text


def test_groups_are_counted_in_responses_and_need_no_reach():
    groups = {"adv_estimator": "rloo", "num_generations": 6, "whiten_advantages": False}
    config = PPOConfig(batch_size=4, minibatch_size=9, max_new_tokens=4000, **groups)
    assert check_reach(config).level == "ok"
    found = check_batches(config, 100)
    assert (found.level, found.advice) == ("warn", "set minibatch_size to 3 or 24")
    assert "24 responses (batch_size 4 x num_generations 6)" in found.text
    assert check_batches(PPOConfig(batch_size=4, minibatch_size=8, **groups), 100).level == "ok"


@pytest.mark.parametrize(
    "settings",
    [
        {"adv_estimator": "grpo", "num_generations": 2, "whiten_advantages": False},
        {"critic_warmup_until": 0.9, "value_epochs": 2, "cut_responses": "leave_out", "objective": "dis"},
    ],
)
def test_a_step_that_learns_nothing_runs_with_every_estimator_and_critic_setting(make_config, settings):
    config = unchanging(make_config(value_learning_rate=1e-4, **settings))
    trainer = PPOTrainer(config)
    results = trainer.ppo_step(["a", "b"])
    assert check_ratio(results, tolerance_of(trainer)).level == "ok"


def test_hostile_text_in_a_finding_does_not_reach_the_terminal(capsys):
    from proxima.tools.doctor.finding import warn

    show([warn("n", "a \x1b[31m red \u202e text [bold]", "x")])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "[bold]" in out


def test_a_spec_of_every_kind_is_told_apart():
    kinds = ["length_band,low=1,high=2", "http://127.0.0.1:1/x", "module:function"]
    config = PPOConfig(rewards=tuple(RewardSpec.of(kind) for kind in kinds))
    assert resource_checks.other_networks(config) == []
