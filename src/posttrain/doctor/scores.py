"""How the evaluations of a run moved around one of its stages, from the records alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posttrain.doctor.changes import Trend, scores_trend
from posttrain.doctor.evidence import Evidence
from posttrain.runs.reading import mapping, number, strings

_UNMEASURED = Trend("unknown")
_SAME = ("items_digest", "sampling", "grader")
"""Conditions that have to agree before two scores are compared."""


def around(evidence: Evidence, stage: str) -> Trend:
    """The score before and after a stage, on the suite with the most items that was measured alike both times; unknown without one.

    The label after a stage is its own name, or "after"; the one before it is the label measured before that.
    """
    order = [name.removeprefix("eval.") for name in strings(evidence.manifest.get("stages")) if name.startswith("eval.")]
    after = stage if stage in order else "after" if "after" in order else None
    if after is None or order.index(after) == 0:
        return _UNMEASURED
    before = order[order.index(after) - 1]
    pairs = []
    for name, record in evidence.evals.items():
        label, _, suite = name.partition(".")
        earlier = evidence.evals.get(f"{before}.{suite}" if suite else before)
        if label == after and earlier is not None and suite != "retention" and _alike(record, earlier):
            pairs.append((number(mapping(record.get("conditions")).get("n_items")) or 0.0, _score(earlier), _score(record)))
    for items, first, last in sorted(pairs, key=lambda pair: -pair[0]):
        if first is not None and last is not None and items >= 1:
            return scores_trend([first, last], items)
    return _UNMEASURED


def _alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    first, second = mapping(a.get("conditions")), mapping(b.get("conditions"))
    return bool(first) and all(first.get(name) == second.get(name) for name in _SAME)


def _score(record: Mapping[str, Any]) -> float | None:
    return number(mapping(record.get("summary")).get("pass_at_1"))
