"""Steps of episodes: recorded and replayed to the same bits without their environment, which no bundle of a
stranger can have imported."""

import json
from dataclasses import replace

import pytest
import torch

from proxima.config import RewardSpec
from proxima.pages.comparison.replay_page import samples
from proxima.runs import read_bundle, write_bundle
from proxima.tools.replay import compare_bundles, redacted, replay_step
from tests.environments.games import Counter, Faulty, Gym, Parity, multiply
from tests.tools.replay_recipe import PROMPTS, make_model, record

TAKEN = "taken from the bundle: an environment or tools answered them"
PLAYED = {"environment": (Parity,), "rewards": (), "max_turns": 4, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("recipe") / "model")


@pytest.fixture(scope="module")
def played(model):
    return record(model, **PLAYED)[0]


def long_answers(prompts, texts):
    return [len(text) / 8 for text in texts]


def reads_them(environments):
    return [environment.turns for environment in environments]


CASES = {
    "an environment": {},
    "gymnasium's": {"environment": (Gym,)},
    "its methods are tools": {"environment": (Counter,)},
    "with a weight and another reward": {
        "environment": (RewardSpec(Parity, weight=0.5, name="game"),),
        "rewards": ("length_band,low=2,high=5",),
    },
    "with a function": {"rewards": (long_answers,)},
    "with a function that reads it": {"rewards": (reads_them,)},
    "tools alone": {"environment": (), "tools": (multiply,), "rewards": ("length_band,low=2,high=5",)},
    "discount by turns": {"discount": "turn", "gamma": 0.9},
    "groups": {
        "adv_estimator": "grpo",
        "num_generations": 2,
        "whiten_advantages": False,
        "value_learning_rate": 1e-4,
    },
    "kept sets as bits": {"top_k": 0, "top_p": 0.8},
    "cut": {"max_turns": 2, "cut_responses": "bootstrap"},
    "reference path": {"engine": "plain"},
}


@pytest.mark.parametrize("name", CASES)
def test_episodes_replay_to_the_same_bits(model, name, tmp_path):
    settings = {**PLAYED, **CASES[name]}
    bundle, _ = record(model, **settings)
    write_bundle(tmp_path / "b", bundle.facts, bundle.tensors)
    comparison = replay_step(read_bundle(tmp_path / "b")).comparison
    taken = {stage.name: stage.why for stage in comparison.stages if stage.result == "not recomputed"}
    assert comparison.expects_bits
    assert comparison.sentence == f"the same bits in all {11 - len(taken)} stages"
    assert taken["sampled tokens"] == TAKEN
    given = settings["rewards"]
    assert ("rewards" in taken) == any(callable(each) for each in given)
    assert taken.keys() <= {"sampled tokens", "rewards", "values"}
    calls = name in ("tools alone", "its methods are tools")  # a random model makes none
    assert bundle.tensors["tokens/observed"].any() != calls


def test_an_episode_that_failed_is_left_out_in_a_replay_too(model, tmp_path):
    from proxima.core.types import Prompt

    faults = ["", "raises", "", ""]
    prompts = [Prompt(text, {"fault": fault}) for text, fault in zip(PROMPTS, faults, strict=True)]
    settings = {**PLAYED, "environment": (Faulty,), "max_reward_failures": 0.5}
    bundle, _ = record(model, prompts=prompts, **settings)
    assert [bool(each["failure"]) for each in bundle.facts["episodes"]] == [bool(each) for each in faults]
    assert bundle.tensors["rows"].tolist() == [0, 2, 3]
    assert replay_step(bundle).comparison.first is None
    assert "raises" not in json.dumps(redacted(bundle).facts["episodes"])


