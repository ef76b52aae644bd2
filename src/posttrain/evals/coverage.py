"""What a change in pass@1 hides: whether the model reaches more than before, or only hits more often what it could reach already.

    pass@1 up, pass@k down    sharpened: the same problems, more reliably, and fewer of them
    pass@1 up, pass@k up      expanded: problems are solved that were out of reach
    anything else             neither can be said

pass@1 is what a user meets, pass@k what the model can reach in k attempts, pass^k what can be relied on k times in a row; all three come
from the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.evals.record import EvalRecord
from posttrain.stats.intervals import Interval
from posttrain.stats.paired import paired_difference
from posttrain.stats.passk import pass_at_k, pass_hat_k

Verdict = Literal["sharpened", "expanded", "neither"]
Counts = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Change:
    """A rate before and after, over the same items. Example: Change(k=8, a=0.5, b=0.625, interval=Interval(0.02, 0.23, ...))"""

    k: int
    a: float
    b: float
    interval: Interval
    """Of b - a, paired by item."""

    @property
    def delta(self) -> float:
        return self.b - self.a


@dataclass(frozen=True, slots=True)
class Coverage:
    """pass@1, pass@k and pass^k of two models, and what they say together.

    Example: Coverage(at_1, at_k, hat_k, verdict="sharpened", why="pass@1 rose, pass@8 fell ...", crossover=4)
    """

    at_1: Change
    at_k: Change
    hat_k: Change
    verdict: Verdict
    why: str
    crossover: int | None
    """Smallest k from which on pass@k orders the two models the other way round than pass@1; None when none does up to the k drawn."""


@dataclass(frozen=True, slots=True)
class Transitions:
    """Items by what became of them; solved means that at least one sample was right.

    Example: Transitions(kept=40, gained=12, lost=3, unsolved=45)
    """

    kept: int
    gained: int
    lost: int
    unsolved: int


def coverage(a: EvalRecord, b: EvalRecord) -> Coverage | None:
    """The verdict for two records in the same conditions; None without two scored 0/1 samples of every item in both."""
    counts_a, counts_b = _counts(a, b)
    k = min((n for n, _ in [*counts_a, *counts_b]), default=0)
    if k < 2 or len(counts_a) < 2 or not (a.binary and b.binary):
        return None
    at_1, at_k = (_change(counts_a, counts_b, size, pass_at_k) for size in (1, k))
    verdict, why = _verdict(at_1, at_k)
    return Coverage(at_1, at_k, _change(counts_a, counts_b, k, pass_hat_k), verdict, why, _crossover(counts_a, counts_b, k))


def transitions(a: EvalRecord, b: EvalRecord) -> Transitions | None:
    """What became of every item that both records scored; None for values other than 0 and 1."""
    if not (a.binary and b.binary):
        return None
    solved = [(right_a > 0, right_b > 0) for (_, right_a), (_, right_b) in zip(*_counts(a, b), strict=True)]
    return Transitions(*(solved.count(pair) for pair in ((True, True), (False, True), (True, False), (False, False))))


def _counts(a: EvalRecord, b: EvalRecord) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(scored, right) of the items that both scored, in the same order."""
    theirs = {item.id: item for item in b.items if item.values}
    mine = [item for item in a.items if item.values and item.id in theirs]
    rows = [[(len(item.values), round(sum(item.values))) for item in side] for side in (mine, [theirs[item.id] for item in mine])]
    return rows[0], rows[1]


def _change(counts_a: Counts, counts_b: Counts, k: int, estimate: Callable[[int, int, int], float]) -> Change:
    values_a, values_b = ([estimate(n, c, k) for n, c in counts] for counts in (counts_a, counts_b))
    interval = paired_difference(values_a, values_b).interval
    return Change(k, sum(values_a) / len(values_a), sum(values_b) / len(values_b), interval)


def _verdict(at_1: Change, at_k: Change) -> tuple[Verdict, str]:
    moved = [_moved(change) for change in (at_1, at_k)]
    why = f"pass@1 {moved[0]}, pass@{at_k.k} {moved[1]}"
    if moved == ["rose", "fell"]:
        return "sharpened", why
    if moved == ["rose", "rose"]:
        return "expanded", why
    return "neither", why


def _moved(change: Change) -> str:
    if change.interval.low > 0:
        return "rose"
    return "fell" if change.interval.high < 0 else "did not move beyond noise"


def _crossover(counts_a: Counts, counts_b: Counts, k: int) -> int | None:
    def lead(size: int) -> float:
        return sum(pass_at_k(*b, size) - pass_at_k(*a, size) for a, b in zip(counts_a, counts_b, strict=True))

    first = lead(1)
    noise = 1e-9 * len(counts_a)
    return next((size for size in range(2, k + 1) if first * lead(size) < 0 and min(abs(first), abs(lead(size))) > noise), None)
