"""The child side of `WorkerProcess`: it holds one function or object and answers calls with JSON.

    python worker_child.py '{"memory_mb": 4096, "network": true, ...}'

It uses the standard library only and is run by its path, so that it starts in milliseconds. Calls come in as
JSON lines on standard input, replies leave on what standard output was at the start; everything that the
function itself prints goes to standard error.

Up to three processes. The outer one watches the trainer and ends everything when the trainer goes away. Where
the kernel allows a PID namespace, the second is its first process: when it dies the kernel kills all others
in it, however they were started. The last one runs the function.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import re
import select
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, BinaryIO, NoReturn

MAX_REPLY_BYTES = 16 * 2**20
MAX_REASON = 300  # characters
MAX_ATTRIBUTE = 200_000  # characters of one as JSON
MAX_DEPTH = 50  # lists and dicts inside each other
ATTRIBUTES = "public attributes"
"""In place of a method's name: asks for those of the object."""
MAX_PROCESSES = 64  # of a sandbox in a user namespace
COUNTED_ALONE = (5, 14)  # Linux from which on they are counted per namespace, not with all of the user's
WATCH_SECONDS = 0.5  # between two looks at the trainer, beside the signals that say it is gone
NOBODY = 65534
SIGNAL_CODE = 128  # a process that died by signal n exits with this + n, as in a shell

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
CLONE_NEWIPC = 0x08000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
DEVICES = ("null", "zero", "random", "urandom")

Limits = dict[str, Any]


def _libc(name: str, *arguments: object) -> None:
    """A call of the C library; raises an OSError where it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _libc("prctl", option, ctypes.c_ulong(value), 0, 0, 0)


# Isolation


def isolate(limits: Limits) -> dict[str, bool]:
    """Enter the namespaces that the limits ask for and the kernel allows; says which these are.

    A PID namespace takes effect in the next process that is forked.
    """
    if sys.platform != "linux" or not limits["namespaces"]:
        return {"processes": False, "network": False, "user": False}
    sandbox = bool(limits.get("sandbox"))
    wanted = CLONE_NEWPID | CLONE_NEWNS | (CLONE_NEWIPC if sandbox else 0)
    if not limits.get("network", True):
        wanted |= CLONE_NEWNET
    user = sandbox or os.geteuid() != 0  # the policy's code never keeps a real root's rights
    done = _works(lambda: _enter(wanted, user))
    if done:
        _enter(wanted, user)
    return {"processes": done, "network": done and bool(wanted & CLONE_NEWNET), "user": done and user}


def _works(attempt: Callable[[], None]) -> bool:
    """Whether it succeeds in a copy of this process: half of it could not be undone."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    try:
        attempt()
        if inner := os.fork():  # what a PID namespace takes effect in
            os._exit(os.waitpid(inner, 0)[1] and 1)
        os._exit(0)
    except OSError:
        os._exit(1)


def _enter(wanted: int, user: bool) -> None:
    owner, group = os.geteuid(), os.getegid()
    _libc("unshare", ctypes.c_int(wanted | (CLONE_NEWUSER if user else 0)))
    if user:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{owner or NOBODY} {owner} 1")
        _write("/proc/self/gid_map", f"{group or NOBODY} {group} 1")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _own_proc(read_only: bool) -> bool:
    """Show this namespace's processes in /proc; some containers forbid it."""
    try:
        _mount(None, "/", None, MS_REC | MS_PRIVATE)
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | (MS_RDONLY if read_only else 0)
        _mount("proc", "/proc", "proc", flags)
    except OSError:
        return False
    return True


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _libc("mount", words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])


def _change_mount(path: str, added: int, cleared: int, recursive: bool = False) -> None:
    attributes = (ctypes.c_uint64 * 4)(added, cleared, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    _libc(
        *("syscall", ctypes.c_long(MOUNT_SETATTR), ctypes.c_int(AT_FDCWD), path.encode()),
        *(ctypes.c_uint(flags), ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes))),
    )


def _read_only(scratch: str, megabytes: int) -> bool:
    """Make all files read-only except those of a new folder in memory; devices are closed except for four."""
    locked = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    try:
        devices = [path for name in DEVICES if os.path.exists(path := f"/dev/{name}")]
        for path in devices:
            _mount(path, path, None, MS_BIND)
        _change_mount("/", locked, 0, recursive=True)
        for path in devices:
            _change_mount(path, 0, MOUNT_ATTR_NODEV | MOUNT_ATTR_RDONLY)
        _mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, f"size={megabytes}m,mode=700")
    except OSError:
        return False
    return True