def test_the_first_number_that_differs_is_found_in_episodes(played):
    episodes = [{**each, "rewards": list(each["rewards"])} for each in played.facts["episodes"]]
    episodes[2]["rewards"][1] += 0.5
    changed = replace(played, facts={**played.facts, "episodes": episodes})
    assert replay_step(changed).comparison.first.name == "rewards"
    observed = played.tensors["tokens/observed"]
    ids = torch.where(observed, played.tensors["tokens/response_ids"] + 1, 0) + torch.where(
        observed, 0, played.tensors["tokens/response_ids"]
    )
    read = replace(played, tensors={**played.tensors, "tokens/response_ids": ids})
    assert replay_step(read).comparison.first.name == "log-probabilities"


def test_the_microscope_shows_what_was_read(played):
    sample = samples(played)[0]
    observed = played.tensors["tokens/observed"][0]
    read = observed | played.tensors["tokens/mask"][0]
    assert len(sample["tokens"]) == len(sample["ids"]) == int(read.sum())
    assert sample["observed"] == [place for place, each in enumerate(observed[read].tolist()) if each] != []
    assert samples(redacted(played))[0]["observed"] == sample["observed"]


@pytest.mark.parametrize("name", ["environment", "tools"])
def test_no_environment_and_no_tool_of_a_bundle_is_imported(name, model, monkeypatch, tmp_path):
    (tmp_path / "evil_mod.py").write_text(
        "from pathlib import Path\nPath('sprung').touch()\nclass Env: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"environment": (), "tools": (multiply,)} if name == "tools" else {}
    bundle, _ = record(model, **{**PLAYED, "rewards": (long_answers,), **given})
    own = bundle.facts["settings"][name][0]
    settings = {**bundle.facts["settings"], name: [{**own, "source": "evil_mod:Env"}]}
    write_bundle(tmp_path / "evil", {**bundle.facts, "settings": settings}, bundle.tensors)
    assert replay_step(read_bundle(tmp_path / "evil")).comparison.first is None
    assert not (tmp_path / "sprung").exists()


def test_odd_episodes_are_refused(played, tmp_path):
    def refused(reason, facts=(), **tensors):
        changed = {**played.tensors, **{f"tokens/{name}": each for name, each in tensors.items()}}
        write_bundle(tmp_path / "odd", {**played.facts, **dict(facts)}, changed)
        with pytest.raises(ValueError, match=reason) as error:
            replay_step(read_bundle(tmp_path / "odd"))
        assert len(str(error.value).splitlines()) == 1

    episodes = played.facts["episodes"]
    for odd in (3, episodes[1:], [{}, *episodes[1:]], [{**episodes[0], "x": 1}, *episodes[1:]]):
        refused("its episodes are not known ones", {"episodes": odd})
    for rewards in ([None], [1], [float("nan")], [[]], "x"):
        refused("its episodes are not", {"episodes": [{**episodes[0], "rewards": rewards}, *episodes[1:]]})
    few = [{**each, "rewards": []} for each in episodes]
    refused("it holds rewards of other turns", {"episodes": few})
    refused("its episodes do not fit the environment", {"episodes": []})
    settings = {**played.facts["settings"], "environment": []}
    refused("its episodes do not fit the environment", {"settings": settings})
    refused("its texts of tokens do not fit", observed=torch.zeros_like(played.tensors["tokens/observed"]))
    refused(
        "tokens both chosen and read",
        observed=played.tensors["tokens/mask"] | played.tensors["tokens/observed"],
    )
    with pytest.raises(ValueError, match="cannot be asked again: these are not recorded"):
        replay_step(played, rewards=[RewardSpec(reads_them)])


def test_a_redacted_copy_names_no_environment(played, tmp_path):
    shared = redacted(played)
    write_bundle(tmp_path / "shared", shared.facts, shared.tensors)
    assert b"Parity" not in (tmp_path / "shared").read_bytes()
    again = read_bundle(tmp_path / "shared")
    assert again.facts["settings"]["environment"][0]["source"] == "environment 1"
    assert again.facts["reward_names"] == ["reward 1"]
    assert compare_bundles(played, again).first is None
