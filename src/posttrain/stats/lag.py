"""Which of two logged series moves first, and by how many steps: cross-correlation of what is new in each step.

Two curves that both drift correlate at every lag, and two smooth curves correlate over a wide range of lags, so the raw peak means little.
Each series is therefore first reduced to what its own trend and last three values do not predict (Haugh 1976). For a random walk that is
nearly its differences, for noise nearly the series itself. A lag is reported only if its correlation is beyond what independent series
of this length reach at any lag tried.

One spike here and one drop there also give a lag, but they are one coincidence and not a law: `Lag.single_event` says so. For two curves
that each change once and slowly, which leaves nothing new in any one step, compare their `change_point`.

Example: lag(entropy, reward, max_lag=40) is Lag(steps=15, correlation=0.62, p_value=1e-9, share=0.05, n=197): entropy moves 15 steps
before reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from posttrain.core.errors import EvidenceError
from posttrain.stats.intervals import checked_level

Series = Sequence[float] | NDArray[np.float64]
Floats = NDArray[np.float64]

_ORDER = 3
"""Own past values that predict the next one."""

_FEWEST = 20
"""Steps that must still overlap at the largest lag."""


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag between two series, or that none was found.

    Example: Lag(steps=15, correlation=-0.62, p_value=1e-9, share=0.05, n=197); noise gives
    Lag(steps=None, correlation=0.19, p_value=0.4, share=0.2, n=197)
    """

    steps: int | None
    """Positive: the first series leads. None: no correlation beyond chance at any lag tried."""
    correlation: float
    """At the strongest lag; negative if one rises where the other falls."""
    p_value: float
    """Of independent normal series reaching this at any of the lags tried."""
    share: float
    """The largest part of the correlation that a single step contributes."""
    n: int
    """Steps (or blocks of steps) compared."""

    @property
    def found(self) -> bool:
        """Whether the series are linked beyond chance."""
        return self.steps is not None

    @property
    def single_event(self) -> bool:
        """Whether more than a third of the correlation is one event in each series: an observation, not evidence that it would recur."""
        return self.share > 1 / 3


