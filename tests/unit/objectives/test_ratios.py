"""How far the policy has moved, per token, sentence and sequence: values and gradients by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posttrain.objectives.ratios import log_ratio, sequence_mean

NAN, INF = float("nan"), float("inf")
LOGP = [[-1.0, -2.0, -0.5, -3.0], [-0.7, -0.2, -9.0, -1.0]]
BASE = [[-1.2, -1.9, -0.9, -3.0], [-0.4, -0.2, -8.0, -1.5]]
MASK = [[True, True, True, False], [True, False, True, True]]
# token log-ratios 0.2 -0.1 0.4 . | -0.3 . -1.0 0.5


def ratios(level: str, sentence: list[list[int]] | None = None, mask: list[list[bool]] = MASK) -> tuple[Tensor, Tensor, Tensor]:
    """The leaf, the log-ratio, the mask."""
    logp = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    index = None if sentence is None else torch.tensor(sentence)
    marked = torch.tensor(mask)
    base = torch.tensor(BASE, dtype=torch.float64)
    return logp, log_ratio(logp, base, marked, level, index), marked  # pyright: ignore[reportArgumentType]


def test_token_ratio_is_the_difference():
    _, found, _ = ratios("token")
    torch.testing.assert_close(found, torch.tensor([[0.2, -0.1, 0.4, 0.0], [-0.3, 0.0, -1.0, 0.5]], dtype=torch.float64))


def test_sequence_ratio_is_the_mean_over_trained_tokens():
    # 0.5 / 3 and -0.8 / 3: a masked slot counts neither above nor below the line
    _, found, _ = ratios("sequence")
    x, y = 0.5 / 3, -0.8 / 3
    torch.testing.assert_close(found, torch.tensor([[x, x, x, 0.0], [y, 0.0, y, y]], dtype=torch.float64))


def test_sentence_ratio_is_the_mean_over_the_sentence():
    # first row: sentences {0, 1} and {2}; second row: the masked slot is alone in sentence 1, {0}, {2, 3}
    _, found, _ = ratios("sentence", [[0, 0, 1, 1], [0, 1, 2, 2]])
    expected = [[0.05, 0.05, 0.4, 0.0], [-0.3, 0.0, -0.25, -0.25]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_one_sentence_is_the_sequence_and_one_per_token_the_token():
    torch.testing.assert_close(ratios("sentence", [[0] * 4, [0] * 4])[1], ratios("sequence")[1], rtol=0, atol=1e-15)
    torch.testing.assert_close(ratios("sentence", [[0, 1, 2, 3], [3, 2, 1, 0]])[1], ratios("token")[1], rtol=0, atol=0)


def test_none_has_the_value_of_no_change_and_the_gradient_of_the_token():
    logp, found, mask = ratios("none")
    assert (found == 0).all()
    (slope,) = torch.autograd.grad(found.exp().sum(), logp)
    assert slope.tolist() == mask.double().tolist()


@pytest.mark.parametrize("level", ["none", "token", "sentence", "sequence"])
def test_the_gradient_is_the_tokens_own(level):
    # d (ratio A) / d logp_t = ratio_t A_t: no token answers for the advantage of another
    logp, found, mask = ratios(level, [[0, 0, 1, 1], [0, 1, 2, 2]])
    advantage = torch.tensor([[1.0, -2.0, 3.0, 5.0], [0.5, 7.0, -1.0, 2.0]], dtype=torch.float64)
    (slope,) = torch.autograd.grad((found.exp() * advantage)[mask].sum(), logp)
    expected = torch.where(mask, found.detach().exp() * advantage, 0.0)
    torch.testing.assert_close(slope, expected)


def test_with_one_advantage_per_response_the_gradient_is_that_of_the_geometric_mean():
    # s = exp(mean of log-ratios): d s / d logp_t = s / |y|, which aggregation 1 / |y| makes of the token form
    logp, found, mask = ratios("sequence")
    (slope,) = torch.autograd.grad((torch.where(mask, found.exp(), 0.0).sum(-1) / 3).sum(), logp)
    plain = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    means = (torch.where(mask, plain - torch.tensor(BASE, dtype=torch.float64), 0.0).sum(-1) / 3).exp()
    (expected,) = torch.autograd.grad(means.sum(), plain)
    torch.testing.assert_close(slope, expected)
    assert means.tolist() == pytest.approx([math.exp(0.5 / 3), math.exp(-0.8 / 3)])


@pytest.mark.parametrize("level", ["none", "token", "sentence", "sequence"])
def test_no_gradient_flows_into_the_base(level):
    base = torch.tensor(BASE, requires_grad=True)
    found = log_ratio(torch.tensor(LOGP, requires_grad=True), base, torch.tensor(MASK), level, torch.zeros(2, 4, dtype=torch.long))
    found.sum().backward()
    assert base.grad is None


@pytest.mark.parametrize("level", ["none", "token", "sentence", "sequence"])
def test_an_unmoved_policy_has_ratio_exactly_one(level):
    logp = torch.tensor([[-0.3, -17.3, -1e-9]])
    mask, sentences = torch.ones(1, 3, dtype=torch.bool), torch.tensor([[0, 0, 1]])
    assert log_ratio(logp, logp.clone(), mask, level, sentences).exp().tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("level", ["none", "token", "sentence", "sequence"])
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 1e30])
def test_masked_slots_may_hold_anything(level, junk):
    mask = torch.tensor(MASK)
    logp = torch.where(mask, torch.tensor(LOGP), junk).requires_grad_()
    base = torch.where(mask, torch.tensor(BASE), -junk)
    sentences = torch.where(mask, torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]]), -7)
    found = log_ratio(logp, base, mask, level, sentences)
    (slope,) = torch.autograd.grad(found.sum(), logp)
    clean = log_ratio(torch.tensor(LOGP), torch.tensor(BASE), mask, level, torch.tensor([[0, 0, 1, 1], [0, 1, 2, 2]]))
    assert torch.equal(found, clean)
    assert slope.tolist() == mask.float().tolist()


@pytest.mark.parametrize("level", ["none", "token", "sentence", "sequence"])
def test_rows_without_trained_tokens(level):
    found = log_ratio(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.bool), level, torch.zeros(2, 3, dtype=torch.long))
    assert found.tolist() == [[0.0] * 3] * 2


def test_a_sentence_ratio_needs_sentences():
    with pytest.raises(ValueError, match="needs sentence_BT"):
        ratios("sentence")


def test_sequence_mean_counts_trained_tokens():
    values, mask = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN], [NAN, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()
    assert sequence_mean(values, mask).tolist() == [[1.5], [4.0], [0.0]]
