"""Never lose a run: what was interrupted resumes bit-exactly; what is damaged is skipped; nothing is
half-written."""

import errno
import json
import logging
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from proxima.cli import main
from proxima.config import PPOConfig, RewardSpec
from proxima.core.errors import Interrupted, RewardFailure
from proxima.core.types import Prompt
from proxima.ppo_trainer import PPOTrainer
from proxima.runs.checkpoint import Checkpoints, write_folder
from proxima.runs.checkpoint import atomic_folders as folders
from proxima.runs.run_writer import RunFolder
from tests.conftest import count_e
from tests.helpers import Crash, crash_at, difference, weights

PROMPTS = [f"prompt {i}" for i in range(6)]
EPOCHS = 3  # 9 steps of 2 prompts


def noisy(prompts, texts):
    """A reward that draws from every global generator."""
    return [len(text) + random.random() + float(np.random.rand()) + float(torch.rand(())) for text in texts]


def coin(prompts, ours, theirs):
    """A judge that does so too."""
    return [random.random() for _ in prompts]


def seed_all():
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)


@pytest.fixture
def settings(make_config):
    base = {
        "batch_size": 2,
        "max_new_tokens": 4,
        "ppo_epochs": 1,
        "minibatch_size": 2,
        "checkpoint_every": 2,
    }
    return lambda **more: make_config(**{**base, **more})


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """Without times."""
    read = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("seconds")} for line in read]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def same_run(left: Path, right: Path) -> bool:
    same = all(
        lines(left, name) == lines(right, name)
        for name in ("metrics.jsonl", "samples.jsonl", "warnings.jsonl")
    )
    same = same and all(
        (left / name).read_bytes() == (right / name).read_bytes()
        for name in ("samples.jsonl", "warnings.jsonl")
    )
    return same and all(files(left / role) == files(right / role) for role in ("policy", "value", "tokens"))


