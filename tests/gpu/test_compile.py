"""Every Triton kernel compiles for GPUs that are not here, and fits their shared memory.

Needs Triton but no GPU (`make test-kernels`): a stand-in for Triton's driver names the GPU, a launch compiles
its kernel and does not run it, and tensors are on torch's device without memory.
"""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

from proxima.core.linear4bit import Linear4bit  # noqa: E402
from proxima.core.nf4 import NF4Weight  # noqa: E402
from proxima.core.sampling import Sampling  # noqa: E402
from proxima.runtime.engine import kernels  # noqa: E402
from proxima.runtime.engine.decoder import Decoder  # noqa: E402
from proxima.runtime.engine.few_rows_decoder import FewRowsDecoder  # noqa: E402
from proxima.runtime.engine.generation_slots import new_outputs, new_slots  # noqa: E402
from proxima.runtime.engine.kernels import few_rows_kernels, nf4_kernels  # noqa: E402

META, HALF = torch.device("meta"), torch.bfloat16
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 120: 99}
"""Compute capability: KiB of shared memory that a program may use. A100, RTX 3090, RTX 4090, H200, RTX 5090."""
SHAPES = {
    "0.6B": ("qwen3", {"head_dim": 128}, 1024, 16, 8, 3072),
    "8B": ("qwen3", {"head_dim": 128}, 4096, 32, 8, 12288),
    "SmolLM2": ("llama", {}, 576, 9, 3, 1536),
}
QUANTIZED = {"8B in 4 bits": SHAPES["8B"]}
WIDEST = ("0.6B", "8B in 4 bits")  # between them they have every kernel
CASES = [
    (capability, shape)
    for capability in SHARED
    for shape in ([*SHAPES, *QUANTIZED] if capability in (89, 90) else WIDEST)
]


class NoGpu:
    """Answers what Triton asks of a driver before it compiles."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability  # a kernel keeps what was compiled by device

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(request, monkeypatch, tmp_path):
    """Name of a kernel -> what its launches were compiled to, while launches only compile."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found, launch = {}, JITFunction.run

    def compile_only(kernel, *given, grid, warmup, **options):
        made = launch(kernel, *given, grid=grid, warmup=True, **options)
        found.setdefault(kernel.__name__, []).append(made)
        return made

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoGpu(request.param))
    return found


