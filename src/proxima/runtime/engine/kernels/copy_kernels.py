"""A Triton kernel that scales, casts and copies many small matrices in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy_all(table, block: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row i of the table: source, target, rows, columns, both row strides, bits of the factor; all int64."""
    entry = table + tl.program_id(0) * 7
    source = tl.load(entry).to(tl.pointer_type(tl.float32))
    target = tl.load(entry + 1).to(tl.pointer_type(kind))
    columns = tl.load(entry + 3)
    count, source_stride, target_stride = tl.load(entry + 2) * columns, tl.load(entry + 4), tl.load(entry + 5)
    factor = tl.load(entry + 6).to(tl.int32).to(tl.float32, bitcast=True)
    for start in range(tl.program_id(1) * block, count, tl.num_programs(1) * block):
        at = start + tl.arange(0, block)
        row, column = at // columns, at % columns
        values = tl.load(source + row * source_stride + column, mask=at < count, other=0.0) * factor
        tl.store(target + row * target_stride + column, values.to(kind), mask=at < count)


class Copies:
    """Copies of (float32 source, target, factor), all targets of one dtype. Tensors must keep their addresses."""

    def __init__(self, copies: list[tuple[Tensor, Tensor, float]]):
        self.kind = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
            copies[0][1].dtype
        ]
        rows = [
            [
                source.data_ptr(), target.data_ptr(), *source.shape, source.stride(0), target.stride(0),
                int(torch.tensor(factor).view(torch.int32)),
            ]
            for source, target, factor in copies
        ]  # fmt: skip
        self.table = torch.tensor(rows, dtype=torch.int64, device=copies[0][0].device)

    def __call__(self) -> None:
        _copy_all[(len(self.table), 4)](self.table, 1024, self.kind, num_warps=4)
