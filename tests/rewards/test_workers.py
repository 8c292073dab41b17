"""Worker processes: whatever a function does costs one sample, is named, ends in time and leaves nothing."""

import contextlib
import datetime
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

import proxima
from proxima.config import PPOConfig, RewardSpec
from proxima.core.errors import RewardFailure
from proxima.core.types import Prompt
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards import Samples, WorkerFailure, WorkerProcess, check_rewards, worker_child, worker_process
from proxima.rewards.function_reward import FunctionReward, load_function
from proxima.rewards.reward_outcome import counted
from proxima.rewards.worker_pool import WorkerPool
from proxima.rewards.worker_reward import WorkerReward, open_function
from proxima.rewards.worker_supply import WorkerSupply

pytestmark = pytest.mark.skipif(os.name != "posix", reason="worker processes need Linux or macOS")
LINUX = sys.platform == "linux"
SLACK = 2.0  # seconds after a deadline by which everything has ended

GRADER = '''
import asyncio, ctypes, os, signal, sys, time

MARK = "proxima-left-behind"


def leave_behind(seconds):
    """A daemon that left its parent, session and group."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep({seconds})", MARK])
        os._exit(0)


def act(text):
    print("a line on standard output")
    os.write(1, b"and below Python\\n")
    if text == "hang":
        while True:
            pass
    if text == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if text == "memory":
        return float(len(bytearray(2**36)))
    if text == "crash":
        ctypes.string_at(0)
    if text == "exit":
        os._exit(7)
    if text == "sys.exit":
        sys.exit(7)
    if text == "raise":
        raise ValueError("no such answer")
    if text == "fork":
        os.fork()
    if text == "leave":
        leave_behind(1000)
    if text == "leave and hang":
        leave_behind(1000)
        time.sleep(1000)
    if text == "text":
        return "one"
    if text == "object":
        return object()
    if text == "long":
        return "x" * (17 * 2**20)
    return 1.0


def grade(prompts, completions):
    return [act(text) for text in completions]


def bomb(most=400, hangs=False):
    """Limits itself: only this process starts others, which sleep and end."""
    for count in range(most):
        try:
            if os.fork() == 0:
                time.sleep(2)
                os._exit(0)
        except OSError:
            most = count
            break
    time.sleep(60 if hangs else 0)
    return most


def bombs(prompts, completions):
    return [float(bomb(hangs=True)) if text == "bomb" else 1.0 for text in completions]


def family(megabytes, count, is_shared):
    """Children that each hold this much, or all read the same that their parent wrote."""
    held = b"x" * (megabytes * 2**20) if is_shared else b""
    children = []
    for _ in range(count):
        if child := os.fork():
            children.append(child)
            continue
        held = held or b"x" * (megabytes * 2**20)
        time.sleep(2)
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    return 1.0


class Counter:
    def __init__(self, start=0):
        self.number = start

    def add(self, more):
        self.number += more
        return {"number": self.number, "pair": (1, [2, None])}

    async def later(self):
        return self.number


class Client:
    """Belongs to the event loop of its first call, as clients of HTTP do."""

    loop = None

    async def fetch(self, ends=False):
        self.loop = self.loop or asyncio.get_running_loop()
        if ends:
            sys.exit(3)
        return self.loop is asyncio.get_running_loop()
'''


