"""What every member of every objective axis must satisfy, one row per member."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.objectives.advantages import Advantage, group_advantages
from posttrain.objectives.aggregate import Aggregation, aggregate, denominator_of
from posttrain.objectives.kl import DESCENDS, KLEstimator, kl_loss

ADVANTAGES = get_args(Advantage)
AGGREGATIONS = get_args(Aggregation)
ESTIMATORS = get_args(KLEstimator)
REWARDS = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.1, 0.3, 0.9, 1.0])), min_size=2, max_size=9)
LAWS = settings(max_examples=60, deadline=None, derandomize=True)


def test_the_lists_are_not_empty():
    assert len(ADVANTAGES) >= 3
    assert len(AGGREGATIONS) >= 4
    assert set(ESTIMATORS) == set(DESCENDS)


@pytest.mark.parametrize("how", ADVANTAGES)
@LAWS
@given(rewards=REWARDS, ddof=st.sampled_from([0, 1]))
def test_advantages_sum_to_zero_and_follow_the_rewards(how, rewards, ddof):
    got = group_advantages(rewards, how, ddof=ddof)
    scored = [(r, a) for r, a in zip(rewards, got, strict=True) if r is not None]
    assert sum(got) == pytest.approx(0.0, abs=1e-6)
    assert all(a == 0.0 for r, a in zip(rewards, got, strict=True) if r is None)
    for reward, advantage in scored:
        for other, another in scored:
            assert reward <= other or advantage > another or len(scored) < 2
    if len(scored) < 2 or len({r for r, _ in scored}) == 1:
        assert got == [0.0] * len(rewards)


@pytest.mark.parametrize("how", ADVANTAGES)
@LAWS
@given(rewards=REWARDS, data=st.data())
def test_reordering_siblings_reorders_advantages(how, rewards, data):
    order = data.draw(st.permutations(range(len(rewards))))
    got = group_advantages(rewards, how)
    assert group_advantages([rewards[i] for i in order], how) == pytest.approx([got[i] for i in order], abs=1e-9)


@pytest.mark.parametrize("how", ADVANTAGES)
@LAWS
@given(rewards=REWARDS, shift=st.sampled_from([0.5, -2.0, 10.0]))
def test_a_constant_bonus_cancels(how, rewards, shift):
    shifted = [None if reward is None else reward + shift for reward in rewards]
    assert group_advantages(shifted, how) == pytest.approx(group_advantages(rewards, how), abs=1e-4)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_reordering_rows_changes_nothing(how):
    values = torch.arange(12.0).view(3, 4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    order = [2, 0, 1]
    assert aggregate(values[order], mask[order], how, 5.0).item() == pytest.approx(aggregate(values, mask, how, 5.0).item())


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_wider_padding_changes_nothing(how):
    values, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[True, True]])
    wide = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[True, True, False]])
    assert aggregate(*wide, how, 3.0).item() == aggregate(values, mask, how, 3.0).item()


@pytest.mark.parametrize("how", [how for how in AGGREGATIONS if how != "constant"])
def test_parts_add_up_under_the_denominator_of_the_whole(how):
    values = torch.arange(1.0, 13.0).view(3, 4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
    denominator = denominator_of(mask.sum(-1).tolist(), how)
    parts = sum(aggregate(values[i : i + 1], mask[i : i + 1], how, denominator).item() for i in range(3))
    assert parts == pytest.approx(aggregate(values, mask, how, denominator).item())


@pytest.mark.parametrize("estimator", ESTIMATORS)
@LAWS
@given(x=st.floats(-5, 5).filter(lambda x: abs(x) > 1e-3))
def test_divergence_terms_are_positive_and_pull_towards_the_reference(estimator, x):
    logp = torch.tensor([[x - 6.0]], dtype=torch.float64, requires_grad=True)
    out = kl_loss(logp, torch.tensor([[-6.0]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool), estimator)
    (gradient,) = torch.autograd.grad(out.sum(), logp)
    assert out.item() > 0
    assert gradient.item() * x > 0
