"""How stable a ranking of models is when the evaluation has fewer items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from posttrain.core.errors import EvidenceError
from posttrain.core.seeds import numpy_rng
from posttrain.stats.intervals import finite_values

_BLOCK = 1 << 20


def rank_flip_probability(scores_by_item: Mapping[str, Sequence[float]], n: int, seed: int, draws: int = 2000) -> float:
    """The chance that a ranking by n of the items disagrees with the ranking by all of them.

    `scores_by_item[model][i]` is the model's score on item i, the same items for all. Each draw takes n different items, the same for all
    models. It disagrees when any two models that differ over all items come out the other way round or tied; models that tie over all
    items are in no order that could flip.

    >>> a, b = [1.0] * 60 + [0.0] * 40, [0.0] * 5 + [1.0] * 50 + [0.0] * 45
    >>> rank_flip_probability({"a": a, "b": b}, 100, seed=0), rank_flip_probability({"a": a, "b": b}, 10, seed=0) > 0.2
    (0.0, True)
    """
    if len(scores_by_item) < 2:
        raise EvidenceError(f"a ranking needs at least 2 models, got {len(scores_by_item)}")
    rows = [finite_values(values) for values in scores_by_item.values()]
    total = len(rows[0])
    for name, row in zip(scores_by_item, rows, strict=True):
        if len(row) != total:
            raise EvidenceError(f"'{name}' has {len(row)} items and the first model {total}; all need the same items in the same order")
    if not 1 <= n <= total:
        raise EvidenceError(f"{n} of {total} items cannot be drawn; choose between 1 and {total}")
    if draws < 1:
        raise EvidenceError(f"draws must be at least 1, got {draws}; 2000 is usual")
    table = np.stack(rows)
    upper, lower = _ordered_pairs(table.sum(axis=1), 1e-9 * max(1.0, float(np.abs(table).sum())))
    if not len(upper):
        raise EvidenceError("all models have the same score over all items, so there is no ranking that could flip")
    gaps = table[upper] - table[lower]
    rng, flipped, left = numpy_rng(seed, "stats", "ranks"), 0, draws
    while left:
        block = min(left, max(1, _BLOCK // total))
        chosen = np.argpartition(rng.random((block, total)), n - 1, axis=1)[:, :n]
        taken = np.zeros((block, total))
        np.put_along_axis(taken, chosen, 1.0, axis=1)
        flipped += int(np.count_nonzero(np.any(taken @ gaps.T <= 1e-9, axis=1)))
        left -= block
    return flipped / draws


def _ordered_pairs(totals: np.ndarray, tie: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices of every pair of models of which the first is ahead by more than rounding."""
    ahead = totals[:, None] - totals[None, :] > tie
    upper, lower = np.nonzero(ahead)
    return upper, lower
