"""The study of preferences to policy: a small one runs, and what is done is not repeated."""

import json

import pytest

from examples.study import preferences as study


@pytest.mark.long
def test_a_small_study_writes_a_row_and_never_repeats_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "POSTS", 8)
    monkeypatch.setattr(study, "EVERY", 1)
    monkeypatch.setattr(study, "BEST_OF", 2)
    given = {
        "reward": {"epochs": 1, "ensemble": 2},
        "reward_from": str(tmp_path),
        "reward_name": "small",
        "pairs": 40,
        "steps": 2,
        "ppo": {"batch_size": 8, "minibatch_size": 8},
        "preset": "",
        "doubt": 2.0,
        "best_of": True,
    }
    row = study.study_seed(0, tmp_path, "small", given)
    assert [point["step"] for point in row["curve"]] == [0, 1, 2]
    assert all(0 <= point["gold"] <= 1 for point in row["curve"])
    assert [one["n"] for one in row["best_of"]] == [1, 2]
    assert 0 < row["reward_model"]["shipped_accuracy"] < 1
    monkeypatch.setattr(study, "train_reward", lambda *rest: pytest.fail("trained again"))
    again = study.study_seed(0, tmp_path, "small", {**given, "ppo": {}})
    assert again == json.loads((tmp_path / "small-0" / "row.json").read_text())
    study.show([row])
    assert "small" in capsys.readouterr().out
