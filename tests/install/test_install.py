"""What a newcomer's first command does: `uv sync` in an empty copy of this tree, then the command line that
it gives; and what whoever has only the wheel can do.

It needs the package index; `make test-install` runs it. torch comes from wherever pip is told to look for
files, so that a machine with a CPU build at hand downloads no gigabytes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
import zipfile
from functools import partial
from http.cookiejar import CookieJar
from pathlib import Path

import pytest

from tools.environment import uv_settings

pytestmark = [pytest.mark.install, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMED = [item.rpartition(" ")[2] for item in PROJECT["project"]["classifiers"] if "Python :: 3." in item]
OF_CUDA = ("nvidia-", "cuda-", "triton")  # what comes with torch where no CPU build is at hand
ONE_STEP = """--config my-data/ppo.yaml --data my-data/prompts.jsonl --rewards length_band,low=5,high=20 --run-name first
    --limit 4 --batch-size 4 --minibatch-size 4 --max-new-tokens 8 --device cpu"""
ALONE = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
LOADS_WITHOUT_US = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("my-model")
tokenizer = transformers.AutoTokenizer.from_pretrained("my-model")
model.generate(**tokenizer("TL;DR:", return_tensors="pt"), max_new_tokens=2)
assert "proxima" not in sys.modules
"""


