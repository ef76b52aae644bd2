"""How often a ranking flips when fewer items are evaluated."""

from itertools import combinations

import pytest

from posttrain.core.errors import EvidenceError
from posttrain.core.seeds import numpy_rng
from posttrain.stats.ranks import rank_flip_probability

A, B, C = [1, 1, 1, 0, 0, 1], [1, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1]


def flips(rows: list[list[int]], n: int) -> float:
    """By enumeration of all subsets; `rows` stand in their full order."""
    subsets = list(combinations(range(len(rows[0])), n))
    kept = [all(sum(up[i] for i in s) > sum(low[i] for i in s) for up, low in combinations(rows, 2)) for s in subsets]
    return 1 - sum(kept) / len(subsets)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_agrees_with_every_subset(n):
    assert rank_flip_probability({"b": B, "a": A}, n, seed=0, draws=20_000) == pytest.approx(flips([A, B], n), abs=0.012)
    assert rank_flip_probability({"b": B, "a": A, "c": C}, n, seed=0, draws=20_000) == pytest.approx(flips([A, B, C], n), abs=0.012)


def test_all_items_never_flip():
    assert rank_flip_probability({"a": A, "b": B, "c": C}, 6, seed=0) == 0.0


def test_models_that_tie_over_all_items_cannot_flip():
    assert rank_flip_probability({"a": [1, 1, 0], "b": [1, 0, 1], "c": [0, 0, 0]}, 2, seed=0) == 0.0
    with pytest.raises(EvidenceError, match="same score"):
        rank_flip_probability({"a": [1, 0], "b": [0, 1]}, 1, seed=0)


def test_small_evaluations_of_a_true_gap_of_five_points():
    # Two independent models at 50% and 45%: normal approximation of P(wrong or tie) is .38 at 36 items and .06 at 500
    rng = numpy_rng(0, "test", "ranks")
    scores = {
        name: rng.permutation([1.0] * int(20_000 * p) + [0.0] * int(20_000 * (1 - p))).tolist() for name, p in (("a", 0.5), ("b", 0.45))
    }
    assert rank_flip_probability(scores, 36, seed=1) == pytest.approx(0.38, abs=0.035)
    assert rank_flip_probability(scores, 500, seed=1) == pytest.approx(0.06, abs=0.02)


def test_refusals():
    with pytest.raises(EvidenceError, match="at least 2 models"):
        rank_flip_probability({"a": A}, 3, seed=0)
    with pytest.raises(EvidenceError, match="'b' has 2 items"):
        rank_flip_probability({"a": A, "b": [1, 0]}, 3, seed=0)
    with pytest.raises(EvidenceError, match="7 of 6 items"):
        rank_flip_probability({"a": A, "b": B}, 7, seed=0)
    with pytest.raises(EvidenceError, match="draws"):
        rank_flip_probability({"a": A, "b": B}, 3, seed=0, draws=0)
