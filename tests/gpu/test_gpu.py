"""The fast engine on a GPU, in bfloat16: equal to the reference path, ratio exactly 1, the same bits twice, no
eager step."""

import pytest
import torch

from proxima.config import PPOConfig
from proxima.models import Sampling
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.engine import layer_functions as functions
from proxima.runtime.engine import slot_schedule
from proxima.runtime.engine.few_rows_decoder import FewRowsDecoder
from proxima.runtime.engine.generation_slots import new_slots
from tests.helpers import Crash, crash_at, difference, shake, weights
from tests.ppo_trainer.test_resume import lines

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

PROMPTS = [f"prompt number {i} " * (1 + i % 5) for i in range(12)]
WAYS = {"all": (0, 1.0), "top-k": (20, 0.9), "top-p": (0, 0.8)}


def make(folder, **settings):
    given = {
        "max_new_tokens": 12,
        "batch_size": 12,
        "minibatch_size": 6,
        "dtype": "bfloat16",
        "rewards": vowels,
    }
    given |= {
        "top_k": 0,
        "top_p": 1.0,
        "compile_layers": False,
    }  # compiling takes most of the time; two tests do it
    return shake(PPOTrainer(PPOConfig(folder, **given | settings)), 0.02)


def vowels(prompts, texts):
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


@pytest.fixture(params=["qwen3", "llama", "gpt2"])
def folder(request, tiny_folders):
    return tiny_folders[request.param]


@pytest.fixture
def qwen(tiny_folders):
    return tiny_folders["qwen3"]


@pytest.mark.parametrize("way", WAYS)
def test_the_ratio_is_one_to_the_bit_and_nothing_is_eager_after_warm_up(folder, way):
    top_k, top_p = WAYS[way]
    trainer = make(folder, top_k=top_k, top_p=top_p)
    for step in range(3):
        results = trainer.ppo_step(PROMPTS)
        assert results["first_ratio_error"] < (
            1e-5 if way == "top-p" else 1e-30
        )  # sums over masked rows round by shape
        engine = trainer.models.policy.backbone.generation
        if step == 0:
            before = engine.eager_steps
    assert engine.eager_steps == before
    assert engine.replays > 0


def test_the_kl_starts_at_zero(folder):
    given = {
        "dtype": "bfloat16",
        "top_k": 0,
        "top_p": 1.0,
        "rewards": vowels,
        "max_new_tokens": 8,
        "compile_layers": False,
    }
    results = PPOTrainer(PPOConfig(folder, **given)).ppo_step(PROMPTS)
    assert results["kl"] == 0
    assert results["kl_exact"] == 0


@pytest.fixture
def compile_small(monkeypatch):
    """`compile_layers` compiles the tiny models too."""
    monkeypatch.setattr(functions, "COMPILED_FROM", 0)


@pytest.mark.parametrize(("name", "compiled"), [("qwen3", False), ("gpt2", True)])
def test_the_same_run_twice_gives_the_same_bits(name, compiled, tiny_folders, compile_small):
    runs = []
    for _ in range(2):
        trainer = make(tiny_folders[name], compile_layers=True)  # only where there are no kernels
        for _ in range(2):
            trainer.ppo_step(PROMPTS)
        assert trainer.models.policy.backbone.decoder.compiled == compiled
        runs.append(weights(trainer))
    assert difference(*runs) == 0


@pytest.mark.parametrize(
    ("model", "change"),
    [
        ("qwen3", {"micro_batch_tokens": 256}),
        ("gpt2", {"compile_layers": True}),
        ("qwen3", {"gradient_checkpointing": True}),
    ],
)
def test_what_must_change_nothing_changes_nothing_but_rounding(model, change, tiny_folders, compile_small):
    folder = tiny_folders[model]
    pairs = make(folder).ppo_step(PROMPTS)["sa_pairs"]  # the same tokens for both: rounding may flip a choice
    results = [make(folder, **given).model_trainer._minibatch(pairs) for given in ({}, change)]
    for name in ("policy_loss", "value_loss", "grad_norm_policy", "grad_norm_value"):
        near = 1e-2 if name == "policy_loss" else 1e-3  # of the order of whitened advantages, which are 1
        assert float(results[1][name]) == pytest.approx(float(results[0][name]), rel=0.03, abs=near), name


