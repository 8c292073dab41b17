"""The report says over-optimised when a run is, from which step on, and by which numbers."""

import json
import math
from html import escape

import pytest

from proxima.evaluator.diversity import common_opening
from proxima.pages.report import summary, write_report
from proxima.pages.report.over_optimisation import judge_optimisation, signs
from proxima.pages.report.signs_against_kl import signs_against_kl
from proxima.runs import Run
from tests.fake_run import OUTCOMES, write_outcome, write_run

CONSTANTS = {"gold": ("B", 0.1)}
EXPECTED = {  # with judges, with nobody, with verifiable rewards
    "good": ("good", "good", "good"),
    "deterministic": ("good", "one sign", "good"),
    "brief": ("good", "over-optimised", "good"),
    "longer": ("good", "one sign", "good"),
    "far": ("good", "one sign", "good"),
    "gamed": ("over-optimised", "over-optimised", "good"),
    "gamed for more KL": ("over-optimised", "over-optimised", "good"),
    "one answer": ("over-optimised", "over-optimised", "good"),
    **dict.fromkeys(("collapsed", "declined", "stuck", "too short")),
}
GOOD_BY_JUDGES = [outcome for outcome, statuses in EXPECTED.items() if statuses and statuses[0] == "good"]
EXPECTED |= {outcome: (outcome,) * 3 for outcome, statuses in EXPECTED.items() if statuses is None}


def found_in(folder, constants=None):
    return judge_optimisation(Run(folder).metrics(), constants=constants)


@pytest.mark.parametrize("steps", [20, 60, 400])
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_judges_tell_how_a_run_ended(tmp_path, outcome, steps):
    found = found_in(write_outcome(tmp_path / "run", outcome, steps), CONSTANTS)  # judges come first
    assert found.status == EXPECTED[outcome][0]
    assert found.decided_by == ("signs" if outcome == "too short" else "judges")
    if found.is_bad:
        assert found.step == pytest.approx(steps / 2, abs=5)
    if outcome == "gamed":
        assert found.sentence.startswith(f"Over-optimised: after step {found.step} the reward went from")


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_without_judges_signs_do(tmp_path, outcome):
    found = found_in(write_outcome(tmp_path / "run", outcome, judges=False))
    assert found.status == EXPECTED[outcome][1]
    if found.status == "over-optimised":
        assert 30 < found.step < 60  # the last evaluation before there were two signs
        assert "No judge was asked" in found.sentence
    words = {
        "deterministic": "One sign of over-optimisation: the entropy fell to less than a tenth. The reward",
        "longer": "One sign of over-optimisation: answers got longer. The reward rose, but no judge independ",
        "far": "One sign of over-optimisation: the KL is 10 nats or more. The reward rose, but no judge ind",
        "gamed": "answers got longer and more answers begin alike",
        "gamed for more KL": "answers got longer and the KL is 10 nats or more",
        "one answer": "The policy collapsed too: distinct word pairs fell from 0.8 to 0.2",
        "collapsed": "The policy collapsed: distinct word pairs fell from 0.8 to 0.2, and 95 % of the answers",
    }
    assert words.get(outcome, "") in found.sentence


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_verifiable_rewards_above_their_best_constant_answer_vouch_for_a_gain(tmp_path, outcome):
    folder = write_outcome(tmp_path / "run", outcome, judges=False)
    found = found_in(folder, CONSTANTS)
    assert found.status == EXPECTED[outcome][2]
    assert (found.decided_by == "verifiable rewards") == (found.status == "good")
    for other in ({"gold": ("B", 1.0)}, {**CONSTANTS, "not logged": ("B", 0.0)}, {"other": ("B", 0.1)}):
        vouched = found_in(folder, other).decided_by == "verifiable rewards"
        assert vouched == (found.status == "good" and len(other) == 2)


