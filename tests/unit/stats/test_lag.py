"""Planted lags are found to the step, noise has none."""

import numpy as np
import pytest

from posttrain.core.errors import EvidenceError
from posttrain.core.seeds import numpy_rng
from posttrain.stats.lag import change_point, lag, resample


def walk(n: int, seed: int, memory: float = 0.9) -> np.ndarray:
    values, noise = np.zeros(n), numpy_rng(seed, "test", "walk").normal(size=n)
    for i in range(1, n):
        values[i] = memory * values[i - 1] + noise[i]
    return values


@pytest.mark.parametrize("planted", [15, 0, -7])
@pytest.mark.parametrize("direction", [1, -1])
def test_planted_lag_is_found(planted, direction):
    both, rng = walk(260, 1), numpy_rng(1, "test", "noise")
    leading, lagging = both[30 : 30 + 200], direction * both[30 - planted : 230 - planted]
    found = lag(leading + 0.3 * rng.normal(size=200), lagging + 0.3 * rng.normal(size=200), max_lag=30)
    assert found.steps == planted
    assert found.correlation * direction > 0.5
    assert found.p_value < 1e-6
    assert found.found
    assert not found.single_event


def test_a_spike_and_a_later_drop_are_one_event():
    rng = numpy_rng(5, "test", "spike")
    turns, reward = 2.2 + 0.1 * rng.normal(size=150), 0.7 + 0.03 * rng.normal(size=150)
    turns[60:63] += 1.5
    reward[75:] -= 0.3
    found = lag(turns, reward, max_lag=40)
    assert found.steps is not None
    assert abs(found.steps - 15) <= 2
    assert found.single_event
    assert found.correlation < 0
    assert lag(turns, reward, max_lag=40, sign="opposite").steps == found.steps


def test_noise_has_no_lag():
    rng = numpy_rng(0, "test", "nothing")
    found = [lag(rng.normal(size=150), rng.normal(size=150), 40).found for _ in range(100)]
    assert sum(found) <= 11  # 5 expected, 11 is exceeded once in 250 times
    assert not lag([1.0] * 100, rng.normal(size=100), 20).found
    assert not lag(np.arange(100.0), np.arange(100.0), 20).found  # two straight lines correlate at every lag, and say nothing


def test_shared_drift_alone_is_no_lag():
    rng, drift = numpy_rng(8, "test", "drift"), np.linspace(0, 3, 200)
    found = [lag(drift + rng.normal(size=200), drift + rng.normal(size=200), 40).found for _ in range(100)]
    assert sum(found) <= 11  # with the straight line left in, about 22


def test_blocks_find_what_single_steps_hide():
    slow, rng = np.repeat(walk(80, 3, memory=0.3), 5), numpy_rng(3, "test", "hidden")
    leading, lagging = slow[20:] + 1.5 * rng.normal(size=380), slow[:-20] + 1.5 * rng.normal(size=380)
    assert lag(leading, lagging, 40, every=5).steps == 20
    assert lag(leading, lagging, 40, every=5).p_value < lag(leading, lagging, 40).p_value


def test_missing_values_are_bridged_up_to_a_half():
    both = walk(220, 6)
    leading, lagging = both[20:].copy(), both[:200].copy()
    leading[::7] = np.nan
    assert lag(leading, lagging, 30).steps == 20
    leading[:120] = np.nan
    with pytest.raises(EvidenceError, match="of 200 values are finite"):
        lag(leading, lagging, 30)


def test_refusals():
    with pytest.raises(EvidenceError, match="3 values against 2"):
        lag([1, 2, 3], [1, 2], 1)
    with pytest.raises(EvidenceError, match="need at least 63 steps, got 50"):
        lag(walk(50, 1), walk(50, 2), 40)
    with pytest.raises(EvidenceError, match="at least 1"):
        lag(walk(50, 1), walk(50, 2), 0)


def test_resample():
    nan = float("nan")
    assert resample([0, 10], [1.0, 3.0], [0, 5, 10]).tolist() == [1.0, 2.0, 3.0]
    assert resample([10, 0, 5], [3.0, 1.0, nan], [5]).tolist() == [2.0]  # unordered, one value missing
    assert resample([0, 10, 10], [1.0, 9.0, 3.0], [10]).tolist() == [3.0]  # logged again after a resume
    assert np.isnan(resample([0, 10], [1.0, 3.0], [-1, 11])).all()
    assert np.isnan(resample([], [], [1])).all()
    with pytest.raises(EvidenceError, match="2 steps against 1"):
        resample([1, 2], [1.0], [1])


def test_change_point_of_a_step_and_of_nothing():
    rng = numpy_rng(2, "test", "step")
    step = np.where(np.arange(200) < 120, 0.7, 0.5) + 0.05 * rng.normal(size=200)
    found = change_point(step)
    assert found is not None
    assert abs(found - 120) <= 1
    assert sum(change_point(rng.normal(size=200)) is not None for _ in range(100)) <= 5
    assert change_point([1.0] * 20) is None
    assert change_point([1.0] * 10 + [2.0] * 10) == 10
    with pytest.raises(EvidenceError, match="at least 12"):
        change_point([1.0] * 5)


def test_change_points_of_two_slow_changes_give_their_lag():
    t, rng = np.arange(200), numpy_rng(4, "test", "slow")
    turns = 2 + 1 / (1 + np.exp(-(t - 80) / 4)) + 0.1 * rng.normal(size=200)
    reward = 0.7 - 0.4 / (1 + np.exp(-(t - 95) / 4)) + 0.04 * rng.normal(size=200)
    first, second = change_point(turns), change_point(reward)
    assert first is not None
    assert second is not None
    assert abs(second - first - 15) <= 3
