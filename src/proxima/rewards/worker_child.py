"""The child side of `WorkerProcess`: it holds one function or object and answers calls with JSON.

    python worker_child.py '{"memory_mb": 4096, "network": true, ...}'

It uses the standard library only and is run by its path, so that it starts in milliseconds. Calls come in as
JSON lines on standard input, replies leave on what standard output was at the start; everything that the
function itself prints goes to standard error.

Up to three processes. The outer one watches the trainer, ends everything when the trainer goes away, and
removes the scratch folder. Where the kernel allows a PID namespace, the second is its first process: when it
dies the kernel kills all others in it, however they were started. The last one runs the function; with
bubblewrap it is this file again, inside of it.

How many processes a worker may have is limited by the first of these that works: the largest id of its PID
namespace (Linux 6.14), RLIMIT_NPROC in a user namespace (Linux 5.14; it never binds the machine's root), a
control group.
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
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

if TYPE_CHECKING:
    import asyncio

MAX_REPLY_BYTES = 16 * 2**20
MAX_REASON = 300  # characters
MAX_ATTRIBUTE = 200_000  # characters of one as JSON
MAX_DEPTH = 50  # lists and dicts inside each other
ATTRIBUTES = "public attributes"
"""In place of a method's name: asks for those of the object."""
COUNTED_ALONE = (5, 14)  # Linux that counts processes per user namespace, not with all of the user's
OWN_PID_MAX = (6, 14)  # Linux that has a largest process id per PID namespace
PID_MAX = "/proc/sys/kernel/pid_max"
RESERVED_IDS = 300  # process ids that are given out only once, before they begin again from here
GROUP_SECONDS = 1.0  # for a control group to become empty once its processes are killed
WATCH_SECONDS = 0.5  # between two looks at the trainer, beside the signals that say it is gone
MEMORY_SECONDS = 0.1  # between two looks at the memory of all processes of a worker
NOBODY = 65534
SIGNAL_CODE = 128  # a process that died by signal n exits with this + n, as in a shell
MEMORY_CODE = 200  # its processes together took too much memory

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
CLONE_NEWIPC = 0x08000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR = 442
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
DEVICES = ("null", "zero", "random", "urandom")
MOST_NAMESPACES = "/proc/sys/user/max_user_namespaces"  # of this one, and those below it
SOCKETS = "/run"  # sockets of the machine's services, which a file system that is read-only does not close

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


def isolate(limits: Limits) -> tuple[dict[str, bool], ProcessLimit]:
    """Enter the namespaces that the limits ask for and the kernel allows; says which these are, and what
    limits the number of processes in them.

    A PID namespace takes effect in the next process that is forked.
    """
    nothing = {"signals": False, "network": False}
    if sys.platform != "linux" or not limits["namespaces"]:
        return nothing, ProcessLimit(0)
    bubble = bool(limits["bubble"])  # it has namespaces of its own for all but the ids of processes
    sandbox = bool(limits["sandbox"]) and not bubble
    wanted = CLONE_NEWPID | CLONE_NEWNS | (CLONE_NEWIPC if sandbox else 0)
    if not limits["network"] and not bubble:
        wanted |= CLONE_NEWNET
    user = sandbox or os.geteuid() != 0  # the policy's code never keeps a real root's rights
    found = _trial(wanted, user)
    limit = ProcessLimit(limits["processes"], bool(found & HAS_PID_MAX), bool(found & HAS_RLIMIT))
    limit.find()
    if not found & ENTERED:
        return nothing, limit
    _enter(wanted, user)
    return {"signals": True, "network": bool(wanted & CLONE_NEWNET)}, limit


ENTERED, HAS_PID_MAX, HAS_RLIMIT = 1, 2, 4


def _trial(wanted: int, user: bool) -> int:
    """What works, tried in a copy of this process: half of it could not be undone."""
    if child := os.fork():
        return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
    found = 0
    try:
        _enter(wanted, user)
        outside = _read(PID_MAX)
        if inner := os.fork():  # what a PID namespace takes effect in
            found = max(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]), 0)
            if found & HAS_PID_MAX and _read(PID_MAX) != outside:  # it is the whole machine's
                _write(PID_MAX, outside)
                found -= HAS_PID_MAX
        else:
            found = _trial_inside()
    finally:
        os._exit(found)


def _trial_inside() -> int:
    import resource

    found = ENTERED
    _own_proc()
    with contextlib.suppress(OSError, ValueError):
        if _is_linux(OWN_PID_MAX):  # never tried before: it would change the whole machine's
            _write(PID_MAX, str(int(_read(PID_MAX)) - 1))
            found += HAS_PID_MAX
    if _is_linux(COUNTED_ALONE):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        try:
            if not os.fork():
                os._exit(0)
        except OSError:
            found += HAS_RLIMIT
    return found


