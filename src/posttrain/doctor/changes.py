"""When a series changed for good: its jitter, its first lasting fall, and the first step at which two series part.

These look at a finished series from both sides of a step. What a live run may conclude from its past alone is in signals.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Direction = Literal["rises", "falls", "is flat", "unknown"]
LEAST = 0.02
"""A change below this share of the largest value is no change, however small its noise."""


@dataclass(frozen=True, slots=True)
class Trend:
    """How a series moved from its first third to its last.

    Example: Trend("rises", 0.41, 0.63, 90)
    """

    direction: Direction
    first: float = math.nan
    last: float = math.nan
    n: int = 0

    @property
    def known(self) -> bool:
        """Whether there were values enough to tell."""
        return self.direction != "unknown"


@dataclass(frozen=True, slots=True)
class Fall:
    """The first lasting fall of a series: positions into it, and the levels before and after.

    Example: Fall(position=120, peak_position=96, peak=0.62, after=0.31)
    """

    position: int
    peak_position: int
    peak: float
    after: float
    """Mean from `position` to the end."""


def jitter(values: Sequence[float] | np.ndarray) -> float:
    """Standard deviation of a series around its own slow course, from the differences of neighbours; 0 for fewer than 3 values.

    >>> jitter([0.0, 1.0, 0.0, 1.0, 0.0])  # differences 1, -1, 1, -1: robust deviation 1.4826, over sqrt(2)
    1.0483...
    """
    steps = np.diff(np.asarray(values, dtype=np.float64))
    if len(steps) < 2:
        return 0.0
    robust = 1.4826 * float(np.median(np.abs(steps - np.median(steps))))
    return (robust if robust > 0 else float(steps.std())) / math.sqrt(2)


def trend(values: Sequence[float] | np.ndarray, least: float = LEAST) -> Trend:
    """Direction of a series: the means of its outer thirds differ by more than three standard errors and by a share `least`.

    Fewer than 6 values have no direction.

    >>> trend([0.1, 0.1, 0.2, 0.3, 0.4, 0.4]).direction
    'rises'
    """
    y = np.asarray(values, dtype=np.float64)
    if len(y) < 6:
        return Trend("unknown", n=len(y))
    third = len(y) // 3
    first, last = y[:third], y[-third:]
    change = float(last.mean() - first.mean())
    error = math.sqrt((float(first.var(ddof=1)) + float(last.var(ddof=1))) / third)
    moved = abs(change) > 3 * error and abs(change) > least * float(np.abs(y).max())
    direction: Direction = ("rises" if change > 0 else "falls") if moved else "is flat"
    return Trend(direction, float(first.mean()), float(last.mean()), len(y))


def scores_trend(values: Sequence[float] | np.ndarray, items: float | None) -> Trend:
    """Direction of a held-out score that was measured a few times: its last value against its first, and against its best.

    With `items` behind each value and scores in [0, 1] the error is the binomial one, and two values are enough; without, `trend` decides.
    A score that rose and came back down falls, because what counts is what could have been kept.

    >>> scores_trend([0.40, 0.60], items=500)  # error sqrt(.24/500 + .24/500) = 0.031
    Trend(direction='rises', first=0.4, last=0.6, n=2)
    """
    y = np.asarray(values, dtype=np.float64)
    if len(y) < 2 or not items or items < 1 or y.min() < 0 or y.max() > 1:
        return trend(y)
    few = max(1, len(y) // 3)
    first, last, best = float(y[:few].mean()), float(y[-few:].mean()), float(y.max())

    def beyond(a: float, b: float, z: float) -> bool:
        return abs(a - b) > max(LEAST, z * math.sqrt((_spread(a) + _spread(b)) / items))

    if last < best and beyond(last, best, 3.5):
        return Trend("falls", best, last, len(y))
    if beyond(first, last, 2.5):
        return Trend("rises" if last > first else "falls", first, last, len(y))
    return Trend("is flat", first, last, len(y))


def first_fall(values: Sequence[float] | np.ndarray) -> Fall | None:
    """The first time that the moving mean lies below its running peak by more than chance explains, and stays there; None if never.

    The window is a twentieth of the series (5 to 50 values). The bound grows with the number of windows, because the highest of many is
    high by chance, and is at least 5 % of the peak. To stay means for a tenth of the series, or to its end.
    """
    y = np.asarray(values, dtype=np.float64)
    width = min(50, max(5, len(y) // 20))
    if len(y) < 2 * width:
        return None
    total = np.concatenate([[0.0], np.cumsum(y)])
    means = (total[width:] - total[:-width]) / width
    peaks = np.maximum.accumulate(means)
    error = max(jitter(y) / math.sqrt(width), jitter(means[::width]))  # neighbours that are alike widen the second
    chance = 2 * math.sqrt(2 * math.log(max(math.e, len(y) / width))) * error
    bound = np.maximum(chance, 0.05 * np.abs(peaks)) + 1e-12
    start = _first_stay(means < peaks - bound, width, max(width, len(y) // 10))
    if start is None:
        return None
    end = start + width - 1
    low = y[start : end + 1] < (peaks[start] + y[end : end + width].mean()) / 2
    position = start + int(np.argmax(low)) if low.any() else end
    peak_position = int(np.argmax(means[: start + 1])) + width - 1
    return Fall(position, peak_position, float(peaks[start]), float(y[position:].mean()))


def first_parting(a: np.ndarray, b: np.ndarray) -> int | None:
    """The first position from which two series of one length keep apart by more than their jitter explains; None if never.

    Compared are means over a tenth of the series (3 to 20 values), which must differ by five standard errors for as long again.
    """
    width = min(20, max(3, len(a) // 10))
    if len(a) < 2 * width:
        return None
    gap = np.abs(np.convolve(a - b, np.full(width, 1 / width), "valid"))
    scale = float(max(np.abs(a).max(), np.abs(b).max()))
    error = math.hypot(jitter(a), jitter(b)) / math.sqrt(width)
    start = _first_stay(gap > max(5 * error, 1e-6 * scale), width, 2 * width)
    if start is None:
        return None
    apart = np.abs(a - b)[start : start + width] > max(error, 1e-6 * scale)
    return start + (int(np.argmax(apart)) if apart.any() else 0)


def _spread(p: float) -> float:
    return max(p * (1 - p), 1e-4)


def _first_stay(holds: np.ndarray, least: int, long: int) -> int | None:
    """Start of the first stretch of True that has `long` values, or that reaches the end and has `least`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], holds, [False]]).astype(np.int8)))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if end - start >= long or (end == len(holds) and end - start >= least):
            return int(start)
    return None
