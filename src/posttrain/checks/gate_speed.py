"""Gate B: a whole training step, sampling and update together, takes less time with the acceleration.

Steps alternate, each pair on the same work, and which goes first alternates too, so that a machine that slows down slows both. What counts
is the paired ratio with its interval: on a noisy machine the interval is wide and nothing is shown.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.checks.gates import Gate, GateResult, Verdict
from posttrain.core.errors import EvidenceError
from posttrain.stats.intervals import Interval, cluster_t

LEAST_PAIRS = 5
Clock = Literal["wall", "cpu"]
CLOCKS: Mapping[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
_FACTOR = 1000.0
"""Bound on the ratio of two step times, for the interval of ratios that are all equal."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to take a training step."""

    reset: Callable[[], None]
    """Back to the starting weights; not timed."""
    step: Callable[[int], None]
    """The step with this number: the same number is the same work in both arms."""


def speed_gate(
    reference: Arm, accelerated: Arm, pairs: int = LEAST_PAIRS, clock: Clock = "wall", clocks: Mapping[Clock, Callable[[], float]] = CLOCKS
) -> GateResult:
    """Time `pairs` pairs of steps after one step of each to warm up.

    Passes when the upper end of the 95 % interval of the time ratio, accelerated over reference, is below 1; fails when the lower end is
    above 1; otherwise nothing is shown. Both clocks are reported; `clock` names the one that decides: "cpu" counts this process alone and
    suits a shared machine and one thread, "wall" is what a user waits for.

    Example: step times 2.0 and 1.0, 2.2 and 1.1, ... give the ratio 0.5.
    """
    if pairs < LEAST_PAIRS:
        raise EvidenceError(f"gate B compares at least {LEAST_PAIRS} pairs of steps, got {pairs}")
    arms = {"reference": reference, "accelerated": accelerated}
    for arm in arms.values():
        _timed(arm, 0, clocks)
    seconds: dict[str, list[dict[Clock, float]]] = {name: [] for name in arms}
    for pair in range(pairs):
        for name in list(arms) if pair % 2 == 0 else list(arms)[::-1]:
            seconds[name].append(_timed(arms[name], pair + 1, clocks))
    ratios = {c: [a[c] / r[c] for a, r in zip(seconds["accelerated"], seconds["reference"], strict=True)] for c in clocks}
    found = {c: ratio_interval(values) for c, values in ratios.items()}
    measured: dict[str, Any] = {"clock": clock, "pairs": pairs}
    for c in clocks:
        ratio, interval = found[c]
        measured[c] = {
            "ratio": ratio,
            "low": interval.low,
            "high": interval.high,
            "reference_seconds": statistics.median(one[c] for one in seconds["reference"]),
            "accelerated_seconds": statistics.median(one[c] for one in seconds["accelerated"]),
            "ratios": ratios[c],
        }
    ratio, interval = found[clock]
    verdict = Verdict.PASSED if interval.high < 1 else Verdict.FAILED if interval.low > 1 else Verdict.NOT_SHOWN
    text = f"step time x {ratio:.3f} [{interval.low:.3f}, {interval.high:.3f}] ({clock} clock, {pairs} pairs)"
    return GateResult(Gate.SPEED, verdict, text, measured)


def _timed(arm: Arm, number: int, clocks: Mapping[Clock, Callable[[], float]]) -> dict[Clock, float]:
    arm.reset()
    started = {name: read() for name, read in clocks.items()}
    arm.step(number)
    return {name: max(read() - started[name], 1e-9) for name, read in clocks.items()}


def ratio_interval(ratios: list[float]) -> tuple[float, Interval]:
    """Geometric mean of paired ratios with a 95 % Student-t interval of their logarithms."""
    logs = [min(max(math.log(ratio), -math.log(_FACTOR)), math.log(_FACTOR)) for ratio in ratios]
    found = cluster_t(logs, 0.95, (-math.log(_FACTOR), math.log(_FACTOR)))
    return math.exp(statistics.fmean(logs)), Interval(math.exp(found.low), math.exp(found.high), found.level, found.method)