def test_hidden_states_and_gradients_are_as_close_to_float32_as_those_of_transformers(folder):
    fast, plain, exact = make(folder), make(folder, engine="plain"), in_float32(folder)
    tokens = fast.generator.sample(PROMPTS)
    found = []
    torch.manual_seed(0)
    direction = torch.randn_like(exact.models.policy.response_hidden(tokens))
    for trainer in (fast, plain, exact):
        policy = trainer.models.policy
        with policy.training():
            states = policy.response_hidden(tokens).float()
            (states * direction).mean().backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
        found.append((states.detach(), gradients))
    for ours, theirs, true in zip(*found, strict=True):
        assert distance(ours, true) < 2 * distance(theirs, true) + 2**-8  # one rounding of bfloat16


def in_float32(folder):
    return make(folder, engine="plain", dtype="float32")


def distance(one, other):
    return float((one - other).norm() / other.norm())


def test_greedy_tokens_are_the_most_likely_ones(folder):
    fast, plain, exact = make(folder), make(folder, engine="plain"), in_float32(folder)
    greedy = Sampling(8, 1.0, 1, 1.0, (), 0, 0)
    tokens = fast.models.policy.generate(fast.generator.read_prompts(PROMPTS), greedy)
    true, theirs = (trainer.models.policy.response_logits(tokens).float() for trainer in (exact, plain))
    noise = (theirs - true).abs().max()  # transformers' own in bfloat16
    chosen = true.gather(2, tokens.response_ids.unsqueeze(2)).squeeze(2)
    assert (true.max(2).values - chosen).max() < 4 * noise  # two logits, each with at most twice the noise
    assert (true.max(2).values - true.median(2).values).min() > 4 * noise  # so it could have failed


def test_slots_and_moving_together_cannot_be_seen_in_the_samples(qwen, monkeypatch):
    trainer = make(qwen)
    prompts = trainer.generator.read_prompts(PROMPTS)
    free = trainer.models.policy.generate(prompts, Sampling(24, 1.0, 0, 1.0, (), 0, 0))
    eos = tuple(free.response_ids[:, 2:9].flatten().unique()[:24].tolist())
    sampling = Sampling(24, 1.0, 0, 1.0, eos, 0, 0)
    whole = trainer.models.policy.generate(prompts, sampling)
    assert len(set(whole.sizes.tolist())) > 2
    monkeypatch.setattr(slot_schedule, "STRIDE", 1)
    trainer.models.policy.backbone._generation = None
    trainer.models.policy.backbone.generation.max_slots = 4
    cut = trainer.models.policy.generate(prompts, sampling)
    same = (cut.response_ids == whole.response_ids[:, : cut.response_ids.shape[1]]).all(1).float().mean()
    assert same > 0.8  # the same noise; products of another size may round a near tie the other way


