"""Signs of shape: a rise without pause, a saw, a measured score that moved, a channel of the reward. Causal like all signs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.doctor.frame import Frame
from posttrain.doctor.signals import OPS, Op
from posttrain.doctor.windows import mapped, shown, since, third_change, thirds, window_at


@dataclass(frozen=True, slots=True)
class Steady:
    """Over the last `over` values the mean of every fifth lies beyond that of the fifth before, and the last beyond the first by `by`.

    Example: Steady("seconds.rss_mib", ">=", 0.1, over=60, relative=True): memory grows without pause, by 10 % or more.
    """

    metric: str
    op: Literal["<=", ">="]
    by: float
    over: int
    relative: bool = False
    blocks: int = 5

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def since(self, frame: Frame) -> int:
        return since(frame, self.metric, self.over)

    def _means(self, windows: np.ndarray) -> np.ndarray:
        size = self.over // self.blocks
        return windows[:, -size * self.blocks :].reshape(len(windows), self.blocks, size).mean(axis=2)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return mapped(frame, self.metric, start, self.over, self._moved)

    def _moved(self, windows: np.ndarray) -> np.ndarray:
        means = self._means(windows)
        steps = np.diff(means, axis=1) * (1 if self.op == ">=" else -1)
        scale = np.abs(means[:, 0]) if self.relative else 1.0
        return (steps > 0).all(axis=1) & OPS[self.op](means[:, -1] - means[:, 0], self.by * scale)

    def said(self, frame: Frame, row: int) -> str:
        window = window_at(frame, self.metric, row, self.over)
        if len(window) < self.over:
            return f"{self.metric}: too few values"
        return f"{self.metric} {' -> '.join(shown(float(mean)) for mean in self._means(window[None])[0])} over {self.over} values"

    def words(self) -> str:
        by = f"{abs(self.by):.0%}" if self.relative else f"{abs(self.by):g}"
        return f"{self.metric} {'rises' if self.op == '>=' else 'falls'} without pause over {self.over} values, by {by} or more in all"


@dataclass(frozen=True, slots=True)
class Sawtooth:
    """Over the last `over` values the 90th percentile exceeds `factor` times the 10th, and the series crosses their middle `turns` times.

    Example: Sawtooth("seconds.sample", factor=4, over=24, turns=8)
    """

    metric: str
    factor: float
    over: int
    turns: int

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric,)

    def since(self, frame: Frame) -> int:
        return since(frame, self.metric, self.over)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        return mapped(frame, self.metric, start, self.over, self._swings)

    def _swings(self, windows: np.ndarray) -> np.ndarray:
        low, high = np.percentile(windows, [10, 90], axis=1)
        above = windows > ((low + high) / 2)[:, None]
        return (high > self.factor * low) & (np.abs(np.diff(above.astype(int), axis=1)).sum(axis=1) >= self.turns)

    def said(self, frame: Frame, row: int) -> str:
        window = window_at(frame, self.metric, row, self.over)
        if len(window) < 2:
            return f"{self.metric}: too few values"
        low, high = np.percentile(window, [10, 90])
        return f"{self.metric} swings between {shown(float(low))} and {shown(float(high))} over {len(window)} values"

    def words(self) -> str:
        return f"{self.metric} swings {self.factor:g}-fold, {self.turns} times or more in {self.over} values"


@dataclass(frozen=True, slots=True)
class Score:
    """A share of right answers on `items` items moved by `by` between the first and the last third of `over` measurements, by more than
    `sigmas` times its standard error: the larger of what the measurements scatter and what so few items leave open. Many windows are
    looked at in one run, so that two standard errors would be met by luck.

    Example: Score("heldout_mean", "<=", -0.03, over=6); with 36 items per measurement a fall from 0.27 to 0.20 is not enough: two
    measurements per third, 3 sqrt(0.18 (1 / 72 + 1 / 72)) = 0.21.
    """

    metric: str
    op: Literal["<=", ">="]
    by: float
    over: int
    items: str = "heldout_n"
    sigmas: float = 3.0

    @property
    def metrics(self) -> tuple[str, ...]:
        return (self.metric, self.items)

    def since(self, frame: Frame) -> int:
        return since(frame, self.metric, self.over)

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        change = mapped(frame, self.metric, start, self.over, lambda w: third_change(w)[0], empty=np.nan)
        scatter = mapped(frame, self.metric, start, self.over, lambda w: third_change(w)[1], empty=np.nan)
        n = mapped(frame, self.items, start, 1, lambda w: w[:, 0], empty=np.inf) * max(1, self.over // 3)
        p = mapped(frame, self.metric, start, self.over, lambda w: np.clip(w.mean(axis=1), 0, 1), empty=np.nan)
        noise = np.maximum(scatter, np.sqrt(2 * p * (1 - p) / np.maximum(n, 1)))
        return OPS[self.op](change, self.by) & (np.abs(change) > self.sigmas * noise)

    def said(self, frame: Frame, row: int) -> str:
        window = window_at(frame, self.metric, row, self.over)
        if len(window) < 3:
            return f"{self.metric}: too few values"
        first, last = (float(third.mean()) for third in thirds(window[None]))
        n = window_at(frame, self.items, row, 1)
        return f"{self.metric} {shown(first)} -> {shown(last)} over {len(window)} measurements" + (
            f" of {n[0]:.0f} items" if len(n) else ""
        )

    def words(self) -> str:
        way = "rises" if self.op == ">=" else "falls"
        return f"{self.metric} {way} by {abs(self.by):g} or more over {self.over} measurements, beyond what their items leave open"


CORRECTNESS = ("accuracy", "correct", "correctness", "em", "exact", "f1", "outcome", "primary", "right", "solved", "success")
"""Names under which a reward keeps its correctness channel, where reward_primary does not say which one it is."""


@dataclass(frozen=True, slots=True)
class Channel:
    """Some channel of the reward, other than correctness, is beyond a bound in the mean of its last values. The channel whose mean is
    reward_primary is correctness.

    Example: Channel("share", ">", 0.5, last=10) reads channel_format_share, channel_length_share ...
    """

    what: Literal["share", "mean", "std"]
    op: Op
    bound: float
    last: int = 10
    without: Sequence[str] = CORRECTNESS

    @property
    def metrics(self) -> tuple[str, ...]:
        return ()

    def _columns(self, frame: Frame) -> list[str]:
        end = f"_{self.what}"
        names = [name for name in frame.columns if name.startswith("channel_") and name.endswith(end)]
        return sorted(name for name in names if name[len("channel_") : -len(end)] not in self.without)

    def since(self, frame: Frame) -> int:
        return min((since(frame, name, self.last) for name in self._columns(frame)), default=len(frame))

    def holds(self, frame: Frame, start: int = 0) -> np.ndarray:
        found = np.zeros(len(frame) - start, dtype=bool)
        primary = self._mean(frame, "reward_primary", start)
        for name in self._columns(frame):
            own = self._mean(frame, name.removesuffix(self.what) + "mean", start)
            found |= mapped(frame, name, start, self.last, lambda w: OPS[self.op](w.mean(axis=1), self.bound)) & (own != primary)
        return found

    def _mean(self, frame: Frame, name: str, start: int) -> np.ndarray:
        return mapped(frame, name, start, self.last, lambda w: w.mean(axis=1), empty=np.nan)

    def said(self, frame: Frame, row: int) -> str:
        windows = {name: window_at(frame, name, row, self.last) for name in self._columns(frame)}
        said = [f"{name} {shown(float(window.mean()))}" for name, window in windows.items() if len(window)]
        return ", ".join(said) or "no channels were recorded"

    def words(self) -> str:
        return f"{self.what} of a channel other than correctness {self.op} {self.bound:g} (mean of the last {self.last})"
