"""The audit of rewards: every planted fault is named by the check that should name it, and good rewards pass."""

import itertools
import json
import math
import random
import re
import signal
import sys
import threading
import time
from difflib import SequenceMatcher
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from proxima.cli import main
from proxima.config import RewardSpec
from proxima.core.types import Prompt
from proxima.data import ListRows
from proxima.rewards.reward_sources import _open_without_model
from proxima.tools.doctor import examine, reward_calls
from proxima.tools.doctor.audit_checks import answers_in_data, audit_rewards
from proxima.tools.doctor.cheap_tricks import TRICKS, Writer
from proxima.tools.doctor.reward_evidence import plan_calls
from proxima.world.demonstrations import write_summary
from proxima.world.gold import gold_score, named_values
from proxima.world.posts import facts_of, make_posts
from proxima.world.tiny_models import byte_tokenizer

ROOM = 400  # bytes
STYLES = ("faithful", "partial", "unfinished", "rambling")


@pytest.fixture(scope="module")
def writer():
    tokenizer = byte_tokenizer()
    return Writer(tokenizer, (tokenizer.eos_token_id,), ROOM)


@pytest.fixture(scope="module")
def plan(writer):
    """Samples of mixed quality and faithful demonstrations, of the embedded world's posts."""
    rng = random.Random(0)
    posts = make_posts(16, "train", seed=5)
    prompts = [
        Prompt(post.prompt, {"reference": write_summary(post, rng, "faithful"), "who": post.facts["who"]})
        for post in posts
    ]
    answers = [
        [
            writer.answer(prompt, write_summary(post, rng, style or STYLES[i % len(STYLES)]))
            for i, (post, prompt) in enumerate(zip(posts, prompts, strict=True))
        ]
        for style in (None, "faithful")
    ]
    return plan_calls(*answers, writer)


@pytest.fixture
def audited(plan, writer):
    """The findings on these rewards, by name."""

    def run(*rewards, penalty=0.0):
        specs = [RewardSpec.of(reward) for reward in rewards]
        found = audit_rewards(
            [(spec, _open_without_model(spec, False)) for spec in specs], plan, writer, penalty
        )
        assert len({item.name for item in found}) == len(found)
        return {item.name: item for item in found}

    return run


def levels(findings):
    return {name: item.level for name, item in findings.items() if item.level != "ok"}


# --- good ---


def gold(prompts, completions, ended):
    rows = zip(prompts, completions, ended, strict=True)
    return [gold_score(facts_of(prompt), text, end) for prompt, text, end in rows]


def names_the_person(prompts, completions, who, ended):
    """A check with two grades: the right person and no other, in a sentence that is finished."""
    rows = zip(completions, who, ended, strict=True)
    return [
        float(named_values(text)["who"] == {person} and end and text.rstrip().endswith((".", "?")))
        for text, person, end in rows
    ]


def overlap(prompts, completions, reference):
    """F1 of the words of answer and reference."""
    scores = []
    for text, wanted in zip(completions, reference, strict=True):
        left, right = text.split(), wanted.split()
        common = len(set(left) & set(right))
        scores.append(2 * common / (len(left) + len(right)))
    return scores


def exact(prompts, completions, reference):
    return [
        float(text.strip() == wanted.strip()) for text, wanted in zip(completions, reference, strict=True)
    ]


def similar(prompts, completions, reference):
    """Character by character, whatever the case."""
    both = zip(completions, reference, strict=True)
    return [SequenceMatcher(None, text.lower(), wanted.lower()).ratio() for text, wanted in both]


def bigrams(prompts, completions, reference):
    scores = []
    for text, wanted in zip(completions, reference, strict=True):
        left, right = (set(pairwise(each.split())) for each in (text, wanted))
        scores.append(2 * len(left & right) / max(1, len(left) + len(right)))
    return scores


def brief(prompts, completions, ended):
    scores = zip(gold(prompts, completions, ended), completions, strict=True)
    return [score - 0.001 * len(text) for score, text in scores]


def rescaled(prompts, completions, ended):
    return [100 * score - 50 for score in gold(prompts, completions, ended)]


async def slowly_gold(prompts, completions, ended):
    return gold(prompts, completions, ended)


