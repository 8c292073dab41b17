"""The experts that a rollout's tokens went to are recorded, and the policy's scoring and training replay
them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proxima.core.recorded_experts import expert_dtype, unrecorded
from proxima.core.types import Tokens
from proxima.models import PolicyModel, Sampling
from proxima.ppo_trainer import PPOTrainer
from proxima.ppo_trainer.process_shares import join_tokens
from proxima.runs import read_bundle, write_bundle
from proxima.runtime.distributed import Processes
from proxima.runtime.engine import experts, families
from proxima.tools.replay import redacted, replay_step
from proxima.world.tiny_models import byte_tokenizer
from tests.environments.games import Parity
from tests.families.networks import tiny_network
from tests.helpers import LOGPROB_ROUNDING, Crash, crash_at, difference, rounding, shake, weights
from tests.runtime.test_engine_families import (
    LENGTHS,
    ROUNDING,
    every_position,
    left_padded,
    make_backbones,
    make_prompts,
)
from tests.tools.replay_recipe import PROMPTS, record

ROOT = Path(__file__).parents[2]
NONE = unrecorded(torch.uint8)
MIXTURES = ["olmoe", "qwen3_moe"]
EXPERTS, PER_TOKEN = 4, 2
NEAR_TIE = 0.02  # factor of router weights: the probabilities of experts differ by a few percent
BF16 = 2.0**-8  # one rounding of bfloat16, relative


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A folder with a mixture of experts whose router is never sure."""
    folder = tmp_path_factory.mktemp("mixture")
    network = tiny_network("qwen3_moe", norm_topk_prob=True)
    for layer in network.model.layers:
        layer.mlp.gate.weight.data *= NEAR_TIE
    network.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def chosen_alone(network, ids):
    """The experts (T, L, K) of one sequence by transformers' own pass."""
    found = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, given, output: found.append(output[2]))
        for layer in network.model.layers
    ]
    with torch.no_grad():
        network(input_ids=ids[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)


@pytest.mark.parametrize("case", MIXTURES)
def test_the_recorded_experts_are_those_that_transformers_routes_to(case):
    fast, plain = make_backbones(case)
    prompts = make_prompts()
    fast.generation.max_slots = 3  # slots are used again
    for step in range(2):  # and buffers
        tokens = fast.generation.generate(prompts, Sampling(7, 1.0, 0, 1.0, (), 0, step), "policy")
    recorded = tokens.experts
    assert recorded.prompt.dtype == recorded.response.dtype == torch.uint8
    assert (recorded.prompt[~tokens.prompt_mask] == NONE).all()
    assert (recorded.response[:, -1] == NONE).all()  # no pass has read it
    with plain.using("policy"):
        for row, length in enumerate(LENGTHS):
            ids = torch.cat([tokens.prompt_ids[row][tokens.prompt_mask[row]], tokens.response_ids[row]])
            expected = chosen_alone(plain.network, ids).sort(-1).values[:-1]
            found = recorded.whole[row, -len(ids) :].long().sort(-1).values[:-1]
            assert torch.equal(found[:, :-1], expected[:, :-1])
            assert torch.equal(found[length - 1 :], expected[length - 1 :])
            assert (found[: length - 1, -1] == NONE).all()  # nothing reads the last layer there


@pytest.mark.parametrize("case", ["olmoe normalised", *MIXTURES])
def test_given_experts_are_used_with_the_router_s_current_weights(case):
    """Logits and gradients are those of transformers with the same experts forced upon its routers."""
    (fast, plain), (ids, mask) = make_backbones(case), left_padded()
    per_token = fast.network.config.num_experts_per_tok
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand(*ids.shape, 2, EXPERTS, generator=generator)
    forced = noise.topk(per_token).indices.to(torch.uint8)
    layout, results = every_position(mask), []
    for backbone in (fast, plain):
        with backbone.using("policy"):
            for parameter in backbone.adapter_parameters("policy"):
                parameter.requires_grad_(True)
            if backbone is fast:
                logits = fast.head(fast.hidden(ids, layout, "policy", forced), "policy")
            else:
                rows = [
                    forced_logits(plain.network, ids[row][mask[row]], forced[row][mask[row]])
                    for row in range(len(LENGTHS))
                ]
                logits = torch.cat(rows)
            logits.square().mean().backward()
        gradients = {name: p.grad for name, p in backbone.network.named_parameters() if p.grad is not None}
        results.append((logits.detach(), gradients))
    (ours, our_gradients), (theirs, their_gradients) = results
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING)
    assert any("mlp.gate" in name for name in our_gradients)
    for name, gradient in their_gradients.items():
        atol = 1e-4 * float(gradient.abs().max()) + 1e-7
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-3, atol=atol, msg=name)
    own = fast.head(fast.hidden(ids, layout, "policy"), "policy")
    assert (own - ours).abs().max() > 100 * ROUNDING  # other experts are another function


