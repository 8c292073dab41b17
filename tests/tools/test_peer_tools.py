"""tools/peer: transcripts become pairs that are split by prompt; what is reported follows from margins;
answers are judged by their own tokens; a comparison that was cut off continues."""

import gzip
import json
import math
import os
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.peer import ppo, reward_models, side_by_side
from tools.peer.judged_answers import log_probabilities, sample
from tools.peer.preference_pairs import FOLDS, INSTRUCT, Pair, is_dialogue, read_pairs, split, write_pairs
from tools.peer.reward_models import by_fold, by_prompt, measures
from tools.peer.side_by_side import Job, run_all, run_jobs

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
    assert found["high"] - found["mean"] == pytest.approx(2.776445 * 0.0707107 / 5**0.5, rel=1e-4)
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


# --- jobs ---


def job(folder, name, do="ours", fold=0, **more):
    return Job(name, Namespace(do=do, out=folder, together=2, limit=9, fold=fold, **more), ("pairs.json",))


class Process:
    """Ends at the second look, with its result written."""

    most, alive, started, environments = 0, 0, [], []

    def __init__(self, command, env, **_):
        Process.alive += 1
        Process.most = max(Process.most, Process.alive)
        self.flags = dict(flag[2:].split("=") for flag in command if flag.startswith("--"))
        self.looks, self.returncode = 0, None
        Process.started.append(self.flags["fold"])
        Process.environments.append(env["OMP_NUM_THREADS"])

    def poll(self):
        self.looks += 1
        if self.looks == 2:
            Process.alive -= 1
            self.returncode = 0
            fold = self.flags["fold"]
            job(Path(self.flags["out"]), f"ours-{fold}", fold=int(fold)).write({"seconds": 1.0})
        return self.returncode