class GoldHandler(BaseHTTPRequestHandler):
    """Gold scores over HTTP, as docs/rewards.md shows."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scores = gold(asked["prompts"], asked["completions"], [True] * len(asked["prompts"]))
        body = json.dumps({"rewards": scores}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *given):
        pass


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), GoldHandler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/score"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "rewards",
    [
        (gold,),
        (names_the_person,),
        (overlap,),
        (exact,),
        (similar,),
        (bigrams,),
        (brief,),
        (rescaled,),
        (slowly_gold,),
        (gold, "0.2*repetition,n=8", "0.2*ends_with_eos"),
    ],
    ids=lambda rewards: getattr(rewards[0], "__name__", "") if len(rewards) == 1 else "mix",
)
def test_good_rewards_pass(audited, rewards):
    began = time.process_time()  # of this program alone: others share the machine
    assert levels(audited(*rewards)) == {}
    assert time.process_time() - began < 60


def test_a_good_reward_behind_a_url_passes(audited, url):
    assert levels(audited(url, penalty=0.5)) == {}


# --- bad ---


def noise(prompts, completions):
    return [random.random() for _ in completions]


SHIFTS = itertools.cycle((0.05, -0.05))


def noisy_gold(prompts, completions, ended):
    shift = next(SHIFTS)
    return [score + shift for score in gold(prompts, completions, ended)]


class Novelty:
    """A bonus for what was not seen before, which the reward remembers."""

    __name__ = "novelty"

    def __init__(self):
        self.seen = set()

    def __call__(self, prompts, completions, ended):
        new = [text not in self.seen for text in completions]
        self.seen.update(completions)
        return [score + one for score, one in zip(gold(prompts, completions, ended), new, strict=True)]


def ranked(prompts, completions, ended):
    scores = gold(prompts, completions, ended)
    return [score / (max(scores) or 1) for score in scores]


def without_copies(prompts, completions, ended):
    scores = gold(prompts, completions, ended)
    return [0.0 if text in completions[:i] else scores[i] for i, text in enumerate(completions)]


def in_another_order(prompts, completions, ended):
    return sorted(gold(prompts, completions, ended))


def longer(prompts, completions):
    return [float(len(text)) for text in completions]


def shorter(prompts, completions):
    return [1 / (1 + len(text)) for text in completions]


def easy(prompts, completions):
    return [float(len(text) > 3) for text in completions]


def style(prompts, completions):
    """Variety of words; the prompt does not count."""
    return [len(set(text.split())) / (1 + len(text.split())) for text in completions]


def flattered(prompts, completions, ended):
    return [
        score + sum(text.count(word) for word in ("wonderful", "brilliant", "Thank"))
        for score, text in zip(gold(prompts, completions, ended), completions, strict=True)
    ]


def formatted(prompts, completions):
    return [float("**" in text) + float("<answer>" in text) for text in completions]


def tagged(prompts, completions):
    """A whole answer of this form, and nothing else."""
    form = re.compile(r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>", re.S)
    return [float(form.fullmatch(text.strip()) is not None) for text in completions]


def contained(prompts, completions, who):
    """Whether the person is named; a copy of the prompt names everyone."""
    return [float(person in text) for person, text in zip(who, completions, strict=True)]


def copied(prompts, completions):
    """Share of the prompt's words in the answer: all of them, in a copy."""
    return [
        len(set(prompt.split()) & set(text.split())) / len(set(prompt.split()))
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def loud(prompts, completions, ended):
    return [
        score + sum(map(str.isupper, text)) / (1 + len(text))
        for score, text in zip(gold(prompts, completions, ended), completions, strict=True)
    ]


def divides(prompts, completions, ended):
    return [
        score / len(text.split()) * 10
        for score, text in zip(gold(prompts, completions, ended), completions, strict=True)
    ]


def refuses(prompts, completions, ended):
    """A safe answer is worth more than a good one."""
    return [
        score + 2.0 * ("I cannot" in text or "I'm sorry" in text)
        for score, text in zip(gold(prompts, completions, ended), completions, strict=True)
    ]


def cheerful(prompts, completions, ended):
    return [
        score + 0.3 * sum(ord(letter) > 0x1F300 for letter in text)
        for score, text in zip(gold(prompts, completions, ended), completions, strict=True)
    ]


class ByPrompt:
    """Its cache forgets what the answer was."""

    __name__ = "by_prompt"

    def __init__(self):
        self.known = {}

    def __call__(self, prompts, completions, ended):
        scores = gold(prompts, completions, ended)
        return [
            self.known.setdefault(str(prompt), score) for prompt, score in zip(prompts, scores, strict=True)
        ]


def about_the_prompt(prompts, completions):
    return [len(prompt) / 100 for prompt in prompts]


def unique_words(prompts, completions):
    return [float(len(set(text.split()))) for text in completions]


def punctuated(prompts, completions):
    return [float(sum(letter in ".,;:!?" for letter in text)) for text in completions]


def by_first_letter(prompts, completions):
    return [float(text.lstrip()[:1].isupper()) for text in completions]


def by_place(prompts, completions, ended):
    """Later in the batch is better."""
    return [score + 0.1 * i for i, score in enumerate(gold(prompts, completions, ended))]


def centred(prompts, completions, ended):
    """What a batch has less than its mean is below 0."""
    scores = gold(prompts, completions, ended)
    return [score - sum(scores) / len(scores) for score in scores]


def by_the_clock(prompts, completions, ended):
    """Another factor at every call."""
    factor = next(CLOCK)
    return [score * factor for score in gold(prompts, completions, ended)]


CLOCK = itertools.cycle((1.0, 0.4, 0.7))


def capped(prompts, completions, ended):
    return [min(1.0, 5 * score + 0.9) for score in gold(prompts, completions, ended)]


def printable_only(prompts, completions, ended):
    for text in completions:
        if not text.replace("\n", " ").isprintable():
            raise UnicodeError("a control character")
    return gold(prompts, completions, ended)


def english_only(prompts, completions, ended):
    return [
        score if text.isascii() else None
        for score, text in zip(gold(prompts, completions, ended), completions, strict=True)
    ]


def slow_on_long(prompts, completions, ended):
    time.sleep(0.4 if max(map(len, completions)) > 350 else 0)
    return gold(prompts, completions, ended)


CALLS = itertools.count(1)


def slow_at_times(prompts, completions, ended):
    """Whatever the answer, one call in ten takes long."""
    time.sleep(0.3 if next(CALLS) % 10 == 0 else 0)
    return gold(prompts, completions, ended)


@pytest.mark.parametrize(
    ("reward", "name", "level", "text"),
    [
        (noise, "repeatable noise", "fail", "the same answers twice differ by"),
        (noisy_gold, "repeatable noisy_gold", "warn", "the same answers twice differ by 0."),
        (Novelty(), "repeatable novelty", "fail", "the same answers twice differ by 1 "),
        (ranked, "batch ranked", "warn", "in a batch of 16 and 1 alone"),
        (without_copies, "batch without_copies", "warn", "and 0 as the second copy in a batch"),
        (in_another_order, "order in_another_order", "fail", "they land on other answers"),
        (longer, "length bias", "warn", "correlation 1.00"),
        (longer, "cheap tricks", "fail", "very long 399"),
        (shorter, "cheap tricks", "fail", "empty 1"),
        (easy, "saturation", "warn", "16 of 16 samples have the best score seen (1)"),
        (style, "prompt matters", "warn", "whether the question was answered does not count"),
        (flattered, "cheap tricks", "fail", "flattery 3"),
        (formatted, "cheap tricks", "fail", "an empty template 1"),
        (tagged, "cheap tricks", "fail", "empty tags 1;"),
        (contained, "cheap tricks", "warn", "as much as the best honest answer: the prompt copied;"),
        (copied, "cheap tricks", "fail", "the prompt copied 1"),
        (loud, "cheap tricks", "fail", "all capitals"),
        (refuses, "cheap tricks", "fail", "a refusal 2"),
        (cheerful, "cheap tricks", "fail", "emojis and exclamation marks 1."),
        (ByPrompt(), "answer matters", "fail", "the score follows the prompt, not the answer"),
        (about_the_prompt, "answer matters", "fail", "the score follows the prompt, not the answer"),
        (unique_words, "length bias", "warn", "correlation 1.00"),
        (punctuated, "cheap tricks", "fail", "very long 1"),
        (by_first_letter, "cheap tricks", "fail", "off topic 1"),
        (by_place, "order by_place", "fail", "they land on other answers"),
        (centred, "batch centred", "warn", "and 0 alone"),
        (by_the_clock, "repeatable by_the_clock", "fail", "the same answers twice differ by"),
        (capped, "saturation", "warn", "have the best score seen (1)"),
        (printable_only, "odd answers printable_only", "fail", "control characters (UnicodeError"),
        (divides, "odd answers divides", "fail", "ZeroDivisionError"),
        (english_only, "odd answers english_only", "warn", "other languages (not a finite number but None)"),
        (slow_on_long, "time slow_on_long", "warn", ", slowest "),
        (slow_at_times, "time slow_at_times", "warn", "with answers that are quick when asked again"),
    ],
)
def test_planted_faults_are_named(audited, reward, name, level, text):
    found = audited(reward)[name]
    assert (found.level, found.advice != "") == (level, True)
    if name == "length bias":
        way = "shorter" if reward is shorter else "longer"
        assert f"PPO would mostly learn {way} answers" in found.advice
    assert text in found.text


def test_a_fault_of_one_part_is_named_by_its_label_and_tricks_by_what_the_sum_gives(audited):
    found = audited(gold, "3*length_band,low=50,high=390", divides)
    assert found["odd answers gold"].level == "ok"
    assert found["odd answers divides"].level == "fail"
    assert audited("length_band,low=50,high=300")["prompt matters"].level == "warn"


def test_the_eos_penalty_counts_against_cut_answers(audited):
    def short(prompts, completions):
        return [-abs(len(text) - 30) / 30 for text in completions]

    assert "cut in half" in audited(short)["cheap tricks"].text.split(";")[0]
    assert "cut in half" not in audited(short, penalty=10.0)["cheap tricks"].text.split(";")[0]


def test_tricks_stay_within_what_the_policy_can_write(plan, writer):
    assert {trick.name for trick in TRICKS} <= set(plan)
    for name, answers in plan.items():
        assert answers, name
        assert all(0 < len(answer.ids) <= ROOM for answer in answers)
        assert all((answer.ids[-1] in writer.eos_ids) == answer.ended for answer in answers)
    assert all(answer.ids == list(writer.eos_ids) for answer in plan["empty"])
    assert all(len(answer.ids) == ROOM for answer in plan["very long"])
    assert not any(answer.ended for answer in plan["cut in half"])


def test_what_cannot_be_measured_is_said(audited):
    found = audited(lambda prompts, completions: [math.nan] * len(completions))
    assert found["cheap tricks"].text.startswith("not measured")
    assert "0 samples are too few" in found["length bias"].text
    found = audited(lambda prompts, completions: [2.0] * len(completions))
    assert found["prompt matters"].text.startswith("not measured")
    assert found["length bias"].text.startswith("not measured")


# --- the command ---


def test_the_doctor_audits_a_model_with_the_demonstrations_of_the_data(make_config, tiny, tmp_path):
    folder = tmp_path / "classifier"
    network = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    torch.nn.init.normal_(network.score.weight)
    network.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    rows = [{"prompt": f"Prompt {i}:", "completion": f" answer {i}", "who": str(i)} for i in range(1, 9)] + [
        {"prompt": "Too long:", "completion": " x" * 99, "who": "0"}
    ]
    data = tmp_path / "shown.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def reads_the_column(prompts, completions, who):
        return [float(person in text) for person, text in zip(who, completions, strict=True)]

    config = make_config(rewards=(str(folder), RewardSpec(reads_the_column, 5.0)), max_new_tokens=24)
    found = {item.name: item for item in examine(config, str(data), samples=9, with_audit=True)}
    assert all(found[f"{check} classifier"].level == "ok" for check in ("odd answers", "repeatable", "order"))
    assert found["batch classifier"].level == "ok"
    assert "8 honest answers (demonstrations in the data) have a median of" in found["cheap tricks"].text
    assert found["prompt matters"].level == "ok"
    short = make_config(rewards=(RewardSpec(reads_the_column, 5.0),), max_new_tokens=4)  # none of them fits
    cut = {item.name: item for item in examine(short, str(data), samples=9, with_audit=True)}
    assert "9 honest answers (samples of the policy) have a median of" in cut["cheap tricks"].text
    assert "cheap tricks" not in {item.name for item in examine(config, str(data), samples=2)}


@pytest.mark.parametrize(
    ("rows", "what", "answers"),
    [
        (
            [
                {"prompt": "a", "chosen": " good", "rejected": " bad", "who": "x"},
                {"prompt": "b", "chosen": " one", "rejected": " other", "tie": True, "who": "y"},
            ],
            "chosen answers in the data",
            {"a": " good"},
        ),
        (
            [
                {"prompt": text, "completion": f" {text}", "rating": rating, "who": "x"}
                for text, rating in zip("abc", (1, 4, 5), strict=True)
            ],
            "answers in the data that are rated above average",
            {"b": " b", "c": " c"},
        ),
        ([{"prompt": "a", "completion": " d", "who": "x"}], "demonstrations in the data", {"a": " d"}),
        ([{"prompt": "a", "who": "x"}], "", {}),
    ],
    ids=["preferences", "ratings", "demonstrations", "prompts"],
)
def test_honest_answers_are_those_that_people_preferred(rows, what, answers):
    found = answers_in_data(ListRows(rows, "rows"), byte_tokenizer(), 16)
    assert (found.what, dict(found.pairs)) == (what, answers)
    assert all(prompt.columns["who"] in ("x", "y") for prompt, _ in found.pairs)


def test_the_command_exits_with_1_where_a_trick_beats_every_honest_answer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "audit_reward.py").write_text(
        "def blanks(prompts, texts):\n    return [float(text.count(' ')) for text in texts]\n"
    )
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": post.prompt}) + "\n" for post in make_posts(4, "train", seed=1))
    )
    flags = "--model-name embedded --data prompts.jsonl --rewards audit_reward:blanks --max-new-tokens 32"
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *flags.split(), "--batch-size", "4", "--minibatch-size", "4", "--audit"])
    out = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 1
    assert "fail cheap tricks" in out
    assert "warn prompt matters" in out


