"""examples/instructions/: every checker against texts written by hand, the prompts and what is held out, the reward in
PPO, and the evaluation of a run.

No test needs real weights: the model is a small GGUF file that the test writes.
"""

import json
import math
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from gguf_cases import small_network, write_small

from examples.instructions import evaluate, run
from examples.instructions.constraints import (
    CONFLICTS,
    KINDS,
    follows,
    is_met,
    list_items,
    mentions,
    met,
    score,
    sentences,
    words,
)
from examples.instructions.prompts import SHORT, TOPICS, can_be_met, draw, rows, write
from proxima import PPOConfig, PPOTrainer, Run
from proxima.core.types import Prompt
from proxima.data import read_prompts
from proxima.ppo_trainer import SequenceGenerator

LONG = "word " * 100_000
CODE = "def f(x):\n    return x ** 2  # squared, e.g. 4"
WORDLESS = (
    "",
    " ",
    "\n\n\t",
    "...",
    "?!",
    "—",
    "🙂🙂",
    "\u200b",
    "---\n***",
    ",,,",
    "\x00",
    "- \n- ",
    '"?"',
    "(。)",
)

CASES = {
    "words": (
        {"low": 3, "high": 5},
        [
            "one two three",
            "One, two; three!",
            "one two three four five",
            "don't stop now",
            "don’t stop now",
            "a well-known fact",
            "It costs 3.50 today",
            "see e.g. this one",
            "1. one\n2. two\n3. three",
            "- one\n- two two\n",
            "**bold** _and_ plain",
            "naïve café déjà vu",
            "cafe\u0301 au lait",
            "да это так",
            "one - two - three",
            "one—two—three",
            "ri\u00adver bank here",
        ],
        [
            "one two",
            "one two three four five six",
            "don't stop",
            "well-known",
            "1,000,000",
            "1. one\n2. two",
            "これは長い文です",
            "हिन्दी भाषा",
            "one... two...",
            LONG,
            CODE,
            "a b c d e f",
        ],
    ),
    "length": (
        {"most": 3},
        [
            "one",
            "one two three",
            "Don't do that!",
            "1) one\n2) two",
            "well-known fact",
            "日本語",
            "* a\n* b\n* c",
            "x = 1",
        ],
        [
            "one two three four",
            "a b c d",
            LONG,
            CODE,
            "1) one\n2) two\n3) three\n4) four",
            "one, two, three - four",
        ],
    ),
    "sentences": (
        {"count": 2},
        [
            "It rains. It pours.",
            "it rains. it pours.",
            "It rains! Really?",
            "It rains. It pours",
            "Mr. Smith met Dr. Jones. They talked.",
            "It costs 3.50 euros. That is cheap.",
            "Use fruit, e.g. apples. Then eat.",
            "J. K. Rowling wrote it. I read it.",
            "We met at 5 p.m. and left. It was late.",
            "She lives in the U.S. She likes it.",
            'He said "Really?" and left. She stayed.',
            "Well... maybe not. Who knows?!",
            "It rains.\nIt pours.",
            "The rain falls\non the roof. It is loud.",
            "Title\nOne sentence.",
            "- one item\n- another item",
            "今日は雨です。明日は晴れです。",
            "Really?! Yes!!!",
            '"It rains." "It pours."',
            "Visit example.com now. It is good.",
            "Apples, pears, etc. are fruit. I like them.",
            "It is so… The end.",
            "It rains. 🙂 It pours.",
            "(It rains.) It pours.",
            "See No. 5 first. Then go.",
            "So do I. Then we left.",
        ],
        [
            "It rains.",
            "It rains",
            "One. Two. Three.",
            "one. two. three.",
            "Mr. Smith met Dr. Jones.",
            "The U.S. Army came.",
            "It costs 3.50 euros.",
            "Wait... what?",
            '"Really?" she said.',
            "1. one\n2. two\n3. three",
            "It rains. It pours. It",
            "雨です。",
            LONG,
            "No. Yes. No.",
        ],
    ),
    "include": (
        {"words": ["river", "blue"]},
        [
            "The river is blue.",
            "Blue river",
            "RIVER BLUE",
            "river,blue",
            "A river's blue-green light",
            "“River” and ‘blue’",
            "- river\n- blue",
            "**river** _blue_.",
            "blue blue river",
            "The blue\nriver",
            "ri\u00adver blue",
            "(river) [blue]",
            "river/blue",
            "Blue? River!",
        ],
        [
            "The river.",
            "Blue",
            "rivers blue",
            "river bluer",
            "driver blue",
            "river_blue",
            "riverblue",
            "r i v e r blue",
            LONG,
            CODE,
            "река blue",
            "rіver blue",  # a Cyrillic letter
        ],
    ),
    "exclude": (
        {"word": "the"},
        [
            "A river.",
            "then and there",
            "other",
            "breathe",
            "th e",
            "they're here",
            "Thé vert",
            "the_end",
            LONG,
            CODE,
            "weather",
            "日本",
        ],
        [
            "the river",
            "The river",
            "THE RIVER",
            "see the",
            "the, end",
            "“the”",
            "the-end",
            "one\nthe",
            "- the",
            "a/the",
            "(the)",
            "t\u200bhe",
            "the's",
        ],
    ),
    "first_word": (
        {"word": "Today"},
        [
            "Today it rains.",
            "today",
            "TODAY!",
            "“Today” is a day",
            "**Today** we go",
            "- Today",
            "1. Today\n2. Tomorrow",
            "  \n Today",
            "Today, rain",
            "Today—rain",
            "\ufeffToday",
            "#Today",
            "...today",
        ],
        [
            "It is today",
            "Today's rain",
            "Todays",
            "To day",
            "Day",
            "Today-ish",
            "Сегодня",
            LONG,
            CODE,
            "Yes, today",
            "todayToday",
        ],
    ),
    "last_word": (
        {"word": "home"},
        [
            "We go home.",
            "home",
            "We go HOME!!!",
            "go “home”",
            "go home?",
            "go home...",
            "go (home)",
            "go **home**",
            "- go\n- home",
            "home 🙂",
            "go home\n\n",
            "go home —",
            "At last: home",
        ],
        [
            "home we go",
            "homes",
            "go home now",
            "go homeward",
            "go home-run",
            "at home's",
            "ho me",
            "дома",
            LONG,
            CODE,
            "home 1",
        ],
    ),
    "starts_with": (
        {"phrase": "In my opinion"},
        [
            "In my opinion, it rains.",
            "in my opinion",
            "IN MY OPINION!",
            "“In my opinion” he said",
            "**In my opinion** it",
            "- In my opinion",
            "In my\nopinion it rains",
            " In  my  opinion",
            "In my opinion: no",
            "1. In my opinion",
            "> In my opinion",
        ],
        [
            "In my",
            "In my opinions",
            "in your opinion",
            "It is, in my opinion, bad",
            "My opinion",
            "Inmy opinion",
            "In my own opinion",
            LONG,
            CODE,
            "In-my-opinion",
            "我的意见",
        ],
    ),
    "items": (
        {"count": 3},
        [
            "- one\n- two\n- three",
            "* one\n* two\n* three",
            "• one\n• two\n• three",
            "1. one\n2. two\n3. three",
            "1) one\n2) two\n3) three",
            "(1) one\n(2) two\n(3) three",
            "a) one\nb) two\nc) three",
            "Here:\n- one\n- two\n- three",
            "- one\n\n- two\n\n- three\n\nDone.",
            "  - one\n  - two\n  - three",
            "- one\n  - inner\n- two\n- three",
            "**1. one**\n**2. two**\n**3. three**",
            "1.one\n2.two\n3.three",
            "- one\r\n- two\r\n- three",
            "- один\n- два\n- три",
            "+ one\n+ two\n+ three",
            "– one\n– two\n– three",
            "1. 一\n2. 二\n3. 三",
        ],
        [
            "- one\n- two",
            "- one\n- two\n- three\n- four",
            "one\ntwo\nthree",
            "1. one 2. two 3. three",
            "one, two, three",
            "- one\n- two\n- ",
            "- one\n- two\n---",
            "**one**\n**two**\n**three**",
            "3.5 litres\n2.5 litres\n1.5 litres",
            "-one\n-two\n-three",
            LONG,
            CODE,
            "- one - two - three",
        ],
    ),
    "question": (
        {},
        [
            "Why?",
            "It rains. Why?",
            "Why?!",
            "Why!?",
            "Why???",
            "Really... why?",
            "Well…?",
            "He asked “why?”",
            "(Why?)",
            "**Why?**",
            "Why ?",
            "Why?\n\n",
            "なぜ？",
            "لماذا؟",
            "1 + 1 = ?",
            "- one\n- two?",
            "Is it (really)?",
        ],
        [
            "Why",
            "Why? Because.",
            "Rain. ?",
            "Rain! ?",
            "Why? 🙂",
            "What is it?.",
            "It rains!",
            "? it rains",
            LONG,
            CODE,
            "Why? Yes",
        ],
    ),
    "capitals": (
        {"word": "QUIET"},
        [
            "It is QUIET.",
            "QUIET",
            "QUIET!",
            "A QUIET, cold room",
            "“QUIET”",
            "**QUIET** please",
            "- QUIET\n- loud",
            "QUIET-LOOKING rooms",
            "QUIET's end",
            "quiet and QUIET",
            "one\nQUIET",
            "Q\u00adUIET",
        ],
        [
            "It is quiet.",
            "Quiet",
            "qUIET",
            "QUIETLY",
            "DISQUIET",
            "Q U I E T",
            "QUIET_ROOM",
            "LOUD",
            "ТИХО",
            LONG,
            CODE.upper(),
        ],
    ),
    "commas": (
        {"count": 1},
        [
            "one, two",
            "one ,two",
            ",one",
            "one,",
            "1,000",
            "一、二",
            "一，二",
            "نعم، لا",
            "- one,\n- two",
            'say "yes," he did',
            CODE,
        ],
        [
            "one two",
            "one, two, three",
            "one,, two",
            "one; two",
            "one. two.",
            "1,000,000",
            LONG,
            "一、二，三",
            "a, b\nc, d",
        ],
    ),
}
"""A constraint of every kind; texts that meet it, and texts that do not."""