@pytest.fixture
def processes(monkeypatch):
    monkeypatch.setattr(side_by_side.subprocess, "Popen", Process)
    monkeypatch.setattr(side_by_side, "LOOK", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    Process.most, Process.alive, Process.started, Process.environments = 0, 0, [], []
    side_by_side.digest.cache_clear()


def test_what_is_complete_is_not_repeated_and_not_all_run_at_once(tmp_path, processes):
    (tmp_path / "pairs.json").write_text("[]")
    jobs = [job(tmp_path, f"ours-{fold}", fold=fold) for fold in range(5)]
    assert run_jobs("module", jobs[:1], 1, math.inf) == []
    assert run_jobs("module", jobs, 2, math.inf) == []
    assert sorted(Process.started) == list("01234")
    assert Process.most == 2
    assert Process.environments == ["7", "3", "3", "3", "3"]
    other = job(tmp_path, "ours-0", rate=1)
    with pytest.raises(ValueError, match=r"ours-0\.json was made with rate None, now it is 1; give another"):
        run_jobs("module", [other], 1, math.inf)
    (tmp_path / "pairs.json").write_text("[1]")
    side_by_side.digest.cache_clear()
    fresh = job(tmp_path, "ours-0")
    with pytest.raises(ValueError, match=r"made with pairs\.json "):
        run_jobs("module", [fresh], 1, math.inf)


@pytest.mark.parametrize(("alone", "most"), [("yes", [1, 2]), ("no", [3])])
def test_the_first_jobs_run_alone_where_they_are_to_be_timed(tmp_path, monkeypatch, alone, most):
    calls = []

    def note(module, jobs, together, ends):
        calls.append((list(jobs), together))
        return []

    monkeypatch.setattr(side_by_side, "run_jobs", note)
    run_all("module", Namespace(out=tmp_path, together=5, limit=1, alone=alone), "a", "bc", lambda out: None)
    assert [len(jobs) for jobs, _ in calls if jobs] == most
    assert [together for jobs, together in calls if jobs][-1] == 5


def test_what_failed_and_what_was_stopped_is_told_with_the_report(tmp_path, capsys, monkeypatch):
    """Real processes: one fails, one does not end."""
    (tmp_path / "pairs.json").write_text("[]")
    (tmp_path / "fake_jobs.py").write_text(
        "import sys, time\nif sys.argv[1] == 'ours':\n    sys.exit('no such fold')\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    [failed] = run_jobs("fake_jobs", [job(tmp_path, "ours-0")], 1, math.inf)
    assert failed == "ours-0 failed; its log ends with\nno such fold\n"
    started = time.monotonic()
    jobs = [job(tmp_path, f"trl-{fold}", "trl", fold) for fold in range(2)]
    limits = Namespace(out=tmp_path, together=1, limit=1, alone="yes")
    with pytest.raises(SystemExit) as end:
        run_all("fake_jobs", limits, jobs[:1], jobs[1:], lambda out: print(f"report of {out}"))
    assert time.monotonic() - started < 60
    ending = "trl-0 was stopped at the time limit\ntrl-1 was not begun\nthe same command continues"
    assert str(end.value) == ending
    assert capsys.readouterr().out == f"report of {tmp_path}\n"


def record(margins, alone="no"):
    return json.dumps({"margins": margins, "seconds": 2.0, "settings": {"alone": alone}})


def test_a_comparison_that_is_not_complete_reports_what_is_there(tmp_path, capsys):
    pairs = [Pair("hh" if i % 2 else "instruct", i % FOLDS, f"prompt {i}", "a", "b") for i in range(20)]
    write_pairs(tmp_path / "pairs.json", pairs)
    for side, folds in (("ours", {0: [1, 1, 1, -1.0], 1: [1, 1, -1, -1.0]}), ("trl", {0: [1, -1, 1, -1.0]})):
        for fold, margins in folds.items():
            (tmp_path / f"{side}-{fold}.json").write_text(record(margins, "no" if fold else "yes"))
    reward_models.report(tmp_path)
    found = json.loads((tmp_path / "reward_models.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert found["ours"]["all"] | {"pairs": 8, "accuracy": 5 / 8} == found["ours"]["all"]
    assert (found["ours"]["hh"]["pairs"], found["trl"]["instruct"]["pairs"]) == (4, 2)
    assert found["ours less trl"]["by_fold"] == {"mean": 0.25, "low": None, "high": None, "folds": [0.25]}
    assert found["missing"][:3] == ["ours-2", "ours-3", "ours-4"]
    assert len(found["missing"]) == 3 + 4 + 5
    assert "default" not in found
    assert found["ours"]["seconds_alone"] == 2
    (tmp_path / "ours-0.json").write_text(record([1, 1, 1, -1.0]))
    (tmp_path / "trl-1.json").write_text(record([1, 1, 1, 1.0]))
    reward_models.report(tmp_path)
    found = json.loads((tmp_path / "reward_models.json").read_text())
    assert found["ours"]["seconds_alone"] is None
    assert found["ours less trl"]["by_fold"]["folds"] == [0.25, -0.5]
    assert found["ours less trl"]["by_fold"]["low"] < -0.125 < found["ours less trl"]["by_fold"]["high"]


def test_ppo_that_is_not_complete_reports_what_is_there(tmp_path, capsys):
    judged = {"kl": 1.0, "length": 3.0, "eos_rate": 0.5, "samples": [], "settings": {}}
    for name, rewards in (("ours-0", [1.0, 2.0]), ("ours-1", [2.0, 3.0]), ("trl-1", [1.0, 4.0])):
        (tmp_path / f"ppo-{name}.json").write_text(json.dumps({"rewards": rewards, **judged}))
    ppo.report(tmp_path)
    found = json.loads((tmp_path / "ppo.json").read_text())
    assert set(found) == {"ours 0", "ours 1", "trl 1", "ours against trl 1"}
    assert found["ours 0"]["reward"] == 1.5
    assert found["ours against trl 1"]["rate"] == 0.5
    assert "win_rate" not in found["ours 0"]  # against the base, which is not judged yet
    assert "ours 1 {'reward': 2.5" in capsys.readouterr().out
    (tmp_path / "ppo-base-0.json").write_text(json.dumps({"rewards": [0.0, 2.5], **judged}))
    ppo.report(tmp_path)
    assert json.loads((tmp_path / "ppo.json").read_text())["ours 1"]["win_rate"] == 1
