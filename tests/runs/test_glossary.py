"""The glossary: every metric that a person would watch says what is healthy and what to do, and what it
names is there."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from proxima.cli.commands import COMMANDS
from proxima.config import FinetuningConfig, PPOConfig
from proxima.finetuning import RatingTrainer, RewardTrainer, SFTTrainer
from proxima.rewards.ready_made_rewards import READY_MADE
from proxima.runs.glossary import GLOSSARY, GROUPS, STAGES, Metric, explain, is_defined, plain

ROOT = Path(__file__).parents[2]
ENTRIES = [*GLOSSARY.items(), *STAGES.items()]
COUNTED = {"step", "epoch", "tokens"}
SETTINGS = {field.name for kind in (PPOConfig, FinetuningConfig) for field in dataclasses.fields(kind)}
HTTP_OPTIONS = {"timeout", "retries", "concurrency", "batch"}


@pytest.mark.parametrize(("name", "metric"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_an_entry_is_whole_and_short(name, metric):
    watched = name not in COUNTED and not re.search("_(low|high)(/|$)", name)
    assert bool(metric.healthy) == bool(metric.otherwise) == watched
    for text in filter(None, dataclasses.astuple(metric)):
        assert text.endswith(".")
        assert text.count(". ") <= 2
        assert len(text) < 300


@pytest.mark.parametrize(("name", "metric"), ENTRIES, ids=[name for name, _ in ENTRIES])
def test_what_an_entry_names_is_there(name, metric):
    text = " ".join(dataclasses.astuple(metric))
    known = SETTINGS | set(GLOSSARY) | set(STAGES) | set(READY_MADE) | HTTP_OPTIONS | {"train"}
    for word in re.findall(r"`([^`]+)`", text):
        command = re.fullmatch(r"proxima ([a-z-]+)( check)?", word)
        assert (command and command[1] in COMMANDS) or word in known or word == "--logprobs-mode"
    for page in re.findall(r"docs/([a-z]+)\.md", text):
        assert (ROOT / "docs" / f"{page}.md").is_file()


def test_groups_share_no_name():
    assert sum(map(len, GROUPS.values())) == len(GLOSSARY)


def test_a_family_is_explained_by_its_nearest_entry():
    assert explain("validation/reward/mine") is GLOSSARY["validation/reward/*"]
    assert explain("reward/a/b") is GLOSSARY["reward/*"]
    assert explain("kl") == GLOSSARY["kl"]
    assert explain("my/own") is explain("kl/x") is None
    assert is_defined("reward/x")
    assert not is_defined("rewards")
    assert plain("`kl` of `x`") == "kl of x"
    assert Metric("a").healthy == ""


def test_it_needs_no_torch():
    code = (
        "import sys, proxima.runs.glossary; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    )


def test_every_number_of_the_stages_is_defined(tiny, tmp_path):
    from proxima.data import Demonstration, Preference, Rating

    config = FinetuningConfig(model_name=tiny, batch_size=2, run_dir=str(tmp_path), validation_share=0.5)
    shown = [Demonstration("p", text) for text in "abcd"]
    chosen = [Preference("p", text, text + text) for text in "abcd"]
    rated = [Rating("p", text, float(place)) for place, text in enumerate("abcd")]
    logged: set[str] = set()
    for trainer, examples in ((SFTTrainer, shown), (RewardTrainer, chosen), (RatingTrainer, rated)):
        logged |= set().union(*trainer(config).train(examples).metrics)
    assert logged == set(STAGES)
