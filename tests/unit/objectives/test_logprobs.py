"""The sampling distribution: warping, scoring and drawing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import uniforms
from posttrain.objectives.logprobs import draw, logit_scores, logps_and_entropy, outside, warp

# probabilities 0.4, 0.3, 0.15, 0.1, 0.05 in a shuffled order
PROBABILITIES = [0.15, 0.4, 0.05, 0.3, 0.1]
LOGITS = torch.tensor([PROBABILITIES]).log() + 3.0


def support(sampling: Sampling) -> list[int]:
    return warp(LOGITS, sampling)[0].isfinite().nonzero().flatten().tolist()


def test_temperature_divides_the_logits():
    # at T = 0.5 probabilities are squared: 0.16 / (0.16 + 0.09 + 0.0225 + 0.01 + 0.0025) = 0.16 / 0.285
    logp = warp(LOGITS, Sampling(temperature=0.5)).log_softmax(-1)
    assert logp.exp()[0, 1].item() == pytest.approx(0.16 / 0.285, abs=1e-6)


def test_top_k_keeps_the_most_likely():
    assert support(Sampling(top_k=2)) == [1, 3]
    assert support(Sampling(top_k=5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    # cumulative 0.4, 0.7, 0.85, 0.95, 1.0 over tokens 1, 3, 0, 4, 2; the token that crosses the bound stays
    [(0.3, [1]), (0.5, [1, 3]), (0.75, [0, 1, 3]), (0.9, [0, 1, 3, 4]), (0.99, [0, 1, 2, 3, 4]), (1.0, [0, 1, 2, 3, 4])],
)
def test_top_p_keeps_the_token_that_crosses(top_p, kept):
    assert support(Sampling(top_p=top_p)) == kept


def test_top_p_is_taken_after_temperature_and_top_k():
    # top-k 2 leaves 4/7 = 0.571 and 3/7: 0.55 is reached by the first token alone, 0.6 needs both
    assert support(Sampling(top_k=2, top_p=0.55)) == [1]
    assert support(Sampling(top_k=2, top_p=0.6)) == [1, 3]
    # at T = 0.5 the first token has 0.561
    assert support(Sampling(temperature=0.5, top_p=0.55)) == [1]


@pytest.mark.parametrize(
    ("min_p", "kept"),
    # the bound is a share of the most likely token's 0.4
    [(0.99, [1]), (0.74, [1, 3]), (0.76, [1]), (0.37, [0, 1, 3]), (0.24, [0, 1, 3, 4]), (0.12, [0, 1, 2, 3, 4])],
)
def test_min_p_drops_what_is_much_less_likely_than_the_best(min_p, kept):
    assert support(Sampling(min_p=min_p)) == kept


def test_min_p_comes_last_and_is_measured_by_the_best_token_alone():
    # at T = 2 probabilities go as square roots: 0.632, 0.548, 0.387, ...; token 0 has 0.612 of the best instead of 0.375
    assert support(Sampling(min_p=0.6)) == [1, 3]
    assert support(Sampling(min_p=0.6, temperature=2.0)) == [0, 1, 3]
    # whatever the other cuts left, token 3 has 0.75 of the best; and they still cut
    assert support(Sampling(top_k=2, min_p=0.74)) == support(Sampling(top_p=0.5, min_p=0.74)) == [1, 3]
    assert support(Sampling(top_k=2, min_p=0.76)) == [1]
    assert support(Sampling(top_k=2, min_p=0.1)) == [1, 3]
    assert support(Sampling(top_p=0.75, min_p=0.1)) == [0, 1, 3]


def test_a_scored_token_stays_in_the_support():
    logp, _ = logps_and_entropy(LOGITS, torch.tensor([2]), Sampling(top_k=2))
    # 0.05 beside 0.4 and 0.3: 0.05 / 0.75
    assert logp.exp().item() == pytest.approx(0.05 / 0.75, abs=1e-6)


def test_renormalised_logprob_on_a_vocabulary_of_five():
    logp, _ = logps_and_entropy(LOGITS.repeat(2, 1), torch.tensor([1, 3]), Sampling(top_k=2))
    assert logp.exp().tolist() == pytest.approx([4 / 7, 3 / 7], abs=1e-6)


def test_entropy_by_hand_and_without_gradient():
    logits = LOGITS.clone().requires_grad_()
    _, entropy = logps_and_entropy(logits, torch.tensor([1]), Sampling())
    expected = -sum(p * math.log(p) for p in PROBABILITIES)
    assert entropy.item() == pytest.approx(expected, abs=1e-6)
    assert not entropy.requires_grad
    _, cut = logps_and_entropy(LOGITS, torch.tensor([1]), Sampling(top_k=2))
    assert cut.item() == pytest.approx(-(4 / 7) * math.log(4 / 7) - (3 / 7) * math.log(3 / 7), abs=1e-6)


def test_gradient_of_a_logprob_is_finite_behind_a_cut():
    logits = LOGITS.clone().requires_grad_()
    logp, _ = logps_and_entropy(logits, torch.tensor([1]), Sampling(top_k=2))
    (gradient,) = torch.autograd.grad(logp.sum(), logits)
    # 1 - 4/7 for the token itself, -3/7 for the other one that is kept, 0 outside
    assert gradient[0].tolist() == pytest.approx([0.0, 3 / 7, 0.0, -3 / 7, 0.0], abs=1e-6)


def test_of_equal_logits_the_lower_id_is_kept():
    # order 1, 0, 3, 4, 2: two of the four ties fit beside token 1
    logits = torch.tensor([[1.0, 2.0, 0.0, 1.0, 1.0]])
    assert warp(logits, Sampling(top_k=3)).isfinite().tolist() == [[True, True, False, True, False]]


def test_a_slice_of_the_vocabulary_is_cut_like_the_whole():
    # last kept is id 4 with logit 1, which a second product may return as 1 - 1e-6; id 7 is kept whatever its logit
    logits = torch.tensor([[2.0, 1.0 - 1e-6, 1.0, 0.5, 0.0]])  # ids 3 to 7
    edge, last, keep = torch.tensor([1.0]), torch.tensor([4]), torch.tensor([7])
    assert outside(logits, edge, last, keep, first=3).tolist() == [[False, False, True, True, False]]


def test_float64_stays_float64():
    assert warp(LOGITS.double(), Sampling(temperature=0.5)).dtype == torch.float64
    assert warp(LOGITS.bfloat16(), Sampling(temperature=0.5)).dtype == torch.float32


def test_gradient_of_an_entropy_by_hand():
    # d H / d x_v = -p_v (log p_v + H)
    logits = LOGITS.clone().requires_grad_()
    scores = logit_scores(logits, torch.tensor([1]), Sampling(), entropy_gradient=True)
    (gradient,) = torch.autograd.grad(scores.entropy_N.sum(), logits)
    entropy = -sum(p * math.log(p) for p in PROBABILITIES)
    assert gradient[0].tolist() == pytest.approx([-p * (math.log(p) + entropy) for p in PROBABILITIES], abs=1e-6)
    with torch.no_grad():
        assert not logit_scores(logits, torch.tensor([1]), Sampling(), entropy_gradient=True).entropy_N.requires_grad


def test_top_and_given_ids_by_hand():
    # top-k 2 leaves tokens 1 and 3 with 4/7 and 3/7
    logits = LOGITS.clone().requires_grad_()
    scores = logit_scores(logits, torch.tensor([1]), Sampling(top_k=2), top_k=2, at_NK=torch.tensor([[3, 0]]))
    assert scores.top is not None
    assert scores.at_NK is not None
    assert scores.top[0].tolist() == [[1, 3]]
    assert scores.top[1].exp().tolist()[0] == pytest.approx([4 / 7, 3 / 7], abs=1e-6)
    assert not scores.top[1].requires_grad
    assert scores.at_NK.exp().tolist()[0] == pytest.approx([3 / 7, 0.0], abs=1e-6)
    # weight 5 on the excluded token adds nothing: only 1 - 3/7 and -4/7 times 2 remain
    (gradient,) = torch.autograd.grad(scores.at_NK, logits, torch.tensor([[2.0, 5.0]]))
    assert gradient[0].tolist() == pytest.approx([0.0, -8 / 7, 0.0, 8 / 7, 0.0], abs=1e-6)


@pytest.mark.parametrize(
    ("uniform", "token"),
    # cumulative 0.15, 0.55, 0.6, 0.9, 1.0 in token order
    [(0.0, 0), (0.1499, 0), (0.1501, 1), (0.5499, 1), (0.5501, 2), (0.6001, 3), (0.9001, 4), (1 - 2**-53, 4)],
)
def test_draw_inverts_the_cdf(uniform, token):
    ids, logp = draw(LOGITS, Sampling(), torch.tensor([uniform], dtype=torch.float64))
    assert ids.item() == token
    assert logp.exp().item() == pytest.approx(PROBABILITIES[token], abs=1e-6)


def test_draw_never_leaves_the_support():
    # tokens 0 and 4 are outside; 0.0 and the largest uniform must not pick them
    ids, logp = draw(LOGITS.repeat(2, 1), Sampling(top_k=2), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert ids.tolist() == [1, 3]
    assert logp.isfinite().all()


def test_greedy_takes_the_most_likely_with_logprob_zero():
    ids, logp = draw(LOGITS, Sampling(temperature=0.0), torch.tensor([0.99], dtype=torch.float64))
    assert (ids.item(), logp.item()) == (1, 0.0)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0),
        Sampling(top_k=3),
        Sampling(top_p=0.8),
        Sampling(min_p=0.2),
        Sampling(temperature=1.5, top_k=4, top_p=0.9, min_p=0.1),
    ],
    ids=str,
)
def test_frequencies_match_the_exact_distribution(sampling):
    n = 20_000
    ids, _ = draw(LOGITS.repeat(n, 1), sampling, torch.from_numpy(uniforms(11, n)))
    exact = warp(LOGITS, sampling).softmax(-1)[0].double().numpy()
    counts = np.bincount(ids.numpy(), minlength=5)
    assert counts[exact == 0].sum() == 0
    inside = exact > 0
    expected = exact[inside] / exact[inside].sum() * n
    assert chisquare(counts[inside], expected).pvalue > 1e-3


def test_recorded_logprob_is_that_of_the_drawn_token():
    ids, logp = draw(LOGITS.repeat(64, 1), Sampling(temperature=1.5), torch.from_numpy(uniforms(3, 64)))
    scored, _ = logps_and_entropy(LOGITS.repeat(64, 1), ids, Sampling(temperature=1.5))
    assert len(set(ids.tolist())) > 2
    assert torch.equal(logp, scored)
