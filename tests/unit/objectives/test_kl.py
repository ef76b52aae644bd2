"""KL terms by hand: values, zeros, masks, large gaps, arithmetic; exact and top-k divergences with empty entries and tiny tails.

What each estimator does in expectation is in test_kl_oracle.py.
"""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from posttrain.objectives.kl import full_kl, kl_loss, kl_value, top_k_kl
from posttrain.objectives.placements import KLEstimator

ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)
LOSSES: tuple[KLEstimator, ...] = ("k2", "k3", "rho_k3")
ONE = torch.ones(1, 1, dtype=torch.bool)
NAN, INF = math.nan, math.inf


def slope(x: float, estimator: KLEstimator, ratio: float | None = None) -> float:
    """Gradient with respect to logp, one token at reference -1."""
    logp = torch.tensor([[x - 1.0]], requires_grad=True)
    ratio_BT = None if ratio is None else ratio * (logp - logp.detach()).exp()
    return torch.autograd.grad(kl_loss(logp, torch.tensor([[-1.0]]), ONE, estimator, ratio_BT).sum(), logp)[0].item()


def test_values_by_hand():
    # x = log 2: k2 = 0.6931^2 / 2 = 0.240227; k3 = 1/2 - 1 + 0.693147 = 0.193147.  x = -log 2: k3 = 2 - 1 - 0.693147 = 0.306853
    logp = torch.tensor([[math.log(2.0), -math.log(2.0)]])
    none, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    expected = {"k1": [0.693147, -0.693147], "k2": [0.240227, 0.240227], "k3": [0.193147, 0.306853], "rho_k3": [0.193147, 0.306853]}
    for estimator in ESTIMATORS:
        assert kl_value(logp, none, mask, estimator)[0].tolist() == pytest.approx(expected[estimator], abs=1e-6)
    for estimator in LOSSES:
        assert kl_loss(logp, none, mask, estimator)[0].tolist() == pytest.approx(expected[estimator], abs=1e-6)


def test_k1_against_a_teacher_is_minus_the_distillation_advantage():
    # ln(.9 / .9) = 0; ln(.001 / .4) = -5.9915
    student, teacher = torch.tensor([[0.9, 0.4]]).log(), torch.tensor([[0.9, 0.001]]).log()
    advantage = -kl_value(student, teacher, torch.ones(1, 2, dtype=torch.bool), "k1")
    assert advantage[0].tolist() == pytest.approx([0.0, -5.9915], abs=1e-4)


def test_values_carry_no_gradient():
    logp = torch.tensor([[-2.0]], requires_grad=True)
    assert not any(kl_value(logp, torch.tensor([[-1.0]]), ONE, estimator).requires_grad for estimator in ESTIMATORS)


@pytest.mark.parametrize("estimator", LOSSES)
def test_exactly_zero_where_policies_agree(estimator):
    logp, mask = torch.tensor([[-0.1, -3.7, -20.0]], requires_grad=True), torch.ones(1, 3, dtype=torch.bool)
    out = kl_loss(logp, logp.detach(), mask, estimator)
    assert out.tolist() == [[0.0, 0.0, 0.0]]
    assert torch.autograd.grad(out.sum(), logp)[0].tolist() == [[0.0, 0.0, 0.0]]
    assert kl_value(logp, logp, mask, "k1").tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("rubbish", [NAN, INF, -INF, 1e30, -1e30])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_masked_slots_are_zero_whatever_they_hold(estimator, rubbish):
    logp, mask = torch.tensor([[-2.0, rubbish]], requires_grad=True), torch.tensor([[True, False]])
    for reference in ([[-1.0, rubbish]], [[-1.0, -1.0]], [[-1.0, -rubbish]]):
        value = kl_value(logp, torch.tensor(reference), mask, estimator)
        assert value[0, 1].item() == 0.0
        assert value[0, 0].item() != 0.0
        for ratio in (None, torch.tensor([[1.0, rubbish]])) if estimator != "k1" else ():
            out = kl_loss(logp, torch.tensor(reference), mask, estimator, ratio)
            (gradient,) = torch.autograd.grad(out.sum(), logp)
            assert out[0, 1].item() == gradient[0, 1].item() == 0.0
            assert math.isfinite(gradient[0, 0].item())


