"""Signs of a failure as data: small causal tests over a frame. The catalog is written in them, alarms evaluate them while a run trains,
and the doctor quotes the figures that made them hold.

A test at a row sees that row and earlier ones only, so that a replay fires exactly when the live run did. A sign whose metric was not
recorded never holds; `since` says whether that is why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from posttrain.doctor.frame import Frame
from posttrain.doctor.windows import mapped, shown, since, tail, third_change, thirds, window_at

Op = Literal["<", "<=", ">", ">="]
Stat = Literal["mean", "median", "min", "max", "p95", "every"]
OPS: Mapping[str, Callable[[Any, Any], Any]] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_STATS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "mean": lambda w: w.mean(axis=1),
    "median": lambda w: np.median(w, axis=1),
    "min": lambda w: w.min(axis=1),
    "max": lambda w: w.max(axis=1),
    "p95": lambda w: np.percentile(w, 95, axis=1),
}


class Signal(Protocol):
    """One sign."""

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        """Whether it holds, for each row from `start` to the last; all False when it cannot be known."""
        ...

    def since(self, frame: Frame) -> int:
        """The first row from which it can be told; the number of rows when it never can."""
        ...

    def said(self, frame: Frame, row: int) -> str:
        """The figures at a row, as evidence."""
        ...

    def words(self) -> str:
        """The rule, for the documentation."""
        ...

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the columns it reads."""
        ...


@dataclass(frozen=True, slots=True)
class Bound:
    """A threshold that stable runs of one family calibrate; `default` holds until they do.

    Example: Bound("entropy_floor", 0.10)
    """

    name: str
    default: float

    def of(self, frame: Frame) -> float:
        """The value that holds for this run."""
        return float(frame.bounds.get(self.name, self.default))


def _bound(bound: float | Bound, frame: Frame) -> float:
    return bound.of(frame) if isinstance(bound, Bound) else bound


def _bound_words(bound: float | Bound) -> str:
    return f"{bound.default:g} [{bound.name}]" if isinstance(bound, Bound) else f"{bound:g}"


@dataclass(frozen=True, slots=True)
class Level:
    """A statistic of the last values is beyond a bound.

    Example: Level("entropy", "<", Bound("entropy_floor", 0.1), last=10, stat="every"): ten steps in a row below the floor.
    """

    metric: str
    op: Op
    bound: float | Bound
    last: int = 1
    stat: Stat = "mean"

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def since(self, frame: Frame) -> int:
        return since(frame, self.metric, self.last)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return mapped(frame, self.metric, start, self.last, lambda windows: self._beyond(windows, _bound(self.bound, frame)))

    def _beyond(self, windows: np.ndarray, bound: float) -> np.ndarray:
        stat = self.stat
        if stat == "every":
            stat = "max" if self.op in ("<", "<=") else "min"
        return OPS[self.op](_STATS[stat](windows), bound)

    def said(self, frame: Frame, row: int) -> str:
        window = window_at(frame, self.metric, row, self.last)
        if not len(window):
            return f"{self.metric} was not recorded"
        stat = {"every": "last", "p95": "95th percentile of last"}.get(self.stat, f"{self.stat} of last")
        figure = tail(window) if self.stat == "every" else shown(float(_STATS[self.stat](window[None])[0]))
        many = "" if self.last == 1 else f" ({stat} {len(window)})"
        return f"{self.metric} {figure}{many}, bound {self.op} {shown(_bound(self.bound, frame))}"

    def words(self) -> str:
        over = {"every": f" for {self.last} steps in a row"}.get(self.stat, f" ({self.stat} of the last {self.last})")
        return f"{self.metric} {self.op} {_bound_words(self.bound)}{over if self.last > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Change:
    """Over the last `over` values the mean of the last third differs from that of the first third by at least `by`, and by more than twice
    its standard error, so that noise is no trend.

    Example: Change("length_p50", ">=", 0.3, over=30, relative=True): 30 % longer than twenty to thirty steps ago.
    """

    metric: str
    op: Literal["<=", ">="]
    by: float
    over: int
    relative: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def since(self, frame: Frame) -> int:
        return since(frame, self.metric, self.over)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return mapped(frame, self.metric, start, self.over, self._moved)

    def _moved(self, windows: np.ndarray) -> np.ndarray:
        change, noise = third_change(windows)
        scale = np.abs(thirds(windows)[0].mean(axis=1)) if self.relative else 1.0
        return OPS[self.op](change, self.by * scale) & (np.abs(change) > 2 * noise)

    def said(self, frame: Frame, row: int) -> str:
        window = window_at(frame, self.metric, row, self.over)
        if len(window) < 3:
            return f"{self.metric}: too few values"
        first, last = (float(third.mean()) for third in thirds(window[None]))
        return f"{self.metric} {shown(first)} -> {shown(last)} over {len(window)} values"

    def words(self) -> str:
        sign = "rises" if self.op == ">=" else "falls"
        by = f"{abs(self.by):.0%}" if self.relative else f"{abs(self.by):g}"
        return f"{self.metric} {sign} by {by} or more over {self.over} values, beyond its noise"


