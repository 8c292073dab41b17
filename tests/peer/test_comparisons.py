"""The comparisons of tools/peer from preparing to the report, both sides, on a tiny model: what has drifted
shows here, and not after minutes of a GPU.

`make test-peer` runs this in the environment that has TRL.
"""

import importlib
import json
import os
import sys
from types import SimpleNamespace

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest

pytest.importorskip("trl", reason="TRL is not installed here: `make test-peer` has an environment for it")

from tools.peer import ppo, reward_models, side_by_side
from tools.peer.preference_pairs import INSTRUCT


class InThisProcess:
    """A job's process, with the flags that it gets: importing TRL again for each would take most of the
    time."""

    returncode = 0

    def __init__(self, command, **_):
        run(importlib.import_module(command[2]), *command[3:])

    def poll(self):
        return self.returncode

    def kill(self):
        pytest.fail("a job was still running")

    wait = kill


def run(module, *words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__name__, *map(str, words)])
        module.main()


def test_both_comparisons_run_from_pairs_to_reports(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "subprocess", SimpleNamespace(Popen=InThisProcess, STDOUT=None))
    monkeypatch.setattr(reward_models, "FOLDS", 1)  # of the five that the pairs are split into
    (tmp_path / INSTRUCT).parent.mkdir()
    rows = [
        {"instruction": f"Say {i}", "input": "", "chosen": f"Please: {i}", "rejected": "no" * (1 + i % 3)}
        for i in range(12)
    ]
    (tmp_path / INSTRUCT).write_text(json.dumps(rows))
    out = tmp_path / "out"
    run(reward_models, "prepare", "--out", out, "--data", tmp_path, "--model", tiny)
    run(reward_models, "all", "--out", out, "--batch", 4, "--max-length", 64)
    found = json.loads((out / "reward_models.json").read_text())
    assert found["missing"] == []
    for side in ("ours", "trl", "default"):
        assert found[side]["all"]["pairs"] == found[side]["instruct"]["pairs"] == 3
        assert found[side]["seconds_alone"] > 0
    assert len(found["ours less trl"]["by_fold"]["folds"]) == 1

    sizes = ("--batch", 4, "--prompt", 40, "--response", 4, "--epochs", 2)
    run(ppo, "all", "--out", out, "--steps", 1, "--seeds", 1, *sizes)
    found = json.loads((out / "ppo.json").read_text())
    assert set(found) == {"base 0", "ours 0", "trl 0", "ours against trl 0"}
    assert found["base 0"]["kl"] == pytest.approx(0, abs=1e-4)
    for side in ("ours 0", "trl 0"):
        assert len(json.loads((out / f"ppo-{side.replace(' ', '-')}.json").read_text())["kl_by_step"]) == 1
        assert found[side]["seconds_per_step"] > 0
        assert 1 <= found[side]["length"] <= 4
        assert abs(found[side]["kl"]) > 1e-6  # the trained policy is judged, not the base
