"""Grades a program of the policy by tests: how calls and printed output are compared; 1 where it passes all
of them, else 0.

It runs inside a sandbox, and the program in a further process, which the tests reach only by value: a program
that leaves early, prints what the tests would print or overloads `==` passes nothing.

Tests are Python statements that assert (they call the program's functions with plain values), or pairs of
`input` and `output` for a program that reads standard input.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import json
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proxima.core.json_record import Record
from proxima.rewards import code_program
from proxima.rewards.code_program import pack, unpack

FENCE = re.compile(r"```[ \t]*(?:python|py|python3)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
PR_SET_DUMPABLE = 4
TESTS = "tests.py"  # gone before the program starts, which could read what is wanted
PYTHON = (sys.executable, "-I")
LONGEST_REASON = 200  # characters


def program_in(completion: str) -> str:
    """The last fenced block of an answer, or all of it if there is none."""
    blocks = FENCE.findall(completion)
    return blocks[-1] if blocks else completion


def complain(tests: object) -> str:
    """Why these tests cannot grade, by reading them alone; empty where they can."""
    if isinstance(tests, list) and tests and all(isinstance(test, dict) for test in tests):
        wrong = [
            test for test in tests if not all(isinstance(test.get(key), str) for key in ("input", "output"))
        ]
        return "a test needs an input and an output, both text" if wrong else ""
    try:
        tree = ast.parse(_joined(tests))
        compile(tree, TESTS, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"they are not Python ({error})"
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        return "they assert nothing: any program would pass"
    return ""


def complain_by_running(given: Record) -> str:
    """Why tests cannot grade: without a program they must come to where they miss it, and the row's own
    solution must pass them. Run as `grade` is.

    Args:
        given: `tests`, and `solution` or None.
    """
    tests, solution = given["tests"], given["solution"]
    if complaint := complain(tests) or _complain_without_program(tests):
        return complaint
    if solution is None or solution == "":
        return ""
    if not isinstance(solution, str):
        return f"the solution beside them is a {type(solution).__name__}, not text"
    try:
        return "" if _grade(solution, tests) == 1 else "the solution beside them does not pass"
    except ProgramEnded as ended:
        return f"the solution beside them fails ({ended})"


def _complain_without_program(tests: object) -> str:
    if isinstance(tests, list) and isinstance(tests[0], dict):
        prints = any(test["output"].strip() for test in tests)
        return "" if prints else "no output is wanted: a program without a statement passes"
    Path(TESTS).write_text(_joined(tests), encoding="utf-8")
    try:
        runpy.run_path(TESTS)
    except (NameError, AssertionError):
        return ""
    except (Exception, SystemExit) as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
        return f"before they call the program they raise {words}"
    return "they pass without a program: any program would pass"


def _joined(tests: object) -> str:
    if isinstance(tests, list) and all(isinstance(test, str) for test in tests):
        return "\n".join(tests)
    if not isinstance(tests, str):
        raise ValueError("text, a list of texts or a list of {input, output} is needed")
    return tests


class ProgramEnded(Exception):  # noqa: N818
    """A signal ended the program, or it could not be started."""


def grade(completion: str, tests: object) -> float | str:
    """1 or 0, in the current folder, which must be the program's own; or how the program was ended."""
    try:
        return _grade(completion, tests)
    except ProgramEnded as ended:
        return str(ended)


def _grade(completion: str, tests: object) -> float:
    _hide()
    program = program_in(completion)
    Path("program.py").write_text(program, encoding="utf-8", errors="replace")
    if isinstance(tests, list) and tests and isinstance(tests[0], dict):
        return float(all(_prints(test["input"], test["output"]) for test in tests))
    Path(TESTS).write_text(_joined(tests), encoding="utf-8")
    running = Program()
    try:
        runpy.run_path(TESTS, init_globals=running.functions(program))
    except ProgramEnded:
        raise
    except Exception:  # a failed assertion, or whatever the program made of it
        return 0.0
    finally:
        running.close()
    return 1.0


def _hide() -> None:
    """Keep the program out of this process's memory, where the tests are."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def _prints(given: str, wanted: str) -> bool:
    """Whether the program, run with this input, prints this output; space at the ends of lines is ignored."""
    try:
        ran = subprocess.run(
            [*PYTHON, "program.py"], input=given, capture_output=True, text=True, check=False
        )
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise ProgramEnded(f"exit: it could not be started: {error}") from None
    _check_end(ran.returncode)
    printed, expected = (
        [line.rstrip() for line in text.strip().splitlines()] for text in (ran.stdout, wanted)
    )
    return ran.returncode == 0 and printed == expected


def _check_end(code: int) -> None:
    """A ProgramEnded where a signal ended it; a program that leaves by itself has just failed."""
    if code < 0:
        raise ProgramEnded(f"crash: {signal.strsignal(-code) or f'signal {-code}'}")


class Program:
    """The program in a process of its own, which the first call starts: by then the tests are read."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def functions(self, program: str) -> dict[str, Callable[..., object]]:
        """Stand-ins for what the program defines, by name; `candidate` too for the one function.

        Names of builtins stay those of Python: a program must not redefine what the tests compare with.
        """
        defined = {name: is_def for name, is_def in _defined(program).items() if not hasattr(builtins, name)}
        found = {name: self._stand_in(name) for name in defined}
        functions = [name for name, is_def in defined.items() if is_def] or list(defined)
        return {"candidate": found[functions[0]], **found} if len(functions) == 1 else found

    def _stand_in(self, name: str) -> Callable[..., object]:
        def call(*args: Any, **kwargs: Any) -> Any:
            reply = self._ask(
                {
                    "name": name,
                    "args": pack(list(args)),
                    "kwargs": {key: pack(value) for key, value in kwargs.items()},
                }
            )
            if "raised" in reply:
                kind = getattr(builtins, str(reply["raised"]), RuntimeError)
                is_error = isinstance(kind, type) and issubclass(kind, Exception)
                raise (kind if is_error else RuntimeError)(reply.get("message", ""))
            return unpack(reply["value"])

        return call

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.process is None:
            Path(TESTS).unlink()
            command = [*PYTHON, code_program.__file__, "program.py"]
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            except OSError as error:
                raise ProgramEnded(f"exit: it could not be started: {error}") from None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        if not line:
            _check_end(self.process.wait())
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ValueError("not a reply")
        return reply

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _defined(program: str) -> dict[str, bool]:
    """The names that a program binds at its top level, also under `if` and `try`, and whether by `def`."""
    found: dict[str, bool] = {}
    nodes: list[ast.AST] = [*ast.parse(program).body]
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found[node.name] = True
        elif isinstance(node, ast.ClassDef):
            found.setdefault(node.name, False)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, False)
        elif isinstance(node, (ast.stmt, ast.ExceptHandler)):
            nodes += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.expr)]
    return found
