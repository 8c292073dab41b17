"""Judges: by score, by comparison in both orders, over HTTP; what fails is counted and never imputed."""

import json
import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest

from proxima.config import PPOConfig, RewardSpec
from proxima.evaluator.held_out import HeldOut
from proxima.evaluator.pair_judge import open_pair_judge, read_preferences
from proxima.pages.report.report_curves import bounds
from proxima.ppo_trainer import PPOTrainer
from proxima.runs.glossary import is_defined
from tests.conftest import count_e
from tests.helpers import shake

PROMPTS = ["one", "two", "three", "four"]
OURS, THEIRS = ["aaaa", "b", "same", "cc"], ["a", "bbbb", "same", "c"]


def longer(prompts, ours, theirs):
    return [(len(a) > len(b)) - (len(a) < len(b)) for a, b in zip(ours, theirs, strict=True)]


def first_always(prompts, ours, theirs):
    return [1] * len(prompts)


async def unsure(prompts, ours, theirs, *, sure: float = 0.75):
    return [sure if len(a) > len(b) else 1 - sure for a, b in zip(ours, theirs, strict=True)]


def compare(source, **options):
    return open_pair_judge(RewardSpec(source, options=options)).compare(PROMPTS, OURS, THEIRS)


def test_a_judge_is_asked_in_both_orders_and_a_liking_for_a_place_cancels():
    assert compare(longer) == [1.0, 0.0, 0.5, 1.0]
    assert compare(first_always) == [0.5] * 4
    assert compare(unsure) == [0.75, 0.25, 0.5, 0.75]
    assert compare(unsure, sure=0.9) == pytest.approx([0.9, 0.1, 0.5, 0.9])
    seen = []

    def half_biased(prompts, ours, theirs):
        seen.append((prompts, ours, theirs))
        return [1.0 if len(a) > len(b) else 0.4 for a, b in zip(ours, theirs, strict=True)]

    assert compare(half_biased) == pytest.approx([0.8, 0.2, 0.5, 0.8])
    assert seen == [
        (["one", "two", "four"], ["aaaa", "b", "cc"], ["a", "bbbb", "c"]),
        (["one", "two", "four"], ["a", "bbbb", "c"], ["aaaa", "b", "cc"]),
    ]


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, 0, -1], [1.0, 0.5, 0.0]),
        ([1.0, 0.0, 0.3], [1.0, 0.0, 0.3]),
        ([True, False, 1], [1.0, 0.0, 1.0]),
        (np.array([1, -1, 0]), [1.0, 0.0, 0.5]),
        ((0.5, np.float32(0.25), np.int64(-1)), [0.5, 0.25, 0.0]),
        ([2, -1.0, 1.5], [None] * 3),
        (["1", None, math.nan], [None] * 3),
        ([[1], {}, math.inf], [None] * 3),
        ([10**400, -2, 1], [None, None, 1.0]),
    ],
)
def test_entries_are_choices_or_probabilities_and_all_else_is_nan(returned, expected):
    outcome = read_preferences(returned, 3)
    assert [None if math.isnan(number) else number for number in outcome.sequence] == expected
    assert bool(outcome.reason) == (None in expected)
    assert "1.5" not in outcome.reason or "probability" in outcome.reason


def raises(prompts, ours, theirs):
    raise OSError("away")


def leaves(prompts, ours, theirs):
    raise SystemExit(3)


def too_few(prompts, ours, theirs):
    return [1]


def no_list(prompts, ours, theirs):
    return "1 1 1"


@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (raises, "OSError: away"),
        (leaves, "SystemExit: 3"),
        (too_few, "1 preferences for 3 pairs"),
        (no_list, "returned a str"),
    ],
)
def test_a_judge_that_fails_makes_nan_of_what_it_was_asked_and_of_nothing_else(judge, reason):
    opened = open_pair_judge(RewardSpec(judge))
    result = opened.compare(PROMPTS, OURS, THEIRS)
    assert [math.isnan(number) for number in result] == [True, True, False, True]
    assert reason in opened.last_failure


def test_one_order_that_failed_is_never_filled_in_from_the_other():
    def one_way(prompts, ours, theirs):
        return [math.nan if len(a) > 3 else 1.0 for a in ours]

    result = compare(one_way)
    assert [math.isnan(number) for number in result] == [True, True, False, False]


def test_what_compares_and_what_scores():
    assert open_pair_judge(RewardSpec(count_e)) is None
    assert open_pair_judge(RewardSpec("length_band", options={"low": 1, "high": 3})) is None
    assert open_pair_judge(RewardSpec("http://localhost:1/score", options={"score": True})) is None
    assert open_pair_judge(RewardSpec("http://localhost:1/judge")) is not None
    assert open_pair_judge(RewardSpec("tests.evaluator.test_judges:longer")) is not None
    for judge, message in (
        (
            RewardSpec(lambda ours, theirs: [], name="two"),
            r"must take \(prompts, ours, theirs\), it takes \(ours, theirs\)",
        ),
        (RewardSpec(lambda prompts, ours, theirs, key: [], name="more"), "it takes .*key"),
        (RewardSpec(unsure, options={"certain": 1}), "no option 'certain'; it takes sure"),
        (RewardSpec(unsure, options={"sure": "very"}), "must be of type float"),
        (RewardSpec("http://localhost:1/judge", options={"send_ids": True}), "no option 'send_ids'"),
        (RewardSpec("tests.evaluator.test_judges:nothing"), "cannot load"),
    ):
        with pytest.raises(ValueError, match=message):
            open_pair_judge(judge)


