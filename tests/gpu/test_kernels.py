"""Triton kernels against what they replace.

On a GPU, or on a CPU with Triton's interpreter (TRITON_INTERPRET=1).
"""

import os

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a GPU", allow_module_level=True)

DEVICE, KIND = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
NEAR = {"rtol": 1e-4, "atol": 1e-5} if INTERPRETED else {"rtol": 2e-2, "atol": 2e-2}

from proxima.runtime.engine.layer_functions import DecoderShape, Norm, activate, normalize, split_heads  # noqa: E402
from proxima.runtime.engine.layout import tile_table  # noqa: E402


def random(*shape):
    return torch.randn(*shape, device=DEVICE).to(KIND)


def attend_plainly(q, k, v, lengths, scale):
    parts = [part.float().split(lengths) for part in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    found = []
    for one_q, one_k, one_v in zip(*parts, strict=True):
        heads = [
            x.transpose(0, 1)
            for x in (one_q, one_k.repeat_interleave(group, 1), one_v.repeat_interleave(group, 1))
        ]
        found.append(scaled_dot_product_attention(*heads, is_causal=True, scale=scale).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("heads", "kind"),
    [*(((4, 2, 32), kind) for kind in ("HOPPER", "OTHERS")),
     *((heads, "HOPPER") for heads in ((2, 2, 64), (4, 1, 16), (3, 1, 16), (16, 8, 128)))],
)  # fmt: skip
def test_tiled_attention_and_its_gradients(heads, kind, monkeypatch):
    from proxima.runtime.engine.kernels import attention_kernels
    from proxima.runtime.engine.kernels.attention_kernels import TiledAttention

    monkeypatch.setattr(attention_kernels, "configs", lambda: getattr(attention_kernels, kind))
    torch.manual_seed(0)
    lengths, (n_q, n_kv, size) = [1, 70, 64, 129, 5], heads
    if heads == (16, 8, 128) and INTERPRETED:
        lengths = [70]
    total = sum(lengths)
    q, k, v = random(total, n_q, size), random(total, n_kv, size), random(total, n_kv, size)
    wide = torch.cat([random(total, n_kv, size), v], 1)  # values as they come: a window of something wider
    given = random(total, n_q, size)
    tiles = torch.tensor(tile_table(lengths, 12), dtype=torch.int32, device=DEVICE)
    results = []
    for function in (
        lambda q, k, v: TiledAttention.apply(q, k, v, tiles, size**-0.5, 8)[:, :-8].unflatten(1, (n_q, size)),
        lambda q, k, v: attend_plainly(q, k, v, lengths, size**-0.5),
    ):
        leaves = [x.detach().clone().requires_grad_(True) for x in (q, k, wide)]
        out = function(leaves[0], leaves[1], leaves[2][:, n_kv:])
        out.float().mul(given.float()).sum().backward()
        results.append([out, leaves[0].grad, leaves[1].grad, leaves[2].grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), **NEAR)


def test_tiled_attention_is_the_same_to_the_bit_wherever_a_sequence_stands():
    from proxima.runtime.engine.kernels.attention_kernels import TiledAttention

    torch.manual_seed(0)
    q, k, v, given = random(150, 4, 32), random(150, 2, 32), random(150, 2, 32), random(150, 4, 32)

    def run(order):
        cuts = [x.split([100, 50]) for x in (q, k, v, given)]
        parts = [torch.cat([cut[i] for i in order]) for cut in cuts]
        leaves = [x.requires_grad_(True) for x in parts[:3]]
        tiles = torch.tensor(tile_table([(100, 50)[i] for i in order], 8), dtype=torch.int32, device=DEVICE)
        out = TiledAttention.apply(*leaves, tiles, 0.2)
        out.backward(parts[3].flatten(1))
        sizes = [(100, 50)[i] for i in order]
        back = [
            dict(zip(order, x.split(sizes), strict=True))
            for x in (out.detach(), *(leaf.grad for leaf in leaves))
        ]
        return [torch.cat([part[0], part[1]]) for part in back]

    for one, other in zip(run((0, 1)), run((1, 0)), strict=True):
        assert torch.equal(one, other)


def test_tiled_attention_has_the_same_gradients_when_it_is_computed_again():
    from proxima.runtime.engine.kernels.attention_kernels import TiledAttention

    torch.manual_seed(0)
    leaves = [random(20, heads, 32).requires_grad_(True) for heads in (4, 2, 2)]
    tiles = torch.tensor(tile_table([20], 4), dtype=torch.int32, device=DEVICE)

    def attend(*given):
        return TiledAttention.apply(*given, tiles, 0.2)

    once = torch.autograd.grad(attend(*leaves).sum(), leaves)
    again = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False).sum(), leaves)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@pytest.mark.parametrize(("normed", "kv"), [(True, 2), (False, 2), (True, 3)])