def test_every_kind_has_twenty_cases_with_those_that_have_no_word():
    assert CASES.keys() == KINDS.keys()
    assert len(KINDS) >= 8
    for given, right, wrong in CASES.values():
        assert len(right) + len(wrong) + len(WORDLESS) >= 20 + 8 * bool(given)
        assert len({*right, *wrong}) == len(right) + len(wrong)


@pytest.mark.parametrize("kind", CASES)
def test_a_checker_is_right(kind):
    given, right, wrong = CASES[kind]
    constraint = {"kind": kind, **given}
    assert [text[:80] for text in right if not is_met(text, constraint)] == []
    assert [text[:80] for text in (*wrong, *WORDLESS) if is_met(text, constraint)] == []


def test_a_least_length():
    assert is_met("one two three", {"kind": "length", "least": 3})
    assert is_met(LONG, {"kind": "length", "least": 3})
    assert not is_met("one two", {"kind": "length", "least": 3})


def test_parts_of_a_text():
    assert words("1. The U.S. won't pay 3.50\n- twice-told") == [
        "The",
        "U.S.",
        "won't",
        "pay",
        "3.50",
        "twice-told",
    ]
    assert sentences("Mr. X. Y. Smith left. He ran!") == ["Mr. X. Y. Smith left.", " He ran!"]
    assert list_items("To do:\n1. wash\n   - hands\n2. eat") == ["wash", "eat"]


