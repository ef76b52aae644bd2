"""What a training run cost elsewhere: off-target tasks before and after, in several decoding modes.

A mode can flip the sign of a difference, so modes are never pooled: each task has one verdict per mode, and tasks whose modes disagree in
sign are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from posttrain.core.errors import EvidenceError
from posttrain.evals.compare import Comparison, Row, compare_all
from posttrain.evals.record import EvalRecord

Verdict = Literal["kept", "lost", "gained", "unclear"]
MARGIN = 0.05
"""Largest loss of success rate that still counts as kept."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One task in one mode, before and after.

    Example: Kept(dataset="instruct", mode="greedy", thinking="none", row=Row(...), verdict="lost")
    """

    dataset: str
    mode: str
    thinking: str
    row: Row
    verdict: Verdict

    @property
    def comparison(self) -> Comparison:
        return self.row.comparison

    @property
    def decoding(self) -> str:
        """The mode in words. Example: "sampled, thinking off"."""
        return self.mode if self.thinking == "none" else f"{self.mode}, thinking {self.thinking}"


@dataclass(frozen=True, slots=True)
class Flip:
    """A task that gained in one mode and lost in another.

    Example: Flip("gsm8k", "greedy", "sampled", delta_a=0.04, delta_b=-0.03, resolved=False)
    """

    dataset: str
    mode_a: str
    mode_b: str
    delta_a: float
    delta_b: float
    resolved: bool
    """Whether both changes are beyond their noise; otherwise the flip may be noise itself."""


@dataclass(frozen=True, slots=True)
class Retention:
    """The whole report. Example: Retention(kept=(Kept(...), ...), flips=(), method="cluster-t 95%", margin=0.05)"""

    kept: tuple[Kept, ...]
    flips: tuple[Flip, ...]
    method: str
    margin: float

    @property
    def lost(self) -> tuple[Kept, ...]:
        return tuple(one for one in self.kept if one.verdict == "lost")


def retention_report(pairs: Sequence[tuple[EvalRecord, EvalRecord]], margin: float = MARGIN, level: float = 0.95) -> Retention:
    """Judge records of the same suites before and after, paired by item; p-values are Holm's over all of them.

    lost, gained: the interval and the adjusted p-value agree that the score moved. kept: neither, and the interval ends above -margin.
    unclear: neither, and a loss of more than the margin cannot be excluded.
    """
    if not 0 < margin < 1:
        raise EvidenceError(f"a margin of {margin:g} is no loss of a success rate; take one between 0 and 1, e.g. {MARGIN:g}")
    table = compare_all(pairs, level)
    kept = tuple(_judged(before, row, margin) for (before, _), row in zip(pairs, table.rows, strict=True))
    return Retention(kept, tuple(_flips(kept)), table.method, margin)


def _judged(before: EvalRecord, row: Row, margin: float) -> Kept:
    conditions = before.conditions
    return Kept(conditions.dataset, conditions.mode, conditions.thinking, row, _verdict(row, margin))


def _verdict(row: Row, margin: float) -> Verdict:
    found = row.comparison
    if row.adjusted is None:  # the same weights
        return "kept"
    if row.adjusted < 1 - found.interval.level and 0.0 not in found.interval:
        return "gained" if found.delta > 0 else "lost"
    return "kept" if found.interval.low > -margin else "unclear"


def _flips(kept: Sequence[Kept]) -> list[Flip]:
    found = []
    for one, other in combinations(kept, 2):
        a, b = one.comparison, other.comparison
        same_task = one.dataset == other.dataset and (a.label_a, a.label_b) == (b.label_a, b.label_b)
        if same_task and one.decoding != other.decoding and a.delta * b.delta < 0:
            found.append(Flip(one.dataset, one.decoding, other.decoding, a.delta, b.delta, a.resolved and b.resolved))
    return found
