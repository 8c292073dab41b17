"""examples/tldr_real/: the measures against numbers worked out by hand, the pipeline from posts to tables with the small
model of the package, interrupted and resumed, and bad input.

Where the package rouge-score is not installed, `PlainScorer` stands for it; `make test-peer` has the package, and a
test that compares the two.
"""

import json
import math
import random
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import Crash

from examples.tldr_real import evaluate, measures, run, table
from proxima.base_setup import load_tokenizer
from proxima.cli import parse
from proxima.evaluator import saved_config
from proxima.ppo_trainer import PPOTrainer
from proxima.rewards.ready_made_rewards import length_band
from proxima.runs import Run

WORDS = (
    "cat",
    "dog",
    "rain",
    "house",
    "friend",
    "walked",
    "found",
    "lost",
    "train",
    "money",
    "happy",
    "school",
)
PPO_YAML = str(Path(run.__file__).parent / "ppo.yaml")


def post(rng, words=20):
    body = " ".join(rng.choices(WORDS, k=words))
    title = " ".join(rng.choices(WORDS, k=3))
    return {
        "title": title,
        "prompt": f"SUBREDDIT: r/pets\n\nTITLE: {title}\n\nPOST: We {body}. It rained.\n\nTL;DR:",
        "completion": " " + " ".join(rng.choices(WORDS, k=6)),
    }


def write_posts(folder, train=60, valid=8, seed=0):
    """A folder in the TL;DR form."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train", train), ("valid", valid)):
        rows = [post(rng) for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# --- measures ---


class PlainScorer:
    """ROUGE without stemming, in plain Python."""

    def score(self, target, prediction):
        left, right = (re.findall("[a-z0-9]+", text.lower()) for text in (target, prediction))
        pairs = [Counter(pairwise(each)) for each in (left, right)]
        found = {
            "rouge1": self.f1((Counter(left) & Counter(right)).total(), len(left), len(right)),
            "rouge2": self.f1((pairs[0] & pairs[1]).total(), pairs[0].total(), pairs[1].total()),
            "rougeL": self.f1(self.longest(left, right), len(left), len(right)),
        }
        return {name: SimpleNamespace(fmeasure=value) for name, value in found.items()}

    def longest(self, left, right):
        """Length of the longest common subsequence."""
        row = [0] * (len(right) + 1)
        for word in left:
            new = [0]
            for at, other in enumerate(right):
                new.append(row[at] + 1 if word == other else max(row[at + 1], new[at]))
            row = new
        return row[-1]

    @staticmethod
    def f1(shared, target, prediction):
        return 2 * shared / (target + prediction) if shared else 0.0


PACKAGE = measures.scorer


@pytest.fixture(scope="module", autouse=True)
def plain_scorer():
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("rouge_score") is None:
            patch.setattr(measures, "scorer", PlainScorer)
        yield


def test_rouge_is_what_is_worked_out_by_hand():
    # words: 3 of 4 in each; pairs: "my cat" of 3 in each; in order: my cat ... lost
    found = measures.rouge(["my cat got lost"], ["my cat is lost"])
    assert found["rouge_1"] == pytest.approx([3 / 4])
    assert found["rouge_2"] == pytest.approx([1 / 3])
    assert found["rouge_l"] == pytest.approx([3 / 4])
    # precision 2/2, recall 2/6; "lost cat" is in another order
    found = measures.rouge(["my cat got lost in town"], ["lost cat"])
    assert found["rouge_1"] == pytest.approx([2 * 1 * (1 / 3) / (1 + 1 / 3)])
    assert found["rouge_2"] == [0]
    assert found["rouge_l"] == pytest.approx([2 * (1 / 2) * (1 / 6) / (1 / 2 + 1 / 6)])
    assert measures.rouge(["My cat!", "a"], ["my CAT", ""])["rouge_l"] == [1, 0]


def test_the_package_gives_the_same_and_stems():
    pytest.importorskip("rouge_score")
    rng = random.Random(0)
    for _ in range(50):
        texts = [" ".join(rng.choices(("cat", "dog", "rain", "work"), k=rng.randint(0, 8))) for _ in range(2)]
        theirs, ours = PACKAGE().score(*texts), PlainScorer().score(*texts)
        assert all(
            theirs[name].fmeasure == pytest.approx(ours[name].fmeasure) for name in measures.ROUGE.values()
        )
    assert PACKAGE().score("lost cats", "lost cat")["rougeL"].fmeasure == 1


def test_the_reward_reads_the_summary_of_each_prompt():
    assert measures.rouge_l(["x", "x"], ["cat", "dog"], summary=["cat", "cat"]) == [1, 0]


def test_copied_is_the_share_of_four_words_in_a_row_from_the_prompt():
    prompt = "TITLE: My cat POST: My cat sleeps on the keyboard, all day. TL;DR:"
    assert measures.copied(prompt, "my cat sleeps on the keyboard") == 1
    assert measures.copied(prompt, " My cat SLEEPS on: a chair") == pytest.approx(
        1 / 3
    )  # of three, the first
    assert measures.copied(prompt, "the keyboard on sleeps cat") == 0
    assert math.isnan(measures.copied(prompt, "my cat sleeps"))


def test_the_first_sentence_is_the_post_s():
    assert (
        measures.first_sentence("TITLE: A. POST: We came\n home. Then we slept.\n\nTL;DR:") == "We came home."
    )
    assert measures.first_sentence("POST: no end TL;DR:") == "no end"
    assert measures.first_sentence("POST: " + "word " * 60 + "TL;DR:") == ("word " * 40).strip()
    assert measures.first_sentence("Why?") == "Why?"


def test_the_length_band_of_the_settings_falls_outside_of_10_to_40_tokens():
    specs = parse(["train", "--config", PPO_YAML, "--data", "x"]).ppo.rewards
    (band,) = [spec for spec in specs if spec.source == "length_band"]
    lengths = [0, 5, 10, 40, 60, 80, 100]
    ids = [[7] * length for length in lengths]
    assert length_band(**band.options)(["x"] * 7, [""] * 7, ids) == pytest.approx([0, 0.5, 1, 1, 0.5, 0, 0])


def test_a_win_rate_over_seeds_counts_each_post_once():
    def side(rouge_l, reward_model):
        return {"each": {"rouge_l": rouge_l, "reward_model": reward_model}}

    def seed(ours):
        models = dict.fromkeys(evaluate.MODELS, side([0.5, 0.5, 0.5], [0, None, 0]))
        models[evaluate.BY_ROUGE] = side(ours, [1, 1, -1])
        return {**dict.fromkeys(evaluate.DECODING, models), evaluate.PERSON: side([1, 1, 1], [2, 2, -2])}

    seeds = [seed([0.6, 0.5, 0.4]), seed([0.6, 0.6, 0.4])]
    found = evaluate.win_rates(seeds)["greedy"]["PPO (ROUGE-L) against after SFT"]
    assert found["rouge_l"]["seeds"] == pytest.approx([1.5 / 3, 2 / 3])
    assert found["rouge_l"]["rate"] == pytest.approx((1 + 0.75 + 0) / 3)
    assert found["rouge_l"]["prompts"] == 3
    assert found["reward_model"]["rate"] == found["reward_model"]["seeds"][0] == 0.5  # one post has no score
    person = evaluate.win_rates(seeds)["sampled"]["PPO (ROUGE-L) against the person"]
    assert set(person) == {"reward_model"}
    assert person["reward_model"]["rate"] == pytest.approx(1 / 3)


# --- the pipeline ---


FASTER = {"sft": "0.01", "reward": "0.003", "train": "0.003"}  # two updates shall be seen in the answers


def small_form():
    flags = {name: [*given, "--learning-rate", FASTER[name]] for name, given in run.SHORT.flags.items()}
    return replace(run.SHORT, flags=flags)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Posts, and the folder of a seed that ran from the beginning to the end."""
    place = tmp_path_factory.mktemp("tldr")
    write_posts(place / "posts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SHORT", small_form())
        start(place)
    return place


