"""Adapters beyond the decoder layers: on the output embeddings, whole modules, trained tokens. Sampled,
scored, trained and exported alike, whatever role has them."""

import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.generator import SequenceGenerator
from proxima.tools.doctor.step_checks import check_gap
from tests.families.check import CLOSE, check_export, logprobs_alone, run_twice

ON_HEAD = {"target_modules": ["q_proj", "lm_head"]}
WHOLE = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
BOTH = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}
EMBEDDED = {"target_modules": ["q_proj", "embed_tokens"]}
TOKENS = {"target_modules": ["q_proj"], "trainable_token_indices": [65, 66]}
KINDS = {
    "LoRA on the head": ON_HEAD,
    "the whole head": WHOLE,
    "head and embeddings": BOTH,
    "LoRA on embeddings": EMBEDDED,
    "tokens": TOKENS,
}


@pytest.fixture(params=["qwen3", "llama"])  # tied embeddings, and not
def base(request, tiny_folders):
    return tiny_folders[request.param]


@pytest.fixture(params=KINDS, ids=str)
def sft_adapter(request, base, tmp_path):
    """An SFT adapter as PEFT writes it, all its weights changed."""
    network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = get_peft_model(network, LoraConfig(r=2, task_type="CAUSAL_LM", **KINDS[request.param]))
    torch.manual_seed(1)
    for weight in peft.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn_like(weight)
    peft.save_pretrained(tmp_path / "sft")
    return str(tmp_path / "sft")


def with_adapter(base: str, folder: str):
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder
    ).eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", ["lm_head", "q_proj,v_proj,lm_head"])
def test_lora_on_the_output_embeddings_is_sampled_scored_trained_and_exported(
    make_config, base, tmp_path, targets
):
    trainer = PPOTrainer(make_config(model_name=base, lora_targets=targets, learning_rate=1e-2))
    assert trainer.models.policy.backbone.decoder is None
    run_twice(trainer)
    check_export(trainer, tmp_path)
    tokens = trainer.generator.sample(["hello", "a longer one"], 9)
    scored = trainer.generator.score(tokens)["logprob_ref"]
    trainer.models.policy.save(tmp_path / "saved")
    own = logprobs_alone(with_adapter(base, str(tmp_path / "saved")), tokens, 1.0)
    assert float(((own - scored) * tokens.mask).abs().max()) > 0.01  # the adapter does something


@pytest.mark.filterwarnings("ignore")
def test_an_sft_adapter_with_parts_beyond_the_layers_is_the_reference_as_peft_has_it(
    make_config, base, sft_adapter, tmp_path
):
    trainer = PPOTrainer(make_config(model_name=base, sft_adapter=sft_adapter, learning_rate=1e-2))
    run_twice(trainer, with_adapter(base, sft_adapter))
    check_export(trainer, tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sft_adapter", [name for name in KINDS if name != "tokens"], indirect=True)
def test_a_reward_adapter_without_such_parts_reads_with_the_base_s_own(
    make_config, base, sft_adapter, prompts, tmp_path
):
    first = PPOTrainer(make_config(model_name=base))
    first.models.value.head.weight.data.normal_()
    first.models.value.save(tmp_path / "reward")
    trainer = PPOTrainer(
        make_config(model_name=base, sft_adapter=sft_adapter, rewards=str(tmp_path / "reward"))
    )
    tokens = trainer.generator.sample(prompts)
    with torch.no_grad():
        ids, mask = tokens.input_ids, tokens.input_mask
        own, again = first.models.value.last_values(ids, mask), trainer.models.reward.scores(ids, mask)
    assert torch.allclose(own, again, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_the_same_adapter_merged_for_full_fine_tuning(make_config, base, sft_adapter, prompts):
    trainer = PPOTrainer(make_config(model_name=base, sft_adapter=sft_adapter, lora_r=0))
    results = trainer.ppo_step(prompts)
    tokens = results["sa_pairs"].tokens
    own = logprobs_alone(with_adapter(base, sft_adapter), tokens, 1.0)
    assert float(((own - results["sa_pairs"].column("logprob_ref")) * tokens.mask).abs().max()) < CLOSE
    assert results["kl_exact"] == pytest.approx(0, abs=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_vllm_refuses_an_adapter_on_the_head(make_config):
    trainer = PPOTrainer(make_config(lora_targets="q_proj,lm_head"))
    with pytest.raises(ValueError, match="take lm_head out of lora_targets"):
        SequenceGenerator(trainer.models, trainer.tokenizer, replace(trainer.config, engine="vllm"))


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_sampling_that_is_not_what_is_scored_is_warned_of(make_config, prompts, monkeypatch, engine):
    trainer = PPOTrainer(make_config(engine=engine))
    good = trainer.ppo_step(prompts)
    assert good["sampling_gap"] < 1e-4
    assert check_gap(good, trainer.config, 1e-3).level == "ok"
    sample = trainer.models.policy.generate
    off = lambda *given: replace(tokens := sample(*given), sampled_logprobs=tokens.sampled_logprobs - 0.5)  # noqa: E731
    monkeypatch.setattr(trainer.models.policy, "generate", off)
    with pytest.warns(UserWarning, match="0.5 nats per token off those they are trained with"):
        bad = trainer.ppo_step(prompts)
    assert check_gap(bad, trainer.config, 1e-3).level == "fail"


def test_gradient_checkpointing_acts_on_what_the_fast_path_does_not_know(make_config, prompts, tmp_path):
    from proxima.world.tiny_models import byte_tokenizer
    from tests.families.networks import tiny_network

    tiny_network("jamba").save_pretrained(tmp_path / "model")  # its layers are of two kinds
    byte_tokenizer().save_pretrained(tmp_path / "model")
    settings = {"model_name": str(tmp_path / "model"), "lora_targets": "q_proj,v_proj"}
    plain, saving = (PPOTrainer(make_config(gradient_checkpointing=on, **settings)) for on in (False, True))
    runs = [0, 0]
    for number, trainer in enumerate((plain, saving)):
        norm = trainer.models.policy.backbone.network.model.layers[1].input_layernorm
        norm.register_forward_hook(lambda *_, number=number: runs.__setitem__(number, runs[number] + 1))
    first, second = (trainer.ppo_step(prompts) for trainer in (plain, saving))
    assert runs[1] > runs[0]
    assert second["policy_loss"] == pytest.approx(first["policy_loss"], abs=1e-5)
    assert math.isclose(first["grad_norm_policy"], second["grad_norm_policy"], rel_tol=1e-3)
