"""The findings of a run: every rule on runs that are made to be good, gamed, doubtful, collapsed, stuck or too
short."""

import json
import math
import random

import pytest

from proxima.evaluator.diversity import copying
from proxima.pages.report import summary, write_report
from proxima.pages.report.findings import COST, CRITIC, GAMED, LEARNED, NEXT, find
from proxima.pages.report.report_curves import charts_by_group
from proxima.pages.report.run_outcome import HeldOutNumbers, Interval, held_out
from proxima.runs import Run
from tests.fake_run import HOSTILE, OUTCOMES, write_outcome, write_run

POST = "my friend moved out last week and now i cannot pay the rent on my own so what should i do about it"
PLAIN = "{word} friend left and the rent is due, who can help?"
LONG = " ".join(f"thing{number} matters" for number in range(12))
TRICKS = {  # what an answer of a policy that games its reward looks like
    "length": lambda word: f"{PLAIN.format(word=word)} {LONG}",
    "repetition": lambda word: f"{word} help me please now " * 6,
    "copying": lambda word: f"{word} {POST}",
}
OPENINGS = ("my", "a", "the", "our", "some", "his", "one", "that")


class MadeRun:
    """Metrics and samples of a run that never was; Gaussian noise from the seed."""

    def __init__(self, seed=0, steps=60, rise=1.0, kl=4.0, tricks=(), critic=0.6, std=1.0):
        rng = random.Random(seed)
        done = [step / steps for step in range(1, steps + 1)]
        late = [max(0.0, 2 * part - 1) for part in done]
        self.metrics = {
            "step": [float(step) for step in range(1, steps + 1)],
            "avg_reward": [rise * part + rng.gauss(0, 0.05) for part in done],
            "reward_std": [std] * steps,
            "kl_exact": [kl * part for part in done],
            "entropy": [1.0 - 0.3 * part + rng.gauss(0, 0.01) for part in done],
            "response_length": [20 * (1 + 2 * ("length" in tricks) * t) + rng.gauss(0, 0.4) for t in late],
            "eos_rate": [0.9] * steps,
            "explained_variance": [critic * (1 - math.exp(-5 * p)) + rng.gauss(0, 0.02) for p in done],
            "advantage_std": [1.0] * steps,
            "learning_rate": [1e-5 * (1 - part) for part in done],
            "kl_coef": [0.1] * steps,
        }
        self.samples = [
            {"step": step, "prompt": POST, "text": self.text(tricks if part > 0.7 else (), rng)}
            for step, part in zip(range(1, steps + 1), done, strict=True)
            if step % 5 == 0
            for _ in range(8)
        ]

    @staticmethod
    def text(tricks, rng):
        word = "basically, my" if "opening" in tricks else rng.choice(OPENINGS)
        made = next((TRICKS[trick] for trick in tricks if trick in TRICKS), PLAIN.format)
        return made(word=word)

    def found(self):
        return {each.question: each for each in find(self.metrics, self.samples)}


SEEDS = range(20)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_good_run_is_good_under_any_noise(seed):
    found = MadeRun(seed).found()
    assert [found[each].status for each in (LEARNED, COST, GAMED, CRITIC)] == ["good"] * 4
    assert found[LEARNED].answer == "yes"
    assert found[NEXT].sentence.startswith("Train longer: the reward was still rising")


def test_the_numbers_of_did_it_learn_stand_beside_it():
    """Also where a single step is far from the mean of the first ones."""
    rewards = [1.0, 0.0, 0.5, 0.5, 0.5, *[0.6] * 20, 0.9, 0.9, 0.9, 0.8, 0.0]
    metrics = {"step": [float(step) for step in range(1, 31)], "avg_reward": rewards}
    found = find(metrics)[0]
    (shown,) = found.evidence
    assert found.sentence.startswith("The training reward went from 0.5 ± 0.31 to 0.7 ± 0.35")
    assert (shown.title, shown.start, shown.end) == (
        "Training reward, mean of 5 steps",
        0.5,
        pytest.approx(0.7),
    )
    measured = HeldOutNumbers(0.2, Interval(0.4), None, "")
    found = find(metrics, measured=measured)[0]
    assert "from 0.2 to 0.4" in found.sentence
    assert [(each.start, each.end) for each in found.evidence] == [(0.2, 0.4)]
    assert find({"step": [], "avg_reward": []})[0].evidence == []


