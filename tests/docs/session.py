"""A page as a newcomer's session. In: a page and an empty folder. Out: its files written and its blocks
run there, in order; an AssertionError with page, line and what was printed where one fails."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from tests.docs.blocks import Block, read_blocks

ROOT = Path(__file__).parents[2]
WORKER = (Path(__file__).parent / "worker.py").read_text(encoding="utf-8")
BLOCK_LIMIT = 600  # seconds
SERVER_START, SERVER_STOP = 120, 20
ADDRESS = re.compile(r"http://(?:127\.0\.0\.1|localhost):\d+[^\s)\"'`]*")
REAL = Path(sys.executable).parent  # the environment's own programs
NOWHERE = "http://127.0.0.1:9"


def run_page(
    page: Path,
    folder: Path,
    server_start: float = SERVER_START,
    programs: Path = REAL,
    small: bool = False,
) -> None:
    """
    Args:
        programs: holds the `python` and the `proxima` that are run.
        small: `proxima data sample` writes a part of its rows and smaller batches.
    """
    blocks, variables = read_blocks(page), environment(folder, programs)
    if small:
        variables["PATH"] = os.pathsep.join([str(_small_samples(folder, programs)), variables["PATH"]])
    with _Python(folder, variables) as python:
        for block in blocks:
            if block.title:
                path = folder / block.title
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
            elif block.not_run:
                continue
            elif block.server:
                _serve(block, folder, variables, server_start)
            elif block.language == "bash":
                _bash(block, folder, variables)
            elif block.language == "python":
                python.run(block)


def _small_samples(folder: Path, programs: Path) -> Path:
    """A folder with a `proxima` whose `data sample` leaves what takes seconds to train on."""
    home = folder.parent / f"{folder.name}-home" / "bin"
    home.mkdir(parents=True)
    real, reduce = (
        shlex.quote(str(programs / "proxima")),
        shlex.quote(str(Path(__file__).with_name("reduce.sh"))),
    )
    script = f'[ "$1 $2" = "data sample" ] || exec {real} "$@"\n{real} "$@" && exec sh {reduce} "$3"\n'
    (home / "proxima").write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
    (home / "proxima").chmod(0o755)
    return home


def environment(folder: Path, programs: Path) -> dict[str, str]:
    """This process's, with the checkout's package and the environment's programs first, a home of its own,
    and no way out."""
    home = folder.parent / f"{folder.name}-home"
    home.mkdir(exist_ok=True)
    proxies = {
        name: NOWHERE for way in ("http_proxy", "https_proxy", "all_proxy") for name in (way, way.upper())
    }
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "HF_"))},
        **proxies,
        "no_proxy": "127.0.0.1,localhost",
        "NO_PROXY": "127.0.0.1,localhost",
        "PATH": os.pathsep.join([str(programs), str(REAL), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
        "PYTHON_EXEC": str(programs / "python"),  # what torchrun starts
        "HOME": str(home),
        "BROWSER": "true",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "120",
    }


def _fail(block: Block, what: str, output: str) -> None:
    shown = output if len(output) < 6000 else f"...\n{output[-6000:]}"
    raise AssertionError(f"{block.place}: {what}\n--- it printed ---\n{shown}")


# --- bash ---


def bash_script(block: Block) -> tuple[str, list[int]]:
    """The script of a block, and for each of its lines the page's line.

    `! command` must fail; `set -e` does not see it.
    """
    script = ["set -euo pipefail; trap 'echo \"[line $LINENO]\" >&2' ERR"]
    lines = [block.line]
    negated = False
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        negated = negated or line.lstrip().startswith("! ")
        script.append(line)
        lines.append(number)
        if negated and not line.endswith("\\"):
            script.append(
                'case ${PIPESTATUS[-1]} in 0 | 127) echo "[line $LINENO] was to fail" >&2; exit 1 ;; esac'
            )
            lines.append(number)
            negated = False
    return "\n".join(script) + "\n", lines


def _start(block: Block, folder: Path, variables: dict[str, str], output: IO[str]) -> subprocess.Popen:
    script, _ = bash_script(block)
    return subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_hear_interrupts,  # noqa: PLW1509
    )


def _hear_interrupts() -> None:
    """A process started in the background of a script ignores Ctrl-C, and so would all it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: subprocess.Popen) -> None:
    """Nothing that a block started outlives it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _bash(block: Block, folder: Path, variables: dict[str, str]) -> None:
    with _output() as output:
        process = _start(block, folder, variables, output)
        try:
            code = process.wait(BLOCK_LIMIT)
        except subprocess.TimeoutExpired:
            _fail(block, f"not done after {BLOCK_LIMIT} s", _read(output))
        finally:
            _end(process)
        if code:
            said = _read(output)
            at = re.findall(r"^\[line (\d+)\]", said, re.MULTILINE)
            line = bash_script(block)[1][int(at[-1]) - 1] if at else block.line
            _fail(block, f"bash ended with {code} at line {line}", said)


@contextmanager
def _output() -> Iterator[IO[str]]:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        yield output


def _read(output: IO[str]) -> str:
    output.seek(0)
    return output.read()


# --- servers ---


def _serve(block: Block, folder: Path, variables: dict[str, str], limit: float) -> None:
    """Start it, wait until its address answers, stop it as Ctrl-C would."""
    with _one_at_a_time(), _output() as output:
        process = _start(block, folder, variables, output)
        try:
            end = time.monotonic() + limit
            while not _answers(_read(output)):
                if process.poll() is not None:
                    _fail(block, f"the server exited with {process.returncode}", _read(output))
                if time.monotonic() > end:
                    _fail(block, f"no address that it printed answered within {limit} s", _read(output))
                time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
            try:
                code = process.wait(SERVER_STOP)
            except subprocess.TimeoutExpired:
                _fail(block, f"the server did not end within {SERVER_STOP} s of Ctrl-C", _read(output))
            if code not in (0, 130, -signal.SIGINT):
                _fail(block, f"the server ended with {code} after Ctrl-C", _read(output))
        finally:
            _end(process)


def _answers(said: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for address in ADDRESS.findall(said):
        try:
            direct.open(address.rstrip(".,;:"), timeout=5).close()
            return True
        except urllib.error.HTTPError as error:
            if error.code < 500:
                return True
        except OSError:
            pass
    return False


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Pages run beside each other, and some servers want a port of their own."""
    with open(Path(tempfile.gettempdir()) / "proxima-docs-server.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


# --- python ---


class _Python:
    """One process for all Python blocks of a page, started at the first."""

    def __init__(self, folder: Path, variables: dict[str, str]):
        self.folder, self.variables = folder, variables
        self.process: subprocess.Popen | None = None

    def __enter__(self) -> _Python:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process is not None:
            _end(self.process)
            self.replies.close()
            self.output.close()

    def _started(self) -> subprocess.Popen:
        if self.process is None:
            reader, writer = os.pipe()
            self.replies = os.fdopen(reader, encoding="utf-8")
            self.output = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            self.process = subprocess.Popen(
                ["python", "-c", WORKER, str(writer)],
                cwd=self.folder,
                env=self.variables,
                stdin=subprocess.PIPE,
                stdout=self.output,
                stderr=subprocess.STDOUT,
                pass_fds=[writer],
                start_new_session=True,
                text=True,
            )
            os.close(writer)
        return self.process

    def run(self, block: Block) -> None:
        process = self._started()
        assert process.stdin is not None
        order = {"page": str(block.page), "line": block.line, "source": block.text}
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        reply = self.replies.readline()
        if not reply:
            _fail(block, f"the Python process ended with {process.wait()}", _read(self.output))
        if json.loads(reply):
            _fail(block, f"Python raised\n{json.loads(reply)}", _read(self.output))
