"""The result of an evaluation, inseparable from its conditions.

A score without n, interval, decoding, versions of extractor and verifier, digests of items, split, template, tokenizer and model, and the
rates of truncation, parsing and grader errors cannot be built: they are the fields, or follow from the outcomes, and construction checks
that the two agree. A stored summary that its outcomes do not support is refused when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from posttrain.core.errors import EvidenceError
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.evals.conditions import Conditions
from posttrain.stats.intervals import Interval, cluster_t, wilson
from posttrain.stats.passk import mean_pass_at_k, mean_pass_hat_k, pass_at_k, pass_hat_k

SCHEMA = 2
MAX_TRUNCATION = 0.02
LONGEST = 10**12
"""No figure of an evaluation is larger; a file that says so is not ours."""
SELECTION_ITEMS, PUBLICATION_ITEMS = 500, 1000
"""At a rate of one half these have 95 % half-widths of 4.4 and 3.1 points: the least that picks a checkpoint and the least to publish."""


class Role(StrEnum):
    """What a measurement is good for. It follows from the number of scored items and can not be claimed."""

    PULSE = "pulse"
    """Shows a trend; decides nothing."""
    SELECTION = "selection"
    """Enough to pick a checkpoint with, if the paired gap is beyond the noise."""
    PUBLICATION = "publication"
    """Enough to quote a small difference."""


def role_of(items: int) -> Role:
    """The role that `items` scored items allow. Example: role_of(499)  ->  Role.PULSE"""
    if items >= PUBLICATION_ITEMS:
        return Role.PUBLICATION
    return Role.SELECTION if items >= SELECTION_ITEMS else Role.PULSE


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
        if isinstance(self.value, bool) or not isinstance(self.value, float | int | None):
            raise EvidenceError(f"an outcome has value {self.value!r}; it is a number, or none when the grader failed")
        if not isinstance(self.length, int) or isinstance(self.length, bool) or not 0 <= self.length <= LONGEST:
            raise EvidenceError(f"an outcome has length {self.length!r}; it is a whole number of tokens")
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
    """Identity of the weights."""
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

    @property
    def role(self) -> Role:
        """What the number is good for, by the items that were scored."""
        return role_of(len(self.item_means))

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

    def pass_hat(self, k: int) -> float:
        """Unbiased pass^k, mean over items: the chance that k samples of one item are all right."""
        return mean_pass_hat_k(self._counts(k), k)

    def pass_hat_interval(self, k: int, level: float = 0.95) -> Interval:
        """Cluster-t interval of `pass_hat(k)` over items."""
        return cluster_t([pass_hat_k(n, c, k) for n, c in self._counts(k)], level)

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
        return {
            "schema": self.schema,
            "label": self.label,
            "model_digest": self.model_digest,
            "role": str(self.role),
            "conditions": self.conditions.to_json(),
            "summary": self._summary(),
            "items": [item_to_json(item) for item in self.items],
        }

    @classmethod
    def from_json(cls, data: Any) -> EvalRecord:
        """The record that `to_json` wrote; EvidenceError for another schema, malformed fields, and figures that do not add up."""
        if not isinstance(data, Mapping):
            raise EvidenceError(f"evaluation record is a {type(data).__name__}, not a mapping; evaluate again")
        if data.get("schema") != SCHEMA:
            raise EvidenceError(f"evaluation record has schema {data.get('schema')!r}, this version reads {SCHEMA}; evaluate again")
        try:
            items = tuple(item_from_json(item) for item in data["items"])
            made = cls(Conditions.from_json(data["conditions"]), data["label"], data["model_digest"], items)
            claimed, role = data["summary"], data["role"]
        except (KeyError, TypeError, ValueError) as error:
            raise EvidenceError(f"evaluation record is malformed ({type(error).__name__}: {error}); evaluate again") from None
        except EvidenceError as error:
            raise EvidenceError(f"evaluation record is malformed: {error}") from None
        if role != made.role:
            raise EvidenceError(
                f"evaluation record claims the role {role!r}, its {len(made.item_means)} scored items make it a {made.role}"
            )
        if wrong := _false_claim(claimed, made._summary()):
            raise EvidenceError(f"evaluation record was changed: {wrong}; evaluate again")
        return made

    def _summary(self) -> dict[str, Any]:
        interval = self.interval()
        return {
            "pass_at_1": self.pass_at_1,
            "interval": [interval.low, interval.high],
            "interval_level": interval.level,
            "interval_method": interval.method,
            "items_scored": len(self.item_means),
            "parse_rate": self.parse_rate,
            "truncation_rate": self.truncation_rate,
            "error_rate": self.error_rate,
            "mean_tokens": self.mean_tokens,
            "bounds": list(self.bounds),
        }

    def _counts(self, k: int) -> list[tuple[int, int]]:
        if not self.binary:
            raise EvidenceError(f"pass@{k} needs 0/1 values, but '{self.conditions.verifier}' gave fractions; report pass_at_1 instead")
        return [(len(item.values), int(sum(item.values))) for item in self.items if item.values]


def require_trustworthy(record: EvalRecord, max_truncation: float = MAX_TRUNCATION) -> None:
    """Raise EvidenceError if `max_truncation` or more of the samples were cut: what they would have answered is unknown."""
    if record.truncation_rate >= max_truncation:
        raise EvidenceError(
            f"{record.truncation_rate:.1%} of the samples of '{record.label}' on '{record.conditions.suite}' were cut at "
            f"{record.conditions.sampling.max_tokens} tokens (limit {max_truncation:.0%}); raise max_tokens, or set allow_truncation=true"
        )


def item_to_json(item: ItemResult) -> dict[str, Any]:
    """One row: {"id": "sums-0", "outcomes": [[1.0, "scored", "end", 7]]}."""
    return {"id": item.id, "outcomes": [[o.value, str(o.status), str(o.stop), o.length] for o in item.outcomes]}


def item_from_json(row: Mapping[str, Any]) -> ItemResult:
    """The row that `item_to_json` wrote; raises KeyError, TypeError, ValueError or EvidenceError for anything else."""
    return ItemResult(row["id"], tuple(_outcome(*outcome) for outcome in row["outcomes"]))


def _outcome(value: float | None, status: str, stop: str, length: int) -> Outcome:
    return Outcome(value, RewardStatus(status), StopReason(stop), length)


def _share(outcomes: tuple[Outcome, ...], holds: Callable[[Outcome], bool]) -> float:
    return sum(map(holds, outcomes)) / len(outcomes)


def _false_claim(claimed: Any, true: Mapping[str, Any]) -> str | None:
    """The first figure of a stored summary that differs from what the outcomes give, by more than rounding."""
    if not isinstance(claimed, Mapping):
        return "it has no summary"
    for name, value in true.items():
        said = claimed.get(name)
        if isinstance(value, list):
            same = isinstance(said, list) and len(said) == len(value) and all(map(_close, said, value))
        else:
            same = _close(said, value) if isinstance(value, float | int) else said == value
        if not same:
            return f"{name} says {said!r}, its outcomes give {value!r}"
    return None


def _close(said: Any, true: float) -> bool:
    return isinstance(said, float | int) and abs(said) < LONGEST and math.isclose(said, true, rel_tol=1e-9, abs_tol=1e-12)


def _check(record: EvalRecord) -> None:
    conditions, where = record.conditions, f"evaluation of '{record.label}' on '{record.conditions.suite}'"
    for name in ("label", "model_digest"):
        if not isinstance(getattr(record, name), str) or not getattr(record, name):
            raise EvidenceError(f"{where} does not state its {name}; a score means nothing without it")
    distinct = len({item.id for item in record.items})
    if len(record.items) != conditions.n_items or distinct != conditions.n_items:
        raise EvidenceError(f"{where} has {distinct} distinct items, conditions say {conditions.n_items}")
    for item in record.items:
        if not isinstance(item.id, str):
            raise EvidenceError(f"{where}: an item has the id {item.id!r}; ids are text")
        if len(item.outcomes) != conditions.samples_per_item:
            raise EvidenceError(f"{where}: item '{item.id}' has {len(item.outcomes)} samples, conditions say {conditions.samples_per_item}")
    scored = len(record.item_means)
    if scored < 2:
        raise EvidenceError(f"{where}: {scored} of {len(record.items)} items were scored, an interval needs 2; fix the grader or add items")
