"""The result of an evaluation, inseparable from its conditions: items, samples, decoding, grader, template, seed.

A score without n, interval, decoding mode, grader version, item digest and truncation rate cannot be built: they are the fields, and
construction checks that they agree with the outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.stats.intervals import Interval, cluster_t, wilson
from posttrain.stats.passk import mean_pass_at_k, pass_at_k

SCHEMA = 1
MAX_TRUNCATION = 0.02


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything besides the model that a score depends on.

    Example: Conditions("arithmetic", "9f2c...", 200, 4, Sampling(max_tokens=24), "hash-marker/1", "77ab...", seed=0)
    """

    suite: str
    items_digest: str
    n_items: int
    samples_per_item: int
    sampling: Sampling
    grader: str
    template_digest: str
    seed: int
    turns: int = 1
    """Most assistant turns of an episode."""

    def flat(self) -> dict[str, Any]:
        """Field names to plain values, sampling fields dotted."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "sampling"}
        return plain | {f"sampling.{name}": value for name, value in self.sampling.model_dump(mode="json").items()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scored sample: `value` in [0, 1], or None when the grader failed; `length` in sampled tokens.

    Example: Outcome(1.0, RewardStatus.SCORED, StopReason.END, length=9)
    """

    value: float | None
    status: RewardStatus
    stop: StopReason
    length: int

    def __post_init__(self) -> None:
        if (self.value is None) != (self.status is RewardStatus.ERROR):
            raise EvidenceError(f"an outcome with value {self.value} has status '{self.status}'; only a grader error has no value")
        if self.value is not None and not 0.0 <= self.value <= 1.0:
            raise EvidenceError(f"an evaluation value of {self.value} is outside [0, 1]; use a grader that scores success between 0 and 1")