HOSTILE = (LONG, ". " * 100_000, "." * 100_000 + "x", "a" * 100_000 + "1. b", "a. " * 100_000, "- " * 100_000)


@pytest.mark.parametrize(
    "text", [*HOSTILE, "?" * 200_000, "a." * 100_000, "(" * 100_000, "\n" * 200_000, "*" * 100_000 + "x"]
)
def test_a_long_text_is_checked_in_linear_time(text):
    started = time.process_time()
    for kind, (given, _, _) in CASES.items():
        is_met(text, {"kind": kind, **given})
    assert time.process_time() - started < 30  # under a second; in quadratic time a minute and more


def test_the_reward_is_the_share_of_constraints_that_are_met_and_the_topic_is_one_more():
    asked = [{"kind": "sentences", "count": 1}, {"kind": "exclude", "word": "the"}]
    given = [asked, asked, asked, asked, asked[:1], asked[:1]]
    texts = [
        "Rain falls.",
        "It pours.",
        "The rain falls. It pours.",
        "The end. Really.",
        "Rain.",
        "It pours.",
    ]
    found = score(["p"] * 6, texts, given, ["rain"] * 6)
    assert found == pytest.approx([1, 2 / 3, 1 / 3, 0, 1, 1 / 2])
    succeeded = [follows(text, each, "rain") for text, each in zip(texts, given, strict=True)]
    assert succeeded == [share == 1 for share in found]
    assert met("", asked) == [False, False]
    assert score(["p"], [""], [asked], ["rain"]) == [0]


