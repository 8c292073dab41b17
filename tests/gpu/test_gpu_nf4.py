"""A base in 4 bits on a GPU: decoded bits, products whose rows do not depend on the batch, exact first ratios.

`fourbit_figures.py` measures times and the memory of an 8B model.
"""

import pytest
import torch

from proxima.config import PPOConfig
from proxima.models import Sampling
from proxima.ppo_trainer import PPOTrainer
from tests.gpu.fourbit_figures import LAYER, projection
from tests.helpers import difference, shake, weights

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from proxima.runtime.engine.kernels import nf4_kernels, nf4_product

PROMPTS = [f"prompt number {i} " * (1 + i % 5) for i in range(12)]


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("name", LAYER)
def test_filling_gives_the_bits_of_dequantising(name, nested):
    joined, wanted = projection(name, nested)
    assert torch.equal(joined.fill(), wanted)


@pytest.mark.parametrize("name", LAYER)
def test_a_row_of_a_product_does_not_depend_on_the_batch(name):
    joined, weight = projection(name)
    inputs, gated = joined.inputs, name == "up"
    x = torch.randn(64, inputs, device="cuda").bfloat16()
    down = 0.02 * torch.randn(weight.shape[1] - inputs, inputs, device="cuda").bfloat16()
    padded = torch.cat([x, x @ down.t()], 1)
    exact = padded.double() @ weight.double().t()
    if gated:
        opening, second = exact.chunk(2, -1)
        exact = torch.nn.functional.silu(opening) * second
    calls = [lambda rows: nf4_product(padded[rows], joined, None, gated=gated)]
    if not gated:
        calls.append(lambda rows: nf4_product(x[rows], joined, None, down))
    for call in calls:
        out = call(slice(None))
        torch.testing.assert_close(out.double(), exact, rtol=3e-2, atol=3e-2)
        for rows in (slice(1), slice(8), slice(16), slice(17), [63, 5, 0, 31]):
            assert torch.equal(call(rows), out[rows])
        assert torch.equal(call(slice(None)), out)


@pytest.mark.parametrize("name", LAYER)
def test_codes_looked_up_by_byte_permutation_give_the_same_bits(name, monkeypatch):
    joined, weight = projection(name)
    chosen = nf4_kernels.Tiling(64, 4, 1, by_bytes=True)
    monkeypatch.setattr(nf4_kernels, "tiling", lambda *given: chosen)
    some = torch.randperm(joined.inputs, device="cuda")[:64]
    x = torch.zeros(64, weight.shape[1], device="cuda", dtype=torch.bfloat16)
    x[torch.arange(64, device="cuda"), some] = 1  # so that outputs are weights
    assert torch.equal(nf4_product(x, joined, None), weight[:, some].t())


def make(folder, **settings):
    given = {"max_new_tokens": 12, "batch_size": 12, "minibatch_size": 6, "dtype": "bfloat16", "top_k": 0}
    given |= {"top_p": 1.0, "rewards": lengths, "quantize": "nf4"}
    return shake(PPOTrainer(PPOConfig(folder, **given | settings)), 0.02)


def lengths(prompts, texts):
    return [float(len(text) % 7) for text in texts]


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_the_first_ratio_is_1_and_checkpointing_and_a_second_run_give_the_same_bits(name, tiny_folders):
    found = []
    for on in (False, True, False):
        trainer = make(tiny_folders[name], gradient_checkpointing=on)
        assert trainer.models.policy.backbone.decoder.blocks[0].qkv.quantized is not None
        errors = [trainer.ppo_step(PROMPTS)["first_ratio_error"] for _ in range(3)]
        assert errors == [0, 0, 0]
        assert trainer.models.policy.backbone.generation._few_rows is not None
        found.append(weights(trainer))
    assert difference(found[0], found[1]) == 0
    assert difference(found[0], found[2]) == 0


@pytest.mark.parametrize("tokens", [64, 100, 256, 1000])
def test_the_first_ratio_is_1_where_the_last_chunk_of_logits_is_not_full(tokens, tiny_folders):
    """Responses of many lengths: passes of scoring and of training have other numbers of tokens."""
    trainer = make(tiny_folders["qwen3"], micro_batch_tokens=tokens, minibatch_size=4, ppo_epochs=2)
    assert trainer.models.micro_batches.chunk == tokens // 8
    trainer.models.eos_ids = tuple(range(0, 200, 7))
    for _ in range(3):
        results = trainer.ppo_step(PROMPTS)
        assert results["first_ratio_error"] == 0


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_fast_and_reference_path_agree(name, tiny_folders):
    fast, plain = (make(tiny_folders[name], engine=engine) for engine in ("auto", "plain"))
    rounded, exact = (
        make(tiny_folders[name], engine="plain", quantize="none", dtype=dtype)
        for dtype in ("bfloat16", "float32")
    )
    sampling = Sampling(12, 1.0, 0, 1.0, (), 0, 0)
    tokens = fast.models.policy.generate(fast.generator.read_prompts(PROMPTS), sampling)
    ours, theirs, own, true = (
        one.models.policy.response_logits(tokens).float() for one in (fast, plain, rounded, exact)
    )
    noise = float((own - true).norm() / true.norm())  # of bfloat16 alone, without 4 bits
    assert float((ours - theirs).norm() / theirs.norm()) < 3 * noise  # ours at most twice, theirs once
