"""Training over processes, in real torchrun processes on gloo: equal to one process, and ended cleanly
whatever happens."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from proxima.runtime.distributed.process_group import Processes
from tests import processes_runs
from tests.helpers import LOGPROB_ROUNDING
from tests.processes_runs import CASES, STEPS

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SETTINGS = """--rewards tests.processes_runs:count_e --batch-size 5 --minibatch-size 3 --max-new-tokens 6 --learning-rate 1e-3
    --value-learning-rate 1e-3 --checkpoint-every 2 --skip-checks --run-dir runs"""
PROMPTS = [f"Post {i}: " + "word " * (i % 4) + "TL;DR:" for i in range(20)]  # 4 steps


def torchrun(count: int, *words: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={count}",
        *words,
    ]


def finish(
    command: list[str], cwd: Path, timeout: float = 240, **environment: str
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


# --- numbers do not depend on the number of processes ---


TOGETHER = pytest.mark.xdist_group("outcome")  # tests that share what one process gave run in one worker


@pytest.fixture(scope="module")
def outcome(tiny_folders, ensemble, mixture, forked, tmp_path_factory):
    """What some cases gave on a number of processes: one launch for all that are asked for."""
    home, found = tmp_path_factory.mktemp("outcomes"), {}
    models = str(Path(tiny_folders["qwen3"]).parent)

    def get(count: int, *names: str) -> dict:
        if missing := [name for name in names if (count, name) not in found]:
            out = home / f"{count}.json"
            if count == 1:
                for name in missing:
                    found[1, name] = processes_runs.run_case(Path(models), name)
            else:
                done = forked(
                    torchrun(count, str(ROOT / "tests" / "processes_runs.py"), models, str(out), *missing),
                    home,
                    900,
                )
                assert done.returncode == 0, done.stderr
                found.update({(count, name): value for name, value in json.loads(out.read_text()).items()})
        return {name: found[count, name] for name in names}

    return get


QUARTILES = {f"value_error_quantile/{part}" for part in range(1, 5)}


def check_equal(one: dict, several: dict, count: int) -> None:
    assert (one["world"], several["world"]) == (1, count)
    assert len(one["steps"]) == len(several["steps"]) == STEPS
    for left, right in zip(one["steps"], several["steps"], strict=True):
        assert (left["tokens"], left["texts"]) == (right["tokens"], right["texts"])
        assert left["experts"] == right["experts"]
        assert right["rewards"] == pytest.approx(left["rewards"], abs=1e-4, nan_ok=True)
        assert left["numbers"].keys() == right["numbers"].keys()
        # two depend on the engine that samples; equal values may fall on either side of a quartile
        unlike = {"sampling_gap", "buffer_bytes", "ratio_max", *QUARTILES}
        for name in left["numbers"].keys() - unlike:
            assert right["numbers"][name] == pytest.approx(
                left["numbers"][name], abs=1e-4, rel=1e-4, nan_ok=True
            ), name
        assert right["numbers"]["ratio_max"] == pytest.approx(left["numbers"]["ratio_max"], rel=1e-3)
    assert several["norms"] == pytest.approx(one["norms"], rel=1e-4)


QUICK = (
    "full-sharded",
    "ensemble",
    "failures",
    "groups",
    "bootstrap",
    "experts",
)  # the others than the first with replicated adapters


@TOGETHER
@pytest.mark.timeout(280)
@pytest.mark.filterwarnings("ignore")
def test_two_processes_equal_one(outcome):
    """Adapters replicated, whole networks sharded, and rewards that fail here and there."""
    one, two = outcome(1, *QUICK), outcome(2, *QUICK)
    for name in QUICK:
        check_equal(one[name], two[name], 2)
    assert (
        two["full-sharded"]["reference_parameters_held"] < 0.75 * two["groups"]["reference_parameters_held"]
    )
    assert one["failures"]["steps"][0]["numbers"]["failed_rewards"] > 0
    assert one["ensemble"]["steps"][0]["numbers"]["reward_spread"] > 0
    for step in two["experts"]["steps"]:  # recorded, and replayed by the passes that score and train
        assert len({tuple(map(tuple, layers)) for row in step["experts"] for layers in row[:-1]}) > 1
        assert step["numbers"]["first_ratio_error"] < LOGPROB_ROUNDING


@TOGETHER
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [2, 4])
def test_any_case_on_any_number_of_processes(outcome, count):
    one, several = outcome(1, *CASES), outcome(count, *CASES)
    for name in CASES:
        check_equal(one[name], several[name], count)
    stopped = [step["numbers"]["kl_stopped"] for step in several["kl-stop"]["steps"]]
    assert 1 in stopped  # the case is about something
    for name in ("mask", "sequence-mask"):
        assert 0 < several[name]["steps"][0]["numbers"]["importance_truncated"] < 1
    assert len({step["numbers"]["kl_coef"] for step in several["adaptive"]["steps"]}) == STEPS
    assert len({step["numbers"]["kl_coef"] for step in several["budget"]["steps"]}) > 1


SHARDED = ("lora-sharded", "full-sharded", "few-prompts-sharded")


@TOGETHER
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")
def test_eight_processes_equal_one_and_each_holds_less(outcome):
    """Sharded layers on 2, 4 and 8 processes; three prompts leave five of eight without a row."""
    one, held = outcome(1, *SHARDED), {}
    for count in (2, 4, 8):
        several = outcome(count, *SHARDED)
        for name in SHARDED:
            check_equal(one[name], several[name], count)
        each = several["full-sharded"]["tensor_bytes"]
        assert len(each) == count
        assert max(each) < 1.2 * min(each)  # no process holds more than its share
        held[count] = max(each)
    assert held[8] < held[4] < held[2]
    assert held[8] < 0.6 * held[2]  # a quarter of the layers, and what every process holds


COUNTED = re.compile(r"\b(\d+)\s+settings\s+on\s+1,\s+2\s+and\s+4\s+processes")


@pytest.mark.parametrize("page", ["scaling.md", "reliability.md"])
def test_the_docs_count_the_cases(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert COUNTED.findall(text) == [str(len(CASES))]
    if page == "scaling.md":
        assert re.search(r"three\s+sharded\s+ones\s+also\s+on\s+8", text)
        assert len(SHARDED) == 3


# --- shares ---


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("total", [0, 1, 2, 3, 8, 13])
def test_every_row_has_one_owner(count, total):
    group = [Processes(rank, count) for rank in range(count)]
    assert torch.cat([each.rows(total) for each in group]).tolist() == list(range(total))
    assert [len(each.rows(total)) for each in group] == group[0].shares(total)
    lengths = torch.tensor([(i * 37) % 11 + 1 for i in range(total)])
    dealt = [each.balanced_rows(lengths) for each in group]
    assert sorted(torch.cat(dealt).tolist()) == list(range(total))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_minibatches_are_dealt_by_length():
    lengths = torch.tensor([100, 1, 1, 100, 50, 50, 1, 1])
    tokens = [int(lengths[Processes(rank, 2).balanced_rows(lengths)].sum()) for rank in range(2)]
    assert tokens == [152, 152]


def test_one_process_exchanges_nothing():
    alone, tensor = Processes(), torch.tensor(3.0)
    assert alone.all_gather(tensor, 1) is tensor
    assert alone.sum({"a": tensor})["a"] is tensor
    assert (
        alone.all_gather_object("x"),
        alone.on_main(lambda: 5),
        alone.on_all(lambda: 6),
        alone.all_reduce_max(7),
    ) == (
        ["x"],
        5,
        6,
        7,
    )


# --- runs ---


@pytest.fixture
def folder(tmp_path, tiny):
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (tmp_path / "model").symlink_to(tiny)
    return tmp_path


def train(*more: str) -> list[str]:
    return [
        "-m",
        "proxima",
        "train",
        "--model-name",
        "model",
        "--data",
        "prompts.txt",
        *SETTINGS.split(),
        *more,
    ]


def metrics(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def check_same_metrics(left: list[dict], right: list[dict], tolerance: float = 1e-4) -> None:
    assert [step["step"] for step in left] == [step["step"] for step in right]
    for a, b in zip(left, right, strict=True):
        for name in a.keys() - {"sampling_gap", "buffer_bytes", "ratio_max"}:
            if not name.startswith("seconds"):
                expected = math.nan if a[name] is None else a[name]
                assert (math.nan if b[name] is None else b[name]) == pytest.approx(
                    expected, abs=tolerance, rel=tolerance, nan_ok=True
                ), name


@pytest.fixture
def one_process(folder, forked):
    def one_process(*more: str) -> None:
        done = forked([sys.executable, *train(*more)], folder)
        assert done.returncode == 0, done.stderr

    return one_process


@pytest.mark.long
def test_a_run_says_how_many_processes_it_has_and_writes_one_folder(folder, forked, one_process):
    one_process("--run-name", "one", "--validation", "prompts.txt")
    done = forked(torchrun(2, *train("--run-name", "two", "--validation", "prompts.txt")), folder)
    assert done.returncode == 0, done.stderr
    assert "2 processes (gloo), layers replicated" in done.stdout
    assert len(re.findall(r"^step ", done.stdout, re.MULTILINE)) == 5  # one voice; step 0 and four steps
    assert done.stdout.count("stopped: all epochs done") == 1
    check_same_metrics(metrics(folder, "one"), metrics(folder, "two"))
    names = [
        {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}
        for home in (folder / "runs").iterdir()
    ]
    assert names[0] ^ names[1] == {".launch"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["doctor", "--data", "prompts.txt"],
            "only `proxima train` can use several processes; start doctor without torchrun",
        ),
        pytest.param(
            ["train", "--data", "nowhere.txt", "--rewards", "ends_with_eos"],
            "nowhere.txt",
            marks=pytest.mark.long,
        ),
        pytest.param(["train", "--data", "prompts.txt"], "no reward is configured", marks=pytest.mark.long),
    ],
)
def test_an_error_is_said_once(folder, forked, words, said):
    done = forked(torchrun(2, "-m", "proxima", *words), folder)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("proxima:")]
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [(), ("--lora-r", "0", "--shard-base")], ids=["lora", "full, sharded"])
def test_a_run_continues_with_the_same_numbers_on_another_number_of_processes(
    folder, forked, one_process, more
):
    """4 steps per epoch: the first epoch on 2 processes, the second on 1, the third on 4."""
    more = (
        "--lr-schedule",
        "constant",
        "--kl-controller",
        "adaptive",
        "--kl-target",
        "0.5",
        "--kl-horizon",
        "50",
        *more,
    )
    one_process(*more, "--run-name", "one", "--epochs", "3")
    for epochs, count in ((1, 2), (2, 1), (3, 4)):
        command = train(*more, "--run-name", "several", "--resume", "--epochs", str(epochs))
        done = forked(torchrun(count, *command), folder, 300)
        assert done.returncode == 0, done.stderr
        assert count == 1 or f"{count} processes" in done.stdout
        assert epochs == 1 or f"resumed after step {4 * (epochs - 1)} of {4 * epochs}" in done.stdout
    check_same_metrics(metrics(folder, "one"), metrics(folder, "several"))


def start(command: list[str], folder: Path) -> subprocess.Popen:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(launcher: subprocess.Popen) -> None:
    """Whatever is left of it, by its own group."""
    for process in worker_processes(launcher.pid):
        os.kill(process, signal.SIGKILL)
    launcher.kill()
    launcher.wait()


def steps_written(folder: Path, name: str) -> int:
    path = folder / "runs" / name / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_steps(folder: Path, name: str, steps: int, launcher: subprocess.Popen) -> None:
    limit = time.monotonic() + 120
    while steps_written(folder, name) < steps:
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < limit
        time.sleep(0.05)


def worker_processes(launcher: int) -> dict[int, int]:
    """Processes that torchrun started: number by id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            variables = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [int(item[5:]) for item in variables if item.startswith(b"RANK=")]
        if parent == launcher and ranks:
            found[int(path.name)] = ranks[0]
    return found