@pytest.mark.parametrize(
    ("start", "end", "vouched"), [(0.2, 0.8, True), (0.5, 0.5, False), (0.8, 0.3, False)]
)
def test_a_verifiable_reward_vouches_only_where_it_rose(tmp_path, start, end, vouched):
    """Also in a mix, where the sum rose for another reason."""
    metrics = Run(write_outcome(tmp_path / "run", "gamed", judges=False)).metrics()
    metrics["reward/gold"] = [start + (end - start) * step / 60 for step in metrics["step"]]
    found = judge_optimisation(metrics, constants=CONSTANTS)
    assert (found.status == "good") == vouched
    metrics["reward/format"] = [1.0] * len(metrics["step"])  # from the start
    both = {**CONSTANTS, "format": ("{}", 0.0)}
    assert (judge_optimisation(metrics, constants=both).status == "good") == vouched
    metrics["reward/format"] = [1.0 - step / 200 for step in metrics["step"]]
    assert judge_optimisation(metrics, constants=both).status == "over-optimised"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [("good", "good"), ("declined", "declined"), ("stuck", "stuck"), ("too short", "too short")],
)
def test_without_evaluations_the_training_metrics_do(tmp_path, outcome, status):
    assert found_in(write_outcome(tmp_path / "run", outcome, evaluated=False)).status == status


def test_a_run_that_collapses_in_its_first_steps_was_sound_before_them():
    """The mean entropy over the steps before an evaluation falls later than the reward does."""
    steps = [float(step) for step in range(13)]
    metrics = {
        "step": steps,
        "avg_reward": [math.nan, 0.5, *[0.0] * 11],
        "entropy": [math.nan, 0.34, 0.34, 0.2, 0.1, *[0.05] * 4, *[0.01] * 4],
        "validation/reward": [(0.55 if step == 0 else 0.0) if step % 4 == 0 else math.nan for step in steps],
        "validation/reward_low": [0.48 if step == 0 else 0.0 for step in steps],
        "validation/reward_high": [0.62 if step == 0 else 0.0 for step in steps],
    }
    found = judge_optimisation(metrics)
    assert (found.status, found.step) == ("collapsed", 0)


@pytest.mark.parametrize(
    ("length", "reward", "status"), [(2.0, 0.0, "collapsed"), (2.0, 0.9, "one sign"), (9.0, 0.0, "")]
)
def test_answers_of_next_to_nothing_for_less_reward_are_a_collapse(length, reward, status):
    steps = [float(step) for step in range(13)]
    evaluated = [step % 4 == 0 for step in steps]
    ends = [0.0, 0.3, 0.6, 1.0]

    def towards(start, end):
        curve = iter([start + share * (end - start) for share in ends])
        return [next(curve) if is_one else math.nan for is_one in evaluated]

    rewards = towards(0.5, reward)
    metrics = {
        "step": steps,
        "avg_reward": [math.nan, *[0.5 + (reward - 0.5) * step / 12 for step in steps[1:]]],
        "entropy": [math.nan, *[0.3] * 12],
        "validation/reward": rewards,
        "validation/reward_low": [each - 0.05 for each in rewards],
        "validation/reward_high": [each + 0.05 for each in rewards],
        "validation/response_length": towards(17.0, length),
    }
    found = judge_optimisation(metrics)
    assert found.status == status or (not status and found.status != "collapsed")
    assert ("answers shrank from 17 to 2 tokens" in found.sentence) == (status == "collapsed")


def test_a_held_out_reward_that_falls_while_the_training_reward_rises_is_enough(tmp_path):
    folder = write_outcome(tmp_path / "run", "good", judges=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] > 30 and "validation/reward" in line:
            for name in ("reward", "reward_low", "reward_high"):
                line[f"validation/{name}"] -= 2 * (line["step"] - 30) / 60
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = found_in(folder)
    assert (found.status, found.step, found.is_guess) == ("over-optimised", 30, False)


def test_signs_are_drawn_against_kl(tmp_path):
    folder = write_outcome(tmp_path / "run", "gamed")
    metrics = Run(folder).metrics()
    charts = signs_against_kl(metrics)
    drawn = [one["name"] for chart in charts for one in chart["series"]]
    assert drawn[:3] == ["validation/response_length", "validation/common_opening", "validation/distinct_2"]
    for chart in charts:
        [one] = chart["series"]
        known = [
            row
            for row in zip(metrics["validation/kl"], metrics[one["name"]], strict=True)
            if row[0] == row[0]
        ]
        assert [tuple(point[:2]) for point in one["points"]] == known
    page = write_report(Run(folder)).read_text()
    assert all(chart["title"] in page for chart in charts)
    assert signs_against_kl({"step": [1.0, 2.0], "avg_reward": [0.0, 1.0]}) == []


