"""Forked programs are as started ones: arguments, folder, environment, output, exit code, signals."""

import os
import signal
import subprocess
import time

import pytest

from tests.docs.session import REAL, environment
from tests.forks import forked_programs

SEEN = """
import os, sys
print(sys.argv, sys.path[0], os.getcwd(), os.environ["WORD"], __name__, "wave" in sys.modules, sys.stdin.read())
print("aside", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Forked from a process that has imported one small module, which tells them from started ones."""
    with forked_programs(["wave"], environment(tmp_path_factory.mktemp("forks"), REAL)) as found:
        yield found


@pytest.fixture
def run(programs, tmp_path):
    # a shell that puts tests into the background has them ignore interrupts, and programs would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = tmp_path / "folder"
    folder.mkdir()
    variables = {**environment(folder, programs), "WORD": "given"}

    def run(*words, wait=True, given="", **more):
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**variables, **more},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        if not wait:
            return process
        output, errors = process.communicate(given, timeout=60)
        return process.returncode, output, errors

    run.folder = folder
    return run


def test_a_forked_program_sees_and_says_what_a_started_one_does(run):
    (run.folder / "seen.py").write_text(SEEN)
    for words in (["-c", SEEN, "one", "two words"], ["seen.py", "-x"], ["-u", "-m", "seen", "-x"]):
        forked, started = run("python", *words, given="text"), run(str(REAL / "python"), *words, given="text")
        assert "__main__ True text" in forked[1]
        assert forked == (0, started[1].replace("__main__ False", "__main__ True"), "aside\n")


def test_what_a_forked_program_starts_is_forked_too(run):
    starts = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True)"
    assert run("python", "-c", starts, "-c", SEEN)[1].split()[-1] == "True"
    assert run("python", "-c", starts, "-I", "-c", "import sys; print(sys.flags.isolated)")[1] == "1\n"


@pytest.mark.parametrize(
    "source",
    [
        "raise SystemExit(7)",
        "raise SystemExit('a reason')",
        "1 / 0",
        "import os; os.abort()",
        "import os; os._exit(5)",
    ],
)
def test_a_program_that_fails_fails_in_the_same_way(run, source):
    (run.folder / "fails.py").write_text(source)
    code, output, errors = run(str(REAL / "python"), "fails.py")
    found = run("python", "fails.py")
    assert code != 0
    assert found[:2] == (code, output)
    assert errors.splitlines()[-1:] == found[2].splitlines()[-1:]


def test_the_console_script_is_run(run):
    found = run("proxima", "fly")
    assert found == run(str(REAL / "proxima"), "fly")
    assert found[0] == 2


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_a_program_is_started_where_modules_would_read_another_environment(run, name):
    assert run("python", "-c", SEEN)[1].split()[-1] == "True"
    assert run("python", "-c", SEEN, **{name: "3"})[1].split()[-1] == "False"


WAITS = """
import os, time
try:
    print(os.getpid(), flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
    raise
"""


def test_an_interrupt_reaches_the_program(run):
    process = run("python", "-c", WAITS, wait=False)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "interrupted\n"
    assert process.returncode == -signal.SIGINT


def test_it_ends_where_its_place_holder_is_killed(run):
    process = run("python", "-c", WAITS, wait=False)
    program = int(process.stdout.readline())
    assert program != process.pid
    process.kill()
    process.communicate()
    limit = time.monotonic() + 30
    while time.monotonic() < limit and os.path.exists(f"/proc/{program}"):
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{program}")


def test_descriptors_are_handed_on(run, programs):
    reader, writer = os.pipe()
    variables = environment(run.folder, programs)
    words = ["python", "-c", f"import os; os.write({writer}, b'here')"]
    subprocess.run(words, env=variables, pass_fds=[writer], check=True)
    os.close(writer)
    with os.fdopen(reader) as found:
        assert found.read() == "here"


def test_what_cannot_be_forked_any_more_fails(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    with forked_programs([], environment(folder, REAL)) as programs:
        variables = environment(folder, programs)
        killer = "import os, signal; os.kill(os.getppid(), signal.SIGKILL)"  # its keeper
        done = subprocess.run(["python", "-c", killer], env=variables, capture_output=True, check=False)
        assert done.returncode != 0
        assert b"has gone" in done.stderr