def said_by_us(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("proxima:")]


LONG = ("--epochs", "10", "--lr-schedule", "constant")  # 40 steps


SHARDED_FULL = ("--lora-r", "0", "--shard-base")
OVER = pytest.mark.parametrize(
    ("processes", "kind"), [(2, ()), (4, SHARDED_FULL)], ids=["replicated", "sharded"]
)


@pytest.mark.long
@pytest.mark.timeout(400)
@OVER
def test_a_killed_process_ends_the_run_and_resuming_continues_it(folder, forked, processes, kind):
    name = f"killed-{processes}"
    launcher = start(torchrun(processes, *train("--run-name", name, *LONG, *kind)), folder)
    try:
        wait_for_steps(folder, name, 3, launcher)
        victim = next(process for process, rank in worker_processes(launcher.pid).items() if rank == 1)
        os.kill(victim, signal.SIGKILL)
        _, errors = launcher.communicate(timeout=60)
    finally:
        end(launcher)
    assert launcher.returncode != 0
    said = said_by_us(errors)
    assert 1 <= len(said) < processes, "one line from each process that is left"
    assert all(f"of {processes} lost contact with the other processes" in line for line in said)
    line = next(line for line in said if "process 0 of" in line)
    good = int(re.search(r"the checkpoint of step (\d+) is good", line)[1])
    assert good >= 2
    assert f"--resume --run-name {name}" in line
    before = metrics(folder, name)
    epochs = math.ceil(len(before) / 4)
    command = train("--run-name", name, "--resume", "--lr-schedule", "constant", "--epochs", str(epochs))
    done = forked(torchrun(processes, *command, *kind), folder)
    assert done.returncode == 0, done.stderr
    assert f"resumed after step {good} of {4 * epochs}" in done.stdout
    after = metrics(folder, name)
    assert len(after) == 4 * epochs
    check_same_metrics(before, after[: len(before)], 0.0)  # to the bit


