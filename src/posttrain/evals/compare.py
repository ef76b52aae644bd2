"""The change between two models measured under the same conditions, with a paired test; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.core.errors import EvidenceError
from posttrain.evals.conditions import differences
from posttrain.evals.coverage import Coverage, Transitions, coverage, transitions
from posttrain.evals.record import EvalRecord, Role, role_of
from posttrain.stats.grade import Grade, grade_of_comparison
from posttrain.stats.intervals import Interval, normal_quantile, same_method
from posttrain.stats.multiple import holm
from posttrain.stats.paired import mcnemar_exact, paired_difference

POWER = 0.8
"""Chance with which an effect of the detectable size would have been resolved."""
SCOPE = "these two checkpoints on these items; a claim about the method needs several seeds of both"


@dataclass(frozen=True, slots=True)
class McNemar:
    """Exact McNemar test on the discordant items. Example: McNemar(lost=1, gained=5, p_value=0.21875)"""

    lost: int
    """Items only a solved."""
    gained: int
    """Items only b solved."""
    p_value: float


@dataclass(frozen=True, slots=True)
class Change:
    """A paired change over items that both measured.

    Example: Change(delta=0.3, interval=Interval(0.2, 0.4, ...), n=200, p_value=1e-9, method="paired cluster-t", mcnemar=None)
    """

    delta: float
    interval: Interval
    n: int
    p_value: float
    method: str
    mcnemar: McNemar | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The change from a to b on one suite.

    Example: Comparison("arithmetic", "sft", "grpo", delta=0.3, interval=Interval(0.2, 0.4, ...), n=200, p_value=1e-9,
        method="paired cluster-t", mcnemar=None, same_model=False, coverage=None, transitions=None)
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
    same_model: bool
    """Both records measured the same weights."""
    coverage: Coverage | None
    """pass@1, pass@k and pass^k together, when there are several 0/1 samples per item."""
    transitions: Transitions | None
    """What became of the solved items, when values are 0 or 1."""

    @property
    def grade(self) -> Grade:
        """How much the difference between these two checkpoints can bear; it says nothing about the method (`SCOPE`)."""
        return grade_of_comparison(self.delta, self.interval, self.p_value, self.n)

    @property
    def role(self) -> Role:
        """What so many paired items are good for."""
        return role_of(self.n)

    @property
    def resolved(self) -> bool:
        """Whether the gap is beyond the noise: the interval leaves out 0 and the test agrees."""
        return 0.0 not in self.interval and self.p_value < 1 - self.interval.level

    @property
    def picks(self) -> bool:
        """Whether this may choose a checkpoint: enough items, and a gap beyond the noise."""
        return self.resolved and self.role is not Role.PULSE

    @property
    def detectable(self) -> float:
        """The smallest change that so many items with so much disagreement would have resolved in four of five tries.

        Example: a half-width of 0.039 detects 0.039 * (1.96 + 0.84) / 1.96 = 0.056.
        """
        z = normal_quantile(0.5 + self.interval.level / 2)
        return (self.interval.high - self.interval.low) / 2 * (z + normal_quantile(POWER)) / z


def compare(a: EvalRecord, b: EvalRecord, level: float = 0.95) -> Comparison:
    """The paired change from `a` to `b`, items matched by id. Model and label may differ; any other difference raises EvidenceError.

    The message names every condition that differs, with both values.
    """
    _require_same(a, b)
    found = change_between(a, b, level)
    return Comparison(
        suite=a.conditions.suite,
        label_a=a.label,
        label_b=b.label,
        delta=found.delta,
        interval=found.interval,
        n=found.n,
        p_value=found.p_value,
        method=found.method,
        mcnemar=found.mcnemar,
        same_model=a.model_digest == b.model_digest,
        coverage=coverage(a, b),
        transitions=transitions(a, b),
    )


def change_between(a: EvalRecord, b: EvalRecord, level: float = 0.95) -> Change:
    """The paired change over the items that both scored, whatever their conditions; McNemar's test for one 0/1 sample per item."""
    means_a, means_b = a.item_means, b.item_means
    shared = [item_id for item_id in means_a if item_id in means_b]
    result = paired_difference([means_a[i] for i in shared], [means_b[i] for i in shared], level)
    single = a.conditions.samples_per_item == b.conditions.samples_per_item == 1
    if not (single and a.binary and b.binary):
        return Change(result.delta, result.interval, result.n, result.p_value, result.method, None)
    lost = sum(means_a[i] > means_b[i] for i in shared)
    gained = sum(means_b[i] > means_a[i] for i in shared)
    test = McNemar(lost, gained, mcnemar_exact(lost, gained))
    return Change(result.delta, result.interval, result.n, test.p_value, f"{result.interval.method} interval, exact McNemar test", test)


@dataclass(frozen=True, slots=True)
class Row:
    """A comparison among several. Example: Row(comparison, adjusted=0.03)"""

    comparison: Comparison
    adjusted: float | None
    """Holm's p-value over all rows of different models; None where a model is compared with itself."""

    @property
    def grade(self) -> Grade | None:
        """The grade with the adjusted p-value: one of many suites moves by chance."""
        found = self.comparison
        return None if self.adjusted is None else grade_of_comparison(found.delta, found.interval, self.adjusted, found.n)


@dataclass(frozen=True, slots=True)
class Table:
    """Comparisons side by side. Intervals of two methods cannot be built into one.

    Example: Table((Row(...), Row(...))).method  ->  "cluster-t 95%"
    """

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        same_method(row.comparison.interval for row in self.rows)

    @property
    def method(self) -> str:
        return same_method(row.comparison.interval for row in self.rows)


def compare_all(pairs: Sequence[tuple[EvalRecord, EvalRecord]], level: float = 0.95) -> Table:
    """Every pair, with p-values adjusted by Holm for how many there are."""
    found = [compare(a, b, level) for a, b in pairs]
    p_values: Mapping[str, float] = {str(at): one.p_value for at, one in enumerate(found) if not one.same_model}
    adjusted = holm(p_values)
    return Table(tuple(Row(one, adjusted.get(str(at))) for at, one in enumerate(found)))


def _require_same(a: EvalRecord, b: EvalRecord) -> None:
    who = f"cannot compare '{a.label}' with '{b.label}' on '{a.conditions.suite}'"
    if found := differences(a.conditions, b.conditions):
        raise EvidenceError(f"{who}: {'; '.join(map(str, found))}; measure both in the same conditions")
    only = {item.id for item in a.items} ^ {item.id for item in b.items}
    if only:
        raise EvidenceError(f"{who}: {len(only)} item ids are in one only, e.g. '{min(only)}'")