def decoder_of(kind, more, hidden, heads, kv_heads, inner, quantized=False):
    """One layer in a model's shape, with adapters of rank 16 on it."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        num_hidden_layers=1,
        vocab_size=1000,
        **more,
    )
    with META:
        network = AutoModelForCausalLM.from_config(config, dtype=HALF)
        for parameter in network.parameters():
            parameter.requires_grad = False
        if quantized:
            quantize_layers(network)
        adapted = inject_adapter_in_model(LoraConfig(r=16, target_modules="all-linear"), network)
    return Decoder(adapted)


def quantize_layers(network):
    """NF4 codes without values in place of the layers' matrices."""
    for name, layer in list(network.model.layers.named_modules()):
        if isinstance(layer, torch.nn.Linear):
            inputs, outputs = layer.in_features, layer.out_features
            blocks = inputs * outputs // 64
            weight = NF4Weight(
                codes=no_matter(inputs * outputs // 2, kind=torch.uint8),
                absmax=no_matter(blocks, kind=torch.uint8),
                shape=(outputs, inputs),
                dtype=HALF,
                nested_absmax=no_matter(blocks // 256, kind=torch.float32),
                nested_map=no_matter(256, kind=torch.float32),
                offset=no_matter(kind=torch.float32),
            )
            packed = Linear4bit(inputs, outputs, bias=False, device=META)
            packed.set_weight(weight)
            network.model.layers.set_submodule(name, packed)


def no_matter(*shape, kind=HALF):
    return torch.empty(shape, dtype=kind, device=META)


def calls_over_the_vocabulary(size=151_936):
    logits, ids, row = no_matter(64, size), no_matter(64, kind=torch.long), no_matter(64, kind=torch.float32)
    return [
        lambda: kernels.stats(logits, ids, 1.0),
        lambda: kernels.pair(logits, logits, (row, row), 1.0),
        lambda: kernels.slope(logits, ids, row, 1.0),
        lambda: kernels.slope(logits, ids, row, 1.0, row),
    ]


def calls_of_gpt2():
    new, cache = no_matter(8, 12, 64), no_matter(8, 256, 12, 64)
    return [
        lambda: kernels.decode_attention(
            new, new, new, cache, cache, no_matter(8, kind=torch.int32), scale=0.125
        )
    ]


def calls_of_sampling(slots):
    """What writes a step's tokens."""
    sampling = Sampling(16, 1.0, 0, 1.0, (1, 2, 3), 0, 0)
    outputs, count = new_outputs(64, sampling, 1000, META, None), 8
    drawn = no_matter(count, kind=torch.long), no_matter(count, kind=torch.float32)
    return [lambda: kernels.advance(drawn, slots, outputs, sampling.max_new_tokens)]


def needed(compiled):
    """Bytes of shared memory, by kernel."""
    return {name: max(made.metadata.shared for made in all_made) for name, all_made in compiled.items()}


@pytest.mark.parametrize(
    ("compiled", "shape"),
    CASES,
    indirect=["compiled"],
    ids=[f"{shape}-sm_{number}" for number, shape in CASES],
)
def test_every_kernel_compiles_and_fits_the_shared_memory(shape, compiled, request):
    decoder = decoder_of(*{**SHAPES, **QUANTIZED}[shape], quantized=shape in QUANTIZED)
    slots = new_slots(64, 2048, decoder, META)
    rows = FewRowsDecoder(decoder, slots)
    calls = [*rows.kernels(8), *rows.kernels(64), *kernels.training_calls(decoder)]
    if shape in QUANTIZED:
        packed = [part.quantized for part in decoder.blocks[0].projections]
        calls += [partial(kernels.fill, one, no_matter(len(one.up), one.inputs + 64)) for one in packed]
    if shape == "0.6B":
        calls += [*calls_over_the_vocabulary(), *calls_of_gpt2(), *calls_of_sampling(slots)]
    for call in calls:
        call()
    assert len(compiled) >= 12
    limit = SHARED[request.node.callspec.params["compiled"]] * 1024
    assert {name: bytes for name, bytes in needed(compiled).items() if bytes > limit} == {}


@pytest.mark.parametrize("compiled", SHARED, indirect=True, ids="sm_{}".format)
def test_ways_of_cutting_a_product_that_no_weight_of_these_models_has(compiled, request, monkeypatch):
    """Codes looked up by byte permutation, in one part and in several; unquantised products in several parts;
    scales that are not quantised themselves."""
    decoder = decoder_of(*SHAPES["8B"], quantized=True)
    block, limit = decoder.blocks[0], SHARED[request.node.callspec.params["compiled"]] * 1024
    qkv, up = (part.quantized for part in (block.qkv, block.up))
    for splits, weight, gated in ((1, up, True), (4, qkv, False)):
        made = nf4_kernels.Tiling(64, 4, splits, stages=2, by_bytes=True)
        monkeypatch.setattr(nf4_kernels, "tiling", lambda *given, made=made: made)
        kernels.nf4_product(no_matter(8, weight.inputs + weight.up.shape[1]), weight, None, gated=gated)
    assert all("prmt" in made.asm["ptx"] for made in compiled["_product"])
    plain = replace(qkv, absmax=no_matter(len(qkv.absmax), kind=torch.float32), nested=None, offsets=None)
    kernels.fill(plain, no_matter(len(plain.up), plain.inputs + plain.up.shape[1]))
    monkeypatch.setattr(few_rows_kernels, "blocks", lambda *shape: few_rows_kernels.Blocks(32, 64, 4, 2))
    kernels.few_rows_product(no_matter(8, 4096), no_matter(4096, 4096))
    assert {name: len(made) for name, made in compiled.items()} == {
        "_product": 3,
        "_add_parts": 2,
        "_fill": 1,
    }
    assert {name: bytes for name, bytes in needed(compiled).items() if bytes > limit} == {}


@pytest.mark.parametrize("compiled", SHARED, indirect=True, ids="sm_{}".format)
def test_products_with_adapters_of_any_rank_fit_the_shared_memory(compiled, request):
    limit = SHARED[request.node.callspec.params["compiled"]] * 1024
    for rank in (32, 64, 256):
        given = no_matter(64, 4096), no_matter(4096, 4096 + rank), None, no_matter(rank, 4096)
        kernels.few_rows_product(*given)
    assert len(compiled["_product"]) == 3
    assert needed(compiled)["_product"] <= limit