@pytest.mark.long
@pytest.mark.timeout(400)
@OVER
def test_a_process_that_hangs_ends_the_run_within_the_time_limit(folder, processes, kind):
    name = f"hung-{processes}"
    command = train("--run-name", name, "--process-timeout", "20", *LONG, *kind)
    launcher = start(torchrun(processes, "--shutdown-timeout=3", *command), folder)
    try:
        wait_for_steps(folder, name, 2, launcher)
        os.kill(
            next(process for process, rank in worker_processes(launcher.pid).items() if rank == 1),
            signal.SIGSTOP,
        )
        _, errors = launcher.communicate(timeout=200)  # torch's own limit is half an hour
    finally:
        end(launcher)
    assert launcher.returncode != 0
    assert any(
        f"process 0 of {processes} lost contact with the other processes" in line and "is good" in line
        for line in said_by_us(errors)
    )


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_process_that_is_slow_is_waited_for_and_changes_nothing(folder, one_process):
    """One of four stands still for a few seconds, twice: less than the time limit."""
    epochs = ("--epochs", "2", "--lr-schedule", "constant", *SHARDED_FULL)
    launcher = start(torchrun(4, *train("--run-name", "slow", "--process-timeout", "60", *epochs)), folder)
    try:
        for steps, rank in ((1, 3), (4, 0)):
            wait_for_steps(folder, "slow", steps, launcher)
            slow = next(process for process, own in worker_processes(launcher.pid).items() if own == rank)
            os.kill(slow, signal.SIGSTOP)
            before = steps_written(folder, "slow")
            time.sleep(4)
            after = steps_written(folder, "slow")
            os.kill(slow, signal.SIGCONT)
            assert after <= before + 1, "at most the step that this process had finished its part of"
        _, errors = launcher.communicate(timeout=200)
    finally:
        end(launcher)
    assert launcher.returncode == 0, errors
    assert not said_by_us(errors)
    one_process("--run-name", "one", *epochs)
    check_same_metrics(metrics(folder, "one"), metrics(folder, "slow"))