KINDS = {
    "lora": {},
    "full": {"lora_r": 0, "learning_rate": 1e-4, "value_learning_rate": 1e-4},
    "shared trunk": {"value_model": "policy"},
    "adaptive": {
        "kl_controller": "adaptive",
        "kl_target": 0.1,
        "kl_horizon": 10,
        "lr_schedule": "cosine",
        "warmup_steps": 2,
    },
    "budget": {"kl_controller": "budget", "kl_target": 0.02, "critic_warmup_steps": 2},
    "groups": {
        "adv_estimator": "rloo",
        "num_generations": 3,
        "whiten_advantages": False,
        "value_learning_rate": 1e-4,
    },
    "critic": {
        "critic_warmup_until": 0.05,
        "value_epochs": 2,
        "cut_responses": "bootstrap",
        "objective": "dis",
        "lam_alpha": 1.5,
    },
    "ensemble": {"kl_controller": "budget", "kl_target": 0.02, "checkpoint_every": 1},
    "random reward": {"rewards": (noisy,)},
    "judges": {"judges": (RewardSpec(noisy, name="noisy"), coin), "checkpoint_every": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_died_resumes_bit_exactly(settings, kind, request):
    more = KINDS[kind]
    if kind == "ensemble":
        folder = request.getfixturevalue("ensemble")
        more = {**more, "rewards": RewardSpec(folder, options={"doubt_coef": 2.0})}
    whole, cut = (settings(run_name=name, **more) for name in ("whole", "cut"))
    seed_all()
    expected = PPOTrainer(whole).train(PROMPTS, 2, ["held out"])
    seed_all()
    for step in (1, 4, 5):  # before the first checkpoint but one, on one, beyond one
        with pytest.raises(Crash):
            crash_at(PPOTrainer(cut), step).train(PROMPTS, 2, ["held out"], resume=True)
        random.seed(99)  # a new process knows nothing of the old one's generators
        torch.manual_seed(99)
    results = PPOTrainer(cut).train(PROMPTS, 2, ["held out"], resume=True)
    assert len(results.metrics) == 6
    assert all(("reward_spread" in step) == (kind == "ensemble") for step in results.metrics)
    assert same_run(expected.run_folder, results.run_folder)
    assert (results.best_step, results.stop_reason) == (expected.best_step, expected.stop_reason)
    assert lines(results.run_folder)[-1]["validation/win_rate"] is not None


def test_early_stopping_is_remembered_across_a_crash(settings):
    def falling(prompts, texts):
        return [-float(falling.calls)] * len(texts)

    falling.calls = 0
    config = settings(run_name="stops", rewards=(falling,), patience=4, checkpoint_every=1)
    with pytest.raises(Crash):
        crash_at(PPOTrainer(config), 3).train(PROMPTS, EPOCHS)
    results = PPOTrainer(config).train(PROMPTS, EPOCHS, resume=True)
    assert results.stop_reason == "no improvement over 0 (step 1) in 4 evaluations"
    assert len(results.metrics) == 5


def test_a_finished_run_stays_finished_and_is_written_again_where_its_weights_were_lost(settings):
    config = settings(run_name="done")
    first = PPOTrainer(config).train(PROMPTS)
    before = files(first.run_folder)
    shutil.rmtree(first.run_folder / "policy")
    trainer = PPOTrainer(config)
    trainer.ppo_step = None  # nothing is trained
    again = trainer.train(PROMPTS, resume=True)
    assert files(again.run_folder / "policy") == {
        name[7:]: data for name, data in before.items() if name.startswith("policy/")
    }
    assert (again.stop_reason, again.best_step, len(again.metrics)) == (first.stop_reason, first.best_step, 3)
    assert [step["seconds"] for step in again.metrics] == [step["seconds"] for step in first.metrics]
    assert json.loads((first.run_folder / "results.json").read_text())["stop_reason"] == "all epochs done"


def test_the_folder_holds_what_a_run_needs(settings):
    folder = PPOTrainer(settings(run_name="all")).train(PROMPTS).run_folder
    names = (
        "config.yaml environment.json metrics.jsonl samples.jsonl warnings.jsonl log.txt results.json "
        "checkpoints policy"
    )
    assert set(names.split()) <= {path.name for path in folder.iterdir()}
    environment = json.loads((folder / "environment.json").read_text())
    assert (
        environment["packages"]["torch"] == torch.__version__.split("+")[0]
        or environment["packages"]["torch"]
    )
    assert environment["threads"] == torch.get_num_threads()
    kept = sorted((folder / "checkpoints").iterdir())
    assert [path.name for path in kept if not path.name.startswith(".")][-1] == "step-00000003"
    assert {path.suffix for path in kept[-1].rglob("*") if path.is_file()} == {".json", ".safetensors"}
    assert "checkpoint" in (folder / "log.txt").read_text()


def test_the_newest_and_the_best_are_kept(tmp_path):
    kept = Checkpoints(tmp_path, keep=2)
    for step, evaluation in enumerate([0.0, 5.0, 1.0, None, 5.0, 2.0, 2.0]):
        kept.write({"step": step, "eval_reward": evaluation}, lambda folder: (folder / "a").write_text("b"))
    assert [path.name for path in kept.paths()] == ["step-00000001", "step-00000005", "step-00000006"]
    assert kept.best().step == 1
    assert kept.newest().step == 6


def test_a_step_written_again_and_again_leaves_a_whole_checkpoint_at_every_moment(tmp_path, monkeypatch):
    """As rollbacks to one step do, with one checkpoint kept: whenever the process dies, there is one to go
    on from."""
    kept, found = Checkpoints(tmp_path, keep=1), []

    def write(step):
        kept.write({"step": step, "eval_reward": None}, lambda folder: (folder / "a").write_text("b"))
        return [path.name for path in kept.paths()]

    def looking(change):
        def look(*given, **named):
            found.append(kept.newest())  # as a process would find it that died here
            return change(*given, **named)

        return look

    assert write(5) == ["step-00000005"]
    monkeypatch.setattr(Path, "rename", looking(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", looking(shutil.rmtree))
    assert write(10) == ["step-00000010"]
    for again in range(1, 12):
        assert write(10) == [f"step-00000010-{again}"]
    assert len(found) > 24
    assert None not in found
    assert write(11) == ["step-00000011"]


def test_names_that_are_no_checkpoints_are_left_alone(tmp_path):
    (tmp_path / "step-00000007.bak").mkdir()
    kept = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        kept.write({"step": step, "eval_reward": None}, lambda folder: (folder / "a").write_text("b"))
    assert kept.newest().step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000007.bak"]


def test_a_folder_that_is_written_anew_is_never_away_except_for_the_move(tmp_path, monkeypatch):
    target = write_folder(
        tmp_path / "policy", lambda folder: (folder / "a").write_text("old"), manifest=False
    )

    def dies(path, new):
        if path.suffix == ".part":
            raise KeyboardInterrupt
        return real(path, new)

    real = Path.rename
    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        write_folder(target, lambda folder: (folder / "a").write_text("new"), manifest=False)
    assert (target / "a").read_text() == "old"
    monkeypatch.undo()
    write_folder(target, lambda folder: (folder / "a").write_text("new"), manifest=False)
    assert (target / "a").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_new_best_on_validation_prompts_is_a_checkpoint(settings):
    results = PPOTrainer(settings(checkpoint_every=100, keep_checkpoints=1)).train(
        PROMPTS, EPOCHS, ["held out"]
    )
    kept = {int(path.name[5:]) for path in (results.run_folder / "checkpoints").glob("step-*")}
    assert kept == {results.best_step, 9}


# --- damage ---


def spoil(kind: str, folder: Path) -> None:
    victim = folder / "policy" / "adapter_model.safetensors"
    if kind == "truncated":
        os.truncate(victim, victim.stat().st_size - 1)
    elif kind == "flipped":
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    elif kind == "missing":
        (folder / "value_optimizer.safetensors").unlink()
    elif kind == "extra":
        (folder / "value" / "odd.bin").write_text("x")
    elif kind == "state":
        text = (folder / "state.json").read_text()
        (folder / "state.json").write_text(text.replace('"kl_coef": 0.1', '"kl_coef": 0.2'))
    elif kind == "no manifest":
        (folder / folders.MANIFEST).unlink()
    elif kind == "empty manifest":
        (folder / folders.MANIFEST).write_text("")
    elif kind == "odd manifest":
        (folder / folders.MANIFEST).write_text('{"format": 1, "files": [1]}')


DAMAGE = {
    "truncated": "adapter_model.safetensors has",
    "flipped": "adapter_model.safetensors does not have the checksum",
    "missing": "value_optimizer.safetensors is missing",
    "extra": "odd.bin is not in the manifest",
    "state": "state.json does not have the checksum",
    "no manifest": "manifest.json cannot be read",
    "empty manifest": "manifest.json cannot be read",
    "odd manifest": "manifest.json cannot be read",
}


@pytest.fixture(scope="module")
def finished(tiny_folders, tmp_path_factory):
    """A run of 4 steps with checkpoints of steps 2 and 4, never changed by a test."""
    config = PPOConfig(
        tiny_folders["qwen3"],
        rewards=(count_e,),
        batch_size=2,
        max_new_tokens=4,
        ppo_epochs=1,
        checkpoint_every=2,
        eval_every=100,
        run_dir=str(tmp_path_factory.mktemp("finished")),
        run_name="one",
    )
    return config, PPOTrainer(config).train(PROMPTS[:4], 2).run_folder


@pytest.fixture
def copied(finished, tmp_path):
    config, folder = finished
    shutil.copytree(folder, tmp_path / "one")
    return PPOConfig(**{**vars(config), "run_dir": str(tmp_path)}), tmp_path / "one"


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(finished, copied, caplog, kind):
    config, folder = copied
    spoil(kind, folder / "checkpoints" / "step-00000004")
    with caplog.at_level(logging.WARNING):
        PPOTrainer(config).train(PROMPTS[:4], 2, resume=True)
    said = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert len(said) == 1
    assert "step-00000004 is damaged; skipped" in said[0]
    assert DAMAGE[kind] in said[0]
    assert said[0] in (folder / "log.txt").read_text()
    assert same_run(finished[1], folder)  # from step 2 on, the same again


@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "random.safetensors", "value/head.safetensors"]
)
def test_no_flipped_bit_goes_unseen(copied, name):
    """A hundred bits of each kind of file: the checkpoint is refused, or reads exactly as before."""
    _, folder = copied
    newest = folder / "checkpoints" / "step-00000004"
    path, state = newest / name, json.loads((newest / "state.json").read_text())
    good = path.read_bytes()
    choose = random.Random(name)
    unseen = 0
    logging.disable(logging.CRITICAL)
    for _ in range(100):
        data = bytearray(good)
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        path.write_bytes(data)
        found = Checkpoints(folder / "checkpoints", 2).newest()
        unseen += found.step == 4
        assert found.step == 2 or found.state == state
    logging.disable(logging.NOTSET)
    assert unseen == 0 or name == "manifest.json"  # its white space


def test_with_nothing_good_left_a_run_is_refused_and_left_as_it_is(copied):
    config, folder = copied
    for path in (folder / "checkpoints").glob("step-*"):
        spoil("flipped", path)
    before = files(folder / "checkpoints") | {"metrics": (folder / "metrics.jsonl").read_bytes()}
    with pytest.raises(ValueError, match=r"every checkpoint in .* is damaged"):
        PPOTrainer(config).train(PROMPTS[:4], 2, resume=True)
    assert files(folder / "checkpoints") | {"metrics": (folder / "metrics.jsonl").read_bytes()} == before
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(ValueError, match="has metrics but no checkpoint"):
        PPOTrainer(config).train(PROMPTS[:4], 2, resume=True)


def test_lines_after_the_checkpoint_and_half_lines_are_cut(finished, copied):
    config, folder = copied
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "kl"')
    PPOTrainer(config).train(PROMPTS[:4], 2, resume=True)
    assert same_run(finished[1], folder)


def test_what_a_kill_left_half_written_is_never_read_and_swept_away(finished, copied):
    config, folder = copied
    kept = folder / "checkpoints"
    shutil.copytree(kept / "step-00000004", kept / ".step-00000006.part")
    shutil.move(kept / "step-00000004", kept / ".step-00000004.gone")
    PPOTrainer(config).train(PROMPTS[:4], 2, resume=True)
    assert sorted(path.name for path in kept.iterdir()) == ["step-00000002", "step-00000004"]
    assert same_run(finished[1], folder)


# --- what may change ---


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 1e-2},
        {"seed": 5},
        {"top_k": 3},
        {"rewards": ("length_band,low=1,high=2",)},
        {"batch_size": 4},
    ],
)
def test_settings_that_alter_the_maths_are_refused_by_name(copied, change):
    config, folder = copied
    before = files(folder / "checkpoints") | {"metrics": (folder / "metrics.jsonl").read_bytes()}
    changed = PPOConfig(**{**vars(config), **change})
    with pytest.raises(ValueError, match=rf"another run: {next(iter(change))} \(.* then, .* now\)"):
        PPOTrainer(changed).train(PROMPTS[:4], 2, resume=True)
    assert files(folder / "checkpoints") | {"metrics": (folder / "metrics.jsonl").read_bytes()} == before