def start(place, *more):
    run.main(
        [str(place / "posts"), "--out", str(place / "out"), "--model-name", "embedded", "--short", *more]
    )


@pytest.mark.long
def test_the_splits_share_no_post_and_only_hold_short_ones(done):
    folder = done / "out" / "seed-0"
    splits = {name: rows_of(folder / f"{name}.jsonl") for name in (*run.SHORT.posts, "held_out")}
    assert {name: len(rows) for name, rows in splits.items()} == {**run.SHORT.posts, "held_out": 4}
    prompts = [row["prompt"] for rows in splits.values() for row in rows]
    assert len(set(prompts)) == len(prompts)
    tokenizer = load_tokenizer("embedded")
    assert all(len(tokenizer(prompt)["input_ids"]) <= run.SHORT.prompt_tokens for prompt in prompts)


@pytest.mark.long
def test_preferences_are_the_person_s_summary_over_a_sample_of_the_sft_model(done):
    folder = done / "out" / "seed-0"
    for posts, pairs in (("reward", "preferences"), ("dev", "preferences-dev")):
        for post, pair in zip(
            rows_of(folder / f"{posts}.jsonl"), rows_of(folder / f"{pairs}.jsonl"), strict=True
        ):
            assert (pair["prompt"], pair["chosen"]) == (post["prompt"], post["completion"])
            assert pair["rejected"] != pair["chosen"]
    settings = (folder / "reward" / "finetuning.yaml").read_text(encoding="utf-8")
    assert f"sft_adapter: {folder / 'sft'}" in settings


