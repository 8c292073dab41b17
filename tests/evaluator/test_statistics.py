"""The evaluator's statistics, each against a slow oracle written from its definition."""

import itertools
import math
import random

import pytest

from proxima.evaluator.diversity import distinct, repetition, words
from proxima.evaluator.trend import is_rising, trend
from proxima.evaluator.win_rates import SAMPLES, mean_interval, preferences, share_won, win_rate

NAN = math.nan


def exact_chance(values):
    """Of all orders of these numbers, the share with a Kendall score as high: what Mann-Kendall's normal
    curve stands for."""

    def score(order):
        return sum((b > a) - (b < a) for a, b in itertools.combinations(order, 2))

    seen = score(values)
    scores = [score(order) for order in itertools.permutations(values)]
    return sum(each >= seen for each in scores) / len(scores)


@pytest.mark.parametrize("seed", range(12))
def test_the_chance_of_a_rise_is_that_of_all_orders(seed):
    rng = random.Random(seed)
    values = [rng.choice([0.0, 1.0, 2.0, 3.0, 4.0, rng.random()]) for _ in range(7)]
    assert trend(values)["chance"] == pytest.approx(exact_chance(values), abs=0.06)


def test_mann_kendall_by_hand():
    # 1 3 2 4: S = 4 of 6, no ties, variance 4 * 3 * 13 / 18
    z = 3 / math.sqrt(4 * 3 * 13 / 18)
    assert trend([1, 3, 2, 4])["chance"] == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)))
    # 1 1 2 2 2: S = 6, ties of 2 and 3
    z = 5 / math.sqrt((5 * 4 * 15 - 2 * 1 * 9 - 3 * 2 * 11) / 18)
    assert trend([1, 1, 2, 2, 2])["chance"] == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)))


def test_the_slope_is_the_median_of_all_slopes_and_one_wild_number_does_not_move_it():
    values = [0.0, 2.0, 1.0, 3.5]
    slopes = sorted((values[j] - values[i]) / (j - i) for i, j in itertools.combinations(range(4), 2))
    assert trend(values)["slope"] == pytest.approx((slopes[2] + slopes[3]) / 2)
    line = [0.5 * i for i in range(20)]
    line[7] = 1e6
    assert trend(line)["slope"] == pytest.approx(0.5)


def test_trends_of_few_equal_falling_and_missing_numbers():
    assert all(math.isnan(number) for values in ([], [1.0], [NAN, 1.0]) for number in trend(values).values())
    assert trend([2.0] * 9) == {"slope": 0.0, "chance": 1.0}
    rise = [float(i) for i in range(10)]
    assert is_rising(rise)
    assert not is_rising(rise[::-1])
    assert trend(rise[::-1])["chance"] > 0.99
    assert not is_rising([NAN] * 5)
    assert trend([0.0, NAN, 2.0, 3.0])["slope"] == 1.0  # a missing one keeps its place


def test_noise_is_called_a_rise_about_as_often_as_it_says():
    rng = random.Random(0)
    called = sum(is_rising([rng.gauss(0, 1) for _ in range(20)]) for _ in range(1000))
    assert 20 <= called <= 80


def test_preferences_and_their_share():
    ours, theirs = [1.0, 2.0, 3.0, NAN, 5.0, 0.0], [0.0, 2.0, 4.0, 1.0, NAN, 1e-12]
    assert preferences(ours, theirs)[:3] == [1.0, 0.5, 0.0]
    assert list(map(math.isnan, preferences(ours, theirs))) == [False] * 3 + [True] * 2 + [False]
    rate = win_rate(ours, theirs)
    assert (rate["rate"], rate["prompts"]) == (0.5, 4)
    with pytest.raises(ValueError, match="zip"):
        preferences([1.0], [])


def test_the_interval_is_the_percentiles_of_means_of_resamples():
    values = [0.0, 1.0, 1.0, 0.5]
    mean, low, high = mean_interval([*values, NAN], seed=7)
    # every one of the 4 ** 4 resamples, equally likely
    means = sorted(sum(resample) / 4 for resample in itertools.product(values, repeat=4))
    assert mean == 0.625
    assert low == pytest.approx(means[int(0.025 * len(means))], abs=0.126)
    assert high == pytest.approx(means[int(0.975 * len(means)) - 1], abs=0.126)
    assert mean_interval([3.0]) == (3.0, 3.0, 3.0)
    assert all(map(math.isnan, mean_interval([NAN])))
    assert mean_interval(values, 7) == (mean, low, high)
    assert SAMPLES >= 1000


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng = random.Random(1)
    held = 0
    for seed in range(100):
        wins = [float(rng.random() < 0.7) for _ in range(60)]
        rate = share_won(wins, seed)
        held += rate["low"] <= 0.7 <= rate["high"]
    assert held >= 85


def slow_distinct(texts, size):
    runs = [
        " ".join(words(text)[i : i + size])
        for text in texts
        for i in range(len(words(text)))
        if i + size <= len(words(text))
    ]
    return len(set(runs)) / len(runs)


def test_distinct_counts_over_all_texts_and_repetition_within_each():
    texts = ["the cat sat on the mat", "The dog, the cat", "a"]
    assert words(texts[1]) == ["the", "dog", ",", "the", "cat"]
    for size in (1, 2, 3):
        assert distinct(texts, size) == pytest.approx(slow_distinct(texts, size))
    assert distinct(["a a a a"], 1) == 0.25
    assert math.isnan(distinct(["", "  "], 1))
    assert math.isnan(distinct(["one"], 2))
    assert repetition(["a b c d a b c d"]) == pytest.approx(1 / 5)  # abcd bcda cdab dabc abcd
    assert repetition(["x " * 104, "all these words are different ones"]) == pytest.approx(
        0.5 * (1 - 1 / 101)
    )
    assert repetition(["", "too short"]) == 0.0
    assert math.isnan(repetition([]))
