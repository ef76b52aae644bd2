"""Who decides an update, against length and sign; the numbers of spec/book-2 item 86 and spec/recipes-of-the-labs.md T11."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from posttrain.objectives.aggregate import denominator_of, weights
from posttrain.objectives.axes import Aggregation
from posttrain.objectives.weight_report import weight_metrics, weight_report

LENGTHS = [40, 12, 9]
PROMPTS = ["a", "a", "b"]


@pytest.mark.parametrize(
    ("how", "shares"),
    [
        ("token_mean", (0.6557, 0.1967, 0.1475)),  # 40/61, 12/61, 9/61
        ("seq_mean_token_mean", (1 / 3, 1 / 3, 1 / 3)),
        ("seq_mean_token_sum", (0.6557, 0.1967, 0.1475)),  # 40/3 of 61/3
        ("constant", (0.6557, 0.1967, 0.1475)),
        ("prompt_mean", (0.3846, 0.1154, 0.5)),  # half of 40/52, half of 12/52, half of 9/9
    ],
)
def test_share_of_each_response_in_the_weight(how, shares):
    report = weight_report(LENGTHS, [1.0, 1.0, 1.0], PROMPTS, how)
    assert report.shares == pytest.approx(shares, abs=5e-5)
    assert report.everyone.share == pytest.approx(1.0)


def test_a_sixth_against_a_fourteenth_of_a_token():
    # T11, G = 2, lengths 3 and 7: 1 / (2 * 3) and 1 / (2 * 7); by token 1 / (3 + 7) each
    by_sequence = weight_report([3, 7], [1.0, -1.0], ["p", "p"], "seq_mean_token_mean")
    assert by_sequence.token == pytest.approx((1 / 6, 1 / 14))
    assert weight_report([3, 7], [1.0, -1.0], ["p", "p"], "token_mean").token == pytest.approx((0.1, 0.1))


@pytest.mark.parametrize("how", get_args(Aggregation))
def test_same_weights_as_the_loss(how):
    lengths, prompts = [3, 0, 5, 1, 0], ["a", "a", "b", "c", "d"]  # neither a response nor a prompt without trained tokens counts
    mask = torch.arange(5)[None, :] < torch.tensor(lengths)[:, None]
    of_prompt = torch.tensor([3.0, 3.0, 5.0, 1.0, 0.0])
    per_token = weights(mask, how, of_prompt) / denominator_of(lengths, how, 7.0, prompts)
    report = weight_report(lengths, [1.0] * 5, prompts, how, constant=7.0)
    assert report.sequence == pytest.approx(per_token.sum(-1).tolist())
    assert report.token == pytest.approx(per_token.max(-1).values.tolist())


def test_sides_by_the_sign_of_the_advantage():
    # seq_mean_token_mean, B = 4: a response weighs 1/4. Positive: 10 and 30 tokens; negative: 20; the fourth has A = 0.
    report = weight_report([10, 30, 20, 40], [1.0, 0.5, -2.0, 0.0], ["p"] * 4, "seq_mean_token_mean")
    assert (report.positive.rows, report.positive.tokens) == (2, 40)
    assert report.positive.share == pytest.approx(0.5)
    assert report.positive.per_token == pytest.approx(0.5 / 40)
    assert report.positive.per_sequence == pytest.approx(0.25)
    assert (report.negative.rows, report.negative.tokens, report.negative.share) == (1, 20, pytest.approx(0.25))


def test_correlation_of_weight_with_length():
    assert weight_report(LENGTHS, [1.0] * 3, PROMPTS, "token_mean").everyone.correlation == pytest.approx(1.0)
    assert weight_report(LENGTHS, [1.0] * 3, PROMPTS, "seq_mean_token_mean").everyone.correlation is None
    # prompt_mean weights 40/104, 12/104, 9/18 at lengths 40, 12, 9, as deviations times 312 (mean 1/3):
    # weights 16, -68, 52 and lengths 59/3, -25/3, -34/3: sum of products (944 + 1700 - 1768) / 3 = 292
    # norms sqrt(256 + 4624 + 2704) = 87.086 and sqrt(3481 + 625 + 1156) / 3 = 24.180: 292 / 2105.7 = 0.13867
    assert weight_report(LENGTHS, [1.0] * 3, PROMPTS, "prompt_mean").everyone.correlation == pytest.approx(0.13867, abs=1e-4)


def test_a_huge_constant_hides_no_correlation():
    assert weight_report(LENGTHS, [1.0] * 3, PROMPTS, "constant", constant=1e15).everyone.correlation == pytest.approx(1.0)


def test_metrics_compare_the_longer_half_with_the_shorter():
    found = weight_metrics([40, 10, 20, 30], [1.0, 1.0, -1.0, -1.0], ["p"] * 4, "token_mean")
    # A > 0: 40 against 10 tokens of equal weight; A < 0: 30 against 20
    assert found == {
        "weight_long_positive": pytest.approx(4.0),
        "weight_token_long_positive": pytest.approx(1.0),
        "weight_long_negative": pytest.approx(1.5),
        "weight_token_long_negative": pytest.approx(1.0),
    }
    found = weight_metrics([40, 10, 20, 30], [1.0, 1.0, -1.0, -1.0], ["p"] * 4, "seq_mean_token_mean")
    assert found["weight_long_negative"] == pytest.approx(1.0)
    assert found["weight_token_long_negative"] == pytest.approx(20 / 30)  # 1/(4*30) over 1/(4*20)


def test_the_middle_response_belongs_to_both_halves():
    # lengths 10, 20, 60 under token_mean: longer (60 + 20/2) / 1.5, shorter (10 + 20/2) / 1.5: 70 / 20
    found = weight_metrics([10, 60, 20], [1.0] * 3, ["p"] * 3, "token_mean")
    assert found["weight_long_positive"] == pytest.approx(3.5)


def test_equal_lengths_weigh_alike_in_any_order():
    # prompt_mean: prompt a has one response (weight 1/2), prompt b three (1/6 each); no length is the longer one
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        prompts = [["a", "b", "b", "b"][i] for i in order]
        assert weight_metrics([5] * 4, [1.0] * 4, prompts, "prompt_mean")["weight_long_positive"] == pytest.approx(1.0)


def test_a_side_without_two_responses_has_no_figure():
    found = weight_metrics([3, 5, 7, 0], [1.0, -1.0, 0.0, -1.0], ["p"] * 4, "token_mean")  # the empty response does not count
    assert set(found.values()) == {None}
    assert set(weight_metrics([], [], [], "prompt_mean").values()) == {None}
    empty = weight_report([3], [-1.0], ["p"], "token_mean").positive
    assert (empty.rows, empty.share, empty.per_token, empty.correlation) == (0, 0.0, None, None)


@pytest.mark.parametrize("how", get_args(Aggregation))
def test_without_a_trained_token_nothing_weighs(how):
    report = weight_report([0, 0], [1.0, -1.0], ["p", "q"], how)
    assert report.sequence == (0.0, 0.0)
    assert report.shares == (0.0, 0.0)


def test_metrics_do_not_depend_on_the_constant():
    given = ([40, 10], [1.0, 1.0], ["p", "p"], "constant")
    assert weight_metrics(*given, constant=0.0) == weight_metrics(*given, constant=123.0)
    assert weight_metrics(*given)["weight_long_positive"] == pytest.approx(4.0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="2 lengths, 1 advantages and 2 prompts"):
        weight_report([1, 2], [1.0], ["p", "p"], "token_mean")
    with pytest.raises(ValueError, match="response of -1 tokens"):
        weight_report([-1], [1.0], ["p"], "token_mean")
    with pytest.raises(ValueError, match="must be positive"):
        weight_report([1], [1.0], ["p"], "constant", constant=-2.0)
