"""A setting is one declaration: its checks, flag, help, page, resume rule and seed groups follow from it."""

import dataclasses
import math
import re
from types import SimpleNamespace
from typing import ClassVar

import pytest

from proxima.cli import command_line, parse
from proxima.cli.command import Command
from proxima.cli.commands import COMMANDS
from proxima.config.setting_declaration import Range, setting
from proxima.config.settings_base import Settings, settings_class
from proxima.pages.comparison import seed_groups
from proxima.ppo_trainer.trainer_state import check_resumable, plain_config
from tools.reference import settings as pages
from tools.reference.source import fields_of


@settings_class
class Small(Settings):
    """Settings of the test's own."""

    warmth: float = setting(0.5, above=0, at_most=2, formerly="heat")
    """How warm a step is, in test degrees."""
    colour: str = setting("red", not_empty=True, changes_results=False, defines_experiment=False)
    """Colour of the line on the screen."""
    pace: int = setting(3, above=-math.inf, changes_results=False)
    """Steps between glances."""
    seed: int = setting(0, at_least=0, defines_experiment=False)
    """Where chance starts."""
    lr_schedule: str = setting("constant")
    """The learning rate."""


@dataclasses.dataclass
class Show(Command):
    """Show the settings."""

    example: ClassVar[str] = "proxima show"
    ppo: Small
    times: int = setting(1, at_least=1)
    """How often."""

    def run(self) -> None:
        print(self.ppo)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"warmth": 0}, r"warmth \(0\) must be in \(0, 2\]"),
        ({"warmth": 2.5}, r"warmth \(2.5\) must be in \(0, 2\]"),
        ({"warmth": "hot"}, r"warmth \('hot'\) must be a number"),
        ({"warmth": math.nan}, r"warmth \(nan\) must be in"),
        ({"colour": ""}, "colour must not be empty"),
        ({"colour": 3}, r"colour \(3\) must be of type str"),
    ],
)
def test_a_new_setting_is_checked_as_declared(given, message):
    with pytest.raises(ValueError, match=message):
        Small(**given)
    assert Small(warmth=2, pace=-7) == Small(2.0, "red", -7)


def test_a_new_setting_has_its_flag_and_help(monkeypatch, capsys):
    monkeypatch.setitem(COMMANDS, "show", Show)
    monkeypatch.setitem(command_line.CONFIGS, "ppo", Small)
    assert parse(["show", "--warmth", "1.5", "--colour", "blue"]).ppo == Small(1.5, "blue")
    with pytest.raises(SystemExit):
        parse(["show", "--help"])
    out = " ".join(re.sub(r"[^\w .,()-]", " ", capsys.readouterr().out).split())
    assert "--warmth FLOAT How warm a step is, in test degrees. (default 0.5)" in out


def test_a_commands_own_flag_is_checked_as_declared(monkeypatch, tmp_path):
    monkeypatch.setitem(COMMANDS, "show", Show)
    monkeypatch.setitem(command_line.CONFIGS, "ppo", Small)
    (tmp_path / "none.yaml").write_text("times: 0\n")
    for words in (["--times", "0"], ["--config", str(tmp_path / "none.yaml")]):
        with pytest.raises(ValueError, match=r"times \(0\) must be in \[1, inf\)"):
            parse(["show", *words])


def test_a_new_setting_has_its_page():
    fields = fields_of(Small)
    assert pages.allowed(fields["warmth"]) == "above 0, at most 2"
    assert pages.allowed(fields["pace"]) == "any finite number"
    assert fields["warmth"].meaning == "How warm a step is, in test degrees."
    free = pages._free_on_resume({name: fields[name] for name in ("warmth", "colour", "pace")})[-1]
    assert re.findall(r"`(\w+)`", free) == ["colour", "pace"]


@pytest.mark.parametrize(
    ("change", "refused", "goes_on"),
    [({"warmth": 1.0}, True, True), ({"pace": 9}, False, True), ({"colour": "blue"}, False, False)],
)
def test_a_resumed_run_may_change_what_does_not_change_results(change, refused, goes_on):
    plan = SimpleNamespace(fingerprints={"prompts": {"count": 1}, "validation": None})
    state = {"fingerprints": plan.fingerprints, "config": plain_config(Small()), "total_steps": 4}
    checkpoint = SimpleNamespace(state=state, path="here")
    if refused:
        with pytest.raises(ValueError, match=r"another run: warmth \(0.5 then, 1.0 now\)"):
            check_resumable(checkpoint, Small(**change), plan, 4, force=False)
    else:
        assert check_resumable(checkpoint, Small(**change), plan, 4, force=False) is goes_on
    state["config"]["heat"] = state["config"].pop("warmth")  # as a version before the new name wrote it
    assert check_resumable(checkpoint, Small(**change), plan, 4, force=True) is goes_on
    assert check_resumable(checkpoint, Small(), plan, 4, force=False) is False


def test_runs_are_one_experiment_where_they_differ_in_what_does_not_define_it(monkeypatch):
    monkeypatch.setattr(seed_groups, "PPOConfig", Small)
    same = {"a0": Small().to_dict(), "a1": Small(colour="blue", seed=1).to_dict()}
    other = {"b0": Small(pace=4, seed=2).to_dict(), "c0": Small(warmth=1.0, seed=3).to_dict()}
    assert seed_groups.group_by_seed(same | other) == {"a (2 seeds)": ["a0", "a1"]}


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "error", "words"),
    [
        (Range(0, 1, "[)"), (0, 0.5), (-0.1, 1), "in [0, 1)", "0 or more, below 1"),
        (Range(0, math.inf, "()"), (1e300,), (0, math.inf, math.nan), "in (0, inf)", "above 0"),
        (
            Range(1, math.inf, "()", True),
            (0, 1.01),
            (1, -1, 0.5),
            "0 (off) or above 1",
            "0 (off), or above 1",
        ),
    ],
)
def test_a_range_by_hand(allowed, inside, outside, error, words):
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    assert (str(allowed), allowed.in_words) == (error, words)