def test_judges_that_see_a_gain_overrule_signs(tmp_path):
    folder = write_outcome(tmp_path / "run", "gamed")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("win_rate", "win_rate_low", "win_rate_high"):
            if f"validation/{name}/gold" in line:
                line[f"validation/{name}/gold"] = 0.5 + 0.3 * line["step"] / 60
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = found_in(folder)
    assert found.status == "good"
    assert {each.sign for each in found.evidence} >= {"answers got longer", "more answers begin alike"}


def test_a_gain_is_one_over_the_reference_wherever_the_evaluations_began(tmp_path):
    folder = write_outcome(tmp_path / "run", "stuck")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in ("win_rate", "win_rate_low", "win_rate_high"):
            if f"validation/{name}/gold" in line:
                line[f"validation/{name}/gold"] += 0.2
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert found_in(folder).status == "good"


def test_a_win_rate_that_wavers_within_its_interval_is_not_a_fall(tmp_path):
    folder = write_outcome(tmp_path / "run", "good")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "validation/win_rate/gold" in line:
            rate = 0.5 if not line["step"] else 0.7 + (0.02 if line["step"] % 10 else -0.02)
            line |= {"validation/win_rate/gold": rate}
            line |= {
                "validation/win_rate_low/gold": rate - 0.04,
                "validation/win_rate_high/gold": rate + 0.04,
            }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert found_in(folder).status == "good"


def test_one_sign_alone_and_numbers_that_were_not_measured_are_none():
    names = ("length", "opening", "variety", "repetition", "copying", "spread", "distance", "entropy", "eos")
    nothing = dict.fromkeys(names, float("nan"))
    assert signs(nothing, nothing) == {}
    assert signs({**nothing, "length": 10.0}, {**nothing, "length": 5.0}) == {"length": "answers got shorter"}
    assert signs({**nothing, "length": 0.0}, {**nothing, "length": 5.0}) == {}
    assert list(signs({**nothing, "spread": 0.2}, {**nothing, "spread": 0.31})) == ["spread"]
    assert [list(signs(nothing, {**nothing, "distance": nats})) for nats in (9.9, 10.0)] == [[], ["kl"]]
    assert list(signs({**nothing, "entropy": 1.0}, {**nothing, "entropy": 0.09})) == ["entropy"]
    assert list(signs({**nothing, "eos": 0.9}, {**nothing, "eos": 0.04})) == ["eos"]
    assert signs({**nothing, "spread": 0.0}, {**nothing, "spread": 0.0}) == {}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_the_report_says_it_first_and_shows_the_numbers(tmp_path, outcome):
    """What is bad is the first sentence, on the page and in the terminal; what is good comes after it."""
    run = Run(write_outcome(tmp_path / "run", outcome))
    page, told = write_report(run).read_text(encoding="utf-8"), summary(run).splitlines()[1]
    sentence = found_in(run.path).sentence
    assert told.startswith(sentence) == (outcome not in ("too short", *GOOD_BY_JUDGES))
    assert (sentence in told) == (outcome != "too short")
    if told.startswith(sentence):
        first = page.split('<p class="conclusion">')[1].split("</span> ")[1]
        assert first.startswith(escape(sentence))
    if outcome == "gamed":
        assert page.index("Over-optimised: after step") < page.index("Did it game the reward?")
        assert "Most common opening" in page
        assert "Take the checkpoint nearest to step 30" in page
        assert "Win rate by judges against KL" in page


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_runs_that_hardly_began_have_a_report(tmp_path, steps):
    run = Run(write_run(tmp_path / "run", steps))
    assert judge_optimisation(run.metrics()).status == "too short"
    assert write_report(run).is_file()


def test_the_common_opening():
    assert common_opening(["So it is.", "so what", "No", ""]) == 0.5
    assert common_opening(["", " "]) != common_opening(["", " "])  # nan


def test_a_run_that_ended_before_its_first_step_is_too_short_to_tell():
    assert judge_optimisation({"step": [0.0], "validation/reward": [1.0]}).status == "too short"
