"""Records for tests: valid conditions with any field changed, and items from short words."""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.evals.conditions import Conditions
from posttrain.evals.record import EvalRecord, ItemResult, Outcome

KINDS = {
    "right": (1.0, RewardStatus.SCORED, StopReason.END),
    "wrong": (0.0, RewardStatus.SCORED, StopReason.END),
    "garbled": (0.0, RewardStatus.UNPARSEABLE, StopReason.END),
    "cut": (0.0, RewardStatus.TRUNCATED, StopReason.LENGTH),
    "error": (None, RewardStatus.ERROR, StopReason.END),
    "half": (0.5, RewardStatus.SCORED, StopReason.END),
}
WORDS = {1: "right", 0: "wrong", None: "error", 0.5: "half"}
STATED: dict[str, Any] = {
    "suite": "s",
    "dataset": "sums",
    "split": "held_out",
    "split_digest": "split",
    "items_digest": "items",
    "n_items": 2,
    "samples_per_item": 1,
    "sampling": Sampling(max_tokens=9),
    "thinking": "none",
    "extractor": "x/1",
    "verifier": "g/1",
    "template_digest": "template",
    "tokenizer_digest": "tokenizer",
    "seed": 0,
    "turns": 1,
}


def conditions(**changed: Any) -> Conditions:
    """Conditions with every field stated."""
    return Conditions(**STATED | changed)


def outcome(kind: str, length: int = 3) -> Outcome:
    return Outcome(*KINDS[kind], length=length)


def record(rows: Sequence[Sequence[str]] | Mapping[str, Sequence[str]], label: str = "a", model: str = "", **changed: Any) -> EvalRecord:
    """One row of kinds per item, e.g. [["right", "wrong"], ["error", "cut"]]; ids i0, i1 ... unless given."""
    named = rows if isinstance(rows, Mapping) else {f"i{n}": row for n, row in enumerate(rows)}
    items = tuple(ItemResult(name, tuple(map(outcome, row))) for name, row in named.items())
    stated = {"n_items": len(items), "samples_per_item": len(items[0].outcomes)} | changed
    return EvalRecord(conditions(**stated), label, model or f"weights of {label}", items)


def values(rows: Sequence[Sequence[float | None]], label: str = "a", **changed: Any) -> EvalRecord:
    """The same from values, e.g. [[1, 0], [None, 0.5]]."""
    return record([[WORDS[value] for value in row] for row in rows], label, **changed)