def _drop_rights() -> None:
    """Leave no capability and no way to a new one: without it the mounts could be undone."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _libc("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def counts_processes_alone(release: str) -> bool:
    """Whether a Linux of this release counts the processes of a user namespace by themselves."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return found is not None and (int(found[1]), int(found[2])) >= COUNTED_ALONE


def _limit_resources(limits: Limits, count_processes: bool) -> None:
    import resource  # Windows, which runs no worker, has none

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory := limits.get("memory_mb"):
        with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (memory * 2**20, memory * 2**20))
    if count_processes:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))


# Processes


def _fork(work: Callable[[], NoReturn]) -> int:
    """The id of a child that runs `work` and dies with this process."""
    parent = os.getpid()
    if child := os.fork():
        return child
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() not in (parent, 0):  # 0: the parent is outside of the PID namespace
            os._exit(1)
        work()
    finally:
        os._exit(1)


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return SIGNAL_CODE - code if code < 0 else code


def first_process(worker: Callable[[], NoReturn]) -> NoReturn:
    """The first process of a PID namespace: it collects orphans, and ends with the worker."""
    child = _fork(worker)
    _close_all()
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            os._exit(_code(status))


def _close_all() -> None:
    """Keep no pipe open that says by its end that the worker is gone."""
    os.closerange(3, 256)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(null, number)


def watch(child: int, requests: int, trainer: int | None) -> int:
    """The exit code of the child, once it has ended, or the trainer hung up or died."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(requests, 0)  # only that nobody writes any more
    poll.register(ended, select.POLLIN)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return _code(status)
        hung_up = any(number == requests for number, _ in poll.poll(1000 * WATCH_SECONDS))
        if hung_up or trainer not in (None, os.getppid()):
            return 1


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, signal.SIGKILL)


def kill_descendants() -> None:
    """All of them: a subreaper also gets those whose own parent is gone."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for process in _descendants(os.getpid()):
                _kill(process)
            os.waitpid(-1, 0)


def _descendants(root: int) -> list[int]:
    """The processes below this one; without /proc those of its group."""
    parents: dict[int, int] = {}
    try:
        names = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return _group(root)
    for name in names:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file,
        ):
            parents[name] = int(file.read().rpartition(")")[2].split()[1])
    found: list[int] = []
    layer = {root}
    while layer := {name for name, parent in parents.items() if parent in layer and name not in found}:
        found += layer
    return found


def _group(root: int) -> list[int]:
    """The trainer kills this group, and with it this process."""
    os.killpg(os.getpgid(root), signal.SIGKILL)
    return []


# Calls


class Served:
    """The function or object, and its answers to calls."""

    def __init__(self, target: Any, made_with: dict[str, Any] | None):
        self.target, self.made_with = target, made_with or {}
        self.made: Any = None

    def subject(self, method: str | None) -> Any:
        """What a call is for: the target itself, or a method of the object that it makes."""
        if method is None:
            return self.target
        if self.made is None:
            makes = inspect.isroutine(self.target) or inspect.isclass(self.target)
            self.made = self.target(**self.made_with) if makes else self.target
        return partial(public_attributes, self.made) if method == ATTRIBUTES else getattr(self.made, method)

    def answer(self, call: dict[str, Any]) -> dict[str, Any]:
        try:
            returned = self.subject(call["method"])(*call["args"], **call["kwargs"])
            if inspect.isawaitable(returned):
                import asyncio

                returned = asyncio.run(_awaited(returned))
        except MemoryError:
            return {"kind": "memory", "message": "it ran out of memory"}
        except SystemExit as error:
            return {"kind": "exit", "message": f"it called sys.exit({error.code!r})"[:MAX_REASON]}
        except BaseException as error:  # a user's code may raise anything
            return {"kind": "raised", "message": in_words(error)}
        return {"value": returned}


