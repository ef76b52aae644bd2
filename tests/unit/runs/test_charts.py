"""Axes of curves that hardly move or are hardly there: what rounding leaves must not break a report."""

from __future__ import annotations

import pytest

from posttrain.runs.charts import Series, line_chart, ticks_between


@pytest.mark.parametrize(
    "values",
    [
        (1.0, 1.0 - 2e-16),  # an effective sample size that is 1 up to rounding
        (0.9999999999999998, 0.9999999999999996, 1.0),
        (1e-15, 3e-15),  # a divergence before the first update
        (0.0, 5e-324),
        (0.0, 0.0),
        (-1e-17, 1e-17),
        (1e12, 1e12 + 1e-4),
        (3.0,),
    ],
)
def test_a_curve_without_visible_range_is_drawn(values):
    page = line_chart("figure", [Series("figure", tuple((float(step), value) for step, value in enumerate(values)))], "step")
    assert "<svg" in page
    assert "nan" not in page


def test_ticks_cover_tiny_and_large_ranges_with_round_numbers():
    assert ticks_between(1e-15, 3e-15) == [1e-15, 1.5e-15, 2e-15, 2.5e-15, 3e-15]
    assert ticks_between(0.0, 4000.0) == [0.0, 1000.0, 2000.0, 3000.0, 4000.0]
    assert ticks_between(-0.3, 0.3) == [-0.4, -0.2, 0.0, 0.2, 0.4]