def test_heads_are_split_normed_and_rotated(normed, kv):
    from proxima.runtime.engine.kernels.head_kernels import split_heads as fast

    torch.manual_seed(0)
    shape = DecoderShape(heads=6, kv_heads=kv, head_size=32, eps=1e-6, scale=1.0, activation="")
    qkv, cos = random(7, (6 + 2 * kv) * 32), torch.randn(7, 16, device=DEVICE)
    cos, sin = (torch.cat([x, x], -1).to(KIND) for x in (cos.cos(), cos.sin()))
    norms = [random(32) for _ in range(2)] if normed else [None, None]
    given, results = [random(7, 6, 32), random(7, kv, 32), random(7, kv, 32)], []
    for function in (fast, split_heads):
        leaf = qkv.detach().clone().requires_grad_(True)
        parts = function(leaf, (192, 32 * kv, 32 * kv), *norms, cos, sin, shape)
        sum(
            (part.float() * gradient.float()).sum() for part, gradient in zip(parts, given, strict=True)
        ).backward()
        results.append([*parts, leaf.grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), **NEAR)


@pytest.mark.parametrize("room", [8, 16, 24])
def test_the_gate_and_its_gradient_with_an_adapter_folded_in(room):
    from proxima.runtime.engine.kernels.gate_kernels import gate, gate_backward

    torch.manual_seed(0)
    wide, d_out, d_inner, down = random(37, 2 * 136), random(37, 136), random(37, room), random(room, 136)
    leaf = wide.detach().clone().requires_grad_(True)
    plain = activate(leaf, (136, 136), "silu")
    plain.backward((d_out.float() + d_inner.float() @ down.float()).to(KIND))
    out, d_wide = gate_backward(wide, d_out, d_inner, down)
    for ours, theirs in ((gate(wide), plain), (out, plain), (d_wide, leaf.grad)):
        torch.testing.assert_close(
            ours.float(), theirs.float(), **(NEAR if INTERPRETED else {"rtol": 5e-2, "atol": 1e-1})
        )


def exact_scores(logits, others, ids, temperature):
    """Log-probabilities of both, KL, entropy; in float64."""
    ours, theirs = (torch.log_softmax(x.double() / temperature, -1) for x in (logits, others))
    rows = torch.arange(len(ids), device=ids.device)
    kl = (ours.exp() * (ours - theirs)).sum(-1)
    return ours[rows, ids], theirs[rows, ids], kl, -(ours.exp() * ours).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [0.1, 8.0], ids=["flat", "peaked"])
def test_numbers_over_the_vocabulary_are_those_of_float64(temperature, scale):
    from proxima.runtime.engine.kernels import pair, stats

    torch.manual_seed(0)
    logits = scale * random(5, 9000)  # more than two blocks, the last one cut
    others = (logits.float() + 0.3 * torch.randn(5, 9000, device=DEVICE)).to(KIND)
    ids = torch.tensor([0, 4095, 4096, 8999, 17], device=DEVICE)
    (ours, own), (theirs, other) = (stats(x, ids, temperature) for x in (logits, others))
    found = (ours, theirs, *pair(logits, others, (own, other), temperature))
    for number, wanted in zip(found, exact_scores(logits, others, ids, temperature), strict=True):
        torch.testing.assert_close(number.double(), wanted, rtol=1e-5, atol=1e-5)  # float32, sums of 9,000


def test_kl_is_zero_for_equal_logits_and_exact_for_close_and_impossible_ones():
    from proxima.runtime.engine.kernels import pair, stats

    torch.manual_seed(0)
    logits, ids = random(3, 5000), torch.zeros(3, dtype=torch.long, device=DEVICE)
    near = logits.float() + 2e-3 * torch.randn(3, 5000, device=DEVICE)
    cut = near.masked_fill(torch.rand(3, 5000, device=DEVICE) < 0.5, -1e30)

    def kl(one, other):
        normalisers = tuple(stats(x, ids, 1.0)[1] for x in (one, other))
        return pair(one, other, normalisers, 1.0)[0]

    assert kl(logits, logits).tolist() == [0.0] * 3
    for one, other in ((logits.float(), near), (cut, near)):
        wanted = exact_scores(one, other, ids, 1.0)[2]
        torch.testing.assert_close(kl(one, other).double(), wanted, rtol=1e-2, atol=1e-9)
    assert not kl(near, cut).isnan().any()


