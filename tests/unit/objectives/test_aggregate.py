"""Reduction with a denominator from outside."""

from __future__ import annotations

import pytest
import torch

from posttrain.objectives.aggregate import aggregate, denominator_of, weights

VALUES = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])


@pytest.mark.parametrize(
    ("how", "denominator", "expected"),
    [
        ("token_mean", 4, 4.0),  # (1 + 2 + 3 + 10) / 4
        ("seq_mean_token_mean", 2, 6.0),  # (6/3 + 10/1) / 2
        ("seq_mean_token_sum", 2, 8.0),  # (6 + 10) / 2
        ("constant", 8, 2.0),  # 16 / 8
    ],
)
def test_every_aggregation(how, denominator, expected):
    assert aggregate(VALUES, MASK, how, denominator).item() == expected


def test_ten_tokens_of_loss_1_and_two_of_loss_3():
    # (10 x 1 + 2 x 3) / 12 = 1.3333; the mean of the two means would be 2
    parts = [(torch.ones(1, 10), 10), (torch.full((1, 2), 3.0), 2)]
    total = sum(aggregate(values, torch.ones_like(values, dtype=torch.bool), "token_mean", 12).item() for values, _ in parts)
    assert total == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("how", "expected"), [("token_mean", 4.0), ("seq_mean_token_mean", 2.0), ("seq_mean_token_sum", 2.0), ("constant", 9.0)]
)
def test_denominator_counts_trained_tokens_or_rows_that_have_some(how, expected):
    assert denominator_of([3, 0, 1], how, 9.0) == expected


def test_row_without_trained_tokens_adds_nothing():
    mask = torch.tensor([[True, True, True], [False, False, False]])
    for how in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
        denominator = denominator_of(mask.sum(-1).tolist(), how)
        alone = aggregate(VALUES[:1], mask[:1], how, denominator)
        assert aggregate(VALUES, mask, how, denominator).item() == alone.item()


def test_weights_per_row_not_per_column_on_a_square_batch():
    mask = torch.tensor([[True, True], [True, False]])
    assert weights(mask, "seq_mean_token_mean").tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert weights(mask, "token_mean").tolist() == [[1.0, 1.0], [1.0, 0.0]]


@pytest.mark.parametrize("denominator", [0.0, -1.0, float("nan")])
def test_a_step_without_tokens_is_refused(denominator):
    with pytest.raises(ValueError, match="at least one trained token"):
        aggregate(VALUES, torch.zeros_like(MASK), "token_mean", denominator)


def test_shapes_are_checked_in_the_test_run():
    with pytest.raises(Exception, match="Type-check error"):
        aggregate(VALUES, MASK[:, :2], "token_mean", 4)
