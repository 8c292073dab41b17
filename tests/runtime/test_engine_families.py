"""Every family that the fast engine declares equals transformers on a tiny random network: logits, gradients
of adapters and of all weights, decoded tokens."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM

from proxima.core.types import Tokens
from proxima.models import Sampling
from proxima.models.backbone import Backbone
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.engine import pack_mask, supports
from proxima.runtime.engine.architecture import Architecture
from proxima.runtime.engine.attention_rules import explicit_attention
from proxima.runtime.engine.families import FAMILIES
from proxima.runtime.engine.layer_functions import normalize
from proxima.world.tiny_models import byte_tokenizer
from tests.families.networks import tiny_network

WINDOW = 5  # shorter than the sequences
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
LINEAR = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def longrope(head_size=8, original=64):
    """Other angles within the original context than beyond it."""
    factors = [1.0 + i for i in range(head_size // 2)]
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "short_factor": factors,
        "long_factor": [4 * factor for factor in factors],
        "original_max_position_embeddings": original,
    }


CASES = {
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**LAYERS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3_text": ("gemma3_text", {**LAYERS, "query_pre_attn_scalar": 5, "final_logit_softcapping": 3.0}),
    "gemma3_text stretched": ("gemma3_text", {**LAYERS, "rope_parameters": LINEAR}),
    "gpt2": ("gpt2", {}),
    "gpt2 unscaled": ("gpt2", {"scale_attn_weights": False}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "llama": ("llama", {}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama with another activation": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", LAYERS),
    "olmo3 stretched": ("olmo3", {**LAYERS, "rope_parameters": {**LINEAR, "full_attention": YARN}}),
    "olmoe": ("olmoe", {}),
    "olmoe normalised": ("olmoe", {"norm_topk_prob": True, "num_experts_per_tok": 3}),
    "phi3": ("phi3", {}),
    "phi3 longrope": ("phi3", {"rope_parameters": longrope()}),
    "phi3 windowed, partly rotated": ("phi3", {"sliding_window": WINDOW, "rope_parameters": PARTIAL}),
    "qwen2": ("qwen2", {}),
    "qwen2 windowed": ("qwen2", {"use_sliding_window": True, **LAYERS}),
    "qwen3": ("qwen3", {}),
    "qwen3 dynamic": ("qwen3", {"rope_parameters": DYNAMIC}),
    "qwen3 stretched": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe windowed": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": WINDOW}),
    "smollm3": ("smollm3", {"use_sliding_window": True, **LAYERS, "no_rope_layers": [1, 0]}),
}
LENGTHS = (11, 3, 1, 8)  # around the window
ROUNDING = 1e-4  # logits of up to 10 after two layers of float32, summed in another order


def make_network(case, **changes):
    """A network whose norms and biases are no longer ones and zeros."""
    model_type, settings = CASES[case]
    network = tiny_network(model_type, **{**settings, **changes})
    network.set_attn_implementation("eager")  # the only one with soft caps on a CPU
    generator = torch.Generator().manual_seed(3)
    for weight in network.parameters():
        if weight.dim() == 1:
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    return network


def make_backbones(case, adapted=True, device="cpu", dtype=torch.float32, targets="all-linear", **changes):
    """The same network with an adapter on all linear layers, or on these, on either path."""
    made = []
    for fast in (True, False):
        backbone = Backbone(make_network(case, **changes).to(device, dtype))
        backbone.settings.fast = fast
        if adapted:
            lora = LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False)
            torch.manual_seed(5)
            peft = get_peft_model(backbone.network, lora, adapter_name="policy")
            backbone.network = peft.get_base_model()
            backbone.attach(peft)
        else:
            backbone.network.requires_grad_(True)
        assert (backbone.decoder is not None) == fast
        made.append(backbone)
    return made


def left_padded(width=12):
    """Prompts of several lengths, padded on the left."""
    ids = torch.randint(0, 250, (len(LENGTHS), width), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(width) >= width - torch.tensor(LENGTHS).unsqueeze(1)
    return ids, mask


def make_prompts():
    """The same as a batch of prompts."""
    ids, mask = left_padded()
    count = len(LENGTHS)
    return Tokens(
        prompts=[""] * count,
        prompt_ids=ids.masked_fill(~mask, 0),
        prompt_mask=mask,
        response_ids=ids[:, :0],
        mask=mask[:, :0],
        ended=torch.zeros(count, dtype=torch.bool),
        truncated=torch.zeros(count, dtype=torch.bool),
        keys=torch.arange(count),
        tokenizer=byte_tokenizer(),
    )


def every_position(mask):
    """A layout that reads every token."""
    layout = pack_mask(mask)
    return type(layout)(**{**vars(layout), "read": torch.arange(layout.total)})


def test_every_family_has_a_case():
    assert {model_type for model_type, _ in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("adapted", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case, adapted):
    ids, mask = left_padded()
    layout = every_position(mask)
    adapter = "policy" if adapted else None
    found = []
    for backbone in make_backbones(case, adapted):
        with backbone.using(adapter):
            for parameter in backbone.adapter_parameters("policy"):
                parameter.requires_grad_(True)
            logits = backbone.head(backbone.hidden(ids, layout, adapter), adapter)
            (logits.square().mean() + logits.exp().mean()).backward()
        gradients = {name: p.grad for name, p in backbone.network.named_parameters() if p.grad is not None}
        found.append((logits.detach(), gradients, backbone))
    (ours, our_gradients, _), (theirs, their_gradients, backbone) = found
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING)
    assert our_gradients.keys() == their_gradients.keys() != set()
    for name, gradient in their_gradients.items():
        atol = 1e-4 * float(gradient.abs().max()) + 1e-7
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-3, atol=atol, msg=name)
    starts = layout.starts.tolist()
    with torch.no_grad(), backbone.using(adapter):  # each sequence alone, without padding
        for row, length in enumerate(LENGTHS):
            alone = backbone.network(input_ids=ids[row][mask[row]][None]).logits[0]
            here = ours[starts[row] : starts[row] + length]
            torch.testing.assert_close(here, alone, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("case", CASES)
def test_decoded_tokens_and_log_probabilities_are_those_of_transformers(case):
    """Greedy tokens in slots that are used again; the log-probabilities are those of a pass over the whole."""
    backbone, plain = make_backbones(case)
    prompts = make_prompts()
    ids, mask = prompts.prompt_ids, prompts.prompt_mask
    backbone.generation.max_slots = 3
    greedy = Sampling(9, 1.0, 1, 1.0, (), 0, 0)
    found = backbone.generation.generate(prompts, greedy, "policy")
    with torch.no_grad(), plain.using("policy"):
        theirs = plain.network.generate(
            input_ids=prompts.prompt_ids,
            attention_mask=mask.long(),
            max_new_tokens=9,
            min_new_tokens=9,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert torch.equal(found.response_ids, theirs[:, ids.shape[1] :])
    sampled = backbone.generation.generate(prompts, Sampling(9, 1.0, 0, 1.0, (), 0, 0), "policy")
    with torch.no_grad(), plain.using("policy"):
        for row, length in enumerate(LENGTHS):
            whole = torch.cat([ids[row][mask[row]], sampled.response_ids[row]])
            logits = plain.network(input_ids=whole[None]).logits[0, length - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, sampled.response_ids[row][:, None])[:, 0]
            torch.testing.assert_close(sampled.sampled_logprobs[row], expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("olmoe", {"clip_qkv": 0.5}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
    ],
)  # fmt: skip
def test_what_a_declaration_leaves_out_takes_the_reference_path(case, changes):
    assert supports(make_network(case))
    assert not supports(make_network(case, **changes))


class OwnLlama(LlamaForCausalLM):
    """As a model that brings its own code may be: a known `model_type`, another network."""

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None
    ):
        given = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
        }
        outputs = super().forward(input_ids, **given, use_cache=use_cache)
        outputs.logits = outputs.logits / 2
        return outputs


def test_code_of_a_model_s_own_under_a_known_name_takes_the_reference_path():
    network = OwnLlama(make_network("llama").config).eval()
    backbone, ids = Backbone(network), torch.arange(20)[None]
    assert backbone.decoder is None
    with torch.no_grad():
        hidden = backbone.hidden(ids, pack_mask(ids >= 0), None)
        torch.testing.assert_close(backbone.head(hidden, None), network(ids).logits[0, -1:])


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_soft_caps_of_attention_are_not_lost_when_a_network_is_loaded(tmp_path, make_config, engine):
    """transformers' default attention leaves them out."""
    network = make_network("gemma2")
    network.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    policy = PPOTrainer(make_config(model_name=str(tmp_path), engine=engine, lora_r=2)).models.policy
    ids, mask = left_padded()
    layout = every_position(mask)
    with torch.no_grad():
        logits = policy.backbone.head(policy.backbone.hidden(ids, layout, None), None)
        first = network(input_ids=ids[0][mask[0]][None]).logits[0]
    torch.testing.assert_close(logits[: LENGTHS[0]], first, rtol=0, atol=ROUNDING)