@dataclass(frozen=True, slots=True)
class ItemResult:
    """All samples of one item.

    Example: ItemResult("add-2-3", (Outcome(1.0, ...), Outcome(0.0, ...)))
    """

    id: str
    outcomes: tuple[Outcome, ...]

    @property
    def values(self) -> tuple[float, ...]:
        """Values of the samples that were scored."""
        return tuple(outcome.value for outcome in self.outcomes if outcome.value is not None)

    @property
    def mean(self) -> float | None:
        """Mean value of the scored samples; None if the grader failed on all."""
        return sum(self.values) / len(self.values) if self.values else None


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One model under one suite.

    Example, 2 items of 1 sample, one right:  record.pass_at_1 == 0.5, record.interval() == wilson(1, 2)
    """

    conditions: Conditions
    label: str
    """Which model, in words, e.g. the rung "sft"."""
    model_digest: str
    """Identity of the weights; empty when unknown."""
    items: tuple[ItemResult, ...]
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check(self)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(outcome for item in self.items for outcome in item.outcomes)

    @property
    def item_means(self) -> dict[str, float]:
        """Item id to the mean of its scored samples; items on which the grader failed throughout are absent."""
        return {item.id: item.mean for item in self.items if item.mean is not None}

    @property
    def binary(self) -> bool:
        """Every value is 0 or 1."""
        return all(outcome.value in (None, 0.0, 1.0) for outcome in self.outcomes)

    @property
    def pass_at_1(self) -> float:
        """Mean over items of the mean over scored samples: the chance that one sample succeeds. A fractional value counts as its share."""
        means = self.item_means.values()
        return sum(means) / len(means)

    def interval(self, level: float = 0.95) -> Interval:
        """Wilson for one 0/1 sample per item without errors, else cluster-t over items; the method is named in the result."""
        means = list(self.item_means.values())
        if self.conditions.samples_per_item == 1 and self.error_rate == 0 and self.binary:
            return wilson(sum(means), len(means), level)
        return cluster_t(means, level)

    def pass_at(self, k: int) -> float:
        """Unbiased pass@k, mean over items; raises EvidenceError for k above the scored samples of an item or for fractional values."""
        return mean_pass_at_k(self._counts(k), k)

    def pass_at_interval(self, k: int, level: float = 0.95) -> Interval:
        """Cluster-t interval of `pass_at(k)` over items."""
        return cluster_t([pass_at_k(n, c, k) for n, c in self._counts(k)], level)

    @property
    def parse_rate(self) -> float:
        """Share of judged samples (no grader error) in which an answer was found; a truncated sample counts as not parsed."""
        judged = [outcome for outcome in self.outcomes if outcome.status is not RewardStatus.ERROR]
        return sum(outcome.status is RewardStatus.SCORED for outcome in judged) / len(judged)

    @property
    def truncation_rate(self) -> float:
        """Share of samples cut by the token budget."""
        return _share(self.outcomes, lambda outcome: outcome.stop is StopReason.LENGTH)

    @property
    def error_rate(self) -> float:
        """Share of samples on which the grader itself failed."""
        return _share(self.outcomes, lambda outcome: outcome.status is RewardStatus.ERROR)

    @property
    def mean_tokens(self) -> float:
        """Mean completion length in tokens, the stop token included."""
        return sum(outcome.length for outcome in self.outcomes) / len(self.outcomes)

    @property
    def bounds(self) -> tuple[float, float]:
        """pass@1 if every grader error had been a wrong, respectively a right answer; both equal `pass_at_1` without errors."""
        known = sum(outcome.value or 0.0 for outcome in self.outcomes)
        errors = sum(outcome.value is None for outcome in self.outcomes)
        return known / len(self.outcomes), (known + errors) / len(self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping; `summary` repeats the derived figures for readers without this code."""
        interval = self.interval()
        conditions = {name: getattr(self.conditions, name) for name in Conditions.__slots__}
        return {
            "schema": self.schema,
            "label": self.label,
            "model_digest": self.model_digest,
            "conditions": conditions | {"sampling": self.conditions.sampling.model_dump(mode="json")},
            "summary": {
                "pass_at_1": self.pass_at_1,
                "interval": [interval.low, interval.high],
                "interval_level": interval.level,
                "interval_method": interval.method,
                "parse_rate": self.parse_rate,
                "truncation_rate": self.truncation_rate,
                "error_rate": self.error_rate,
                "mean_tokens": self.mean_tokens,
                "bounds": list(self.bounds),
            },
            "items": [
                {"id": item.id, "outcomes": [[o.value, str(o.status), str(o.stop), o.length] for o in item.outcomes]} for item in self.items
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EvalRecord:
        """The record that `to_json` wrote; raises EvidenceError on another schema or on missing or malformed fields."""
        if data.get("schema") != SCHEMA:
            raise EvidenceError(f"evaluation record has schema {data.get('schema')}, this version reads {SCHEMA}; evaluate again")
        try:
            conditions = Conditions(**data["conditions"] | {"sampling": Sampling.load(data["conditions"]["sampling"])})
            items = tuple(ItemResult(item["id"], tuple(_outcome(*o) for o in item["outcomes"])) for item in data["items"])
            return cls(conditions, data["label"], data["model_digest"], items)
        except (KeyError, TypeError, ValueError) as error:
            raise EvidenceError(f"evaluation record is malformed ({type(error).__name__}: {error}); evaluate again") from None

    def _counts(self, k: int) -> list[tuple[int, int]]:
        if not self.binary:
            raise EvidenceError(f"pass@{k} needs 0/1 values, but '{self.conditions.grader}' gave fractions; report pass_at_1 instead")
        return [(len(item.values), int(sum(item.values))) for item in self.items if item.values]


def require_trustworthy(record: EvalRecord, max_truncation: float = MAX_TRUNCATION) -> None:
    """Raise EvidenceError if `max_truncation` or more of the samples were cut: what they would have answered is unknown."""
    if record.truncation_rate >= max_truncation:
        raise EvidenceError(
            f"{record.truncation_rate:.1%} of the samples of '{record.label}' on '{record.conditions.suite}' were cut at "
            f"{record.conditions.sampling.max_tokens} tokens (limit {max_truncation:.0%}); raise max_tokens, or pass allow_truncation"
        )


def _outcome(value: float | None, status: str, stop: str, length: int) -> Outcome:
    return Outcome(value, RewardStatus(status), StopReason(stop), length)


def _share(outcomes: tuple[Outcome, ...], holds: Callable[[Outcome], bool]) -> float:
    return sum(map(holds, outcomes)) / len(outcomes)


def _check(record: EvalRecord) -> None:
    conditions, where = record.conditions, f"evaluation of '{record.label}' on '{record.conditions.suite}'"
    for name in ("suite", "items_digest", "grader", "template_digest"):
        if not getattr(conditions, name):
            raise EvidenceError(f"{where} does not state its {name}; a score means nothing without it")
    if len(record.items) != conditions.n_items or len({item.id for item in record.items}) != conditions.n_items:
        raise EvidenceError(f"{where} has {len({item.id for item in record.items})} distinct items, conditions say {conditions.n_items}")
    for item in record.items:
        if len(item.outcomes) != conditions.samples_per_item or not item.outcomes:
            raise EvidenceError(f"{where}: item '{item.id}' has {len(item.outcomes)} samples, conditions say {conditions.samples_per_item}")
    scored = len(record.item_means)
    if scored < 2:
        raise EvidenceError(f"{where}: {scored} of {len(record.items)} items were scored, an interval needs 2; fix the grader or add items")
