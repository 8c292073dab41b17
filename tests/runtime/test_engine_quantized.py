"""The fast path on a base in 4 bits: what the reference path gives, from one scratch that all layers share."""

from types import SimpleNamespace

import pytest
import torch
from peft.tuners.lora import LoraLayer

from proxima.core.linear4bit import Linear4bit, is_quantized
from proxima.core.nf4 import quantize
from proxima.models import Sampling
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.engine import SamplingMemory, pack_mask, supports
from proxima.runtime.engine.layer_weights import kinds_of
from tests.helpers import LOGPROB_ROUNDING, difference, rounding, shake, weights
from tests.runtime.test_engine_families import CASES, make_backbones, make_prompts

PROMPTS = ["a", "the second prompt is longer", "third one", "x y z"]
NEAR = {"rtol": 0, "atol": LOGPROB_ROUNDING}


@pytest.fixture(params=["qwen3", "llama"])
def build(request, tiny_folders, make_config):
    def make(engine="auto", **settings):
        given = {"quantize": "nf4", "max_new_tokens": 6, "top_k": 0, "top_p": 1.0} | settings
        return shake(PPOTrainer(make_config(model_name=tiny_folders[request.param], engine=engine, **given)))

    return make


def free(length=8):
    return Sampling(length, 1.0, 0, 1.0, (), 0, 0)


@pytest.mark.parametrize(
    "settings", [{}, {"lora_targets": "q_proj,down_proj"}, {"gradient_checkpointing": True}]
)
def test_a_step_is_that_of_the_reference_path(build, settings):
    fast, plain = build(**settings), build("plain", **settings)
    assert is_quantized(fast.models.policy.backbone.network)
    assert fast.models.policy.backbone.decoder is not None
    assert plain.models.policy.backbone.decoder is None
    samples = [
        trainer.models.policy.generate(trainer.generator.read_prompts(PROMPTS), free())
        for trainer in (fast, plain)
    ]
    assert torch.equal(samples[0].response_ids, samples[1].response_ids)
    torch.testing.assert_close(samples[0].sampled_logprobs, samples[1].sampled_logprobs, **NEAR)
    for role in ("policy", "sft", "value", "reward"):
        states = [getattr(one.models, role).response_hidden(samples[0]) for one in (fast, plain)]
        torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)
    ours, theirs = fast.ppo_step(PROMPTS), plain.ppo_step(PROMPTS)
    for name in ("policy_loss", "value_loss"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-4)
    assert ours["first_ratio_error"] < 1e-5
    assert theirs["first_ratio_error"] <= 1e-5
    assert difference(weights(fast), weights(plain)) < rounding(fast)


def test_checkpointing_and_a_second_run_give_the_same_bits(build):
    results = []
    for on in (False, True, False):
        trainer = build(gradient_checkpointing=on)
        trainer.ppo_step(PROMPTS)
        results.append(weights(trainer))
    assert difference(results[0], results[1]) == 0
    assert difference(results[0], results[2]) == 0