def _is_linux(least: tuple[int, int]) -> bool:
    return release_of(os.uname().release) >= least


def release_of(words: str) -> tuple[int, int]:
    """The first two numbers of a kernel's release."""
    found = re.match(r"(\d+)\.(\d+)", words)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _enter(wanted: int, user: bool) -> None:
    owner, group = os.geteuid(), os.getegid()
    _libc("unshare", ctypes.c_int(wanted | (CLONE_NEWUSER if user else 0)))
    if user:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{owner or NOBODY} {owner} 1")
        _write("/proc/self/gid_map", f"{group or NOBODY} {group} 1")


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _own_proc(read_only: bool = False) -> bool:
    """Show this namespace's processes in /proc; some containers forbid it."""
    try:
        _mount(None, "/", None, MS_REC | MS_PRIVATE)
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | (MS_RDONLY if read_only else 0)
        if read_only:
            with contextlib.suppress(OSError):
                _write(MOST_NAMESPACES, "0")  # a new one could mount file systems in memory, of any size
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


def _lock_devices() -> list[str]:
    """Make devices that hold nothing read-only by mounts of their own: they can be written all the same, but
    not be given other rights. Their paths."""
    devices = [path for name in DEVICES if os.path.exists(path := f"/dev/{name}")]
    for path in devices:
        with contextlib.suppress(OSError):  # an old kernel, or a container, does not allow it
            _mount(path, path, None, MS_BIND)
            _change_mount(path, MOUNT_ATTR_RDONLY, 0)
    return devices


def hidden_folders(scratch: str) -> list[str]:
    """What a sandbox finds empty; not where Python, this package or its own folder is in there."""
    used = (sys.executable, sys.prefix, sys.base_prefix, __file__, os.getcwd(), scratch)
    paths = (*used, *map(os.path.realpath, used))
    is_used = any(path.startswith(f"{SOCKETS}/") for path in paths)
    return [SOCKETS] if os.path.isdir(SOCKETS) and not is_used else []