def test_the_gradient_of_a_log_probability_is_that_of_float64():
    from proxima.runtime.engine.kernels import slope, stats

    torch.manual_seed(0)
    logits, ids = 3 * random(4, 5000), torch.tensor([0, 4999, 4096, 7], device=DEVICE)
    weights = torch.randn(4, device=DEVICE)
    leaf = logits.double().requires_grad_(True)
    (exact_scores(leaf, leaf, ids, 0.7)[0] * weights).sum().backward()
    normalisers = stats(logits, ids, 0.7)[1]
    found = slope(logits, ids, normalisers, 0.7, weights / 0.7)
    near = 1e-5 if INTERPRETED else 2**-8
    torch.testing.assert_close(found.double(), leaf.grad, rtol=near, atol=1e-8)
    replaced = logits.clone()
    assert slope(replaced, ids, normalisers, 0.7) is replaced
    torch.testing.assert_close(replaced.double() * weights[:, None] / 0.7, leaf.grad, rtol=near, atol=1e-8)


def test_log_probabilities_from_the_head_are_those_from_logits_and_so_are_their_gradients(monkeypatch):
    from proxima.runtime.engine import vocabulary

    monkeypatch.setattr(vocabulary, "has_kernels", lambda logits: True)
    torch.manual_seed(0)
    hidden, head, ids = random(6, 32), 0.3 * random(4200, 32), torch.randint(4200, (6,), device=DEVICE)
    results = []
    for function in (
        lambda x: vocabulary.head_logprobs(x, head, ids, 0.9),
        lambda x: vocabulary.token_logprobs(x @ head.t(), ids, None, 0.9),
        lambda x: exact_scores(x.double() @ head.double().t(), x.double() @ head.double().t(), ids, 0.9)[0],
    ):
        leaf = hidden.clone().requires_grad_(True)
        logprobs = function(leaf)
        (logprobs * torch.arange(1, 7, device=DEVICE)).sum().backward()
        results.append((logprobs.detach().double(), leaf.grad.double()))
    assert torch.equal(results[0][0], results[1][0])
    near = {"rtol": 1e-4, "atol": 1e-4} if INTERPRETED else {"rtol": 3e-2, "atol": 6e-2}
    for found in results[:2]:
        for ours, wanted in zip(found, results[2], strict=True):
            torch.testing.assert_close(ours, wanted, **near)


@pytest.mark.parametrize("top_k", [0, 20])
def test_scores_by_kernels_are_those_without(top_k, monkeypatch):
    from proxima.core.sampling import score_tokens, truncate
    from proxima.runtime.engine import vocabulary

    monkeypatch.setattr(vocabulary, "has_kernels", lambda logits: True)
    torch.manual_seed(0)
    logits, others = 2 * random(6, 4200), 2 * random(6, 4200)
    kept = truncate(logits.float() / 0.8, top_k, 0.9) if top_k else None
    ids = torch.randint(4200, (6,), device=DEVICE) if kept is None else kept.ids[:, 0, 0].long()
    found = vocabulary.score_tokens(logits, others, ids, kept, 0.8)
    wanted = score_tokens(logits.unsqueeze(1), others.unsqueeze(1), ids.unsqueeze(1), kept, 0.8)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs.squeeze(1), rtol=1e-4, atol=1e-4)
    acting = vocabulary.token_logprobs(
        logits, ids, kept, 0.8
    )  # what training computes: the ratio starts at 1
    assert torch.equal(found[0], acting)


