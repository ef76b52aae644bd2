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


@pytest.mark.parametrize(
    ("prompt_tokens", "expected"),
    [
        ((4.0, 4.0), 2.0),  # both rows answer one prompt: (6 + 10) / 4 / 2 prompts
        ((3.0, 1.0), 6.0),  # two prompts of one row each: (6/3 + 10/1) / 2
        ((8.0, 2.0), 2.875),  # siblings with 5 and 1 tokens lie in other micro-batches: (6/8 + 10/2) / 2
    ],
)
def test_every_prompt_counts_once_and_its_tokens_alike(prompt_tokens, expected):
    assert aggregate(VALUES, MASK, "prompt_mean", 2, torch.tensor(prompt_tokens)).item() == expected


def test_prompt_mean_needs_the_tokens_of_the_prompt():
    with pytest.raises(ValueError, match="prompt_mean needs prompt_tokens_B"):
        aggregate(VALUES, MASK, "prompt_mean", 2)


def test_prompts_are_counted_once_and_only_with_tokens():
    # prompt a has two rows, b one, c only an empty one
    assert denominator_of([3, 2, 1, 0], "prompt_mean", prompts=["a", "a", "b", "c"]) == 2.0


def test_an_empty_row_of_prompt_mean_adds_nothing():
    mask = torch.tensor([[True, True, True], [False, False, False]])
    assert aggregate(VALUES, mask, "prompt_mean", 1, torch.tensor([3.0, 0.0])).item() == 2.0


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
