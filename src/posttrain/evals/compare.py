"""The change between two models measured under the same conditions, with a paired test; anything else is refused by name."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.core.errors import EvidenceError
from posttrain.evals.record import EvalRecord
from posttrain.stats.intervals import Interval
from posttrain.stats.paired import mcnemar_exact, paired_difference

SUGGESTIVE = 0.2
"""Largest p-value that still counts as a hint."""


@dataclass(frozen=True, slots=True)
class McNemar:
    """Exact McNemar test on the discordant items. Example: McNemar(lost=1, gained=5, p_value=0.21875)"""

    lost: int
    """Items only a solved."""
    gained: int
    """Items only b solved."""
    p_value: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The change from a to b on one suite.

    Example: Comparison("arithmetic", "sft", "grpo", delta=0.3, interval=Interval(0.2, 0.4, ...), n=200, p_value=1e-9,
        method="paired cluster-t", mcnemar=None)
    """

    suite: str
    label_a: str
    label_b: str
    delta: float
    """pass@1 of b minus pass@1 of a over the items that both scored."""
    interval: Interval
    n: int
    """Items that both scored."""
    p_value: float
    method: str
    mcnemar: McNemar | None
    """Present when both drew one 0/1 sample per item; then `p_value` is its p-value."""

    @property
    def evidence_grade(self) -> str:
        """ "clear": the interval excludes 0 and p is below 1 - level; "suggestive": p <= 0.2; "none": otherwise."""
        if 0.0 not in self.interval and self.p_value < 1 - self.interval.level:
            return "clear"
        return "suggestive" if self.p_value <= SUGGESTIVE else "none"


def compare(a: EvalRecord, b: EvalRecord, level: float = 0.95) -> Comparison:
    """The paired change from `a` to `b`, items matched by id. Model and label may differ; any other difference raises EvidenceError."""
    _require_same(a, b)
    means_a, means_b = a.item_means, b.item_means
    shared = [item_id for item_id in means_a if item_id in means_b]
    result = paired_difference([means_a[i] for i in shared], [means_b[i] for i in shared], level)
    mcnemar, p_value, method = None, result.p_value, result.method
    if a.conditions.samples_per_item == 1 and a.binary and b.binary:
        lost = sum(means_a[i] > means_b[i] for i in shared)
        gained = sum(means_b[i] > means_a[i] for i in shared)
        p_value = mcnemar_exact(lost, gained)
        mcnemar, method = McNemar(lost, gained, p_value), f"{result.interval.method} interval, exact McNemar test"
    return Comparison(a.conditions.suite, a.label, b.label, result.delta, result.interval, result.n, p_value, method, mcnemar)


def _require_same(a: EvalRecord, b: EvalRecord) -> None:
    theirs = b.conditions.flat()
    for name, value in a.conditions.flat().items():
        if value != theirs[name]:
            raise EvidenceError(
                f"cannot compare '{a.label}' with '{b.label}': {name} is {value!r} against {theirs[name]!r}; "
                "evaluate both with one suite and seed"
            )
    only = {item.id for item in a.items} ^ {item.id for item in b.items}
    if only:
        raise EvidenceError(f"cannot compare '{a.label}' with '{b.label}': {len(only)} item ids are in one only, e.g. '{min(only)}'")
