"""What the certificate checks on fixed groups, on arbitrary ones: order of siblings, a constant bonus, weights of arbitrary masks."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.objectives.advantages import TARGETS, group_advantages
from posttrain.objectives.aggregate import aggregate, denominator_of
from posttrain.objectives.axes import Aggregation
from posttrain.objectives.kl import DESCENDS, REFUSED, kl_loss

ADVANTAGES = tuple(TARGETS)
CENTRED = ("mean", "mean_std", "leave_one_out", "max_rl")
AGGREGATIONS = get_args(Aggregation)
LOSSES = sorted(name for place, name in DESCENDS if place == "loss" and name not in ("full", "top_k"))
REWARDS = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0])), min_size=2, max_size=9)
MASKS = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6).filter(lambda rows: any(map(any, rows)))
LAWS = settings(max_examples=60, deadline=None, derandomize=True)


def test_every_pair_of_place_and_estimator_is_decided():
    estimators = {name for _, name in DESCENDS} | {name for _, name in REFUSED}
    assert set(DESCENDS) | set(REFUSED) == {(place, name) for place in ("loss", "reward") for name in estimators}
    assert not set(DESCENDS) & set(REFUSED)


@pytest.mark.parametrize("how", ADVANTAGES)
@LAWS
@given(rewards=REWARDS)
def test_advantages_follow_the_rewards(how, rewards):
    got = group_advantages(rewards, how)
    scored = [(r, a) for r, a in zip(rewards, got, strict=True) if r is not None]
    assert all(a == 0.0 for r, a in zip(rewards, got, strict=True) if r is None)
    assert all(reward <= other or advantage >= another - 1e-12 for reward, advantage in scored for other, another in scored)
    if how in CENTRED:
        assert sum(got) == pytest.approx(0.0, abs=1e-6)
    if how != "none" and (len(scored) < 2 or len({r for r, _ in scored}) == 1):
        assert got == [0.0] * len(rewards)


@pytest.mark.parametrize("how", ADVANTAGES)
@LAWS
@given(rewards=REWARDS, data=st.data())
def test_reordering_siblings_reorders_advantages(how, rewards, data):
    order = data.draw(st.permutations(range(len(rewards))))
    got = group_advantages(rewards, how)
    assert group_advantages([rewards[i] for i in order], how) == pytest.approx([got[i] for i in order], abs=1e-9)


@pytest.mark.parametrize("how", [how for how in ADVANTAGES if how not in ("none", "max_rl")])
@LAWS
@given(rewards=REWARDS, shift=st.sampled_from([0.5, -2.0, 10.0]))
def test_a_constant_bonus_cancels(how, rewards, shift):
    shifted = [None if reward is None else reward + shift for reward in rewards]
    assert group_advantages(shifted, how) == pytest.approx(group_advantages(rewards, how), abs=1e-4)


@pytest.mark.parametrize("how", AGGREGATIONS)
@LAWS
@given(rows=MASKS, data=st.data())
def test_parts_add_up_under_the_denominator_of_the_whole(how, rows, data):
    mask = torch.tensor(rows)
    prompts = data.draw(st.lists(st.sampled_from("abc"), min_size=len(rows), max_size=len(rows)))
    lengths = mask.sum(-1).tolist()
    totals = {p: float(sum(n for n, q in zip(lengths, prompts, strict=True) if q == p)) for p in prompts}
    prompt_B = torch.tensor([totals[p] for p in prompts], dtype=torch.float64)
    values = torch.arange(1.0, mask.numel() + 1, dtype=torch.float64).view(mask.shape)
    denominator = denominator_of(lengths, how, 12.0, prompts)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [aggregate(values[s], mask[s], how, denominator, prompt_B[s]).item() for s in (slice(0, cut), slice(cut, None))]
    assert sum(parts) == pytest.approx(aggregate(values, mask, how, denominator, prompt_B).item(), rel=1e-12)


@pytest.mark.parametrize("estimator", LOSSES)
@LAWS
@given(x=st.floats(-5, 5).filter(lambda x: abs(x) > 1e-3))
def test_divergence_terms_are_positive_and_pull_towards_the_reference(estimator, x):
    logp = torch.tensor([[x - 6.0]], dtype=torch.float64, requires_grad=True)
    reference, mask = torch.tensor([[-6.0]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    out = kl_loss(logp, reference, mask, estimator, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(out.sum(), logp)
    assert out.item() > 0
    assert gradient.item() * x > 0