@pytest.mark.parametrize("trick", [*TRICKS, "opening"])
@pytest.mark.parametrize("seed", range(5))
def test_one_trick_is_a_sign_and_says_which(trick, seed):
    all_found = MadeRun(seed, tricks=(trick,)).found()
    found = all_found[GAMED]
    assert all_found[NEXT].sentence.startswith("Read samples of the last steps before you train longer")
    assert (all_found[LEARNED].answer, all_found[LEARNED].status) == ("its reward rose", "open")
    said = {
        "length": "Answers got longer",
        "repetition": "Answers repeat themselves",
        "copying": "Answers copy their prompt",
        "opening": "More answers begin alike (“basically” opens",
    }[trick]
    assert said in found.sentence
    assert (found.answer, found.status) == ("1 sign of it", "open")
    assert len([each.sign for each in found.evidence if each.sign]) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_two_tricks_are_gaming_and_the_advice_names_the_step(seed):
    found = MadeRun(seed, tricks=("length", "opening")).found()
    assert (found[GAMED].answer, found[GAMED].status) == ("yes", "bad")
    assert found[LEARNED].status == "bad"
    assert found[COST].answer.endswith("too many")
    assert found[COST].sentence.endswith("after that, quality probably did not improve.")
    assert found[NEXT].sentence.startswith(f"Take the checkpoint nearest to step {found[GAMED].step}")


def test_noise_passes_for_learning_no_more_often_than_a_95_percent_interval_allows():
    runs = [MadeRun(seed, rise=0.0).found() for seed in range(100)]
    assert sum(found[LEARNED].status != "open" for found in runs) <= 15
    assert sum(found[COST].answer.endswith("nats, for no gain") for found in runs) >= 85
    assert sum(found[NEXT].sentence.startswith("It moves, but not towards") for found in runs) >= 85


def bare(steps, rise, noise, seed):
    """What is found in the rewards of a short run without evaluations."""
    rng = random.Random(seed)
    metrics = {
        "step": [float(step) for step in range(1, steps + 1)],
        "avg_reward": [rise * step + rng.gauss(0, noise) for step in range(steps)],
    }
    return {each.question: each for each in find(metrics)}[LEARNED].answer


@pytest.mark.parametrize("steps", [10, 12, 20])
def test_short_runs_of_noise_alone_seldom_pass_for_a_decline_and_rising_ones_never(steps):
    assert sum(bare(steps, 0.0, 0.3, seed) == "no" for seed in range(200)) <= 24
    assert "no" not in {bare(steps, 0.2, 0.3, seed) for seed in range(200)}


def test_the_advice_for_a_stuck_run_fits_why():
    still, flat = MadeRun(rise=0.0, kl=0.004), MadeRun(rise=0.0, std=0.0)
    found = still.found()
    assert found[COST].answer == "almost nothing"
    assert "raise learning_rate (it was 9.83e-06)" in found[NEXT].sentence
    flat.metrics["avg_reward"] = [0.5] * 60
    assert "all answers of a batch score the same" in flat.found()[NEXT].sentence


def test_a_reward_that_never_moved_did_not_fall():
    made = MadeRun(rise=0.0, std=0.0)
    made.metrics["avg_reward"] = [1.0] * 60
    found = made.found()
    assert (found[LEARNED].answer, found[LEARNED].status) == ("not shown", "open")
    assert "The training reward stayed at 1 ± 0." in found[LEARNED].sentence
    same = HeldOutNumbers(0.5, Interval(0.5), None, "")
    assert find(made.metrics, made.samples, same)[0].status == "open"


def test_steps_without_any_reward_are_not_called_too_few():
    made = MadeRun()
    made.metrics["avg_reward"] = [math.nan] * 60
    found = made.found()
    assert (found[LEARNED].answer, found[LEARNED].status) == ("not measured", "bad")
    assert found[LEARNED].sentence == "60 steps were logged, and none of them has a reward."
    assert found[NEXT].sentence.startswith("Find out why no step has a reward")
    assert find({"step": []})[0].sentence == "No step has been logged yet."


def test_rewards_that_fail_at_the_end_are_said_first():
    made = MadeRun()
    made.metrics["avg_reward"][-2:] = [math.nan] * 2
    assert (made.found()[LEARNED].answer, made.found()[LEARNED].status) == ("yes", "good")
    made.metrics["avg_reward"][-9:] = [math.nan] * 9
    found = made.found()[LEARNED]
    assert found.sentence.startswith("The last 9 steps have no reward; before that: The training reward rose")
    assert (found.answer, found.status) == ("it did", "open")


def test_nothing_is_said_of_a_length_that_was_not_logged():
    metrics = MadeRun().metrics
    found = {each.question: each for each in find({name: metrics[name] for name in ("step", "avg_reward")})}
    assert found[GAMED].sentence.startswith("No length was logged")


