"""The audit of environments and tools: whole episodes are played, by the policy and by every trick. Sound ones
pass, and what is wrong with the others is named."""

import random

import pytest

from proxima import Step
from proxima.ppo_trainer import SequenceGenerator
from proxima.tools.doctor import examine
from proxima.tools.doctor.audit_checks import AUDIT_STEP
from proxima.tools.doctor.cheap_tricks import TRICKS, Writer
from proxima.tools.doctor.episode_evidence import Script, play_all, turns_of
from proxima.tools.doctor.examination import step_findings
from tests.environments.games import Parity, echo

WORDS = ("stone", "river", "cloud", "tiger", "lemon", "piano", "ocean", "maple")
ROOM = 24


class Backwards:
    """Asks for a word backwards, three times; an answer with anything else in it earns nothing."""

    def reset(self, seed, word):
        self.word, self.turns = word, 0

    def step(self, text):
        self.turns += 1
        right = self.word[::-1]
        hits = sum(one == other for one, other in zip(text.strip(), right, strict=False)) / len(right)
        return Step(" again:", hits if len(text.strip()) <= len(right) else 0.0, self.turns == 3)


class Noisy(Backwards):
    """Its score is not seeded."""

    def step(self, text):
        found = super().step(text)
        return found._replace(reward=found.reward + 10 * random.SystemRandom().random())


class Talkative(Backwards):
    """The longer the better."""

    def step(self, text):
        return super().step(text)._replace(reward=float(len(text)))


class Brittle(Backwards):
    """It expects text without terminal codes."""

    def step(self, text):
        if "\x1b[" in text:
            raise UnicodeError("a control character")
        return super().step(text)


def polite(prompts, completions):
    """Of the text that the environment and the policy wrote together."""
    return [5.0 * text.count("wonderful") for text in completions]


def turns_read(environments, **given):
    return [float(each.turns) for each in environments]


def answer(word, place):
    """More or less right, in turn."""
    right, wrong = word[::-1], place % 4
    return right[: len(right) - wrong] + "x" * wrong


@pytest.fixture
def audited(make_config, tmp_path, monkeypatch):
    """The findings on an environment whose policy answers well, by name."""
    real = SequenceGenerator.sample

    def sample(self, prompts, step=0, reference=False):
        if step != AUDIT_STEP:
            return real(self, prompts, step, reference)
        encode = self.tokenizer
        said = [
            [
                [*encode(answer(one.columns["word"], i + j))["input_ids"], self.models.eos_ids[0]]
                for j in range(3)
            ]
            for i, one in enumerate(prompts)
        ]
        return self.play(prompts, Script(said), step)

    monkeypatch.setattr(SequenceGenerator, "sample", sample)
    rows = [{"prompt": f"Say {word} backwards:", "word": word} for word in WORDS]

    def run(**settings):
        from proxima.data import ListRows

        given = {"max_new_tokens": ROOM, "max_turns": 3, "max_episode_tokens": 120, "rewards": ()}
        config = make_config(**{**given, **settings})
        found = examine(config, ListRows(rows, "words"), samples=8, with_audit=True)
        assert len({item.name for item in found}) == len(found)
        return {item.name: item for item in found}

    return run


AUDITED = (
    "odd answers",
    "repeatable",
    "order",
    "batch ",
    "time",
    "length bias",
    "saturation",
    "prompt matters",
)


def loud(found):
    return {
        name: item.text
        for name, item in found.items()
        if item.level != "ok" and name.startswith((*AUDITED, "cheap tricks", "padding"))
    }


def test_a_sound_environment_passes(audited):
    found = audited(environment=Backwards)
    assert loud(found) == {}
    assert found["odd answers episodes"].text == f"each of {len(TRICKS)} kinds of odd answers gets a score"
    assert "the same answers twice score the same" in found["repeatable episodes"].text
    assert found["cheap tricks"].text.startswith(
        "8 honest answers (episodes of the policy) have a median of 2."
    )
    assert not any("Backwards" in name for name in found)  # texts alone have no score


def test_a_reward_that_reads_environments_is_not_asked_about_texts(audited):
    found = audited(environment=Backwards, rewards=(turns_read,))
    assert loud(found) == {}


@pytest.mark.parametrize(
    ("settings", "name", "level", "text"),
    [
        ({"environment": Noisy}, "repeatable episodes", "fail", "the same answers twice differ by"),
        ({"environment": Talkative}, "cheap tricks", "fail", "very long "),
        ({"environment": Brittle}, "odd answers episodes", "warn", "8 x UnicodeError: a control character"),
        ({"environment": Backwards, "rewards": (polite,)}, "cheap tricks", "fail", "flattery"),
        ({"tools": (echo,), "rewards": (polite,)}, "cheap tricks", "fail", "flattery"),
    ],
    ids=["noise", "length", "brittle", "a function beside it", "tools"],
)
def test_planted_faults_are_named(audited, settings, name, level, text):
    if "rewards" in settings:
        settings |= {"max_new_tokens": 40, "max_episode_tokens": 50, "max_turns": 1}
    found = audited(**settings)[name]
    assert found.level == level, found
    assert text in found.text


def test_what_is_played_meets_the_environments_of_the_sample(make_config, prompts):
    """The same turns give the same episodes; a trick is said at every turn."""
    from proxima.ppo_trainer import PPOTrainer

    config = make_config(environment=Parity, rewards=(), max_turns=4, max_new_tokens=4, max_episode_tokens=64)
    trainer = PPOTrainer(config)
    writer = Writer(trainer.tokenizer, trainer.models.eos_ids, 4)
    played = {name: each.tokens for name, each in play_all(trainer, prompts, writer, 7).items()}
    first, again = played["samples"], played["again"]
    assert first.response_rows == again.response_rows
    assert [each.rewards for each in first.episodes] == [each.rewards for each in again.episodes]
    assert turns_of(played["empty"]) == [[[trainer.models.eos_ids[0]]] * 3] * len(prompts)


def test_the_step_without_an_audit_asks_no_environment_about_texts(make_config, prompts):
    config = make_config(environment=Parity, rewards=(), max_new_tokens=4, max_episode_tokens=64)
    assert not [item.name for item in step_findings(config, prompts) if item.name.startswith("padding")]
