"""Value loss and explained variance: numbers by hand, gradients by finite differences, sums that merge."""

from __future__ import annotations

import math

import pytest
import torch

from posttrain.core.metrics import merge
from posttrain.core.seeds import numpy_rng
from posttrain.objectives.value import ExplainedVariance, explained_variance, value_loss


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def everything(count: int) -> torch.Tensor:
    return torch.ones(1, count, dtype=torch.bool)


# R, old, v, c -> loss, gradient, clipped
CASES = {
    # |v - old| 0.1 <= 0.2: 0.5 * (0.1 - 1)^2 = 0.405, v - R = -0.9
    "inside the band": (1.0, 0.0, 0.1, 0.2, 0.405, -0.9, False),
    # left the band towards R: clipped value 0.2, 0.5 * 0.8^2 = 0.32 > 0.5 * 0.5^2, no gradient
    "above, return further up": (1.0, 0.0, 0.5, 0.2, 0.32, 0.0, True),
    # mirrored
    "below, return further down": (-1.0, 0.0, -0.5, 0.2, 0.32, 0.0, True),
    # left the band away from R: the free error 0.5 * 1.5^2 = 1.125 is larger, v - R = 1.5
    "above, return below": (-1.0, 0.0, 0.5, 0.2, 1.125, 1.5, False),
    "below, return above": (1.0, 0.0, -0.5, 0.2, 1.125, -1.5, False),
    # went past R: clipped value 0.2 is off by 0.1, v = 0.5 by 0.2: the free error counts and pulls back
    "past the return": (0.3, 0.0, 0.5, 0.2, 0.02, 0.2, False),
    # a band around an old value other than 0: v 0.5 is inside 0.4 +- 0.2
    "band moves with the old value": (1.0, 0.4, 0.5, 0.2, 0.125, -0.5, False),
    # without a clip: 0.5 * 0.5^2 = 0.125
    "no clip": (1.0, 0.0, 0.5, None, 0.125, -0.5, False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_by_hand(case):
    returns, old, value, clip, loss, gradient, clipped = case
    values_BT = row(value).requires_grad_()
    out = value_loss(values_BT, row(returns), row(old), everything(1), clip)
    assert out.loss_BT.item() == pytest.approx(loss, abs=1e-12)
    assert out.clipped_BT.item() is clipped
    out.loss_BT.sum().backward()
    assert values_BT.grad is not None
    assert values_BT.grad.item() == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_against_finite_differences(clip):
    rng = numpy_rng(0, "value")
    values, returns, old = (torch.from_numpy(rng.normal(size=(4, 6))) for _ in range(3))
    mask_BT = torch.from_numpy(rng.random((4, 6)) < 0.7)
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, old, mask_BT, clip).loss_BT, values.requires_grad_())
    clipped_BT = value_loss(values, returns, old, mask_BT, clip).clipped_BT
    (gradient_BT,) = torch.autograd.grad(value_loss(values, returns, old, mask_BT, clip).loss_BT.sum(), values)
    # the fraction that is reported is the one without gradient
    assert torch.equal(clipped_BT, mask_BT & (gradient_BT == 0))
    assert clipped_BT.any() == (clip is not None)


def test_at_the_old_value_the_clip_does_nothing():
    # the first update of a step: the same loss and gradient as without a clip, also in the last bit, and nothing reported as clipped
    rng = numpy_rng(1, "value")
    old_BT = torch.from_numpy(rng.normal(size=(50, 40)).astype("float32"))
    returns_BT = torch.from_numpy(rng.normal(size=(50, 40)).astype("float32"))
    mask_BT = torch.ones(50, 40, dtype=torch.bool)
    found = []
    for clip in (0.1, None):
        values_BT = old_BT.clone().requires_grad_()
        out = value_loss(values_BT, returns_BT, old_BT, mask_BT, clip)
        out.loss_BT.sum().backward()
        found.append((out.loss_BT.detach(), values_BT.grad))
        assert not out.clipped_BT.any()
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_move_inside_the_band_is_not_reported_as_clipped():
    # old + (v - old) is not v in float32; a band on v itself has no such rounding
    rng = numpy_rng(2, "value")
    old_BT, values_BT, returns_BT = (torch.from_numpy(rng.normal(size=(50, 40)).astype("float32")) for _ in range(3))
    out = value_loss(values_BT, returns_BT, old_BT, torch.ones(50, 40, dtype=torch.bool), 10.0)
    assert not out.clipped_BT.any()


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_slots_may_hold_anything(clip, poison):
    values_BT = row(0.5, poison, 0.1).requires_grad_()
    mask_BT = torch.tensor([[True, False, True]])
    out = value_loss(values_BT, row(1.0, poison, 1.0), row(0.0, poison, 0.0), mask_BT, clip)
    assert out.loss_BT[0, 1].item() == 0.0
    assert not out.clipped_BT[0, 1]
    out.loss_BT.sum().backward()
    clean_BT = row(0.5, 0.1).requires_grad_()
    value_loss(clean_BT, row(1.0, 1.0), row(0.0, 0.0), everything(2), clip).loss_BT.sum().backward()
    assert values_BT.grad is not None
    assert clean_BT.grad is not None
    assert values_BT.grad[0].tolist() == [clean_BT.grad[0, 0].item(), 0.0, clean_BT.grad[0, 1].item()]