def test_samples_and_their_log_probabilities_are_those_of_the_hash():
    from proxima.core.sampling import hash_words
    from proxima.runtime.engine.generation import pick
    from proxima.runtime.engine.kernels import sample

    torch.manual_seed(0)
    logits = random(12, 9000)
    lanes = hash_words(torch.randint(2**62, (12,), device=DEVICE), 3, 5)
    columns = torch.arange(12, device=DEVICE) * 1000
    tokens, logprobs = sample(logits, lanes, columns, 0.8)
    wanted, wanted_logprobs, _ = pick(logits, lanes, columns, 0.8, 0, 1.0)
    assert torch.equal(tokens, wanted)
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("gated", "padding", "inputs"),
    [(False, 0, 152), (False, 8, 152), (False, 40, 152), (True, 0, 152), (False, 0, 1072), (False, 40, 1072)],
)
def test_products_of_few_rows_are_those_of_float64_and_do_not_depend_on_the_rows(gated, padding, inputs):
    from proxima.runtime.engine.kernels import few_rows_product
    from proxima.runtime.engine.kernels.few_rows_kernels import blocks

    torch.manual_seed(0)
    x, bias = random(70, inputs), random(100 if gated else 50)
    assert (blocks(50, inputs, gated).splits > 1) == (inputs > 152)
    scale = 0.1 * (152 / inputs) ** 0.5
    weight, down = (
        scale * random(len(bias), inputs + padding),
        scale * random(padding, inputs) if padding else None,
    )
    out = few_rows_product(x, weight, bias, down, gated)
    wide = x.double() @ weight[:, :inputs].double().t() + bias.double()
    if down is not None:
        inner = (x.double() @ down.double().t()).to(KIND).double()
        wide = wide + inner @ weight[:, inputs:].double().t()
    wanted = activate(wide, (50, 50), "silu") if gated else wide
    near = {"rtol": 1e-4, "atol": 1e-4} if INTERPRETED else {"rtol": 3e-2, "atol": 1e-1}
    torch.testing.assert_close(out.double(), wanted, **near)
    for count in (1, 8, 16, 17, 64):
        fewer = few_rows_product(x[:count], weight, bias, down, gated)
        exact = {"rtol": 0, "atol": 0}  # the interpreter's products are numpy's, which round by shape
        torch.testing.assert_close(fewer, out[:count], **(near if INTERPRETED else exact))


@pytest.mark.parametrize(
    ("outputs", "inputs", "splits"),
    [
        (1024, 3072, 8),
        (1024, 2048, 8),
        (4096, 1072, 1),
        (2560, 9728, 3),
        (576, 1536, 6),
        (576, 576, 2),
        (32, 64, 1),
    ],
)
def test_a_weight_with_few_outputs_is_read_in_parts_of_at_least_four_blocks(outputs, inputs, splits):
    from proxima.runtime.engine.kernels.few_rows_kernels import blocks

    made = blocks(outputs, inputs, gated=False)
    assert made.splits == splits
    assert splits == 1 or inputs >= splits * 4 * made.inputs
    assert blocks(outputs, inputs, gated=True).splits == 1


@pytest.mark.parametrize("splits", [2, 3])
def test_products_of_few_rows_in_parts_are_those_in_one(splits, monkeypatch):
    from proxima.runtime.engine.kernels import few_rows_kernels as own

    torch.manual_seed(0)
    x, bias, weight, down = random(20, 152), random(50), 0.1 * random(50, 152 + 8), random(8, 152)
    monkeypatch.setattr(own, "blocks", lambda *shape: own.Blocks(16, 32, 2))
    whole = own.few_rows_product(x, weight, bias, down)
    monkeypatch.setattr(own, "blocks", lambda *shape: own.Blocks(16, 32, 2, splits))
    near = {"rtol": 1e-4, "atol": 1e-4} if INTERPRETED else {"rtol": 3e-2, "atol": 1e-1}
    torch.testing.assert_close(own.few_rows_product(x, weight, bias, down), whole, **near)
    torch.testing.assert_close(own.few_rows_product(x[:3], weight, bias, down), whole[:3], **near)


@pytest.mark.parametrize("padding", [0, 8, 24])
def test_the_norm_of_a_sum_and_an_adapters_inner_values(padding):
    from proxima.runtime.engine.kernels import add_norm_down

    torch.manual_seed(0)
    x, change, weight = random(5, 96), random(5, 96), random(96)
    down = random(padding, 96) if padding else None
    sums, out = add_norm_down(x, change, weight, 1e-6, down)
    assert torch.equal(sums, x + change)
    normed = normalize(sums, Norm(weight, None), 1e-6)
    torch.testing.assert_close(out[:, :96].float(), normed.float(), **NEAR)
    if down is not None:
        inner = out[:, :96].double() @ down.double().t()
        torch.testing.assert_close(out[:, 96:].double(), inner, **NEAR)
    unchanged, alone = add_norm_down(sums, None, weight, 1e-6, down)
    assert unchanged is sums
    assert torch.equal(alone, out)