@pytest.mark.parametrize(
    # 5 nats below the reference: k2' = x; k3' = 1 - e^5 = -147.4; rho_k3' = k3 + k3' = (e^5 - 6) + (1 - e^5) = -5
    ("estimator", "expected"),
    [("k2", -5.0), ("k3", 1 - math.exp(5)), ("rho_k3", -5.0)],
)
def test_a_large_gap_keeps_its_gradient(estimator, expected):
    assert slope(-5.0, estimator) == pytest.approx(expected, rel=1e-6)


def test_a_large_gap_keeps_its_value():
    # e^5 - 1 - 5 = 142.41
    for estimator in ("k3", "rho_k3"):
        assert kl_value(torch.tensor([[-6.0]]), torch.tensor([[-1.0]]), ONE, estimator).item() == pytest.approx(142.4132, abs=1e-3)


def test_rho_k3_is_the_product_of_ratio_and_k3():
    for x in (-2.0, -0.3, 0.4, 3.0):
        assert slope(x, "rho_k3") == pytest.approx(slope(x, "rho_k3", ratio=1.0), rel=1e-5)
    # ratio 2 at x = log 2: value 2 * 0.193147; gradient 2 x = 1.386294
    out = kl_loss(torch.tensor([[math.log(2.0)]]), torch.zeros(1, 1), ONE, "rho_k3", torch.full((1, 1), 2.0))
    assert out.item() == pytest.approx(0.386294, abs=1e-6)
    assert slope(math.log(2.0), "rho_k3", ratio=2.0) == pytest.approx(1.386294, rel=1e-5)


@pytest.mark.parametrize("x", [-17.0, -30.0, -100.0])
def test_rho_k3_has_its_gradient_also_where_a_product_would_lose_it(x):
    # Summed from its two parts in float32 it would be -16, 0 and NaN.
    assert slope(x, "rho_k3") == x


def test_the_ratio_weighs_rho_k3_only():
    for estimator in ("k2", "k3"):
        assert slope(0.5, estimator, ratio=3.0) == slope(0.5, estimator)


def test_the_difference_is_formed_in_the_given_arithmetic():
    # 1e-9 nats: below the resolution of float32 at -1 (6e-8), so there it is no difference at all; k2 = 5e-19
    logp, reference = torch.tensor([[-1.0 + 1e-9]], dtype=torch.float64), torch.tensor([[-1.0]], dtype=torch.float64)
    assert kl_value(logp, reference, ONE, "k1").item() == 0.0
    assert kl_value(logp, reference, ONE, "k1", torch.float64).item() == pytest.approx(1e-9, rel=1e-6)
    assert kl_loss(logp, reference, ONE, "k2", dtype=torch.float64).item() == pytest.approx(5e-19, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float64])
def test_the_result_has_the_given_arithmetic(given, dtype):
    logp, reference = torch.tensor([[-2.0]], dtype=given), torch.tensor([[-1.5]], dtype=given)
    assert kl_value(logp, reference, ONE, "k1", dtype).dtype is dtype
    for estimator in LOSSES:
        for ratio in (None, torch.ones(1, 1, dtype=given)):
            assert kl_loss(logp, reference, ONE, estimator, ratio, dtype).dtype is dtype


def test_low_precision_arithmetic_is_refused():
    with pytest.raises(ValueError, match="needs float32 or float64"):
        kl_value(torch.zeros(1, 1), torch.zeros(1, 1), ONE, "k1", torch.bfloat16)


# --- the whole vocabulary --------------------------------------------------------------------------------------------------------------


