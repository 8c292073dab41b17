"""Weights for the golden bytes of NF4, by exact arithmetic: the same bits on every machine.

`golden/make_nf4.py` gives them to bitsandbytes, the tests to this package. It imports torch alone.
"""

import hashlib
from pathlib import Path

import torch

GOLDEN = Path(__file__).parent / "golden"
SHAPES = [(24, 80), (7, 13), (8, 2100)]  # full blocks; a short last one; more than 256 blocks
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def golden_weight(shape, dtype):
    """Rows of different sizes, and one of zeros."""
    rows, columns = (torch.arange(size) for size in shape)
    i, j = rows.unsqueeze(1), columns.unsqueeze(0)
    numbers = (i * 131 + j * 7919 + i * j % 97 * 53) % 2003 - 1001
    weight = numbers.float() / 1024 * 0.5 ** (i % 5) * (1 + j // 64 % 7)
    weight[1] = 0
    return weight.to(dtype)


def golden_name(shape, dtype, nested):
    return f"{shape[0]}x{shape[1]}.{str(dtype).removeprefix('torch.')}.{'nested' if nested else 'plain'}"


def digest(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).digest()
