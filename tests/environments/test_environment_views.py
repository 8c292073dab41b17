"""Reward functions that take `environments`, as TRL's do, read how the environments of their episodes ended."""

import copy
import math

import pytest

from proxima.core.errors import RewardFailure
from proxima.core.types import Prompt
from proxima.rewards import Samples
from tests.environments.games import Attributes, Counter, Faulty, Graded
from tests.environments.test_episodes import CALL, make_trainer, scripted

TOOLS = {"max_new_tokens": 80, "max_episode_tokens": 200, "top_k": 0, "top_p": 1.0}


def env_reward(environments, **kwargs):
    """As the examples of TRL have it."""
    assert len(environments) == len(kwargs["completions"]) == len(kwargs["prompts"])
    return [env.reward for env in environments]


def env_count(completions, environments, **kwargs):
    return [100.0 * env.count + len(text) for text, env in zip(completions, environments, strict=True)]


def env_turns(prompts, completions, environments):
    return [float(env.turns) for env in environments]


async def env_turns_later(environments, **kwargs):
    return [float(env.turns) for env in environments]


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_a_reward_function_reads_how_the_environment_ended(make_config, seconds):
    """The attribute `reward` counts once: the function has taken it over."""
    settings = {**TOOLS, "environment": Counter, "step_seconds": seconds}
    trainer = make_trainer(make_config, rewards=[env_reward, env_count], **settings)
    results = scripted(trainer, CALL, "done").ppo_step(["Please."])
    assert results["rewards_by_name"]["env_reward"] == [1.0]
    assert results["rewards_by_name"]["env_count"] == [200.0 + len(f"{CALL}2done")]
    assert results["rewards_by_name"]["Counter"] == [0.0]


def test_get_reward_is_added_to_what_the_function_says(make_config):
    trainer = make_trainer(make_config, environment=Graded, rewards=[env_reward], **TOOLS)
    results = scripted(trainer, CALL, "done").ppo_step(["Please."])
    assert results["rewards_by_name"] == {"env_reward": [1.0], "Graded": [20.0]}


@pytest.mark.parametrize("function", [env_turns, env_turns_later])
def test_failed_episodes_are_not_shown_to_the_function(make_config, prompts, function):
    rows = [
        Prompt(prompt, {"fault": fault})
        for prompt, fault in zip(prompts[:3], ("", "raises", ""), strict=True)
    ]
    trainer = make_trainer(make_config, environment=Faulty, rewards=[function], max_reward_failures=0.5)
    results = trainer.ppo_step(rows)
    assert results["failed_rewards"] == 1
    kept = results["rewards_by_name"][function.__name__]
    assert [score for score in kept if not math.isnan(score)] == [3.0, 3.0]


def view_of(make_config, prompts, seconds):
    seen = []

    def look(environments, **kwargs):
        seen.extend(environments)
        return [0.0] * len(environments)

    make_trainer(make_config, environment=Attributes, rewards=[look], step_seconds=seconds).ppo_step(prompts)
    return seen[0]


@pytest.mark.parametrize("seconds", [0.0, 20.0])
def test_a_view_has_public_attributes_and_says_why_others_are_missing(make_config, prompts, seconds):
    view = view_of(make_config, prompts, seconds)
    assert (view.turns, view.many, view.shared, view.doubled) == (3, [1, 2], "of the class", 6)
    for name, words in {
        "random": "holds a Random, which JSON cannot hold",
        "long": "has 300,002 characters, more than 200,000",
        "broken": "RuntimeError: not now",
        "deep": "has lists or dicts more than 50 deep",
        "_hidden": "does not exist, or is a method or private",
        "step": "does not exist, or is a method or private",
    }.items():
        with pytest.raises(AttributeError, match=words):
            getattr(view, name)
    with pytest.raises(AttributeError, match="read only"):
        view.turns = 4
    assert "turns" in repr(view)
    assert copy.deepcopy(view).many == [1, 2]


def test_an_attribute_that_is_missing_fails_the_reward_in_words(make_config, prompts):
    def misread(environments, **kwargs):
        return [env.score for env in environments]

    trainer = make_trainer(make_config, rewards=[misread])
    with pytest.raises(RewardFailure, match="the environment's attribute 'score' does not exist"):
        trainer.ppo_step(prompts)


def test_texts_alone_have_no_environments(make_config, prompts):
    source = make_trainer(make_config, rewards=[env_turns]).reward_computer.rewards[0][1]
    outcome = source(Samples.of_texts(["p"], ["c"], make_trainer(make_config).tokenizer))
    assert outcome.failures == 1
    assert outcome.reason == "it reads environments; texts alone have none"


def test_what_has_no_environments_to_read_is_refused_in_words(make_config, prompts):
    with pytest.raises(ValueError, match="which are not sent to worker processes; leave out workers"):
        make_trainer(make_config, rewards=["tests.environments.test_environment_views:env_turns,workers=2"])
    trainer = make_trainer(make_config, environment=(), rewards=[env_reward])
    with pytest.raises(ValueError, match=r"asks for 'environments'.* or set `environment`"):
        trainer.ppo_step(prompts)


def test_without_an_environment_it_is_a_column_like_others(make_config, prompts):
    rows = [Prompt(prompt, {"environments": 2.0}) for prompt in prompts]

    def sum_up(environments, **kwargs):
        return [float(number) for number in environments]

    results = make_trainer(make_config, environment=(), rewards=[sum_up], max_turns=1).ppo_step(rows)
    assert results["rewards"] == [2.0] * len(prompts)