def test_a_topic_is_mentioned_in_singular_or_plural():
    right = [
        ("dogs", "A dog barks."),
        ("dogs", "DOGS!"),
        ("volcanoes", "the volcano"),
        ("storm", "two storms"),
    ]
    wrong = [("dogs", "doggedly"), ("tea", "teach"), ("chess", "ches"), ("dogs", ""), ("rain", "rainy")]
    assert [pair for pair in right if not mentions(*reversed(pair))] == []
    assert [pair for pair in wrong[:2] + wrong[3:] if mentions(*reversed(pair))] == []


# --- prompts ---


def test_the_same_seed_writes_the_same_files_and_another_seed_others(tmp_path):
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        write(tmp_path / name, train=60, held_out=30, seed=seed)
    for file in ("train.jsonl", "short.jsonl", "held_out.jsonl", "short_held_out.jsonl"):
        one, two, other = ((tmp_path / name / file).read_bytes() for name in ("one", "two", "other"))
        assert one == two != other
    assert len((tmp_path / "one" / "train.jsonl").read_text().splitlines()) == 60


def combination(row):
    return frozenset(item["kind"] for item in row["constraints"])


def test_topics_and_combinations_that_are_held_out_are_not_trained_on():
    train = [row for seed in range(3) for row in rows("train", 400, seed)]
    held_out = [row for seed in range(3) for row in rows("held_out", 200, seed)]
    assert {row["topic"] for row in train} == {*TOPICS["train"].split()}
    assert {row["topic"] for row in held_out} == {*TOPICS["held_out"].split()}
    assert {*TOPICS["train"].split()}.isdisjoint(TOPICS["held_out"].split())
    two = [{combination(row) for row in split if len(row["constraints"]) == 2} for split in (train, held_out)]
    assert two[0].isdisjoint(two[1])
    assert two[0] | two[1] | CONFLICTS == {frozenset((a, b)) for a in KINDS for b in KINDS if a != b}
    for combinations in two:
        assert set().union(*combinations) == {*KINDS}, "every kind is in some of both"
    singles = [row["constraints"][0]["kind"] for row in held_out if len(row["constraints"]) == 1]
    assert {*singles} == {*KINDS}
    assert max(map(singles.count, KINDS)) - min(map(singles.count, KINDS)) <= 3  # one for each seed


def test_the_short_form_has_one_constraint_of_a_few_kinds_and_no_topic_that_is_held_out():
    found = list(rows("train", 120, 0, short=True))
    assert {combination(row) for row in found} == {frozenset((kind,)) for kind in SHORT}
    assert {row["topic"] for row in found} == {*TOPICS["train"].split()}


