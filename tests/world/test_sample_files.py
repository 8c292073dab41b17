"""`proxima data sample`: every file is what its line says, and the settings are ones the commands take."""

import pytest

from proxima.cli import main, parse
from proxima.data import (
    kinds_of,
    open_rows,
    read_demonstrations,
    read_preferences,
    read_prompts,
    read_ratings,
)
from proxima.world.posts import facts_of, held_out


@pytest.fixture
def folder(tmp_path, capsys):
    main(["data", "sample", str(tmp_path / "data")])
    return tmp_path / "data"


def test_every_file_is_what_its_line_says(folder, capsys):
    printed = capsys.readouterr().out.splitlines()
    assert {line.split()[0].rsplit("/", 1)[1] for line in printed} == {path.name for path in folder.iterdir()}
    kinds = {path.stem: next(iter(kinds_of(open_rows(str(path))))) for path in folder.glob("*.jsonl")}
    assert kinds == {
        "prompts": "prompts",
        "held_out": "prompts",
        "demonstrations": "demonstrations",
        "preferences": "preferences",
        "ratings": "ratings",
    }
    assert len(read_prompts(folder / "prompts.jsonl")) == 1280
    assert len(read_demonstrations(folder / "demonstrations.jsonl")) == 500
    assert len(read_preferences(folder / "preferences.jsonl")) == 5532
    assert {row.rating for row in read_ratings(folder / "ratings.jsonl")} == {1, 2, 3, 4, 5}


def test_held_out_posts_are_of_combinations_that_no_training_post_has(folder):
    for name, expected in (("prompts", False), ("demonstrations", False), ("held_out", True)):
        posts = [facts_of(str(prompt)) for prompt in read_prompts(folder / f"{name}.jsonl")]
        assert {held_out(post.facts["who"], post.facts["what"]) for post in posts} == {expected}


def test_the_settings_are_ones_the_commands_take(folder):
    train = parse(
        [
            "train",
            "--config",
            str(folder / "ppo.yaml"),
            "--data",
            "x",
            "--rewards",
            "length_band,low=5,high=20",
        ]
    )
    assert (train.ppo.model_name, train.ppo.learning_rate) == ("embedded", 2e-3)
    for command, settings in (("sft", "finetuning"), ("reward", "reward_training")):
        parsed = parse([command, "--config", str(folder / "reward.yaml"), "--data", "x"])
        assert getattr(parsed, settings).model_name == "embedded"


def test_the_same_bytes_every_time_and_nothing_overwritten(folder, tmp_path, capsys):
    main(["data", "sample", str(tmp_path / "again")])
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    with pytest.raises(SystemExit) as stop:
        main(["data", "sample", str(folder)])
    assert stop.value.code == 2
    assert "new or empty" in capsys.readouterr().err
