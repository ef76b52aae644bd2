"""Trends of a logged series: the slope with an interval, and rolling mean, median, spread and slope.

Every rolling function is causal: position t reads the last k values up to and including t, never a later one, so what it says at t
could have been said while the run was at t. A position is NaN until k values have passed, and wherever fewer than half of its window
(rounded up) are finite. NaN and infinities count as missing. Work is O(n k), in blocks of bounded memory.

Example: rolling_mean([1, 2, 3, 5], 2) is [nan, 1.5, 2.5, 4.0].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy import special

from posttrain.core.errors import EvidenceError
from posttrain.stats.intervals import Interval, checked_level

Series = Sequence[float] | NDArray[np.float64]
Floats = NDArray[np.float64]

_BLOCK = 1 << 20
"""Numbers looked at together, which bounds the memory of a long series with a wide window."""


def slope(values: Series) -> float:
    """Least-squares change per index; missing values leave a gap on the axis. NaN with fewer than two finite values.

    >>> slope([1.0, 3.0, float("nan"), 7.0])
    2.0
    """
    y = _finite(values)
    x = np.flatnonzero(~np.isnan(y)).astype(np.float64)
    if len(x) < 2:
        return math.nan
    kept, x = y[~np.isnan(y)], x - x.mean()
    with np.errstate(over="ignore", invalid="ignore"):
        found = float(x @ (kept - kept.mean()) / (x @ x))
    return found if math.isfinite(found) else math.nan


def slope_interval(values: Series, level: float = 0.95) -> Interval:
    """Student-t interval of the slope, widened for residuals that follow each other.

    Neighbouring steps of a run are alike, and treating them as independent makes every drift look certain. With the lag-1 correlation r
    of the residuals, n values carry no more than n (1 - r) / (1 + r) independent ones (Bayley and Hammersley 1946); that number takes
    the place of n in the error and in the degrees of freedom. r is first moved up by its small-sample bias beside a fitted line,
    (2 + 4 r) / n, and then kept within [0, 0.95]. With 50 values or more a 95% interval covers 94 to 97% for r up to 0.8; with 20 values
    and r above 0.5 only about 90%, because r itself is not known well enough. Residuals of zero are refused: a
    straight line through every point leaves nothing to judge the error by.

    >>> interval = slope_interval([0.0, 1.1, 1.9, 3.2, 3.8, 5.1])
    >>> interval.low < 1.0 < interval.high
    True
    """
    y = _finite(values)
    at = np.flatnonzero(~np.isnan(y))
    n = len(at)
    if n < 4:
        raise EvidenceError(f"the interval of a slope needs at least 4 finite values, got {n}; take a longer window")
    kept, x = y[at], at - at.mean()
    steepness = float(x @ (kept - kept.mean()) / (x @ x))
    residuals = kept - kept.mean() - steepness * x
    total = float(residuals @ residuals)
    if total <= (1e-9 * max(1.0, float(np.abs(kept).max()))) ** 2 * n:
        raise EvidenceError(f"all {n} values lie on one line, so the error of its slope cannot be estimated; take a longer window")
    r = float(residuals[1:] @ residuals[:-1]) / total
    r = min(0.95, max(0.0, r + (2 + 4 * r) / n))
    freedom = max(1.0, n * (1 - r) / (1 + r) - 2)
    error = math.sqrt(total / freedom / float(x @ x))
    half = float(special.stdtrit(freedom, 0.5 + checked_level(level) / 2)) * error
    return Interval(steepness - half, steepness + half, level, "slope-t (autocorrelated)")


def rolling_mean(values: Series, k: int) -> Floats:
    """Mean of the last k values.

    >>> rolling_mean([1.0, 2.0, 3.0, 5.0], 2).tolist()
    [nan, 1.5, 2.5, 4.0]
    """
    return _rolling(values, k, lambda windows, count: _mean(windows, count)[:, 0])


def rolling_std(values: Series, k: int) -> Floats:
    """Sample standard deviation of the last k values; NaN where fewer than two are finite.

    >>> rolling_std([1.0, 3.0, 3.0], 2).tolist()[2]
    0.0
    """

    def of(windows: Floats, count: Floats) -> Floats:
        squares = np.nansum((windows - _mean(windows, count)) ** 2, axis=1)
        return np.sqrt(np.divide(squares, count - 1, out=np.full(len(count), np.nan), where=count > 1))

    return _rolling(values, k, of)


def rolling_median(values: Series, k: int) -> Floats:
    """Median of the last k values: one outlier does not move it.

    >>> rolling_median([1.0, 2.0, 90.0, 3.0], 3).tolist()
    [nan, nan, 2.0, 3.0]
    """

    def of(windows: Floats, count: Floats) -> Floats:
        ordered, rows = np.sort(windows, axis=1), np.arange(len(windows))  # NaN sorts last
        size = np.maximum(count, 1).astype(np.int64)
        return (ordered[rows, (size - 1) // 2] + ordered[rows, size // 2]) / 2

    return _rolling(values, k, of)


def rolling_slope(values: Series, k: int) -> Floats:
    """Least-squares change per index over the last k values.

    >>> rolling_slope([5.0, 1.0, 2.0, 3.0], 3).tolist()
    [nan, nan, -1.5, 1.0]
    """
    if k < 2:
        raise EvidenceError(f"a slope over {k} values is undefined; take a window of at least 2")
    x = np.arange(k, dtype=np.float64)

    def of(windows: Floats, count: Floats) -> Floats:
        present = ~np.isnan(windows)
        centred = np.where(present, x, np.nan)
        centred = np.where(present, centred - _mean(centred, count), 0.0)
        squares = np.sum(centred**2, axis=1)
        moved = np.where(present, windows - _mean(windows, count), 0.0)
        return np.divide(np.sum(centred * moved, axis=1), squares, out=np.full(len(squares), np.nan), where=squares > 0)

    return _rolling(values, k, of)


def _rolling(values: Series, k: int, of: Callable[[Floats, Floats], Floats]) -> Floats:
    """`of(windows, finite values per window)` at every position whose window is complete and at least half present."""
    if k < 1:
        raise EvidenceError(f"a window of {k} values is empty; take at least 1")
    y = _finite(values)
    result = np.full(len(y), np.nan)
    if len(y) < k:
        return result
    windows, rows = sliding_window_view(y, k), max(1, _BLOCK // k)
    for start in range(0, len(windows), rows):
        block = windows[start : start + rows]
        count = np.sum(~np.isnan(block), axis=1).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # values near the end of the float range become NaN
            found = of(block, count)
        result[k - 1 + start : k - 1 + start + len(block)] = np.where((count >= (k + 1) // 2) & np.isfinite(found), found, np.nan)
    return result


def _mean(windows: Floats, count: Floats) -> Floats:
    """Mean of each row's finite values, as a column."""
    return (np.nansum(windows, axis=1) / np.maximum(count, 1))[:, None]


def _finite(values: Series) -> Floats:
    y = np.asarray(values, dtype=np.float64)
    if y.ndim != 1:
        raise EvidenceError(f"a trend is taken of one series, got an array of shape {y.shape}; pass one column")
    return np.where(np.isfinite(y), y, np.nan)
