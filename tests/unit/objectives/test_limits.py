"""Every member of the limit axis: value, gradient and fate of a token, by hand, for both signs of the advantage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.objectives.aggregate import aggregate
from posttrain.objectives.axes import (
    CISPO,
    Band,
    Clip,
    ClipCov,
    Divergence,
    KLCov,
    Limit,
    NoLimit,
    Squared,
    SquaredSequence,
)
from posttrain.objectives.limits import Limited, binary_kl, limited
from posttrain.objectives.objective import Objective
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.streams import Fate, Streams

RATIOS = (1.3, 0.7, 1.0, 2.5)


def apply(
    limit: Limit, ratios: list[float], advantages: list[float], old: list[float] | None = None, gate: list[bool] | None = None
) -> tuple[Limited, Tensor]:
    """One row of tokens with these ratios; returns the terms and d surrogate / d logp."""
    logp = torch.tensor([[math.log(ratio) for ratio in ratios]], dtype=torch.float64, requires_grad=True)
    chances = torch.tensor([old or [0.5] * len(ratios)], dtype=torch.float64)
    marked = None if gate is None else torch.tensor([gate])
    mask = torch.ones(1, len(ratios), dtype=torch.bool)
    found = limited(logp, torch.tensor([advantages], dtype=torch.float64), mask, limit, chances.log(), marked)
    (slope,) = torch.autograd.grad(found.surrogate_BT.sum(), logp)
    return found, slope[0]


def one(limit: Limit, ratio: float, advantage: float, old: float = 0.5) -> tuple[float, float, Fate]:
    """Surrogate, slope and fate of a single token."""
    found, slope = apply(limit, [ratio], [advantage], [old])
    return found.surrogate_BT.item(), slope.item(), Fate(int(found.fate_BT))


# --- golden gradients of whole methods ---------------------------------------------------------------------------------------------------

PLAIN = {"kind": "grpo", "kl": {"estimator": "none"}, "aggregation": "seq_mean_token_sum"}
"""No KL term and a sum over one response, so that the gradient of the loss is that of each token."""
METHODS: dict[str, dict[str, Any]] = {
    "reinforce": {"ratio": "none", "limit": "none"},
    "ppo": {"limit": {"low": 0.2, "high": 0.2}},
    "dapo": {"limit": {"low": 0.2, "high": 0.28}},
    "cispo": {"limit": {"kind": "cispo", "high": 0.2}},
    "mai": {"limit": {"low": 0.2, "high": 0.2, "cap": 2.0}},
    "icepop": {"limit": {"kind": "band", "lower": 0.5, "upper": 2.0}},
    "glm": {"limit": {"kind": "band", "lower": 0.8, "upper": 1.2}},
    "kimi": {"limit": {"kind": "squared", "omega": 0.1, "lower": 0.5, "upper": 2.0}},
    "gspo": {"ratio": "sequence", "limit": {"low": 3e-4, "high": 4e-4}, "aggregation": "seq_mean_token_mean"},
}
GOLDEN = {
    # d loss / d logp for ratios 1.3, 0.7, 1.0, 2.5; 0 is a token without gradient
    ("reinforce", 1): (-1, -1, -1, -1),
    ("ppo", 1): (0, -0.7, -1, 0),
    ("dapo", 1): (0, -0.7, -1, 0),
    ("cispo", 1): (-1.2, -0.7, -1, -1.2),
    ("mai", 1): (0, -0.7, -1, 0),
    ("icepop", 1): (-1.3, -0.7, -1, 0),
    ("glm", 1): (0, 0, -1, 0),
    # -(1.3 - 0.2 ln 1.3) = -1.3 + 0.2 x 0.26236; -(0.7 - 0.2 ln 0.7) = -0.7 - 0.2 x 0.35667
    ("kimi", 1): (-1.247527, -0.771335, -1, 0),
    # the geometric mean (1.3 x 0.7 x 1.0 x 2.5)^(1/4) = 2.275^(1/4) = 1.22814 is far above 1.0004
    ("gspo", 1): (0, 0, 0, 0),
    ("reinforce", -1): (1, 1, 1, 1),
    ("ppo", -1): (1.3, 0, 1, 2.5),  # 2.5: the branch that the clip leaves open
    ("dapo", -1): (1.3, 0, 1, 2.5),
    ("cispo", -1): (1.2, 0.7, 1, 1.2),
    ("mai", -1): (1.3, 0, 1, 0),
    ("icepop", -1): (1.3, 0.7, 1, 0),
    ("glm", -1): (0, 0, 1, 0),
    ("kimi", -1): (1.352473, 0.628665, 1, 0),  # 1.3 + 0.2 ln 1.3; 0.7 + 0.2 ln 0.7
    ("gspo", -1): (0.307036,) * 4,  # 1.22814 / 4 tokens
}


@pytest.mark.parametrize(("method", "sign"), GOLDEN, ids=str)
def test_golden_gradients_of_the_methods(method, sign):
    logp = torch.log(torch.tensor([RATIOS], dtype=torch.float64)).requires_grad_()
    zeros, mask = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool)
    objective = Objective.load({**PLAIN, **METHODS[method]})
    terms = policy_terms(Streams(logp, zeros, zeros, torch.full_like(zeros, sign), mask), objective)
    (slope,) = torch.autograd.grad(aggregate(terms.loss_BT, mask, objective.aggregation, 1.0), logp)
    assert slope[0].tolist() == pytest.approx(GOLDEN[method, sign], abs=1e-5)
    silent = [Fate(int(fate)) is not Fate.TRAINED for fate in terms.fate_BT[0]]
    assert silent == [value == 0 for value in GOLDEN[method, sign]]


# --- clip --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "fate"),
    [
        # inside the band [0.8, 1.28]: rho A
        (1.1, 2.0, 2.2, 2.2, Fate.TRAINED),
        (1.1, -2.0, -2.2, -2.2, Fate.TRAINED),
        # above the band: a good token stops at 1.28 A, a bad one is still pushed down
        (1.5, 2.0, 2.56, 0.0, Fate.CLIPPED),
        (1.5, -2.0, -3.0, -3.0, Fate.TRAINED),
        # below the band: a bad token stops at 0.8 A, a good one is still pulled up
        (0.5, 2.0, 1.0, 1.0, Fate.TRAINED),
        (0.5, -2.0, -1.6, 0.0, Fate.CLIPPED),
        # no advantage, nothing to clip
        (9.0, 0.0, 0.0, 0.0, Fate.TRAINED),
    ],
)
def test_every_region_of_the_clip(ratio, advantage, value, slope, fate):
    assert one(Clip(low=0.2, high=0.28), ratio, advantage) == (pytest.approx(value), pytest.approx(slope), fate)


def test_bounds_are_asymmetric():
    # 1.25 lies within 1 + 0.28 but not within 1 + 0.2
    limit = Clip(low=0.2, high=0.28)
    assert one(limit, 1.25, 1.0)[2] is Fate.TRAINED
    assert one(limit, 0.79, -1.0)[2] is Fate.CLIPPED
    assert one(limit, 0.81, -1.0)[2] is Fate.TRAINED


def test_unmoved_policy_has_surrogate_exactly_the_advantage():
    zeros = torch.zeros(1, 3)
    found = limited(zeros, torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), Clip(), torch.tensor([[-0.3, -17.3, -1e-9]]))
    assert found.surrogate_BT.tolist() == [[1.0, 1.0, 1.0]]
    assert found.fate_BT.tolist() == [[Fate.TRAINED] * 3]


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "fate"),
    [
        (2.5, -1.0, -2.5, -2.5, Fate.TRAINED),  # below the floor of 3 A
        (4.0, -1.0, -3.0, 0.0, Fate.CLIPPED),  # beyond: counts 3, moves nothing
        (4.0, -2.0, -6.0, 0.0, Fate.CLIPPED),
        (4.0, 1.0, 1.2, 0.0, Fate.CLIPPED),  # the plain clip; the floor is for bad tokens alone
        (0.5, 1.0, 0.5, 0.5, Fate.TRAINED),
        (0.5, -1.0, -0.8, 0.0, Fate.CLIPPED),
    ],
)
def test_dual_clip(ratio, advantage, value, slope, fate):
    assert one(Clip(low=0.2, high=0.2, dual=3.0), ratio, advantage) == (pytest.approx(value), pytest.approx(slope), fate)


@pytest.mark.parametrize(
    ("outer", "ratio", "advantage", "value", "slope", "fate"),
    [
        ("clamp", 2.5, -1.0, -2.0, 0.0, Fate.CLIPPED),
        ("weight", 2.5, -1.0, -2.0, -2.0, Fate.TRAINED),  # the gradient of a ratio held at 2
        ("clamp", 2.5, 1.0, 1.2, 0.0, Fate.CLIPPED),  # the inner clip has come first
        ("weight", 2.5, 1.0, 1.2, 0.0, Fate.CLIPPED),
        ("clamp", 1.9, -1.0, -1.9, -1.9, Fate.TRAINED),  # inside the cap nothing changes
        ("weight", 1.9, -1.0, -1.9, -1.9, Fate.TRAINED),
        ("clamp", 2.5, 0.0, 0.0, 0.0, Fate.TRAINED),
    ],
)
def test_outer_cap_stops_or_holds_the_weight(outer, ratio, advantage, value, slope, fate):
    assert one(Clip(low=0.2, high=0.2, cap=2.0, outer=outer), ratio, advantage) == (pytest.approx(value), pytest.approx(slope), fate)


# --- the other members -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantage", [1.5, -1.5])
def test_without_a_limit_every_token_keeps_its_ratio(advantage):
    found, slope = apply(NoLimit(), list(RATIOS), [advantage] * 4)
    assert slope.tolist() == pytest.approx([ratio * advantage for ratio in RATIOS])
    assert found.fate_BT.tolist() == [[Fate.TRAINED] * 4]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_caps_the_weight_and_silences_no_token(advantage):
    found, slope = apply(CISPO(high=0.5), [0.1, 1.2, 1.6, 9.0], [advantage] * 4)
    assert slope.tolist() == pytest.approx([0.1 * advantage, 1.2 * advantage, 1.5 * advantage, 1.5 * advantage])
    assert found.surrogate_BT[0].tolist() == pytest.approx([0.1 * advantage, 1.2 * advantage, 1.5 * advantage, 1.5 * advantage])
    assert found.fate_BT.tolist() == [[Fate.TRAINED] * 4]
    # a lower cap only where one is given
    assert one(CISPO(low=0.3, high=0.5), 0.1, advantage)[1] == pytest.approx(0.7 * advantage)


def test_the_weight_of_cispo_carries_no_gradient():
    # the slope is linear in the log-ratio's gradient: a weight of e^x that moved would add e^x again
    assert one(CISPO(high=4.0), 2.0, 1.0)[1] == pytest.approx(2.0)
    logp = torch.tensor([[math.log(2.0)]], dtype=torch.float64, requires_grad=True)
    found = limited(logp, torch.ones(1, 1).double(), torch.ones(1, 1, dtype=torch.bool), CISPO(high=4.0), logp.detach())
    (first,) = torch.autograd.grad(found.surrogate_BT.sum(), logp, create_graph=True)
    assert not first.requires_grad  # a constant times the advantage


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    # 0.8 to 1.28 for good tokens; 0.5 to 2 for bad ones
    [
        (1.3, 1.0, 0.0),
        (1.2, 1.0, 1.2),
        (0.7, 1.0, 0.0),
        (0.9, 1.0, 0.9),
        (1.3, -1.0, -1.3),
        (2.1, -1.0, 0.0),
        (0.6, -1.0, -0.6),
        (0.4, -1.0, 0.0),
    ],
)
def test_band_by_the_sign_of_the_advantage(ratio, advantage, slope):
    value, found, fate = one(Band(lower=0.8, upper=1.28, lower_negative=0.5, upper_negative=2.0), ratio, advantage)
    assert (value, found) == (pytest.approx(slope), pytest.approx(slope))  # outside the band the value is 0 too
    assert fate is (Fate.TRAINED if slope else Fate.OUT_OF_BAND)


def test_band_with_one_bound_of_its_own():
    assert one(Band(lower=0.8, upper=1.28, upper_negative=2.0), 1.5, -1.0)[1] == pytest.approx(-1.5)
    assert one(Band(lower=0.8, upper=1.28, upper_negative=2.0), 0.7, -1.0)[1] == 0.0
    assert one(Band(lower=0.8, upper=1.28, lower_negative=0.5), 0.6, -1.0)[1] == pytest.approx(-0.6)
    assert one(Band(lower=0.8, upper=1.28, lower_negative=0.5), 1.5, -1.0)[1] == 0.0


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_squared_pulls_back_inside_its_band(advantage):
    # rho A - omega x^2 with x = ln rho: slope rho A - 2 omega x
    for ratio in (0.6, 1.0, 1.9):
        x = math.log(ratio)
        expected = (pytest.approx(ratio * advantage - 0.3 * x * x), pytest.approx(ratio * advantage - 0.6 * x), Fate.TRAINED)
        assert one(Squared(omega=0.3, lower=0.5, upper=2.0), ratio, advantage) == expected
    for ratio in (0.4, 2.1):
        assert one(Squared(omega=0.3, lower=0.5, upper=2.0), ratio, advantage) == (0.0, 0.0, Fate.OUT_OF_BAND)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_squared_sequence_pulls_every_token_by_the_whole_response(advantage):
    # S = ln 1.3 + ln 0.7 + ln 2.5 = ln 2.275 = 0.82198; each token's slope is A - tau S
    found, slope = apply(SquaredSequence(tau=0.5), list(RATIOS), [advantage] * 4)
    total = math.log(2.275)
    assert slope.tolist() == pytest.approx([advantage - 0.5 * total] * 4)
    # the shares add up to 4 A - tau / 2 S^2
    assert found.surrogate_BT.sum().item() == pytest.approx(4 * advantage - 0.25 * total**2)
    assert found.fate_BT.tolist() == [[Fate.TRAINED] * 4]


# --- divergence --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "advantage", "left_out"),
    [
        (0.5, 0.7, 1.0, True),  # total variation 0.2 > 0.15, moving further up
        (0.5, 0.6, 1.0, False),  # 0.1
        (0.01, 0.1, 1.0, False),  # ten times as likely, and only 0.09 further away
        (0.5, 0.7, -1.0, False),  # a bad token that grew is on its way back
        (0.7, 0.5, -1.0, True),
        (0.7, 0.5, 1.0, False),
        (0.9, 0.1, 0.0, False),  # no advantage moves it nowhere
    ],
)
def test_divergence_is_measured_in_probability(old, new, advantage, left_out):
    ratio = new / old
    value, slope, fate = one(Divergence(measure="tv", threshold=0.15), ratio, advantage, old)
    assert fate is (Fate.OUT_OF_BAND if left_out else Fate.TRAINED)
    assert (value, slope) == ((0.0, 0.0) if left_out else (pytest.approx(ratio * advantage), pytest.approx(ratio * advantage)))


def test_divergence_measured_as_binary_kl():
    # 0.5 ln(0.5 / 0.7) + 0.5 ln(0.5 / 0.3) = -0.16824 + 0.25541 = 0.08718
    assert one(Divergence(measure="kl", threshold=0.087), 1.4, 1.0, 0.5)[2] is Fate.OUT_OF_BAND
    assert one(Divergence(measure="kl", threshold=0.088), 1.4, 1.0, 0.5)[2] is Fate.TRAINED
    # seen from the new policy it would be 0.7 ln 1.4 + 0.3 ln 0.6 = 0.08228
    assert one(Divergence(measure="kl", threshold=0.084), 1.4, 1.0, 0.5)[2] is Fate.OUT_OF_BAND


def test_divergence_reads_the_policy_of_the_ratio():
    # new 0.9 against behaviour 0.6 is 0.3 away, against old 0.8 only 0.1
    log = {name: torch.tensor([[math.log(p)]], dtype=torch.float64) for name, p in {"new": 0.9, "old": 0.8, "drawn": 0.6}.items()}
    streams = Streams(log["new"], log["old"], log["drawn"], torch.ones(1, 1).double(), torch.ones(1, 1, dtype=torch.bool))
    fates = {}
    for against in ("old", "behaviour"):
        setting = {"kind": "dppo", "limit": {"threshold": 0.2}, "against": against}
        fates[against] = Fate(int(policy_terms(streams, Objective.load(setting)).fate_BT))
    assert fates == {"old": Fate.TRAINED, "behaviour": Fate.OUT_OF_BAND}


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        (0.5, 0.5, 0.0),
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 0.0),
        (0.0, 0.5, math.log(2)),  # all mass on "another token", half as much there
        (1.0, 0.5, math.log(2)),
        (0.3, 0.25, 0.3 * math.log(1.2) + 0.7 * math.log(0.7 / 0.75)),
    ],
)
def test_binary_kl_by_hand(p, q, expected):
    found = binary_kl(torch.tensor([p], dtype=torch.float64), torch.tensor([q], dtype=torch.float64))
    assert found.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_binary_kl_of_the_impossible_is_large_and_finite(dtype):
    for p, q in ((0.5, 0.0), (0.5, 1.0), (1.0, 0.0), (0.0, 1.0)):
        found = binary_kl(torch.tensor([p], dtype=dtype), torch.tensor([q], dtype=dtype)).item()
        assert 10.0 < found < math.inf


# --- the covariance rules ----------------------------------------------------------------------------------------------------------------


def test_a_gated_token_keeps_its_value_and_loses_its_gradient():
    limit = ClipCov(low=0.2, high=0.2)
    found, slope = apply(limit, [1.1, 1.1, 1.5, 1.5], [1.0] * 4, gate=[True, False, True, False])
    assert slope.tolist() == pytest.approx([0.0, 1.1, 0.0, 0.0])
    assert found.surrogate_BT[0].tolist() == pytest.approx([1.1, 1.1, 1.2, 1.2])
    # a clipped token keeps its own fate
    assert found.fate_BT.tolist() == [[Fate.GATED, Fate.TRAINED, Fate.CLIPPED, Fate.CLIPPED]]


def test_clip_cov_without_a_gate_is_the_clip():
    found, slope = apply(ClipCov(low=0.2, high=0.28), [1.1, 1.25, 1.5, 0.7], [1.0] * 4)
    assert slope.tolist() == pytest.approx([1.1, 1.25, 0.0, 0.7])
    assert found.fate_BT.tolist() == [[Fate.TRAINED, Fate.TRAINED, Fate.CLIPPED, Fate.TRAINED]]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_kl_cov_holds_the_selected_tokens_back(advantage):
    # rho A - coef x^2 / 2: slope rho A - coef x on the selected, rho A elsewhere; nothing is clipped
    found, slope = apply(KLCov(coef=0.5), [1.5, 1.5, 0.5], [advantage] * 3, gate=[True, False, True])
    x, y = math.log(1.5), math.log(0.5)
    assert slope.tolist() == pytest.approx([1.5 * advantage - 0.5 * x, 1.5 * advantage, 0.5 * advantage - 0.5 * y])
    assert found.surrogate_BT[0, 0].item() == pytest.approx(1.5 * advantage - 0.25 * x * x)
    assert found.fate_BT.tolist() == [[Fate.TRAINED] * 3]
    assert apply(KLCov(coef=0.5), [1.5], [advantage])[1].tolist() == pytest.approx([1.5 * advantage])


MEMBERS = [
    NoLimit(),
    Clip(),
    Clip(dual=3.0),
    Clip(cap=2.0),
    Clip(cap=2.0, outer="weight"),
    CISPO(),
    Band(),
    Squared(),
    SquaredSequence(),
    Divergence(),
    ClipCov(),
    KLCov(),
]


@pytest.mark.parametrize("limit", MEMBERS, ids=str)
def test_on_policy_every_member_is_the_policy_gradient(limit):
    # at ratio 1 the value is A and the slope is A, with nothing left out
    found, slope = apply(limit, [1.0, 1.0], [2.0, -0.5], gate=[False, False])
    assert slope.tolist() == [2.0, -0.5]
    assert found.surrogate_BT.tolist() == [[2.0, -0.5]]
    assert found.fate_BT.tolist() == [[Fate.TRAINED] * 2]


@pytest.mark.parametrize("limit", MEMBERS, ids=str)
def test_what_is_left_out_has_exactly_no_gradient(limit):
    ratios = [0.05, 0.3, 0.7, 0.95, 1.05, 1.25, 1.9, 6.0]
    for advantage in (1.0, -1.0):
        found, slope = apply(limit, ratios, [advantage] * 8, gate=[place % 3 == 0 for place in range(8)])
        out = found.fate_BT[0] > Fate.TRAINED
        assert (slope[out] == 0).all()
        assert (slope[~out] != 0).all()