def _read_only(scratch: str, megabytes: int) -> bool:
    """Make all files read-only except those of a new folder in memory; devices are closed except for four."""
    locked = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
    try:
        devices = _lock_devices()
        for path in hidden_folders(scratch):
            _mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV)
        _change_mount("/", locked, 0, recursive=True)
        for path in devices:
            _change_mount(path, 0, MOUNT_ATTR_NODEV)
        _mount("tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, f"size={megabytes}m,mode=700")
    except OSError:
        return False
    return True


def _drop_rights() -> None:
    """Leave no capability and no way to a new one: without it the mounts could be undone."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _libc("capset", ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def _limit_memory(megabytes: int | None) -> None:
    import resource  # Windows, which runs no worker, has none

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes:
        with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20))


# How many processes


class ProcessLimit:
    """How many processes the worker may have; binds the one that calls `apply`, and all below it."""

    def __init__(self, count: int, by_pid_max: bool = False, by_rlimit: bool = False):
        self.count, self.by_pid_max, self.by_rlimit = count, by_pid_max, by_rlimit
        self.group: str | None = None
        self.above: int | None = None

    def find(self) -> None:
        """Make a control group where nothing else works."""
        if not self.by_pid_max and not self.by_rlimit:
            self.group = make_group(self.count)
            if self.group:  # a handle from before namespaces in which files are read-only
                self.above = os.open(os.path.dirname(self.group), os.O_RDONLY)

    @property
    def works(self) -> bool:
        return self.by_pid_max or self.by_rlimit or self.group is not None

    def apply(self) -> None:
        """Where a /proc stands that may be written."""
        if self.by_pid_max:
            _write(PID_MAX, str(RESERVED_IDS + self.count))
        elif self.by_rlimit:
            import resource

            resource.setrlimit(resource.RLIMIT_NPROC, (self.count, self.count))
        elif self.group:
            _write(f"{self.group}/cgroup.procs", "0")

    def end(self) -> None:
        """Once the worker is gone."""
        if self.group:
            remove_group(self.group, self.above)


def make_group(processes: int) -> str | None:
    """A new control group with this limit, where this process may make one and enter it."""
    for folder in _group_folders():
        path = f"{folder}/proxima-worker-{os.getpid()}"
        with contextlib.suppress(OSError):
            os.mkdir(path)
            try:
                _write(f"{path}/pids.max", str(processes))
                if _may_enter(path):
                    return path
            except OSError:
                pass
            remove_group(path)
    return None


def _group_folders() -> Iterator[str]:
    """Where one may be made: beside this process's own, or in it."""
    try:
        own = [line.split(":", 2)[1:] for line in _read("/proc/self/cgroup").splitlines()]
        mounts = [line.split() for line in _read("/proc/self/mountinfo").splitlines()]
    except OSError:
        return
    for mount in mounts:
        root = mount[3]
        point = mount[4]
        (kind, _, options) = mount[mount.index("-") + 1 :]
        for controllers, path in own:
            inside = f"{point}/{path.removeprefix(root).lstrip('/')}".rstrip("/")
            if kind == "cgroup2" and not controllers:
                yield from [os.path.dirname(inside)] * (inside != point)
                yield inside
            elif kind == "cgroup" and "pids" in controllers.split(",") and "pids" in options.split(","):
                yield inside


def _may_enter(group: str) -> bool:
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    try:
        _write(f"{group}/cgroup.procs", "0")
        os._exit(0)
    finally:
        os._exit(1)


def remove_group(path: str, above: int | None = None) -> None:
    with contextlib.suppress(OSError):
        _write(f"{path}/cgroup.kill", "1")  # Linux 5.14
    end = time.monotonic() + GROUP_SECONDS
    while time.monotonic() < end:
        try:
            os.rmdir(path if above is None else os.path.basename(path), dir_fd=above)
            return
        except OSError:  # its processes are still ending
            time.sleep(0.01)


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


class MemoryLimit:
    """Of a process and all below it together; what they share counts once, where the kernel tells. Keeps a
    handle on /proc, where another one is mounted later."""

    def __init__(self, megabytes: int | None):
        self.limit = (megabytes or 0) * 2**20
        self.proc: int | None = None
        if megabytes and sys.platform == "linux":
            with contextlib.suppress(OSError):
                self.proc = os.open("/proc", os.O_RDONLY)

    def exceeded(self, root: int) -> bool:
        if self.proc is None:
            return False
        tree = self._tree(root)
        used = sum(map(self._resident, tree)) > self.limit
        return used and sum(map(self._proportional, tree)) > self.limit

    def _tree(self, root: int) -> list[int]:
        """Without a look at all other processes of the machine."""
        found = [root]
        for process in found:
            with contextlib.suppress(OSError):
                folder = os.open(f"{process}/task", os.O_RDONLY, dir_fd=self.proc)
                try:
                    for task in os.listdir(folder):
                        found += map(int, self._read(f"{process}/task/{task}/children").split())
                finally:
                    os.close(folder)
        return found

    def _resident(self, process: int) -> int:
        try:
            return int(self._read(f"{process}/statm").split()[1]) * os.sysconf("SC_PAGESIZE")
        except (OSError, IndexError):  # it is gone
            return 0

    def _proportional(self, process: int) -> int:
        """Its memory, with its share of what others use too; all of that where it is not said."""
        try:
            lines = self._read(f"{process}/smaps_rollup").splitlines()
        except OSError:
            return self._resident(process)
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss:", "SwapPss:")))

    def _read(self, path: str) -> str:
        with os.fdopen(os.open(path, os.O_RDONLY, dir_fd=self.proc), encoding="ascii") as file:
            return file.read()


def watch(child: int, requests: int, trainer: int | None, memory: MemoryLimit) -> int:
    """The exit code of the child, once it has ended, took too much memory with all that it started, or the
    trainer hung up or died."""
    seconds = WATCH_SECONDS if memory.proc is None else MEMORY_SECONDS
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
        events = [number for number, _ in poll.poll(1000 * seconds)]
        if ended in events:  # of another process too, that lost its parent
            os.read(ended, 2**10)
        hung_up = requests in events
        if hung_up or trainer not in (None, os.getppid()):
            return 1
        if memory.exceeded(child):
            return MEMORY_CODE


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
        self._runner: asyncio.Runner | None = None

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
                returned = self._result_of(returned)
        except MemoryError:
            return {"kind": "memory", "message": "it ran out of memory"}
        except SystemExit as error:
            return {"kind": "exit", "message": f"it called sys.exit({error.code!r})"[:MAX_REASON]}
        except BaseException as error:  # a user's code may raise anything
            return {"kind": "raised", "message": in_words(error)}
        return {"value": without_info(call["method"], returned)}

    def _result_of(self, awaitable: Awaitable[object]) -> object:
        """Always on the same event loop, so that a client can keep its connections between calls."""
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_awaited(awaitable))