@pytest.mark.long
def test_the_runs_have_the_two_rewards_and_the_sft_model_as_reference(done):
    folder = done / "out" / "seed-0"
    by_rouge, by_reward = (saved_config(folder / name) for name in evaluate.RUNS.values())
    assert [spec.label for spec in by_rouge.rewards] == ["rouge_l", "length_band"]
    assert [spec.source for spec in by_reward.rewards] == [str(folder / "reward")]
    assert by_rouge.sft_adapter == by_reward.sft_adapter == str(folder / "sft")
    for name in evaluate.RUNS.values():
        assert [step.get("failed_rewards", 0) for step in rows_of(folder / name / "metrics.jsonl")] == [
            0,
            0,
            0,
        ]
    rows = {row["prompt"]: row["summary"] for row in rows_of(folder / "dev.jsonl")}
    for sample in Run(folder / "ppo-rouge").samples():
        if sample["kind"] == "followed":
            summary = rows[sample["prompt"]]
            assert sample["reward"] >= 10 * measures.rouge([summary], [sample["text"]])["rouge_l"][0] - 1e-5


@pytest.mark.long
def test_the_results_follow_from_the_answers(done):
    folder = done / "out" / "seed-0"
    results = evaluate.read_json(folder / "results.json")
    held_out = rows_of(folder / "held_out.jsonl")
    summaries = [row["summary"] for row in held_out]
    assert results["posts"] == 4
    for decoding in ("sampled", "greedy"):
        for name in evaluate.MODELS:
            found = results[decoding][name]
            rouge = measures.rouge(summaries, found["answers"])
            assert found["each"]["rouge_l"] == pytest.approx(rouge["rouge_l"])
            for measure, column in rouge.items():
                assert found["means"][measure] == pytest.approx(sum(column) / 4)
            shares = [
                measures.copied(row["prompt"], text)
                for row, text in zip(held_out, found["answers"], strict=True)
            ]
            known = [share for share in shares if not math.isnan(share)]
            assert found["means"]["copied"] == (pytest.approx(sum(known) / len(known)) if known else None)
            assert 0 < found["means"]["tokens"] <= 24
            assert 0 <= found["means"]["eos_rate"] <= 1
    by_model = results["greedy"]
    assert by_model[evaluate.BEFORE]["answers"] != by_model[evaluate.SFT]["answers"]
    assert all(results["sampled"][name]["means"]["kl"] > 0 for name in evaluate.RUNS)
    assert results["the person"]["means"]["rouge_l"] == 1
    assert results["first sentence"]["means"]["copied"] == 1
    assert results["win_rates"] == evaluate.win_rates([results])