@dataclass(frozen=True, slots=True)
class Flat:
    """Over the last `over` values the change of thirds stays within `within`.

    Example: Flat("heldout_mean", within=0.02, over=6)
    """

    metric: str
    within: float
    over: int
    relative: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def since(self, frame: Frame) -> int:
        return since(frame, self.metric, self.over)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return mapped(frame, self.metric, start, self.over, self._still)

    def _still(self, windows: np.ndarray) -> np.ndarray:
        change, _ = third_change(windows)
        scale = np.abs(thirds(windows)[0].mean(axis=1)) if self.relative else 1.0
        return np.abs(change) <= self.within * scale

    def said(self, frame: Frame, row: int) -> str:
        window = window_at(frame, self.metric, row, self.over)
        if len(window) < 3:
            return f"{self.metric}: too few values"
        first, last = (float(third.mean()) for third in thirds(window[None]))
        return f"{self.metric} flat: {shown(first)} -> {shown(last)} over {len(window)} values"

    def words(self) -> str:
        within = f"{self.within:.0%}" if self.relative else f"{self.within:g}"
        return f"{self.metric} moves by no more than {within} over {self.over} values"


@dataclass(frozen=True, slots=True)
class Versus:
    """The median of the last values against a multiple of the run's own beginning.

    Example: Versus("turns", ">", 1.5, baseline=10, last=3): the strategy changed.
    """

    metric: str
    op: Op
    factor: float
    baseline: int = 10
    last: int = 3

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def since(self, frame: Frame) -> int:
        return since(frame, self.metric, self.baseline + self.last)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        first = self.since(frame)  # the windows after the baseline begin here
        if first >= len(frame):
            return np.zeros(len(frame) - start, dtype=bool)
        column = frame.columns[self.metric]
        bound = self.factor * float(np.median(column.values[: self.baseline]))
        found = mapped(frame, self.metric, start, self.last, lambda windows: OPS[self.op](np.median(windows, axis=1), bound))
        found[: max(0, min(len(found), first - start))] = False
        return found

    def said(self, frame: Frame, row: int) -> str:
        window = window_at(frame, self.metric, row, self.last)
        if self.since(frame) > row:
            return f"{self.metric}: too few values"
        base = float(np.median(frame.columns[self.metric].values[: self.baseline]))
        return f"{self.metric} {shown(float(np.median(window)))} against {shown(base)} in the first {self.baseline} steps"

    def words(self) -> str:
        return f"{self.metric} (median of {self.last}) {self.op} {self.factor:g} x its median over the first {self.baseline} steps"


@dataclass(frozen=True, slots=True)
class Jump:
    """The last value lies more than `z` robust standard deviations from the median of the `over` values before it, and by `least` or more.

    Example: Jump("kl", ">", z=8, over=20, least=0.1)
    """

    metric: str
    op: Literal["<", ">"]
    z: float
    over: int
    least: float = 0.0

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def since(self, frame: Frame) -> int:
        return since(frame, self.metric, self.over + 1)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return mapped(frame, self.metric, start, self.over + 1, self._jumped)

    def _jumped(self, windows: np.ndarray) -> np.ndarray:
        before, last = windows[:, :-1], windows[:, -1]
        centre = np.median(before, axis=1)
        spread = 1.4826 * np.median(np.abs(before - centre[:, None]), axis=1)
        away = last - centre if self.op == ">" else centre - last
        return (away > self.z * spread) & (away > self.least)

    def said(self, frame: Frame, row: int) -> str:
        window = window_at(frame, self.metric, row, self.over + 1)
        if len(window) < 2:
            return f"{self.metric}: too few values"
        return f"{self.metric} {shown(float(window[-1]))} after a median of {shown(float(np.median(window[:-1])))}"

    def words(self) -> str:
        way = "above" if self.op == ">" else "below"
        return f"{self.metric} jumps {self.z:g} robust deviations {way} the median of the {self.over} values before"


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference of two metrics' recent means.

    Example: Gap("reward_mean", "heldout_mean", ">", 0.2, last=5)
    """

    metric: str
    other: str
    op: Op
    bound: float
    last: int = 1

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, self.other)

    def since(self, frame: Frame) -> int:
        return max(since(frame, name, self.last) for name in self.metrics)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        means = [mapped(frame, name, start, self.last, lambda w: w.mean(axis=1), empty=np.nan) for name in self.metrics]
        with np.errstate(invalid="ignore"):
            return OPS[self.op](means[0] - means[1], self.bound)

    def said(self, frame: Frame, row: int) -> str:
        windows = [window_at(frame, name, row, self.last) for name in self.metrics]
        if not all(map(len, windows)):
            return f"{self.metric} or {self.other} was not recorded"
        first, second = (float(w.mean()) for w in windows)
        return f"{self.metric} {shown(first)}, {self.other} {shown(second)}"

    def words(self) -> str:
        return f"{self.metric} - {self.other} {self.op} {self.bound:g} (means of the last {self.last})"
