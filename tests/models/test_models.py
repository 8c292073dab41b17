"""The four roles: what they share, how they start, how they are saved, for three architectures."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from proxima.base_setup import BaseSetup
from proxima.config import FinetuningConfig, RewardConfig
from proxima.data import Demonstration, Preference
from proxima.finetuning import RewardTrainer, SFTTrainer
from proxima.models import SFTModel
from proxima.models.passes import Passes
from proxima.models.weight_files import HEAD_FILE
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.engine import pack_mask
from proxima.world.tiny_models import ARCHITECTURES
from tests.helpers import LOGPROB_ROUNDING, difference, shake, weights

WAYS = [{}, {"lora_r": 0}, {"value_model": "policy"}, {"lora_r": 0, "value_model": "policy"}]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_runs_on_every_architecture(make_config, prompts, tiny_folders, architecture, way):
    trainer = PPOTrainer(make_config(model_name=tiny_folders[architecture], **way))
    before, frozen = weights(trainer), frozen_weights(trainer)
    results = trainer.ppo_step(prompts)
    trainer.ppo_step(prompts)
    after = weights(trainer)
    assert results["first_ratio_error"] < LOGPROB_ROUNDING
    assert results["kl_exact"] == pytest.approx(0, abs=LOGPROB_ROUNDING)
    assert results["kl"] == pytest.approx(results["truncation_cost"], abs=1e-4)
    assert all(not torch.equal(before[role], after[role]) for role in before)
    assert torch.equal(frozen, frozen_weights(trainer))


def frozen_weights(trainer: PPOTrainer) -> torch.Tensor:
    """The reference's own weights, adapters of other roles left out."""
    network = trainer.models.sft.backbone.network
    return torch.cat(
        [p.detach().flatten().clone() for name, p in network.named_parameters() if "lora_" not in name]
    )


def test_with_lora_four_roles_live_on_one_base_in_memory(make_config, tiny):
    models = BaseSetup(make_config()).models
    assert (
        len({id(role.backbone.network) for role in (models.policy, models.sft, models.value, models.reward)})
        == 1
    )
    base = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny).parameters())
    held = sum(p.numel() for p in models.sft.backbone.network.parameters())
    adapters = (
        len(weights_of(models.policy)) + len(weights_of(models.value)) - (models.value.head.in_features + 1)
    )
    assert held == base + adapters


def weights_of(role) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in role.parameters()])


def test_each_role_sees_its_own_adapter_only(make_config, prompts):
    trainer = PPOTrainer(make_config())
    tokens = trainer.generator.generate(prompts)[1].tokens

    def outputs():
        models = trainer.models
        with torch.no_grad():
            return {
                "policy": models.policy.response_logits(tokens),
                "reference": models.sft.response_logits(tokens),
                "value": models.value.response_values(tokens),
                "reward": models.reward.scores(tokens.input_ids, tokens.input_mask),
            }

    start = outputs()
    for parameter in trainer.models.policy.parameters():
        parameter.data += 0.1
    moved = outputs()
    assert [name for name in start if not torch.equal(start[name], moved[name])] == ["policy"]
    for parameter in trainer.models.value.parameters():
        parameter.data += 0.1
    again = outputs()
    assert [name for name in start if not torch.equal(moved[name], again[name])] == ["value"]


