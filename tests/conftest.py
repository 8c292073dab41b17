"""Shared by all tests: no network, a tiny model of each architecture, and one thread, since two fight on two
busy cores.

`OMP_NUM_THREADS` asks for another number of threads (`make test-rounding`).
Processes that tests start have one thread too: two tests run beside each other.
"""

import gc
import os
import sqlite3
from functools import partial
from pathlib import Path

import proxima  # noqa: F401 (before torch: it shortens the waits of OpenMP's threads)

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from proxima.config import PPOConfig
from tests.forks import forked_programs, package_modules

USUAL_LIMIT = 300  # seconds, as in pyproject.toml
PROMPTS = ["SUBREDDIT: r/a TITLE: b POST: c TL;DR:", "Why? TL;DR:", "A somewhat longer prompt, TL;DR:", "x"]


class Unflushed(sqlite3.Connection):
    """A database that waits for no disk."""

    def execute(self, sql, *parameters):
        return super().execute(sql.replace("synchronous = FULL", "synchronous = OFF"), *parameters)


def pytest_configure(config):
    """No garbage collection until the tests are imported; and no flushes of the disk, thousands of which
    would take a minute: no test cuts the power."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch  # where tests run, not where they are only handed out

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    gc.disable()
    os.fsync = lambda file: None
    sqlite3.connect = partial(sqlite3.connect, factory=Unflushed)


def pytest_runtestloop(session):
    """What is imported stays: no garbage collection looks through it."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Those that may take longest start first, so that no worker ends with one while the other has nothing."""

    def limit(item):
        mark = item.get_closest_marker("timeout")
        return max(mark.args[0], USUAL_LIMIT) if mark else USUAL_LIMIT

    items.sort(key=limit, reverse=True)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    from proxima.world.tiny_models import ARCHITECTURES, make_tiny_model

    home = tmp_path_factory.mktemp("models")
    return {name: str(make_tiny_model(home / name, name)) for name in ARCHITECTURES}


@pytest.fixture(scope="session")
def ensemble(tiny_folders):
    """The folder of a trained reward model with several heads."""
    from proxima.config import RewardConfig
    from proxima.finetuning import Preference, RewardTrainer

    home = Path(tiny_folders["qwen3"]).parent
    pairs = [Preference(f"prompt {i}", " yes" + "!" * (i % 3), " no" + "!" * (i % 4)) for i in range(24)]
    config = RewardConfig(
        tiny_folders["qwen3"], ensemble=3, learning_rate=1e-2, epochs=1, batch_size=4, run_dir=str(home),
        run_name="ensemble",
    )  # fmt: skip
    return str(RewardTrainer(config).train(pairs).folder)


@pytest.fixture(scope="session")
def mixture(tiny_folders):
    """The folder of a mixture of experts."""
    from proxima.world.tiny_models import byte_tokenizer
    from tests.families.networks import tiny_network

    folder = Path(tiny_folders["qwen3"]).parent / "mixture"
    tiny_network("qwen3_moe", norm_topk_prob=True).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def judge(tiny_folders, tmp_path_factory):
    """The folder of a classifier with an arbitrary scale and origin."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("unit") / "judge"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        network = AutoModelForSequenceClassification.from_pretrained(tiny_folders["qwen3"], num_labels=1)
        torch.nn.init.normal_(network.score.weight, std=2.0)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folders["qwen3"]).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tiny(tiny_folders):
    return tiny_folders["qwen3"]


@pytest.fixture(scope="session")
def forked():
    """Runs a command of Python to its end, in processes that need not import the package first; those that
    are killed are started as usual."""
    from tests.runtime.test_processes import ENVIRONMENT, finish

    with forked_programs(package_modules(), ENVIRONMENT) as programs:
        python = str(programs / "python")

        def forked(command, cwd, timeout=240, **variables):
            return finish([python, *command[1:]], cwd, timeout, PYTHON_EXEC=python, **variables)

        yield forked


@pytest.fixture
def prompts():
    return list(PROMPTS)


@pytest.fixture
def make_config(tiny, tmp_path):
    """A config for the tiny model whose learning rates are large enough to see an effect in one step."""

    def make(**settings) -> PPOConfig:
        base = {
            "model_name": tiny,
            "learning_rate": 1e-3,
            "value_learning_rate": 1e-3,
            "max_new_tokens": 6,
            "rewards": (count_e,),
            "run_dir": str(tmp_path / "runs"),
        }
        return PPOConfig(**{**base, **settings})

    return make


def count_e(prompts: list[str], texts: list[str]) -> list[float]:
    """A reward that differs between texts: their length in bytes, and a bonus per letter e."""
    return [len(text.encode()) / 10 + text.count("e") for text in texts]