def test_half_of_the_kl_for_little():
    run = MadeRun()
    run.metrics["avg_reward"] = [min(3 * step / 60, 1.0) for step in range(60)]
    found = run.found()
    assert found[COST].answer.endswith("half of it for little")
    assert "A KL budget of about 1." in found[NEXT].sentence
    assert found[NEXT].sentence.startswith(
        "The reward has stopped rising, so more steps at these settings are"
    )
    assert found[NEXT].answer == "2 things"  # the budget, and a judge


def test_nothing_to_change_is_said_so():
    run = MadeRun()
    steps = run.metrics["step"]
    run.metrics["avg_reward"] = [min(step / 20, 1.0) for step in steps]
    run.metrics["kl_exact"] = [4 * min(step / 20, 1.0) for step in steps]
    for end in ("", "_low", "_high"):
        run.metrics[f"validation/win_rate{end}/gold"] = [0.5 + 0.3 * min(step / 20, 1.0) for step in steps]
    run.metrics["validation/reward"] = run.metrics["avg_reward"]
    found = run.found()[NEXT]
    assert (found.answer, found.status) == ("nothing pressing", "good")
    assert found.sentence == (
        "The reward has stopped rising, so more steps at these settings are unlikely to help."
    )


@pytest.mark.parametrize(
    ("critic", "answer"), [(-0.5, "no"), (0.0, "weak"), (0.1, "weak"), (0.5, "yes"), (0.9, "yes")]
)
def test_the_critic(critic, answer):
    found = MadeRun(critic=critic).found()
    assert found[CRITIC].answer == answer
    assert ("Give the critic more" in found[NEXT].sentence) == (answer in ("no", "weak"))


def test_a_critic_that_is_off_on_average_is_biased_and_none_is_none():
    run = MadeRun()
    run.metrics |= {f"value_error_position/{part}": [0.1] * 60 for part in range(1, 5)}
    assert run.found()[CRITIC].answer == "yes"
    run.metrics["value_error_position/1"] = [-0.8] * 60
    found = run.found()[CRITIC]
    assert found.answer == "biased"
    assert "in quarter 1 of the responses they are 0.8 too high" in found.sentence
    del run.metrics["value_error_position/1"]
    run.metrics["value_error_position/3"] = [0.9] * 60
    assert "in quarter 3 of the responses they are 0.9 too low" in run.found()[CRITIC].sentence
    del run.metrics["explained_variance"]
    assert run.found()[CRITIC].answer == "not measured"


@pytest.mark.parametrize("steps", range(10))
def test_short_runs_claim_nothing(steps):
    run = MadeRun(steps=steps) if steps else MadeRun(steps=1)
    if not steps:
        run.metrics, run.samples = {name: [] for name in run.metrics}, []
    found = run.found()
    assert found[GAMED].answer == found[COST].answer == "too early to say"
    assert all(each.status == "open" for each in found.values() if each.question not in (LEARNED, NEXT))
    assert found[NEXT].sentence == "Train for 10 steps or more, with 3 evaluations, to say more."


def test_answers_that_never_finish_and_no_judge_are_said():
    run = MadeRun()
    run.metrics["eos_rate"] = [0.2] * 60
    said = run.found()[NEXT].sentence
    assert "Only 20 % of the answers finish" in said
    assert "Name a judge" in said


def measured_run(constants=None, **ends):
    """Three evaluations of 60 steps on a straight line between two measured ends; as in every run, the only
    reward is logged by its name too."""
    steps = [float(step) for step in range(61)]
    metrics = {"step": steps, "avg_reward": [math.nan, *[step / 60 for step in steps[1:]]]}
    for name, (start, end) in ends.items():
        metrics[f"validation/{name}"] = [
            start + (end - start) * step / 60 if step % 30 == 0 else math.nan for step in steps
        ]
    metrics |= {f"reward/{name}": metrics["avg_reward"] for name in constants or ()}
    measured = HeldOutNumbers(ends["reward"][0], Interval(ends["reward"][1]), None, "")
    return {each.question: each for each in find(metrics, (), measured, constants)}


def test_the_findings_on_the_numbers_of_docs_real():
    """A reward model that was gamed, and ROUGE-L that was not, as docs/real.md has them."""
    gamed = measured_run(
        reward=(0.08, 2.36), kl=(0.0, 11.1), copying=(0.022, 0.802), response_length=(18.5, 7.7)
    )
    assert (gamed[GAMED].answer, gamed[LEARNED].status) == ("yes", "bad")
    assert "answers got shorter and answers copy their prompt" in gamed[GAMED].sentence
    assert gamed[COST].answer == "11.1 nats, too many"
    sound = measured_run(
        reward=(0.118, 0.165), kl=(0.0, 3.9), copying=(0.022, 0.177), response_length=(18.5, 14.0)
    )
    assert (sound[GAMED].answer, sound[LEARNED].answer) == ("no sign of it", "yes")


