"""Gate C: a short training run with the acceleration ends no worse on held-out items than one without.

No worse means non-inferior: the lower end of the paired interval of the difference lies above minus the margin. Too few items decide
nothing, and neither do runs that took no step, or a task on which there is hardly anything to lose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from posttrain.checks.gates import Gate, GateResult, Verdict
from posttrain.evals.compare import compare
from posttrain.evals.record import EvalRecord

MARGIN = 0.05
"""Largest loss of accuracy that counts as none."""
LEAST_TO_LOSE = 2
"""The reference has to score this many margins: below, even a run that forgot everything would look no worse."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a short run left: its model measured on held-out items, and the optimizer steps that were taken."""

    record: EvalRecord
    steps: int


def learning_gate(reference: Callable[[], Learned], accelerated: Callable[[], Learned], margin: float = MARGIN) -> GateResult:
    """Run both, compare them item by item.

    Passes when the lower end of the 95 % interval of accelerated minus reference is above -margin, fails when the upper end is below it,
    and otherwise nothing is shown.

    Example: 400 items, difference -0.005 [-0.030, +0.020], margin 0.05: passed. 40 items, -0.005 [-0.09, +0.08]: not shown.
    """
    with_out, with_it = reference(), accelerated()
    change = compare(with_out.record, with_it.record)
    low, high = change.interval.low, change.interval.high
    measured: dict[str, Any] = {
        "reference": with_out.record.pass_at_1,
        "accelerated": with_it.record.pass_at_1,
        "difference": change.delta,
        "low": low,
        "high": high,
        "method": change.method,
        "items": change.n,
        "margin": margin,
        "steps": [with_out.steps, with_it.steps],
        "suite": change.suite,
    }
    text = (
        f"held-out {with_out.record.pass_at_1:.3f} without, {with_it.record.pass_at_1:.3f} with: {change.delta:+.3f} "
        f"[{low:+.3f}, {high:+.3f}] (margin {margin:g}, {change.n} items, {with_it.steps} steps)"
    )
    if why := _says_nothing(with_out, with_it, margin):
        return GateResult(Gate.LEARNING, Verdict.NOT_SHOWN, f"{why}; {text}", measured)
    verdict = Verdict.PASSED if low > -margin else Verdict.FAILED if high < -margin else Verdict.NOT_SHOWN
    return GateResult(Gate.LEARNING, verdict, text, measured)


def _says_nothing(one: Learned, other: Learned, margin: float) -> str | None:
    if not one.steps:
        return "the reference run took no optimizer step: choose a task on which siblings differ"
    values = {value for record in (one.record, other.record) for value in record.item_means.values()}
    if len(values) == 1:
        return f"every item scores {values.pop():g} in both runs, so the task measures nothing here: choose an easier or a harder one"
    if one.record.pass_at_1 < LEAST_TO_LOSE * margin:
        score = one.record.pass_at_1
        return f"the reference scores {score:.3f}, too little to lose {margin:g} of: choose an easier task or a smaller margin"
    return None