def call(*words, **settings):
    done = subprocess.run(
        [str(word) for word in words], check=False, capture_output=True, text=True, **settings
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def uv(tmp_path_factory):
    """uv, fresh from the index and told what pip is told, in this Python."""
    home = tmp_path_factory.mktemp("uv")
    call(sys.executable, "-m", "venv", home)
    call(home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv")
    own = {**uv_settings(), "UV_PYTHON": sys.executable, "HF_HUB_OFFLINE": "1"}
    # a newcomer's uv asks one index
    left_out = ("VIRTUAL_ENV", "PYTHONPATH", "UV_INDEX", "UV_INDEX_STRATEGY")
    own = {name: value for name, value in own.items() if name not in left_out}

    def run(*words, cwd, **more):
        return call(home / "bin" / "uv", *words, cwd=cwd, env={**own, **more})

    return run


def tracked(*folders):
    """What git would clone of this folder, as it is now."""
    listed = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", *folders)
    return [name for name in call(*listed, cwd=ROOT).split("\0") if (ROOT / name).is_file()]


def copy_tree(folder):
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def tree(tmp_path):
    return copy_tree(tmp_path / "tree")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the source archive and the wheel, which is built from the archive; and what was said."""
    tree = copy_tree(tmp_path_factory.mktemp("tree"))
    said = call("make", "dist", f"PYTHON={sys.executable}", cwd=tree, env=ALONE)
    return tree / "dist", said


def test_uv_sync_gives_a_command_line_that_trains(uv, tree, tmp_path):
    uv("sync", cwd=tree)
    pins = {pin.lower().replace("_", "-") for pin in PROJECT["tool"]["uv"]["constraint-dependencies"]}
    lines = uv("pip", "freeze", "--python", ".venv", cwd=tree).lower().splitlines()
    installed = {line.partition("+")[0] for line in lines if "==" in line and not line.startswith(OF_CUDA)}
    assert {"torch==2.13.0"} <= installed <= pins

    def proxima(*words):
        return call(
            tree / ".venv" / "bin" / "proxima", *words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}
        )

    assert "proxima COMMAND" in proxima("--help")
    proxima("data", "sample", "my-data")
    proxima("train", *ONE_STEP.split())
    steps = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(step)["step"] for step in steps] == [1]


@pytest.mark.parametrize(
    ("python", "platform", "extra"),
    [
        *((python, "x86_64-manylinux_2_28", ("--extra", "dev")) for python in NAMED),
        *((NAMED[-1], other, ()) for other in ("aarch64-manylinux_2_28", "aarch64-apple-darwin", "windows")),
    ],
)
def test_the_pins_have_wheels_for_every_python_and_platform(uv, tree, python, platform, extra):
    """For a Mac, of macOS 14 or later; an Intel Mac has none (docs/apple.md)."""
    wheels = ["--only-binary", ":all:", "--python-platform", platform, "--python-version", python]
    own = {"MACOSX_DEPLOYMENT_TARGET": "14.0"}
    found = uv("pip", "compile", "--quiet", "pyproject.toml", *extra, *wheels, cwd=tree, **own)
    assert "torch==2.13.0" in found


def test_vllm_can_be_added_to_the_pinned_packages(uv, tree):
    found = uv("pip", "compile", "--quiet", "pyproject.toml", "--extra", "vllm", cwd=tree)
    assert "\nvllm==" in found
    assert "torch==2.13.0" in found


def test_vllm_without_the_pins_is_a_release_of_today(uv, tree, tmp_path):
    """As whoever installs the wheel resolves it; uv reads the pins of the folder it is called in."""
    words = ["--quiet", tree / "pyproject.toml", "--extra", "vllm", "--no-config", "--python-version", "3.12"]
    found = uv("pip", "compile", *words, cwd=tmp_path)
    version = re.search(r"(?m)^vllm==(\d+)\.(\d+)", found)
    assert tuple(map(int, version.groups())) >= (0, 28)


def test_the_archives_are_valid_and_the_wheel_holds_the_package_and_nothing_else(built):
    folder, said = built
    assert [path.name.partition("-")[0] for path in folder.iterdir()] == ["proxima_rlhf"] * 2
    assert said.count(": PASSED") == 2
    names = zipfile.ZipFile(next(folder.glob("*.whl"))).namelist()
    inside = {f"src/{name}" for name in names if ".dist-info/" not in name}
    assert inside == set(tracked("src/proxima"))


def label_two_items(proxima, folder):
    """Serve the labelling page, answer what it asks, stop it with Ctrl-C."""
    words = (
        "label --model-name embedded --data my-data/prompts.jsonl --count 2 --max-new-tokens 8 --device cpu"
    )
    server = subprocess.Popen(
        [proxima, *words.split()], cwd=folder, env=ALONE, stdout=subprocess.PIPE, text=True
    )
    try:
        lines = iter(server.stdout.readline, "")
        url = next(found[1] for line in lines if (found := re.match(r"Open (\S+)", line)))
        site = url.partition("/?")[0]
        browser = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(CookieJar())
        )
        browser.open(url)
        assert "<script" in browser.open(site).read().decode()
        state = json.load(browser.open(f"{site}/api/state?annotator=Ann"))
        while state["item"]:
            answer = {"annotator": "Ann", "item": state["item"]["id"], "choice": "1", "seconds": 1}
            request = urllib.request.Request(
                f"{site}/api/answer",
                json.dumps(answer).encode(),
                {"Origin": site, "Content-Type": "application/json"},
            )
            state = json.load(browser.open(request))
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


def test_whoever_has_only_the_wheel_runs_the_demo_labels_trains_and_exports(uv, built, tmp_path):
    """In a clean environment, with no checkout in sight."""
    uv("venv", "--quiet", "clean", cwd=tmp_path)
    pins = ("--constraint", ROOT / "constraints.txt")
    uv("pip", "install", "--quiet", "--python", "clean", *pins, next(built[0].glob("*.whl")), cwd=tmp_path)
    programs = tmp_path / "clean" / "bin"
    proxima = partial(call, programs / "proxima", cwd=tmp_path, env=ALONE)
    proxima("demo", "--steps", 2, "--preferences", 64, "--device", "cpu")
    proxima("report", "runs/demo/ppo")
    for page in ("runs/demo/report.html", "runs/demo/ppo/report.html"):
        assert "</html>" in (tmp_path / page).read_text()
    proxima("data", "sample", "my-data")
    label_two_items(programs / "proxima", tmp_path)
    proxima("label", "--export", "mine.jsonl")
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == 2
    proxima("train", *ONE_STEP.split())
    proxima("export", "runs/first", "my-model", "--merge")
    call(programs / "python", "-c", LOADS_WITHOUT_US, cwd=tmp_path, env=ALONE)