def test_a_decode_step_does_not_depend_on_the_number_of_slots_or_their_order(qwen):
    decoder = make(qwen).models.policy.backbone.decoder
    decoder.load("policy")
    torch.manual_seed(0)
    slots = new_slots(64, 1152, decoder, torch.device("cuda"))
    for cache in (*slots.keys, *slots.values):
        cache.normal_()
    slots.tokens.random_(200)
    slots.lengths.random_(1150)
    step = FewRowsDecoder(decoder, slots)

    def logits(count):
        return step.logits(step(count))

    with torch.no_grad():
        all_of_them = logits(64)
        for count in (8, 12, 16, 20, 28, 32, 40, 64):
            assert torch.equal(logits(count), all_of_them[:count])
        order = torch.randperm(64).tolist()
        slots.move(list(zip(order, range(64), strict=True)), 64, 0)
        assert torch.equal(logits(64), all_of_them[order])


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_samples_depend_neither_on_the_batch_nor_on_their_place_in_it(name, tiny_folders):
    trainer = make(tiny_folders[name])
    texts = [f"prompt number {i} " * (1 + i % 9) for i in range(64)]
    policy, sampling = trainer.models.policy, Sampling(40, 1.0, 0, 1.0, tuple(range(0, 200, 9)), 0, 0)

    def sample(chosen):
        tokens = policy.generate(trainer.generator.read_prompts([texts[i] for i in chosen]), sampling)
        pairs = zip(tokens.response_ids, tokens.mask, tokens.sampled_logprobs, strict=True)
        return {i: (ids[m].tolist(), own[m].tolist()) for i, (ids, m, own) in zip(chosen, pairs, strict=True)}

    whole, generator = sample(range(64)), torch.Generator().manual_seed(0)
    assert len({len(ids) for ids, _ in whole.values()}) > 5
    for chosen in (range(8), range(40, 48), torch.randperm(64, generator=generator).tolist(), [63]):
        assert sample(chosen) == {i: whole[i] for i in chosen}
    policy.backbone.release_generation()
    policy.backbone.generation.max_slots = 10  # slots are given to waiting prompts
    assert sample(range(64)) == whole


def test_a_capacity_that_grew_does_not_come_between_scoring_and_training(qwen):
    """Ragged responses whose passes differ from step to step, after a batch larger than any of them."""
    trainer = make(qwen, micro_batch_tokens=512, minibatch_size=4, ppo_epochs=2, max_new_tokens=60)
    trainer.models.eos_ids = tuple(range(0, 200, 15))
    longer = trainer.generator.sample([f"another prompt {i} " * 10 for i in range(12)])
    for step in range(6):
        results = trainer.ppo_step([f"prompt number {i} {step} " * (1 + (i + step) % 5) for i in range(12)])
        assert results["first_ratio_error"] == 0
        trainer.models.policy.response_hidden(longer)  # was not planned: grows a capacity of its own
    assert len({key.capacity for key in trainer.models.policy.backbone.decoder.graphed_passes._passes}) > 1


def test_real_lack_of_memory_splits_the_batch_and_the_step_goes_on(qwen):
    trainer = make(qwen, micro_batch_tokens=100_000, minibatch_size=12)
    free, _ = torch.cuda.mem_get_info()
    trainer.models.micro_batches.run(lambda: None, 1)
    calls = []

    def work():
        calls.append(trainer.models.micro_batches.tokens)
        if len(calls) == 1:
            torch.empty(free * 4, dtype=torch.uint8, device="cuda")
        return 1

    assert trainer.models.micro_batches.run(work, 10) == 1
    assert calls == [100_000, 50_000]


@pytest.mark.parametrize(
    "settings", [{}, {"value_model": "policy"}, {"lora_r": 0}], ids=["adapters", "one trunk", "full"]
)
def test_a_run_that_died_goes_on_to_the_same_bits(qwen, tmp_path, settings):
    def trainer(name):
        given = {
            "batch_size": 4,
            "minibatch_size": 2,
            "max_new_tokens": 8,
            "checkpoint_every": 1,
            "rewards": vowels,
        }
        given |= {"dtype": "float32" if settings.get("lora_r") == 0 else "bfloat16", "compile_layers": False}
        return PPOTrainer(PPOConfig(qwen, run_dir=str(tmp_path), run_name=name, **given | settings))

    whole = trainer("whole")
    whole.train(PROMPTS, 2)
    with pytest.raises(Crash):
        crash_at(trainer("died"), 4).train(PROMPTS, 2)
    again = trainer("died")
    again.train(PROMPTS, 2, resume=True)
    assert difference(weights(whole), weights(again)) == 0
    assert lines(tmp_path / "whole") == lines(tmp_path / "died")
