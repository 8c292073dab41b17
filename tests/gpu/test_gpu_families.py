"""Every family of the fast engine on a GPU: in float32 equal to transformers, in bfloat16 as close to float32
as transformers' own bfloat16."""

import dataclasses

import pytest
import torch

from proxima.models import Sampling
from proxima.runtime.engine import pack_mask
from tests.runtime.test_engine_families import CASES, make_backbones, make_prompts

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

DEVICE = "cuda"
ROUNDING = 1e-3  # logits of up to 10 in float32, by another library's products
BF16_NOISE = 2.0**-8  # one rounding of bfloat16, relative


def sizes(case):
    """Heads of 16 values, the smallest that the kernels take."""
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


@pytest.mark.parametrize("case", CASES)
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


@pytest.mark.parametrize("case", CASES)
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