def test_gradients_reach_the_role_that_trains_and_no_other(make_config, prompts):
    trainer = shake(PPOTrainer(make_config()))
    pairs = trainer.ppo_step(prompts)["sa_pairs"]
    for train, touched, spared in (
        (trainer.model_trainer.train_policy_model, trainer.models.policy, trainer.models.value),
        (trainer.model_trainer.train_value_model, trainer.models.value, trainer.models.policy),
    ):
        before, others = weights_of(touched).clone(), weights_of(spared).clone()
        assert isinstance(train(pairs), float)
        assert not torch.equal(before, weights_of(touched))
        assert torch.equal(others, weights_of(spared))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_sampling_is_that_of_transformers_with_ragged_prompts(
    make_config, prompts, tiny_folders, architecture
):
    trainer = shake(
        PPOTrainer(make_config(model_name=tiny_folders[architecture], top_k=1, max_new_tokens=12))
    )
    tokens = trainer.generator.generate(prompts)[1].tokens
    policy = trainer.models.policy
    with policy.active():
        for row in range(len(prompts)):
            ids = tokens.prompt_ids[row][tokens.prompt_mask[row]].unsqueeze(0)
            made = policy.backbone.network.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
            assert made[0, ids.shape[1] :].tolist() == tokens.response_ids[row][tokens.mask[row]].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_policy_loads_with_peft_and_gives_the_same_logits(
    make_config, prompts, tiny_folders, tmp_path, architecture
):
    base = tiny_folders[architecture]
    trainer = shake(PPOTrainer(make_config(model_name=base)))
    trainer.save(tmp_path / "run")
    tokens = trainer.generator.generate(prompts[:1])[1].tokens
    expected = trainer.models.policy.response_logits(tokens)
    plain = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        bare = plain(tokens.input_ids).logits[:, tokens.prompt_ids.shape[1] - 1 : -1]
        logits = PeftModel.from_pretrained(plain, tmp_path / "run" / "policy")(tokens.input_ids).logits
    assert torch.allclose(logits[:, tokens.prompt_ids.shape[1] - 1 : -1], expected, atol=1e-4)
    assert not torch.allclose(bare, expected, atol=1e-2)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "policy").pad_token_id is not None


def test_a_fully_trained_policy_is_saved_as_a_model(make_config, prompts, tmp_path):
    trainer = shake(PPOTrainer(make_config(lora_r=0)))
    trainer.save(tmp_path)
    tokens = trainer.generator.generate(prompts[:1])[1].tokens
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")(tokens.input_ids).logits
    assert torch.allclose(
        logits[:, tokens.prompt_ids.shape[1] - 1 : -1],
        trainer.models.policy.response_logits(tokens),
        atol=1e-4,
    )


@pytest.fixture
def sft_folder(make_config, tmp_path):
    """An adapter that differs from the base, as supervised fine-tuning would leave one."""
    trainer = shake(PPOTrainer(make_config(lora_r=4, lora_alpha=4)), seed=9)
    trainer.models.policy.save(tmp_path / "sft")
    return str(tmp_path / "sft")


@pytest.mark.parametrize("way", [{}, {"lora_r": 0}], ids=str)
def test_after_lora_sft_the_reference_is_the_sft_adapter_not_the_base(make_config, prompts, sft_folder, way):
    trainer = PPOTrainer(make_config(sft_adapter=sft_folder, top_k=0, top_p=1.0, **way))
    results = trainer.ppo_step(prompts)
    assert results["kl"] == pytest.approx(0, abs=1e-4)  # the policy starts where the reference is
    tokens = results["sa_pairs"].tokens
    bare = SFTModel(trainer.models.sft.backbone, None).response_logits(tokens)
    assert not torch.allclose(bare, trainer.models.sft.response_logits(tokens), atol=1e-2)
    loaded = load_file(f"{sft_folder}/adapter_model.safetensors")
    state = {name: p for name, p in trainer.models.sft.backbone.network.named_parameters() if ".sft." in name}
    assert len(state) == len(loaded)
    total = sum(float(p.abs().sum()) for p in state.values())
    assert total == pytest.approx(
        sum(float(p.abs().sum()) for p in loaded.values()), rel=1e-5
    )  # and it stayed frozen


@pytest.fixture
def reward_folder(make_config, tmp_path):
    """A reward adapter with its head, as reward training would leave one."""
    trainer = shake(PPOTrainer(make_config()), seed=11)
    trainer.models.value.save(tmp_path / "reward")
    return str(tmp_path / "reward")