def test_a_prompt_asks_for_its_constraints_and_names_its_topic():
    for row in rows("train", 200, 0):
        system, message = row["messages"]
        assert (system["role"], message["role"]) == ("system", "user")
        assert row["topic"] in message["content"]
        assert all(KINDS[item["kind"]].ask(item) in message["content"] for item in row["constraints"])
        assert can_be_met(row["constraints"])
        assert not any(mentions(KINDS[item["kind"]].ask(item), row["topic"]) for item in row["constraints"])
        assert json.loads(json.dumps(row)) == row


def test_constraints_that_contradict_each_other_are_drawn_again():
    kinds = ("exclude", "starts_with")
    contradicting = [{"kind": "exclude", "word": "in"}, {"kind": "starts_with", "phrase": "In my opinion"}]
    assert not can_be_met(contradicting)
    assert not can_be_met([{"kind": "include", "words": ["blue"]}, {"kind": "exclude", "word": "blue"}])
    random = Random(0)
    assert all(can_be_met(draw(kinds, "sea", random)) for _ in range(200))
    assert all("river" not in draw(("include",), "rivers", random)[0]["words"] for _ in range(200))


def test_each_kind_can_be_asked_for_and_met_by_some_text():
    """A drawn constraint is one that its own checker can say yes to."""
    fillers = ("rain " * count for count in range(1, 25))
    texts = [text.strip() for text in fillers]
    extra = ["- a\n" * count for count in range(1, 6)] + ["Rain. " * count for count in range(1, 4)]
    extra += ["RAIN", "rain, rain", "rain, rain, rain", "why?"]
    random = Random(1)
    for kind in KINDS:
        for _ in range(50):
            constraint = {"kind": kind, **KINDS[kind].draw(random)}
            named = [
                str(constraint.get("word", "")),
                str(constraint.get("phrase", "")),
                " ".join(constraint.get("words", [])),
            ]
            assert any(is_met(text, constraint) for text in (*texts, *extra, *filter(None, named))), (
                constraint
            )


def test_no_constant_answer_follows_many_prompts():
    """What keeps a policy that always says the same from passing."""
    prompts = [Prompt("x", row) for row in rows("held_out", 240, 0)]
    _, rates = evaluate.best_constant(prompts, evaluate.CRAFTED)
    assert rates["all"] < 0.25  # by a text that names every held-out topic
    assert rates["two, unseen together"] < 0.15
    without_topics = [text for text in evaluate.CRAFTED if "volcanoes" not in text]
    assert len(without_topics) == len(evaluate.CRAFTED) - 2
    assert evaluate.best_constant(prompts, without_topics)[1]["all"] == 0


# --- through the package ---


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_small(path, small_network("llama", max_position_embeddings=512))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("my-instructions", train=16, held_out=12)
    return tmp_path


def settings(model, folder, **changes):
    given = {
        "model_name": model,
        "rewards": (score,),
        "batch_size": 8,
        "max_new_tokens": 12,
        "learning_rate": 1e-3,
        "top_k": 0,
        "top_p": 1.0,
        "run_dir": str(folder / "runs"),
        "run_name": "instructions",
    }
    return PPOConfig(**{**given, **changes})


def test_ppo_takes_the_reward_and_its_column_through_the_chat_template(model, folder):
    trainer = PPOTrainer(settings(model, folder))
    prompts = read_prompts("my-instructions/train.jsonl", trainer.tokenizer)
    assert all(prompt.startswith("<|im_start|>") and prompt.endswith("A:") for prompt in prompts)
    results = trainer.train(prompts, num_epochs=1)
    assert len(results.metrics) == 2
    assert all(0 <= step["avg_reward"] <= 1 and step["failed_rewards"] == 0 for step in results.metrics)
    found = trainer.ppo_step(list(prompts[:8]))
    columns = [[prompt.columns[name] for prompt in prompts[:8]] for name in ("constraints", "topic")]
    expected = score(prompts[:8], found["generated_texts"], *columns)
    assert found["rewards"] == pytest.approx(expected)