@pytest.mark.parametrize(
    ("kl", "length", "told"),
    [
        (
            17.0,
            20.0,
            "Probably over-optimised after step 30: the reward rose, and answers got longer and the KL",
        ),
        (6.0, 20.0, "One sign of over-optimisation: answers got longer. The reward rose, but no judge indep"),
        (17.0, 14.0, "One sign of over-optimisation: the KL is 10 nats or more. The reward rose, but no ju"),
    ],
)
def test_more_reward_that_nobody_else_confirms_is_not_a_success(kl, length, told):
    """A reward model that was gamed, seen without a judge: in truth the answers fell below the start."""
    found = measured_run(
        reward=(0.0, 2.0),
        reward_low=(-0.1, 1.9),
        reward_high=(0.1, 2.1),
        kl=(0.0, kl),
        response_length=(11.0, length),
        common_opening=(0.1, 0.2),
        distinct_2=(0.6, 0.55),
    )
    assert found[LEARNED].sentence.startswith(told)
    if told.startswith("Probably"):
        assert [found[each].status for each in (LEARNED, COST, GAMED)] == ["bad"] * 3
        assert found[LEARNED].answer == "perhaps until step 30"
        assert "It may have been good until step 30, at 8.5 nats; after that" in found[COST].sentence
        return
    assert (found[LEARNED].answer, found[LEARNED].status) == ("its reward rose", "open")
    assert (found[GAMED].answer, found[GAMED].status) == ("1 sign of it", "open")
    assert (found[COST].answer == "17 nats, far") == (kl == 17)
    assert "Name a judge" in found[NEXT].sentence


def test_verifiable_answers_that_get_to_the_point_are_no_gaming():
    given = {"reward": (0.2, 1.0), "response_length": (40.0, 8.0), "common_opening": (0.1, 0.8)}
    found = measured_run({"math": ("1", 0.05)}, **given)
    assert (found[LEARNED].answer, found[LEARNED].status) == ("yes", "good")
    assert (found[GAMED].answer, found[GAMED].status) == ("probably not", "good")
    assert found[GAMED].sentence == (
        "It is verifiably right more often than the best constant answer, although answers got shorter and "
        "more answers begin alike."
    )
    assert "Name a judge" not in found[NEXT].sentence
    assert measured_run(None, **given)[GAMED].answer == "yes"
    no_more = measured_run({"math": ("1", 1.0)}, **given)
    assert no_more[GAMED].answer == "yes"
    assert no_more[LEARNED].status == "bad"
    longer = measured_run({"math": ("1", 1.0)}, reward=(0.2, 1.0), response_length=(10.0, 16.0))[LEARNED]
    assert (longer.answer, longer.status) == ("no more than a constant answer", "open")
    assert longer.sentence.startswith(
        "The best constant answer, '1', scores 1 by math, and the policy no more"
    )


def test_judges_come_before_a_reward_that_fell():
    found = measured_run(
        reward=(1.0, 0.8), **{f"win_rate{end}/gold": (0.5, 0.9) for end in ("", "_low", "_high")}
    )
    assert (found[LEARNED].answer, found[LEARNED].status) == ("yes", "good")
    assert found[LEARNED].sentence.endswith("Judges prefer its answers to the end: 90 % wins.")


GOOD, BAD, OPEN = ("good",) * 3, ("bad",) * 3, ("open", "good", "open")
ON, BACK, READ = "Train longer", "Take the checkpoint nearest to step {}", "Read samples of the last steps"
RETURN, STUCK = "Go back to the checkpoint nearest to step 30", "It moves, but not towards more reward"
GAINED, ONE_SIGN = (*GOOD, ON), (*OPEN, READ)
JUDGED, GUESSED = (*BAD, BACK.format(30)), (*BAD, BACK.format(40))
EXPECTED = {  # learned, cost, gamed, what the advice begins with; with judges, nobody, verifiable rewards
    "good": [GAINED] * 3,
    "deterministic": [GAINED, ONE_SIGN, GAINED],
    "brief": [GAINED, GUESSED, GAINED],
    "longer": [GAINED, ONE_SIGN, GAINED],
    "far": [GAINED, ("open", "open", "open", READ), GAINED],
    "gamed": [JUDGED, GUESSED, GAINED],
    "gamed for more KL": [JUDGED, GUESSED, GAINED],
    "one answer": [JUDGED, GUESSED, GAINED],
    "collapsed": [(*BAD, RETURN)] * 3,
    "declined": [("bad", "bad", "good", RETURN)] * 3,
    "stuck": [("open", "bad", "good", STUCK)] * 3,
    "too short": [("good", "open", "open", "Train for 10 steps or more")] * 3,
}


