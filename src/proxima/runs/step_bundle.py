"""`Bundle`: one recorded PPO step in one file. In: tensors by name, and facts. Out: a safetensors file; and
back, every byte of it checked.

The file's metadata hold the facts as JSON, among them the SHA-256 of every tensor, and the SHA-256 of the
facts. Nothing is pickled. A file may come from a stranger: sizes, types and shapes are checked before
anything is made of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from proxima.core.json_record import Record, RecordView, within
from proxima.core.regular_files import open_file
from proxima.runs.checkpoint import Damaged, sync

FORMAT = 1
LARGEST_BUNDLE = 4 * 2**30  # bytes of a bundle
LARGEST_HEADER = 100_000_000  # bytes; the most that safetensors reads
TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATS = ("F64", "F32", "F16", "BF16")
LAYOUT: dict[str, tuple[tuple[str, ...], str]] = {
    # B sequences, P and R tokens of prompt and response; T sequences that were trained on, S tokens of these;
    # K kept tokens, V bytes of kept bits, N rewards, W tokens that have rewards, M minibatches; L layers with
    # X experts of each token
    "tokens/prompt_ids": (("I64",), "BP"),
    "tokens/prompt_mask": (("BOOL",), "BP"),
    "tokens/response_ids": (("I64",), "BR"),
    "tokens/mask": (("BOOL",), "BR"),
    "tokens/observed": (("BOOL",), "BR"),
    "tokens/ended": (("BOOL",), "B"),
    "tokens/truncated": (("BOOL",), "B"),
    "tokens/keys": (("I64",), "B"),
    "tokens/kept_ids": (("I32",), "BRK"),
    "tokens/kept_bits": (("U8",), "BRV"),
    "tokens/sampled_logprobs": (FLOATS, "BR"),
    "tokens/experts_prompt": (("U8", "I16"), "BPLX"),
    "tokens/experts_response": (("U8", "I16"), "BRLX"),
    "rewards/sequence": (FLOATS, "B"),
    "rewards/spread": (FLOATS, "B"),
    "rewards/by_name": (FLOATS, "NB"),
    "rewards/token": (FLOATS, "BW"),
    "rewards/failed_programs": (FLOATS, "B"),
    "rows": (("I64",), "T"),
}
GROUPS = {
    "scoring": "BR",
    "token_rewards": "TS",
    "values": "TS",
    "advantages": "TS",
    "whitened": "TS",
    "update": "M",
}
"""The first part of a name, and the shape of all tensors of that group."""
WEIGHTS = ("before", "after", "reference")
"""Groups of weights, of any shape; they are compared with the model's own when it is loaded."""
NEEDED = ("tokens/mask", "tokens/ended", "tokens/truncated", "rewards/sequence", "rewards/by_name", "rows")

TOLERANCE = {
    "float32": {"numbers": 1e-3, "gradients": 0.02, "update": 0.05},
    "float16": {"numbers": 0.05, "gradients": 0.15, "update": 0.3},
    "bfloat16": {"numbers": 0.25, "gradients": 0.5, "update": 0.5},
}
"""What another machine may differ by, by the type of the base's weights: `numbers`, absolute, in units of the
largest recorded number or 1; `gradients`, relative to a gradient's norm; `update`, the norm of the difference
between two updates of the adapters, relative to the norm of one."""
LARGEST_TOLERANCE = 1.0  # of a number's own size; more would allow any difference


@dataclass(frozen=True)
class Bundle:
    """A recorded step."""

    facts: Record
    tensors: dict[str, Tensor]
    """By name, `group/name`, on the CPU; `LAYOUT` says which there are."""
    path: Path | None = None
    size: int = 0
    """Bytes on disk."""

    @property
    def step(self) -> int:
        return int(self.facts["step"])

    @property
    def is_redacted(self) -> bool:
        return bool(self.facts["redacted"])

    def group(self, name: str) -> dict[str, Tensor]:
        """The tensors whose name begins with `name/`, by the rest of it."""
        start = f"{name}/"
        return {key.removeprefix(start): each for key, each in self.tensors.items() if key.startswith(start)}


