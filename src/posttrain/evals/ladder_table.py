"""The table of a ladder of models: each rung's scores and its paired change against the rung before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.errors import EvidenceError
from posttrain.evals.compare import compare
from posttrain.evals.record import EvalRecord
from posttrain.runs.summary import SCHEMA, table_rows

__all__ = ["summarise", "table_rows"]


def summarise(
    records: Mapping[str, Mapping[str, EvalRecord]], order: Sequence[str], preset: str, seed: int, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The content of `summary.json` (schema in runs/summary.py).

    `records[rung][suite]` are the evaluations, `order` the rungs from first to last; a suite that the rung before did not run has no
    paired change. `seconds` is wall time per stage.
    """
    missing = [rung for rung in order if rung not in records]
    if missing:
        raise EvidenceError(f"no evaluation of rung '{missing[0]}'; evaluated are {', '.join(records) or 'none'}")
    rungs = []
    for position, rung in enumerate(order):
        before = order[position - 1] if position else None
        suites = {
            suite: _figures(record) | {"paired_change": _change(records[before].get(suite) if before else None, record, before)}
            for suite, record in records[rung].items()
        }
        rungs.append({"rung": rung, "suites": suites})
    return {"schema": SCHEMA, "preset": preset, "seed": seed, "rungs": rungs, "seconds_per_stage": dict(seconds)}


def _figures(record: EvalRecord) -> dict[str, Any]:
    interval = record.interval()
    return {
        "n_items": record.conditions.n_items,
        "samples_per_item": record.conditions.samples_per_item,
        "pass_at_1": record.pass_at_1,
        "interval": [interval.low, interval.high],
        "interval_method": interval.method,
        "parse_rate": record.parse_rate,
        "truncation_rate": record.truncation_rate,
        "error_rate": record.error_rate,
        "mean_tokens": record.mean_tokens,
    }


def _change(before: EvalRecord | None, after: EvalRecord, against: str | None) -> dict[str, Any] | None:
    if before is None:
        return None
    change = compare(before, after)
    return {
        "delta": change.delta,
        "interval": [change.interval.low, change.interval.high],
        "p_value": change.p_value,
        "against": against,
    }