def test_codes_are_not_copied_and_no_pass_keeps_the_scratch(build):
    trainer = build()
    policy = trainer.models.policy
    tokens = policy.generate(trainer.generator.read_prompts(PROMPTS), free())
    decoder = policy.backbone.decoder
    packed = [part.quantized for block in decoder.blocks for part in block.projections]
    scratch = {id(weight.scratch) for weight in packed}
    assert len(scratch) == 1
    held = {weight.codes.untyped_storage().data_ptr() for weight in packed}
    modules = [part for part in policy.backbone.network.modules() if isinstance(part, Linear4bit)]
    assert {part.nf4.codes.untyped_storage().data_ptr() for part in modules} == held
    assert {part.weight.untyped_storage().data_ptr() for part in modules} == held
    kept = []
    with (
        policy.training(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
    ):
        policy.response_hidden(tokens).sum().backward()
    flat = packed[0].scratch._flat.untyped_storage().data_ptr()
    assert kept
    assert flat not in {one.untyped_storage().data_ptr() for one in kept}


def test_a_projection_of_which_a_part_is_not_quantised_takes_the_reference_path(build):
    network = build("plain").models.policy.backbone.network
    assert supports(network)
    layer = next(part for part in network.modules() if hasattr(part, "q_proj"))
    base = layer.q_proj.get_base_layer()
    layer.q_proj.base_layer = base.dequantized(torch.float32)
    assert not supports(network)
    for part in (layer.k_proj, layer.v_proj):
        part.base_layer = part.get_base_layer().dequantized(torch.float32)
    assert supports(network)
    other = layer.o_proj.get_base_layer()
    other.set_weight(quantize(torch.randn(other.out_features, other.in_features), nested=False))
    assert supports(network)  # a projection of its own


def test_few_tokens_in_a_pass_bound_prefill_cache_and_logits_and_change_nothing(build, monkeypatch):
    results, most = [], []
    for tokens in (0, 64):
        trainer = build(micro_batch_tokens=tokens, micro_batch_size=1)
        policy = trainer.models.policy
        engine, head, prefill = policy.backbone.generation, policy.backbone.head, policy.backbone.decoder.run
        seen = {"prefill": 0, "logits": 0}

        def run(flat, *given, seen=seen, prefill=prefill, **more):
            seen["prefill"] = max(seen["prefill"], len(flat))
            return prefill(flat, *given, **more)

        def logits(hidden, adapter, seen=seen, head=head):
            seen["logits"] = max(seen["logits"], len(hidden))
            return head(hidden, adapter)

        monkeypatch.setattr(policy.backbone.decoder, "run", run)
        monkeypatch.setattr(policy.backbone, "head", logits)
        trainer.ppo_step(PROMPTS * 3)
        most.append(seen | {"cache": engine._slots.count * engine._slots.size})
        results.append(weights(trainer))
    assert most[0]["prefill"] > 64 >= most[1]["prefill"]
    assert most[0]["cache"] > 4 * 64 >= most[1]["cache"]
    assert most[0]["logits"] == 6
    assert most[1]["logits"] <= 64 // 8
    assert difference(*results) < rounding(trainer)


def test_slots_do_not_depend_on_earlier_calls(build):
    """A resumed run has not seen what came before."""
    trainer = build(micro_batch_tokens=64)
    policy, counts = trainer.models.policy, []
    for prompts in (PROMPTS * 3, ["long " * 30] * 4, PROMPTS * 3):
        policy.generate(trainer.generator.read_prompts(prompts), free())
        counts.append(policy.backbone.generation._slots.count)
    assert counts[0] == counts[2] > counts[1]
    assert (
        SamplingMemory(4 * 2048, fewest=8).slots(1024) == SamplingMemory(4 * 2048, fewest=1).slots(1024) == 8
    )
    assert SamplingMemory(4 * 2048, fewest=8).slots(2560) == 8
    assert SamplingMemory(4 * 2048, fewest=1).slots(2560) == 3


@pytest.mark.parametrize("phase", ["generate", "response_hidden"])
def test_out_of_memory_halves_prefill_and_cache_too(build, monkeypatch, phase):
    trainer = build(micro_batch_tokens=512, micro_batch_size=8, minibatch_size=16)
    prompts = trainer.generator.read_prompts(PROMPTS * 4)
    policy = trainer.models.policy
    policy.generate(prompts, free(26))
    assert policy.backbone.generation._slots.count == 16
    original, calls = getattr(type(policy), phase), []

    def twice_too_much(self, *given):
        calls.append(given)
        if len(calls) <= 2:
            raise torch.cuda.OutOfMemoryError("made up")
        return original(self, *given)

    monkeypatch.setattr(type(policy), phase, twice_too_much)
    trainer.ppo_step(PROMPTS * 4)
    monkeypatch.undo()
    assert trainer.models.micro_batches.tokens == 128
    policy.generate(prompts, free(26))
    generation = policy.backbone.generation
    assert generation.memory.prefill == 128
    assert generation._slots.count * generation._slots.size <= 4 * 128


def test_kinds_are_the_first_quantised_and_the_first_full_projection():
    def block(*quantized):
        return SimpleNamespace(projections=[SimpleNamespace(quantized=one) for one in quantized])

    blocks = [block(None, "a"), block(None, "b"), block("c", None)]
    first, second = (kinds_of(blocks, place) for place in range(2))
    assert first == [blocks[0].projections[0], blocks[2].projections[0]]
    assert [one.quantized for one in second] == ["a", None]
    assert kinds_of(blocks[:2], 0) == [blocks[0].projections[0]]


def test_a_tokens_chunk_of_logits_has_the_same_size_wherever_it_is(build, monkeypatch):
    """Bits of a product may depend on its number of rows: scoring and training give the same number."""
    trainer = build(micro_batch_tokens=64, micro_batch_size=3, minibatch_size=4, batch_size=12)
    backbone, rows = trainer.models.policy.backbone, set()
    head = backbone.head
    monkeypatch.setattr(
        backbone, "head", lambda hidden, adapter: rows.add(len(hidden)) or head(hidden, adapter)
    )
    trainer.models.eos_ids = tuple(range(0, 200, 3))  # responses of many lengths
    trainer.ppo_step(PROMPTS * 3)
    assert rows == {8}


def test_inputs_of_projections_without_an_adapter_are_not_kept(build):
    """As with weights in full: only the gradient of the input passes through them."""

    def kept(**settings):
        trainer, found = build(**settings), {}
        policy = trainer.models.policy
        tokens = policy.generate(trainer.generator.read_prompts(PROMPTS), free())
        keep = torch.autograd.graph.saved_tensors_hooks(
            lambda x: found.setdefault(x.untyped_storage().data_ptr(), x) is None or x, lambda x: x
        )
        with policy.training(), keep:
            policy.response_hidden(tokens).sum().backward()
        return sum(one.untyped_storage().nbytes() for one in found.values())

    assert kept(lora_targets="q_proj") < 0.9 * kept()


@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.startswith(("gpt2", "olmoe", "qwen3_moe"))]
)
def test_hidden_states_of_every_family_are_those_of_the_reference_path(case):
    """Also where blocks of 64 weights cross the rows of a matrix."""
    prompts, states = make_prompts(), []
    for backbone in make_backbones(case):
        for layer in backbone.network.modules():
            if isinstance(layer, LoraLayer):
                base = layer.get_base_layer()
                layer.base_layer = Linear4bit(base.in_features, base.out_features, base.bias is not None)
                layer.base_layer.bias = base.bias
                layer.base_layer.set_weight(quantize(base.weight.detach()))
        backbone.attach(backbone.peft)
        if backbone.decoder is not None:
            assert backbone.decoder.blocks[0].qkv.quantized is not None
        with torch.no_grad():
            states.append(backbone.hidden(prompts.prompt_ids, pack_mask(prompts.prompt_mask), "policy"))
    torch.testing.assert_close(*states, rtol=0, atol=LOGPROB_ROUNDING)
