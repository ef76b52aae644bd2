"""What is done about tokens that sampler and trainer judge differently: weights and fates by hand, never a gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from posttrain.objectives.axes import BinaryKL, Correction, Decoupled, Mask, NoCorrection, Truncate
from posttrain.objectives.corrections import Corrected, correction
from posttrain.objectives.objective import Objective
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.streams import Fate, Streams

T, U, M, R = Fate.TRAINED, Fate.UNTRAINED, Fate.MISMATCHED, Fate.REJECTED


def logs(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def of(kappas: list[list[float]], how: Correction, mask: list[list[bool]] | None = None) -> Corrected:
    """Correction of tokens with these ratios trainer / sampler; the sampler gave each a probability of 0.1."""
    drawn = torch.full((len(kappas), len(kappas[0])), 0.1, dtype=torch.float64).log()
    marked = torch.ones(drawn.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return correction(drawn + logs(kappas), drawn, marked, how)


def test_without_a_correction_every_token_weighs_one():
    found = of([[0.1, 1.0, 9.0]], NoCorrection(), [[True, True, False]])
    assert found.weight_BT.tolist() == [[1.0, 1.0, 1.0]]
    assert found.fate_BT.tolist() == [[T, T, U]]


def test_truncation_has_an_upper_bound_only():
    found = of([[0.1, 1.2, 2.0, 6.0]], Truncate(cap=2.0))
    assert found.weight_BT[0].tolist() == pytest.approx([0.1, 1.2, 2.0, 2.0])
    assert found.fate_BT.tolist() == [[T] * 4]


def test_truncation_of_a_sequence_weighs_by_the_product():
    # 1.25 x 1.2 = 1.5 on each of its tokens, the untrained 9 left out; 3 x 2 = 6 is cut to 2
    found = of([[1.25, 1.2, 9.0], [3.0, 2.0, 1.0]], Truncate(cap=2.0, level="sequence"), [[True, True, False], [True, True, True]])
    assert found.weight_BT[0, :2].tolist() == pytest.approx([1.5, 1.5])
    assert found.weight_BT[1].tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_decoupled_is_the_ratio_itself_with_an_optional_cap():
    assert of([[0.1, 1.2, 6.0]], Decoupled()).weight_BT[0].tolist() == pytest.approx([0.1, 1.2, 6.0])
    assert of([[0.1, 1.2, 6.0]], Decoupled(cap=5.0)).weight_BT[0].tolist() == pytest.approx([0.1, 1.2, 5.0])


@pytest.mark.parametrize("weight", ["ratio", "one"])
def test_mask_keeps_what_is_inside_the_band(weight):
    found = of([[0.4, 0.6, 1.2, 4.9, 5.1]], Mask(lower=0.5, upper=5.0, weight=weight))
    kept = [0.0, 0.6, 1.2, 4.9, 0.0] if weight == "ratio" else [0.0, 1.0, 1.0, 1.0, 0.0]
    assert found.weight_BT[0].tolist() == pytest.approx(kept)
    assert found.fate_BT.tolist() == [[M, T, T, T, M]]


def test_a_response_beyond_the_sequence_band_is_rejected_whole():
    # geometric means: sqrt(1.01 x 1.0) = 1.005 above 1.001; sqrt(0.98 x 1.0) = 0.990 below 0.996; sqrt(1.001 x 0.999) about 1 inside
    how = Mask(lower=0.5, upper=2.0, sequence_lower=0.996, sequence_upper=1.001, weight="one")
    found = of([[1.01, 1.0], [0.98, 1.0], [1.001, 0.999]], how)
    assert found.fate_BT.tolist() == [[R, R], [R, R], [T, T]]
    assert found.weight_BT.tolist() == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]


def test_each_sequence_bound_works_alone():
    low, high = [[0.98, 1.0]], [[1.01, 1.0]]
    assert of(low, Mask(sequence_lower=0.996)).fate_BT.tolist() == [[R, R]]
    assert of(high, Mask(sequence_lower=0.996)).fate_BT.tolist() == [[T, T]]
    assert of(low, Mask(sequence_upper=1.001)).fate_BT.tolist() == [[T, T]]
    assert of(high, Mask(sequence_upper=1.001)).fate_BT.tolist() == [[R, R]]


def test_rejection_outranks_the_token_and_untrained_slots_take_no_part():
    # row 0: the untrained 3.0 does not count, the mean of 1.0 and 1.0 is inside; row 1: 0.4 is outside its band and drags the mean down
    how = Mask(lower=0.5, upper=2.0, sequence_lower=0.996, sequence_upper=1.001)
    found = of([[1.0, 1.0, 3.0], [0.4, 1.0, 1.0]], how, [[True, True, False], [True, True, True]])
    assert found.fate_BT.tolist() == [[T, T, U], [R, R, R]]
    # a mean inside the band keeps the other tokens: 0.4 x 2.5 = 1, and 0.4, 2.5 are outside on their own
    assert of([[0.4, 2.5, 1.0]], how).fate_BT.tolist() == [[M, M, T]]


def test_binary_kl_masks_by_probability_and_not_by_ratio():
    # 0.9 against 0.5: 0.9 ln 1.8 + 0.1 ln 0.2 = 0.52901 - 0.16094 = 0.36807; 0.001 against 0.0001: ten times as likely, and
    # 0.001 ln 10 + 0.999 ln(0.999 / 0.9999) = 0.0023026 - 0.0009005 = 0.0014021
    trainer, sampler, mask = logs([[0.9, 0.001]]), logs([[0.5, 0.0001]]), torch.ones(1, 2, dtype=torch.bool)
    for threshold, fates in ((0.05, [M, T]), (0.368, [M, T]), (0.3682, [T, T]), (0.0014, [M, M]), (0.00141, [M, T])):
        found = correction(trainer, sampler, mask, BinaryKL(threshold=threshold))
        assert found.fate_BT.tolist() == [fates], threshold
        assert found.weight_BT.tolist() == [[float(fate is T) for fate in fates]]


def test_binary_kl_takes_the_mean_under_the_trainer():
    # trainer 0.5, sampler 0.7: 0.5 ln(0.5 / 0.7) + 0.5 ln(0.5 / 0.3) = 0.08718; the other way round 0.08228
    half, more, mask = logs([[0.5]]), logs([[0.7]]), torch.ones(1, 1, dtype=torch.bool)
    assert correction(half, more, mask, BinaryKL(threshold=0.085)).fate_BT.item() == M
    assert correction(more, half, mask, BinaryKL(threshold=0.085)).fate_BT.item() == T


MEMBERS = [
    NoCorrection(),
    Truncate(),
    Truncate(level="sequence"),
    Mask(),
    Mask(sequence_lower=0.99),
    Decoupled(),
    Decoupled(cap=3.0),
    BinaryKL(),
]


@pytest.mark.parametrize("how", MEMBERS, ids=str)
def test_no_member_has_a_gradient(how):
    old = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    drawn = torch.tensor([[-1.1, -1.9]], requires_grad=True)
    found = correction(old, drawn, torch.ones(1, 2, dtype=torch.bool), how)
    assert not found.weight_BT.requires_grad


@pytest.mark.parametrize("how", MEMBERS, ids=str)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_slots_may_hold_anything(how, junk):
    mask = torch.tensor([[True, True, False], [True, False, False]])
    old, drawn = torch.tensor([[-1.0, -2.0, 0.0], [-0.5, 0.0, 0.0]]), torch.tensor([[-1.1, -1.9, 0.0], [-0.4, 0.0, 0.0]])
    clean = correction(old, drawn, mask, how)
    dirty = correction(torch.where(mask, old, junk), torch.where(mask, drawn, -junk), mask, how)
    assert torch.equal(dirty.weight_BT, clean.weight_BT)
    assert torch.equal(dirty.fate_BT, clean.fate_BT)
    assert (clean.fate_BT[~mask] == U).all()


@pytest.mark.parametrize("how", MEMBERS, ids=str)
def test_engines_that_agree_lose_nothing(how):
    logp = torch.tensor([[-1.0, -2.0, -1e-9]])
    found = correction(logp, logp.clone(), torch.ones(1, 3, dtype=torch.bool), how)
    assert found.weight_BT.tolist() == [[1.0, 1.0, 1.0]]
    assert found.fate_BT.tolist() == [[T, T, T]]


# --- inside the loss ---------------------------------------------------------------------------------------------------------------------


def slope(objective: Objective, now: float, old: float, drawn: float, advantage: float) -> tuple[float, Fate]:
    """d loss / d logp of a token with these probabilities, and its fate."""
    logp = torch.tensor([[math.log(now)]], dtype=torch.float64, requires_grad=True)
    streams = Streams(logp, logs([[old]]), logs([[drawn]]), torch.full((1, 1), advantage).double(), torch.ones(1, 1, dtype=torch.bool))
    terms = policy_terms(streams, objective)
    (found,) = torch.autograd.grad(terms.loss_BT.sum(), logp)
    return found.item(), Fate(int(terms.fate_BT))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_decoupled_weighs_what_happened_before_the_phase_and_clips_what_happens_in_it(advantage):
    # sampler 0.20, old 0.25, now 0.27: w = 0.25 / 0.20 = 1.25 fixed, u = 0.27 / 0.25 = 1.08 inside [0.8, 1.2]; product 1.35
    areal = Objective.load({"kind": "areal", "limit": {"low": 0.2, "high": 0.2}})
    assert slope(areal, 0.27, 0.25, 0.20, advantage) == (pytest.approx(-1.35 * advantage), Fate.TRAINED)
    # one ratio for both is 1.35: outside, and clipped where the clip holds
    plain = Objective.load({"kind": "areal", "correction": "none", "against": "behaviour", "limit": {"low": 0.2, "high": 0.2}})
    expected = (0.0, Fate.CLIPPED) if advantage > 0 else (pytest.approx(1.35), Fate.TRAINED)
    assert slope(plain, 0.27, 0.25, 0.20, advantage) == expected
    # u = 0.35 / 0.25 = 1.4 leaves its band, whatever the weight
    outside = (0.0, Fate.CLIPPED) if advantage > 0 else (pytest.approx(1.75), Fate.TRAINED)
    assert slope(areal, 0.35, 0.25, 0.20, advantage) == outside


def test_what_the_sampler_got_wrong_outranks_what_the_policy_moved():
    # ratio 0.9 / 0.4 = 2.25 is clipped for a good token; mismatch 0.4 / 0.05 = 8 is outside [0.5, 5], 0.4 / 0.1 = 4 inside and a weight
    icepop = Objective.load({"kind": "icepop", "kl": {"estimator": "none"}})
    assert slope(icepop, 0.9, 0.4, 0.05, 1.0) == (0.0, Fate.MISMATCHED)
    assert slope(icepop, 0.9, 0.4, 0.4, 1.0) == (0.0, Fate.CLIPPED)
    assert slope(icepop, 0.41, 0.4, 0.1, 1.0) == (pytest.approx(-1.025 * 4.0), Fate.TRAINED)