@pytest.mark.parametrize("way", [{}, {"lora_r": 0}], ids=str)
def test_a_trained_reward_adapter_scores_and_the_value_model_starts_from_it(
    make_config, prompts, reward_folder, way
):
    trainer = PPOTrainer(make_config(rewards=reward_folder, **way))
    assert trainer.models.reward.source == reward_folder
    pairs, _ = trainer.generator.generate_sequences(prompts)
    tokens = pairs.tokens
    scores = trainer.reward_computer.score_pairs(pairs).total
    assert torch.allclose(
        scores.float(), trainer.models.reward.scores(tokens.input_ids, tokens.input_mask), atol=1e-5
    )
    last = (
        trainer.models.value.backbone
    )  # V at the last token of a whole sequence equals the reward model's score there
    with torch.no_grad():
        hidden = last.hidden(
            tokens.input_ids[:1], pack_mask(tokens.input_mask[:1]), trainer.models.value.adapter
        )
        value = trainer.models.value.head_values(hidden)
    assert float(value) == pytest.approx(float(scores[0]), abs=1e-4)
    assert trainer.ppo_step(prompts)["reward_source"] == "reward"


def test_a_separate_value_checkpoint(make_config, prompts, tiny_folders):
    for way in ({}, {"lora_r": 0}):
        trainer = PPOTrainer(make_config(value_model=tiny_folders["llama"], **way))
        assert trainer.models.value.backbone is not trainer.models.policy.backbone
        before = weights(trainer)
        trainer.ppo_step(prompts)
        assert difference(before, weights(trainer)) > 0


def test_a_saved_value_model_comes_back(make_config, prompts, reward_folder):
    trainer = PPOTrainer(make_config(value_model=reward_folder))
    head = load_file(f"{reward_folder}/{HEAD_FILE}")
    assert torch.equal(trainer.models.value.head.weight.detach(), head["weight"])
    assert trainer.ppo_step(prompts)["value_loss"] > 0


def test_a_fully_trained_value_model_comes_back(make_config, prompts, tmp_path):
    trainer = shake(PPOTrainer(make_config(lora_r=0)))
    trainer.save(tmp_path)
    again = PPOTrainer(make_config(value_model=str(tmp_path / "value")))
    tokens = trainer.generator.generate(prompts)[1].tokens
    with torch.no_grad():
        values = [item.models.value.response_values(tokens) for item in (trainer, again)]
    assert torch.allclose(*values, atol=1e-4)
    assert values[0].abs().max() > 0.01


@pytest.fixture
def small_update(make_config, tmp_path):
    """An adapter whose update is a thousandth of the weights, below what bfloat16 resolves (1/256)."""
    trainer = PPOTrainer(make_config(lora_r=4, lora_alpha=4))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in trainer.models.value.backbone.network.named_parameters():
        if ".value." in name and "lora_B" in name:
            parameter.data += 1e-4 * torch.randn(parameter.shape, generator=generator)
    trainer.models.value.save(tmp_path / "small")
    return str(tmp_path / "small")


def surviving(network, folder, base) -> float:
    """Which share of an adapter's update is in these weights, along the update's own direction (1 = all)."""
    update = load_file(f"{folder}/adapter_model.safetensors")
    kept = total = 0.0
    for name, weight in network.named_parameters():
        lower = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
        if lower in update:
            delta = update[lower.replace("lora_A", "lora_B")] @ update[lower]
            kept += float(((weight.detach() - base[name].float()) * delta).sum())
            total += float(delta.pow(2).sum())
    return kept / total


@pytest.mark.parametrize("start", ["sft", "reward", "value", "stage"])
def test_a_small_update_survives_the_merge_into_half_precision_weights(
    make_config, tiny, small_update, start
):
    """Every start of full fine-tuning from an adapter: policy, value from reward, value by name, and the
    stages."""
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).state_dict()
    if start == "stage":
        config = FinetuningConfig(tiny, lora_r=0, dtype="bfloat16", sft_adapter=small_update)
        network = SFTTrainer(config).backbone.network
    else:
        change = {
            "sft": {"sft_adapter": small_update},
            "reward": {"rewards": small_update},
            "value": {"value_model": small_update},
        }
        models = PPOTrainer(make_config(lora_r=0, dtype="bfloat16", **change[start])).models
        network = (models.policy if start == "sft" else models.value).backbone.network
    assert {weight.dtype for weight in network.parameters()} == {torch.float32}
    assert surviving(network, small_update, base) == pytest.approx(1, abs=1e-3)