def forced_logits(network, ids, forced):
    def replace_experts(layer):
        def hook(module, given, output):
            logits, chosen = output[0], forced[:, layer].long()
            probabilities = logits.softmax(-1, dtype=torch.float32).gather(1, chosen)
            total = probabilities.sum(-1, keepdim=True) if network.config.norm_topk_prob else 1
            return logits, (probabilities / total).to(logits.dtype), chosen

        return hook

    hooks = [
        layer.mlp.gate.register_forward_hook(replace_experts(number))
        for number, layer in enumerate(network.model.layers)
    ]
    logits = network(input_ids=ids[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits


def test_where_nothing_is_recorded_the_router_chooses():
    (fast, _), (ids, mask) = make_backbones("qwen3_moe"), left_padded()
    layout = every_position(mask)
    nothing = torch.full((*ids.shape, 2, PER_TOKEN), NONE, dtype=torch.uint8)
    both = [fast.hidden(ids, layout, "policy", given) for given in (None, nothing)]
    assert torch.equal(*both)


def noisy_routers(monkeypatch):
    """Routers whose choice, but nothing else, is made with the noise of bfloat16, another at each call."""
    generator, plain = torch.Generator().manual_seed(11), experts.likeliest

    def noisy(probabilities, count):
        noise = torch.randn(probabilities.shape, generator=generator)
        return plain(probabilities * (1 + BF16 * noise), count)

    monkeypatch.setattr(experts, "likeliest", noisy)


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"value_model": "policy"}])
def test_replay_keeps_the_first_ratio_at_1_where_rounding_would_choose_other_experts(
    mixture, make_config, monkeypatch, settings
):
    errors = {}
    for replays in (True, False):
        with monkeypatch.context() as patch:
            noisy_routers(patch)
            patch.setattr(PolicyModel, "replays_experts", replays)
            trainer = shake(PPOTrainer(make_config(model_name=mixture, lora_r=2, **settings)))
            assert trainer.models.policy.backbone.decoder is not None
            results = trainer.ppo_step(PROMPTS)
            errors[replays] = results["first_ratio_error"], results["sampling_gap"]
    assert errors[True][0] == 0
    assert errors[True][1] < 10 * LOGPROB_ROUNDING  # sampled with the experts that it is scored with
    assert errors[False][0] > 0.01
    assert errors[False][1] > 0.001


def test_the_reference_and_a_value_model_of_its_own_route_by_themselves(mixture, make_config):
    trainer = shake(PPOTrainer(make_config(model_name=mixture, lora_r=2)))
    tokens = trainer.generator.sample(PROMPTS)
    others = tokens.experts.map(lambda part: (part + 1) % EXPERTS)
    moved = replace(tokens, experts=others)
    models = trainer.models
    with torch.no_grad():
        same = {
            role: torch.equal(getattr(models, role).response_hidden(tokens),
                              getattr(models, role).response_hidden(moved))
            for role in ("policy", "sft", "value")
        }  # fmt: skip
    assert same == {"policy": False, "sft": True, "value": True}


@pytest.mark.parametrize("targets", ["all-linear", "q_proj,v_proj"])
def test_a_whole_step_is_the_same_on_both_paths(mixture, make_config, targets):
    """In one update: after it the reference path routes anew."""
    settings = {"model_name": mixture, "lora_r": 2, "lora_targets": targets, "lora_dropout": 0.0}
    settings |= {"ppo_epochs": 1, "minibatch_size": len(PROMPTS)}
    both = [shake(PPOTrainer(make_config(**settings, engine=engine))) for engine in ("auto", "plain")]
    assert [trainer.models.policy.backbone.decoder is None for trainer in both] == [False, True]
    results = [trainer.ppo_step(PROMPTS) for trainer in both]
    assert results[0]["generated_texts"] == results[1]["generated_texts"]
    for name in ("kl", "policy_loss", "value_loss", "entropy", "grad_norm_policy", "grad_norm_value"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-3, abs=1e-6)
    assert results[0]["first_ratio_error"] < 1e-5
    assert difference(*map(weights, both)) < rounding(both[1])


def test_a_recorded_step_holds_the_experts_and_replays_to_the_same_bits(mixture, tmp_path, monkeypatch):
    bundle, _ = record(mixture, lora_r=2)
    write_bundle(tmp_path / "b", bundle.facts, bundle.tensors)
    read = read_bundle(tmp_path / "b")
    shapes = [read.tensors[f"tokens/experts_{part}"].shape[2:] for part in ("prompt", "response")]
    assert shapes == [(2, PER_TOKEN)] * 2
    assert replay_step(read).comparison.sentence == "the same bits in all 11 stages"
    assert not any("experts" in name for name in redacted(read).tensors)
    wrong = {
        **read.tensors,
        "tokens/experts_prompt": read.tensors["tokens/experts_prompt"].clamp(max=EXPERTS),
    }
    with pytest.raises(ValueError, match="it holds experts that the model does not have"):
        replay_step(replace(read, tensors=wrong))
    noisy_routers(monkeypatch)  # a machine that rounds otherwise
    again = replay_step(read)
    assert again.comparison.first.name == "sampled tokens"
    both = [each.tensors["scoring/logprob_policy"] for each in (read, again.recomputed)]
    assert torch.equal(*both)


