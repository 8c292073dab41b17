"""What strangers bring cannot run, read, write or leak: checkpoints, data, replies, names; secrets stay in
the environment."""

import ast
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from proxima.base_setup import BaseSetup
from proxima.cli.commands import COMMANDS
from proxima.config import FinetuningConfig, PPOConfig
from proxima.rewards.model_reward import ClassifierSource
from tests.rewards.test_reward_http import Server, answer, lengths

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "proxima"
FILES = sorted(SOURCE.rglob("*.py"))
SECRETS = {
    name: f"sec-{name.lower()}-9f27"
    for name in ("REWARD_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY")
}

# --- the source ---

FORBIDDEN_CALLS = {
    "eval", "exec", "compile", "__import__", "torch.load", "torch.save", "torch.jit.load", "torch.hub.load",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader",
    "numpy.load", "numpy.fromfile", "pandas.read_pickle", "os.system", "os.popen", "os.execv", "os.execvp", "os.spawnl",
    "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp",
}  # fmt: skip
FORBIDDEN_MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "pty",
    "commands",
    "telnetlib",
}
FORBIDDEN_ARGUMENTS = {
    "trust_remote_code": True,
    "shell": True,
    "allow_pickle": True,
    "weights_only": False,
    "verify": False,
}


def names_of(tree):
    """What each local name of a module stands for: `np` is numpy, `load` is torch.load."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.split(".")[0]: alias.name
                if alias.asname
                else alias.name.split(".")[0]
                for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def dangers(code):
    """Forbidden calls, imports and arguments in a source text."""
    tree = ast.parse(code)
    names = names_of(tree)
    found = {name for name in names.values() if name.split(".")[0] in FORBIDDEN_MODULES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, *rest = ast.unparse(node.func).split(".")
            full = ".".join([names.get(first, first), *rest])
            found |= {full} & FORBIDDEN_CALLS
            for keyword in node.keywords:
                if isinstance(keyword.value, ast.Constant) and keyword.arg in FORBIDDEN_ARGUMENTS:
                    found |= (
                        {keyword.arg} if keyword.value.value is FORBIDDEN_ARGUMENTS[keyword.arg] else set()
                    )
    return found


SENT_TO_A_CHILD = {"worker_process.py": "dill.dumps", "worker_child.py": "dill.loads"}
"""A user's own function goes from the trainer to its worker process by value. Nothing comes back this way."""
CALLED = {"worker_child.py": {"os.execvp"}, "code_tests.py": {"compile"}}
"""A worker becomes bubblewrap, by a command line that the trainer wrote; tests of code are compiled to see
whether they are Python, and not run."""


def test_no_source_file_can_run_what_it_reads():
    for path in FILES:
        allowed = SENT_TO_A_CHILD.get(path.name, "")
        known = ({"dill"} if allowed else set()) | CALLED.get(path.name, set())
        assert dangers(path.read_text()) == known, path
        assert set(re.findall(r"dill\.\w+", path.read_text())) == ({allowed} if allowed else set()), path


@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np\nnp.load(p, allow_pickle=True)",
        "from torch import load\nload(p)",
        "import yaml as y\ny.load(p)",
        "import subprocess\nsubprocess.run(c, shell=True)",
        "import joblib",
        "from pickle import loads",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "eval(text)",
    ],
)
def test_the_search_finds_what_it_should(code):
    assert dangers(code)


@pytest.mark.parametrize("path", [*SOURCE.rglob("*.js"), *SOURCE.rglob("*.html")], ids=lambda path: path.name)
def test_pages_set_text_never_markup(path):
    text = path.read_text()
    bad = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
        "javascript:",
    )
    assert [word for word in bad if word in text] == []


# --- checkpoints ---

TRAP = "from pathlib import Path\nPath('{canary}').write_text('owned')\n"


def trap(folder, target, kind, canary):
    """A copy of a model whose files ask for Python code beside them."""
    copied = Path(shutil.copytree(folder, target))
    (copied / "trap.py").write_text(TRAP.format(canary=canary))
    name = "tokenizer_config.json" if kind == "tokenizer" else "config.json"
    settings = json.loads((copied / name).read_text())
    if kind == "tokenizer":
        settings |= {"auto_map": {"AutoTokenizer": ["trap.T", "trap.T"]}, "tokenizer_class": "T"}
    else:
        settings |= {
            "auto_map": {"AutoConfig": "trap.C", "AutoModelForCausalLM": "trap.M"},
            "model_type": "trap",
        }
    (copied / name).write_text(json.dumps(settings))
    return str(copied)


@pytest.mark.parametrize("kind", ["config", "tokenizer"])
def test_code_beside_a_checkpoint_is_not_run(tiny, tmp_path, kind):
    """A model is refused; a tokenizer may be read without its code."""
    canary = tmp_path / "canary"
    folder = trap(tiny, tmp_path / "model", kind, canary)
    refused = pytest.raises(ValueError, match="cannot load") if kind == "config" else nullcontext()
    with refused:
        BaseSetup(PPOConfig(model_name=folder))
    with refused, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is not a classifier
        ClassifierSource(folder, PPOConfig(), torch.device("cpu"))
    assert not canary.exists()


def test_remote_code_is_off_everywhere_by_default():
    assert not PPOConfig().trust_remote_code
    assert not FinetuningConfig().trust_remote_code
    flags = [
        field
        for kind in COMMANDS.values()
        for field in dataclasses.fields(kind)
        if field.name == "trust_remote_code"
    ]
    assert flags
    assert not any(field.default for field in flags)


# --- paths ---


@pytest.mark.parametrize("name", [".hidden", "..", ".", "../x", "/tmp/x", "a/b", "a/..", "..\n/x"])
@pytest.mark.parametrize("kind", [PPOConfig, FinetuningConfig])
def test_a_run_name_cannot_leave_the_folder_of_runs(kind, name):
    with pytest.raises(ValueError, match="run_name"):
        kind(run_name=name)