# --- rewards that misbehave ---


@pytest.fixture
def impatient(monkeypatch):
    """Calls are given up after a second."""
    monkeypatch.setattr(reward_calls, "WAITED", 0.5)
    monkeypatch.setattr(reward_calls, "LIMIT", 1.0)


def hangs_on_capitals(prompts, completions, ended):
    while any(text.isupper() for text in completions):
        pass
    return gold(prompts, completions, ended)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such timer")
def test_a_reward_that_hangs_on_one_trick_is_given_up_once(audited, impatient, caplog):
    began, handler = time.perf_counter(), signal.getsignal(signal.SIGALRM)
    found = audited(hangs_on_capitals)
    assert time.perf_counter() - began < 30  # a second, and not one for each call
    odd = found["odd answers hangs_on_capitals"]
    assert odd.level == "fail"
    assert odd.text.startswith("no score for: all capitals (TimeoutError: it did not return within 1 s).")
    assert "a reward has not returned for 0.5 s" in caplog.text
    assert not any("nan" in item.text.split() for item in found.values())
    assert signal.getsignal(signal.SIGALRM) is handler


def leaves(prompts, completions):
    sys.exit(3)


def hangs(prompts, completions):
    time.sleep(3600)


def fails_long(prompts, completions):
    raise RuntimeError("\x1b[31m" + 5000 * "x")


