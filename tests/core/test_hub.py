"""Without the Hugging Face Hub: one line at once where something is missing, not a word where it was
downloaded before."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from proxima.core import hub
from proxima.core.hub import hub_or_cache

ROOT = Path(__file__).parents[2]
REVISION = "0123456789012345678901234567890123456789"
NEXT = "--- next ---"

MISSING = """
from proxima.cli import main

train = "train --model embedded --data prompts.txt --max-new-tokens 4 --batch-size 2 --minibatch-size 2".split()
train += "--learning-rate 1e-3 --value-learning-rate 1e-3".split()  # as suits the model: no warning
for words in (
    ["data", "check", "some/dataset"],
    ["data", "check", "some/dataset", "--limit", "5"],
    ["data", "check", "prompts.txt", "--model-name", "some/model"],
    ["train", "--model", "some/model", "--data", "prompts.txt", "--rewards", "ends_with_eos"],
    [*train, "--rewards", "some/classifier"],
    [*train, "--rewards", "ends_with_eos", "--value-model", "some/model"],
):
    try:
        main(words)
    except SystemExit as end:
        assert end.code == 2, words
    else:
        raise AssertionError(words)
"""

DOWNLOADED = """
import sys
from proxima import PPOConfig, PPOTrainer
from proxima.tools.doctor import examine

config = PPOConfig(model_name="some/tiny", max_new_tokens=4, rewards=("ends_with_eos",))
assert "setup" not in [finding.name for finding in examine(config, "prompts.txt", samples=2)]
trainer = PPOTrainer(config)
trainer.ppo_step(["a", "b"])
trainer.save("saved")
assert '"base_model_name_or_path": "some/tiny"' in open("saved/policy/adapter_config.json").read()
"""


@pytest.fixture(scope="module")
def said(tiny_folders, tmp_path_factory):
    """What the two scripts said, in one process with a cache of its own and a Hub at a port where nobody
    listens; and the address of that Hub."""
    folder = tmp_path_factory.mktemp("hub")
    (folder / "prompts.txt").write_text("One prompt\nAnother prompt\n")
    home = folder / "cache" / "hub" / "models--some--tiny"
    shutil.copytree(tiny_folders["qwen3"], home / "snapshots" / REVISION)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(REVISION)
    with socket.socket() as taken:  # bound, so nobody else listens there
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        settings = {"HF_ENDPOINT": address, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "0"}
        settings |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", f"{DOWNLOADED}\nprint('{NEXT}', file=sys.stderr)\n{MISSING}"],
            check=False,
            env=os.environ | settings,
            cwd=folder,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    downloaded, missing = done.stderr.split(f"{NEXT}\n")
    return downloaded.splitlines(), missing.splitlines(), address


def test_what_cannot_be_downloaded_is_one_line_each(said):
    _, lines, address = said
    assert len(lines) == 6, "\n".join(lines)
    for line, name in zip(
        lines, ["dataset", "dataset", "model", "model", "classifier", "model"], strict=True
    ):
        assert line.startswith("proxima: cannot load")
        assert f"some/{name}'" in line
        assert f"{address} cannot be reached" in line
        assert "it was not downloaded before. Offline, give" in line


def test_what_was_downloaded_before_is_used_without_a_word(said):
    assert said[0] == []


def test_the_hub_is_asked_once_a_minute_and_never_for_a_folder(tmp_path, monkeypatch):
    asked = []

    def nobody(self, address, timeout):
        asked.append(address)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_session", type("Session", (), {"head": nobody}))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.time, "monotonic", lambda: 59.0)
    hub._ask.cache_clear()
    for folder in (str(tmp_path), str(tmp_path / "not-there")):
        with hub_or_cache(folder) as problem:
            assert not problem
    for _ in range(2):
        with hub_or_cache("some/model") as problem:
            assert problem.endswith("cannot be reached (no network)")
            assert huggingface_hub.is_offline_mode()
        assert not huggingface_hub.is_offline_mode()
    assert len(asked) == 1
    monkeypatch.setattr(hub.time, "monotonic", lambda: 60.0)
    assert hub.unreachable()
    assert len(asked) == 2
    hub._ask.cache_clear()