@pytest.mark.parametrize("asked", ["judges", "nobody", "verifiable rewards"])
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_whole_runs_are_told_in_the_report_and_in_the_terminal(tmp_path, outcome, asked):
    folder = write_outcome(tmp_path / "run", outcome, judges=asked == "judges")
    if asked == "verifiable rewards":
        (folder / "best_constants.json").write_text(json.dumps({"gold": {"answer": "B", "score": 0.1}}))
    run = Run(folder)
    found = find(run.metrics(), run.samples(), held_out(run, run.metrics()), run.best_constants)
    expected = EXPECTED[outcome][["judges", "nobody", "verifiable rewards"].index(asked)]
    assert tuple(each.status for each in found[:3]) == expected[:3]
    assert found[4].sentence.startswith(expected[3])
    assert ("after that, quality did not improve." in found[1].sentence) == (expected == JUDGED)
    page, told = write_report(run).read_text(encoding="utf-8"), summary(run)
    for each in found:
        assert f"<h3>{each.question} <span" in page
        assert each.sentence.split(":")[0][:200] in told


def test_a_hostile_opening_is_only_text(tmp_path):
    folder = write_run(tmp_path / "run", 40)
    rows = [
        {"step": step, "prompt": HOSTILE, "text": "a b" if step < 20 else f"<img/src=x> {HOSTILE}"}
        for step in (5, 10, 35, 40)
        for _ in range(8)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_report(Run(folder)).read_text(encoding="utf-8")
    assert "<img" not in page.split("<script")[0]
    odd = [{"step": 1}, {"step": 1, "text": None}, {"step": 9, "text": 3, "prompt": []}] * 8
    assert len(find(Run(folder).metrics(), odd)) == 5


def test_copying_counts_the_words_that_stand_in_the_prompt():
    assert copying(["a b c d e f"], ["b c d e"]) == 1.0
    assert copying(["a b c d e f"], ["b c d e x"]) == 0.5
    assert copying(["a b c d", "a b c d"], ["w x y z", "a b c d"]) == 0.5
    assert copying(["a b c d"], ["a b"]) == 0.0
    assert math.isnan(copying([], []))


@pytest.mark.parametrize(
    ("constant", "learned", "gamed"),
    [
        (0.4, ("yes", "good"), ("no sign of it", "good")),
        (1.0, ("no more than a constant answer", "open"), ("a constant answer may do it", "open")),
        (1.6, ("no more than a constant answer", "open"), ("no sign of it", "good")),
    ],
)
def test_a_score_is_read_beside_that_of_the_best_constant_answer(constant, learned, gamed):
    """The reward rises from 0 to 1 here."""
    made = MadeRun()
    made.metrics["reward/choice"] = made.metrics["avg_reward"]
    given = {"choice": ("B", constant), "not logged": ("1", 0.0)}
    found = {each.question: each for each in find(made.metrics, made.samples, constants=given)}
    assert (found[LEARNED].answer, found[LEARNED].status) == learned
    assert (found[GAMED].answer, found[GAMED].status) == gamed
    assert f"The best constant answer, 'B', scores {constant:g} by choice" in found[LEARNED].sentence
    assert "not logged" not in found[LEARNED].sentence
    assert ("which the constant answer 'B' gives too" in found[GAMED].sentence) == (constant == 1.0)


def test_the_best_constant_answer_is_a_line_in_the_chart_and_a_sentence_of_the_summary(tmp_path):
    folder = write_run(tmp_path / "run", 30)
    (folder / "best_constants.json").write_text(
        json.dumps({"gold": {"answer": HOSTILE, "score": 0.25}, "odd": {"answer": 3}, "none": [], "x": None})
    )
    run = Run(folder)
    assert run.best_constants == {"gold": (HOSTILE, 0.25)}
    charts = [one for _, each in charts_by_group(run.metrics(), (), run.best_constants) for one in each]
    lines = {one["name"]: one["points"] for chart in charts for one in chart["series"]}
    assert lines["best constant answer of gold"] == [[1.0, 0.25], [30.0, 0.25]]
    [note] = [chart["note"] for chart in charts if "scores 0.25 by gold" in chart["note"]]
    assert note.count("The constant answer") == 1
    assert "scores 0.25 by gold, the policy 0.8" in summary(run)
    assert HOSTILE[:30] not in write_report(run).read_text(encoding="utf-8")