class Replies(BaseHTTPRequestHandler):
    reply = None
    asked: ClassVar[list] = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        status, answer = type(self).reply(body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *given):
        pass


@pytest.fixture
def server():
    kind = type("Kind", (Replies,), {"asked": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_address[1]}/judge", kind
    running.shutdown()


def test_an_http_judge_sees_both_orders_and_small_requests(server):
    url, kind = server
    kind.reply = lambda body: (200, {"choices": longer(body["prompts"], body["first"], body["second"])})
    assert compare(url, batch=2, concurrency=1) == [1.0, 0.0, 0.5, 1.0]
    assert [len(body["prompts"]) for body in kind.asked] == [2, 1, 2, 1]
    assert set(kind.asked[0]) == {"prompts", "first", "second", "columns"}
    assert (kind.asked[0]["first"], kind.asked[2]["first"]) == (["aaaa", "b"], ["a", "bbbb"])
    kind.reply = lambda body: (
        200,
        {"preferences": [1 for _ in body["prompts"]]},
    )  # 1 as JavaScript writes 1.0
    assert compare(url) == [0.5] * 4


@pytest.mark.parametrize(
    "reply",
    [
        (200, b"not json"),
        (200, b"[1, 2]"),
        (200, b'"choices"'),
        (200, {"rewards": [1, 1, 1]}),
        (200, {"choices": [1, 1]}),
        (200, {"choices": [0.5, "x", True]}),
        (200, {"preferences": [None, 2, -1]}),
        (404, {}),
        (503, {}),
    ],
)
def test_an_http_judge_that_makes_no_sense_fails_and_is_counted(server, reply):
    url, kind = server
    kind.reply = lambda body: reply
    judge = open_pair_judge(RewardSpec(url, options={"retries": 0}))
    result = judge.compare(PROMPTS, OURS, THEIRS)
    assert [math.isnan(number) for number in result] == [True, True, False, True]
    assert judge.last_failure


def test_a_server_that_is_busy_is_asked_again(server, monkeypatch):
    monkeypatch.setattr("proxima.rewards.http_reward.FIRST_WAIT", 0.01)
    url, kind = server
    kind.reply = lambda body: (
        (503, {}) if len(kind.asked) % 2 else (200, {"choices": [1] * len(body["prompts"])})
    )
    assert compare(url, retries=2) == [0.5] * 4


# --- in a run ---


@pytest.fixture
def trainer(make_config):
    def make(**settings):
        return shake(PPOTrainer(make_config(**{"batch_size": 3, "token_samples": 0, **settings})))

    return make


def test_the_reference_answers_once_with_the_policys_noise_however_far_the_policy_is(trainer, make_config):
    fresh = PPOTrainer(make_config())
    expected = fresh.generator.sample(PROMPTS, -1).texts()  # before training the policy is the reference
    moved = trainer()
    held_out = HeldOut(moved, PROMPTS)
    measured = held_out()
    assert held_out.reference.texts == expected
    ours = [moved.generator.sample([prompt], -1).texts()[0] for prompt in PROMPTS]
    assert ours != expected
    wins = [(a > b) + 0.5 * (a == b) for a, b in zip(count_e([], ours), count_e([], expected), strict=True)]
    assert measured["win_rate"] == pytest.approx(sum(wins) / 4)
    assert measured["win_rate_low"] <= measured["win_rate"] <= measured["win_rate_high"]
    assert measured["reward"] == pytest.approx(sum(count_e([], ours)) / 4)
    assert measured["reward/count_e"] == pytest.approx(measured["reward"])
    assert measured["reference_reward"] == pytest.approx(sum(count_e([], expected)) / 4)
    assert measured["reference_reward"] != measured["reward"]
    kept = held_out.reference
    held_out()
    assert held_out.reference is kept


def test_full_fine_tuning_has_its_reference_too(trainer, make_config):
    expected = PPOTrainer(make_config()).generator.sample(PROMPTS, -1).texts()
    held_out = HeldOut(trainer(lora_r=0), PROMPTS)
    held_out()
    assert held_out.reference.texts == expected


def vowels(prompts, texts):
    return [float(sum(letter in "aeiou" for letter in text)) for text in texts]


def half_broken(prompts, ours, theirs):
    return [None if prompt == "one" else 1.0 for prompt in prompts]


def test_every_kind_of_judge_has_a_win_rate_of_its_own(trainer):
    judges = [
        longer,
        half_broken,
        RewardSpec(vowels, name="v"),
        RewardSpec("length_band", options={"low": 1, "high": 2}),
    ]
    moved = trainer(judges=judges)
    held_out = HeldOut(moved, PROMPTS)
    measured = held_out()
    ours = [moved.generator.sample([prompt], -1).texts()[0] for prompt in PROMPTS]
    theirs = held_out.reference.texts
    by_vowels = [(a > b) + 0.5 * (a == b) for a, b in zip(vowels([], ours), vowels([], theirs), strict=True)]
    assert measured["win_rate/v"] == pytest.approx(sum(by_vowels) / 4)
    lengths = [(len(a) > len(b)) + 0.5 * (len(a) == len(b)) for a, b in zip(ours, theirs, strict=True)]
    assert measured["win_rate/longer"] == pytest.approx(sum(lengths) / 4)
    assert (measured["unjudged/longer"], measured["unjudged/half_broken"]) == (0, 1)
    assert measured["win_rate/half_broken"] == 0.5
    assert "win_rate/length_band" in measured
    ends = bounds(measured)  # what a report draws as bands
    assert len(ends) == 12  # of the reward, the rewards' win rate and four judges'
    assert ends == {name for name in measured if name.split("/")[0].endswith(("_low", "_high"))}
    assert all(is_defined(f"validation/{name}") for name in measured)


def test_a_url_that_scores_may_judge(trainer, server):
    url, kind = server
    kind.reply = lambda body: (200, {"rewards": vowels(body["prompts"], body["completions"])})
    moved = trainer(judges=[RewardSpec(url, options={"score": True, "retries": 0}), RewardSpec(vowels)])
    measured = HeldOut(moved, PROMPTS)()
    assert measured["win_rate/judge"] == measured["win_rate/vowels"]
    kind.reply = lambda body: (200, {"choices": [1, 1, 1, 1]})
    measured = HeldOut(moved, PROMPTS)()
    assert math.isnan(measured["win_rate/judge"])
    assert measured["unjudged/judge"] == 4


def test_a_reward_that_fails_on_all_held_out_prompts_gives_no_evaluation_and_no_win_rate(trainer):
    def away(prompts, texts):
        raise OSError("away")

    held_out = HeldOut(trainer(rewards=[away], token_samples=2), PROMPTS)
    measured = held_out()
    assert measured["failed_rewards"] == 4
    assert all(
        math.isnan(measured[name])
        for name in ("reward", "reward_low", "win_rate", "win_rate_high", "reward/away")
    )
    assert not math.isnan(measured["kl"])
    assert [math.isnan(record["reward"]) for record in held_out.records] == [True, True]
    assert held_out.state()["scores"][""] == [None] * 4


def test_a_trained_reward_model_may_judge_without_being_the_reward(trainer, tmp_path, make_config):
    source = shake(PPOTrainer(make_config()), seed=5)
    source.models.value.save(tmp_path / "judge")  # an adapter with a scalar head, as a reward model is
    with pytest.warns(UserWarning, match="nothing is known of its held-out accuracy"):
        moved = trainer(judges=[str(tmp_path / "judge")])
    held_out = HeldOut(moved, PROMPTS)
    held_out()
    tokens = moved.generator.sample(PROMPTS, -1, reference=True)
    assert moved.models.reward.source == "untrained"
    scores = held_out.reference.scores["judge"]
    with pytest.warns(UserWarning, match="nothing is known"):
        own = PPOTrainer(make_config(rewards=[str(tmp_path / "judge")]))
    assert scores == pytest.approx(own.models.reward.token_members(tokens).mean(1).tolist(), abs=1e-4)


def test_what_was_kept_is_restored_only_for_the_same_prompts_and_settings(trainer):
    first = HeldOut(trainer(judges=[RewardSpec(vowels, name="v")]), PROMPTS, "abc")
    assert first.state() is None
    first()
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    same = HeldOut(trainer(judges=[RewardSpec(vowels, name="v")]), PROMPTS, "abc")
    same.restore(state)
    assert (same.reference.texts, same.reference.scores) == (first.reference.texts, first.reference.scores)
    for changed in (
        HeldOut(trainer(judges=[RewardSpec(vowels, name="v")]), PROMPTS, "other"),
        HeldOut(trainer(), PROMPTS, "abc"),
        HeldOut(trainer(judges=[RewardSpec(vowels, name="v")], temperature=0.5), PROMPTS, "abc"),
    ):
        changed.restore(state)
        assert changed.reference is None


def test_judges_that_cannot_work_are_refused_before_anything_is_trained(make_config):
    with pytest.raises(
        ValueError, match="judges compare answers to held-out prompts, and there are none; give --validation"
    ):
        PPOTrainer(make_config(judges=[longer])).train(["a"])
    with pytest.raises(ValueError, match="unknown reward 'nonsense'"):
        PPOTrainer(make_config(judges=["nonsense"]))
    with pytest.raises(ValueError, match=r"judges have the same name: \['longer'\]"):
        PPOConfig(judges=["a:longer", "b:longer"])

    def by_column(prompts, texts, answer):
        return [0.0] * len(texts)

    with pytest.raises(ValueError, match="asks for 'answer'"):
        PPOTrainer(make_config(judges=[by_column])).train(["a"], 1, ["held out"])
