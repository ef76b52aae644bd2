"""Metrics that carry their own reduction, so that micro-batches and ranks merge to the figure of the whole batch.

A mean of means is wrong whenever the parts differ in size; a `Mean` keeps total and weight apart until it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean. Example: Mean(6.0, 4) + Mean(3.0, 2) reads 1.5."""

    total: float
    weight: float

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def read(self) -> float | None:
        return self.total / self.weight if self.weight else None


@dataclass(frozen=True, slots=True)
class Sum:
    """A total. Example: Sum(3) + Sum(4) reads 7."""

    total: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def read(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """A maximum. Example: Max(3) + Max(4) reads 4."""

    value: float

    def __add__(self, other: Max) -> Max:
        return Max(max(self.value, other.value))

    def read(self) -> float | None:
        return self.value if math.isfinite(self.value) else None


@dataclass(frozen=True, slots=True)
class Effective:
    """Effective sample size as a share: (sum w)^2 / (n sum w^2), 1 when all weigh alike.

    Example: weights 1, 1, 2: 16 / (3 * 6) = 0.889, as Effective(4, 6, 3).
    """

    total: float
    squares: float
    n: int

    def __add__(self, other: Effective) -> Effective:
        return Effective(self.total + other.total, self.squares + other.squares, self.n + other.n)

    def read(self) -> float | None:
        return self.total**2 / (self.n * self.squares) if self.n and self.squares else None


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 - Var(R - v) / Var(R) as sums that add up over parts: 1 for perfect values, 0 for any constant, negative for worse than a constant.

    Example: returns (1, 0) with values (0.8, 0) leave 0.2 and 0: Var(R) 0.25, Var(R - v) 0.01, so 0.96. As a metric of one part:
    ExplainedVariance(count=2, returns=1.0, returns_squared=1.0, residuals=0.2, residuals_squared=0.04).
    """

    count: float
    returns: float
    returns_squared: float
    residuals: float
    residuals_squared: float

    def __add__(self, other: ExplainedVariance) -> ExplainedVariance:
        return ExplainedVariance(
            self.count + other.count,
            self.returns + other.returns,
            self.returns_squared + other.returns_squared,
            self.residuals + other.residuals,
            self.residuals_squared + other.residuals_squared,
        )

    def read(self) -> float | None:
        """None when the returns do not vary: there is nothing to explain."""
        spread = self.returns_squared - self.returns**2 / max(self.count, 1.0)
        if spread <= 1e-12 * self.returns_squared:  # what the rounding of equal returns leaves
            return None
        return 1.0 - (self.residuals_squared - self.residuals**2 / self.count) / spread


Metric = Mean | Sum | Max | Effective | ExplainedVariance


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of several parts of one batch; every part is counted once."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merged[name] + metric if name in merged else metric  # type: ignore[operator]
    return merged


def read(metrics: Mapping[str, Metric]) -> dict[str, float | None]:
    """Plain numbers, in name order."""
    return {name: metrics[name].read() for name in sorted(metrics)}
