"""The world: posts, demonstrations, the gold score, the annotators; and the model that ships."""

import random
import statistics

import pytest

from proxima.base_setup.loading import EMBEDDED
from proxima.finetuning import read_preferences
from proxima.world import Annotator, gold_score, make_posts, write_summary
from proxima.world.demonstrations import STYLES, tell
from proxima.world.posts import Post, facts_of, held_out
from proxima.world.words import OPENING, SLOTS

POST = Post(
    prompt="SUBREDDIT: r/jobs\nTITLE: long story\nPOST: my boss cut my hours. this was last week. so is it "
    "my fault?\nTL;DR:",
    facts={"who": "boss", "what": "cut my hours", "when": "last week", "ask": "is it my fault"},
    sentences=("my boss cut my hours.", "this was last week.", "so is it my fault?"),
    others={"who": "mom", "when": "last night"},
)
GOOD = " my boss cut my hours last week, is it my fault?"


@pytest.mark.parametrize(
    ("summary", "ended", "gold"),
    [
        (GOOD, True, 1.0),
        (GOOD, False, 0.5),  # cut off
        (GOOD[:-1], True, 0.5),  # does not end with . or ?
        (" my boss cut my hours.", True, 0.5),  # two facts of four
        (" my mom cut my hours last week, is it my fault?", True, 0.5),  # three of four, and one invented
        (" my boss cut my hours last week at home, is it my fault?", True, 0.75),  # one invented
        (
            " basically, my boss cut my hours last week, is it my fault?",
            True,
            1.0,
        ),  # the opening is worth nothing
        (GOOD + " anyway." * 18, True, 0.3889),  # 29 words; 18 are free, none counts at 36
        (GOOD + " anyway." * 40, True, 0.0),
        (" my bossy cut my hourss.", True, 0.0),  # whole words only
        ("", True, 0.0),
        ("<script>", True, 0.0),
    ],
)
def test_the_gold_score_by_hand(summary, ended, gold):
    assert gold_score(POST, summary, ended) == pytest.approx(gold, abs=1e-3)


def test_posts_have_the_users_form_and_three_to_six_facts():
    for post in make_posts(300, "train"):
        lines = post.prompt.split("\n")
        assert lines[0].startswith("SUBREDDIT: r/")
        assert [line.split(":")[0] for line in lines] == ["SUBREDDIT", "TITLE", "POST", "TL;DR"]
        assert 3 <= len(post.facts) <= 6
        assert all(value in post.prompt for value in post.facts.values())
        assert all(post.others[slot] != value for slot, value in post.facts.items())
        assert facts_of(post.prompt).facts == post.facts


def test_posts_are_the_same_for_a_seed_and_differ_between_seeds():
    assert make_posts(50, "train", 1) == make_posts(50, "train", 1)
    assert make_posts(50, "train", 1) != make_posts(50, "train", 2)
    assert len({post.prompt for post in make_posts(500, "train")}) == 500


def test_evaluation_posts_combine_what_training_never_combines():
    train = {(post.facts["who"], post.facts["what"]) for post in make_posts(3000, "train")}
    evaluation = {(post.facts["who"], post.facts["what"]) for post in make_posts(500, "eval")}
    assert not train & evaluation
    assert all(held_out(*pair) for pair in evaluation)
    for slot in SLOTS:  # but no word of them is new
        assert {post.facts.get(slot) for post in make_posts(500, "eval")} - {None} <= set(SLOTS[slot])


def test_styles_differ_in_quality_as_they_should():
    posts, rng = make_posts(400, "train"), random.Random(0)
    gold = {
        style: statistics.mean(gold_score(post, write_summary(post, rng, style)) for post in posts)
        for style in STYLES
    }
    assert gold["faithful"] == 1.0
    assert max(value for style, value in gold.items() if style != "faithful") < 0.7
    assert sum(STYLES.values()) == pytest.approx(1)
    mixed = statistics.mean(gold_score(post, write_summary(post, rng)) for post in posts)
    assert 0.4 < mixed < 0.65
    assert tell(POST.facts, random.Random(1)) in (GOOD[1:], "is it my fault? my boss cut my hours last week.")


def test_annotators_follow_the_gold_score_through_noise_and_have_the_stated_bias():
    def share(first: str, second: str, **options: float) -> float:
        annotator = Annotator(0, **options)
        return statistics.mean(
            annotator.prefers_first(POST, (first, True), (second, True)) for _ in range(1000)
        )

    worse = " my boss cut my hours last week at home, is it my fault?"  # 0.75
    assert share(GOOD, worse) == pytest.approx(1 / (1 + 2.718281828 ** (-0.25 / 0.08)), abs=0.03)
    assert share(GOOD, worse, noise=1e-6) == 1.0
    assert share(GOOD, GOOD) == pytest.approx(0.5, abs=0.05)
    assert share(f" {OPENING}{GOOD}", GOOD) == pytest.approx(
        1 / (1 + 2.718281828 ** (-0.15 / 0.08)), abs=0.03
    )
    assert share(f" {OPENING}{GOOD}", GOOD, bias=0.0) == pytest.approx(0.5, abs=0.05)


def test_what_ships_is_small_and_in_order():
    names = {path.name for path in EMBEDDED.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "preferences_train.jsonl.gz",
        "preferences_eval.jsonl.gz",
    } <= names
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 8_000_000
    train, evaluation = (
        read_preferences(EMBEDDED / f"preferences_{split}.jsonl.gz") for split in ("train", "eval")
    )
    assert len(train) > 5000
    assert len(evaluation) > 800
    pairs = [
        {(f["who"], f["what"]) for f in (facts_of(item.prompt).facts for item in group)}
        for group in (train, evaluation)
    ]
    assert not pairs[0] & pairs[1]
    margins = [
        gold_score(facts_of(item.prompt), item.chosen, item.chosen_ended)
        - gold_score(facts_of(item.prompt), item.rejected, item.rejected_ended)
        for item in evaluation
    ]
    assert statistics.mean(margin > 0 for margin in margins if abs(margin) > 0.2) > 0.9
