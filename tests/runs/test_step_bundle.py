"""A bundle is what was written, byte for byte, or it is refused; and a stranger's file can do nothing but be
refused."""

import hashlib
import json
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from proxima.runs import Run, read_bundle, write_bundle
from proxima.runs.step_bundle import FACTS, LARGEST_BUNDLE
from tests.tools.replay_recipe import BUNDLE

CONTENT = BUNDLE.read_bytes()


@pytest.fixture
def write(tmp_path):
    def write(content: bytes):
        path = tmp_path / "bundle.safetensors"
        path.write_bytes(content)
        return path

    return write


@pytest.fixture(scope="module")
def bundle():
    return read_bundle(BUNDLE)


@pytest.fixture
def seal(tmp_path):
    """A bundle of any facts and tensors, on disk."""

    def seal(facts, tensors):
        write_bundle(tmp_path / "sealed", facts, tensors)
        return tmp_path / "sealed"

    return seal


def header(content=CONTENT):
    size = struct.unpack("<Q", content[:8])[0]
    return 8 + size, json.loads(content[8 : 8 + size])


def test_what_is_written_is_read(bundle, seal):
    again = read_bundle(seal(bundle.facts, bundle.tensors))
    assert again.facts == bundle.facts
    assert again.tensors.keys() == bundle.tensors.keys()
    assert all(torch.equal(again.tensors[name], each) for name, each in bundle.tensors.items())
    assert len(CONTENT) < 100_000
    assert bundle.size == len(CONTENT)


def test_any_altered_byte_of_a_tensor_is_found_and_the_tensor_is_named(write):
    start, entries = header()
    chance = random.Random(0)
    for name, entry in entries.items():
        if name != "__metadata__" and entry["data_offsets"][0] < entry["data_offsets"][1]:
            place = start + chance.randrange(*entry["data_offsets"])
            altered = bytearray(CONTENT)
            altered[place] ^= 1 << chance.randrange(8)
            with pytest.raises(ValueError, match="checksum") as error:
                read_bundle(write(bytes(altered)))
            assert repr(name) in str(error.value)


def test_any_altered_byte_of_the_header_is_found(write):
    start, _ = header()
    chance = random.Random(1)
    places = {*range(16), *range(start - 16, start), *(chance.randrange(start) for _ in range(300))}
    for place in sorted(places):
        altered = bytearray(CONTENT)
        altered[place] ^= 1 << chance.randrange(8)
        with pytest.raises(ValueError, match="not a bundle, or a damaged one"):
            read_bundle(write(bytes(altered)))


@pytest.mark.parametrize("size", [0, 7, 8, 9, 100, len(CONTENT) // 2, len(CONTENT) - 1])
def test_a_file_that_ends_too_early_is_refused(write, size):
    with pytest.raises(ValueError, match="not a bundle, or a damaged one"):
        read_bundle(write(CONTENT[:size]))


def test_bytes_after_the_end_are_refused(write):
    with pytest.raises(ValueError, match="not a bundle, or a damaged one"):
        read_bundle(write(CONTENT + b"x"))


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 6) + b"[1, 2]",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        struct.pack("<Q", 10) + b'{"a":' + b"9" * 5,
        b"\x80\x04\x95" + b"pickle" * 10,
    ],
    ids=["huge header", "empty", "list", "deep", "cut", "pickle"],
)
def test_other_files_are_refused(write, content):
    with pytest.raises(ValueError, match="not a bundle, or a damaged one"):
        read_bundle(write(content))


def test_no_file_a_folder_and_a_pipe_are_refused(tmp_path):
    import os

    with pytest.raises(ValueError, match="there is no bundle"):
        read_bundle(tmp_path / "none")
    with pytest.raises(ValueError, match="it is a folder"):
        read_bundle(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe"):
        read_bundle(tmp_path / "pipe")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(LARGEST_BUNDLE + 1)  # a hole: it takes no space
    with pytest.raises(ValueError, match="it has 4,294,967,297 bytes"):
        read_bundle(path)


@pytest.mark.parametrize("head", [b"{}", b'{"rows":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}', None])
def test_nothing_is_read_after_a_header_that_is_not_sound(tmp_path, monkeypatch, head):
    """A hole of 4 GiB takes no space on disk, and would take 4 GiB of memory."""
    path, read = tmp_path / "hole", []
    start = CONTENT[: header()[0]] if head is None else struct.pack("<Q", len(head)) + head
    with path.open("wb") as file:
        file.write(start)
        file.truncate(LARGEST_BUNDLE)

    class Counted:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *given):
            self.file.close()

        def fileno(self):
            return self.file.fileno()

        def read(self, size=-1):
            read.append(size)
            return self.file.read(size)

    monkeypatch.setattr("proxima.runs.step_bundle.open_file", lambda path: Counted(path.open("rb")))
    with pytest.raises(ValueError, match="not a bundle, or a damaged one") as error:
        read_bundle(path)
    assert read == [8, len(start) - 8]
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, 1.5, -1e-3, True, "1"])
def test_a_tolerance_that_allows_any_difference_is_refused(bundle, seal, value):
    tolerance = {**bundle.facts["tolerance"], "numbers": value}
    with pytest.raises(ValueError, match="its tolerance is not made of numbers from 0 to 1"):
        read_bundle(seal({**bundle.facts, "tolerance": tolerance}, bundle.tensors))


