"""W&B and Trackio, as far as they can be tried without their packages: a stand-in that records what it is
told."""

import sys
import types

import pytest

from proxima.runs.tracking import open_trackers


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_hosted_trackers_get_the_settings_each_step_and_the_end(name, tmp_path, monkeypatch):
    told = []

    class Run:
        def log(self, metrics, step):
            told.append((step, metrics))

        def finish(self):
            told.append("finished")

    def init(**options):
        told.append(options)
        return Run()

    module = types.ModuleType(name)
    module.init = init
    monkeypatch.setitem(sys.modules, name, module)
    (tracker,) = open_trackers([name], tmp_path / "run7", {"seed": 3})
    tracker.log({"kl": 0.5}, 1)
    tracker.close()
    assert told[0]["name"] == "run7"
    assert told[0]["config"] == {"seed": 3}
    assert told[1:] == [(1, {"kl": 0.5}), "finished"]
