"""Rolling tools against numbers worked by hand and plain loops."""

import math

import numpy as np
import pytest

from posttrain.core.errors import EvidenceError
from posttrain.core.seeds import numpy_rng
from posttrain.stats.trend import rolling_mean, rolling_median, rolling_slope, rolling_std, slope, slope_interval

NAN = math.nan
ROLLING = {rolling_mean: np.mean, rolling_median: np.median, rolling_std: lambda w: np.std(w, ddof=1)}


def test_slope_by_hand():
    assert slope([1.0, 3.0, 5.0]) == 2.0
    # x - 1.5: -1.5 -.5 .5 1.5 times 0 1 1 4: -.5 + .5 + 6 = 6, over 5
    assert slope([0.0, 1.0, 1.0, 4.0]) == pytest.approx(1.2)
    assert slope([1.0, NAN, 5.0, math.inf]) == 2.0
    assert math.isnan(slope([1.0]))
    assert math.isnan(slope([NAN, NAN]))


def test_slope_interval_by_hand():
    # slope 1.2 about 1.5 + 1.2 (x - 1.5): 0 - (-.3) = .3, 1 - .9 = .1, 1 - 2.1 = -1.1, 4 - 3.3 = .7, squares add up to
    # 1.8; r = (.03 - .11 - .77) / 1.8 < 0 -> + (2 + 4r)/4 stays at 0; se sqrt(1.8 / 2 / 5) = .424264, t(2) 4.302653
    interval = slope_interval([0.0, 1.0, 1.0, 4.0])
    assert interval.high - 1.2 == pytest.approx(4.302653 * 0.424264, abs=1e-5)
    assert interval.method == "slope-t (autocorrelated)"


def test_slope_interval_is_wider_when_neighbours_are_alike():
    noise, ar = numpy_rng(0, "test", "trend").normal(size=200), np.zeros(200)
    for i in range(1, 200):
        ar[i] = 0.8 * ar[i - 1] + 0.6 * noise[i]  # the same variance as the noise
    plain, alike = slope_interval(noise), slope_interval(ar)
    assert alike.high - alike.low > 2 * (plain.high - plain.low)


def test_slope_interval_refusals():
    with pytest.raises(EvidenceError, match="at least 4"):
        slope_interval([1.0, 2.0, NAN, 4.0])
    with pytest.raises(EvidenceError, match="on one line"):
        slope_interval([0.1, 0.2, 0.3, 0.4, 0.5])
    with pytest.raises(EvidenceError, match="level 95"):
        slope_interval([0.0, 1.0, 1.0, 4.0], level=95)


def test_rolling_by_hand():
    assert rolling_mean([1.0, 2.0, 3.0, 5.0], 2).tolist()[1:] == [1.5, 2.5, 4.0]
    assert rolling_median([1.0, 2.0, 90.0, 3.0], 3).tolist()[2:] == [2.0, 3.0]
    assert rolling_std([1.0, 3.0, 3.0], 2).tolist()[1:] == [math.sqrt(2), 0.0]
    assert rolling_slope([5.0, 1.0, 2.0, 3.0], 3).tolist()[2:] == [-1.5, 1.0]


@pytest.mark.parametrize("rolling", list(ROLLING))
@pytest.mark.parametrize("k", [2, 3, 7, 40])
def test_rolling_agrees_with_a_loop_over_windows(rolling, k):
    values = numpy_rng(1, "test", "rolling").normal(size=60) * 1e3 + 1e6
    values[[3, 4, 5, 20, 41]] = NAN
    values[30] = math.inf
    result = rolling(values, k)
    for t in range(60):
        window = values[max(0, t + 1 - k) : t + 1]
        finite = window[np.isfinite(window)]
        enough = t + 1 >= k and len(finite) >= (k + 1) // 2 and (rolling is not rolling_std or len(finite) > 1)
        assert result[t] == pytest.approx(ROLLING[rolling](finite) if enough else NAN, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("k", [2, 3, 7, 40])
def test_rolling_slope_agrees_with_slope(k):
    values = numpy_rng(2, "test", "rolling").normal(size=60)
    values[[3, 4, 5, 20, 41]] = NAN
    result = rolling_slope(values, k)
    for t in range(60):
        window = values[max(0, t + 1 - k) : t + 1]
        enough = t + 1 >= k and np.isfinite(window).sum() >= (k + 1) // 2
        assert result[t] == pytest.approx(slope(window) if enough else NAN, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("rolling", [rolling_mean, rolling_median, rolling_std, rolling_slope])
def test_nothing_looks_ahead(rolling):
    values = numpy_rng(3, "test", "rolling").normal(size=80)
    changed = values.copy()
    changed[50:] = 1e9
    np.testing.assert_array_equal(rolling(values, 8)[:50], rolling(changed, 8)[:50])
    assert not np.array_equal(rolling(values, 8)[50:], rolling(changed, 8)[50:])


@pytest.mark.parametrize("rolling", [rolling_mean, rolling_median, rolling_std, rolling_slope])
def test_short_and_empty_series_are_all_nan(rolling):
    assert rolling([], 3).tolist() == []
    assert np.isnan(rolling([1.0, 2.0], 3)).all()
    assert np.isnan(rolling([NAN] * 5, 3)).all()


def test_an_outlier_leaves_no_trace_after_its_window():
    values = [1e300, *[0.1] * 20]
    assert rolling_mean(values, 4)[4:].tolist() == [0.1] * 17  # a running sum would never recover its digits


def test_blocks_of_a_long_series_join_up():
    values = numpy_rng(4, "test", "rolling").normal(size=3000)
    result = rolling_mean(values, 1000)  # 1048 windows to a block
    assert result[999] == pytest.approx(values[:1000].mean())
    assert result[2047] == pytest.approx(values[1048:2048].mean())
    assert result[2999] == pytest.approx(values[2000:].mean())
    assert np.isfinite(result[999:]).all()


def test_windows_that_mean_nothing_are_refused():
    with pytest.raises(EvidenceError, match="window of 0"):
        rolling_mean([1.0], 0)
    with pytest.raises(EvidenceError, match="slope over 1"):
        rolling_slope([1.0], 1)
    with pytest.raises(EvidenceError, match="shape"):
        slope(np.ones((2, 2)))
