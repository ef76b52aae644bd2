"""The documented coefficients against golden numbers (spec/recipes-of-the-labs.md T46) and hand arithmetic."""

from __future__ import annotations

import math

import pytest

from posttrain.checks.coefficients import Row, Token, correction_weight, effects, kl_effect, limit_effect, log_ratios, token_weight
from posttrain.objectives.axes import (
    CISPO,
    KL,
    Band,
    BinaryKL,
    Clip,
    ClipCov,
    Decoupled,
    Divergence,
    KLCov,
    Mask,
    NoLimit,
    Squared,
    SquaredSequence,
    Truncate,
)
from posttrain.objectives.objective import Objective

RATIOS = (1.3, 0.7, 1.0, 2.5)
GOLDEN = {
    # name: (limit, slopes at A = +1, slopes at A = -1), signs of the surrogate; the table gives those of the loss
    "REINFORCE": (NoLimit(), None, (-1.3, -0.7, -1.0, -2.5)),
    "PPO": (Clip(), (0, 0.7, 1, 0), (-1.3, 0, -1, -2.5)),
    "DAPO": (Clip(high=0.28), (0, 0.7, 1, 0), (-1.3, 0, -1, -2.5)),
    "CISPO, cap 1.2": (CISPO(high=0.2), (1.2, 0.7, 1, 1.2), (-1.2, -0.7, -1, -1.2)),
    "MAI, cap 2": (Clip(cap=2.0), (0, 0.7, 1, 0), (-1.3, 0, -1, 0)),
    "band [.5, 2]": (Band(lower=0.5, upper=2.0), (1.3, 0.7, 1, 0), (-1.3, -0.7, -1, 0)),
    "GLM mask": (Band(lower=0.8, upper=1.2), (0, 0, 1, 0), (0, 0, -1, 0)),
    # rho -+ 2 * 0.1 ln rho: 1.3 - 0.0525 = 1.2475, 0.7 + 0.0713 = 0.7713
    "Kimi": (Squared(), (1.2475, 0.7713, 1, 0), (-1.3525, -0.6287, -1, 0)),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_gradients(name):
    limit, positive, negative = GOLDEN[name]
    for advantage, slopes in ((1.0, positive), (-1.0, negative)):
        if slopes is not None:
            found = [limit_effect(Token(math.log(rho), advantage), limit).slope for rho in RATIOS]
            assert found == pytest.approx(slopes, abs=5e-5)


def test_values_beyond_a_bound():
    # A = 1, rho 1.3 > 1.2: value 1.2. A = -1, rho 0.7 < 0.8: value -0.8. Dual 3 at rho 6: value -3, no slope. Cap 2 as a weight: slope -2.
    assert limit_effect(Token(math.log(1.3), 1.0), Clip()) == pytest.approx((1.2, 0.0))
    assert limit_effect(Token(math.log(0.7), -1.0), Clip()) == pytest.approx((-0.8, 0.0))
    assert limit_effect(Token(math.log(6), -1.0), Clip(dual=3.0)) == pytest.approx((-3.0, 0.0))
    assert limit_effect(Token(math.log(6), -1.0), Clip(cap=2.0)) == pytest.approx((-2.0, 0.0))
    assert limit_effect(Token(math.log(6), -1.0), Clip(cap=2.0, outer="weight")) == pytest.approx((-2.0, -2.0))
    assert limit_effect(Token(math.log(6), -1.0), Clip(cap=4.0, dual=3.0, outer="weight")) == pytest.approx((-3.0, 0.0))


def test_bounds_by_sign():
    band = Band(lower=0.8, upper=1.28, lower_negative=0.5, upper_negative=2.0)
    assert limit_effect(Token(math.log(1.9), 1.0), band).slope == 0.0
    assert limit_effect(Token(math.log(1.9), -1.0), band).slope == pytest.approx(-1.9)
    assert limit_effect(Token(math.log(0.6), -1.0), band).slope == pytest.approx(-0.6)


def test_sequence_penalty_divergence_and_gates():
    # tau 0.1, sum 0.5, A 1: 1 - 0.05
    assert limit_effect(Token(0.2, 1.0, total=0.5), SquaredSequence()).slope == pytest.approx(0.95)
    # 0.5 -> 0.7: total variation 0.2 > 0.15, moving away when A > 0 only
    up, down = (Token(math.log(1.4), advantage, logp=math.log(0.7), base=math.log(0.5)) for advantage in (1.0, -1.0))
    assert limit_effect(up, Divergence()).slope == 0.0
    assert limit_effect(down, Divergence()).slope == pytest.approx(-1.4)
    # KL of the coins: 0.5 ln(0.5 / 0.7) + 0.5 ln(0.5 / 0.3) = -0.16824 + 0.25541 = 0.0872
    assert limit_effect(up, Divergence(measure="kl", threshold=0.088)).slope == pytest.approx(1.4)
    assert limit_effect(up, Divergence(measure="kl", threshold=0.087)).slope == 0.0
    assert limit_effect(Token(math.log(1.1), 1.0, gated=True), ClipCov()) == pytest.approx((1.1, 0.0))
    # 1.1 - 1 * ln 1.1
    assert limit_effect(Token(math.log(1.1), 1.0, gated=True), KLCov()).slope == pytest.approx(1.1 - math.log(1.1))


def test_ratio_levels():
    deltas, sentence = [0.2, 0.0, -0.5], [0, 0, 1]
    assert log_ratios(deltas, sentence, "token") == deltas
    assert log_ratios(deltas, sentence, "none") == [0.0, 0.0, 0.0]
    assert log_ratios(deltas, sentence, "sentence") == pytest.approx([0.1, 0.1, -0.5])
    assert log_ratios(deltas, sentence, "sequence") == pytest.approx([-0.1] * 3)


def test_correction_weights():
    kappas = [math.log(1.2), math.log(6.0)]  # product 7.2, geometric mean 2.683

    def weight(t: int, how) -> float:
        return correction_weight(kappas, t, math.log(0.3), math.log(0.3) - kappas[t], how)

    assert [weight(t, Truncate()) for t in (0, 1)] == pytest.approx([1.2, 2.0])
    assert [weight(t, Truncate(level="sequence", cap=5.0)) for t in (0, 1)] == pytest.approx([5.0, 5.0])
    assert [weight(t, Decoupled()) for t in (0, 1)] == pytest.approx([1.2, 6.0])
    assert [weight(t, Mask()) for t in (0, 1)] == pytest.approx([1.2, 0.0])
    assert [weight(t, Mask(weight="one")) for t in (0, 1)] == [1.0, 0.0]
    assert [weight(t, Mask(upper=9.0, sequence_upper=2.6)) for t in (0, 1)] == [0.0, 0.0]
    assert [weight(t, Mask(upper=9.0, sequence_upper=2.7)) for t in (0, 1)] == pytest.approx([1.2, 6.0])
    # 0.3 against 0.25: 0.3 ln 1.2 + 0.7 ln(0.7 / 0.75) = 0.0547 - 0.0483 = 0.0064; against 0.05: 0.3 ln 6 + 0.7 ln(0.7 / 0.95) = 0.3238
    assert [weight(t, BinaryKL()) for t in (0, 1)] == [1.0, 0.0]


def test_kl_terms_and_weights_of_tokens():
    # x = ln 2: k2 = 0.2402, slope ln 2; k3 = 1/2 - 1 + ln 2 = 0.1931, slope 1/2; rho_k3: value of k3, slope of k2
    x = math.log(2)
    assert kl_effect(x, "k2") == pytest.approx((x * x / 2, x))
    assert kl_effect(x, "k3") == pytest.approx((x - 0.5, 0.5))
    assert kl_effect(x, "rho_k3") == pytest.approx((x - 0.5, x))
    with pytest.raises(ValueError, match="k1 is no per-token term"):
        kl_effect(x, "k1")
    assert [token_weight(how, 4, 10.0) for how in ("token_mean", "seq_mean_token_mean", "prompt_mean")] == [1.0, 0.25, 0.1]


def test_a_whole_row():
    # one token, A = 2, rho = 1.1 against old, kappa = 1.5, k2 at x = ln 2 with coefficient 0.1: loss -1.5 * 2.2 + 0.1 * x^2 / 2
    setting = Objective.load({"kind": "areal", "kl": KL(estimator="k2", coef=0.1)})
    row = Row([-1.0], [-1.0 - math.log(1.1)], [-1.0 - math.log(1.1) - math.log(1.5)], [-1.0 - math.log(2)], [2.0], [0], [False])
    (effect,) = effects(row, setting)
    assert effect.slope == pytest.approx(-3.3 + 0.1 * math.log(2))
    assert effect.value == pytest.approx(-3.3 + 0.05 * math.log(2) ** 2)
