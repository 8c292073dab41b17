"""Runs a program of the policy and calls its functions, in a process of its own.

    python code_program.py PROGRAM.py

Calls come in as JSON lines and values go out as JSON lines, by value: no object of the program, with an
`__eq__` of its own, reaches the tests. It uses the standard library only and is run by its path.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any

SCALARS = (type(None), bool, int, float, str)
MAX_DEPTH = 50


def pack(value: object, depth: int = 0) -> object:
    """A value as JSON, without loss for the types that tests compare."""
    if type(value) in SCALARS:
        return value
    if depth > MAX_DEPTH:
        raise TypeError("the value is nested too deeply")
    if hasattr(value, "tolist"):
        return pack(value.tolist(), depth + 1)
    if isinstance(value, dict):
        return {"dict": [[pack(key, depth + 1), pack(item, depth + 1)] for key, item in value.items()]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items = [pack(item, depth + 1) for item in value]
            return items if kind is list else {kind.__name__: items}
    raise TypeError(f"a {type(value).__name__} cannot be handed to the tests: they see plain values")


def unpack(packed: Any) -> Any:
    if isinstance(packed, list):
        return [unpack(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    ((kind, items),) = packed.items()
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in items}
    if kind == "bytes":
        return items.encode("latin-1")
    if kind == "complex":
        return complex(*items)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(unpack, items))


def answer(call: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    try:
        named = {key: unpack(value) for key, value in call["kwargs"].items()}
        return {"value": pack(names[call["name"]](*unpack(call["args"]), **named))}
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error)[:300]}


def main() -> None:
    calls, replies = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    names = runpy.run_path(sys.argv[1])
    for line in calls:
        print(json.dumps(answer(json.loads(line), names)), file=replies, flush=True)


if __name__ == "__main__":
    main()
