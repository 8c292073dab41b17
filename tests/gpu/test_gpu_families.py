"""Every family of the fast engine on a GPU: in float32 equal to transformers, in bfloat16 as close to float32
as transformers' own bfloat16."""

import dataclasses

import pytest
import torch

from proxima.models import PolicyModel, Sampling
from proxima.runtime.engine import pack_mask
from proxima.runtime.engine.families import FAMILIES
from tests.runtime.test_engine_families import CASES, left_padded, longrope, make_backbones, make_prompts
from tests.runtime.test_experts import forced_logits

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

DEVICE = "cuda"
ROUNDING = 1e-3  # logits of up to 10 in float32, by another library's products
BF16_NOISE = 2.0**-8  # one rounding of bfloat16, relative
MIXTURES = [case for case, (model_type, _) in CASES.items() if FAMILIES[model_type].experts]
DENSE = [case for case in CASES if case not in MIXTURES]


def sizes(case):
    """Heads of 16 values, the smallest that the kernels take."""
    if case.startswith("olmoe"):  # its head size is not a setting
        return {"num_attention_heads": 2, "num_key_value_heads": 1}
    if case == "phi3 longrope":
        return {"rope_parameters": longrope(16), "num_attention_heads": 2, "num_key_value_heads": 1}
    return {"n_head": 2} if case.startswith("gpt2") else {"head_dim": 16, "num_attention_heads": 2,
                                                          "num_key_value_heads": 1}  # fmt: skip


def pass_and_gradients(backbone):
    """Logits of all tokens and the adapter's gradients, in float32 on the CPU."""
    prompts = make_prompts()
    ids, mask = prompts.prompt_ids.to(DEVICE), prompts.prompt_mask.to(DEVICE)
    layout = pack_mask(mask)
    layout = dataclasses.replace(layout, read=torch.arange(layout.total, device=DEVICE))
    parameters = backbone.adapter_parameters("policy")
    with backbone.using("policy"), torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        logits = backbone.head(backbone.hidden(ids, layout, "policy"), "policy").float()
        logits.square().mean().backward()
    gradients = torch.cat([parameter.grad.float().flatten() for parameter in parameters])
    return logits.detach().cpu(), gradients.cpu()


def distance(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_transformers(case):
    fast, plain = make_backbones(case, device=DEVICE, **sizes(case))
    (ours, our_gradients), (theirs, their_gradients) = map(pass_and_gradients, (fast, plain))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDING)
    assert distance(our_gradients, their_gradients) < ROUNDING


@pytest.mark.parametrize("case", DENSE)
def test_bfloat16_is_as_close_to_float32_as_transformers_own(case):
    """Logits, gradients, and the log-probabilities of sampled tokens; two calls replay what one captured."""
    _, exact = make_backbones(case, device=DEVICE, **sizes(case))
    fast, plain = make_backbones(case, device=DEVICE, dtype=torch.bfloat16, **sizes(case))
    expected = pass_and_gradients(exact)
    theirs = pass_and_gradients(plain)
    for _ in range(2):
        for parameter in fast.adapter_parameters("policy"):
            parameter.grad = None
        ours = pass_and_gradients(fast)
        for found, own, true in zip(ours, theirs, expected, strict=True):
            assert distance(found, true) < 2 * distance(own, true) + BF16_NOISE


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize("case", [case for case in MIXTURES if "windowed" not in case])
def test_a_mixture_with_adapters_on_attention_runs_as_a_graph(case):
    """With the same experts for all, since rounding chooses others: in bfloat16 as close to float32 as
    transformers' own, and the same bits whatever is batched with a sequence."""
    given = {"device": DEVICE, "targets": ATTENTION, **sizes(case)}
    _, exact = make_backbones(case, **given)
    fast, plain = make_backbones(case, dtype=torch.bfloat16, **given)
    assert fast.decoder.graphed == (DEVICE == "cuda")
    ids, mask = (tensor.to(DEVICE) for tensor in left_padded())
    noise = torch.rand(*ids.shape, 2, 4, generator=torch.Generator().manual_seed(7))
    forced = noise.topk(fast.network.config.num_experts_per_tok).indices.to(DEVICE, torch.uint8)
    expected, theirs = (forced_pass(backbone, ids, mask, forced) for backbone in (exact, plain))
    for _ in range(2):
        ours = forced_pass(fast, ids, mask, forced)
        for found, own, true in zip(ours, theirs, expected, strict=True):
            assert distance(found, true) < 2 * distance(own, true) + BF16_NOISE
    with torch.no_grad():
        whole = fast.hidden(ids, pack_mask(mask), "policy", forced)
        for row in range(len(ids) if DEVICE == "cuda" else 0):
            one = slice(row, row + 1)
            alone = fast.hidden(ids[one], pack_mask(mask[one]), "policy", forced[one])
            assert torch.equal(alone[0], whole[row])