@pytest.mark.long
@pytest.mark.timeout(280)
def test_torchrun_restarts_a_killed_run(folder, one_process):
    epochs = ("--epochs", "3", "--lr-schedule", "constant")
    launcher = start(torchrun(2, "--max-restarts=1", *train("--run-name", "back", *epochs)), folder)
    try:
        wait_for_steps(folder, "back", 3, launcher)
        os.kill(
            next(process for process, rank in worker_processes(launcher.pid).items() if rank == 0),
            signal.SIGKILL,
        )
        output, errors = launcher.communicate(timeout=200)
    finally:
        end(launcher)
    assert launcher.returncode == 0, errors
    assert re.search(r"resumed after step \d+ of 12", output)
    assert "stopped: all epochs done" in output
    one_process("--run-name", "one", *epochs)
    check_same_metrics(metrics(folder, "one"), metrics(folder, "back"))


@pytest.mark.long
def test_restarts_need_a_name_and_never_go_on_with_another_run(folder, forked, one_process):
    done = forked(torchrun(2, "--max-restarts=1", *train()), folder)
    assert all("needs run_name" in line for line in said_by_us(done.stderr))
    one_process("--run-name", "one")
    done = forked(torchrun(2, "--max-restarts=1", *train("--run-name", "one")), folder)
    assert done.returncode != 0
    assert said_by_us(done.stderr)
    assert all("already holds a run" in line for line in said_by_us(done.stderr))