def checksum(tensor: Tensor) -> str:
    """Of a tensor's type, shape and bytes."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def write_bundle(path: Path, facts: RecordView, tensors: Mapping[str, Tensor]) -> int:
    """Write a bundle in one move, without a copy of it in memory; its size in bytes."""
    own = {name: tensor.contiguous() for name, tensor in tensors.items()}
    text = json.dumps(
        {**facts, "format": FORMAT, "checksums": {name: checksum(each) for name, each in own.items()}}
    )
    sealed = {"format": "proxima replay", "facts": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(own, part, sealed)
        size = part.stat().st_size
        if size > LARGEST_BUNDLE:
            raise ValueError(
                f"a bundle of {size:,} bytes is larger than {LARGEST_BUNDLE:,}: it is not written"
            )
        sync(part)
        part.replace(path)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ValueError(f"cannot write {path}: {reason}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return size


def read_bundle(path: str | Path) -> Bundle:
    """A bundle whose every byte is as it was written; else an error that names what is not."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not 8 < size <= LARGEST_BUNDLE:
                raise Damaged(f"it has {size:,} bytes; a bundle has 9 to {LARGEST_BUNDLE:,}")
            facts, shapes = _header(file, size)
            _check_layout(shapes)
            file.seek(0)
            tensors = load(file.read())
        _check_checksums(facts, tensors)
        _check_facts(facts, tensors)
    except FileNotFoundError:
        raise ValueError(f"there is no bundle {path}; `proxima train --record-steps` writes them") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except (Damaged, SafetensorError) as error:
        raise ValueError(f"{path} is not a bundle, or a damaged one: {error}") from None
    return Bundle(facts, tensors, Path(path), size)


def _header(file: BinaryIO, size: int) -> tuple[Record, dict[str, tuple[str, list[int]]]]:
    """The facts, and type and shape of every tensor, from the file's first bytes; nothing after them is read
    before they are sound."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, LARGEST_HEADER):
        raise Damaged(f"its header would have {length:,} bytes, and the file has {size:,}")
    header = file.read(length).rstrip(b" ")
    entries = _json_object(header, "header")
    sealed = within(entries, "__metadata__")
    text = sealed.get("facts")
    if not header.endswith(b"}") or set(sealed) != {"format", "facts", "sha256"} or not isinstance(text, str):
        raise Damaged("its header is not that of a recorded step")
    if sealed["format"] != "proxima replay" or _digest(text) != sealed["sha256"]:
        raise Damaged(
            "its facts (settings, prompts, versions) do not have the checksum they were written with"
        )
    facts = _json_object(text, "facts")
    if facts.get("format") != FORMAT:
        raise Damaged(
            f"it has format {facts.get('format')!r}, made by proxima {facts.get('proxima')!r}; this version "
            f"reads {FORMAT}"
        )
    del entries["__metadata__"]
    found = {name: _checked_entry(name, entry) for name, entry in entries.items()}
    taken = sum(math.prod(shape) * TYPES[kind].itemsize for kind, shape in found.values())
    if 8 + length + taken != size:
        raise Damaged(f"its tensors take {taken:,} bytes, and the file has {size - 8 - length:,} for them")
    return facts, found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _json_object(text: str | bytes, what: str) -> Record:
    try:
        found = json.loads(text, object_pairs_hook=_named_once)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Damaged(f"its {what} cannot be read")
    return found


def _named_once(pairs: list[tuple[str, object]]) -> Record:
    """An object, no name of which is given twice: two readers might take different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def _checked_entry(name: str, entry: object) -> tuple[str, list[int]]:
    """Type and shape of a tensor, neither strange nor of another size than its bytes."""
    noted = entry if isinstance(entry, dict) else {}
    kind = noted.get("dtype")
    shape = noted.get("shape")
    place = noted.get("data_offsets")
    if (
        not isinstance(kind, str)
        or kind not in TYPES
        or not _are_counts(shape)
        or not _are_counts(place)
        or len(place) != 2
    ):
        raise Damaged(f"its tensor {name!r} has no type, shape or place that a recording has")
    if math.prod(shape) * TYPES[kind].itemsize != place[1] - place[0]:
        raise Damaged(f"its tensor {name!r} does not have the bytes that its shape {shape} takes")
    return kind, shape


def _are_counts(value: object) -> TypeGuard[list[int]]:
    """Sizes or places in a file: a few integers from 0 on."""
    return (
        isinstance(value, list)
        and len(value) <= 8
        and all(type(each) is int and 0 <= each <= LARGEST_BUNDLE for each in value)
    )