def test_longrope_is_that_of_transformers_up_to_the_original_context_and_refused_beyond_it(
    tmp_path, make_config
):
    """Beyond it, `transformers` gives all sequences of a batch other angles than each would have alone."""
    lengths = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    network = make_network("phi3", rope_parameters=longrope(original=16), **lengths)
    fast = Backbone(network)
    ids = torch.arange(17)[None]
    layout = every_position(torch.ones(1, 16, dtype=torch.bool))
    with torch.no_grad():
        alone, longer = network(ids[:, :16]).logits[0], deepcopy(network)(ids).logits[0, :16]
        assert not torch.allclose(alone, longer, atol=100 * ROUNDING)
        ours = fast.head(fast.hidden(ids[:, :16], layout, None), None)
        torch.testing.assert_close(ours, alone, rtol=0, atol=ROUNDING)
    assert (fast.decoder is not None, fast.context_length) == (True, 16)
    network.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    trainer = PPOTrainer(make_config(model_name=str(tmp_path), lora_r=2, max_new_tokens=8))
    assert trainer.ppo_step(["1234567", "12345678"])["first_ratio_error"] < ROUNDING
    with pytest.raises(ValueError, match=r"prompt 0 has 9 tokens; .* the context of 16 leaves 8") as problem:
        trainer.ppo_step(["123456789"])
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("case", ["gemma3_text", "llama", "olmo2"])
def test_norms_round_as_those_of_transformers(case):
    """In half precision it matters where a norm returns to it."""
    network = make_network(case).bfloat16()
    architecture = Architecture(network)
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours = normalize(x, architecture.last_norm, architecture.shape.eps)
    assert torch.equal(ours, network.model.norm(x))