@pytest.mark.long
def test_what_is_complete_is_not_repeated_and_seeds_are_joined(done, capsys):
    folder = done / "out" / "seed-0"
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    start(done)
    shown = capsys.readouterr().out
    assert all(f"{name}: complete\n" in shown for name in run.STAGES)
    written = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert written == {"task.json", "results.md"}
    other = shutil.copytree(folder, done / "copied" / "seed-1")
    results = evaluate.read_json(other / "results.json")
    results["greedy"][evaluate.SFT]["means"]["rouge_1"] += 0.5
    (other / "results.json").write_text(json.dumps(results))
    table.main([str(folder), str(other), "--out", str(done / "both.md")])
    text = (done / "both.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == text + "\n"
    low = evaluate.read_json(folder / "results.json")["greedy"][evaluate.SFT]["means"]["rouge_1"]
    assert f"| after SFT | {low + 0.25:.3g} ({low:.3g} to {low + 0.5:.3g}) |" in text
    assert "by the reward model" in text
    table.main([str(folder), "--samples", "2"])
    assert capsys.readouterr().out.count("- the person: ") == 2


@pytest.mark.long
def test_interrupted_anywhere_it_gives_the_same(done, tmp_path, monkeypatch, capsys):
    """Killed while SFT saves, then in the middle of PPO; what is complete stays, PPO resumes."""
    monkeypatch.setattr(run, "SHORT", small_form())
    shutil.copytree(done / "posts", tmp_path / "posts")
    folder = tmp_path / "out" / "seed-0"
    with monkeypatch.context() as patch:
        patch.setattr("proxima.finetuning.sft_trainer.write_json", crash)
        with pytest.raises(Crash):
            start(tmp_path)
    assert (folder / "sft" / "finetuning.yaml").is_file()
    whole_step = PPOTrainer.ppo_step
    with monkeypatch.context() as patch:
        patch.setattr(
            PPOTrainer, "ppo_step", lambda self, *given: crash() if self.step else whole_step(self, *given)
        )
        with pytest.raises(Crash):
            start(tmp_path)
    assert "posts: complete" in capsys.readouterr().out
    start(tmp_path)
    shown = capsys.readouterr().out
    assert "reward: complete" in shown
    assert "resumed after step 1 of 2" in shown
    ours, theirs = (
        evaluate.read_json(place / "out" / "seed-0" / "results.json") for place in (tmp_path, done)
    )
    for results in (ours, theirs):
        assert Path(results["reward"]["unit"].pop("sft_adapter")).name == "sft"  # where it was: two folders
    assert ours == theirs


def crash(*_):
    raise Crash


def test_other_preferences_are_added(tmp_path, monkeypatch):
    """A stage alone: the model before SFT stands for the one after it."""
    write_posts(tmp_path / "posts", train=20)
    more = tmp_path / "more.json"
    more.write_text(
        json.dumps(
            [{"instruction": "Say hi.", "input": "", "output": "Hi.", "chosen": "Hi.", "rejected": "No."}]
        )
    )
    task = run.Task(tmp_path / "posts", tmp_path / "out", 0, "embedded", True, str(more))
    task.remember()
    run.write_posts(task)
    monkeypatch.setattr(run.Task, "ppo", lambda self: self.arguments("train", "ppo.yaml", "--data", "x"))
    run.write_preferences(task)
    rows = rows_of(task.folder / "preferences.jsonl")
    assert len(rows) == len(rows_of(task.folder / "reward.jsonl")) + 1
    assert rows[-1]["chosen"] == "Hi."
    assert "Say hi." in rows[-1]["prompt"]


# --- bad input ---


@pytest.fixture
def fails(tmp_path, monkeypatch, capsys):
    """The one line that a start ends with, without any training."""
    monkeypatch.setattr(run, "train_sft", crash)

    def line(*more):
        with pytest.raises(SystemExit) as stop:
            start(tmp_path, *more)
        text = str(stop.value.code)
        assert text.startswith("tldr_real: ")
        assert "\n" not in text
        return text

    return line


def test_a_folder_that_is_missing(fails, tmp_path):
    assert str(tmp_path / "posts" / "train.jsonl") in fails()


def test_a_file_that_is_missing(fails, tmp_path):
    write_posts(tmp_path / "posts")
    (tmp_path / "posts" / "valid.jsonl").unlink()
    assert str(tmp_path / "posts" / "valid.jsonl") in fails()
    assert not (tmp_path / "out" / "seed-0" / "sft.jsonl").exists()


def test_a_column_that_is_missing(fails, tmp_path):
    write_posts(tmp_path / "posts")
    (tmp_path / "posts" / "train.jsonl").write_text('{"prompt": "Why?"}\n')
    assert "train.jsonl holds no demonstrations: its columns are prompt" in fails()


def test_a_file_that_is_empty(fails, tmp_path):
    write_posts(tmp_path / "posts")
    (tmp_path / "posts" / "valid.jsonl").write_text("")
    assert "valid.jsonl" in fails()


def test_posts_that_do_not_fit_or_are_too_few(fails, tmp_path):
    write_posts(tmp_path / "posts", train=5)
    assert "has 5 posts that fit, too few to split" in fails()
    row = post(random.Random(0), words=300)
    (tmp_path / "posts" / "train.jsonl").write_text(json.dumps(row) + "\n")
    assert "none of the 1 posts in" in fails()


def test_a_folder_of_other_arguments(fails, tmp_path):
    write_posts(tmp_path / "posts", train=5)
    fails()
    assert "was begun with preferences , now it is other.json" in fails("--preferences", "other.json")


def test_without_rouge_score_the_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    monkeypatch.setattr(measures, "scorer", PACKAGE)
    PACKAGE.cache_clear()
    with pytest.raises(SystemExit) as stop:
        start(tmp_path)
    assert str(stop.value.code).startswith("tldr_real: ROUGE needs the package rouge-score")
    assert str(stop.value.code).endswith("run `pip install rouge-score`")
    assert not (tmp_path / "out").exists()


def test_seeds_of_other_tasks_are_not_joined(tmp_path):
    for seed, data in enumerate(("one", "two")):
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / "results.json").write_text("{}")
        task = {**dict.fromkeys(table.SAME, "x"), "data": data, "seed": str(seed)}
        (folder / "task.json").write_text(json.dumps(task))
    with pytest.raises(SystemExit, match="the seeds differ in data: one, two"):
        table.main([str(tmp_path / "0"), str(tmp_path / "1")])
    with pytest.raises(SystemExit, match="missing"):
        table.main([str(tmp_path / "missing")])


def test_a_seed_without_runs_is_not_evaluated(tmp_path):
    with pytest.raises(SystemExit, match=r"^tldr_real: .*ppo-rouge is not the folder of a finished"):
        evaluate.main([str(tmp_path)])
