"""Dropout on an adapter's inputs on the fast path: the plain formula with the same mask, gradients too."""

import pytest
import torch

from proxima.config import FinetuningConfig
from proxima.finetuning import SFTTrainer
from proxima.runtime.engine import Decoder, pack_mask
from proxima.runtime.engine.lora_products import Gate, Lora, Projection, batched_copy, load_lora, product
from tests.finetuning.test_finetuning import DEMONSTRATIONS

RATE, ROWS, INPUTS, OUTPUTS, RANK, SCALE = 0.4, 7, 6, (4, 3), 2, 1.5


def silu_gate(x):
    left, right = x.chunk(2, -1)
    return torch.nn.functional.silu(left) * right


def gate_forward(x, padding):
    return torch.nn.functional.pad(silu_gate(x), (0, padding), value=7.0)


def gate_backward(x, d, d_inner, down):
    wide = x.detach().requires_grad_()
    with torch.enable_grad():
        out = silu_gate(wide)
    (dx,) = torch.autograd.grad(out, wide, d + d_inner @ down)
    return out.detach(), dx


@pytest.fixture
def parts():
    torch.manual_seed(0)
    padding = 8
    whole = torch.zeros(sum(OUTPUTS), INPUTS + padding, dtype=torch.float64)
    whole[:, :INPUTS] = torch.randn(sum(OUTPUTS), INPUTS, dtype=torch.float64)
    down = tuple(torch.randn(RANK, INPUTS, dtype=torch.float64, requires_grad=True) for _ in OUTPUTS)
    up = tuple(torch.randn(size, RANK, dtype=torch.float64, requires_grad=True) for size in OUTPUTS)
    projection = Projection((whole,), (None,), OUTPUTS, INPUTS, whole.new_zeros(padding, INPUTS))
    lora = Lora(down, up, (SCALE, SCALE), dropout=RATE)
    load_lora(projection, lora)
    return projection, lora


def plainly(x, projection, lora):
    """x W' + s dropout(x) A' B', by autograd; the projection's layers share the mask."""
    _, mask = torch.native_dropout(x.detach(), RATE, True)
    seen = x * mask / (1 - RATE)
    base = x @ projection.weights[0][:, :INPUTS].T
    parts = [SCALE * seen @ a.T @ b.T for a, b in zip(lora.down, lora.up, strict=True)]
    return base + torch.cat(parts, -1)


@pytest.mark.parametrize("form", ["plain", "padded", "gated"])
def test_outputs_and_gradients_are_those_of_the_plain_formula(parts, form):
    projection, lora = parts
    wide = torch.randn(ROWS, 2 * INPUTS if form == "gated" else INPUTS, dtype=torch.float64)
    given = {name: wide.clone().requires_grad_() for name in ("ours", "plain")}
    inputs = given["ours"]
    if form == "padded":
        inputs = torch.cat([inputs, inputs.new_full((ROWS, projection.padding), 7.0)], -1)
    gate = Gate(gate_forward, gate_backward) if form == "gated" else None
    torch.manual_seed(1)
    ours = product(inputs, projection, lora, gate)
    torch.manual_seed(1)
    plain = plainly(silu_gate(given["plain"]) if gate else given["plain"], projection, lora)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(plain)
    leaves = [*lora.down, *lora.up]
    found = torch.autograd.grad((ours * weights).sum(), [given["ours"], *leaves])
    wanted = torch.autograd.grad((plain * weights).sum(), [given["plain"], *leaves])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)  # adapters are float32
    with torch.no_grad():
        undropped = product(inputs, projection, lora, gate)
    assert not torch.allclose(undropped, ours)


def test_a_network_without_adapters_has_nothing_to_copy():
    assert batched_copy([])() is None