def test_epochs_shape_the_learning_rates_unless_these_are_constant(copied, settings):
    config, _ = copied
    with pytest.raises(ValueError, match=r"number of epochs.*4 steps then, 6 now"):
        PPOTrainer(config).train(PROMPTS[:4], 3, resume=True)
    constant = settings(lr_schedule="constant", run_name="more")
    PPOTrainer(constant).train(PROMPTS, 1)
    more = PPOTrainer(constant).train(PROMPTS, 3, resume=True)
    at_once = PPOTrainer(settings(lr_schedule="constant", run_name="at once")).train(PROMPTS, 3)
    assert same_run(more.run_folder, at_once.run_folder)


def test_with_force_the_new_settings_hold(copied):
    config, _ = copied
    trainer = PPOTrainer(PPOConfig(**{**vars(config), "kl_coef": 0.7, "learning_rate": 0.5}))
    results = trainer.train(PROMPTS[:4], 3, resume=True, force=True)
    assert [step["kl_coef"] for step in results.metrics] == [0.1] * 4 + [0.7] * 2
    assert results.metrics[4]["learning_rate"] == pytest.approx(0.5 / 3)


def test_what_force_cannot_fix_leaves_the_run_as_it_is(copied):
    config, folder = copied
    before = files(folder / "checkpoints") | {"metrics": (folder / "metrics.jsonl").read_bytes()}
    with pytest.raises(ValueError, match="cannot load the weights"):
        PPOTrainer(PPOConfig(**{**vars(config), "lora_r": 3})).train(PROMPTS[:4], 2, resume=True, force=True)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="already holds a run"):
        PPOTrainer(config).train(PROMPTS[:4], 2)
    assert files(folder / "checkpoints") == {name: data for name, data in before.items() if name != "metrics"}