def lag(
    leading: Series,
    lagging: Series,
    max_lag: int,
    every: int = 1,
    sign: Literal["either", "same", "opposite"] = "either",
    level: float = 0.95,
) -> Lag:
    """The lag, within +-max_lag, at which `lagging` follows `leading` most closely. Both lie on one step grid (see `resample`).

    `every` averages blocks of that many steps first: slow movements under much noise show only then, to that resolution. `sign` restricts
    the search to movements in the same or in opposite directions. Missing values are interpolated; a series that is half missing is
    refused. A series that never moves, or lies on one line, has no lag.
    """
    if len(leading) != len(lagging):
        raise EvidenceError(f"{len(leading)} values against {len(lagging)}: both series must lie on one step grid; use resample")
    if max_lag < 1 or every < 1:
        raise EvidenceError(f"max_lag {max_lag} and every {every} must be at least 1")
    first, second = (_news(_blocks(_filled(series), every)) for series in (leading, lagging))
    n, reach = len(first), max(1, max_lag // every)
    if n - reach < _FEWEST:
        raise EvidenceError(
            f"lags up to {max_lag} need at least {(reach + _FEWEST + _ORDER) * every} steps, got {len(leading)}; lower max_lag"
        )
    scale = math.sqrt(float(first @ first) * float(second @ second))
    if scale == 0:
        return Lag(None, 0.0, 1.0, 0.0, n)
    at = np.arange(-reach, reach + 1)
    products = np.array([float(np.sum(_products(first, second, k))) for k in at.tolist()])
    z = products / scale * n / np.sqrt(n - np.abs(at))  # standard normal for independent series
    strength = {"either": np.abs(z), "same": z, "opposite": -z}[sign]
    tied = np.flatnonzero(strength >= strength.max() - 1e-9)
    best = int(tied[np.argmin(np.abs(at[tied]))])
    single = (2 if sign == "either" else 1) * float(special.ndtr(-strength[best]))
    p_value = -math.expm1(len(at) * math.log1p(-min(single, 1 - 1e-12)))
    steps = int(at[best]) * every if p_value <= 1 - checked_level(level) else None
    share = float(np.abs(_products(first, second, int(at[best]))).max() / max(abs(products[best]), 1e-12 * scale))
    return Lag(steps, float(products[best] / scale), p_value, min(1.0, share), n)


def change_point(values: Series, level: float = 0.95) -> int | None:
    """The index at which the mean of a series changes, if it does: where two means fit best, or None if one does as well.

    The difference of the means before and after must exceed what the largest of all splits reaches by chance (Bonferroni), with the
    spread around the two means widened for neighbours that are alike, as in `trend.slope_interval`. A slow change is placed at its
    middle, so the lag between two slow changes is the difference of their change points. A drift without end is placed near the middle
    of the series, which says little. Missing values are interpolated.

    >>> change_point([0.0, 0.2, -0.1, 0.1, 0.0, 0.2, -0.2, 0.1, 1.0, 1.1, 0.9, 1.2, 1.0, 0.8, 1.1, 1.0])
    8
    """
    y = _filled(values)
    n, margin = len(y), 3
    if n < 4 * margin:
        raise EvidenceError(f"a change point needs at least {4 * margin} values, got {n}; take a longer window")
    y = y - y.mean()
    at = np.arange(margin, n - margin + 1)
    before = np.cumsum(y)[at - 1]
    jump = -before / (n - at) - before / at
    best = int(np.argmax(np.abs(jump) * np.sqrt(at * (n - at) / n)))
    split = int(at[best])
    residuals = np.concatenate([y[:split] - y[:split].mean(), y[split:] - y[split:].mean()])
    total = float(residuals @ residuals)
    if total <= 1e-18 * max(1.0, float(y @ y)):
        return split if abs(jump[best]) > 1e-9 else None
    r = float(residuals[1:] @ residuals[:-1]) / total
    r = min(0.95, max(0.0, r + (2 + 4 * r) / n))
    freedom = max(1.0, n * (1 - r) / (1 + r) - 2)
    t = abs(float(jump[best])) / math.sqrt(total / freedom * n / (split * (n - split)))
    chance = 2 * float(special.stdtr(freedom, -t)) * len(at)
    return split if chance <= 1 - checked_level(level) else None


def resample(steps: Sequence[float], values: Sequence[float], grid: Series) -> Floats:
    """The series at the steps of `grid`, interpolated between the steps at which it was logged; NaN outside them.

    Steps logged twice (after a resume) count with their last value; values that are not finite are left out.

    >>> resample([0, 10, 20], [0.0, 1.0, 3.0], [5, 10, 15, 25]).tolist()
    [0.5, 1.0, 2.0, nan]
    """
    if len(steps) != len(values):
        raise EvidenceError(f"{len(steps)} steps against {len(values)} values; every value needs its step")
    last = {float(step): float(value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)}
    wanted = np.asarray(grid, dtype=np.float64)
    if not last:
        return np.full(len(wanted), np.nan)
    known = sorted(last)
    return np.interp(wanted, known, [last[step] for step in known], left=np.nan, right=np.nan)


def _products(first: Floats, second: Floats, k: int) -> Floats:
    """What each step adds to the correlation of `first` with `second` k steps later."""
    n = len(first)
    return first[max(0, -k) : n - max(0, k)] * second[max(0, k) : n - max(0, -k)]


def _filled(series: Series) -> Floats:
    values = np.asarray(series, dtype=np.float64)
    present = np.flatnonzero(np.isfinite(values))
    if 2 * len(present) < len(values) or len(present) < 2:
        raise EvidenceError(f"only {len(present)} of {len(values)} values are finite; a lag needs at least half of each series")
    largest = float(np.abs(values[present]).max())
    kept = values[present] / largest if largest > 1e100 else values[present]  # squares must stay finite; the scale does not matter
    return np.interp(np.arange(len(values)), present, kept)


def _blocks(values: Floats, every: int) -> Floats:
    whole = len(values) // every * every
    return values[len(values) - whole :].reshape(-1, every).mean(axis=1)


def _news(values: Floats) -> Floats:
    """What a straight line and the last three values do not predict, in units of the series' own spread; zeros if nothing is left."""
    n, spread = len(values), float(np.std(values))
    if n <= 3 * _ORDER or spread <= 1e-12 * max(1.0, float(np.abs(values).max())):
        return np.zeros(max(0, n - _ORDER))
    scaled = (values - values.mean()) / spread
    past = [scaled[_ORDER - back : n - back] for back in range(1, _ORDER + 1)]
    known = np.column_stack([np.ones(n - _ORDER), np.linspace(-1, 1, n - _ORDER), *past])
    now = scaled[_ORDER:]
    left = now - known @ np.linalg.lstsq(known, now, rcond=None)[0]
    return left if float(np.std(left)) > 1e-9 else np.zeros(n - _ORDER)
