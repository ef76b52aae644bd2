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


Metric = Mean | Sum | Max


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