@pytest.fixture
def grader(tmp_path, monkeypatch):
    (tmp_path / "grader.py").write_text(GRADER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield "grader:grade"
    sys.modules.pop("grader", None)


def texts(completions, columns=None):
    prompts = [Prompt("p", dict(columns or {})) for _ in completions]
    return Samples(prompts, list(completions), [[1, 2]] * len(completions), [True] * len(completions))


def opened(source, **options):
    spec = RewardSpec(source, options=options)
    return open_function(spec, source if callable(source) else load_function(source))


def left_behind(mark="proxima-left-behind"):
    found = subprocess.run(
        ["ps", "-eww", "-o", "pid,args"], capture_output=True, text=True, check=True
    ).stdout
    return [line for line in found.splitlines() if mark in line]


def wait_for(count, mark="proxima-left-behind", seconds=10.0):
    end = time.monotonic() + seconds
    while len(left_behind(mark)) != count and time.monotonic() < end:
        time.sleep(0.05)
    assert len(left_behind(mark)) == count


KINDS = [
    *(("hang", "timeout", "no answer within 1 s"), ("deaf", "timeout", "no answer within 1 s")),
    *(("crash", "crash", "SIGSEGV"), ("exit", "exit", "exit code 7"), ("sys.exit", "exit", "sys.exit(7)")),
    *(("raise", "raised", "ValueError: no such answer"), ("object", "reply", "object")),
    ("long", "reply", "bytes"),
    pytest.param("memory", "memory", "memory", marks=pytest.mark.skipif(not LINUX, reason="no memory limit")),
]


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize(("act", "kind", "words"), KINDS)
def test_each_failure_is_named_and_ends_in_time(grader, act, kind, words, namespaces):
    with WorkerProcess("grader:act", memory_mb=2048, namespaces=namespaces) as worker:
        worker.start()
        began = time.monotonic()
        with pytest.raises(WorkerFailure) as failure:
            worker.call(None, act, timeout=1.0)
        assert time.monotonic() - began < 1 + SLACK
        assert failure.value.kind == kind
        assert words in failure.value.message
        if kind in ("raised", "reply", "memory") or act == "sys.exit":
            assert worker.call(None, "fine", timeout=5.0) == 1.0
        else:
            assert not worker.alive


@pytest.mark.parametrize("namespaces", [True, False])
def test_a_copy_of_the_worker_never_answers(grader, namespaces):
    with WorkerProcess("grader:act", memory_mb=None, namespaces=namespaces) as worker:
        assert [worker.call(None, "fork", timeout=5.0) for _ in range(3)] == [1.0] * 3


def test_a_worker_holds_an_object_between_calls(grader):
    with WorkerProcess("grader:Counter", memory_mb=None, made_with={"start": 5}) as worker:
        assert worker.call("add", 2, timeout=20) == {"number": 7, "pair": [1, [2, None]]}
        assert worker.call("add", more=3, timeout=5)["number"] == 10
        assert worker.call("later", timeout=5) == 10
        with pytest.raises(WorkerFailure, match="no attribute 'nothing'"):
            worker.call("nothing", timeout=5)
    with pytest.raises(WorkerFailure, match="has ended"):
        worker.call("add", 1, timeout=5)


def test_coroutines_run_on_one_event_loop(grader):
    """As in the trainer: a client whose loop was closed could not be called again."""
    with WorkerProcess("grader:Client", memory_mb=None) as worker:
        assert worker.call("fetch", timeout=20)
        with pytest.raises(WorkerFailure, match=r"sys.exit\(3\)"):
            worker.call("fetch", True, timeout=5)
        assert worker.call("fetch", timeout=5)


def test_a_closure_goes_by_value_and_what_cannot_is_refused_in_words():
    bonus, unsendable = 2.5, (n for n in range(3))
    with WorkerProcess(lambda x: x + bonus, memory_mb=None) as worker:
        assert worker.call(None, 1, timeout=20) == 3.5
    with pytest.raises(ValueError, match=r"cannot be sent to a worker process.*module:function"):
        WorkerPool(lambda x: next(unsendable))


def test_an_empty_entry_of_the_path_is_the_trainers_folder_not_the_workers(grader, monkeypatch):
    """In the worker's own folder the policy's code may write modules."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with WorkerProcess(lambda: __import__("sys").path, memory_mb=None, sandbox=True) as worker:
        path = worker.call(None, timeout=20)
    assert path[0] == os.getcwd()
    assert "" not in path


FEW_FILES = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard))
from proxima.rewards import WorkerProcess
workers = [WorkerProcess("math:sqrt", memory_mb=None) for _ in range(12)]
print(sum(worker.call(None, 4.0, timeout=60) for worker in workers))
"""


@pytest.mark.skipif(not LINUX, reason="macOS allows less than its limit says")
def test_a_small_limit_of_open_files_is_raised():
    done = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True, check=False)
    assert done.stdout == "24.0\n", done.stderr