@pytest.mark.long
@pytest.mark.timeout(280)
def test_sigterm_ends_after_the_step_with_a_checkpoint(folder):
    launcher = start(torchrun(2, *train("--run-name", "stopped", "--checkpoint-every", "0", *LONG)), folder)
    try:
        wait_for_steps(folder, "stopped", 2, launcher)
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=60)
    finally:
        end(launcher)
    (line,) = said_by_us(errors)
    step = int(re.search(r"stopped by SIGTERM after step (\d+), checkpoint in", line)[1])
    assert [path.name for path in (folder / "runs" / "stopped" / "checkpoints").iterdir()] == [
        f"step-{step:08d}"
    ]
    assert len(metrics(folder, "stopped")) == step


@pytest.mark.long
def test_rewards_that_fail_in_one_process_stop_all_with_one_message(folder, forked):
    """The reward works on process 0 and fails on process 1, which has most of the batch's rows too few to
    go on without."""
    words = train(
        "--rewards",
        "tests.processes_runs:fails_on_the_second",
        "--run-name",
        "failed",
        "--max-reward-failures",
        "0.3",
    )
    done = forked(torchrun(2, *words), folder)
    assert done.returncode != 0
    (line,) = said_by_us(done.stderr)
    assert "3 of 5 rewards of step 1 failed (max_reward_failures is 0.3)" in line
    assert "the second process has no luck" in line
    assert (folder / "runs" / "failed" / "checkpoints" / "step-00000000" / "manifest.json").exists()


@pytest.mark.long
def test_early_stopping_is_one_decision(folder, forked):
    done = forked(
        torchrun(2, *train("--run-name", "patient", "--patience", "2", "--min-improvement", "100", *LONG)),
        folder,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped: no improvement over" in done.stdout
    assert len(metrics(folder, "patient")) == 3


@pytest.mark.long
def test_a_guard_that_goes_back_takes_all_processes_with_it(folder, forked, one_process):
    more = ("--kl-limit", "1e-6", "--on-guard", "rollback", "--checkpoint-every", "1", "--epochs", "2")
    done = forked(torchrun(2, *train("--run-name", "guarded", *more)), folder)
    assert done.returncode == 0, done.stderr
    assert "again after 3 rollbacks" in done.stdout
    one_process("--run-name", "one", *more)
    left, right = ((folder / "runs" / name / "warnings.jsonl").read_text() for name in ("one", "guarded"))
    assert left.count("\n") == right.count("\n") == 4


@pytest.mark.long
def test_reward_models_have_one_unit_for_all_processes(folder, forked, one_process, judge):
    one_process("--run-name", "one", "--rewards", judge)
    done = forked(torchrun(2, *train("--run-name", "two", "--rewards", judge)), folder)
    assert done.returncode == 0, done.stderr
    left, right = (
        json.loads((folder / "runs" / name / "results.json").read_text())["units"] for name in ("one", "two")
    )
    assert left["judge"] == pytest.approx(right["judge"], rel=1e-4)
    assert left["judge"][1] > 0
    check_same_metrics(metrics(folder, "one"), metrics(folder, "two"), 1e-3)