def logs(*p: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([p], dtype=dtype).log()


@pytest.mark.parametrize(
    # teacher (.49, .02, .49); peaked: .96 ln(.96/.49) + .02 ln 1 + .02 ln(.02/.49) = .6456 - .0640 = .582
    # flat: (2 ln(.3333/.49) + ln(.3333/.02)) / 3 = (-.7705 + 2.8134) / 3 = .681; forward: .49 ln(.49/.96) + .49 ln(.49/.02) = 1.238
    ("student", "reverse", "forward"),
    [((0.96, 0.02, 0.02), 0.582, 1.238), ((1 / 3, 1 / 3, 1 / 3), 0.681, 0.321)],
)
def test_reverse_prefers_a_mode_and_forward_the_spread(student, reverse, forward):
    teacher = logs(0.49, 0.02, 0.49)
    assert full_kl(logs(*student), teacher).item() == pytest.approx(reverse, abs=5e-4)
    assert full_kl(logs(*student), teacher, "forward").item() == pytest.approx(forward, abs=5e-4)


def test_tokens_of_probability_zero_contribute_their_limit():
    # policy (.5, .5, 0, 0) against (.25, .5, .25, 0): .5 ln 2 = 0.3466; the excluded tokens leave neither a value nor a gradient
    logits = torch.tensor([[0.0, 0.0, -INF, -INF]], requires_grad=True)
    reference = logs(0.25, 0.5, 0.25, 0.0, dtype=torch.float32)
    out = full_kl(logits.log_softmax(-1), reference)
    assert out.item() == pytest.approx(0.3466, abs=1e-4)
    # p (x - KL): .5 (.6931 - .3466) = 0.1733, .5 (0 - .3466) = -0.1733
    assert torch.autograd.grad(out.sum(), logits)[0].tolist() == [pytest.approx([0.1733, -0.1733, 0.0, 0.0], abs=1e-4)]


def test_tokens_of_probability_zero_in_the_reference_of_a_forward_divergence():
    # reference (.5, .5, 0) against policy (.25, .5, .25): .5 ln 2 = 0.3466; gradient p - q = (-.25, 0, .25)
    logits = logs(0.25, 0.5, 0.25).requires_grad_()
    out = full_kl(logits.log_softmax(-1), logs(0.5, 0.5, 0.0), "forward")
    assert out.item() == pytest.approx(0.3466, abs=1e-4)
    assert torch.autograd.grad(out.sum(), logits)[0].tolist() == [pytest.approx([-0.25, 0.0, 0.25], abs=1e-12)]


def test_mass_where_the_other_has_none_is_infinite():
    assert full_kl(logs(0.5, 0.5), logs(1.0, 0.0)).item() == INF
    assert full_kl(logs(1.0, 0.0), logs(0.5, 0.5), "forward").item() == INF


def test_a_tiny_divergence_is_neither_negative_nor_lost_in_rounding():
    # Logits moved by d = 1e-4 * (1, -1, 1, ...): KL = Var(d) / 2 = about 5e-9, below the 1e-7 to which float32 probabilities sum to 1.
    logits = torch.linspace(-3.0, 3.0, 1000, dtype=torch.float64)
    moved = logits + 1e-4 * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(500)
    policy, reference = (x.float().log_softmax(-1)[None] for x in (logits, moved))
    p, d = logits.softmax(-1), moved - logits
    expected = ((p * d.square()).sum() - (p * d).sum().square()).item() / 2
    assert full_kl(policy, reference).item() == pytest.approx(expected, rel=0.01)
    assert full_kl(policy, policy).item() == 0.0


def test_a_vanishing_probability_overflows_nothing():
    # p = e^-200 against .5 on one token: in float32 q / p overflows. KL = about ln 2; gradient p (x - KL) of the other: 0
    logits = torch.tensor([[0.0, -200.0]], requires_grad=True)
    out = full_kl(logits.log_softmax(-1), logs(0.5, 0.5, dtype=torch.float32))
    assert out.item() == pytest.approx(math.log(2.0), rel=1e-6)
    assert torch.autograd.grad(out.sum(), logits)[0].tolist() == [pytest.approx([0.0, 0.0], abs=1e-6)]


# --- top k -----------------------------------------------------------------------------------------------------------------------------


def test_the_truncated_sum_is_negative_and_ours_is_not():
    # p = (.5, .3, .2), q = (.5, .4, .1), K = 2: .3 ln(.3/.4) = -0.0863; bucket .2 ln(.2/.1) = +0.1386; together 0.0523
    p, q = logs(0.5, 0.3, 0.2), logs(0.5, 0.4, 0.1)
    truncated = (p[:, :2].exp() * (p[:, :2] - q[:, :2])).sum().item()
    assert truncated == pytest.approx(-0.0863, abs=1e-4)
    assert top_k_kl(p[:, :2], q[:, :2]).item() == pytest.approx(0.0523, abs=1e-4)
    assert full_kl(p, q).item() == pytest.approx(0.0523, abs=1e-4)


def test_a_teacher_that_only_sharpens_does_not_pass_as_equal():
    # The reference has more mass on the top 2, (.6, .3) against (.4, .2): the truncated sum is .6 ln(2/3) = -0.243.
    # Ours: -0.2433 + .4 ln(.4/.1) = -0.2433 + 0.5545 = 0.3112
    assert top_k_kl(logs(0.4, 0.2), logs(0.6, 0.3)).item() == pytest.approx(0.3112, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_tokens_come_closer_from_below_and_all_of_them_are_equal(dtype):
    generator = torch.Generator().manual_seed(3)
    p, q = (torch.randn(50, 40, generator=generator, dtype=dtype).mul(2).log_softmax(-1) for _ in range(2))
    # In float32 a bucket is known to 3e-8: one of 5e-5 in q against 0.13 in p is off by 0.13 * 3e-8 / 5e-5 = 8e-5.
    full, room = full_kl(p, q), 1e-4 if dtype is torch.float32 else 1e-11
    previous = torch.zeros_like(full)
    for k in (1, 2, 8, 20, 39, 40):
        now = top_k_kl(p[:, :k], q[:, :k])
        assert now.dtype is dtype
        assert (now >= previous - room).all()
        assert (now <= full + room).all()
        previous = now
    torch.testing.assert_close(previous, full, rtol=1e-6, atol=room / 100)


def test_never_negative_however_close():
    generator = torch.Generator().manual_seed(5)
    for size in (0.0, 1e-7, 1e-5, 1e-3):
        logits = torch.randn(500, 64, generator=generator)
        p, q = (x.log_softmax(-1) for x in (logits, logits + size * torch.randn(500, 64, generator=generator)))
        for k in (1, 8, 63, 64):
            assert (top_k_kl(p[:, :k], q[:, :k]) >= 0).all()
        assert (full_kl(p, q) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [8.0, 20.0, 60.0, 1000.0])
def test_a_tail_of_next_to_nothing_stays_finite(gap, dtype):
    # Mass outside the two tokens: e^-gap in one, 0.1 in the other, and the other way round.
    logits = torch.tensor([[0.0, 0.0, -gap]], dtype=dtype, requires_grad=True)
    peaked, wide = logits.log_softmax(-1), logs(0.45, 0.45, 0.1, dtype=dtype)
    for out in (top_k_kl(peaked[:, :2], wide[:, :2]), top_k_kl(wide[:, :2], peaked[:, :2])):
        (gradient,) = torch.autograd.grad(out.sum(), logits, retain_graph=True)
        assert math.isfinite(out.item())
        assert out.item() > 0
        assert gradient.isfinite().all()
    # ln(.5 / .45) = 0.1054 up to the tail
    assert top_k_kl(peaked[:, :2], wide[:, :2]).item() == pytest.approx(full_kl(peaked, wide).item(), abs=1e-5)


def test_tokens_that_the_policy_excludes_may_be_among_the_k():
    # p = (0, .5 | .5), q = (.5, .25 | .25): 0 + .5 ln 2 + .5 ln 2 = 0.6931
    logits = torch.tensor([[-INF, 0.0, 0.0]], requires_grad=True)
    out = top_k_kl(logits.log_softmax(-1)[:, :2], logs(0.5, 0.25, dtype=torch.float32))
    assert out.item() == pytest.approx(math.log(2.0), rel=1e-5)
    assert torch.autograd.grad(out.sum(), logits)[0].tolist() == [pytest.approx([0.0, 0.0, 0.0], abs=1e-6)]