def test_weights_without_numbers_are_refused(bundle, seal):
    """They take no bytes, and their shape may say anything."""
    name = next(each for each in bundle.tensors if each.startswith("before/policy/"))
    with pytest.raises(ValueError, match="none that a step has"):
        read_bundle(seal(bundle.facts, {**bundle.tensors, name: torch.zeros(2**30, 0)}))


def test_a_sealed_file_with_other_shapes_or_types_is_refused(bundle, seal):
    def refused(what, **tensors):
        changed = {**bundle.tensors, **{name.replace("__", "/"): each for name, each in tensors.items()}}
        kept = {name: each for name, each in changed.items() if each is not None}
        with pytest.raises(ValueError, match=what):
            read_bundle(seal(bundle.facts, kept))

    mask = bundle.tensors["tokens/mask"]
    refused("tokens/mask' is missing", tokens__mask=None)
    refused("does not fit the others", tokens__mask=mask[:, :-1])
    refused("none that a step has", tokens__mask=mask.to(torch.int64))
    refused("none that a step has", anything=mask.clone())
    refused("none that a step has", before=torch.zeros(2))
    refused("names sequences that it does not have", rows=torch.tensor([0, 1, 2, 99]))
    refused("names sequences that it does not have", rows=torch.tensor([-1, 1, 2, 3]))
    refused("does not fit the others", rows=torch.arange(99))
    wider = {
        name.replace("/", "__"): torch.cat([each, each], 1)
        for name, each in bundle.tensors.items()
        if name.startswith(("token_rewards/", "values/", "advantages/", "whitened/"))
    }
    refused("it has numbers of more tokens than its responses have", **wider)
    name = next(each for each in bundle.tensors if each.startswith("after/policy/"))
    refused("has another type or shape than before the step", **{name.replace("/", "__"): torch.zeros(2)})


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head.replace(b'{"__metadata__"', b'{"__metadata__":{"format":"x"},"__metadata__"', 1),
        lambda head: head.replace(b'{"__metadata__"', b'{"rows":{"dtype":"I64"},"__metadata__"', 1),
        lambda head: head.replace(b'"dtype":"I64"', b'"dtype":["I64"]', 1),
        lambda head: head.replace(b'"dtype":"I64"', b'"dtype":{}', 1),
        lambda head: head.replace(b'"shape":[', b'"shape":[true,', 1),
    ],
    ids=["metadata twice", "a tensor twice", "a list as type", "an object as type", "true as size"],
)
def test_a_header_that_two_readers_might_read_differently_is_refused(write, change):
    size = struct.unpack("<Q", CONTENT[:8])[0]
    head = change(CONTENT[8 : 8 + size])
    with pytest.raises(ValueError, match="not a bundle, or a damaged one"):
        read_bundle(write(struct.pack("<Q", len(head)) + head + CONTENT[8 + size :]))


def test_facts_that_name_one_thing_twice_are_refused(write):
    size = struct.unpack("<Q", CONTENT[:8])[0]
    entries = json.loads(CONTENT[8 : 8 + size])
    text = entries["__metadata__"]["facts"].replace("{", '{"step": 7, ', 1)
    entries["__metadata__"] |= {"facts": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    head = json.dumps(entries).encode()
    with pytest.raises(ValueError, match="its facts cannot be read"):
        read_bundle(write(struct.pack("<Q", len(head)) + head + CONTENT[8 + size :]))


@pytest.mark.parametrize("name", FACTS)
def test_a_sealed_file_with_other_facts_is_refused(bundle, seal, name):
    for value in (None, 1.5, [[]]):
        with pytest.raises(ValueError, match=name):
            read_bundle(seal({**bundle.facts, name: value}, bundle.tensors))


def test_a_newer_format_is_told_by_its_version(bundle, seal, monkeypatch):
    monkeypatch.setattr("proxima.runs.step_bundle.FORMAT", 2)
    path = seal({**bundle.facts, "proxima": "9.9"}, bundle.tensors)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"format 2, made by proxima '9.9'; this version reads 1"):
        read_bundle(path)


def test_what_cannot_be_written_leaves_nothing(bundle, tmp_path, monkeypatch):
    def full(own, path, sealed):
        path.write_bytes(b"a part")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("proxima.runs.step_bundle.save_file", full)
    with pytest.raises(ValueError, match=r"cannot write .*: No space left on device"):
        write_bundle(tmp_path / "b", bundle.facts, bundle.tensors)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write .*file/b: "):
        write_bundle(tmp_path / "file" / "b", bundle.facts, bundle.tensors)
    monkeypatch.undo()
    monkeypatch.setattr("proxima.runs.step_bundle.LARGEST_BUNDLE", 50_000)
    with pytest.raises(ValueError, match="is larger than 50,000: it is not written"):
        write_bundle(tmp_path / "b", bundle.facts, bundle.tensors)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_bundle_that_is_removed_while_a_run_is_read_is_left_out(tmp_path, monkeypatch):
    for name in ("step-1", "step-2"):
        (tmp_path / "replay").mkdir(exist_ok=True)
        (tmp_path / "replay" / f"{name}.safetensors").write_bytes(CONTENT)
    asked = Path.is_file

    def is_file_and_then_none(path):
        found = asked(path)
        if path.stem == "step-1":
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "is_file", is_file_and_then_none)
    assert [each["name"] for each in Run(tmp_path).bundles()] == ["step-2.safetensors"]
