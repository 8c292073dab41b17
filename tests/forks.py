"""`python` and `proxima` that start at once. In: modules. Out: a folder with both programs, each forked from
a process that has imported the modules.

Starting Python with torch and transformers takes seconds of a core, most of what a short command takes. A
forked program has the arguments, folder, environment, descriptors, ignored signals and exit code of one that
is started; signals that its place-holder gets are handed on, and it ends where the place-holder is killed.
What it does not have is a process number that the shell knows (`kill -9 $!` ends it a moment later) and hashes
of its own. Where the environment differs in what is read while modules are imported, the real program is
started.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

HELD = 64  # descriptors of a program at most
AWAY = 200  # where they wait while their places are freed
LOADED_WHEN_USED = ["transformers.models.qwen3.modeling_qwen3", "fastapi", "uvicorn"]
READ_AT_IMPORT = (
    "PYTHON",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "ATEN_",
    "TORCH",
    "CUDA",
    "HF_",
    "TRANSFORMERS_",
    "LD_",
)
USUAL_HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_", "PYTHON_EXEC")  # what torchrun sets, and reads itself


@contextmanager
def forked_programs(modules: list[str], environment: dict[str, str]) -> Iterator[Path]:
    """The folder with the programs, for the front of PATH."""
    with tempfile.TemporaryDirectory(prefix="forks-") as home:
        place, programs = Path(home) / "socket", Path(home) / "bin"
        programs.mkdir()
        client = [sys.executable, "-IS", str(Path(__file__).with_name("fork_client.py")), str(place)]
        for name in ("python", "proxima"):
            words = shlex.join([*client, str(Path(sys.executable).parent / name)])
            (programs / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
            (programs / name).chmod(0o755)
        server = subprocess.Popen(
            [sys.executable, __file__, str(place), *modules],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield programs
        finally:
            server.kill()
            server.communicate()


def package_modules() -> list[str]:
    """All of the package that needs no GPU, and what it loads when it is used."""
    import proxima

    package = [module.name for module in pkgutil.walk_packages(proxima.__path__, "proxima.")]
    chosen = [name for name in package if ".kernels." not in name and not name.endswith(".__main__")]
    return [*chosen, *LOADED_WHEN_USED]


def serve(place: str, before: dict[str, str]) -> None:
    """Returns in a forked process only, as the program that was asked for and with its arguments."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(place)
    listening.listen(HELD)
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a keeper ended
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:  # who started this process has gone
            raise SystemExit
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            order, held = _read(connection)
            program = os.fork()
            if program:
                _keep(program, connection, held)
            connection.close()
            _become(order, held, before)
            return
        connection.close()


def _read(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    length, held, _, _ = socket.recv_fds(connection, 4, HELD)
    text, wanted = b"", int.from_bytes(length, "big")
    while len(text) < wanted:
        text += connection.recv(wanted - len(text))
    return json.loads(text), held


def _keep(program: int, connection: socket.socket, held: list[int]) -> None:
    """Hand signals on and say how the program ended; end it where nobody waits for it any more."""
    for number in held:
        os.close(number)
    ended = os.pidfd_open(program)
    while ended not in (ready := select.select([ended, connection], [], [])[0]):
        signals = connection.recv(HELD) if connection in ready else b""
        for number in signals or [signal.SIGKILL]:
            os.kill(program, number)
    status = os.waitpid(program, 0)[1]
    with suppress(ProcessLookupError):
        os.killpg(program, signal.SIGKILL)  # what it started ends with it
    with suppress(OSError):
        connection.sendall(status.to_bytes(4, "big"))
    os._exit(0)


def _become(order: dict[str, Any], held: list[int], before: dict[str, str]) -> None:
    os.setsid()
    os.chdir(order["folder"])
    import fcntl

    away = [fcntl.fcntl(number, fcntl.F_DUPFD, AWAY) for number in held]
    for number in held:
        os.close(number)
    for number, place in zip(away, order["descriptors"], strict=True):
        os.dup2(number, place)
        os.close(number)
    for number, usual in USUAL_HANDLERS.items():  # whatever the process that forks inherited
        signal.signal(number, signal.SIG_IGN if number in order["ignored"] else usual)
    given = order["environment"]
    added = {name: value for name, value in os.environ.items() if name not in before}  # by the modules

    def read_at_import(variables: dict[str, str]) -> dict[str, str]:
        names = {name for name in variables if name.startswith(READ_AT_IMPORT)}
        return {name: variables[name] for name in names if not name.startswith(READ_LATER)}

    if {**added, **read_at_import(given)} != {**added, **read_at_import(before)}:
        os.execve(order["program"], [order["program"], *order["arguments"]], given)
    os.environ.clear()
    os.environ.update({**added, **given})
    sys.argv = [order["program"], *order["arguments"]]


def run_program() -> None:
    """`sys.argv` as the interpreter or the console script would: in a `__main__` of its own."""
    program, arguments = sys.argv[0], sys.argv[1:]
    if arguments[:1] == ["-u"]:
        del arguments[0]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    main = sys.modules["__main__"] = ModuleType("__main__")
    del sys.path[0]
    if Path(program).name == "proxima":
        sys.path.insert(0, str(Path(program).parent))
        source, file = "import sys\nfrom proxima.cli import main\nsys.exit(main())\n", program
    elif arguments[:1] == ["-c"]:
        sys.path.insert(0, "")
        source, file = arguments[1], "<string>"
        sys.argv = ["-c", *arguments[2:]]
    elif arguments[:1] == ["-m"]:
        sys.path.insert(0, os.getcwd())
        sys.argv = ["-m", *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    else:
        file = arguments[0]
        sys.path.insert(0, str(Path(file).resolve().parent))
        source = Path(file).read_text(encoding="utf-8")
        main.__file__ = file
        sys.argv = arguments
    exec(compile(source, file, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    import gc

    environment = dict(os.environ)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread, which no fork would have"
    gc.freeze()  # a program that ends does not look through all that was imported
    home = Path(sys.argv[1]).parent
    serve(sys.argv[1], environment)
    sys.executable = str(home / "bin" / "python")  # what the program starts is forked too
    run_program()