def forced_pass(backbone, ids, mask, experts):
    """`pass_and_gradients` with these experts."""
    layout = pack_mask(mask)
    layout = dataclasses.replace(layout, read=torch.arange(layout.total, device=DEVICE))
    parameters = backbone.adapter_parameters("policy")
    with backbone.using("policy"), torch.enable_grad():
        for parameter in parameters:
            parameter.grad = None
            parameter.requires_grad_(True)
        if backbone.decoder is not None:
            logits = backbone.head(backbone.hidden(ids, layout, "policy", experts), "policy")
        else:
            rows = zip(ids, mask, experts, strict=True)
            logits = torch.cat([forced_logits(backbone.network, a[real], b[real]) for a, real, b in rows])
        logits.float().square().mean().backward()
    gradients = torch.cat([parameter.grad.float().flatten() for parameter in parameters])
    return logits.detach().float().cpu(), gradients.cpu()


@pytest.mark.parametrize("targets", ["all-linear", ATTENTION], ids=["experts", "attention"])
@pytest.mark.parametrize("case", MIXTURES)
def test_what_a_mixture_sampled_is_what_it_is_scored_with(case, targets):
    """Decode steps are graphs, and the recorded experts are replayed: no token's log-probability jumps."""
    given = {"device": DEVICE, "dtype": torch.bfloat16, "targets": targets}
    fast, _ = make_backbones(case, **given, **sizes(case))
    prompts = make_prompts().map(lambda tensor: tensor.to(DEVICE))
    engine = fast.generation
    for step in range(2):
        tokens = engine.generate(prompts, Sampling(9, 1.0, 0, 1.0, (), 0, step), "policy")
    assert (engine.replays > 0) == engine.on_gpu
    assert (tokens.experts.response[:, :-1] < 4).all()
    policy = PolicyModel(fast, "policy")
    with torch.no_grad():
        scored = policy.response_logits(tokens).float().log_softmax(-1)
    scored = scored.gather(-1, tokens.response_ids.unsqueeze(-1)).squeeze(-1)
    assert float((scored - tokens.sampled_logprobs).abs().mean()) < 16 * BF16_NOISE


@pytest.mark.parametrize("case", DENSE)
def test_sampled_log_probabilities_are_those_of_transformers(case):
    fast, plain = make_backbones(case, device=DEVICE, dtype=torch.bfloat16, **sizes(case))
    _, exact = make_backbones(case, device=DEVICE, **sizes(case))
    prompts = make_prompts()
    moved = {name: getattr(prompts, name).to(DEVICE) for name in ("prompt_ids", "prompt_mask", "keys")}
    engine = fast.generation
    for step in range(2):
        sampling = Sampling(9, 1.0, 0, 1.0, (), 0, step)
        sampled = engine.generate(dataclasses.replace(prompts, **moved), sampling, "policy")
    if engine.on_gpu:
        assert engine.replays > 0
    gaps = {"ours": [], "theirs": []}
    for row in range(len(prompts.prompts)):
        prompt = moved["prompt_ids"][row][moved["prompt_mask"][row]]
        response = sampled.response_ids[row]
        true, own = (alone(backbone, prompt, response) for backbone in (exact, plain))
        gaps["ours"].append(sampled.sampled_logprobs[row].float() - true)
        gaps["theirs"].append(own - true)
    ours, theirs = (float(torch.cat(gap).abs().mean()) for gap in gaps.values())
    assert ours < 2 * theirs + 4 * BF16_NOISE


@torch.no_grad()
def alone(backbone, prompt, response):
    """Log-probabilities (R,) of a response by transformers' own pass over one sequence."""
    with backbone.using("policy"):
        logits = backbone.network(input_ids=torch.cat([prompt, response])[None]).logits[
            0, len(prompt) - 1 : -1
        ]
    return logits.float().log_softmax(-1).gather(1, response[:, None])[:, 0]
