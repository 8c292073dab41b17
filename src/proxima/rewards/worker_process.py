"""`WorkerProcess`: one killable child process that holds a function or an object and answers calls.

In: a function, or a factory of an object with methods. Out: what its calls return, as JSON; a `WorkerFailure`
that names the kind where a call hangs, runs out of memory, crashes, exits or raises. Each worker is a new
session of its own; where the kernel allows a PID namespace too, nothing that it started survives it. It dies
with the process that made it, also by `kill -9`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from proxima.core.json_record import Record, RecordView
from proxima.rewards import worker_child

FailureKind: TypeAlias = Literal["timeout", "memory", "crash", "exit", "raised", "reply"]
JsonValue: TypeAlias = Any

START_SECONDS = 120.0  # to import what the function needs
END_SECONDS = 2.0  # to end everything, before the group is killed from here
CANCEL_SECONDS = 0.1  # after which `cancel` is seen
MOST_FILES = 65_536  # that this process may have open
SCRATCH_MB = 64  # of files that a sandboxed worker may write
MOST_PROCESSES = 1024  # of one worker, threads included
MOST_IN_SANDBOX = 64
PLAIN_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "SYSTEMROOT")
"""What a sandboxed worker sees of the environment, in which keys may stand."""


class WorkerFailure(Exception):  # noqa: N818
    """A call that brought no value.

    Args:
        kind: `timeout`, `memory`, `crash` (killed by a signal), `exit` (the process left), `raised`, or
            `reply` (no JSON, or too long).
        at_start: the target was not loaded yet: no call was made.
    """

    def __init__(self, kind: FailureKind, message: str, at_start: bool = False):
        super().__init__(message)
        self.kind: FailureKind = kind
        self.at_start = at_start

    @property
    def message(self) -> str:
        return str(self)


class WorkerProcess:
    """A child process with one target. After a time-out, a crash or an exit it is gone: make another.

    with WorkerProcess("my_rewards:score", memory_mb=None) as worker:
        worker.call(None, "an answer", timeout=5.0)
    """

    def __init__(
        self,
        target: str | bytes | Callable[..., object],
        *,
        memory_mb: int | None,
        network: bool = True,
        made_with: RecordView | None = None,
        sandbox: bool = False,
        namespaces: bool = True,
        imports: Sequence[str] = (),
    ):
        """
        Args:
            target: `module:name`, a function or class, or the same as `pickled` returns it.
            memory_mb: most address space of the child, and most memory of all that it starts together, in
                MiB; None = no limit.
            network: False = none, where the kernel allows to take it away.
            made_with: keyword arguments with which calls of methods make the object.
            sandbox: for code of the policy: no environment variables, quiet, files read-only except for a
                folder in memory, where the kernel allows.
            namespaces: whether to try for any.
            imports: modules to import with the target, so that no call's deadline pays for them.
        """
        check_system()
        _allow_open_files()
        self.protections: dict[str, bool] = {}
        self._calls, self._cancelled = 0, False
        bubble = bubblewrap() if sandbox and namespaces else None
        scratch = tempfile.mkdtemp(prefix="proxima-worker-") if sandbox else ""
        try:
            self._process = _launch(memory_mb, network, scratch, namespaces, bubble)
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        self._end = weakref.finalize(self, _end, self._process, scratch)
        self._setup: Record | None = {**_setup(target, made_with), "imports": list(imports)}

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._end.alive

    def start(self, timeout: float = START_SECONDS) -> None:
        """Wait until the target is loaded; `call` does it too."""
        if self._setup is not None:
            setup, self._setup = self._setup, None
            try:
                self.protections = self._exchange(setup, time.monotonic() + timeout, timeout)
            except WorkerFailure as failure:
                self.close()
                raise WorkerFailure(failure.kind, failure.message, at_start=True) from None

    def call(self, method: str | None, /, *args: JsonValue, timeout: float, **kwargs: JsonValue) -> JsonValue:
        """What the target, or this method of the object that it makes, returns.

        Args:
            method: None = call the target itself.
            args: anything that JSON can hold.
            timeout: seconds, from when the target is loaded.
        """
        return self.request(method, args, kwargs, timeout)

    def request(
        self, method: str | None, args: Sequence[JsonValue], kwargs: Mapping[str, JsonValue], timeout: float
    ) -> JsonValue:
        """`call` with arguments of any name."""
        if not self.alive:
            raise WorkerFailure("exit", "its process has ended")
        self.start()
        call = {"method": method, "args": list(args), "kwargs": dict(kwargs)}
        return self._exchange(call, time.monotonic() + timeout, timeout)

    def cancel(self) -> None:
        """Make a call that waits in another thread fail soon."""
        self._cancelled = True

    def close(self) -> None:
        """End the child and everything that it started."""
        self._end()

    def _exchange(self, call: Record, deadline: float, timeout: float) -> JsonValue:
        self._calls += 1
        try:
            request = json.dumps({"id": self._calls, **call}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise WorkerFailure("raised", f"its arguments cannot be sent as JSON: {error}") from None
        try:
            reply = self._read(self._transfer(request, deadline, timeout))
        except BaseException as error:  # Ctrl-C too: what it would answer is not for the next call
            if not isinstance(error, WorkerFailure) or error.kind in ("timeout", "crash", "exit"):
                self.close()
            raise
        if "kind" in reply:
            raise WorkerFailure(reply["kind"], str(reply.get("message", ""))[: worker_child.MAX_REASON])
        return reply["value"]

    def _transfer(self, request: bytes, deadline: float, timeout: float) -> bytes:
        """Send the request and receive one line, without ever waiting past the deadline."""
        received = bytearray()
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise WorkerFailure("timeout", f"no answer within {timeout:g} s")
            if self._cancelled:
                raise WorkerFailure("exit", "it was cancelled")
            readable, writable = _ready(
                self._replies, self._requests if request else None, min(left, CANCEL_SECONDS)
            )
            if writable:
                try:
                    request = request[os.write(self._requests, request) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    request = b""
            if readable:
                piece = os.read(self._replies, 2**20)
                if not piece:
                    raise self._departed()
                received += piece
                if received.endswith(b"\n"):
                    return bytes(received)
                if len(received) > worker_child.MAX_REPLY_BYTES + 2**20:
                    self.close()
                    raise WorkerFailure("reply", "its reply is too long")

    def _read(self, line: bytes) -> Record:
        try:
            reply = json.loads(line)
            if (
                isinstance(reply, dict)
                and reply["id"] == self._calls
                and ("value" in reply or "kind" in reply)
            ):
                return reply
        except (ValueError, KeyError, RecursionError):
            pass
        self.close()
        raise WorkerFailure("reply", "its reply is not JSON of this protocol")

    def _departed(self) -> WorkerFailure:
        """Why the child closed its pipe."""
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return WorkerFailure("crash", "it closed its pipe")
        if code == worker_child.MEMORY_CODE:
            return WorkerFailure("memory", "all its processes together took more memory than memory_mb")
        number = -code if code < 0 else code - worker_child.SIGNAL_CODE
        if number <= 0:
            return WorkerFailure("exit", f"its process ended with exit code {code}")
        if number == signal.SIGKILL:
            return WorkerFailure("memory", "it was killed (SIGKILL), as the system does when memory runs out")
        with contextlib.suppress(ValueError):
            return WorkerFailure("crash", f"its process crashed ({signal.Signals(number).name})")
        return WorkerFailure("exit", f"its process ended with exit code {code}")


class Bubblewrap(NamedTuple):
    """Bubblewrap as it works here."""

    path: str
    nests: bool  # in namespaces of the worker, which limit its processes


def _launch(
    memory_mb: int | None, network: bool, scratch: str, namespaces: bool, bubble: Bubblewrap | None
) -> subprocess.Popen[bytes]:
    """The child.

    Args:
        scratch: the folder of a sandboxed one; empty for any other.
        bubble: makes the sandbox.
    """
    command = _bubble_command(bubble.path, scratch, network) if bubble else []
    nests = namespaces if bubble is None else bubble.nests
    return subprocess.Popen(
        _child(command, nests, memory_mb=memory_mb, network=network, sandbox=scratch, trainer=os.getpid()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=_plain_environment(scratch) if scratch else None,
    )


def _child(bubble: Sequence[str], namespaces: bool, **limits: JsonValue) -> list[str]:
    limits |= {
        "bubble": bubble,
        "namespaces": namespaces,
        "scratch_mb": SCRATCH_MB,
        "processes": MOST_IN_SANDBOX if limits["sandbox"] else MOST_PROCESSES,
    }
    return [sys.executable, "-P", worker_child.__file__, json.dumps(limits)]


@cache
def bubblewrap() -> Bubblewrap | None:
    """Where it is installed and the kernel lets it work."""
    path = shutil.which("bwrap")
    if path is None:
        return None
    command = [*_bubble_command(path, "/tmp", False), "true"]
    if not _succeeds(command):
        return None
    inside = _child(command, True, memory_mb=None, network=False, sandbox="", trainer=None)
    return Bubblewrap(path, nests=_succeeds(inside))


def _succeeds(command: Sequence[str]) -> bool:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def _bubble_command(path: str, scratch: str, network: bool) -> list[str]:
    """All files read-only except for the scratch folder, which is in memory; no process, network or socket
    of the machine, and of its devices only those that hold nothing."""
    size = str(SCRATCH_MB * 2**20)
    devices = [f"/dev/{name}" for name in worker_child.DEVICES if os.path.exists(f"/dev/{name}")]
    empty = [
        f"--tmpfs {folder} --remount-ro {folder}".split() for folder in worker_child.hidden_folders(scratch)
    ]
    return [
        *(path, "--unshare-all", *(["--share-net"] if network else []), *_without_namespaces(path)),
        *("--ro-bind", "/", "/"),
        *(word for words in empty for word in words),
        *("--proc", "/proc", "--tmpfs", "/dev", "--symlink", "/proc/self/fd", "/dev/fd"),
        *(word for device in devices for word in ("--dev-bind", device, device)),
        *("--remount-ro", "/dev", "--size", size, "--tmpfs", scratch, "--chdir", scratch),
        # without a first process of its own, which would hold the pipe of the replies
        *("--cap-drop", "ALL", "--new-session", "--as-pid-1"),
    ]


@cache
def _without_namespaces(path: str) -> list[str]:
    """The options with which bubblewrap lets nobody inside make a namespace, in which file systems in memory
    of any size could be mounted; none where it is too old (before 0.8)."""
    options = ["--unshare-user", "--disable-userns"]
    return options if _succeeds([path, *options, "--ro-bind", "/", "/", "true"]) else []


@cache
def _allow_open_files() -> None:
    """As many as the system lets this process have: each worker takes two, and 1,024 is a common limit."""
    import resource  # Windows, which runs no worker, has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_system() -> None:
    if os.name != "posix":
        raise ValueError("worker processes need Linux or macOS; here functions run inside the trainer only")


def check_sendable(columns: RecordView, who: str, row: int) -> None:
    """A ValueError that names the first column of a row which JSON cannot hold: as text it would be another
    value than in the trainer."""
    for name, value in columns.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{who} runs in worker processes, and the column {name!r} of prompt {row} cannot be sent "
                f"there as JSON ({error}); write it as text, numbers or lists of them"
            ) from None


def pickled(target: Callable[..., object]) -> bytes | str:
    """A function or class as a worker takes it: by name where it can be imported, otherwise by value."""
    import dill

    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if module not in (None, "__main__") and "<" not in name:
        found: Any = sys.modules.get(module)
        for each in name.split("."):
            found = getattr(found, each, None)
        if found is target:
            return f"{module}:{name}"
    try:
        return bytes(dill.dumps(target, recurse=True))
    except Exception as error:  # what a closure holds may raise anything when it is pickled
        raise ValueError(
            f"{name or target!r} cannot be sent to a worker process: {worker_child.in_words(error)}; put it "
            "into a module, and give module:function"
        ) from None


def _setup(target: str | bytes | Callable[..., object], made_with: RecordView | None) -> Record:
    here = str(Path.cwd())  # "" would be the worker's own folder, in which the policy's code may write
    path = [here] * isinstance(target, str) + [each or here for each in sys.path]
    if callable(target):
        target = pickled(target)
    by_value = isinstance(target, bytes)
    return {
        "path": path,
        "target": "" if by_value else target,
        "pickled": base64.b64encode(target).decode() if isinstance(target, bytes) else "",
        "made_with": dict(made_with or {}),
    }


def _plain_environment(scratch: str) -> dict[str, str]:
    known = {name: os.environ[name] for name in PLAIN_ENVIRONMENT if name in os.environ}
    return {**known, "HOME": scratch, "TMPDIR": scratch, "OMP_NUM_THREADS": "1"}


def _ready(read: int, write: int | None, seconds: float) -> tuple[bool, bool]:
    """Which of the two can go on; `select` itself is bound to small numbers of files."""
    poll = select.poll()
    poll.register(read, select.POLLIN)
    if write is not None:
        poll.register(write, select.POLLOUT)
    found = {number for number, _ in poll.poll(1000 * seconds)}
    return read in found, write in found


def _end(process: subprocess.Popen[bytes], scratch: str) -> None:
    """Hang up, on which the child ends everything that it started; kill its group where it does not."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)
