"""The fast engine equals the reference path: tokens, log-probabilities, gradients; for every architecture it
knows."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from proxima.models import Sampling, backbone, base_model, response_tokens
from proxima.models.backbone import Backbone
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.engine import layer_functions as functions
from proxima.runtime.engine import supports, worth_compiling
from proxima.runtime.engine.generation import Generation
from tests.helpers import LOGPROB_ROUNDING, difference, rounding, shake, weights

ARCHITECTURES = ("qwen3", "llama", "gpt2")
PROMPTS = ["a", "the second prompt is longer", "third one", "x y z"] * 2 + [
    "the last is the longest of them all, by far"
]
SAMPLINGS = {"all": (1.0, 0, 1.0), "top-k": (2.0, 30, 1.0), "top-p": (1.3, 0, 0.8), "both": (1.0, 20, 0.9)}


@pytest.fixture(params=ARCHITECTURES)
def paths(request, tiny_folders, make_config):
    """Two trainers with the same weights, one on each path."""

    def make(**settings):
        both = [
            shake(PPOTrainer(make_config(model_name=tiny_folders[request.param], engine=engine, **settings)))
            for engine in ("auto", "plain")
        ]
        assert both[0].models.policy.backbone.decoder is not None
        assert both[1].models.policy.backbone.decoder is None
        return both

    return make


def sampling_of(trainer, name, length=12, step=0, eos=()):
    return Sampling(length, *SAMPLINGS[name], eos, seed=5, step=step)


@pytest.mark.parametrize(
    "settings", [{}, {"lora_r": 0}, {"lora_targets": "first"}], ids=["lora", "full", "some"]
)
def test_hidden_states_logits_values_and_gradients_are_those_of_transformers(paths, settings, request):
    if "lora_targets" in settings:
        settings = {"lora_targets": "c_attn" if "gpt2" in request.node.name else "q_proj,down_proj"}
    fast, plain = paths(**settings)
    tokens = fast.models.policy.generate_reference(
        fast.generator.read_prompts(PROMPTS), sampling_of(fast, "all")
    )
    for role in ("policy", "sft"):
        torch.testing.assert_close(
            *(getattr(trainer.models, role).response_logits(tokens) for trainer in (fast, plain)),
            rtol=0,
            atol=LOGPROB_ROUNDING,
        )
    torch.testing.assert_close(
        *(trainer.models.value.response_values(tokens) for trainer in (fast, plain)),
        rtol=0,
        atol=LOGPROB_ROUNDING,
    )
    gradients = []
    for trainer in (fast, plain):
        policy = trainer.models.policy
        with policy.training():
            policy.response_logits(tokens).square().mean().backward()
        gradients.append([parameter.grad for parameter in policy.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_roles_may_have_adapters_on_different_layers(tiny_folders, make_config, tmp_path):
    """An adapter that leaves out layers another one has still gets its gradients through them."""
    other = PPOTrainer(
        make_config(model_name=tiny_folders["qwen3"], lora_targets="gate_proj,up_proj,down_proj,k_proj")
    )
    folder = shake(other).models.value.save(tmp_path / "value")
    gradients = []
    for engine in ("auto", "plain"):
        settings = {"lora_targets": "q_proj,o_proj", "value_model": str(folder), "engine": engine}
        trainer = shake(PPOTrainer(make_config(model_name=tiny_folders["qwen3"], **settings)))
        tokens = trainer.models.policy.generate_reference(
            trainer.generator.read_prompts(PROMPTS), sampling_of(trainer, "all")
        )
        with trainer.models.policy.training():
            trainer.models.policy.response_logits(tokens).square().mean().backward()
        gradients.append([parameter.grad for parameter in trainer.models.policy.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_a_whole_step_is_the_same_on_both_paths(paths):
    fast, plain = paths(max_new_tokens=8, batch_size=9, minibatch_size=4)
    results = [trainer.ppo_step(PROMPTS) for trainer in (fast, plain)]
    assert results[0]["generated_texts"] == results[1]["generated_texts"]
    for name in ("kl", "policy_loss", "value_loss", "entropy", "grad_norm_policy", "grad_norm_value"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-3, abs=1e-6)
    assert results[0]["first_ratio_error"] < LOGPROB_ROUNDING
    assert difference(weights(fast), weights(plain)) < rounding(plain)


def test_every_weight_is_trained_on_both_paths_also_after_loading(paths, tmp_path):
    """The engine is first asked to sample, without gradients; what it reads then must still pass gradients
    on later."""
    both = paths(lora_r=0, learning_rate=1e-4, value_learning_rate=1e-4, micro_batch_size=2)
    for trainer in both:
        policy = trainer.models.policy
        policy.backbone._decoder = None
        before = [parameter.detach().clone() for parameter in policy.parameters()]
        trainer.ppo_step(PROMPTS[:4])
        assert not any(map(torch.equal, before, policy.parameters()))
        trainer.load(trainer.save(tmp_path / "saved"))
        trainer.ppo_step(PROMPTS[:4])
    assert difference(*map(weights, both)) < rounding(both[1])


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("slots", [256, 3], ids=["all at once", "refilled"])
def test_samples_do_not_depend_on_the_path_nor_on_slots(paths, name, slots):
    fast, plain = paths()
    prompts = fast.generator.read_prompts(PROMPTS)
    free = plain.models.policy.generate(prompts, sampling_of(plain, name))
    eos = tuple(free.response_ids[[0, 1, 2], [2, 4, 7]].tolist())
    sampling = sampling_of(plain, name, eos=eos)
    expected = plain.models.policy.generate(prompts, sampling)
    assert len(set(expected.sizes.tolist())) > 2
    engine = fast.models.policy.backbone.generation
    engine.max_slots = slots
    for _ in range(2):  # buffers are used again
        found = fast.models.policy.generate(prompts, sampling)
        assert torch.equal(found.response_ids, expected.response_ids)
        assert torch.equal(found.mask, expected.mask)
        assert torch.equal(found.ended, expected.ended)
        for ours, theirs in ((found.kept, expected.kept),):
            assert (ours is None) == (theirs is None)
            if ours is not None and ours.ids is not None:
                assert torch.equal(
                    ours.ids[found.mask].sort(-1).values, theirs.ids[found.mask].sort(-1).values
                )
            if ours is not None and ours.bits is not None:
                assert torch.equal(ours.bits[found.mask], theirs.bits[found.mask])


def test_steps_before_a_capture_change_nothing(paths, monkeypatch):
    """A GPU takes some when it first captures a step; some sequences end in them."""
    fast, plain = paths()
    prompts = fast.generator.read_prompts(PROMPTS)
    free = plain.models.policy.generate(prompts, sampling_of(plain, "all"))
    sampling = sampling_of(plain, "all", eos=tuple(free.response_ids[[0, 1, 2], [1, 2, 4]].tolist()))
    expected = fast.models.policy.generate(prompts, sampling)
    assert (expected.sizes < free.sizes).any()

    def captured_step(self, batch, n):
        for _ in range(2):
            self._warm_up(batch, n)
        self._step_eagerly(batch, n)

    monkeypatch.setattr(Generation, "_step", captured_step)
    found = fast.models.policy.generate(prompts, sampling)
    assert torch.equal(found.response_ids, expected.response_ids)
    torch.testing.assert_close(found.sampled_logprobs, expected.sampled_logprobs, rtol=0, atol=0)


def test_what_the_engine_thinks_of_its_tokens_is_what_the_training_pass_thinks(paths):
    fast, _ = paths(max_new_tokens=10)
    tokens = fast.generator.sample(PROMPTS)
    scored = fast.generator.score(tokens)["logprob_policy"]
    torch.testing.assert_close(tokens.sampled_logprobs, scored, rtol=1e-4, atol=1e-4)
    assert fast.ppo_step(PROMPTS)["sampling_gap"] < 1e-4


def test_greedy_tokens_are_those_of_generate(paths):
    fast, plain = paths()
    prompts = fast.generator.read_prompts(PROMPTS)
    ours = fast.models.policy.generate(prompts, Sampling(10, 1.0, 1, 1.0, fast.models.eos_ids, 0, 0))
    backbone = plain.models.policy.backbone
    with plain.models.policy.active():
        theirs = backbone.network.generate(
            input_ids=prompts.prompt_ids.masked_fill(~prompts.prompt_mask, 0),
            attention_mask=prompts.prompt_mask.long(),
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=list(fast.models.eos_ids),
            pad_token_id=0,
        )[:, prompts.prompt_ids.shape[1] :]
    width = ours.response_ids.shape[1]
    assert torch.equal(ours.response_ids, theirs[:, :width].masked_fill(~ours.mask, 0))


def test_the_adapter_is_read_anew_at_every_call(paths):
    fast, _ = paths()
    before = fast.generator.sample(PROMPTS).texts()
    shake(fast, 0.3, seed=9)
    assert fast.generator.sample(PROMPTS).texts() != before


def test_a_larger_batch_a_longer_prompt_and_other_settings_grow_the_buffers(paths):
    fast, plain = paths()
    for texts, length in ((["a"], 2), (PROMPTS, 5), (["word " * 40], 3), (["a", "b"], 9)):
        for name in ("all", "top-k"):
            answers = [
                trainer.models.policy.generate(
                    trainer.generator.read_prompts(texts), sampling_of(trainer, name, length)
                )
                for trainer in (fast, plain)
            ]
            assert torch.equal(answers[0].response_ids, answers[1].response_ids)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_logits_in_chunks_change_neither_scores_nor_gradients(paths, monkeypatch, chunk):
    results = []
    for size in (10**6, chunk):
        monkeypatch.setattr(response_tokens, "CHUNK", size)
        trainer = paths(kl_loss_coef=0.1, entropy_coef=0.01, top_k=4, max_new_tokens=6)[0]
        trainer.ppo_step(PROMPTS[:4])
        results.append(weights(trainer))
    assert difference(*results) < rounding(trainer)


def test_gradient_checkpointing_changes_nothing(paths):
    results = []
    for on in (False, True):
        trainer = paths(gradient_checkpointing=on)[0]
        trainer.ppo_step(PROMPTS[:4])
        results.append(weights(trainer))
    assert difference(*results) == 0


def test_the_base_is_not_copied(paths):
    fast, plain = paths()
    sizes = []
    for trainer in (fast, plain):
        network = trainer.models.policy.backbone.network
        if trainer is fast:
            blocks = trainer.models.policy.backbone.decoder.blocks
        storages = {
            p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in network.parameters()
        }
        sizes.append(sum(storages.values()))
    projections = [part for block in blocks for part in block if hasattr(part, "padding")]
    padding = sum(part.padding * len(part.weights[0]) for part in projections)
    assert sizes[0] == sizes[1] + 4 * padding > sizes[1]  # what adapters need beside it, no more


def test_what_the_engine_does_not_know_takes_the_reference_path(tiny_folders, make_config):
    trainer = PPOTrainer(make_config(model_name=tiny_folders["qwen3"]))
    network = trainer.models.policy.backbone.network
    assert supports(network)
    for name, value in (
        ("model_type", "falcon"),
        ("hidden_act", "relu6"),
        ("layer_types", ["sliding_attention"] * 2),  # without a window
        ("layer_types", ["chunked_attention"] * 2),
        ("rope_parameters", {"rope_type": "proportional"}),
    ):
        before = getattr(network.config, name)
        setattr(network.config, name, value)
        assert not supports(network)
        setattr(network.config, name, before)
    assert not supports(PPOTrainer(make_config(lora_targets="q_proj,lm_head")).models.policy.backbone.network)


@pytest.mark.parametrize(
    ("device", "wanted", "compiled_from", "compiled"),
    [
        ("cuda", True, 0, True),
        ("cuda", True, 10**8, False),
        ("cuda", False, 0, False),
        ("cpu", True, 0, False),
    ],
)
def test_only_large_networks_on_a_gpu_are_compiled(
    tiny, monkeypatch, device, wanted, compiled_from, compiled
):
    asked = []
    monkeypatch.setattr(
        backbone,
        "Decoder",
        lambda network, compiled: asked.append(compiled) or SimpleNamespace(graphed_passes=SimpleNamespace()),
    )
    monkeypatch.setattr(backbone, "fast_path_problem", lambda network, decoder: "")
    monkeypatch.setattr(Backbone, "device", torch.device(device))
    monkeypatch.setattr(functions, "COMPILED_FROM", compiled_from)
    made = Backbone(AutoModelForCausalLM.from_pretrained(tiny))
    made.settings.compiled = wanted
    assert made.decoder is not None
    assert asked == [compiled]


def test_the_embedded_model_is_not_worth_compiling_and_a_real_one_is():
    assert not worth_compiling(1_000_000)
    assert worth_compiling(124_000_000)  # GPT-2, the smallest that people fine-tune


def test_an_engine_made_while_an_adapter_trains_still_reads_the_adapter(paths):
    fast, plain = paths()
    ids = torch.arange(5, 15).unsqueeze(0)
    scores = []
    for trainer in (fast, plain):
        value = trainer.models.value
        value.backbone._decoder = None
        with value.active():  # its parameters ask for gradients now
            scores.append(value.last_values(ids, torch.ones_like(ids, dtype=torch.bool)))
    torch.testing.assert_close(*scores, rtol=0, atol=LOGPROB_ROUNDING)


@pytest.mark.parametrize("settings", [{}, {"value_model": "policy"}])
def test_out_of_memory_halves_the_micro_batch_and_repeats_the_step(
    make_config, prompts, monkeypatch, caplog, settings
):
    def run(failures):
        trainer = shake(PPOTrainer(make_config(micro_batch_size=4, minibatch_size=4, **settings)))
        original, calls = base_model.BaseModel.response_hidden, []

        def sometimes(self, tokens):
            calls.append(len(tokens.prompts))
            if len(calls) in failures:
                raise torch.cuda.OutOfMemoryError("made up")
            return original(self, tokens)

        monkeypatch.setattr(base_model.BaseModel, "response_hidden", sometimes)
        trainer.ppo_step(prompts)
        monkeypatch.undo()
        return trainer, len(calls)

    plain, count = run(())
    for failures in ((1,), (3,), (count // 2, count // 2 + 4), (count,)):
        with caplog.at_level("WARNING"):
            split, _ = run(failures)
        assert difference(weights(plain), weights(split)) < rounding(plain)
        assert split.models.micro_batches.size == 4 // 2 ** len(failures)
        assert "micro-batches are now" in caplog.text
    with pytest.raises(torch.cuda.OutOfMemoryError):
        run(range(100))
