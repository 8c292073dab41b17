"""tools/peer: transcripts become pairs that are split by prompt; what is reported follows from margins;
answers are judged by their own tokens."""

import gzip
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.peer.judged_answers import log_probabilities, sample
from tools.peer.preference_pairs import FOLDS, INSTRUCT, is_dialogue, read_pairs, split
from tools.peer.reward_models import by_fold, by_prompt, measures
from tools.peer.side_by_side import run_together

TALK = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHow are you?\n\nHuman: Fine: thanks\n\nAssistant:"


@pytest.fixture
def folder(tmp_path):
    """Six instructions, two of them the same, and three transcripts, of which one pair shares its turns."""
    rows = [
        {"instruction": f"Say {i % 5}", "input": "", "chosen": f"Please: {i}", "rejected": str(i)}
        for i in range(6)
    ]
    (tmp_path / INSTRUCT).parent.mkdir()
    (tmp_path / INSTRUCT).write_text(json.dumps(rows))
    (tmp_path / "hh-rlhf").mkdir()
    talks = [
        {"chosen": f"{TALK} Good.", "rejected": f"{TALK} Bad."},
        {"chosen": f"{TALK} Good.", "rejected": "\n\nHuman: Else\n\nAssistant: Bad."},
        {"chosen": f"{TALK} Same.", "rejected": f"{TALK} Same."},
    ]
    with gzip.open(tmp_path / "hh-rlhf" / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, talks)))
    return tmp_path


def test_a_transcript_is_turns_and_the_last_answer():
    turns, answer = split(f"{TALK} Good.")
    assert answer == "Good."
    assert [turn["content"] for turn in turns] == ["Hi", "Hello.\n\nHow are you?", "Fine: thanks"]
    assert is_dialogue(turns)
    assert not is_dialogue(turns[:2])


def test_pairs_are_split_by_prompt(folder, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    pairs = read_pairs(folder, tokenizer, {"instruct": 6, "hh": 9}, 200)
    assert sorted(pair.source for pair in pairs) == ["hh", *["instruct"] * 6]
    folds = {}
    for pair in pairs:
        assert folds.setdefault(pair.prompt, pair.fold) == pair.fold
    assert len(folds) == 6
    assert set(folds.values()) == set(range(FOLDS))
    short = read_pairs(folder, tokenizer, {"instruct": 2, "hh": 9}, 60)  # the transcript does not fit
    assert [pair.source for pair in short] == ["instruct"] * 2


def test_measures_of_margins():
    found = measures(torch.tensor([3.0, -0.1, 2.0, 0.2]))
    assert found["accuracy"] == 0.75
    assert found["by_margin"] == [0.0, 1.0, 1.0, 1.0]
    wrong = torch.sigmoid(-torch.tensor([3.0, -0.1, 2.0, 0.2]))
    assert found["brier"] == pytest.approx(float((wrong**2).mean()))


def test_intervals_of_a_difference():
    found = by_fold([0.1, 0.2, 0.3, 0.2, 0.2])
    assert found["mean"] == pytest.approx(0.2)
    assert found["high"] - found["mean"] == pytest.approx(2.776 * 0.0707107 / 5**0.5, rel=1e-4)
    drawn = by_prompt([1.0, 0.0] * 50, [f"prompt {i}" for i in range(100)])
    assert drawn["low"] < 0.5 < drawn["high"]
    alike = by_prompt([1.0, 0.0] * 50, [f"prompt {i // 2}" for i in range(100)])
    assert (alike["low"], alike["high"]) == (0.5, 0.5)  # every prompt has the same mean


def test_log_probabilities_do_not_depend_on_padding(tiny):
    network = AutoModelForCausalLM.from_pretrained(tiny).eval().requires_grad_(False)
    torch.manual_seed(0)
    prompts = [[5, 6, 7], [8]]
    answers = sample(network, prompts, 6, 256, 0)
    both = log_probabilities(network, prompts, answers, 0)
    for i in range(2):
        alone = log_probabilities(network, prompts[i : i + 1], answers[i : i + 1], 0)
        assert float(alone) == pytest.approx(float(both[i]), abs=1e-3)
        logits = network(input_ids=torch.tensor([prompts[i] + answers[i]])).logits[0].log_softmax(-1)
        start = len(prompts[i]) - 1
        by_hand = sum(float(logits[start + j, token]) for j, token in enumerate(answers[i]))
        assert float(both[i]) == pytest.approx(by_hand, abs=1e-3)


def test_jobs_run_together_and_a_failure_is_told_once_all_have_ended(tmp_path):
    jobs = {tmp_path / "a.log": ["--help"], tmp_path / "b.log": ["--wrong"]}
    with pytest.raises(SystemExit, match=r"failed: b\.log; the first ends with"):
        run_together("timeit", jobs)
    assert "timeit" in (tmp_path / "a.log").read_text()
