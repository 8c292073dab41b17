"""The demo: a short one runs, is the same twice, and its page is harmless.

How well it learns is measured by `make demo`.
"""

import json

import pytest

from proxima.cli.demo_command import Demo
from proxima.runs import Run
from proxima.world import make_posts
from proxima.world.demo import demo_pipeline as demo
from proxima.world.demo.demo_report import write_report
from proxima.world.demo.gold_judge import Judgement
from tests.fake_run import HOSTILE, metrics_at, token_sample, write_run
from tests.pages.test_report import page_of


def shorten(monkeypatch):
    """A few posts and preferences: the same pipeline, in seconds."""
    monkeypatch.setattr(demo, "EVALUATION_POSTS", 12)
    shipped = demo.read_preferences
    monkeypatch.setattr(demo, "read_preferences", lambda path: shipped(path)[:40])
    monkeypatch.setitem(demo.PPO_SETTINGS, "batch_size", 8)


@pytest.fixture
def short(monkeypatch):
    shorten(monkeypatch)


def test_the_same_seed_gives_the_same_results_except_for_times(short, tmp_path):
    results = []
    for name in ("one", "two"):
        Demo(seed=3, steps=2, preferences=24, run_dir=tmp_path / name).run()
        text = (tmp_path / name / "demo" / "results.json").read_text()
        results.append({key: value for key, value in json.loads(text).items() if key != "seconds"})
    assert results[0] == results[1]
    assert set(results[0]) >= {
        "reward_model",
        "sft",
        "ppo",
        "win_rate_by_gold",
        "win_rate_by_reward_model",
        "curve",
    }
    assert results[0]["reward_model"]["preferences"] == 24, "as many as asked for"
    one, two = (tmp_path / name / "demo" for name in ("one", "two"))
    assert (one / "report.html").read_text() == (two / "report.html").read_text()
    assert (one / "ppo" / "policy" / "adapter_model.safetensors").is_file()


def test_preferences_can_be_labelled_live(short, tmp_path, monkeypatch):
    monkeypatch.setattr(
        demo, "make_posts", lambda count, split, seed: make_posts(min(count, 16), split, seed)
    )
    results = demo.run_demo(steps=1, relabel=True, run_dir=tmp_path, preferences=16)
    assert 0 < results["reward_model"]["preferences"] <= 16


def test_the_report_shows_the_numbers_and_trusts_no_text(tmp_path):
    measured = {"gold": 0.5, "score": 0.1, "kl": 1.0, "response_length": 9.0, "eos_rate": 1.0}
    results = {
        "seed": 0,
        "reward_model": {
            "preferences": 7,
            "accuracy": 0.8,
            "pairs": 5,
            "by_gold_gap": {HOSTILE: {"pairs": 5, "accuracy": 0.9}},
        },
        "sft": measured,
        "ppo": {**measured, "gold": 0.75},
        "win_rate_by_gold": {"rate": 0.7, "low": 0.6, "high": 0.8},
        "settings": {"steps": 2, "a": HOSTILE},
    }
    posts = make_posts(2, "eval")
    before = Judgement(
        [HOSTILE, "it is"],
        [0.5, 0.5],
        [0.1, 0.1],
        0.0,
        9.0,
        1.0,
        [token_sample(1, text=HOSTILE, prompt=HOSTILE)],
    )
    after = Judgement(
        [" basically, a & b", HOSTILE], [1.0, 0.5], [0.1, 0.1], 1.0, 9.0, 1.0, [token_sample(2, text=HOSTILE)]
    )
    run = Run(write_run(tmp_path / "ppo", 5))
    page, data = page_of(write_report(tmp_path / "r.html", results, posts, before, after, run))
    assert "their true quality went from 0.50 to 0.75 (1 is best)" in page
    assert "beat the ones from before training 70 % of the time" in page
    assert "0 of 2 summaries opened that way before, 1 after" in page
    assert "<img" not in page
    assert [step["label"] for step in data["tokens"]] == ["before PPO", "after PPO"]
    assert data["tokens"][0]["samples"][0]["columns"] == before.records[0]["columns"]
    assert data["charts"][0]["series"][0]["points"] == [
        [step, metrics_at(step, 5)["avg_reward"]] for step in range(1, 6)
    ]
    results["win_rate_by_gold"] = {"rate": 0.5, "low": 0.4, "high": 0.6}
    assert (
        "did not clearly change"
        in write_report(tmp_path / "r.html", results, posts, before, after, run).read_text()
    )


def test_the_demo_never_removes_what_is_not_a_demo(tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "metrics.jsonl").write_text("precious")
    with pytest.raises(ValueError, match="holds something other than a demo"):
        demo.run_demo(run_dir=tmp_path)
    assert (tmp_path / "demo" / "metrics.jsonl").read_text() == "precious"


def test_a_folder_of_runs_is_not_a_demo_and_one_that_was_stopped_is(tmp_path):
    (tmp_path / "runs" / "reward").mkdir(parents=True)  # a run of `proxima reward`
    with pytest.raises(ValueError, match="holds something other than a demo"):
        demo.fresh_folder(tmp_path / "runs")
    home = demo.fresh_folder(tmp_path / "demo")
    (home / "reward").mkdir()
    assert not (demo.fresh_folder(home) / "reward").exists()


def test_a_demo_of_no_steps_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"steps \(0\) must be at least 1"):
        Demo(steps=0, run_dir=tmp_path).run()
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_how_many_preferences_there_are(tmp_path):
    with pytest.raises(ValueError, match=r"preferences \(0\) must be at least 1"):
        Demo(preferences=0, run_dir=tmp_path).run()
    with pytest.raises(ValueError, match=r"preferences \(5533\) is more than the 5532 that ship"):
        Demo(preferences=5533, run_dir=tmp_path).run()