def test_full_fine_tuning_trains_in_float32_whatever_the_frozen_type(make_config):
    models = PPOTrainer(make_config(lora_r=0, dtype="float16")).models
    assert {parameter.dtype for role in (models.policy, models.value) for parameter in role.parameters()} == {
        torch.float32
    }
    assert next(models.sft.backbone.network.parameters()).dtype == torch.float16


@pytest.fixture
def half_checkpoint(tiny, tmp_path):
    """The tiny model as most checkpoints are stored: in bfloat16."""
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "half")
    return str(tmp_path / "half")


def below_half(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether many weights moved, by less than bfloat16 would have kept."""
    kept = (before != after) & (before.bfloat16() == after.bfloat16())
    return float(kept.float().mean()) > 0.2


def test_all_weights_of_a_half_checkpoint_train_by_steps_that_half_precision_would_lose(
    make_config, prompts, half_checkpoint, tmp_path
):
    rates = {"learning_rate": 1e-6, "value_learning_rate": 1e-6}
    trainer = PPOTrainer(make_config(model_name=half_checkpoint, dtype="bfloat16", lora_r=0, **rates))
    before = weights(trainer)
    trainer.ppo_step(prompts)
    after = weights(trainer)
    assert all(before[role].dtype == torch.float32 for role in before)
    assert below_half(before["policy"], after["policy"])
    assert next(trainer.models.sft.backbone.network.parameters()).dtype == torch.bfloat16
    for kind, stage, data in (
        (FinetuningConfig, SFTTrainer, [Demonstration("a", " b"), Demonstration("c", " d")] * 2),
        (RewardConfig, RewardTrainer, [Preference("a", " b", " c"), Preference("d", " e", " f")] * 2),
    ):
        config = kind(half_checkpoint, dtype="bfloat16", lora_r=0, learning_rate=1e-6, run_dir=str(tmp_path))
        role = stage(config)
        network = role.backbone.network
        first = torch.cat([p.detach().flatten().clone() for p in network.parameters()])
        role.train(data)
        assert below_half(first, torch.cat([p.detach().flatten() for p in network.parameters()]))


@pytest.mark.parametrize("start", ["base", "value", "reward"])
def test_weights_that_train_keep_what_a_float32_checkpoint_holds(make_config, tiny, tmp_path, start):
    """`dtype` rounds the frozen weights alone: those that train are read as they were saved."""
    exact = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    change = {"base": {}, "value": {"value_model": tiny}, "reward": {}}[start]
    if start == "reward":
        config = RewardConfig(tiny, lora_r=0, run_dir=str(tmp_path))
        RewardTrainer(config).role.save(tmp_path / "reward")
        change = {"rewards": str(tmp_path / "reward")}
    models = PPOTrainer(make_config(lora_r=0, dtype="bfloat16", **change)).models
    network = (models.policy if start == "base" else models.value).backbone.network
    own = dict(getattr(network, network.base_model_prefix, network).named_parameters())
    wanted = dict(exact.base_model.named_parameters())
    assert own.keys() == wanted.keys()
    assert all(torch.equal(own[name], wanted[name]) for name in wanted)


def test_a_classifier_with_its_own_tokenizer_can_be_the_reward(make_config, prompts, tiny_folders, tmp_path):
    network = AutoModelForSequenceClassification.from_pretrained(tiny_folders["gpt2"], num_labels=1)
    network.save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(tiny_folders["gpt2"]).save_pretrained(tmp_path / "judge")
    trainer = PPOTrainer(make_config(rewards=str(tmp_path / "judge")))
    together = trainer.reward_computer.compute_rewards(prompts)
    alone = [trainer.reward_computer.compute_rewards([prompt])[0] for prompt in prompts]
    assert together == pytest.approx(alone, abs=1e-4)  # padding does not change a score
    assert len({round(score, 6) for score in together}) > 1
    assert trainer.ppo_step(prompts)["reward_source"] == "judge"


def test_several_rewards_are_weighted_added_and_logged_by_name(make_config, prompts):
    from proxima.config import RewardSpec

    def length(prompts, texts):
        return [float(len(text)) for text in texts]

    def ones(prompts, texts):
        return [1.0] * len(texts)

    results = PPOTrainer(
        make_config(rewards=[RewardSpec(length, 0.5), RewardSpec(ones, -2.0, "penalty")])
    ).ppo_step(prompts)
    expected = [0.5 * len(text) - 2.0 for text in results["generated_texts"]]
    assert results["rewards"] == pytest.approx(expected)
    assert results["reward/penalty"] == 1.0
    assert results["avg_reward"] == pytest.approx(sum(expected) / len(expected))


def test_values_are_read_before_the_action(make_config, prompts):
    """V(s_t) must not see action t: changing the last token leaves every value as it was."""
    trainer = shake(PPOTrainer(make_config()))
    tokens = trainer.generator.generate(prompts)[1].tokens
    values = trainer.models.value.response_values(tokens)
    other = tokens.response_ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 250
    import dataclasses

    changed = trainer.models.value.response_values(dataclasses.replace(tokens, response_ids=other))
    assert torch.allclose(values, changed, atol=1e-6)
    other[:, 0] = (other[:, 0] + 1) % 250
    changed = trainer.models.value.response_values(dataclasses.replace(tokens, response_ids=other))
    assert torch.allclose(values[:, 0], changed[:, 0], atol=1e-6)
    assert not torch.allclose(values[:, 1], changed[:, 1], atol=1e-4)


def test_values_of_texts_equal_values_of_tokens(make_config):
    trainer = shake(PPOTrainer(make_config(max_new_tokens=3)))
    pairs, _ = trainer.generator.generate_sequences(["plain", "another one"])
    by_tokens = trainer.value_adder.add_values_to_sa_pairs(pairs)
    firsts = [pair["value"] for pair in by_tokens if pair["position"] == 0]
    assert trainer.value_adder.add_values(["plain", "another one"]) == pytest.approx(firsts, abs=1e-5)
    dicts = [{"state": "plain", "action": "a"}, {"state": "plaina", "action": "b"}]
    out = trainer.value_adder.add_values_to_sa_pairs(dicts)
    assert [pair["value"] for pair in out] == pytest.approx(
        trainer.value_adder.add_values(["plain", "plaina"]), abs=1e-6
    )


def test_plain_dicts_can_be_trained_on(make_config):
    trainer = shake(PPOTrainer(make_config()))
    dicts = [
        {
            "state": "Why",
            "action": "a",
            "logprob_policy": -5.0,
            "advantage": 1.0,
            "return": 0.5,
            "value": 0.0,
        },
        {
            "state": "Whya",
            "action": "b",
            "logprob_policy": -5.0,
            "advantage": -1.0,
            "return": 0.5,
            "value": 0.0,
        },
    ]
    policy, value = trainer.model_trainer.train_step(dicts)
    assert isinstance(policy, float)
    assert value > 0
    with pytest.raises(ValueError, match="'ab' is 2 tokens"):
        trainer.model_trainer.train_step([{**dicts[0], "action": "ab"}])


def test_by_transformers_own_pass_no_position_is_left_without_one_to_look_at(
    make_config, prompts, monkeypatch
):
    """Padding in front leaves such positions, for which cuDNN's attention has gradients that are nan."""
    trainer = PPOTrainer(make_config(engine="plain"))
    tokens = trainer.generator.sample([prompts[0], prompts[0] * 3])
    masks = []
    given = Passes.inputs
    monkeypatch.setattr(
        Passes, "inputs", lambda passes, part, ids, mask: masks.append(mask) or given(passes, part, ids, mask)
    )
    alone = [trainer.models.policy.response_hidden(tokens.select(torch.tensor([row]))) for row in (0, 1)]
    both = trainer.models.policy.response_hidden(tokens)
    assert torch.allclose(both, torch.cat(alone), atol=1e-4)
    assert all(mask[:, 0].all() for mask in masks)
    assert masks[-1].shape[1] == tokens.longest