def test_other_prompts_are_refused_even_by_force(copied):
    config, _ = copied
    for prompts in (
        PROMPTS[:3],
        PROMPTS[1:5],
        PROMPTS[3::-1],
        [Prompt(text, {"answer": 1}) for text in PROMPTS[:4]],
    ):
        with pytest.raises(ValueError, match=f"trained on other prompts .4 then, {len(prompts)} now"):
            PPOTrainer(config).train(prompts, 2, resume=True, force=True)
    with pytest.raises(ValueError, match="the validation prompts"):
        PPOTrainer(config).train(PROMPTS[:4], 2, ["held out"], resume=True)


def test_memory_settings_are_free_and_an_out_of_memory_split_is_remembered(settings):
    config = settings(run_name="split")
    trainer = crash_at(PPOTrainer(config), 5)
    trainer.models.micro_batches.size, trainer.models.micro_batches.tokens = 3, 77
    with pytest.raises(Crash):
        trainer.train(PROMPTS, EPOCHS)
    for change, expected in (({}, (3, 77)), ({"micro_batch_size": 2, "keep_checkpoints": 5}, (2, 8192))):
        again = PPOTrainer(settings(run_name="split", **change))
        with pytest.raises(Crash):
            crash_at(again, 6).train(PROMPTS, EPOCHS, resume=True)
        assert (again.models.micro_batches.size, again.models.micro_batches.tokens) == expected


