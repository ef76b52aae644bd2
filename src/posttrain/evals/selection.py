"""The best of several checkpoints, picked on one split and reported on another.

The highest of K noisy scores is too high: the luck that made it win is part of it. So the score that picked is never the score that is
reported, a gap inside the paired noise picks nothing, and fewer than 500 items are no basis for a pick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.core.errors import EvidenceError
from posttrain.evals.compare import compare
from posttrain.evals.conditions import differences
from posttrain.evals.record import SELECTION_ITEMS, EvalRecord, Role
from posttrain.stats.multiple import holm

FREE = frozenset({"suite", "split", "split_digest", "items_digest", "n_items", "seed"})
"""What may differ between the split that picks and the split that reports; anything else would be taken for optimism."""
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Selection:
    """What was picked, and what it is worth.

    Example: Selection(suite="arithmetic", scores={"grpo-40": 0.62, "grpo-20": 0.55}, best="grpo-40", tied=(), gap=0.07, winner="grpo-40",
        pick=0.62, report=EvalRecord(...), optimism=0.02)
    """

    suite: str
    scores: dict[str, float]
    """pass@1 on the picking split, best first."""
    best: str
    """The highest score, whether or not it wins."""
    tied: tuple[str, ...]
    """Candidates that the noise does not tell from the best."""
    gap: float
    """Best minus runner-up."""
    winner: str | None
    """The best, when nothing is tied with it."""
    pick: float
    """Score of the best on the split that picked; not to be reported."""
    report: EvalRecord | None
    """The winner on a split that took no part."""
    optimism: float | None
    """pick minus report: what the choice added to the score."""


def select(candidates: Sequence[EvalRecord], report: Sequence[EvalRecord] = ()) -> Selection:
    """Pick the best of `candidates`, records of several checkpoints in the same conditions, and look it up in `report`.

    Raises EvidenceError for candidates of unequal conditions or fewer than 500 scored items, and for a report on items that picked, in
    other conditions, or without the winner.
    """
    suite, labels = _checked(candidates)
    ranked = sorted(candidates, key=lambda record: -record.pass_at_1)
    best, others = ranked[0], ranked[1:]
    changes = {record.label: compare(record, best, LEVEL) for record in others}
    adjusted = holm({label: change.p_value for label, change in changes.items()})
    tied = tuple(label for label, change in changes.items() if adjusted[label] >= 1 - LEVEL or 0.0 in change.interval)
    winner = None if tied else best.label
    reported = _reported(best, report) if report and winner else None
    return Selection(
        suite=suite,
        scores={record.label: record.pass_at_1 for record in ranked},
        best=best.label,
        tied=tied,
        gap=best.pass_at_1 - others[0].pass_at_1,
        winner=winner,
        pick=best.pass_at_1,
        report=reported,
        optimism=best.pass_at_1 - reported.pass_at_1 if reported else None,
    )


def _checked(candidates: Sequence[EvalRecord]) -> tuple[str, list[str]]:
    labels = [record.label for record in candidates]
    if len(set(labels)) < 2:
        raise EvidenceError(f"{len(set(labels))} checkpoint to choose from ({', '.join(labels) or 'none'}); give records of at least 2")
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise EvidenceError(f"two records of '{twice}'; give one per checkpoint")
    for record in candidates:
        if record.role is Role.PULSE:
            scored = len(record.item_means)
            raise EvidenceError(
                f"'{record.label}' was scored on {scored} items, a pulse; picking a checkpoint takes {SELECTION_ITEMS} or more"
            )
    return candidates[0].conditions.suite, labels


def _reported(best: EvalRecord, report: Sequence[EvalRecord]) -> EvalRecord:
    mine = [record for record in report if record.model_digest == best.model_digest]
    if not mine:
        seen = ", ".join(f"'{record.label}'" for record in report)
        raise EvidenceError(
            f"the winner '{best.label}' ({best.model_digest}) is not among the reported {seen}; measure it on the other split"
        )
    record, conditions = mine[0], mine[0].conditions
    again = {item.id for item in record.items} & {item.id for item in best.items}
    if conditions.items_digest == best.conditions.items_digest or again:
        raise EvidenceError(
            f"{len(again)} of the {conditions.n_items} items that report '{best.label}' also picked it, so they flatter it; "
            "report on items that took no part, e.g. posttrain eval --set skip=500"
        )
    if found := differences(best.conditions, conditions, ignore=FREE):
        raise EvidenceError(
            f"'{best.label}' was picked and reported in other conditions: {'; '.join(map(str, found))}; measure both in the same"
        )
    return record
