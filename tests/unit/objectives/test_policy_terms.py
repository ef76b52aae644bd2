"""The composition of the axes: what reaches the loss, what is left out under which name, and what is measured."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.core.metrics import merge, read
from posttrain.core.seeds import numpy_rng
from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.objective import Objective
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.streams import LEFT_OUT, Fate, Streams

NO_KL = {"estimator": "none"}


def objective(**axes: Any) -> Objective:
    """GRPO without a KL term, unless the axes say otherwise."""
    return Objective.load({"kind": "grpo", "kl": NO_KL, **axes})


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def streams(seed: int = 0, rows: int = 5, width: int = 6) -> Streams:
    """Random streams whose ratios lie on both sides of every bound, with holes in the mask, an empty row, and one that has not moved."""
    draw = numpy_rng(seed, "streams")
    logp = torch.tensor(draw.uniform(-4.0, -0.5, (rows, width)))
    moved, apart = draw.choice([0.0, 0.05, -0.1, 0.4, -0.5, 1.5], (rows, width)), draw.choice([0.0, 0.01, 0.9, -1.0, 2.0], (rows, width))
    moved[0], apart[0] = 0.0, 0.0  # bounds made for sequences keep something too
    old = logp - torch.tensor(moved)
    mask = torch.tensor(draw.uniform(size=(rows, width)) < 0.7)
    mask[-1] = False
    return Streams(
        logp_BT=logp.requires_grad_(),
        old_BT=old,
        behaviour_BT=old - torch.tensor(apart),
        advantage_BT=torch.tensor(draw.choice([-1.0, 1.0, 0.5], (rows, width))),
        mask_BT=mask,
        reference_BT=logp.detach() + torch.tensor(draw.normal(size=(rows, width))),
        entropy_BT=torch.tensor(draw.uniform(0.1, 2.0, (rows, width))).requires_grad_(),
        sentence_BT=torch.arange(width).expand(rows, width) // 2,
        gate_BT=torch.tensor(draw.uniform(size=(rows, width)) < 0.3),
        divergence_BT=torch.tensor(draw.uniform(size=(rows, width))).requires_grad_(),
    )


def slopes(given: Streams, how: Objective) -> list[Tensor]:
    """Gradients of the summed loss by the streams that carry one."""
    leaves = [given.logp_BT, given.entropy_BT, given.divergence_BT]
    found = torch.autograd.grad(policy_terms(given, how).loss_BT.sum(), [leaf for leaf in leaves if leaf is not None], allow_unused=True)
    return [torch.zeros(given.mask_BT.shape) if slope is None else slope for slope in found]


VARIANTS = {
    **{name: Objective.load(name) for name in ALGORITHMS},
    "bonus": objective(entropy={"coef": 0.1}),
    "full": objective(kl={"estimator": "full", "coef": 0.1}),
    "rho_k3": objective(kl={"estimator": "rho_k3", "coef": 0.1, "dtype": "float64"}),
    "dual": objective(limit={"dual": 3.0}),
    "weight": objective(limit={"cap": 2.0, "outer": "weight"}),
    "kl_cov": objective(limit="kl_cov"),
    "binary_kl": objective(correction="binary_kl"),
    "sequence_truncate": objective(correction={"kind": "truncate", "level": "sequence"}),
}


# --- masked slots ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_slots_of_every_stream_may_hold_anything(name, junk):
    clean = streams()
    changes: dict[str, Tensor] = {}
    for field in fields(clean):
        value = getattr(clean, field.name)
        if field.name == "mask_BT":
            continue
        filler = junk if value.is_floating_point() else (~value if value.dtype == torch.bool else -99)
        soiled = torch.where(clean.mask_BT, value.detach(), filler)
        changes[field.name] = soiled.requires_grad_() if value.requires_grad else soiled
    dirty = replace(clean, **changes)
    expected, found = policy_terms(clean, VARIANTS[name]), policy_terms(dirty, VARIANTS[name])
    assert torch.equal(found.loss_BT, expected.loss_BT)
    assert torch.equal(found.fate_BT, expected.fate_BT)
    assert read(found.metrics) == read(expected.metrics)
    assert (found.loss_BT[~clean.mask_BT] == 0).all()
    for got, wanted in zip(slopes(dirty, VARIANTS[name]), slopes(clean, VARIANTS[name]), strict=True):
        assert torch.equal(got, wanted)
        assert (got[~clean.mask_BT] == 0).all()


# --- fates -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_every_trained_slot_meets_one_fate_and_the_metrics_say_so(name):
    given = streams(1)
    terms = policy_terms(given, VARIANTS[name])
    count = int(given.mask_BT.sum())
    assert torch.equal(terms.fate_BT == Fate.UNTRAINED, ~given.mask_BT)
    trained = int((terms.fate_BT == Fate.TRAINED).sum())
    shares = read({key: metric for key, metric in terms.metrics.items() if key.startswith("fate_")})
    assert shares.keys() == {f"fate_{fate.name.lower()}" for fate in LEFT_OUT}
    assert trained + round(sum(share or 0.0 for share in shares.values()) * count) == count
    for fate in LEFT_OUT:
        assert shares[f"fate_{fate.name.lower()}"] == pytest.approx(int((terms.fate_BT == fate).sum()) / count)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_surrogate_of_a_left_out_token_has_no_gradient(name):
    # without KL and bonus the surrogate is the whole loss
    given = streams(2)
    alone = VARIANTS[name].model_copy(update={"kl": objective().kl, "entropy": objective().entropy})
    slope = slopes(given, alone)[0]
    fate = policy_terms(given, alone).fate_BT
    assert (slope[fate > Fate.TRAINED] == 0).all()
    assert (fate == Fate.TRAINED).any()
    assert (slope[fate == Fate.TRAINED] != 0).all()


def test_a_token_that_the_limit_silences_is_still_held_by_the_kl():
    # ratio e^0.5 with A = 1 is clipped; x = logp - reference = 0.3 pulls with 0.1 x 0.3
    given = Streams(
        tensor([-1.0]).requires_grad_(), tensor([-1.5]), tensor([-1.5]), tensor([1.0]), torch.ones(1, 1, dtype=torch.bool), tensor([-1.3])
    )
    how = objective(kl={"estimator": "k2", "coef": 0.1, "dtype": "float64"})
    assert policy_terms(given, how).fate_BT.item() == Fate.CLIPPED
    assert slopes(given, how)[0].item() == pytest.approx(0.03)


# --- the terms of the loss ---------------------------------------------------------------------------------------------------------------


def single(now: float = -1.0, *, old: float | None = None, drawn: float | None = None, reference: float | None = None) -> Streams:
    """One trained token with advantage 2 in front of a masked one."""
    mask = torch.tensor([[True, False]])

    def pair(value: float) -> Tensor:
        return tensor([value, math.nan])

    base = now if old is None else old
    return Streams(
        logp_BT=pair(now).requires_grad_(),
        old_BT=pair(base),
        behaviour_BT=pair(base if drawn is None else drawn),
        advantage_BT=pair(2.0),
        mask_BT=mask,
        reference_BT=None if reference is None else pair(reference),
    )


def test_on_policy_the_loss_is_minus_the_advantage_and_its_gradient_too():
    assert policy_terms(single(), objective()).loss_BT.tolist() == [[-2.0, 0.0]]
    assert slopes(single(), objective())[0].tolist() == [[-2.0, 0.0]]


@pytest.mark.parametrize(
    ("estimator", "slope"),
    # x = logp - reference = 0.5: k2 x, k3 1 - e^-x, rho_k3 x
    [("k2", 0.5), ("k3", 1 - math.exp(-0.5)), ("rho_k3", 0.5)],
)
def test_the_kl_term_adds_its_own_gradient(estimator, slope):
    given = single(-1.0, reference=-1.5)
    how = objective(kl={"estimator": estimator, "coef": 0.3, "dtype": "float64"})
    value = {"k2": 0.125, "k3": math.exp(-0.5) - 0.5, "rho_k3": math.exp(-0.5) - 0.5}[estimator]
    assert policy_terms(given, how).loss_BT[0, 0].item() == pytest.approx(-2.0 + 0.3 * value)
    assert slopes(given, how)[0][0, 0].item() == pytest.approx(-2.0 + 0.3 * slope)


def test_rho_k3_weighs_tokens_of_the_old_policy_as_if_they_were_of_this_one():
    # ratio e^0.3, x = 0.5, no advantage: value e^0.3 (e^-0.5 - 0.5), slope e^0.3 x 0.5; the weight itself has no gradient
    given = replace(single(-1.0, old=-1.3, reference=-1.5), advantage_BT=tensor([0.0, math.nan]))
    how = objective(kl={"estimator": "rho_k3", "coef": 0.3, "dtype": "float64"})
    assert policy_terms(given, how).loss_BT[0, 0].item() == pytest.approx(0.3 * math.exp(0.3) * (math.exp(-0.5) - 0.5))
    assert slopes(given, how)[0][0, 0].item() == pytest.approx(0.3 * math.exp(0.3) * 0.5)


def test_an_exact_divergence_comes_from_the_scorer():
    given = replace(streams(3), reference_BT=None)
    how = objective(kl={"estimator": "full", "coef": 0.25})
    assert given.divergence_BT is not None
    slope = slopes(given, how)[2]
    assert torch.equal(slope, torch.where(given.mask_BT, 0.25, 0.0).double())


def test_a_kl_in_the_reward_stays_out_of_the_loss():
    given = single(-1.0, reference=-1.5)
    how = objective(kl={"estimator": "k1", "placement": "reward", "coef": 0.3})
    assert policy_terms(given, how).loss_BT[0, 0].item() == -2.0
    assert policy_terms(given, how).metrics["kl"].read() == pytest.approx(math.exp(-0.5) - 0.5)  # it is measured all the same


def test_entropy_is_paid_for():
    # loss falls by coef x H: the gradient by H is -coef on trained tokens
    given = streams(4)
    how = objective(entropy={"coef": 0.25})
    assert given.entropy_BT is not None
    paid = policy_terms(given, how).loss_BT - policy_terms(given, objective()).loss_BT
    torch.testing.assert_close(paid, torch.where(given.mask_BT, -0.25 * given.entropy_BT, 0.0))
    assert torch.equal(slopes(given, how)[1], torch.where(given.mask_BT, -0.25, 0.0).double())


def test_a_correction_weighs_the_surrogate_and_nothing_else():
    # kappa = e^(old - drawn) = e^0.5; the KL term keeps its weight
    given = single(-1.0, drawn=-1.5, reference=-1.5)
    how = objective(correction={"kind": "truncate", "cap": 9.0}, kl={"estimator": "k2", "coef": 0.3, "dtype": "float64"})
    assert policy_terms(given, how).loss_BT[0, 0].item() == pytest.approx(-2.0 * math.exp(0.5) + 0.3 * 0.125)
    assert slopes(given, how)[0][0, 0].item() == pytest.approx(-2.0 * math.exp(0.5) + 0.3 * 0.5)


def test_the_ratio_is_against_the_policy_that_the_objective_names():
    given = single(-1.0, old=-1.05, drawn=-1.1)
    by_old = policy_terms(given, objective(limit="none"))
    by_drawn = policy_terms(given, objective(limit="none", against="behaviour"))
    assert by_old.loss_BT[0, 0].item() == pytest.approx(-2.0 * math.exp(0.05))
    assert by_drawn.loss_BT[0, 0].item() == pytest.approx(-2.0 * math.exp(0.1))


def test_float64_arithmetic_keeps_a_small_kl():
    # x = 2^-13, exact in float32 near -1: k3 = x^2 / 2 - x^3 / 6; float32 loses the digits of (e^-x - 1) + x
    x = 2.0**-13
    expected = x * x / 2 - x**3 / 6
    logp, reference = torch.tensor([[-1.0]]).requires_grad_(), torch.tensor([[-1.0 - x]])
    given = Streams(logp, logp.detach(), logp.detach(), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), reference)
    found = {}
    for dtype in ("float32", "float64"):
        terms = policy_terms(given, objective(kl={"estimator": "k3", "coef": 1.0, "dtype": dtype}))
        assert terms.loss_BT.dtype == torch.float32  # what comes out has the precision of what came in
        found[dtype] = abs(terms.loss_BT.item() / expected - 1)
    assert found["float64"] < 1e-6 < 1e-5 < found["float32"]
    # the figure that is recorded is always taken in float64
    assert policy_terms(given, objective()).metrics["kl"].read() == pytest.approx(expected, rel=1e-9)


def test_float64_streams_stay_float64():
    given = single(-1.0, reference=-1.5)
    how = objective(kl={"estimator": "k2", "coef": 0.3})
    assert policy_terms(given, how).loss_BT.dtype == torch.float64
    assert policy_terms(given, how).loss_BT[0, 0].item() == -2.0 + 0.3 * 0.125


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"entropy": {"coef": 0.1}}, "an entropy bonus needs entropy_BT with gradient"),
        ({"kl": {"estimator": "k2", "coef": 0.1}}, "k2 needs reference_BT"),
        ({"kl": {"estimator": "full", "coef": 0.1}}, "full needs divergence_BT"),
        ({"kl": {"estimator": "top_k", "coef": 0.1}}, "top_k needs divergence_BT"),
        ({"ratio": "sentence"}, "needs sentence_BT"),
    ],
)
def test_a_stream_that_is_missing_is_named(axes, message):
    with pytest.raises(ValueError, match=message):
        policy_terms(single(), objective(**axes))


# --- a surrogate of one's own ------------------------------------------------------------------------------------------------------------


def squares(given: Streams) -> Tensor:
    """Whatever stands in for ratio, limit and correction."""
    return given.advantage_BT * given.logp_BT.square()


def test_a_surrogate_of_ones_own_replaces_ratio_limit_and_correction():
    # ratio e^0.5 would be clipped and mismatch e^3 masked: neither happens, and KL and entropy still come on top
    given = replace(single(-1.0, old=-1.5, drawn=-4.5, reference=-1.3), entropy_BT=tensor([0.7, math.nan]).requires_grad_())
    how = objective(correction="mask", kl={"estimator": "k2", "coef": 0.1, "dtype": "float64"}, entropy={"coef": 0.5})
    terms = policy_terms(given, how, squares)
    assert terms.loss_BT.tolist() == [[pytest.approx(2.0 + 0.1 * 0.045 - 0.35), 0.0]]
    assert terms.fate_BT.tolist() == [[Fate.TRAINED, Fate.UNTRAINED]]
    (slope,) = torch.autograd.grad(terms.loss_BT.sum(), given.logp_BT)
    assert slope.tolist() == [[pytest.approx(-4.0 + 0.1 * 0.3), 0.0]]
    assert read(terms.metrics)["correction_mean"] == 1.0
    assert read(terms.metrics)["clip_fraction"] == 0.0


def test_a_surrogate_may_be_named():
    # SAPO on-policy: 4 / tau sigmoid(0) A = 2 A / tau, and its slope is that of the policy gradient
    terms = policy_terms(single(), objective(surrogate="sapo"))
    assert terms.loss_BT[0, 0].item() == pytest.approx(-4.0)
    assert slopes(single(), objective(surrogate="sapo"))[0].tolist() == [[pytest.approx(-2.0), 0.0]]
    # the one that is handed over comes first
    assert policy_terms(single(), objective(surrogate="sapo"), squares).loss_BT[0, 0].item() == pytest.approx(2.0)


# --- metrics -----------------------------------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    # token log-ratios 0.2 -0.1 | 0.6; old - drawn 0.1 0 | -0.3; slots in between are masked
    mask = torch.tensor([[True, False, True], [False, True, False]])
    logp, old = tensor([-1.0, 9.0, -2.0], [9.0, -0.5, 9.0]), tensor([-1.2, 0.0, -1.9], [0.0, -1.1, 0.0])
    given = Streams(
        logp,
        old,
        old - tensor([0.1, 5.0, 0.0], [5.0, -0.3, 5.0]),
        torch.ones(2, 3).double(),
        mask,
        entropy_BT=tensor([0.3, 9, 0.6], [9, 0.9, 9]),
    )
    found = read(policy_terms(given, objective(limit={"low": 0.2, "high": 0.28})).metrics)
    ratios = [math.exp(x) for x in (0.2, -0.1, 0.6)]
    kappas = [math.exp(x) for x in (0.1, 0.0, -0.3)]
    assert found["ratio_mean"] == pytest.approx(sum(ratios) / 3)
    assert found["ratio_max"] == pytest.approx(ratios[2])
    assert found["staleness_mean"] == pytest.approx(0.9 / 3)
    assert found["mismatch_mean"] == pytest.approx(0.4 / 3)
    assert found["mismatch_max"] == pytest.approx(0.3)
    assert found["ess_staleness"] == pytest.approx(sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)))
    assert found["ess_mismatch"] == pytest.approx(sum(kappas) ** 2 / (3 * sum(k * k for k in kappas)))
    assert found["tokens"] == 3
    assert found["entropy"] == pytest.approx(0.6)
    # only e^0.6 = 1.82 is beyond 1.28
    assert found["fate_clipped"] == found["clip_fraction"] == pytest.approx(1 / 3)
    assert found["correction_mean"] == 1.0
    assert "kl" not in found


def test_what_a_band_masks_counts_as_clipped_and_what_a_correction_masks_does_not():
    given = single(-1.0, old=-2.0)
    assert policy_terms(given, objective(limit="band")).metrics["clip_fraction"].read() == 1.0
    given = single(-1.0, drawn=-9.0)
    terms = policy_terms(given, objective(correction="mask"))
    assert read(terms.metrics)["fate_mismatched"] == 1.0
    assert read(terms.metrics)["correction_mean"] == 0.0
    assert read(terms.metrics)["clip_fraction"] == 0.0


def test_an_exact_divergence_is_what_is_recorded():
    given = streams(5)
    assert given.divergence_BT is not None
    expected = given.divergence_BT[given.mask_BT].mean().item()
    assert policy_terms(given, objective(kl={"estimator": "full", "coef": 0.1})).metrics["kl"].read() == pytest.approx(expected)


@pytest.mark.parametrize("name", ["default", "gspo", "icepop", "grpo++", "mimo", "areal"])
def test_metrics_of_parts_merge_to_those_of_the_whole(name):
    given = streams(6, rows=7)
    whole = read(policy_terms(given, VARIANTS[name]).metrics)
    parts = []
    for rows in ([0, 1, 2], [3], [4, 5, 6]):
        part = {field.name: getattr(given, field.name)[rows] for field in fields(given)}
        parts.append(policy_terms(Streams(**part), VARIANTS[name]).metrics)
    merged = read(merge(parts))
    assert merged.keys() == whole.keys()
    assert merged == {key: pytest.approx(value, rel=1e-12) for key, value in whole.items()}


def test_a_batch_without_trained_tokens_measures_nothing():
    terms = policy_terms(replace(streams(), mask_BT=torch.zeros(5, 6, dtype=torch.bool)), Objective())
    assert (terms.loss_BT == 0).all()
    found = read(terms.metrics)
    assert found.pop("tokens") == 0
    assert set(found.values()) == {None}