WATCHER = """
import os, sys
canary, allowed = sys.argv[1], sys.argv[2].split(os.pathsep)
def hook(event, given):
    if event == "open" and isinstance(given[0], (str, bytes)):
        path, mode, flags = os.path.abspath(os.fsdecode(given[0])), given[1] or "", given[2] or 0
        writes = any(letter in mode for letter in "wax+") or flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if path == canary or (writes and not any(path.startswith(folder) for folder in allowed)):
            os.write(2, f"TOUCHED {path}\\n".encode())
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        os.write(2, f"STARTED {given[0]}\\n".encode())
import json, torch, proxima.cli
sys.addaudithook(hook)
for words in json.loads(sys.argv[3]):
    try:
        code = proxima.cli.main(words)
    except SystemExit as end:
        code = end.code
    if code and words[0] != "doctor":
        sys.exit(code)
"""


def run_watched(tmp_path, *commands, canary="/nowhere", env=None):
    """Commands in a process that reports every file written outside its folders, the canary read, and
    processes started. It ends with the first that fails; the doctor may."""
    allowed = os.pathsep.join([str(tmp_path), "/dev/", "/proc/"])
    home = {
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    given = {
        "PYTHONPATH": str(ROOT / "src"),
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", WATCHER, str(canary), allowed, json.dumps(commands)]
    return subprocess.run(
        command,
        env=given | home | (env or {}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_row_cannot_make_a_command_touch_another_file(tmp_path, tiny):
    canary = tmp_path / "canary.txt"
    canary.write_text("not for you")
    place = str(canary)
    row = {
        "prompt": place, "completion": f"file://{place}", "file": place, "path": place, "image": {"path": place, "bytes": None},
        "label": "../../escape", "run_name": "../../escape", "$ref": place, "data_files": place, "__class__": "os.system",
    }  # fmt: skip
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 2)
    train = [
        "train",
        "--model",
        tiny,
        "--data",
        "rows.jsonl",
        "--rewards",
        "length_band,low=1,high=2",
        "--max-new-tokens",
        "3",
    ]
    train += ["--batch-size", "2", "--minibatch-size", "2", "--ppo-epochs", "1"]
    done = run_watched(tmp_path, ["data", "check", "rows.jsonl"], train, canary=canary)
    assert done.returncode == 0, done.stderr
    assert "TOUCHED" not in done.stderr
    started = {Path(line.split()[-1]).name for line in done.stderr.splitlines() if line.startswith("STARTED")}
    for_libraries = {"ldconfig", "gcc", "cc", "ld", "uname", "lscpu"}
    assert started <= {*for_libraries, "git"}  # git for environment.json
    assert canary.read_text() == "not for you"
    assert not list(tmp_path.parent.glob("escape*"))


def test_the_watch_sees_what_it_should(tmp_path):
    (tmp_path / "c.txt").write_text("prompt")
    done = run_watched(tmp_path, ["data", "check", "c.txt"], canary=tmp_path / "c.txt")
    assert f"TOUCHED {tmp_path / 'c.txt'}" in done.stderr


# --- secrets ---


@pytest.mark.long
def test_secrets_of_the_environment_reach_no_file_and_no_output(tmp_path, tiny):
    """A whole run against a server that asks for the token and sends it back; then evaluation and export."""

    def echo(handler, batch, number):
        token = handler.headers["Authorization"]
        answer(handler, {"rewards": lengths(batch), "token": token}, headers={"X-Echo": token})

    server = Server(echo)
    try:
        (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\nfour\n")
        reward = f"{server.url},token_env=REWARD_TOKEN,retries=0"
        flags = [
            "--model",
            tiny,
            "--data",
            "prompts.txt",
            "--rewards",
            reward,
            "--max-new-tokens",
            "3",
            "--ppo-epochs",
            "1",
        ]
        sizes = ["--batch-size", "2", "--minibatch-size", "2"]
        done = run_watched(
            tmp_path,
            ["doctor", *flags, *sizes, "--samples", "2"],
            ["train", *flags, *sizes, "--run-name", "one", "--trackers", "tensorboard", "--debug"],
            ["eval", "runs/one", "--data", "prompts.txt", "--rewards", reward],
            ["report", "runs/one"],
            ["export", "runs/one", "exported"],
            env=SECRETS,
        )
        shown = done.stdout + done.stderr
        assert done.returncode == 0, shown
        headers = str(server.headers)
    finally:
        server.close()
    assert SECRETS["REWARD_TOKEN"] in headers  # it was used
    assert not any(value in headers for name, value in SECRETS.items() if name != "REWARD_TOKEN")
    assert not any(value in shown for value in SECRETS.values())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "evaluation.json", "report.html", "README.md"} <= {
        path.name for path in files
    }
    assert any("tfevents" in path.name for path in files)
    assert [
        str(path) for path in files if any(value.encode() in path.read_bytes() for value in SECRETS.values())
    ] == []


def test_nobody_is_told_to_install_the_imports_name_from_the_package_index():
    """There it is somebody else's package; ours is proxima-rlhf."""
    files = [path for folder in ("src", "docs", "examples") for path in (ROOT / folder).rglob("*")]
    files = [ROOT / "README.md", *(path for path in files if path.suffix in (".py", ".md", ".yaml"))]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    told = re.compile(r"install (?:-\S+ )*['\"]?proxima\b(?!-rlhf)")
    assert [str(path) for path, text in texts.items() if told.search(text)] == []
    assert told.search("pip install -U 'proxima[vllm]'")
    assert not told.search("pip install -U 'proxima-rlhf[vllm]'")
