"""`SharedRun`: what a `RunFolder` can do, for every process."""

import inspect

from proxima.ppo_trainer.shared_run import SharedCheckpoints, SharedRun
from proxima.runs.checkpoint import Checkpoints
from proxima.runs.run_writer import RunFolder
from proxima.runtime.distributed.process_group import Processes

NOT_SHARED = {"clean", "paths"}  # of checkpoints: the folder itself calls them


def public_methods(kind):
    return {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}


def test_every_method_of_a_run_folder_has_one_of_its_own():
    assert public_methods(SharedRun) == public_methods(RunFolder)
    assert public_methods(SharedCheckpoints) == public_methods(Checkpoints) - NOT_SHARED


def test_methods_take_what_those_of_a_run_folder_take():
    for name in public_methods(SharedRun):
        shared, own = (
            list(inspect.signature(getattr(kind, name)).parameters) for kind in (SharedRun, RunFolder)
        )
        assert shared == own[: len(shared)], name


def test_what_is_written_through_it_is_what_a_run_folder_writes(make_config, tmp_path):
    folders = []
    for name in ("shared", "own"):
        config = make_config(run_name=name)
        run = SharedRun(config, False, Processes()) if name == "shared" else RunFolder(config, False)
        with run:
            assert run.begin() == []
            run.write_metrics({"step": 1, "kl": 0.5})
            run.write_samples(1, [{"text": "a"}])
            run.write_warning(1, "kl", "far", "warn")
            run.write_tokens(1, [{"text": "a"}])
            run.write_results({"steps": 1})
            run.sync()
            assert run.warnings == 1
            folders.append(run.path)
    for file in (
        "metrics.jsonl",
        "samples.jsonl",
        "warnings.jsonl",
        "results.json",
        "tokens/step-00000001.json",
    ):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
