"""Estimates: intervals that cover the truth as often as they say, outliers that do not count, a past that fades."""

import random
from statistics import fmean

import pytest

from echo2.capacity.estimates import Estimate, decayed, robust_mean, share, student_t, total


def weights(count, half_life=32):
    return decayed(range(count - 1, -1, -1), half_life)


@pytest.mark.parametrize("count", [2, 4, 6, 30, 120])
def test_the_interval_of_a_mean_covers_the_truth_in_95_percent_of_draws(count):
    generator = random.Random(count)
    found = [robust_mean([generator.gauss(2.0, 0.3) for _ in range(count)], weights(count)) for _ in range(2000)]
    assert fmean(e.low <= 2.0 <= e.high for e in found) == pytest.approx(0.95, abs=0.025)
    assert fmean(e.value for e in found) == pytest.approx(2.0, abs=0.02)


@pytest.mark.parametrize(("count", "truth"), [(20, 0.5), (200, 0.6), (2000, 0.9)])
def test_the_interval_of_a_share_covers_the_truth_in_95_percent_of_draws(count, truth):
    generator = random.Random(count)
    found = [share([generator.random() < truth for _ in range(count)], weights(count, 512)) for _ in range(2000)]
    assert fmean(e.low <= truth <= e.high for e in found) == pytest.approx(0.95, abs=0.025)


def test_fewer_observations_make_a_wider_interval():
    generator = random.Random(0)
    values = [generator.gauss(2.0, 0.3) for _ in range(60)]
    widths = [e.high - e.low for e in (robust_mean(values[:n], weights(n)) for n in (3, 8, 20, 60))]
    assert widths == sorted(widths, reverse=True) and widths[0] > 4 * widths[-1]
    assert share([True], [1.0]).low < 0.25 and share([True], [1.0]).high == 1.0


def test_an_outlier_in_twenty_moves_a_mean_by_less_than_three_percent():
    generator = random.Random(1)
    values = [generator.gauss(1.0, 0.1) for _ in range(60)]
    spoiled = [100.0 if place % 20 == 7 else value for place, value in enumerate(values)]
    assert robust_mean(spoiled, weights(60)).value == pytest.approx(robust_mean(values, weights(60)).value, rel=0.03)
    first_of_six = [30.0, 1.0, 1.1, 0.9, 1.0, 1.05]
    assert robust_mean(first_of_six, weights(6)).value < 1.1


def test_what_happens_now_and_then_is_no_outlier():
    values = [1.5 if step % 10 == 9 else 1.0 for step in range(100)]
    assert robust_mean(values, [1.0] * 100).value == pytest.approx(1.05)


def test_older_observations_fade():
    values = [1.0] * 200 + [2.0] * 64
    assert robust_mean(values, weights(264)).value == pytest.approx(1.75, abs=0.02)
    assert share([False] * 4096 + [True] * 512, weights(4608, 512)).value == pytest.approx(0.5, abs=0.01)


def test_without_enough_observations_there_is_no_estimate():
    assert robust_mean([], []) is None and robust_mean([1.0], [1.0]) is None
    assert share([], []) is None and total([]) is None


def test_sums_factors_and_inverses_carry_their_intervals():
    one = Estimate(10.0, 7.0, 14.0, 5)
    assert total([one, one]) == Estimate(20.0, pytest.approx(20 - 18**0.5), pytest.approx(20 + 32**0.5), 10)
    assert one.times(2) == Estimate(20.0, 14.0, 28.0, 5)
    assert one.inverse() == Estimate(0.1, 1 / 14, 1 / 7, 5)


def test_student_t_agrees_with_its_table():
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 8: 2.306, 20: 2.086, 120: 1.980}
    assert {freedom: student_t(freedom) for freedom in table} == pytest.approx(table, rel=0.01)
