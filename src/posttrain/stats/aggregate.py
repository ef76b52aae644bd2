"""Scores of several runs on several tasks in one number with an interval, after rliable (Agarwal et al. 2021, arXiv 2108.13264).

`scores[i]` holds the scores of task i, one per run; tasks may have different numbers of runs, and scores must be comparable across
tasks. Runs are resampled within their task (stratified), so the interval is about other runs on these tasks and not about other tasks.

Example: aggregate([[0.5, 0.6, 0.55], [0.2, 0.3, 0.1, 0.2, 0.3]], iqm, seed=0) is
    Aggregate(value=0.325, interval=Interval(0.25, 0.375, 0.95, "stratified bootstrap"), tasks=2, runs=8)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from posttrain.core.errors import EvidenceError
from posttrain.core.seeds import numpy_rng
from posttrain.stats.bootstrap import Statistic
from posttrain.stats.intervals import Interval, all_equal, checked_level, finite_values

Floats = NDArray[np.float64]
Scores = Sequence[Sequence[float]] | Floats

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One number over tasks and runs.

    Example: Aggregate(value=0.41, interval=Interval(0.33, 0.48, 0.95, "stratified bootstrap"), tasks=2, runs=8)
    """

    value: float
    interval: Interval
    tasks: int
    runs: int
    """Over all tasks, of both sides where two are compared."""


def iqm(values: ArrayLike) -> Floats:
    """Interquartile mean over the last axis: the mean of what is left when a quarter is cut off at each end (rounded down).

    >>> float(iqm([0.0, 1.0, 2.0, 90.0]))
    1.5
    """
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    n = ordered.shape[-1]
    if n == 0:
        raise EvidenceError("the interquartile mean of no values is undefined; pass at least one score")
    return np.asarray(ordered[..., n // 4 : n - n // 4].mean(axis=-1))


def optimality_gap(values: ArrayLike, target: float = 1.0) -> Floats:
    """How far scores fall short of a target on average over the last axis; what exceeds it does not make up for what misses it.

    >>> float(optimality_gap([0.5, 1.5]))
    0.25
    """
    return np.asarray(np.maximum(target - np.asarray(values, dtype=np.float64), 0.0).mean(axis=-1))


def aggregate(scores: Scores, statistic: Statistic, seed: int, level: float = 0.95, resamples: int = 2000) -> Aggregate:
    """A statistic of all scores, such as `iqm`, `optimality_gap` or `bootstrap.mean`, with a stratified bootstrap interval.

    From m runs of a task m - 1 are drawn, not m, which makes the variance right when m is small (Rao and Wu 1988), and the quantiles are
    those of a t with one degree of freedom less per task than there are runs. At least 2 runs per task and 8 in all.
    """
    tasks = _tasks(scores)
    checked_level(level)
    rng, parts = numpy_rng(seed, "stats", "stratified"), []
    for block in _blocks(resamples, sum(len(task) for task in tasks)):
        parts.append(statistic(np.concatenate([_drawn(rng, task, block) for task in tasks], axis=1)))
    value, runs = float(statistic(np.concatenate(tasks)[None, :])[0]), sum(len(task) for task in tasks)
    return Aggregate(value, _percentiles(np.concatenate(parts), level, runs - len(tasks)), len(tasks), runs)


def probability_of_improvement(a: Scores, b: Scores) -> float:
    """The chance that a run of b beats a run of a on the same task, averaged over tasks; a tie counts half.

    >>> probability_of_improvement([[1.0, 2.0], [5.0, 5.0]], [[3.0, 2.0], [5.0, 4.0]])  # (3.5/4 + 1/4) ... of 4 pairs each
    0.5625
    """
    pairs = _matched(a, b, fewest=1)
    return float(np.mean([_wins(first[None, :], second[None, :])[0] for first, second in pairs]))


def improvement(a: Scores, b: Scores, seed: int, level: float = 0.95, resamples: int = 2000) -> Aggregate:
    """`probability_of_improvement` with a stratified bootstrap interval; 0.5 inside it means that neither side is shown to win."""
    pairs = _matched(a, b, fewest=2)
    checked_level(level)
    rng, parts = numpy_rng(seed, "stats", "improvement"), []
    widest = max(len(first) * len(second) for first, second in pairs)
    for block in _blocks(resamples, widest):
        parts.append(np.mean([_wins(_drawn(rng, first, block), _drawn(rng, second, block)) for first, second in pairs], axis=0))
    runs = sum(len(first) + len(second) for first, second in pairs)
    return Aggregate(probability_of_improvement(a, b), _percentiles(np.concatenate(parts), level, runs - 2 * len(pairs)), len(pairs), runs)


def _wins(first: Floats, second: Floats) -> Floats:
    """Per row, the share of pairs in which the second is higher."""
    difference = second[:, None, :] - first[:, :, None]
    return (np.mean(difference > 0, axis=(1, 2)) + np.mean(difference >= 0, axis=(1, 2))) / 2


def _drawn(rng: np.random.Generator, task: Floats, rows: int) -> Floats:
    return task[rng.integers(0, len(task), size=(rows, len(task) - 1))]


def _percentiles(draws: Floats, level: float, freedom: int) -> Interval:
    if all_equal(draws):
        raise EvidenceError("every resample gives the same value, so no width can be stated; add runs, or report the single scores")
    beyond = float(special.ndtr(-special.stdtrit(freedom, 0.5 + level / 2)))
    low, high = np.quantile(draws, [beyond, 1 - beyond])
    return Interval(float(low), float(high), level, "stratified bootstrap")


def _blocks(resamples: int, width: int) -> list[int]:
    rows = max(1, _BLOCK // width)
    whole, rest = divmod(resamples, rows)
    return [rows] * whole + ([rest] if rest else [])


def _tasks(scores: Scores, fewest: int = 2) -> list[Floats]:
    tasks = [np.sort(finite_values(np.asarray(task))) for task in scores]
    if not tasks:
        raise EvidenceError("there is no task to aggregate; pass one row of scores per task")
    for index, task in enumerate(tasks):
        if len(task) < fewest:
            raise EvidenceError(f"task {index} has {len(task)} run(s), at least {fewest} are needed; train more seeds or leave it out")
    total = sum(len(task) for task in tasks)
    if fewest > 1 and total < 8:
        raise EvidenceError(f"{total} runs over {len(tasks)} task(s) are too few for a bootstrap; at least 8 are needed")
    return tasks


def _matched(a: Scores, b: Scores, fewest: int) -> list[tuple[Floats, Floats]]:
    if len(a) != len(b):
        raise EvidenceError(f"{len(a)} tasks against {len(b)}: both sides need the same tasks in the same order")
    return list(zip(_tasks(a, fewest), _tasks(b, fewest), strict=True))