def test_a_killed_run_resumes_bit_exactly(mixture, make_config, tmp_path):
    settings = {"model_name": mixture, "lora_r": 2, "batch_size": 4, "checkpoint_every": 1}
    found = []
    for killed in (False, True):
        config = make_config(**settings, run_dir=str(tmp_path / str(killed)), run_name="one")
        if killed:
            with pytest.raises(Crash):
                crash_at(PPOTrainer(config), 2).train(PROMPTS, 3)
        trainer = PPOTrainer(config)
        trainer.train(PROMPTS, 3, resume=killed)
        assert trainer.step == 3
        found.append(weights(trainer))
    assert difference(*found) == 0


def test_rows_keep_their_experts_when_batches_are_cut_and_joined():
    fast, _ = make_backbones("qwen3_moe")
    tokens = fast.generation.generate(make_prompts(), Sampling(4, 1.0, 0, 1.0, (), 0, 0), "policy")
    parts = [tokens.select(torch.tensor(rows)) for rows in ([0, 3], [1], [2])]
    assert parts[1].experts.prompt.shape[:2] == parts[1].prompt_ids.shape
    joined = Tokens.cat(parts).select(torch.tensor([0, 2, 3, 1]))
    assert torch.equal(joined.experts.whole, tokens.select(torch.arange(4)).experts.whole)
    bare = replace(parts[1], experts=None)
    assert Tokens.cat([parts[0], bare]).experts is None


class Threads(Processes):
    """Two processes that are threads."""

    def meet(self, value):
        self.said[self.rank] = value
        self.barrier.wait()
        found = list(self.said)
        self.barrier.wait()
        return found

    def all_gather(self, rows, total):
        assert rows.dtype != torch.int16, "neither gloo nor NCCL sends these"
        return torch.cat(self.meet(rows))

    def all_reduce_max(self, number):
        return max(self.meet(number))

    def all_gather_object(self, value):
        return self.meet(value)


@pytest.mark.parametrize("rows", [4, 1], ids=["two each", "one has none"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_all_processes_have_the_experts_of_all_rows(rows, dtype):
    fast, _ = make_backbones("qwen3_moe")
    prompts = make_prompts().select(torch.arange(rows))
    tokens = fast.generation.generate(prompts, Sampling(4, 1.0, 0, 1.0, (), 0, 0), "policy")
    none = unrecorded(dtype)
    wide = tokens.experts.map(lambda part: part.to(dtype).masked_fill(part == NONE, none))
    tokens = replace(tokens, experts=wide)
    barrier, said = threading.Barrier(2, timeout=60), [None, None]
    processes = [Threads(rank=rank, world_size=2) for rank in range(2)]
    for each in processes:
        each.barrier, each.said = barrier, said
    given = [
        (tokens if rows > 1 or each.rank == 1 else prompts).select(each.rows(rows)) for each in processes
    ]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda own, each: join_tokens(prompts, own, each), given, processes))
    for joined in found:
        assert torch.equal(joined.response_ids, tokens.response_ids)
        assert torch.equal(joined.experts.whole, tokens.experts.whole)


@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_episodes_of_several_turns_are_recorded_too(mixture, make_config, monkeypatch, engine):
    """Later turns read the earlier ones again, with the experts that these were sampled with."""
    noisy_routers(monkeypatch)
    settings = {"environment": Parity, "rewards": (), "max_turns": 3, "max_new_tokens": 4, "lora_r": 2}
    trainer = shake(PPOTrainer(make_config(model_name=mixture, engine=engine, **settings)))
    trainer.models.eos_ids = tuple(range(0, 200, 5))  # turns of several lengths
    results = trainer.ppo_step(PROMPTS)
    tokens = results["sa_pairs"].tokens
    assert results["episode_turns"] > 1
    assert results["first_ratio_error"] < 1e-5
    if engine == "plain":
        assert tokens.experts is None
        return
    assert results["sampling_gap"] < 1e-5
    known = (tokens.experts.response[:, :, 0] < EXPERTS).all(-1)
    sizes = tokens.sizes.unsqueeze(1)
    assert torch.equal(known, torch.arange(known.shape[1]) < sizes - 1)


def test_the_docs_show_the_declarations():
    page, source = ((ROOT / path).read_text() for path in ("docs/families.md", families.__file__))
    shown = page.split("```diff")[1].split("```")[0].splitlines()
    added = [line[1:] for line in shown if line.startswith("+") and not line.startswith("+++")]
    declared, entered = "\n".join(added[:-2]), added[-2:]
    assert declared.startswith("OLMOE = ")
    assert declared in source
    assert all(f"{line}\n" in source for line in entered)


@pytest.mark.parametrize(("count", "dtype"), [(128, torch.uint8), (255, torch.uint8), (256, torch.int16)])
def test_experts_take_as_few_bytes_as_their_number_allows(count, dtype):
    assert expert_dtype(count) == dtype
    assert count - 1 < unrecorded(dtype)