def test_a_run_is_evaluated_before_and_after(model, folder, capsys):
    trainer = PPOTrainer(settings(model, folder, learning_rate=3e-2))
    run = trainer.train(
        read_prompts("my-instructions/train.jsonl", trainer.tokenizer), num_epochs=2
    ).run_folder
    evaluate.main([str(run), "--data", "my-instructions/held_out.jsonl", "--batch-size", "5"])
    shown = capsys.readouterr().out
    found = json.loads((Path(run) / "instructions.json").read_text(encoding="utf-8"))
    assert found["prompts"] == 12
    for name in ("before_sampled", "before_greedy", "after_sampled", "after_greedy"):
        assert len(found[name]["answers"]) == 12
        assert found[name]["success_low"] <= found[name]["success"]["all"] <= found[name]["success_high"]
        assert found[name]["perplexity_under_reference"] > 1
        assert name.replace("_", " ") in shown
    assert found["before_sampled"]["kl"] == 0
    assert found["after_sampled"]["kl"] > 0
    assert found["before_greedy"]["kl"] is found["after_greedy"]["kl"] is None
    assert "nan" not in shown
    assert found["before_sampled"]["answers"] != found["after_sampled"]["answers"]
    assert (
        found["before_greedy"]["perplexity_under_reference"]
        < found["before_sampled"]["perplexity_under_reference"]
    )
    best = found["best_constant"]["success"]["all"]
    prompts = read_prompts("my-instructions/held_out.jsonl", trainer.tokenizer)
    for text in (*evaluate.CRAFTED, *found["after_sampled"]["answers"]):
        assert evaluate.success(prompts, [text] * 12)["all"] <= best
    asked = {item["kind"] for prompt in prompts for item in prompt.columns["constraints"]}
    assert all(f"\n{name.replace('_', ' ')}  " in shown for name in asked)


def test_a_model_alone_is_measured_before(model, folder, capsys):
    evaluate.main(
        [
            "--model-name",
            model,
            "--data",
            "my-instructions/held_out.jsonl",
            "--limit",
            "4",
            "--max-new-tokens",
            "6",
        ]
    )
    found = json.loads((folder / "instructions.json").read_text(encoding="utf-8"))
    assert {*found} == {
        "prompts",
        "max_new_tokens",
        "asked",
        "before_sampled",
        "before_greedy",
        "best_constant",
    }
    assert found["prompts"] == 4
    assert "saved to instructions.json" in capsys.readouterr().out


def test_an_answer_does_not_depend_on_the_batches(model, folder):
    trainers = [PPOTrainer(settings(model, folder, batch_size=size)) for size in (3, 12)]
    prompts = read_prompts("my-instructions/held_out.jsonl", trainers[0].tokenizer)
    small, large = (evaluate.answer(trainer, prompts) for trainer in trainers)
    assert (small.texts, small.sizes, small.ended) == (large.texts, large.sizes, large.ended)
    assert small.ref_nll == pytest.approx(large.ref_nll, rel=1e-4)
    assert [len(trainers[0].tokenizer.encode(text)) > 0 for text in small.texts] == [
        size > 0 for size in small.sizes
    ]


