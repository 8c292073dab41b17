"""Every generator of reasoning-gym: those that are allowed score soundly, and each that is excluded is for the
reason that is given."""

import builtins
import contextlib
import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean

import pytest

from proxima.rewards import gym_generators
from proxima.rewards.graders import complain_gym, grade_gym
from proxima.rewards.gym_generators import ALLOWED, EXCLUDED

try:
    VERSION = version("reasoning-gym")
except PackageNotFoundError:
    pytest.skip(
        "reasoning-gym is not installed here: `make test-peer` has an environment for it",
        allow_module_level=True,
    )

ENTRIES = 16  # 6 missed one of those that raise
FEW = 2
WORDS = ["", "I do not know.", "x" * 1000, "the quick brown fox", "\x00", "日本", "{[(", "1e999", "9" * 400]
NUMBERS = ["0", "1", "-1", "1/0", "[]", "[[1]]", "{}", "None"]  # which may be right, but raise nothing
BY_HASH = {"isomorphic_strings", "knight_swap", "list_functions", "ransom_note", "word_ladder"}
CANARY = "proxima_canary"
SECONDS = 1.0  # of one score


def entries(name, size=ENTRIES):
    """As they come out of a file of data."""
    import reasoning_gym

    made = reasoning_gym.create_dataset(name, size=size, seed=1)
    return [
        json.loads(
            json.dumps(
                {"generator": name, **{key: each[key] for key in ("question", "answer", "metadata")}},
                default=str,
            )
        )
        for each in made
    ]


@pytest.fixture
def evaluated(monkeypatch):
    """What is given to `eval` and `exec`."""
    seen = []
    for name in ("eval", "exec"):
        plain = getattr(builtins, name)

        def watch(source, *given, plain=plain, **named):
            seen.append(str(source))
            return plain(source, *given, **named)

        monkeypatch.setattr(builtins, name, watch)
    return seen


def test_every_generator_of_this_version_is_allowed_or_excluded():
    from reasoning_gym.factory import DATASETS

    assert VERSION == "0.1.25"
    assert set(DATASETS) == ALLOWED | set(EXCLUDED)
    assert (len(ALLOWED), len(EXCLUDED)) == (80, 26)


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_an_allowed_generator_scores_its_own_answers_1_and_junk_low(name, evaluated):
    asked = entries(name)
    assert [complain_gym(entry) for entry in asked] == [""] * ENTRIES
    evaluated.clear()
    for junk in [*WORDS, *NUMBERS, CANARY]:
        began = time.process_time()
        scores = [grade_gym(junk, entry) for entry in asked]
        assert time.process_time() - began < SECONDS * ENTRIES
        assert all(0 <= score <= 1 for score in scores)
        if junk in WORDS:
            assert fmean(scores) <= 0.25, junk
    assert evaluated == []


def own_scores(name):
    return [grade_gym(str(entry["answer"]), entry) for entry in entries(name)]


@pytest.mark.parametrize("name", sorted(EXCLUDED))
def test_an_excluded_generator_is_for_the_reason_that_is_given(name, evaluated):
    reason = EXCLUDED[name]
    if name == "composite":
        with pytest.raises(AssertionError, match="at least one dataset"):
            entries(name)
    elif name == "codeio":
        entries(name)
        assert any("def main" in source for source in evaluated)
    elif name == "coin_flip":
        assert fmean(grade_gym("0", entry) for entry in entries(name, 60)) > 0.9
    elif name == "game_of_life_halting":
        assert {grade_gym(text, entry) for entry in entries(name) for text in ("x", "Who knows?")} == {1.0}
    elif name == "game_of_life":
        boards = {entry["answer"]: entry for entry in entries(name)}
        nothing = {json.dumps([[0] * len(row) for row in json.loads(board)]) for board in boards}
        scores = [grade_gym(dead, boards[board]) for board in {*boards} - nothing for dead in nothing]
        assert len(scores) > 1
        assert min(scores) >= 0.9
    elif reason in (gym_generators.LOSES, gym_generators.NO_ANSWER):
        assert max(own_scores(name)) < 1
    elif reason == gym_generators.RAISES:
        with pytest.raises((AttributeError, ValueError)):
            grade_gym("[[0]]", entries(name, 1)[0])
    elif reason == gym_generators.RAISES_HUGE:
        with pytest.raises(OverflowError):
            [grade_gym("9" * 400, entry) for entry in entries(name)]
    elif reason == gym_generators.EVALUATES_ENTRY:
        asked = entries(name)
        evaluated.clear()
        own_scores(name)
        assert any(source[:20] in json.dumps(asked) for source in evaluated)
    else:
        assert reason.endswith(gym_generators.EVALUATES)
        asked = entries(name)
        evaluated.clear()
        with contextlib.suppress(Exception):
            grade_gym(CANARY, asked[0])
        assert any(CANARY in source for source in evaluated)


MEASURES = """
import json, pathlib, sys
from tests.peer.test_reasoning_gym import ALLOWED, FEW, NUMBERS, WORDS, entries, grade_gym
made = {name: entries(name, FEW) for name in sorted(ALLOWED)}
kept = json.loads(sys.stdin.read()) or made
def scores(entry):
    return [grade_gym(text, entry) for text in (str(entry["answer"]), *WORDS, *NUMBERS)]
found = {"made": made, "scores": {name: [*map(scores, asked)] for name, asked in kept.items()}}
pathlib.Path(sys.argv[1]).write_text(json.dumps(found))  # some generators print
"""


@pytest.mark.timeout(900)
def test_only_some_draw_other_entries_by_the_hash_seed_and_no_score_depends_on_it(tmp_path):
    root, found, kept = Path(__file__).parents[2], [], {}
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        command = [sys.executable, "-W", "ignore", "-c", MEASURES, str(tmp_path / seed)]
        subprocess.run(command, input=json.dumps(kept), text=True, env=environment, check=True)
        found.append(json.loads((tmp_path / seed).read_text()))
        kept = found[0]["made"]
    one, other = found
    assert one["scores"] == other["scores"]
    assert {name for name in ALLOWED if one["made"][name] != other["made"][name]} <= BY_HASH
