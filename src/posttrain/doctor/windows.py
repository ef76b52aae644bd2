"""Windows over the known values of a column, one per row, without copying."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from posttrain.doctor.frame import Frame


def since(frame: Frame, metric: str, values: int) -> int:
    """The row at which a metric has had `values` known values."""
    column = frame.columns.get(metric)
    return len(frame) if column is None or column.size < values else int(column.positions[values - 1])


def mapped(
    frame: Frame, metric: str, start: int, width: int, test: Callable[[np.ndarray], np.ndarray], empty: float | bool = False
) -> np.ndarray:
    """`test` over every full window of `width` known values, spread to the rows from `start` on: a row has its last known value's."""
    out = np.full(len(frame) - start, empty)
    column = frame.columns.get(metric)
    if column is None or column.size < width or not len(out):
        return out
    if len(out) == 1:  # the last row, as a run asks while it trains: nothing is recorded behind it
        out[0] = test(column.values[-width:][None])[0]
        return out
    rows = np.arange(start, len(frame))
    index = np.searchsorted(column.positions, rows, side="right") - 1
    first = max(width - 1, int(index[0]))
    if index[-1] < first:
        return out
    windows = sliding_window_view(column.values[first - width + 1 :], width)[: int(index[-1]) - first + 1]
    found = test(windows)
    inside = index >= first
    out[inside] = found[index[inside] - first]
    return out


def window_at(frame: Frame, metric: str, row: int, width: int) -> np.ndarray:
    """The last `width` known values at a row."""
    column = frame.columns.get(metric)
    if column is None:
        return np.empty(0)
    end = int(np.searchsorted(column.positions, row, side="right"))
    return column.values[max(0, end - width) : end]


def shown(value: float) -> str:
    """A figure with as many digits as evidence needs."""
    return f"{value:.3g}"


def thirds(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last third of every window."""
    third = max(1, windows.shape[1] // 3)
    return windows[:, :third], windows[:, -third:]


def third_change(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Last third minus first third, and the standard error of that difference."""
    first, last = thirds(windows)
    n = first.shape[1]
    variance = (first.var(axis=1, ddof=1) + last.var(axis=1, ddof=1)) / n if n > 1 else np.zeros(len(windows))
    return last.mean(axis=1) - first.mean(axis=1), np.sqrt(variance)


def tail(window: np.ndarray) -> str:
    """The last few values as text."""
    last = [shown(float(value)) for value in window[-4:]]
    return ("... " if len(window) > 4 else "") + ", ".join(last)