def test_a_process_that_cannot_be_started_leaves_no_folder(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no more processes")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker_process, "bubblewrap", lambda: None)
    monkeypatch.setattr(worker_process, "_launch", refuse)
    with pytest.raises(OSError, match="no more processes"):
        WorkerProcess(len, memory_mb=None, sandbox=True)
    assert list(tmp_path.iterdir()) == []


def test_large_arguments_do_not_block_on_a_worker_that_does_not_read(grader):
    with WorkerProcess("grader:act", memory_mb=None) as worker:
        worker.start()
        os.kill(_worker_of(worker), signal.SIGSTOP) if LINUX else None
        began = time.monotonic()
        with pytest.raises(WorkerFailure) as failure:
            worker.call(None, "hang" + " " * 2**22 if LINUX else "hang", timeout=0.5)
        assert failure.value.kind == "timeout"
        assert time.monotonic() - began < 0.5 + SLACK


def _worker_of(worker):
    """The process that runs the function, below those that watch it."""
    process = worker._process.pid
    while children := Path(f"/proc/{process}/task/{process}/children").read_text().split():
        process = int(children[0])
    return process


# --- fork bombs ---

SMALL = 20  # processes of a worker here, besides those whose ids a PID namespace gives out once
KINDS_OF_WORKER = ["worker", "sandbox", "bubblewrap"]


@pytest.fixture(params=KINDS_OF_WORKER)
def kind_of_worker(request, monkeypatch):
    """The options of a worker that may have few processes."""
    if request.param == "bubblewrap" and not worker_process.bubblewrap():
        pytest.skip("bubblewrap is not installed, or may not work here")
    if request.param == "sandbox":
        monkeypatch.setattr(worker_process, "bubblewrap", lambda: None)
    monkeypatch.setattr(worker_process, "MOST_PROCESSES", SMALL)
    monkeypatch.setattr(worker_process, "MOST_IN_SANDBOX", SMALL)
    options = {"sandbox": request.param != "worker"}
    with WorkerProcess(len, memory_mb=None, **options) as worker:
        worker.start()
    if not worker.protections["processes"]:
        pytest.skip("nothing here limits the processes of a worker")
    return options


def test_a_worker_starts_no_more_processes_than_its_limit(grader, kind_of_worker):
    with WorkerProcess("grader:bomb", memory_mb=None, **kind_of_worker) as worker:
        assert worker.call(None, timeout=20) < worker_child.RESERVED_IDS + SMALL


def test_a_fork_bomb_costs_its_own_sample(grader, kind_of_worker, tmp_path):
    mark = f"bomb-{os.getpid()}"
    (tmp_path / "grader.py").write_text(
        GRADER.replace("time.sleep(2)", f"ctypes.CDLL(None).prctl(15, b'{mark}'); time.sleep(2)")
    )
    pool = WorkerPool("grader:bombs", workers=2, timeout=0.7, **kind_of_worker)
    calls = [([["p"], [text]], {}) for text in ("warm", "up")]
    assert pool.map(calls) == [[1.0]] * 2
    began = time.monotonic()
    bombed, fine = pool.map([([["p"], [text]], {}) for text in ("bomb", "fine")])
    assert time.monotonic() - began < 0.7 + SLACK
    assert bombed.kind == "timeout"
    assert fine == [1.0]
    assert named(mark) == []
    pool.close()


@pytest.fixture(params=KINDS_OF_WORKER)
def any_worker(request, monkeypatch):
    if request.param == "bubblewrap" and not worker_process.bubblewrap():
        pytest.skip("bubblewrap is not installed, or may not work here")
    if request.param == "sandbox":
        monkeypatch.setattr(worker_process, "bubblewrap", lambda: None)
    return {"sandbox": request.param != "worker"}


@pytest.mark.skipif(not LINUX, reason="no memory limit")
def test_children_are_limited_together_though_each_stays_below(grader, any_worker):
    with WorkerProcess("grader:family", memory_mb=400, **any_worker) as worker:
        worker.start()
        began = time.monotonic()
        with pytest.raises(WorkerFailure, match="all its processes together took more") as failure:
            worker.call(None, 150, 4, False, timeout=20)
        assert failure.value.kind == "memory"
        assert time.monotonic() - began < 2.0 + SLACK


@pytest.mark.skipif(not LINUX, reason="no memory limit")
def test_memory_that_children_share_counts_once(grader, any_worker):
    if os.geteuid() != 0:
        pytest.skip("the kernel may tell only root what they share")
    with WorkerProcess("grader:family", memory_mb=400, **any_worker) as worker:
        assert worker.call(None, 150, 4, True, timeout=20) == 1.0


def named(mark):
    """The processes of this name that are not gone."""
    found = subprocess.run(["ps", "-ewwo", "comm,stat"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if mark in line and " Z" not in line]


FULL_GROUP = """
import sys
from grader import bomb
from proxima.rewards.worker_child import ProcessLimit, make_group, remove_group
group = make_group(20)
limit = ProcessLimit(20)
limit.group = group
if group:
    limit.apply()
    print(bomb(), group)
"""


@pytest.mark.skipif(not LINUX, reason="needs control groups")
def test_a_control_group_limits_processes_where_one_can_be_made(grader, tmp_path):
    """On a Linux without other limits; its group goes with the worker."""
    path = os.pathsep.join([str(tmp_path), str(Path(proxima.__file__).parents[1])])
    ran = subprocess.run(
        [sys.executable, "-c", FULL_GROUP],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path},
    ).stdout.split()
    if not ran:
        pytest.skip("no control group can be made here")
    assert int(ran[0]) < 20
    worker_child.remove_group(ran[1])
    assert not Path(ran[1]).exists()


@pytest.mark.skipif(not LINUX, reason="Linux alone has this limit")
def test_trying_what_limits_processes_leaves_the_machine_as_it_was(grader):
    before = Path(worker_child.PID_MAX).read_text()
    for sandbox in (True, False):
        with WorkerProcess("grader:act", memory_mb=None, sandbox=sandbox) as worker:
            worker.start()
            assert Path(worker_child.PID_MAX).read_text() == before


# --- rewards ---


def test_eight_hangs_on_two_workers_and_then_eight_right_answers(grader):
    reward = opened(grader, workers=2, timeout=0.5)
    assert isinstance(reward, WorkerReward)
    hung = reward(texts(["hang"] * 8))
    assert all(map(math.isnan, hung.sequence))
    assert hung.reason == "8 timeout; no answer within 0.5 s"
    assert reward(texts(["right"] * 8)).sequence == [1.0] * 8
    reward.pool.close()


def test_failures_cost_their_own_samples_only(grader):
    reward = opened(grader, workers=2, timeout=5.0, memory_mb=2048)
    outcome = reward(texts(["a", "crash", "b", "exit", "raise", "text", "c", "sys.exit"]))
    assert "1 reply" in outcome.reason
    assert [not math.isnan(score) for score in outcome.sequence] == [1, 0, 1, 0, 0, 0, 1, 0]
    assert "1 crash" in outcome.reason
    assert "2 exit" in outcome.reason
    assert "1 raised" in outcome.reason
    reward.pool.close()


def test_a_hang_ends_the_step_by_its_deadline(grader):
    reward = opened(grader, workers=2, timeout=1.0)
    reward(texts(["warm", "up"]))
    began = time.monotonic()
    outcome = reward(texts(["fine", "hang", "fine", "fine"]))
    assert time.monotonic() - began < 1.0 + SLACK
    assert outcome.failures == 1
    reward.pool.close()


SLOW_IMPORT = 2.5
SLOW_GRADER = f"""
import time
time.sleep({SLOW_IMPORT})
def grade(prompts, completions):
    time.sleep(60 if completions == ["hang"] else 0)
    return [1.0]
"""


@pytest.fixture
def slow_grader(tmp_path, monkeypatch):
    """Its workers take longer to load than a step may last after a hang."""
    (tmp_path / "slow_grader.py").write_text(SLOW_GRADER)
    monkeypatch.chdir(tmp_path)
    return "slow_grader:grade"


@pytest.mark.parametrize("options", [{"workers": 1}, {"workers": 2, "memory_mb": 0}])
def test_no_step_waits_for_an_import_after_a_hang(slow_grader, options):
    """A spare takes the place of the one that was killed; without one, the other worker has the rest."""
    pool = WorkerPool(slow_grader, timeout=0.3, **options)
    calls = [([["p"], [text]], {}) for text in ("hang", "a", "b", "c")]
    assert pool.map(calls[1:]) == [[1.0]] * 3
    time.sleep(1)  # the processes load side by side; the last may need a little longer
    began = time.monotonic()
    hung, *others = pool.map(calls)
    assert time.monotonic() - began < 0.3 + min(SLACK, SLOW_IMPORT - 0.5)
    assert hung.kind == "timeout"
    assert others == [[1.0]] * 3
    pool.close()


def test_samples_wait_for_an_import_rather_than_be_lost(slow_grader, tmp_path):
    """Where more hang than there are processes."""
    (tmp_path / "slow_grader.py").write_text(SLOW_GRADER.replace(str(SLOW_IMPORT), "0.7"))
    pool = WorkerPool(slow_grader, timeout=0.2, memory_mb=0)
    first, second = pool.map([([["p"], [text]], {}) for text in ("hang", "fine")])
    assert first.kind == "timeout"
    assert second == [1.0]
    pool.close()


def test_a_supply_that_is_closed_while_processes_load_leaves_none(slow_grader):
    mark = '"memory_mb": 4321'
    supply = WorkerSupply(lambda: WorkerProcess(slow_grader, memory_mb=4321))
    supply.fill(2)
    assert left_behind(mark) != []
    supply.close()
    assert left_behind(mark) == []
    assert supply.take(lambda: False) is None


def test_a_failed_sample_is_tried_again_as_often_as_configured(tmp_path, monkeypatch):
    (tmp_path / "flaky.py").write_text(
        "import os\n"
        "def grade(prompts, completions):\n"
        "    tries = len([n for n in os.listdir('.') if n.startswith(completions[0])])\n"
        "    open(completions[0] + str(tries), 'w').close()\n"
        "    if tries < 2:\n        os._exit(1)\n"
        "    return [float(tries)]\n"
    )
    monkeypatch.chdir(tmp_path)
    once = opened("flaky:grade", workers=1, retries=1)
    assert math.isnan(once(texts(["a"])).sequence[0])
    twice = opened("flaky:grade", workers=1, retries=2)
    assert twice(texts(["b"])).sequence == [2.0]
    for reward in (once, twice):
        reward.pool.close()
    sys.modules.pop("flaky", None)


@pytest.mark.timeout(60)
def test_after_ctrl_c_nothing_is_tried_again_and_the_pool_works_on(tmp_path, monkeypatch):
    (tmp_path / "noted.py").write_text(
        "import time\n"
        "def grade(text):\n"
        "    with open('tries', 'a') as file:\n"
        "        file.write(text + '\\n')\n"
        "    time.sleep(60 if text == 'hang' else 0)\n"
        "    return 1.0\n"
    )
    monkeypatch.chdir(tmp_path)
    pool = WorkerPool("noted:grade", workers=2, timeout=30.0, retries=3)
    assert pool.map([(["a"], {}), (["b"], {})]) == [1.0, 1.0]

    def interrupt():
        while "hang" not in (tmp_path / "tries").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = threading.active_count()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pool.map([(["hang"], {})])
    signal.signal(signal.SIGINT, handler)
    while threading.active_count() > before:
        time.sleep(0.05)
    assert pool.map([(["c"], {}), (["d"], {})]) == [1.0, 1.0]
    assert (tmp_path / "tries").read_text().split().count("hang") == 1
    pool.close()
    sys.modules.pop("noted", None)


def test_a_worker_that_cannot_load_its_function_is_tried_once_not_for_every_sample(tmp_path, monkeypatch):
    (tmp_path / "picky.py").write_text(
        "import os\n"
        "open(f'started-{os.getpid()}-{len(os.listdir())}', 'w').close()\n"
        "if os.path.exists('stop'):\n    raise RuntimeError('not here')\n"
        "def grade(prompts, completions):\n    return [1.0]\n"
    )
    monkeypatch.chdir(tmp_path)
    reward = opened("picky:grade", workers=1)
    (tmp_path / "stop").touch()
    before = len(list(tmp_path.glob("started*")))
    outcome = reward(texts("abcdefgh"))
    assert outcome.failures == 8
    assert "not here" in outcome.reason
    assert len(list(tmp_path.glob("started*"))) <= before + 2
    (tmp_path / "stop").unlink()
    assert reward(texts("ab")).sequence == [1.0, 1.0]
    reward.pool.close()
    sys.modules.pop("picky", None)


def test_worker_options_are_checked_before_a_run(grader):
    def takes_timeout(prompts, completions, timeout: float = 1.0):
        return [timeout for _ in completions]

    assert type(opened(grader)) is type(opened(grader, workers=0)) is FunctionReward
    assert opened(takes_timeout, timeout=3.0)(texts(["a"])).sequence == [3.0]
    for wrong, words in (
        ({"workers": -1}, "workers"),
        ({"workers": 1, "timeout": 0.0}, "timeout"),
        ({"workers": 1, "memory_mb": -1}, "memory_mb"),
        ({"workers": "two"}, "must be of type int"),
        ({"workers": 1, "tries": 2}, "no option 'tries'"),
    ):
        with pytest.raises(ValueError, match=words):
            check_rewards(PPOConfig(rewards=[{"source": grader, "options": wrong}]))
    with pytest.raises(ValueError, match="an option 'timeout' of its own"):
        opened(takes_timeout, workers=1)


def test_columns_and_per_token_rewards_reach_a_worker_and_come_back():
    def by_token(prompts, completions, completion_ids, answer, **others):
        return [[float(a)] * len(ids) for a, ids in zip(answer, completion_ids, strict=True)]

    reward = opened(by_token, workers=1)
    outcome = reward(texts(["a", "b"], {"answer": 3, "timeout": 1, "method": "x"}))
    assert outcome.token == {0: [3.0, 3.0], 1: [3.0, 3.0]}
    reward.pool.close()


def test_a_value_that_json_cannot_hold_is_refused_before_the_run_and_never_becomes_text(grader):
    def later(prompts, completions, day):
        return [1.0 for _ in day]

    reward = opened(later, workers=1)
    when = {"day": datetime.date(2020, 1, 2), "other": {1, 2}}
    prompts = [Prompt("p", {"day": 1}), Prompt("q", when)]
    with pytest.raises(ValueError, match=r"the column 'day' of prompt 8 cannot be sent there as JSON.*date"):
        reward.check(prompts, 7)
    assert opened(later)(texts(["a"], when)).sequence == [1.0]
    with WorkerProcess("grader:act", memory_mb=None) as worker:
        with pytest.raises(WorkerFailure, match=r"cannot be sent as JSON.*date"):
            worker.call(None, when["day"], timeout=5)
        assert worker.call(None, "fine", timeout=5) == 1.0


def test_many_reasons_are_counted_in_one_line():
    assert counted(["one"]) == "one"
    assert counted(["a", "b", "a"]) == "2 x a; 1 x b"
    assert counted([*"aabbccde"]) == "2 x a; 2 x b; 2 x c; 2 x others"
    assert len(counted([letter * 1000 for letter in "abcdef"])) < 400


def test_a_ppo_step_leaves_hangs_out_and_stops_where_most_hang(make_config, grader):
    def rarely(prompts, completions, completion_ids):
        import time

        if sum(completion_ids[0]) % 4 == 0:
            time.sleep(1000)
        return [1.0]

    config = make_config(
        rewards=[{"source": rarely, "options": {"workers": 2, "timeout": 0.5}}], max_reward_failures=0.99
    )
    results = PPOTrainer(config).ppo_step(["a b", "c d", "e f", "g h"] * 2)
    rewards = results["rewards"]
    assert results["failed_rewards"] == sum(map(math.isnan, rewards))
    assert {reward for reward in rewards if not math.isnan(reward)} <= {1.0}

    def always(prompts, completions):
        import time

        time.sleep(1000)

    stuck = make_config(rewards=[{"source": always, "options": {"workers": 2, "timeout": 0.3}}])
    with pytest.raises(RewardFailure, match="timeout; no answer within"):
        PPOTrainer(stuck).ppo_step(["a b", "c d"])


# --- what is left behind ---

KILLED = """
import os, threading, time
from proxima.rewards import worker_process

if os.environ["WITHOUT"]:
    worker_process.bubblewrap = lambda: None
workers = [
    worker_process.WorkerProcess("grader:act", memory_mb=None, OPTIONS
    ) for _ in range(2)
]
for worker in workers:
    worker.start()
    call = {"args": (None, "leave and hang"), "kwargs": {"timeout": 1000}}
    threading.Thread(target=worker.call, **call).start()
print("started", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("namespaces", [True, False])
@pytest.mark.parametrize("act", ["leave", "leave and hang"])
@pytest.mark.skipif(not LINUX, reason="needs a subreaper")
def test_daemons_end_with_their_worker(grader, act, namespaces):
    with WorkerProcess("grader:act", memory_mb=None, namespaces=namespaces) as worker:
        worker.start()
        with contextlib.suppress(WorkerFailure):
            worker.call(None, act, timeout=1.0)
            wait_for(1)
    wait_for(0, seconds=0.5)


@pytest.mark.parametrize(
    "options",
    [
        *("namespaces=True", "namespaces=False", "sandbox=True", "sandbox=True, namespaces=False"),
        "sandbox=True  # without bubblewrap",
    ],
)
@pytest.mark.skipif(not LINUX, reason="needs a subreaper")
def test_nothing_is_left_after_the_trainer_was_killed(grader, tmp_path, monkeypatch, options):
    mark = f"proxima-{len(options)}-{os.getpid()}"
    (tmp_path / "grader.py").write_text(GRADER.replace("proxima-left-behind", mark))
    (tmp_path / "trainer.py").write_text(KILLED.replace("OPTIONS", options))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    trainer = subprocess.Popen(
        [sys.executable, "trainer.py"],
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(proxima.__file__).parents[1]),
            "TMPDIR": str(scratch),
            "WITHOUT": "without" if "without" in options else "",
        },
    )
    assert trainer.stdout is not None
    try:
        assert trainer.stdout.readline() == b"started\n"
        assert len(list(scratch.iterdir())) == (2 if "sandbox" in options else 0)
        wait_for(2, mark)
    finally:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    wait_for(0, mark, SLACK)
    wait_for(0, f'"trainer": {trainer.pid}', SLACK)
    assert list(scratch.iterdir()) == []
