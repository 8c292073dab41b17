"""Every file of examples/ runs as its first line says; one that cannot run here says why on the next, and is
parsed.

The command is run from a folder that holds a copy of examples/, as the root of the repository does, so
nothing is left behind.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from proxima.cli import parse
from proxima.rewards import check_rewards
from tests.docs.session import environment

ROOT = Path(__file__).parents[2]
SHELF = ROOT / "examples"
FILES = sorted(path for path in SHELF.rglob("*.*") if path.is_file() and "__pycache__" not in path.parts)
DATA = {".jsonl", ".md", ".ipynb"}  # read by the others, or by people: they have no command
EXAMPLES = [path for path in FILES if path.suffix not in DATA]
STARTERS = ("python", "bash", "proxima", "sbatch", "kubectl")
BYTES = 20_000  # an example that a newcomer reads in a sitting


def command_of(text):
    """The command in the first comment, `\\` at a line's end carrying it on, and why it is not run here
    (or nothing)."""
    first = re.match(r"(?:#!.*\n)?((?:#.*\n)*)", text)[1]
    comment = [line.removeprefix("#").strip() for line in first.splitlines()]
    lines = re.sub(r"\\\n", "", "\n".join(comment)).split("\n")
    command, why = lines[0], re.match(r"not run: (.+)", lines[1]) if len(lines) > 1 else None
    if command.split(" ")[0] not in STARTERS:
        raise ValueError(f"the first line is not a command such as `# python examples/NAME.py`: {command!r}")
    return command, why[1] if why else ""


def runs(path):
    return not command_of(path.read_text(encoding="utf-8"))[1]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Stands for the root of the repository."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REWARD_TOKEN", "secret")
    return tmp_path


def names(path):
    return path.relative_to(SHELF).as_posix()


@pytest.mark.parametrize("path", EXAMPLES, ids=names)
def test_the_first_line_starts_this_very_file(path):
    command, why = command_of(path.read_text(encoding="utf-8"))
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    assert f"examples/{names(path)}" in command or re.search(rf"(?:-m {module}\b|\b{module}:)", command)
    assert path.stat().st_size < BYTES
    assert not why or len(why.split()) > 3, "say what it needs"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import proxima\n",
        "# A file about rewards.\nmodel_name: embedded\n",
        '"""python examples/x.py"""\n',
    ],
)
def test_a_file_without_a_command_is_refused(text):
    with pytest.raises(ValueError, match="the first line is not a command"):
        command_of(text)


def test_a_command_may_go_on_over_lines_and_say_why_it_is_not_run():
    text = "# proxima train --config x.yaml \\\n#     --limit 3\n# not run: needs a GPU\n# More words.\n"
    assert command_of(text) == ("proxima train --config x.yaml --limit 3", "needs a GPU")
    assert command_of("# bash examples/x.sh\n# not a reason\n") == ("bash examples/x.sh", "")


def test_the_readme_has_a_line_for_every_file_and_data_is_read_by_an_example():
    """A folder has a line, and a README of its own that has one for each of its files."""
    for readme in (path for path in FILES if path.name == "README.md"):
        here = {path for path in readme.parent.iterdir() if path.name not in ("README.md", "__pycache__")}
        listed = re.findall(r"^\| \[([^]]+)\]", readme.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(listed) == {path.name + "/" * path.is_dir() for path in here}
        assert all((folder / "README.md").is_file() for folder in here if folder.is_dir())
    for path in FILES:
        if path.suffix == ".jsonl":
            assert any(f"examples/{path.name}" in other.read_text(encoding="utf-8") for other in EXAMPLES)
            assert all(json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines())


SETTINGS = [path for path in EXAMPLES if path.suffix == ".yaml" and path.parent.name != "cluster"]


@pytest.mark.parametrize("path", SETTINGS, ids=names)
def test_settings_are_ones_that_their_command_takes(root, path, monkeypatch):
    (root / "runs" / "reward").mkdir(parents=True)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = path.read_text(encoding="utf-8")
    name = re.search(rf"proxima (\w+) --config examples/{names(path)}", command_of(text)[0])[1]
    command = parse([name, "--config", f"examples/{names(path)}", "--data", "x", "--seed", "3"])
    settings = getattr(command, {"train": "ppo", "reward": "reward_training"}.get(name, "finetuning"))
    assert settings.seed == 3
    assert {*yaml.safe_load(text)} <= {*vars(command), *vars(settings)}
    if name == "train":
        check_rewards(settings)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if not runs(path)], ids=names)
def test_the_commands_of_what_is_not_run_parse(root, path):
    program, *arguments = shlex.split(command_of(path.read_text(encoding="utf-8"))[0])
    if program == "proxima":
        assert parse(arguments)
    elif path.parent.name != "cluster":  # those: test_cluster.py
        assert arguments[:2] == ["-m", ".".join(path.relative_to(ROOT).with_suffix("").parts)]


@pytest.mark.docs
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", [path for path in EXAMPLES if runs(path)], ids=names)
def test_an_example_runs_as_printed(root, path, programs):
    before = {*root.rglob("*")}
    command = command_of(path.read_text(encoding="utf-8"))[0]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env=environment(root, programs),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "warning: no reward" not in done.stderr
    for metrics in root.rglob("metrics.jsonl"):
        steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        assert steps
        assert all(step.get("failed_rewards", 0) == 0 for step in steps)
    changed = {
        path
        for path in before
        if path.is_file() and path.read_bytes() != (ROOT / path.relative_to(root)).read_bytes()
    }
    assert not changed, "an example changed the shelf"


def test_none_is_forgotten():
    with_smollm2 = {
        *(f"instructions/{name}.py" for name in ("constraints", "evaluate", "run")),
        *(f"instructions/{name}.yaml" for name in ("ppo", "short")),
        *(f"tldr_real/{name}.py" for name in ("evaluate", "measures", "run", "table")),
        *(f"tldr_real/{name}.yaml" for name in ("ppo", "reward", "sft")),
    }
    others = {"qwen3_tldr.yaml", "reward_server.yaml", "cluster/slurm.sh", "cluster/kubernetes.yaml"}
    others |= {"calculator.py", "calculator.yaml", "chain_sum.py"}
    others |= {f"study/{name}.py" for name in ("active_labels", "chart", "learn", "preferences")}
    assert {names(path) for path in EXAMPLES if not runs(path)} == with_smollm2 | others


def test_the_settings_of_the_gpu_tutorial_are_those_of_the_example():
    page = (ROOT / "docs" / "tutorials" / "one-gpu.md").read_text(encoding="utf-8")
    shown = re.search(r'```yaml title="qwen3_tldr.yaml"\n(.*?)```', page, re.S)[1]
    kept = (ROOT / "examples" / "qwen3_tldr.yaml").read_text(encoding="utf-8")
    assert shown == "".join(line for line in kept.splitlines(keepends=True) if not line.startswith("#"))


@pytest.mark.parametrize("folder", ["examples", "tools"])
def test_proxima_is_imported_before_torch(folder):
    """Later it cannot say how torch's waiting threads wait."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        imported = [
            name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module]
            )
        ]
        first = [str(name).partition(".")[0] for name in imported]
        if "torch" in first:
            assert "proxima" in first[: first.index("torch")], path