def test_explicit_attention_is_the_library_s():
    q, k, v = torch.randn(3, 2, 4, 7, 8, generator=torch.Generator().manual_seed(4))
    seen = torch.ones(7, 7, dtype=torch.bool).tril() & ~torch.ones(7, 7, dtype=torch.bool).tril(-3)
    expected = scaled_dot_product_attention(q, k, v, seen, scale=0.7)
    torch.testing.assert_close(explicit_attention(q, k, v, seen, 0.7, None), expected)


def test_only_networks_like_llama_use_the_kernels():
    suits = {case: Backbone(make_network(case)).decoder.suits_kernels for case in CASES}
    expected = {"llama", "llama 3", "mistral without a window", "phi3", "qwen2", "qwen3"}
    expected |= {"phi3 longrope", "qwen3 dynamic", "qwen3 stretched"}
    assert {case for case, suited in suits.items() if suited} == expected


WRONG = {
    "norms of other weights": ("gemma", {"norm_offset": 0.0}),
    "logits not divided": ("granite", {"logit_divisor_field": None}),
    "attention scaled otherwise": ("llama", {"attention_scale": lambda config, size: 1.0}),
    "norms of queries and keys left out": ("qwen3", {"head_norms": ("none", "none")}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_family_declared_wrongly_takes_the_reference_path_and_says_so(wrong, monkeypatch, caplog):
    case, change = WRONG[wrong]
    monkeypatch.setitem(FAMILIES, case, replace(FAMILIES[case], **change))
    network = make_network(case)
    for norm in (module for name, module in network.named_modules() if name.endswith("norm")):
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(3))
    backbone, ids = Backbone(network), torch.arange(20)[None]
    with caplog.at_level("WARNING"):
        assert backbone.decoder is None
        assert backbone.decoder is None
    [record] = [each for each in caplog.records if each.name == "proxima.models.backbone"]
    assert f"its logits of {network.config.model_type} are not the network's own" in record.getMessage()
    assert not backbone.known
    with torch.no_grad():
        hidden = backbone.hidden(ids, pack_mask(ids >= 0), None)
        torch.testing.assert_close(backbone.head(hidden, None), network(ids).logits[0, -1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_the_comparison_with_the_network_tolerates_its_precision_and_draws_nothing(case, dtype, caplog):
    backbone = Backbone(make_network(case).to(dtype))
    before = torch.get_rng_state()
    assert backbone.decoder is not None, caplog.text
    assert torch.equal(torch.get_rng_state(), before)