def test_training_takes_the_fast_path_and_drops_at_the_rate_of_the_adapter(tiny_folders, tmp_path):
    losses = {}
    for rate in (0.0, 0.5):
        config = FinetuningConfig(
            tiny_folders["qwen3"], lora_dropout=rate, dtype="float32", run_dir=str(tmp_path), seed=3
        )
        trainer = SFTTrainer(config)
        rows = [trainer.encode(item) for item in DEMONSTRATIONS[:4]]
        for parameter in trainer.role.parameters():
            torch.nn.init.normal_(parameter.data, std=0.2)
        trainer.backbone.network.train()
        assert trainer.backbone.decoder is not None
        with trainer.role.training():
            losses[rate] = [trainer.loss(rows).item() for _ in range(2)]
        trainer.backbone.settings.fast = False
        assert (trainer.loss(rows).item() == pytest.approx(losses[0.0][0], rel=1e-5)) == (rate == 0)
    assert losses[0.0][0] == losses[0.0][1]
    assert losses[0.5][0] != losses[0.5][1]


def gradients_of_a_minibatch(folder, tmp_path, **settings):
    """A trainer, and the gradients of its adapter at a seed of their own."""
    config = FinetuningConfig(folder, dtype="float32", run_dir=str(tmp_path), seed=3, **settings)
    trainer = SFTTrainer(config)
    torch.manual_seed(4)
    for parameter in trainer.role.parameters():
        torch.nn.init.normal_(parameter.data, std=0.2)
    trainer.backbone.network.train()
    rows = [trainer.encode(item) for item in DEMONSTRATIONS[:4]]
    torch.manual_seed(5)
    with trainer.role.training():
        trainer.loss(rows).backward()
    return trainer, torch.cat([parameter.grad.flatten() for parameter in trainer.role.parameters()])


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_layers_that_are_computed_again_drop_the_same_inputs(rate, tiny_folders, tmp_path, monkeypatch):
    asked, state = [], torch.get_rng_state
    given = tiny_folders["qwen3"], tmp_path
    _, once = gradients_of_a_minibatch(*given, lora_dropout=rate)
    monkeypatch.setattr(torch, "get_rng_state", lambda: asked.append(1) or state())
    _, again = gradients_of_a_minibatch(*given, lora_dropout=rate, gradient_checkpointing=True)
    torch.testing.assert_close(again, once, rtol=1e-4, atol=1e-5)
    assert (len(asked) > 4) == (
        rate > 0
    )  # without dropout there is nothing to repeat (setting up asks a few times)


def test_on_a_gpu_no_graph_computes_layers_again_that_drop_inputs(tiny_folders, tmp_path, monkeypatch):
    """Forward and backward passes are two graphs, and each draws its own random numbers."""
    trainer, _ = gradients_of_a_minibatch(tiny_folders["qwen3"], tmp_path, lora_dropout=0.5)
    decoder, graphs = trainer.backbone.decoder, []
    monkeypatch.setattr(Decoder, "graphed", True)
    decoder.graphed_passes = lambda *given: graphs.append(given[3])
    ids = torch.arange(6)[None]
    layout = pack_mask(ids >= 0)
    for checkpointing in (False, True):
        decoder.checkpointing = checkpointing
        for rate in (0.0, 0.5):
            decoder.hidden(ids, layout, trainer.role.adapter, rate)
            with torch.no_grad():
                decoder.hidden(ids, layout, trainer.role.adapter, rate)
    assert graphs == [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]  # all but checkpointing with dropout and gradients


def test_a_base_with_dropout_of_its_own_takes_the_reference_path(tiny_folders, tmp_path):
    config = FinetuningConfig(tiny_folders["gpt2"], dtype="float32", run_dir=str(tmp_path))
    backbone = SFTTrainer(config).backbone
    assert backbone.decoder is not None
    backbone.network.train()
    assert (backbone.decoder is None) == backbone.base_drops
    backbone.network.config.attention_dropout = 0.1
    backbone._base_drops = None
    assert backbone.decoder is None