@pytest.mark.parametrize("biased", [True, False])
def test_the_norm_adds_the_parts_of_a_product_as_it_adds_their_sum(biased):
    from proxima.runtime.engine.kernels import add_norm_down
    from proxima.runtime.engine.kernels.nf4_kernels import Parts

    torch.manual_seed(0)
    x, weight, down = random(5, 96), random(96), random(8, 96)
    parts = Parts(torch.randn(3, 5, 96, device=DEVICE), random(96) if biased else None)
    whole = parts.sums[0] + parts.sums[1] + parts.sums[2] + (parts.bias if biased else 0)
    assert torch.equal(parts.added(KIND), whole.to(KIND))
    wanted = add_norm_down(x, whole.to(KIND), weight, 1e-6, down)
    for ours, theirs in zip(add_norm_down(x, parts, weight, 1e-6, down), wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_the_first_norm_reads_the_rows_of_its_tokens():
    from proxima.runtime.engine.kernels import add_norm_down

    torch.manual_seed(0)
    table, weight, down = random(20, 96), random(96), random(8, 96)
    tokens = torch.tensor([3, 19, 0, 3], device=DEVICE)
    x, normed = add_norm_down(table, None, weight, 1e-6, down, tokens)
    assert torch.equal(x, table[tokens])
    assert torch.equal(normed, add_norm_down(table[tokens], None, weight, 1e-6, down)[1])


@pytest.mark.parametrize(("heads", "normed"), [((4, 2, 32), True), ((3, 3, 16), False), ((8, 1, 64), True)])
def test_attention_against_the_cache_in_pieces(heads, normed, monkeypatch):
    from proxima.runtime.engine.kernels import few_rows_kernels
    from proxima.runtime.engine.packed_attention import cached_attention

    tiling = few_rows_kernels.CACHE._replace(block=64, piece=128)
    monkeypatch.setattr(few_rows_kernels, "CACHE", tiling)
    torch.manual_seed(0)
    count, kv, head = heads
    lengths = torch.tensor([0, 1, 127, 128, 300, 511, 700], device=DEVICE, dtype=torch.int32)
    rows, size = len(lengths), 704
    qkv, angle = random(rows, (count + 2 * kv) * head), torch.randn(size, head // 2, device=DEVICE)
    cos, sin = (torch.cat([x, x], -1).to(KIND) for x in (angle.cos(), angle.sin()))
    norms = (random(head), random(head)) if normed else (None, None)
    caches = [random(rows, size, kv, head) for _ in range(2)]
    copies = [cache.clone() for cache in caches]
    attend = few_rows_kernels.CacheAttention(rows + 2, size, kv, head, DEVICE)
    given = (qkv, norms, cos, sin, *caches, lengths, head**-0.5, 1e-6)
    ours = attend(*given)
    shape = DecoderShape(heads=count, kv_heads=kv, head_size=head, eps=1e-6, scale=1.0, activation="")
    wide = [None if norm is None else norm.double() for norm in norms]
    places = lengths.long()
    angles = cos[places].double(), sin[places].double()
    parts = split_heads(qkv.double(), (count * head, kv * head, kv * head), *wide, *angles, shape)
    for row, length in enumerate(lengths.tolist()):
        for cache, new in zip(copies, parts[1:], strict=True):
            cache[row, length] = new[row].to(KIND)
    for ours_cache, theirs in zip(caches, copies, strict=True):
        torch.testing.assert_close(ours_cache, theirs, **NEAR)
    queries, *wide_caches = (x.double().cpu() for x in (parts[0].to(KIND), *caches))
    starts = torch.zeros(2, rows + 1, dtype=torch.int32)
    theirs = cached_attention(queries, *wide_caches, lengths.cpu() + 1, starts, head**-0.5)
    torch.testing.assert_close(ours.double().cpu(), theirs.flatten(1), **NEAR)
    assert not attend.arrived.any()
    order = [4, 2, 5, 0]  # other slots, fewer rows: the same bits
    moved = attend(qkv[order], norms, cos, sin, *(x[order] for x in caches), lengths[order], *given[-2:])
    assert torch.equal(moved, ours[order])


@pytest.mark.parametrize("heads", [(16, 8, 128), (4, 4, 64), (8, 1, 32)])
def test_the_decode_kernel_attends_as_torch_does(heads):
    from proxima.runtime.engine.kernels.decode_kernels import decode_attention
    from proxima.runtime.engine.packed_attention import cached_attention

    torch.manual_seed(0)
    rows, size, (count, kv, head) = 5, 200, heads
    made = random(rows, count + 2 * kv, head).split([count, kv, kv], 1)  # as GPT-2 gives them: windows
    caches = [random(rows, size, kv, head) for _ in range(2)]
    copies = [cache.clone() for cache in caches]
    lengths = torch.tensor([0, 1, 63, 64, 199], device=DEVICE, dtype=torch.int32)
    ours = decode_attention(*made, *caches, lengths, head**-0.5)
    for row, length in enumerate(lengths.tolist()):
        for cache, new in zip(copies, made[1:], strict=True):
            cache[row, length] = new[row]
    assert all(torch.equal(ours_cache, theirs) for ours_cache, theirs in zip(caches, copies, strict=True))
    wide = [tensor.float() for tensor in (made[0], *copies)]
    starts = torch.zeros(2, rows + 1, dtype=torch.int32)
    theirs = cached_attention(*wide, lengths + 1, starts, head**-0.5)
    torch.testing.assert_close(ours.float(), theirs, **NEAR)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_many_small_matrices_are_scaled_cast_and_copied_in_one_launch(kind):
    from proxima.runtime.engine.kernels.copy_kernels import Copies

    torch.manual_seed(0)
    shapes, factors = [(3, 5), (16, 100), (1, 2000), (130, 8), (70, 64)], [1.0, 2.0, 0.5, 1.0, -2.0]
    wide = [torch.randn(rows, columns + 3, device=DEVICE) for rows, columns in shapes]
    targets = [
        torch.full((rows + 1, columns + 7), 9.0, device=DEVICE, dtype=kind) for rows, columns in shapes
    ]
    sources = [each[:, 2:-1] for each in wide]  # windows, with row strides of their own
    windows = [target[:-1, 4:-3] for target in targets]
    copy = Copies(list(zip(sources, windows, factors, strict=True)))
    for times in (1, 3):  # what is there when it is called
        for each in wide:
            each.mul_(times)
        copy()
        for source, window, factor in zip(sources, windows, factors, strict=True):
            near = {} if kind == torch.float32 or not INTERPRETED else {"rtol": 2**-7, "atol": 1e-6}
            torch.testing.assert_close(window, (factor * source).to(kind), **near)
    for target, window in zip(targets, windows, strict=True):
        window.fill_(9.0)
        assert (target == 9).all()  # nothing beside a window was written


def test_a_step_writes_what_was_drawn_and_leaves_nothing_to_read_of_a_sequence_that_ends():
    from types import SimpleNamespace

    from proxima.runtime.engine.generation_slots import Outputs
    from proxima.runtime.engine.kernels import advance

    kinds = {"tokens": torch.long, "lengths": torch.int32, "columns": torch.long, "rows": torch.long}
    given = {
        "tokens": [9] * 5,
        "lengths": [7, 8, 9, 4, 3],
        "columns": [1, 2, 3, 0, 1],
        "rows": [3, 0, 2, 1, 4],
    }
    slots = SimpleNamespace(
        **{name: torch.tensor(given[name], dtype=kind, device=DEVICE) for name, kind in kinds.items()},
        running=torch.tensor([True, True, True, True, False], device=DEVICE),
    )
    eos = torch.tensor([5, 6, 7], device=DEVICE)
    ids, logprobs = torch.zeros(5, 4, dtype=torch.long, device=DEVICE), torch.zeros(5, 4, device=DEVICE)
    outputs = Outputs(ids, logprobs, None, eos, None)
    expected = Outputs(ids.clone(), logprobs.clone(), None, eos, None)
    drawn = torch.tensor([1, 6, 1, 2, 3], device=DEVICE), torch.arange(5.0, device=DEVICE)
    limits = torch.full_like(slots.rows, 4)
    going = expected.write((*drawn, None), slots.rows, slots.columns, slots.running, limits)
    advance(drawn, slots, outputs, 4)
    assert torch.equal(slots.running, going)
    assert going.tolist() == [True, False, False, True, False]
    assert slots.lengths.tolist() == [8, 0, 0, 5, 0]
    assert slots.columns.tolist() == [2, 3, 4, 1, 1]
    assert slots.tokens.tolist() == drawn[0].tolist()
    assert torch.equal(outputs.ids[:4], expected.ids[:4])
    assert torch.equal(outputs.logprobs[:4], expected.logprobs[:4])


@pytest.mark.skipif(not INTERPRETED, reason="compares on a CPU; on a GPU test_gpu.py does")
@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_decode_step_by_kernels_is_the_decoders(name, quantize, tmp_path, monkeypatch):
    from proxima.config import PPOConfig
    from proxima.models import Sampling
    from proxima.ppo_trainer import PPOTrainer
    from proxima.runtime.engine import few_rows_decoder, generation
    from proxima.world.tiny_models import make_tiny_model
    from tests.helpers import shake

    folder = str(make_tiny_model(tmp_path / name, name))
    config = PPOConfig(folder, device="cpu", max_new_tokens=4, quantize=quantize)
    trainer = shake(PPOTrainer(config), 0.05)
    prompts = trainer.generator.read_prompts(["a", "some longer prompt", "another one"])
    free = trainer.models.policy.generate(prompts, Sampling(4, 1.0, 0, 1.0, (), 0, 0))
    ends = (int(free.response_ids[0, 1]), 255, 254)  # one response ends early
    sampling = Sampling(4, 1.0, 0, 1.0, ends, 0, 0)
    plain = trainer.models.policy.generate(prompts, sampling)
    assert plain.sizes[0] == 2
    made = []
    monkeypatch.setattr(
        generation,
        "few_rows_decoder",
        lambda *given: made.append(few_rows_decoder.FewRowsDecoder(*given)) or made[0],
    )
    trainer.models.policy.backbone.release_generation()
    ours = trainer.models.policy.generate(prompts, sampling)
    assert made
    assert torch.equal(ours.response_ids, plain.response_ids)
    torch.testing.assert_close(ours.sampled_logprobs, plain.sampled_logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "padding"), [(96, 8), (64, 0)])
@pytest.mark.parametrize("used", ["both", "sum", "norm"])
def test_the_norm_of_a_sum_and_its_gradients(size, padding, used):
    from proxima.runtime.engine.kernels import norm_kernels
    from proxima.runtime.engine.layer_functions import add_and_norm, first_norm

    torch.manual_seed(0)
    x, change, weight, given = random(7, size), random(7, size), random(size), random(7, size + padding)

    def run(function, kind):
        leaves = [part.detach().to(kind, copy=True).requires_grad_(True) for part in (x, change)]
        sums, out = function(*leaves, Norm(weight.to(kind), None), padding, 1e-6)
        loss = (sums * given[:, :size].to(kind).flip(0)).sum() if used != "norm" else 0.0
        if used != "sum":
            loss = loss + (out[:, :size] * given[:, :size].to(kind)).sum()
        loss.backward()
        return sums, out[:, :size], leaves[0].grad, leaves[1].grad

    ours, wanted = run(norm_kernels.add_and_rms_norm, KIND), run(add_and_norm, torch.float64)
    for found, exact in zip(ours, wanted, strict=True):
        torch.testing.assert_close(found.double(), exact, **NEAR)
    if used != "norm":
        return
    leaf, exact_leaf = (x.to(kind, copy=True).requires_grad_(True) for kind in (KIND, torch.float64))
    alone = norm_kernels.first_rms_norm(leaf, Norm(weight, None), padding, 1e-6)
    exact = first_norm(exact_leaf, Norm(weight.double(), None), padding, 1e-6)
    for result in (alone, exact):
        (result[:, :size] * given[:, :size].to(result.dtype)).sum().backward()
    torch.testing.assert_close(alone[:, :size].double(), exact[:, :size], **NEAR)
    torch.testing.assert_close(leaf.grad.double(), exact_leaf.grad, **NEAR)


@pytest.mark.skipif(not INTERPRETED, reason="compares on a CPU; on a GPU test_gpu.py does")
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_pass_and_its_gradients_by_kernels_are_the_decoders(name, tmp_path, monkeypatch):
    from proxima.config import PPOConfig
    from proxima.ppo_trainer import PPOTrainer
    from proxima.runtime.engine import lora_products
    from proxima.runtime.engine.graphed_passes import _loras_with_sinks
    from proxima.runtime.engine.kernels import TiledAttention
    from proxima.runtime.engine.layer_functions import kernel_functions
    from proxima.runtime.engine.layout import pack
    from proxima.world.tiny_models import make_tiny_model
    from tests.helpers import shake

    monkeypatch.setattr(lora_products, "ADDMM_TAKES_OUT_DTYPE", False)  # not on a CPU
    folder = str(make_tiny_model(tmp_path / name, name))
    policy = shake(PPOTrainer(PPOConfig(folder, device="cpu")), 0.05).models.policy
    decoder, parameters = policy.backbone.decoder, policy.parameters()
    layout = pack(torch.tensor([5, 9]), torch.tensor([4, 2]), 9, torch.device("cpu"))
    ids = torch.randint(200, (layout.total,))
    decoder.load(policy.adapter)
    loras = decoder.loras(policy.adapter)
    with_sinks = [_loras_with_sinks(*both) for both in zip(loras, decoder.blocks, strict=True)]
    _, functions = kernel_functions(decoder.shape, torch.device("cpu"))

    def attend(number, q, k, v):
        padding = decoder.blocks[number].out.padding
        return TiledAttention.apply(q, k, v, layout.tiles, decoder.shape.scale, padding)

    with policy.training():
        plain = decoder.run(ids, layout, loras, read=layout.read)
        given = torch.randn_like(plain)
        exact = torch.autograd.grad(plain, parameters, given)
        ours = decoder.run(ids, layout, with_sinks, attend, layout.read, functions)
        torch.autograd.grad(ours, parameters, given, allow_unused=True)
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)
    groups = [group for lora in with_sinks for group in lora if group is not None]
    found = {
        weight: scale * window
        for group in groups
        for weight, window, scale in lora_products.adapter_views(group, *group.sinks)
    }
    for parameter, gradient in zip(parameters, exact, strict=True):
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_every_kernel_that_is_compiled_ahead_can_be_called_as_it_is_there(quantize, tmp_path):
    """What compiles kernels before their first use calls them; each call must run."""
    from proxima.config import PPOConfig
    from proxima.ppo_trainer import PPOTrainer
    from proxima.runtime.engine.few_rows_decoder import FewRowsDecoder
    from proxima.runtime.engine.generation_slots import new_slots
    from proxima.runtime.engine.kernels import training_calls
    from proxima.world.tiny_models import make_tiny_model

    folder = str(make_tiny_model(tmp_path, "qwen3"))
    dtype = "float32" if INTERPRETED else "bfloat16"
    config = PPOConfig(folder, device=DEVICE, dtype=dtype, quantize=quantize)
    decoder = PPOTrainer(config).models.policy.backbone.decoder
    slots = new_slots(3, 64, decoder, torch.device(DEVICE))
    calls = [*FewRowsDecoder(decoder, slots).kernels(3), *training_calls(decoder)]
    assert len(calls) > 10
    for call in calls:
        with torch.no_grad():
            call()