@pytest.mark.parametrize("own", [{}, {"top_k": 7}, {"top_p": 0.6}], ids=["all", "top_k", "top_p"])
def test_kl_is_that_of_the_policy_that_acts(model, folder, own):
    """Of one token, by an exact sum over the vocabulary; greedy answers have none."""
    own = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, **own}
    trainer = PPOTrainer(settings(model, folder, max_new_tokens=1, temperature=1.0))
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.models.policy.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    prompt = read_prompts("my-instructions/held_out.jsonl", trainer.tokenizer)[0]
    ids = torch.tensor([trainer.tokenizer(prompt, add_special_tokens=False)["input_ids"]])
    logits = []
    for role in (trainer.models.policy, trainer.models.sft):
        with torch.no_grad(), role.active():
            logits.append(role.backbone.network(ids).logits[0, -1].double() / own["temperature"])
    chances, reference = logits[0].softmax(-1), logits[1].log_softmax(-1)
    order = chances.argsort(descending=True)
    before = chances[order].cumsum(-1) - chances[order]
    kept = order[: own["top_k"] or len(order)][before[: own["top_k"] or len(order)] < own["top_p"]]
    acting = chances[kept] / chances[kept].sum()
    exact = float((acting * (acting.log() - reference[kept])).sum())
    sampler = SequenceGenerator(trainer.models, trainer.tokenizer, replace(trainer.config, **own))
    tokens = sampler.sample([prompt] * len(kept))
    every = replace(tokens, response_ids=kept[:, None], mask=torch.ones(len(kept), 1, dtype=torch.bool))
    ratios = evaluate.log_ratios(sampler, every)[:, 0].double()
    assert exact > 0.01
    assert float(acting @ ratios) == pytest.approx(exact, rel=1e-3)
    one = evaluate.answer(trainer, [prompt], **own)
    drawn = (ratios - one.kl[0]).abs().argmin()
    assert one.kl[0] == pytest.approx(float(ratios[drawn]), abs=1e-4)
    at_1 = (logits[1] * own["temperature"]).log_softmax(-1)
    assert one.ref_nll[0] == pytest.approx(-float(at_1[kept[drawn]]), rel=1e-3)
    assert math.isnan(evaluate.answer(trainer, [prompt], top_k=1).kl[0])


def test_success_counts_all_constraints_of_a_prompt_and_each_of_a_kind():
    asked = [
        [{"kind": "commas", "count": 0}],
        [{"kind": "commas", "count": 0}, {"kind": "question"}],
        [{"kind": "question"}, {"kind": "words", "low": 1, "high": 2}],
        [{"kind": "commas", "count": 0}],
    ]
    prompts = [Prompt("x", {"constraints": each, "topic": "cars"}) for each in asked]
    found = evaluate.success(prompts, ["my car", "car, why?", "why cars?", "yes"])
    assert (found["all"], found["one constraint"]) == (0.5, 0.5)  # the last answer has no topic
    assert (found["two, unseen together"], found["question"]) == (0.5, 1)
    assert found["commas"] == pytest.approx(2 / 3)
    assert math.isnan(found["items"])


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(run, "write", lambda path: write(path, train=64, held_out=15))
    return ["--max-new-tokens", "8", "--limit", "8", "--batch-size", "4", "--epochs", "1"]


@pytest.mark.parametrize("form", ["ppo", "short"])
def test_one_command_shows_before_and_after_and_keeps_what_is_done(model, folder, tiny, form, capsys):
    moved = ["--learning-rate", "0.03", *(["--critic-warmup-steps", "0"] if form == "ppo" else [])]
    command = ["--form", form, "--seeds", "0", "1", "--model-name", model, *tiny, *moved]
    run.main(command)
    shown = capsys.readouterr().out
    assert shown.count("before:") == shown.count("after:") == 6
    folders = [folder / "runs" / f"instructions-{form}-{seed}" for seed in (0, 1)]
    results = [json.loads((each / "instructions.json").read_text(encoding="utf-8")) for each in folders]
    for when in ("before", "after"):
        assert results[0][f"{when}_sampled"]["answers"] != results[1][f"{when}_sampled"]["answers"]
    if form == "ppo":  # whose values move the policy where every reward is 0
        assert results[0]["before_sampled"]["answers"] != results[0]["after_sampled"]["answers"]
    page = (folder / "runs" / f"instructions-{form}.md").read_text(encoding="utf-8")
    assert run.table(results) in page
    assert "after sampled" in page.splitlines()[2]
    written = {path: path.stat().st_mtime_ns for each in folders for path in each.rglob("*")}
    run.main(command)
    assert {path: path.stat().st_mtime_ns for each in folders for path in each.rglob("*")} == written


def test_a_finished_run_is_not_the_answer_to_other_flags(model, folder, tiny, capsys):
    command = ["--form", "short", "--model-name", model, *tiny]
    run.main(command)
    path = folder / "runs" / "instructions-short-0"
    written = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    capsys.readouterr()
    for flag, before, after in (("--learning-rate", "0.001", "0.03"), ("--limit", "8", "12")):
        name = flag.strip("-").replace("-", "_")
        with pytest.raises(SystemExit, match=rf"^instructions: .*with {name} {before}, now it is {after}; "):
            run.main([*command, flag, after])
        assert "before:" not in capsys.readouterr().out
    run.main([*command, "--process-timeout", "700"])  # computes the same
    assert "before:" in capsys.readouterr().out
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == written


