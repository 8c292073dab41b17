"""What is recorded of code and hardware: any change of the code is seen, and a resumed run warns of no more
than what its numbers may depend on beside it."""

import pytest
import torch

from proxima.runs import environment
from proxima.runs.environment import DECIDES, MATTERS, changed, code_checksum, describe_environment


def test_the_checksum_of_code_changes_with_names_and_contents_of_source_files_alone(tmp_path):
    def checksum(**files):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in files.items():
            path = folder / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return code_checksum(folder)

    first = checksum(a_py="x = 1\n", sub__b_py="y = 2\n")
    assert checksum(sub__b_py="y = 2\n", a_py="x = 1\n") == first
    assert checksum(a_py="x = 1\n", sub__b_py="y = 2\n", notes="z") == first
    others = (
        checksum(a_py="x = 2\n", sub__b_py="y = 2\n"),
        checksum(a_py="y = 2\n", sub__b_py="x = 1\n"),
        checksum(a_py="x = 1\n", sub__c_py="y = 2\n"),
        checksum(a_py="x = 1\n"),
        checksum(a_py="x = 1\ny = 2\n", sub__b_py=""),
    )
    assert len({first, *others}) == 6


def test_the_environment_names_code_and_build_of_processor():
    found = describe_environment()
    assert len(found["code"]) == 64
    assert found["code"] == code_checksum()
    assert found["processor"] == describe_environment()["processor"]
    assert {*DECIDES} <= {*found}


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.148.08  Release Build  (root@host)\nGCC version: 12"
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\nGCC version: 9"
)


@pytest.mark.parametrize(
    ("text", "driver"), [(OPEN, "570.148.08"), (CLOSED, "535.54.03"), ("?", None), ("", None)]
)
def test_on_a_gpu_the_environment_names_driver_cudnn_and_triton(monkeypatch, tmp_path, text, driver):
    own = ("driver", "cudnn", "triton")
    assert torch.cuda.is_available() or [describe_environment()[name] for name in own] == [None] * 3
    if text:
        (tmp_path / "version").write_text(text)
    monkeypatch.setattr(environment, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(environment, "_version", lambda package: f"{package}'s")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    found = describe_environment()
    assert [found[name] for name in own] == [driver, 91002, "triton's"]


def test_a_resumed_run_does_not_warn_of_code_or_build_of_processor():
    now = describe_environment()
    assert changed({**now, "code": "another", "processor": "another"}, now) == []
    for name in MATTERS:
        assert changed({**now, name: "another"}, now) == [f"{name}: another -> {now[name]}"]
