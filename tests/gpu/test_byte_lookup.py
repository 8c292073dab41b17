"""The look-up of codes by byte permutation, run without a GPU: its PTX in a small emulator, and its order of
inputs beside the order of its weights."""

import inspect
import random
import re

import numpy as np
import pytest

pytest.importorskip("triton")

from proxima.runtime.engine.kernels import nf4_kernels


def permuted(first: int, second: int, selector: int) -> int:
    """PTX's `prmt.b32` for selectors without a sign bit."""
    given = (first | second << 32).to_bytes(8, "little")
    chosen = [selector >> 4 * i & 15 for i in range(4)]
    assert max(chosen) < 8
    return int.from_bytes(bytes(given[i] for i in chosen), "little")


def run(ptx: str, values: dict[str, int]) -> dict[str, int]:
    def read(name: str) -> int:
        return int(name, 16) if name.startswith("0x") else int(name) if name.isdigit() else values[name]

    does = {
        "and.b32": lambda a, b: a & b,
        "or.b32": lambda a, b: a | b,
        "shr.u32": lambda a, b: a >> b,
        "prmt.b32": lambda a, b, c: permuted(a, b, c & 0xFFFF),
    }
    for name, target, rest in re.findall(r"(\w+\.[ub]32)\s+(\S+?),\s*(.+?);", ptx):
        values[target] = does[name](*map(read, re.split(r",\s*", rest)))
    return values


def source(kernel) -> str:
    return inspect.getsource(kernel.fn)


def test_each_code_chooses_its_weight():
    ptx = re.search('"""\\{(.*?)\\}"""', source(nf4_kernels._look_up), re.DOTALL)[1].split(";", 1)[1]
    whole = source(nf4_kernels._decode_by_bytes)
    low, high = re.search(r"l0, l1 = _bytes\(p0, p1, \"(\w+)\"", whole)[1], "0x7531"
    assert high in whole
    rng = random.Random(0)
    weights = [rng.randrange(1 << 16) for _ in range(16)]
    pairs = [weights[i] | weights[i + 1] << 16 for i in range(0, 16, 2)]
    tables = [
        permuted(pairs[i], pairs[i + 1], int(digits, 16)) for digits in (low, high) for i in range(0, 8, 2)
    ]
    given = {f"${3 + i}": table for i, table in enumerate(tables)}
    for codes in range(1 << 16):
        found = run(ptx, {"$2": codes | rng.randrange(1 << 16) << 16, **given})
        nibbles = [codes >> 4 & 15, codes & 15, codes >> 12, codes >> 8 & 15]  # the high half of a byte first
        one, two, three, four = (weights[code] for code in nibbles)
        assert (found["$0"], found["$1"]) == (one | two << 16, three | four << 16)


def test_weights_and_inputs_have_the_same_order():
    places = np.arange(256).reshape(4, 8, 2, 2, 2)  # block, word, which of its four pairs (two bits), half
    assert "tl.permute(_halves(four, kind), (0, 2, 3, 4, 1, 5))" in source(nf4_kernels._decode_by_bytes)
    ordered = places.transpose(1, 2, 3, 0, 4).reshape(256)
    k = np.arange(256)
    formula = re.search(r"return (.+)", source(nf4_kernels._columns_by_bytes))[1]
    assert (eval(formula, {"k": k}) == ordered).all()
    assert sorted(ordered) == list(range(256))
