"""The study of active labels: both arms begin alike, no label is seen before its pair is chosen, and the table
says what a curve needs."""

from itertools import pairwise
from typing import ClassVar

import pytest

from examples.study import active_labels
from examples.study.active_labels import curve, labels_for, show
from proxima.finetuning import Preference


def pool(count):
    return [Preference(f"prompt {i}", f"chosen {i}", f"rejected {i}") for i in range(count)]


class FakeTrainer:
    """Notes what it is trained on; its accuracy is the share of it that is even."""

    seen: ClassVar[list[list[int]]] = []

    def __init__(self, config):
        self.config = config

    def train(self, labelled, held_out):
        numbers = [int(pair.prompt.split()[1]) for pair in labelled]
        self.seen.append(numbers)
        self.accuracy = sum(n % 2 == 0 for n in numbers) / len(numbers)


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(active_labels, "RewardTrainer", FakeTrainer)
    monkeypatch.setattr(active_labels, "read_preferences", lambda path: pool(60))
    monkeypatch.setattr(active_labels, "accuracy", lambda trainer, pairs: trainer.accuracy)
    order = lambda trainer, pairs: sorted(  # noqa: E731
        range(len(pairs)), key=lambda place: int(pairs[place].prompt.split()[1]) % 2
    )
    monkeypatch.setattr(active_labels, "doubtful", order)
    monkeypatch.setattr(FakeTrainer, "seen", [])


def test_both_choices_begin_alike_and_only_one_asks_the_model(world, tmp_path):
    rows = [
        curve(tmp_path / choice, 3, choice, (10, 20, 30), 50, 4, "cpu") for choice in ("random", "active")
    ]
    random_sets, active_sets = FakeTrainer.seen[:3], FakeTrainer.seen[3:]
    assert random_sets[0] == active_sets[0]
    for sets in (random_sets, active_sets):
        assert [len(numbers) for numbers in sets] == [10, 20, 30]
        assert all(set(small) < set(large) for small, large in pairwise(sets))
        assert all(len(set(numbers)) == len(numbers) for numbers in sets)
    assert all(number % 2 == 0 for number in active_sets[2][10:])  # what the model was least sure about
    assert rows[1]["accuracy"][30] > rows[0]["accuracy"][30]
    assert (
        curve(tmp_path / "again", 3, "random", (10,), 50, 4, "cpu")["accuracy"][10] == rows[0]["accuracy"][10]
    )


def test_accuracy_is_that_of_the_mean_of_the_heads_and_doubt_sorts_the_pairs(monkeypatch):
    import torch

    chosen = torch.tensor([[3.0, 1.0], [1.0, -2.0], [9.0, 8.0]])
    monkeypatch.setattr(active_labels, "scores", lambda trainer, pairs: (chosen, torch.zeros(3, 2)))
    assert active_labels.accuracy(None, pool(3)) == pytest.approx(2 / 3)
    assert active_labels.doubtful(None, pool(3)) == [1, 0, 2]


@pytest.mark.parametrize(
    ("accuracy", "needs"), [(0.7, 200), (0.75, 250), (0.8, 300), (0.85, 350), (0.95, None)]
)
def test_the_labels_that_a_curve_needs(accuracy, needs):
    assert labels_for(accuracy, {200: 0.7, 300: 0.8, 400: 0.9}) == (needs and pytest.approx(needs))


def test_a_curve_that_falls_again_has_not_reached_it():
    assert labels_for(0.8, {200: 0.7, 300: 0.85, 400: 0.75}) is None


def test_the_table(capsys):
    rows = [
        {"choice": choice, "seed": seed, "accuracy": {"200": start, "300": end + seed * step}}
        for seed in (0, 1)
        for choice, start, end, step in (("random", 0.7, 0.75, 0.1), ("active", 0.7, 0.85, 0.1))
    ]
    show(rows)
    told = capsys.readouterr().out.splitlines()
    assert told[2].split() == ["300", "0.8000", "0.9000", "+0.1000", "+-", "0.0000", "250", "(83%)"]
