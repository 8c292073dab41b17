"""A Triton kernel of a decode step: attention that also writes the new keys and values; for decoders that
`FewRowsDecoder` does not compute, such as GPT-2."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # cached tokens that a program reads at once


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    query, new_key, new_value, keys, values, lengths, out, scale,
    query_stride, key_stride, value_stride, size: tl.constexpr, kv_heads: tl.constexpr, group: tl.constexpr,
    head: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One sequence and one key head: its queries against the first `length` cached tokens and the new one."""
    row, kv = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    lanes, dims, steps = tl.arange(0, 16), tl.arange(0, head), tl.arange(0, block)
    real = lanes < group  # the matrix unit wants 16 rows
    place = (kv * group + lanes[:, None]) * head + dims[None, :]
    q = tl.load(query + row * query_stride + place, mask=real[:, None], other=0.0)
    k_new = tl.load(new_key + row * key_stride + kv * head + dims)
    v_new = tl.load(new_value + row * value_stride + kv * head + dims)
    first = (row.to(tl.int64) * size * kv_heads + kv) * head
    slot = first + length.to(tl.int64) * kv_heads * head + dims
    tl.store(keys + slot, k_new)
    tl.store(values + slot, v_new)
    peak = (
        tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    )  # the new token: first in the running softmax
    total = tl.full([16], 1.0, tl.float32)
    gathered = tl.zeros([16, head], tl.float32) + v_new.to(tl.float32)[None, :]
    for start in range(0, length, block):
        seen = start + steps < length
        at = first + (start + steps)[:, None].to(tl.int64) * kv_heads * head + dims[None, :]
        k = tl.load(keys + at, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)).to(tl.float32) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        v = tl.load(values + at, mask=seen[:, None], other=0.0)
        gathered = gathered * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        peak = higher
    found = (gathered / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * kv_heads * group * head + place, found, mask=real[:, None])


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    """Attention of (B, H, D) queries over (B, S, Hkv, D) caches and (B, Hkv, D) new keys and values, which it
    also writes to the caches."""
    rows, heads, head = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    out = q.new_empty(q.shape)
    _decode[(rows, kv_heads)](
        q, k, v, keys, values, lengths, out, scale, q.stride(0), k.stride(0), v.stride(0),
        keys.shape[1], kv_heads, group, head, BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out


def fits(heads: int, kv_heads: int, head_size: int) -> bool:
    """Whether the kernel supports these shapes."""
    return heads // kv_heads <= 16 and head_size in (16, 32, 64, 128, 256)
