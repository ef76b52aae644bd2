"""Jitter, trends, lasting falls and partings: by hand, and quiet on noise."""

from __future__ import annotations

import math

import numpy as np
import pytest

from posttrain.core.seeds import numpy_rng
from posttrain.doctor.changes import Trend, first_fall, first_parting, jitter, scores_trend, trend


def test_jitter_of_a_saw():
    # differences 1, -1, 1, -1; median 0, median of |differences| 1; 1.4826 / sqrt(2)
    assert jitter([0.0, 1.0, 0.0, 1.0, 0.0]) == pytest.approx(1.4826 / math.sqrt(2))


def test_jitter_does_not_see_a_steady_slope():
    assert jitter([0.0, 1.0, 2.0, 3.0, 4.0]) == 0.0


def test_jitter_of_a_mostly_constant_series_falls_back_to_the_deviation():
    # differences 0, 0, 0, 1, 0: the median deviation is 0, their standard deviation 0.4
    assert jitter([2.0, 2.0, 2.0, 2.0, 3.0, 3.0]) == pytest.approx(0.4 / math.sqrt(2))


def test_trend_compares_outer_thirds():
    found = trend([0.1, 0.1, 0.2, 0.3, 0.4, 0.4])
    assert found == Trend("rises", pytest.approx(0.1), pytest.approx(0.4), 6)
    assert trend([0.4, 0.4, 0.3, 0.2, 0.1, 0.1]).direction == "falls"


def test_a_change_within_its_noise_is_flat():
    # thirds 0, 30 and 10, 50: change 15, each variance 450 or 800, error sqrt(1250 / 2) = 25
    assert trend([0.0, 30.0, 5.0, 5.0, 10.0, 50.0]).direction == "is flat"


def test_a_tiny_change_is_flat_however_sure():
    assert trend([1.0, 1.0, 1.0, 1.01, 1.01, 1.01]).direction == "is flat"  # 1 % of the largest value


def test_few_values_have_no_direction():
    assert not trend([0.0, 1.0, 2.0, 3.0, 4.0]).known


def test_two_scores_of_many_items_have_a_direction():
    # 0.40 -> 0.60 on 500 items: error sqrt((0.24 + 0.24) / 500) = 0.031, and 2.5 of it are 0.077
    assert scores_trend([0.40, 0.60], 500).direction == "rises"
    assert scores_trend([0.40, 0.45], 500).direction == "is flat"
    assert scores_trend([0.40, 0.60], 20).direction == "is flat"  # error 0.155


def test_a_score_that_rose_and_came_back_falls():
    # best 0.60, last 0.40 on 400 items: error sqrt(0.48 / 400) = 0.0346, and 3.5 of it are 0.121
    found = scores_trend([0.40, 0.60, 0.40], 400)
    assert (found.direction, found.first, found.last) == ("falls", 0.60, 0.40)


def test_scores_without_items_need_six():
    assert not scores_trend([0.4, 0.6], None).known
    assert scores_trend([0.4, 0.4, 0.5, 0.5, 0.6, 0.6], None).direction == "rises"


def test_a_step_down_is_dated_to_its_row():
    y = [0.7 + 0.01 * (row % 3 - 1) for row in range(150)] + [0.2 + 0.01 * (row % 3 - 1) for row in range(150)]
    fall = first_fall(y)
    assert fall is not None
    assert fall.position == 150
    assert fall.after == pytest.approx(0.2)
    assert fall.peak == pytest.approx(0.70, abs=0.005)


def test_a_dip_that_does_not_last_is_no_fall():
    y = 0.7 + numpy_rng(0, "dip").normal(0, 0.01, 300)
    y[140:150] -= 0.5  # ten rows: 22 windows of 15 hold two or more of them, fewer than the 30 that make a tenth of the series
    assert first_fall(y) is None
    y[150:200] -= 0.5
    fall = first_fall(y)
    assert fall is not None
    assert fall.position == 140


def test_a_fall_at_the_very_end_counts_when_it_fills_a_window():
    y = np.full(100, 0.7)
    y[-12:] = 0.1  # the window is 5 wide: from the third low value on the mean is below, for 10 windows
    assert first_fall(y) is not None
    y[:] = 0.7
    y[-2:] = 0.1
    assert first_fall(y) is None


def test_too_short_for_a_fall():
    assert first_fall([1.0] * 5 + [0.0] * 4) is None


@pytest.mark.parametrize("rows", [60, 300, 3000])
def test_noise_and_learning_curves_never_fall_or_part(rows):
    for seed in range(25):
        rng = numpy_rng(seed, "noise")
        noise = rng.normal(0, 0.05, (2, rows))
        learning = 0.9 - 0.5 * np.exp(-np.arange(rows) / (rows / 5))
        assert first_fall(0.5 + noise[0]) is None
        assert first_fall(learning + noise[0]) is None
        assert first_parting(learning + noise[0], learning + noise[1]) is None


def test_two_series_part_where_they_do():
    a = np.full(200, 0.5) + 0.01 * (np.arange(200) % 3 - 1)
    b = a.copy()
    b[120:] += 0.3
    assert first_parting(a, b) == 120
    assert first_parting(b, a) == 120
    assert first_parting(a, a) is None


def test_a_passing_difference_is_no_parting():
    a, b = np.full(200, 0.5), np.full(200, 0.5)
    b[100:105] = 0.9
    assert first_parting(a, b) is None