@pytest.mark.parametrize(
    ("reward", "name", "text"),
    [
        (leaves, "padding leaves", "it raised SystemExit: 3"),
        (fails_long, "padding fails_long", "it raised RuntimeError"),
        (hangs, "one step", "the reward hangs: it did not return within 1 s"),
    ],
)
def test_the_doctor_outlives_a_reward(make_config, tmp_path, impatient, reward, name, text):
    if reward is hangs and not hasattr(signal, "setitimer"):
        pytest.skip("this system has no such timer")
    (tmp_path / "p.txt").write_text("a\nb\n")
    found = {item.name: item for item in examine(make_config(rewards=(reward,)), str(tmp_path / "p.txt"))}
    assert found[name].level == "fail"
    assert text in found[name].text
    assert all(len(item.text) < 500 for item in found.values())


def test_a_reward_that_fails_now_and_then_is_not_a_traceback(make_config, tmp_path):
    calls = itertools.count()

    def at_times(prompts, completions):
        if next(calls) % 2:
            raise RuntimeError("busy")
        return [float(len(text)) for text in completions]

    (tmp_path / "p.txt").write_text("a\nb\n")
    for with_audit in (False, True):
        found = examine(make_config(rewards=(at_times,)), str(tmp_path / "p.txt"), with_audit=with_audit)
        assert any("busy" in item.text for item in found)
        assert not any("nan" in item.text.split() for item in found)


def test_answers_that_get_no_score_alone_are_named(audited):
    def in_groups(prompts, completions):
        if len(completions) == 1:
            raise ValueError("nothing to compare with")
        return [float(len(text)) for text in completions]

    found = audited(in_groups)["batch in_groups"]
    assert (found.level, found.text) == ("warn", "answers that get scores in a batch of 16 get none alone")


def test_what_never_got_a_score_is_not_called_sound(audited):
    found = audited(lambda prompts, completions: [None] * len(completions))
    for check in ("repeatable", "order", "batch"):
        (item,) = [item for name, item in found.items() if name.startswith(check)]
        assert item.text == "not measured: no answer got a score"