def test_resuming_needs_a_name_and_starts_where_there_is_nothing(settings):
    with pytest.raises(ValueError, match="resuming needs run_name"):
        PPOTrainer(settings()).train(PROMPTS, resume=True)
    assert len(PPOTrainer(settings(run_name="fresh")).train(PROMPTS, resume=True).metrics) == 3


# --- things in the way ---


def test_a_second_process_on_the_same_run_is_refused(settings):
    config = settings(run_name="held")
    with RunFolder(config):
        for resume in (False, True):
            with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
                RunFolder(config, resume)
    with RunFolder(config):  # free again
        pass


def fail_from(monkeypatch, number: int, code: int) -> None:
    """From this flush of the disk on, each fails."""
    real, calls = os.fsync, []

    def fsync(file):
        calls.append(file)
        if len(calls) >= number:
            raise OSError(code, os.strerror(code))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_stops_the_run_with_a_clear_line_and_the_earlier_checkpoint_is_good(
    settings, monkeypatch
):
    whole = PPOTrainer(settings(run_name="whole")).train(PROMPTS, EPOCHS)
    config = settings(run_name="full")
    trainer = PPOTrainer(config)
    with monkeypatch.context() as patch:
        step = trainer.ppo_step

        def then_full(prompts):
            if trainer.step == 5:
                fail_from(patch, 7, errno.ENOSPC)  # in the middle of the next checkpoint
            return step(prompts)

        trainer.ppo_step = then_full
        with pytest.raises(
            ValueError, match=r"step-00000006: No space left on device; .*\(step-00000004 is still there\)"
        ):
            trainer.train(PROMPTS, EPOCHS)
    kept = sorted(path.name for path in (Path(config.run_dir) / "full" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000004"]  # and nothing half-written
    results = PPOTrainer(config).train(PROMPTS, EPOCHS, resume=True)
    assert same_run(whole.run_folder, results.run_folder)


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 1 MB, where this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(settings, small_disk):
    """The first checkpoint fits, the second does not; with room again the run continues."""
    whole = PPOTrainer(settings(run_name="whole")).train(PROMPTS, EPOCHS)
    config = settings(run_dir=str(small_disk), run_name="one")
    with pytest.raises(
        ValueError, match=r"step-00000002: .*o space left on device.* \(step-00000000 is still there\)"
    ):
        PPOTrainer(config).train(PROMPTS, EPOCHS)
    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    results = PPOTrainer(config).train(PROMPTS, EPOCHS, resume=True)
    assert same_run(whole.run_folder, results.run_folder)


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(settings, small_disk):
    config = settings(run_dir=str(small_disk), run_name="one")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    trainer = PPOTrainer(config)
    trainer.ppo_step = None
    with pytest.raises(ValueError, match=r"cannot write to the run folder under .*: Read-only file system"):
        trainer.train(PROMPTS)


def test_a_file_where_the_folder_should_be(settings, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="cannot write to the run folder"):
        PPOTrainer(settings(run_dir=str(tmp_path / "taken"), run_name="one")).train(PROMPTS)


# --- signals ---


def signalling(number: int, at: int, times: int = 1):
    """A reward during whose call number `at` this process gets a signal."""

    def reward(prompts, texts):
        reward.calls += 1
        if reward.calls == at:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return count_e(prompts, texts)

    reward.calls = 0
    return reward


@pytest.mark.parametrize(
    ("number", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_signal_ends_the_step_writes_a_checkpoint_and_says_how_to_go_on(settings, number, code, name):
    before = signal.getsignal(number)
    whole = PPOTrainer(settings(run_name="whole", rewards=(signalling(number, 0),))).train(PROMPTS, EPOCHS)
    config = settings(
        run_name="cut short", rewards=(signalling(number, 5),), checkpoint_every=0
    )  # 2 calls per step
    with pytest.raises(Interrupted, match=f"by {name} after step 3.*--resume --run-name 'cut short'") as stop:
        PPOTrainer(config).train(PROMPTS, EPOCHS)
    assert stop.value.exit_code == code
    assert isinstance(stop.value, KeyboardInterrupt)  # a script that trains in a loop stops too
    assert signal.getsignal(number) is before
    results = PPOTrainer(config).train(PROMPTS, EPOCHS, resume=True)
    assert same_run(whole.run_folder, results.run_folder)


def test_a_second_ctrl_c_stops_at_once_and_the_last_checkpoint_is_good(settings):
    reward = signalling(signal.SIGINT, 4, times=2)
    config = settings(run_name="cut", rewards=(reward,))
    with pytest.raises(KeyboardInterrupt) as stop:
        PPOTrainer(config).train(PROMPTS, EPOCHS)
    assert not isinstance(stop.value, Interrupted)
    assert reward.calls == 4
    folder = Path(config.run_dir) / "cut"
    assert not (folder / "policy").exists()
    assert len(PPOTrainer(config).train(PROMPTS, EPOCHS, resume=True).metrics) == 9


def test_a_reward_that_failed_is_waited_for_and_the_run_continues(settings):
    def reward(prompts, texts):
        reward.calls += 1
        if reward.calls in (7, 8):  # 2 calls per step; one that raises is tried twice
            raise OSError("server down")
        return count_e(prompts, texts)

    reward.calls = 8
    whole = PPOTrainer(settings(run_name="whole", rewards=(reward,))).train(PROMPTS, EPOCHS)
    reward.calls = 0
    config = settings(run_name="cut", rewards=(reward,), checkpoint_every=100)
    with pytest.raises(RewardFailure, match="weights as they were before this step"):
        PPOTrainer(config).train(PROMPTS, EPOCHS)
    results = PPOTrainer(config).train(PROMPTS, EPOCHS, resume=True)
    assert results.metrics[2]["step"] == 3
    assert same_run(whole.run_folder, results.run_folder)


# --- the command ---


def test_the_command_resumes(tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS))
    command = [
        "train",
        "--model",
        tiny,
        "--rewards",
        "length_band,low=1,high=2",
        "--data",
        "prompts.txt",
        "--run-name",
        "one",
    ]
    command += ["--max-new-tokens", "2", "--batch-size", "2", "--ppo-epochs", "1"]
    with monkeypatch.context() as patch:
        step = PPOTrainer.ppo_step

        def signalled(self, *given):
            if self.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, *given)

        patch.setattr(PPOTrainer, "ppo_step", signalled)
        with pytest.raises(SystemExit) as stop:
            main(command)
    assert stop.value.code == 143
    assert "proxima: stopped by SIGTERM after step 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(command)
    assert "already holds a run; continue it with --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([*command, "--resume", "--gamma", "0.5"])
    assert stop.value.code == 2
    assert "gamma (0.99 then, 0.5 now); change them back or add --force" in capsys.readouterr().err
    main([*command, "--resume"])
    assert "resumed after step 2 of 3" in capsys.readouterr().out
    assert [line["step"] for line in lines(Path("runs/one"))] == [1, 2, 3]
    main([*command, "--resume", "--gamma", "0.5", "--force", "--epochs", "2"])
    assert len(lines(Path("runs/one"))) == 6


def test_weights_before_and_after_differ(settings):
    """So that the comparisons above can fail."""
    trainer = PPOTrainer(settings())
    before = weights(trainer)
    trainer.train(PROMPTS[:2])
    assert difference(before, weights(trainer)) > 1e-4


def test_checkpoints_are_ranked_by_judges_if_there_are_any(make_config, tmp_path):
    def shorter(prompts, texts):
        return [-float(len(text)) for text in texts]

    judged = {"judges": ({"source": shorter, "name": "shorter"},), "eval_every": 1, "checkpoint_every": 1}
    trainer = PPOTrainer(make_config(**judged, batch_size=2, run_name="judged"))
    results = trainer.train(["one", "two", "three", "four"], validation_prompts=["five", "six", "seven"])
    ranked = {
        state["step"]: state["eval_reward"]
        for path in (tmp_path / "runs" / "judged" / "checkpoints").glob("*/state.json")
        for state in [json.loads(path.read_text())]
        if state["step"]
    }
    rates = {step["step"]: step["validation/win_rate/shorter"] for step in results.metrics}
    assert ranked
    assert ranked == {step: rates[step] for step in ranked}