def without_info(method: str | None, returned: object) -> object:
    """What an environment returned, without gymnasium's `info`: nobody reads it, and JSON may not hold it."""
    if isinstance(returned, (tuple, list)):
        if method == "step" and len(returned) == 5:
            return [*returned[:4], {}]
        if method == "reset" and len(returned) == 2 and isinstance(returned[1], dict):
            return [returned[0], {}] if not isinstance(returned[0], dict) else returned
    return returned


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


def _protections(limits: Limits, isolated: dict[str, bool], limit: ProcessLimit) -> dict[str, bool]:
    """What protects the machine from this worker before it has entered its last namespace."""
    bubble = bool(limits["bubble"])
    return {
        "signals": isolated["signals"] or bubble,
        "processes": limit.works,
        "network": isolated["network"] or (bubble and not limits["network"]),
        "files": bubble,
    }


def main() -> NoReturn:
    limits: Limits = json.loads(sys.argv[1])
    requests, replies = os.dup(0), os.dup(1)
    null, sandbox = os.open(os.devnull, os.O_RDWR), limits["sandbox"]
    os.dup2(null, 0)
    if sandbox:
        os.dup2(null, 2)
    os.dup2(2, 1)
    if (known := limits.get("protections")) is not None:  # inside of bubblewrap
        _watched(lambda: _work(limits, known, requests, replies), limits, requests, replies)
    # in the namespaces that follow, files are read-only and /proc is another
    memory = MemoryLimit(limits["memory_mb"])
    above = os.open(os.path.dirname(sandbox), os.O_RDONLY) if sandbox else None
    isolated, limit = isolate(limits)
    bubble = limits["bubble"]
    protections = _protections(limits, isolated, limit)
    close_handles = partial(_close, memory.proc, above, limit.above)

    def work() -> NoReturn:
        if not isolated["signals"]:
            close_handles()
            limit.apply()
        if bubble:
            _enter_bubble(limits, protections, requests, replies)
        _work(limits, protections, requests, replies)

    def first() -> NoReturn:
        close_handles()
        has_proc = _own_proc()
        limit.apply()
        if sandbox and not bubble:
            has_proc = has_proc and _own_proc(read_only=True)
            protections["files"] = has_proc and _read_only(sandbox, limits["scratch_mb"])
            _drop_rights()
        if bubble:
            _lock_devices()
        first_process(work)

    def clear() -> None:
        limit.end()
        _remove(sandbox, above)

    begin = first if isolated["signals"] else work
    _watched(begin, limits, requests, replies, isolated["signals"], clear, memory)


def _close(*handles: int | None) -> None:
    """What the worker's code must not find open: handles from before its namespaces."""
    for handle in handles:
        if handle is not None:
            os.close(handle)


def _remove(folder: str, above: int | None) -> None:
    """Remove a folder, by a handle from before the namespaces of the one that it is in."""
    import shutil

    if above is None:
        return

    with contextlib.suppress(OSError):
        _libc("umount2", folder.encode(), MNT_DETACH)
    os.fchdir(above)
    shutil.rmtree(os.path.basename(folder), ignore_errors=True)


def _work(limits: Limits, protections: dict[str, bool], requests: int, replies: int) -> NoReturn:
    if limits["sandbox"]:
        os.chdir(limits["sandbox"])
    _limit_memory(limits["memory_mb"])
    serve(os.fdopen(requests, "rb"), replies, protections)


def _enter_bubble(limits: Limits, protections: dict[str, bool], requests: int, replies: int) -> NoReturn:
    """This file again, inside of bubblewrap."""
    os.dup2(requests, 0)
    os.dup2(replies, 1)
    inside = json.dumps({**limits, "protections": protections, "trainer": None})
    command = [*limits["bubble"], sys.executable, "-P", __file__, inside]
    os.execvp(command[0], command)


def _watched(
    work: Callable[[], NoReturn],
    limits: Limits,
    requests: int,
    replies: int,
    has_namespace: bool = False,
    clear: Callable[[], None] = lambda: None,
    memory: MemoryLimit | None = None,
) -> NoReturn:
    """Run this in a process that ends with the trainer, and end all that it started."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    child = _fork(work)
    os.close(replies)
    if limits["sandbox"]:
        _prctl(PR_SET_DUMPABLE, 0)  # under bubblewrap the policy's code sees this process, but not its pipes
    code = watch(child, requests, limits["trainer"], memory or MemoryLimit(None))
    if has_namespace:  # the kernel kills the whole namespace
        _kill(child)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    else:
        kill_descendants()
    clear()
    os._exit(code)


if __name__ == "__main__":
    main()