def test_the_short_form_is_asked_for_what_it_trains_on_about_other_topics(model, folder, tiny, capsys):
    run.main(["--form", "short", "--model-name", model, *tiny])
    shown = capsys.readouterr().out
    assert all(name not in shown for name in ("nan", "unseen together", "commas |"))
    found = json.loads((folder / "runs/instructions-short-0/instructions.json").read_text(encoding="utf-8"))
    held_out, trained = (lines(f"my-instructions/{name}.jsonl") for name in ("short_held_out", "short"))
    assert found["asked"] == [row["messages"][-1]["content"] for row in held_out]
    kinds, others = ({combination(row) for row in rows} for rows in (held_out, trained))
    assert kinds <= others == {frozenset([kind]) for kind in SHORT}
    assert {row["topic"] for row in held_out}.isdisjoint(row["topic"] for row in trained)


def lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_the_short_held_out_prompts_have_every_kind_equally_often(tmp_path):
    write(tmp_path, train=4)
    held_out = lines(tmp_path / "short_held_out.jsonl")
    kinds = Counter(next(iter(combination(row))) for row in held_out)
    assert set(kinds) == set(SHORT)
    assert len(set(kinds.values())) == 1
    assert 48 <= len(held_out) <= 96
    assert {row["topic"] for row in held_out} == set(TOPICS["held_out"].split())


def test_a_base_in_4_bits_has_folders_of_its_own(model, folder, tiny):
    run.main(["--form", "short", "--quantize", "none", "nf4", "--model-name", model, *tiny])
    for name, quantize in (("instructions-short", "none"), ("instructions-short-nf4", "nf4")):
        assert Run(folder / "runs" / f"{name}-0").config["quantize"] == quantize
        assert (folder / "runs" / f"{name}-0" / "instructions.json").is_file()
        assert (folder / "runs" / f"{name}.md").is_file()


def test_a_run_that_was_stopped_is_trained_to_its_end(model, folder, tiny, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "main", lambda arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.main(["--form", "short", "--model-name", model, *tiny])
    path = folder / "runs" / "instructions-short-0"
    (path / "results.json").unlink()  # as if it had been killed before it was written
    run.main(["--form", "short", "--model-name", model, *tiny])
    assert (path / "results.json").is_file()
    assert (path / "instructions.json").is_file()


def result(success, **more):
    names = ("all", *evaluate.GROUPS.values(), *KINDS)
    measured = {**dict.fromkeys(run.MEASURED, 1.0), **more}
    return {
        when: {"success": dict.fromkeys(names, rate), **measured}
        for when, rate in zip(
            ("before_sampled", "after_sampled", "before_greedy", "after_greedy", "best_constant"),
            success,
            strict=True,
        )
    }


def test_the_table_has_the_mean_over_seeds_and_students_interval():
    one, two = result((0.1, 0.5, 0.2, 0.6, 0.0)), result((0.2, 0.7, 0.2, 0.6, 0.0))
    head, _, first, *_ = run.table([one]).splitlines()
    assert head == "|  | before sampled | after sampled | before greedy | after greedy | best constant |"
    assert first == "| success, all | 0.10 | 0.50 | 0.20 | 0.60 | 0.00 |"
    first = run.table([one, two]).splitlines()[2]
    assert "0.60 (-0.67 to 1.87)" in first  # 0.6 +- 12.706 * 0.1414 / sqrt(2)
    assert first.count("(") == 5


@pytest.mark.parametrize("given", [["no-run"], ["--model-name", "no-model"]])
def test_what_cannot_be_evaluated_is_said_in_one_line(tmp_path, given, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=r"^instructions: .*no-(run|model)"):
        evaluate.main([*given, "--data", "no-file.jsonl"])