def _check_checksums(facts: Record, tensors: Mapping[str, Tensor]) -> None:
    noted = within(facts, "checksums")
    if odd := sorted(set(noted) ^ set(tensors)):
        raise Damaged(
            f"its tensor {odd[0]!r} is {'missing' if odd[0] in noted else 'not one it was made with'}"
        )
    for name, tensor in tensors.items():
        if checksum(tensor) != noted[name]:
            raise Damaged(f"its tensor {name!r} does not have the checksum it was written with")


def _check_layout(shapes: Mapping[str, tuple[str, list[int]]]) -> None:
    """Every tensor is one that a step has, and all that share a dimension agree on its size."""
    sizes: dict[str, int] = {}
    for name, (kind, shape) in shapes.items():
        group = name.split("/")[0]
        if group in WEIGHTS and kind in FLOATS and "/" in name and 0 not in shape:
            continue
        kinds, letters = LAYOUT.get(name, (FLOATS, GROUPS.get(group, "")))
        if not letters or kind not in kinds or len(letters) != len(shape):
            raise Damaged(f"its tensor {name!r} ({kind}, shape {shape}) is none that a step has")
        for letter, number in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, number) != number:
                raise Damaged(f"its tensor {name!r} has the shape {shape}, which does not fit the others")
    if missing := [name for name in NEEDED if name not in shapes]:
        raise Damaged(f"its tensor {missing[0]!r} is missing")
    if not sizes["B"]:
        raise Damaged("it has no sequences")
    if max(sizes.get("S", 0), sizes.get("W", 0)) > sizes["R"]:
        raise Damaged("it has numbers of more tokens than its responses have")
    for name, entry in shapes.items():
        if name.startswith("after/") and shapes.get(f"before/{name.removeprefix('after/')}", entry) != entry:
            raise Damaged(f"its tensor {name!r} has another type or shape than before the step")


FACTS: dict[str, type] = {
    **{"step": int, "redacted": bool, "proxima": str, "dtype": str, "device": str, "reason": str},
    **dict.fromkeys(("settings", "state", "environment", "base", "adapters", "tolerance", "metrics"), dict),
    **dict.fromkeys(("prompts", "tokens", "reward_names"), list),
}
"""Every fact of a bundle, and its type; where environments or tools answered, `episodes` besides."""
EPISODE: dict[str, type] = {"rewards": list, "failure": str, "malformed": int, "done": bool}
"""What is known of an episode besides its tokens."""


def _check_facts(facts: Record, tensors: Mapping[str, Tensor]) -> None:
    for name, kind in FACTS.items():
        if type(facts.get(name)) is not kind:
            raise Damaged(f"its fact {name!r} is not a {kind.__name__}")
    rows, count = tensors["rows"], len(tensors["tokens/mask"])
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < count):
        raise Damaged("its tensor 'rows' names sequences that it does not have")
    allowed = [facts["tolerance"].get(name) for name in TOLERANCE["float32"]]
    if not all(type(each) is float and 0 <= each <= LARGEST_TOLERANCE for each in allowed):
        raise Damaged(f"its tolerance is not made of numbers from 0 to {LARGEST_TOLERANCE:g}")
    if len(facts["reward_names"]) != len(tensors["rewards/by_name"]):
        raise Damaged("its reward_names do not fit its rewards")
    episodes = facts.get("episodes", [])
    if (
        not isinstance(episodes, list)
        or len(episodes) not in (0, count)
        or not all(map(_is_episode, episodes))
    ):
        raise Damaged("its episodes are not known ones, one per sequence")
    if facts["redacted"]:
        return
    if len(facts["prompts"]) != count or not all(map(_is_prompt, facts["prompts"])):
        raise Damaged("its prompts are not texts, one per sequence")
    read = tensors["tokens/mask"] | tensors.get("tokens/observed", torch.tensor(False))
    lengths = read.sum(1).tolist()
    if [len(each) if isinstance(each, list) else -1 for each in facts["tokens"]] != lengths:
        raise Damaged("its texts of tokens do not fit its tokens")


def _is_episode(value: object) -> bool:
    """One with a finite reward of each turn."""
    if not isinstance(value, dict) or {name: type(each) for name, each in value.items()} != EPISODE:
        return False
    return all(type(each) is float and math.isfinite(each) for each in value["rewards"])


def _is_prompt(value: object) -> bool:
    """A text with columns and turns."""
    kinds = {"text": str, "columns": dict, "turns": list}
    return isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in kinds.items())
