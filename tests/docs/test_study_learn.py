"""examples/study/learn.py: each experiment in short, and jobs that run side by side."""

import json
from functools import partial

import pytest

from examples.study import learn
from proxima.world.demo import demo_pipeline as demo
from tests.world.test_demo import shorten


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["controllers", "rounds", "frontier"])
def test_the_long_experiments_in_short(tmp_path, monkeypatch, name, capsys):
    shorten(monkeypatch)
    monkeypatch.setattr(learn, "read_preferences", demo.read_preferences)
    monkeypatch.setattr(learn, "EVALUATION_POSTS", 6)
    monkeypatch.setattr(learn, "demo_reward_model", partial(demo.demo_reward_model, count=40))
    monkeypatch.setattr(learn, "LABELS", 24)
    monkeypatch.setattr(learn, "BEST_OF", 4)
    monkeypatch.setattr(learn, "COEFFICIENTS", (0.1, 0.0))
    kept = ("fixed-0.1", "budget-2")
    monkeypatch.setattr(learn, "CONTROLLERS", {key: learn.CONTROLLERS[key] for key in kept})
    learn.main([f"--{name}", "--seeds", "1", "--steps", "2", "--folder", str(tmp_path)])
    rows = json.loads((tmp_path / f"{name}.json").read_text())
    by_name = {row["run"]: row["ppo"] for row in rows}
    assert (
        list(by_name)
        == {
            "controllers": ["fixed-0.1-seed-1", "budget-2-seed-1"],
            "rounds": [f"{name}-of-24-to-3-nats-seed-1" for name in learn.ROUNDS],
            "frontier": [
                "kl-0.1-seed-1",
                "kl-0-seed-1",
                "best-of-1-seed-1",
                "best-of-2-seed-1",
                "best-of-4-seed-1",
            ],
        }[name]
    )
    assert all(0 <= ppo["gold"] <= 1 for ppo in by_name.values())
    if name == "rounds":
        assert {ppo["labels"] for ppo in by_name.values()} == {24}
    if name == "frontier":
        best = [by_name[f"best-of-{n}-seed-1"]["score"] for n in (1, 2, 4)]
        assert best == sorted(best)
    assert "over seeds" in capsys.readouterr().out


@pytest.mark.long
def test_jobs_give_their_results_in_order():
    assert learn.in_jobs(2, [partial(divmod, 7, number) for number in (2, 3, 5)]) == [(3, 1), (2, 1), (1, 2)]
    assert learn.in_jobs(1, [partial(abs, -3)]) == [3]
