"""How `make` fills an environment: by uv, told what pip is told; by pip where uv fails."""

import subprocess
from pathlib import Path

import pytest

from tools import environment


@pytest.fixture
def calls(monkeypatch):
    """The commands that are run, each of which ends as `calls.fails` says."""

    class Calls(list):
        fails = ""

        def run(self, command, check, **more):
            words = [str(word) for word in command]
            self.append((words, more))
            code = int(bool(self.fails) and words[0].endswith(self.fails))
            if check and code:
                raise subprocess.CalledProcessError(code, words)
            return subprocess.CompletedProcess(words, code, stdout="")

    calls = Calls()
    monkeypatch.setattr(environment.subprocess, "run", calls.run)
    return calls


def installers(calls):
    words = [words for words, _ in calls if "install" in words]
    return [(Path(line[0]).name, line[-2:]) for line in words]


def test_uv_is_fetched_and_installs(calls, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://here/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "one two")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://cpu/simple\nhttps://more/simple")
    monkeypatch.setenv("UV_FIND_LINKS", "mine")
    environment.install(Path("home"), ["-e", "."])
    (_, (_, uv)), installed = installers(calls), calls[-1]
    assert uv == ["-e", "."]
    assert installed[0][:3] == [installed[0][0], "pip", "install"]
    assert installed[0][installed[0].index("--python") + 1] == "home/bin/python"
    assert installed[1]["env"]["UV_DEFAULT_INDEX"] == "https://here/simple"
    assert installed[1]["env"]["UV_INDEX"] == "https://cpu/simple https://more/simple"
    assert installed[1]["env"]["UV_FIND_LINKS"] == "mine", "what the user told uv comes first"


def test_pip_installs_where_uv_cannot(calls, capsys):
    calls.fails = "uv"
    environment.install(Path("home"), ["-e", "."])
    assert [name for name, _ in installers(calls)] == ["python", "uv", "python"]
    assert installers(calls)[-1][1] == ["-e", "."]
    assert "pip installs" in capsys.readouterr().err
    calls.fails = "python"
    with pytest.raises(subprocess.CalledProcessError):
        environment.install(Path("home"), ["-e", "."])
