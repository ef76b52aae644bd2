"""Controllers by hand, and the laws of each: one direction per side, bounded, still at the target, untouched without a measurement."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.objectives.controllers import adapt_clip_high, adapt_entropy_coef, adapt_kl_coef

LAWS = settings(max_examples=80, deadline=None, derandomize=True)
TARGET = 0.3
CONTROLLERS: dict[str, Callable[[float, float | None], float]] = {
    "kl": lambda value, measured: adapt_kl_coef(value, measured, TARGET),
    "clip": lambda value, measured: adapt_clip_high(value, measured, TARGET, 0.01, 0.2, 0.5),
    "entropy": lambda value, measured: adapt_entropy_coef(value, measured, TARGET, 0.01, 0.5),
}
RISES_ABOVE = {"kl": True, "clip": False, "entropy": False}
LARGEST = {"kl": 0.02 * 0.5, "clip": 0.01, "entropy": 0.01}
"""Largest change in one call of a value in [0.2, 0.5]."""
every_controller = pytest.mark.parametrize("name", CONTROLLERS)
VALUES, MEASURED = st.floats(0.2, 0.5), st.floats(0.0, 1e6)


def test_kl_coefficient_by_hand():
    # target 5, gain 0.1: 5.5 -> error 0.1, factor 1.01; 4.5 -> -0.1, 0.99; 50 -> 9 clipped to 0.2, 1.02; 0 -> -1 clipped to -0.2, 0.98
    for measured, expected in ((5.5, 0.0202), (4.5, 0.0198), (50.0, 0.0204), (0.0, 0.0196), (math.inf, 0.0204), (-3.0, 0.0196)):
        assert adapt_kl_coef(0.02, measured, 5.0) == pytest.approx(expected, abs=1e-12)
    # gain 1 at 5.5: factor 1.1
    assert adapt_kl_coef(0.02, 5.5, 5.0, gain=1.0) == pytest.approx(0.022, abs=1e-12)


def test_clip_bound_by_hand():
    assert adapt_clip_high(0.20, 0.25, 0.3, 0.01, 0.1, 0.5) == pytest.approx(0.21)
    assert adapt_clip_high(0.20, 0.35, 0.3, 0.01, 0.1, 0.5) == pytest.approx(0.19)
    # the bounds hold, also when the step would pass them
    assert adapt_clip_high(0.495, 0.25, 0.3, 0.01, 0.1, 0.5) == 0.5
    assert adapt_clip_high(0.105, 0.35, 0.3, 0.01, 0.1, 0.5) == 0.1


def test_entropy_coefficient_by_hand():
    assert adapt_entropy_coef(0.001, 0.15, 0.2, 0.0005, 0.01) == pytest.approx(0.0015)
    assert adapt_entropy_coef(0.001, 0.25, 0.2, 0.0005, 0.01) == pytest.approx(0.0005)
    # from 0 it can start, below 0 it does not go: a negative bonus would push entropy down
    assert adapt_entropy_coef(0.0, 0.15, 0.2, 0.0005, 0.01) == 0.0005
    assert adapt_entropy_coef(0.0003, 0.25, 0.2, 0.0005, 0.01) == 0.0
    assert adapt_entropy_coef(0.0098, 0.15, 0.2, 0.0005, 0.01) == 0.01


def test_a_toy_policy_is_steered_to_its_target():
    # Divergence 0.5 / coef and 300 calls: the coefficient settles where 0.5 / coef = 5, at 0.1.
    coef = 1.0
    for _ in range(300):
        coef = adapt_kl_coef(coef, 0.5 / coef, 5.0)
    assert coef == pytest.approx(0.1, rel=1e-3)


@every_controller
@LAWS
@given(value=VALUES)
def test_nothing_changes_at_the_target(name, value):
    assert CONTROLLERS[name](value, TARGET) == value


@every_controller
@pytest.mark.parametrize("nothing", [None, math.nan])
def test_nothing_changes_without_a_measurement(name, nothing):
    assert CONTROLLERS[name](0.3, nothing) == 0.3


@every_controller
@LAWS
@given(value=VALUES, low=MEASURED, high=MEASURED)
def test_a_higher_measurement_never_moves_it_the_other_way(name, value, low, high):
    low, high = min(low, high), max(low, high)
    at_low, at_high = CONTROLLERS[name](value, low), CONTROLLERS[name](value, high)
    assert at_low <= at_high if RISES_ABOVE[name] else at_low >= at_high


@every_controller
@LAWS
@given(value=VALUES, measured=MEASURED)
def test_one_call_changes_little_and_stays_in_bounds(name, value, measured):
    after = CONTROLLERS[name](value, measured)
    assert abs(after - value) <= LARGEST[name] + 1e-12
    assert after > 0
    assert name == "kl" or 0.0 <= after <= 0.5


@every_controller
def test_each_side_of_the_target_moves_it(name):
    below, above = CONTROLLERS[name](0.3, 0.29), CONTROLLERS[name](0.3, 0.31)
    assert (below < 0.3 < above) if RISES_ABOVE[name] else (above < 0.3 < below)


def test_impossible_settings_are_refused():
    for target, gain in ((0.0, 0.1), (-1.0, 0.1), (5.0, 0.0), (5.0, 5.0)):
        with pytest.raises(ValueError, match="target must be positive and gain between 0 and 5"):
            adapt_kl_coef(0.02, 1.0, target, gain)
    with pytest.raises(ValueError, match="the step must be positive"):
        adapt_clip_high(0.2, 0.3, 0.3, 0.0, 0.1, 0.5)
    with pytest.raises(ValueError, match="the bounds in order"):
        adapt_entropy_coef(0.0, 0.3, 0.3, 0.001, -0.1)
