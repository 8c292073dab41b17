"""NF4 against bitsandbytes: golden bytes that it made, and the library itself where it is installed."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from proxima.core.linear4bit import Linear4bit, dequantize_layers, is_quantized
from proxima.core.nf4 import CHUNK, VALUES, NF4Weight, absmax_of, dequantize, dynamic_map, nest, quantize
from tests.core.nf4_golden import DTYPES, GOLDEN, SHAPES, digest, golden_name, golden_weight

CPU = torch.device("cpu")
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
NAMES = [golden_name(shape, dtype, True).removesuffix(".nested") for shape, dtype in CASES]


@pytest.fixture(scope="module")
def golden():
    return load_file(GOLDEN / "nf4.safetensors")


def parts(golden, shape, dtype, nested):
    start = golden_name(shape, dtype, nested) + "."
    return {name.removeprefix(start): value for name, value in golden.items() if name.startswith(start)}


def test_map_of_scales(golden):
    torch.testing.assert_close(dynamic_map(CPU), golden["nested_map"], rtol=2e-7, atol=0)
    assert len(set(golden["nested_map"].tolist())) == 256


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=NAMES)
def test_plain_bytes(golden, shape, dtype):
    expected = parts(golden, shape, dtype, nested=False)
    made = quantize(golden_weight(shape, dtype), nested=False)
    assert torch.equal(made.codes, expected["codes"])
    assert torch.equal(made.absmax, expected["absmax"])
    assert list(digest(dequantize(made))) == expected["sha256"].tolist()


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=NAMES)
def test_nested_bytes(golden, shape, dtype):
    expected = parts(golden, shape, dtype, nested=True)
    made = quantize(golden_weight(shape, dtype))
    # the mean is a sum whose order depends on the machine; all that follows from it does not
    torch.testing.assert_close(made.offset, expected["offset"], rtol=1e-6, atol=0)
    if torch.equal(parts(golden, shape, dtype, nested=False)["absmax"].mean(), expected["offset"]):
        for name in ("codes", "absmax", "nested_absmax", "offset"):  # this machine adds in that order
            assert torch.equal(getattr(made, name), expected[name]), name
    made = nest(quantize(golden_weight(shape, dtype), nested=False), expected["offset"])
    for name in ("codes", "absmax", "nested_absmax"):
        assert torch.equal(getattr(made, name), expected[name]), name
    made = NF4Weight(**{**made.__dict__, "nested_map": golden["nested_map"]})
    assert list(digest(dequantize(made))) == expected["sha256"].tolist()


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nested", [False, True])
def test_installed_bitsandbytes_reads_the_same(dtype, nested):
    from bitsandbytes import functional

    weight = torch.randn(96, 320, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, state = functional.quantize_4bit(weight, compress_statistics=nested, quant_type="nf4")
    made = quantize(weight, nested)
    assert torch.equal(made.codes, codes.flatten())
    extra = {}
    if nested:  # its library for CPUs takes the second nearest scale now and then; the reading is exact
        extra = {
            "nested_absmax": state.state2.absmax,
            "nested_map": state.state2.code,
            "offset": state.offset,
        }
        assert (made.absmax.int() - state.absmax.int()).abs().max() <= 1
    read = NF4Weight(codes.flatten(), state.absmax, tuple(weight.shape), dtype, **extra)
    assert torch.equal(dequantize(read), functional.dequantize_4bit(codes, state))


def test_nearest_value_by_search():
    """Each code is that of the value nearest to weight / absmax, by trying all 16."""
    weight = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    made = quantize(weight, nested=False)
    codes = torch.stack((made.codes >> 4, made.codes & 15), -1).flatten()[:300].long()
    scaled = weight.flatten() / made.absmax.repeat_interleave(64)[:300]
    errors = (scaled.unsqueeze(-1) - torch.tensor(VALUES)).abs()
    assert torch.all(errors.gather(1, codes.unsqueeze(-1)).squeeze(-1) <= errors.min(-1).values + 1e-6)


def test_bits_per_weight_and_error():
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(2))
    made = quantize(weight)
    assert 4.1 < made.size * 8 / weight.numel() < 4.2
    assert (dequantize(made) - weight).std() < 0.1  # 9.2 % of the spread of normal weights


@pytest.mark.parametrize("size", [(1,), (2, 63), (1, 65), (64, 257)])
@pytest.mark.parametrize("nested", [False, True])
def test_odd_sizes_and_zeros(size, nested):
    assert torch.equal(dequantize(quantize(torch.zeros(size), nested)), torch.zeros(size))
    weight = torch.linspace(-1, 1, torch.Size(size).numel()).view(size)
    made = quantize(weight, nested)
    step = 0.16 * float(absmax_of(made).abs().max()) + 0.02
    assert (dequantize(made) - weight).abs().max() <= step


def test_several_chunks(monkeypatch):
    weight = golden_weight((8, 2100), torch.float32)
    at_once = quantize(weight)
    monkeypatch.setitem(CHUNK, "cpu", 1024)
    assert torch.equal(quantize(weight).codes, at_once.codes)
    assert torch.equal(quantize(weight).absmax, at_once.absmax)
    in_parts = dequantize(at_once)
    monkeypatch.undo()
    assert torch.equal(in_parts, dequantize(at_once))


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"floating-point.*int64"):
        quantize(torch.arange(64))


@pytest.fixture
def layer():
    torch.manual_seed(0)
    made = Linear4bit(80, 24)
    made.set_weight(quantize(made.weight))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_is_the_product_with_the_dequantised_weight(dtype):
    torch.manual_seed(0)
    layer = Linear4bit(80, 24, dtype=dtype)
    layer.set_weight(quantize(layer.weight))
    full = layer.dequantized(dtype)
    outputs, gradients = [], []
    for module in (layer, full):
        x = torch.randn(2, 3, 80, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        outputs.append(module(x))
        outputs[-1].square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)


def test_layer_keeps_no_dequantised_weight(layer):
    kept = []
    x = torch.randn(5, 80, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer(x)
    assert sum(kept) < 24 * 80


def test_scales_keep_their_type(layer):
    before = layer.nf4
    layer.to(torch.bfloat16).half().float()
    after = layer.nf4
    assert {name: t.dtype for name, t in after.tensors.items()} == {
        name: t.dtype for name, t in before.tensors.items()
    }
    assert torch.equal(dequantize(after), dequantize(before))
    assert after.codes.data_ptr() == layer.weight.data_ptr()


def test_codes_and_scales_follow_the_layer_to_another_device(layer):
    layer.to("meta")
    assert layer.nf4.codes.device.type == "meta"
    assert {tensor.device.type for tensor in layer.nf4.tensors.values()} == {"meta"}


def test_layer_takes_only_its_shape(layer):
    with pytest.raises(ValueError, match=r"\(3, 5\), where \(24, 80\)"):
        layer.set_weight(quantize(torch.zeros(3, 5)))
    with pytest.raises(RuntimeError, match="no quantised weight yet"):
        Linear4bit(4, 4)(torch.zeros(1, 4))


def test_dequantise_all_layers(layer):
    x = torch.randn(2, 80)
    expected = layer(x)
    network = torch.nn.Sequential(layer)
    assert is_quantized(network)
    dequantize_layers(network, torch.float32)
    assert not is_quantized(network)
    assert torch.equal(network(x), expected)
