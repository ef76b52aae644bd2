"""Recorded candidates: the trainer renormalises over what the sampler's cut left, in values and gradients, by both paths."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.core.sampling import Sampling
from posttrain.objectives.kernel import linear_scores
from posttrain.objectives.logprobs import Replay, cut_of, logit_scores, warp

N, H, V = 11, 4, 23
TARGETS = torch.tensor([3, 7, 0, 22, 5, 5, 11, 14, 2, 9, 20])
SETS = [(1, 3), (7,), (0, 1, 2, 3), (22, 4), (), (5, 6, 7), tuple(range(V)), (), (2, 19), (9, 10), (20, 0)]
"""Two tokens without a record, one alone in its set, one with everything."""
PAIRS = torch.tensor([(n, i) for n, ids in enumerate(SETS) for i in ids])
CUTS = [Sampling(), Sampling(temperature=0.3, top_p=0.8), Sampling(temperature=2.0, top_k=5, min_p=0.1)]
every_cut = pytest.mark.parametrize("sampling", CUTS, ids=str)


def inputs() -> tuple[Tensor, Tensor]:
    """States and head in float64, both trained."""
    generator = torch.Generator().manual_seed(1)
    states, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((N, H), (V, H)))
    return states.requires_grad_(), weight.requires_grad_()


def restricted(logits_NV: Tensor, sampling: Sampling) -> list[Tensor]:
    """The distribution of each token over its own set, by slicing logits and nothing else; rows without a set by `warp`."""
    rows = []
    for n, ids in enumerate(SETS):
        if ids:
            full_V = torch.full((V,), -torch.inf, dtype=logits_NV.dtype)
            inside = (logits_NV[n, list(ids)] / sampling.temperature).log_softmax(-1)
            rows.append(full_V.index_put((torch.tensor(ids),), inside))
        else:
            rows.append(warp(logits_NV[n : n + 1], sampling, TARGETS[n : n + 1])[0].log_softmax(-1))
    return rows


def test_by_hand():
    # probabilities 0.4, 0.3, 0.2, 0.1; the sampler kept ids 1 and 3: 0.3 / 0.4 and 0.1 / 0.4, whatever top_k=1 would say
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().requires_grad_()
    scores = logit_scores(
        logits, torch.tensor([3]), Replay(Sampling(top_k=1), torch.tensor([[0, 1], [0, 3]])), at_NK=torch.tensor([[1, 0]])
    )
    assert scores.logp_N.exp().item() == pytest.approx(0.25)
    assert scores.entropy_N.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert scores.at_NK is not None
    assert scores.at_NK.exp().tolist()[0] == pytest.approx([0.75, 0.0])
    (by_logits,) = torch.autograd.grad(scores.logp_N.sum(), logits)
    assert by_logits[0].tolist() == pytest.approx([0.0, -0.75, 0.0, 0.75])


def test_the_only_candidate_is_certain():
    logits = torch.tensor([[3.7, -2.0, 0.1]])
    scores = logit_scores(logits, torch.tensor([1]), Replay(Sampling(temperature=0.3), torch.tensor([[0, 1]])))
    assert (scores.logp_N.item(), scores.entropy_N.item()) == (0.0, 0.0)


def test_a_cut_excludes_by_candidates_or_anew():
    # logits (2, 1, 0, -1): row 0 recorded ids 0 and 3, row 1 nothing, so that top-k 2 cuts it
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(2, 1)
    cut = cut_of(logits, Sampling(top_k=2), candidate_M2=torch.tensor([[0, 0], [0, 3]]))
    assert cut.excludes(logits).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert cut.excludes(logits[:, 1:], first=1).tolist() == [[True, True, False], [False, True, True]]
    assert (cut.edge_N.tolist(), cut.last_N.tolist()) == ([-math.inf, 1.0], [4, 1])


@every_cut
@pytest.mark.parametrize("path", ["logits", "states", "states by slices", "frozen head"])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_values_and_gradients_are_those_of_logits_restricted_to_the_sets(monkeypatch, sampling, path, entropy_gradient):
    states, weight = inputs()
    if path == "states by slices":
        monkeypatch.setattr("posttrain.objectives.kernel.SLICE", 2 * V + 1)
    if path == "frozen head":
        weight.requires_grad_(False)
    trained = [tensor for tensor in (states, weight) if tensor.requires_grad]
    rows = restricted(F.linear(states, weight), sampling)
    logp_N = torch.stack([row[target] for row, target in zip(rows, TARGETS, strict=True)])
    entropy_N = torch.stack([-(row.exp() * row.masked_fill(row.isinf(), 0.0)).sum() for row in rows])
    how = Replay(sampling, PAIRS)
    if path == "logits":
        found = logit_scores(F.linear(states, weight), TARGETS, how, entropy_gradient=entropy_gradient)
    else:
        found = linear_scores(states, weight, TARGETS, how, entropy_gradient=entropy_gradient)
    torch.testing.assert_close(found.logp_N, logp_N, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.entropy_N, entropy_N, atol=1e-12, rtol=0)
    # the off-policy gradient: every token with a ratio of its own
    ratio_N = torch.linspace(0.3, 2.0, N, dtype=torch.float64)
    share = 0.7 if entropy_gradient else 0.0
    expected = torch.autograd.grad((ratio_N * logp_N).sum() + share * entropy_N.square().sum(), trained)
    loss = (ratio_N * found.logp_N).sum() + (share * found.entropy_N.square().sum() if share else 0.0)
    for one, other in zip(torch.autograd.grad(loss, trained), expected, strict=True):
        assert other.norm() > 0.1
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_given_ids_and_the_most_likely_are_of_the_same_set():
    states, weight = inputs()
    at_NK = torch.arange(2 * N).view(N, 2) % V
    plain = logit_scores(F.linear(states, weight), TARGETS, Replay(Sampling(), PAIRS), top_k=4, at_NK=at_NK)
    found = linear_scores(states, weight, TARGETS, Replay(Sampling(), PAIRS), top_k=4, at_NK=at_NK)
    assert found.at_NK is not None
    assert plain.at_NK is not None
    assert found.top is not None
    assert plain.top is not None
    torch.testing.assert_close(found.at_NK, plain.at_NK, atol=1e-12, rtol=0)
    torch.testing.assert_close(found.top[1], plain.top[1], atol=1e-12, rtol=0)
    for n, ids in enumerate(SETS):
        if ids:
            assert set(found.top[0][n, : len(ids)].tolist()) <= set(ids)
            assert found.at_NK[n].isfinite().tolist() == [int(i) in ids for i in at_NK[n]]
    by_found, by_plain = (torch.autograd.grad(s.masked_fill(s.isinf(), 0).sum(), weight)[0] for s in (found.at_NK, plain.at_NK))
    torch.testing.assert_close(by_found, by_plain, atol=1e-11, rtol=0)