def public_attributes(made: object) -> list[dict[str, object]]:
    """The values of an object's public attributes, as JSON has them; and why others cannot be read."""
    values: dict[str, object] = {}
    unreadable: dict[str, object] = {}
    for name in dir(made):
        if name.startswith("_"):
            continue
        try:
            value = getattr(made, name)
            if callable(value):
                continue
            written = json.dumps(value, default=_plain)
            read = json.loads(written) if len(written) <= MAX_ATTRIBUTE else None
        except Exception as error:  # a property may raise anything
            unreadable[name] = f"cannot be read ({in_words(error)})"
            continue
        if len(written) > MAX_ATTRIBUTE:
            unreadable[name] = f"has {len(written):,} characters, more than {MAX_ATTRIBUTE:,}"
        elif _is_deep(read):
            unreadable[name] = f"has lists or dicts more than {MAX_DEPTH} deep"
        else:
            values[name] = read
    return [values, unreadable]


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        lists = [part for part in level if isinstance(part, list)]
        dicts = [list(part.values()) for part in level if isinstance(part, dict)]
        level = [part for parts in (*lists, *dicts) for part in parts]
    return bool(level)


async def _awaited(awaitable: Awaitable[object]) -> object:
    return await awaitable


def in_words(error: BaseException) -> str:
    try:
        return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")[:MAX_REASON]
    except Exception:  # its own __str__ may raise
        return type(error).__name__


def _plain(value: object) -> object:
    """Arrays, tensors and their numbers as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"its value holds a {type(value).__name__}, which JSON cannot hold")


def encode(reply: dict[str, object]) -> bytes:
    try:
        written = json.dumps(reply, default=_plain).encode()
    except MemoryError:
        return encode({"id": reply["id"], "kind": "memory", "message": "it ran out of memory"})
    except (TypeError, ValueError, RecursionError) as error:
        return encode({"id": reply["id"], "kind": "reply", "message": str(error)[:MAX_REASON]})
    if len(written) > MAX_REPLY_BYTES:
        message = f"its reply has {len(written)} bytes, more than {MAX_REPLY_BYTES}"
        return encode({"id": reply["id"], "kind": "reply", "message": message})
    return written + b"\n"


def load(setup: dict[str, Any]) -> Served:
    """The target: by its name, or as the trainer pickled it. Nothing that comes back is ever unpickled."""
    sys.path[:] = setup["path"]
    for module in setup["imports"]:
        importlib.import_module(module)
    if setup["pickled"]:
        import dill

        target = dill.loads(base64.b64decode(setup["pickled"]))
    else:
        module, _, name = setup["target"].partition(":")
        target = importlib.import_module(module)
        for each in name.split("."):
            target = getattr(target, each)
    return Served(target, setup["made_with"])


def serve(requests: BinaryIO, replies: int, protections: dict[str, bool]) -> NoReturn:
    """Answer calls until there are no more."""
    own = os.getpid()
    served: Served | None = None
    for line in requests:
        call = json.loads(line)
        reply: dict[str, Any]
        if served is None:
            try:
                served, reply = load(call), {"value": protections}
            except BaseException as error:  # a user's module may raise anything when it is imported
                reply = {"kind": "raised", "message": in_words(error)}
        else:
            reply = served.answer(call)
        if os.getpid() != own:  # the function forked, and this is the copy
            os._exit(0)
        written = encode({"id": call["id"], **reply})
        while written:
            written = written[os.write(replies, written) :]
    os._exit(0)


def main() -> NoReturn:
    limits: Limits = json.loads(sys.argv[1])
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    if limits["sandbox"]:
        os.dup2(null, 2)
    os.dup2(2, 1)
    sandbox = limits["sandbox"]
    protections = {"files": False, **isolate(limits)}

    def work() -> NoReturn:
        if sandbox:
            os.chdir(sandbox)
        count = bool(sandbox) and protections["user"] and counts_processes_alone(os.uname().release)
        _limit_resources(limits, count_processes=count)
        serve(os.fdopen(requests, "rb"), replies, protections)

    def first() -> NoReturn:
        has_proc = _own_proc(read_only=bool(sandbox))
        if sandbox:
            protections["files"] = has_proc and _read_only(sandbox, limits["scratch_mb"])
            _drop_rights()
        first_process(work)

    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = _fork(first if protections["processes"] else work)
    os.close(replies)
    if sandbox:
        _prctl(PR_SET_DUMPABLE, 0)  # under bubblewrap the policy's code sees this process, but not its pipes
    code = watch(child, requests, limits["trainer"])
    if protections["processes"]:  # the kernel kills the whole namespace
        _kill(child)
    else:
        kill_descendants()
    os._exit(code)


if __name__ == "__main__":
    main()