@pytest.mark.parametrize("clip", [None, 0.2])
def test_targets_are_constants(clip):
    # returns made from the critic's own values must not be pulled towards it
    values_BT, returns_BT, old_BT = row(0.5).requires_grad_(), row(-1.0).requires_grad_(), row(0.45).requires_grad_()
    value_loss(values_BT, returns_BT, old_BT, everything(1), clip).loss_BT.sum().backward()
    assert values_BT.grad is not None
    assert returns_BT.grad is None
    assert old_BT.grad is None


def read(values: torch.Tensor, returns: torch.Tensor) -> float | None:
    return explained_variance(values, returns, torch.ones_like(values, dtype=torch.bool)).read()


def test_explained_variance_by_hand():
    # R (1, 0), v (0.8, 0): Var(R) = 0.25, residuals (0.2, 0) with variance 0.01: 1 - 0.04 = 0.96
    assert read(row(0.8, 0.0), row(1.0, 0.0)) == pytest.approx(0.96)
    assert read(row(1.0, 0.0), row(1.0, 0.0)) == 1.0
    # a constant explains nothing, whichever constant: the residuals vary as the returns do
    assert read(row(0.0, 0.0), row(1.0, 0.0)) == pytest.approx(0.0)
    assert read(row(7.0, 7.0), row(1.0, 0.0)) == pytest.approx(0.0)
    # values that point the wrong way: residuals (1, -1) with variance 1: 1 - 4 = -3
    assert read(row(0.0, 1.0), row(1.0, 0.0)) == pytest.approx(-3.0)


@pytest.mark.parametrize("constant", [0.0, 0.3, 1 / 3, -3.7])
def test_returns_that_do_not_vary_have_nothing_to_explain(constant):
    # 91 times 0.3 in float64 has a spread of 2e-15 from rounding alone; dividing by that would explain -1e16
    values = torch.from_numpy(numpy_rng(0, "flat").normal(size=(7, 13)))
    assert read(values, torch.full((7, 13), constant, dtype=torch.float64)) is None


def test_a_small_spread_is_still_a_spread():
    # returns 10 and 10.001, as sparse penalties make them: values that know them explain all of it
    assert read(row(10.0, 10.001), row(10.0, 10.001)) == 1.0
    assert read(row(10.0, 10.0), row(10.0, 10.001)) == pytest.approx(0.0, abs=1e-6)


def test_nothing_measured_is_no_number():
    found = explained_variance(row(1.0), row(2.0), torch.zeros(1, 1, dtype=torch.bool))
    assert found == ExplainedVariance(0.0, 0.0, 0.0, 0.0, 0.0)
    assert found.read() is None


def test_parts_merge_to_the_whole_and_masks_hold():
    rng = numpy_rng(0, "merge")
    values, returns = (torch.from_numpy(rng.normal(size=(6, 5)) + 2) for _ in range(2))
    returns = returns + values  # noise of the same spread: values explain about half
    mask = torch.from_numpy(rng.random((6, 5)) < 0.6)
    kept_v, kept_r = values[mask], returns[mask]
    expected = 1 - ((kept_r - kept_v).var(unbiased=False) / kept_r.var(unbiased=False)).item()
    poisoned = torch.where(mask, values, math.nan), torch.where(mask, returns, math.inf)
    parts = [{"ev": explained_variance(poisoned[0][i:j], poisoned[1][i:j], mask[i:j])} for i, j in ((0, 1), (1, 4), (4, 6))]
    merged = merge(parts)["ev"]  # type: ignore[arg-type]
    assert merged.read() == pytest.approx(expected, rel=1e-10)
    assert 0.2 < expected < 0.8
    # a mean of the parts' own figures is another number
    assert sum(part["ev"].read() or 0.0 for part in parts) / 3 != pytest.approx(expected, abs=1e-3)