def quantized(sizes, inputs, padding, nested, scale=1.0):
    """A joined weight of random matrices, and what it stands for beside its adapter, (sum out, in + padding)."""
    from proxima.core.nf4 import dequantize, quantize
    from proxima.runtime.engine.quantized_weights import Scratch, join

    matrices = [scale * (1 + part) * random(size, inputs) for part, size in enumerate(sizes)]
    weights = [quantize(matrix, nested) for matrix in matrices]  # offsets differ from part to part
    joined = join(weights, padding, Scratch(random(1)))
    joined.up.copy_(scale * random(sum(sizes), padding))
    return joined, torch.cat([torch.cat([dequantize(weight) for weight in weights]), joined.up], 1)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize(
    ("sizes", "inputs", "padding"), [((48, 16, 16), 64, 24), ((37, 350), 192, 8), ((6,), 2112, 0)]
)
def test_filling_a_scratch_gives_the_bits_that_dequantising_gives(sizes, inputs, padding, nested):
    from proxima.runtime.engine.kernels import fill
    from proxima.runtime.engine.quantized_weights import fill_plainly

    torch.manual_seed(0)
    joined, wanted = quantized(sizes, inputs, padding, nested)
    for function in (fill, fill_plainly):
        out = torch.full_like(wanted, 7)
        function(joined, out)
        assert torch.equal(out, wanted)
    assert torch.equal(joined.fill(), wanted)


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize(
    ("sizes", "inputs", "padding", "gated"),
    [
        ((48, 16, 16), 64, 24, False),
        ((50, 50), 192, 8, True),
        ((50, 50), 2112, 8, True),
        ((40,), 2112, 40, False),
        ((40,), 2048, 0, False),
    ],
)
def test_products_with_4_bit_weights_are_those_of_float64_and_do_not_depend_on_the_rows(
    sizes, inputs, padding, gated, nested
):
    from proxima.runtime.engine.kernels import nf4_kernels

    torch.manual_seed(0)
    joined, weight = quantized(sizes, inputs, padding, nested, scale=0.1 * inputs**-0.5)
    x, bias, down = random(20, inputs), 0.1 * random(sum(sizes)), random(padding, inputs) * inputs**-0.5
    inner = (x.double() @ down.double().t()).to(KIND)
    padded = torch.cat([x, inner], 1)
    exact = padded.double() @ weight.double().t() + bias.double()
    wanted = activate(exact, (50, 50), "silu") if gated else exact
    near = {"rtol": 1e-6, "atol": 1e-6} if INTERPRETED else {"rtol": 2e-2, "atol": 2e-2}
    calls = [lambda rows: nf4_kernels.nf4_product(padded[rows], joined, bias, gated=gated)]
    if not gated:
        calls.append(lambda rows: nf4_kernels.nf4_product(x[rows], joined, bias, down))
    for call in calls:
        out = call(slice(None))
        torch.testing.assert_close(out.double(), wanted, **near)
        same = {"rtol": 0, "atol": 0}  # the interpreter's products are numpy's, which round by place
        for rows in (slice(1), slice(8), slice(17), [19, 3, 0, 11]):
            torch.testing.assert_close(call(rows), out[rows], **(near if INTERPRETED else same))
