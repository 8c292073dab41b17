"""The glossary: every metric that a person would watch says what is healthy and what to do, and what it
names is there."""

import dataclasses
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from proxima.cli.commands import COMMANDS
from proxima.config import FinetuningConfig, PPOConfig, RewardConfig
from proxima.finetuning import RatingTrainer, RewardTrainer, SFTTrainer
from proxima.rewards.ready_made_rewards import READY_MADE
from proxima.runs.glossary import (
    FINETUNING,
    GLOSSARY,
    GROUPS,
    Metric,
    chart_of,
    charts_in_groups,
    declare,
    explain,
    is_defined,
    title_of,
    unit_of,
    with_unit,
    without_backticks,
)
from proxima.runs.metric_declarations import FINETUNING_METRICS, METRICS

ROOT = Path(__file__).parents[2]
ENTRIES = [*METRICS, *FINETUNING_METRICS]
IDS = [f"{metric.group}:{metric.name}" for metric in ENTRIES]
COUNTED = {"step", "epoch", "tokens", "seconds/*", "custom/*", "validation/custom/*"}
SETTINGS = {field.name for kind in (PPOConfig, RewardConfig) for field in dataclasses.fields(kind)}
HTTP_OPTIONS = {"timeout", "retries", "concurrency", "batch"}


BAD_WORDS = r"by itself|themselves|price of|distance|\bmend| a token$| a step$"


@pytest.mark.parametrize("metric", ENTRIES, ids=IDS)
def test_an_entry_is_whole_and_short(metric):
    watched = metric.name not in COUNTED and not re.search("_(low|high)(/|$)", metric.name)
    assert bool(metric.healthy) == bool(metric.otherwise) == watched
    for text in filter(None, (metric.meaning, metric.healthy, metric.otherwise)):
        assert text.endswith(".")
        assert text.count(". ") <= 2
        assert len(text) < 300
        assert not re.search(BAD_WORDS, text)
    assert metric.title[0].isupper()
    assert len(metric.title) < 45
    assert bool(metric.unit) == (metric.group != "custom")
    assert metric.group in GROUPS
    assert not re.search(BAD_WORDS, f"{metric.title} {metric.unit} {metric.chart}", re.IGNORECASE)


@pytest.mark.parametrize("metric", ENTRIES, ids=IDS)
def test_what_an_entry_names_is_there(metric):
    text = f"{metric.meaning} {metric.healthy} {metric.otherwise}"
    known = SETTINGS | set(GLOSSARY) | set(FINETUNING) | set(READY_MADE) | HTTP_OPTIONS | {"train"}
    for word in re.findall(r"`([^`]+)`", text):
        command = re.fullmatch(r"proxima ([a-z-]+)( check)?", word)
        assert (command and command[1] in COMMANDS) or word in known or word == "--logprobs-mode"
    for page in re.findall(r"docs/([a-z]+)\.md", text):
        assert (ROOT / "docs" / f"{page}.md").is_file()


def test_names_and_chart_titles_are_unique_and_a_chart_has_one_unit():
    for metrics in (METRICS, FINETUNING_METRICS):
        names = [metric.name for metric in metrics]
        assert len(names) == len(set(names))
    charts: dict[str, set[tuple[str, str]]] = {}
    for metric in METRICS:
        charts.setdefault(metric.chart or metric.title, set()).add((metric.group, metric.unit))
    assert [title for title, kinds in charts.items() if len(kinds) > 1] == []


def test_a_family_is_explained_by_its_nearest_entry():
    assert explain("validation/reward/mine") is GLOSSARY["validation/reward/*"]
    assert explain("reward/a/b") is GLOSSARY["reward/*"]
    assert explain("seconds/generate") is GLOSSARY["seconds/generate"]
    assert explain("seconds/mine") is GLOSSARY["seconds/*"]
    assert explain("kl") == GLOSSARY["kl"]
    assert explain("my/own") is explain("kl/x") is None
    assert is_defined("reward/x")
    assert not is_defined("rewards")
    assert without_backticks("`kl` of `x`") == "kl of x"


def test_titles_and_units():
    assert (title_of("kl_exact"), unit_of("kl_exact")) == ("KL to the reference", "nats")
    assert title_of("reward/gold") == "Reward: gold"
    assert with_unit("entropy") == "Entropy (nats per token)"
    assert (title_of("my/own"), unit_of("my/own"), with_unit("my/own")) == ("my/own", "", "my/own")


def test_charts_follow_from_the_declarations():
    names = ["my/own", "reward/b", "kl_exact", "entropy", "reward/a", "kl", "custom/x", "avg_reward"]
    found = {
        group.title: [(c.title, c.unit, c.names) for c in charts] for group, charts in charts_in_groups(names)
    }
    assert found == {
        "Reward": [
            ("Training reward", "score", ("avg_reward",)),
            ("Each reward by name", "score", ("reward/b", "reward/a")),
        ],
        "KL and entropy": [
            ("KL to the reference", "nats", ("kl", "kl_exact")),
            ("Entropy", "nats per token", ("entropy",)),
        ],
        "Other metrics": [("Custom: x", "", ("custom/x",)), ("my/own", "", ("my/own",))],
    }
    assert chart_of(["kl", "kl_exact"]).title == "KL to the reference"
    assert chart_of(["kl", "entropy"]).title == "Sampled KL, Entropy"
    assert chart_of(["kl", "entropy"]).unit == "nats, nats per token"


def test_declaring_twice_or_in_no_group_is_refused(monkeypatch):
    monkeypatch.setattr("proxima.runs.glossary.GLOSSARY", dict(GLOSSARY))
    own = Metric("own", title="Own", unit="apples", group="responses", meaning="Mine.")
    declare(own)
    declare(own)  # a module that is imported again
    assert title_of("own") == "Own"
    with pytest.raises(ValueError, match="'own' is declared already; choose another name"):
        declare(replace(own, unit="pears"))
    with pytest.raises(
        ValueError, match="'fruit' of the metric 'other' does not exist; choose one of reward"
    ):
        declare(replace(own, name="other", group="fruit"))
    assert not is_defined("other")


def test_it_needs_no_torch():
    code = (
        "import sys, proxima.runs.glossary; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""}
    )


def test_every_number_of_fine_tuning_is_declared(tiny, tmp_path):
    from proxima.data import Demonstration, Preference, Rating

    config = FinetuningConfig(model_name=tiny, batch_size=2, run_dir=str(tmp_path), validation_share=0.5)
    shown = [Demonstration("p", text) for text in "abcd"]
    chosen = [Preference("p", text, text + text) for text in "abcd"]
    rated = [Rating("p", text, float(place)) for place, text in enumerate("abcd")]
    logged: set[str] = set()
    for trainer, examples in ((SFTTrainer, shown), (RewardTrainer, chosen), (RatingTrainer, rated)):
        logged |= set().union(*trainer(config).train(examples).metrics)
    assert logged == set(FINETUNING) - {"skipped_updates"}  # which a sound run does not have
