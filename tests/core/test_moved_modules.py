"""Import paths of earlier versions still work, and say what is written now."""

import importlib
import sys
import warnings

import pytest

from proxima.core.moved_modules import MOVED, new_name

DOCUMENTED = [
    ("proxima.evaluation", "evaluate_run"),
    ("proxima.stages.reward_trainer", "calibration_error"),
    ("proxima.stages.rating_trainer", "order_accuracy"),
    ("proxima.sampling", "token_logprobs"),
    ("proxima.report", "write_report"),
    ("proxima.ops", "whiten"),
    ("proxima.label", "Store"),
    ("proxima.guards", "alarms"),
    ("proxima.doctor", "estimate_memory"),
    ("proxima.pairs", "SAPairs"),
    ("proxima.types", "Prompt"),
    ("proxima.stages", "SFTTrainer"),
]


@pytest.mark.parametrize(("old", "name"), DOCUMENTED)
def test_a_documented_path_of_an_earlier_version_imports_the_same_object(old, name):
    new = importlib.import_module(new_name(old))
    for module in [module for module in sys.modules if new_name(module)]:
        del sys.modules[module]
    spec = new.__spec__
    with pytest.warns(DeprecationWarning, match=r" is now proxima\."):
        found = importlib.import_module(old)
    assert found is new
    assert getattr(found, name) is getattr(new, name)
    assert new.__spec__ is spec


@pytest.mark.parametrize("old", sorted(MOVED))
def test_every_moved_module_is_at_its_new_place(old):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert importlib.import_module(f"proxima.{old}") is importlib.import_module(f"proxima.{MOVED[old]}")


def test_what_was_never_there_is_still_not_there():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("proxima.no_such_room")
