"""Speculative decoding: the distribution is the model's, by enumeration, greedy output that of the plain sampler, and nothing but a
request's own seed decides a token."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from scipy import stats

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive, numpy_rng
from posttrain.core.trajectory import StopReason
from posttrain.engine import speculative
from posttrain.engine.draft import Acceptance, acceptance_alarm, check_draft, first_layers
from posttrain.engine.local import LocalSampler
from posttrain.engine.speculative import Proposal, SpeculativeSampler, judge
from posttrain.engine.types import Request
from posttrain.objectives.logprobs import draw, warp

STOP, CONTROL = frozenset({2}), frozenset({0, 1, 2, 3})
LAST = frozenset({6})
"""Ends a completion over the vocabulary of seven that is enumerated."""
SAMPLINGS = [
    Sampling(max_tokens=10),
    Sampling(temperature=0.5, max_tokens=10),
    Sampling(temperature=1.5, top_k=12, top_p=0.9, max_tokens=10),
]


def sampler_of(toy, *, layers: int | None = None, **options) -> SpeculativeSampler:
    """Target: the toy model; draft: another random model, or the target's first layers."""
    model = toy.model()
    draft = first_layers(model, layers) if layers else toy.model(seed=1)
    return SpeculativeSampler(model, draft, STOP, CONTROL, **options)


def requests(n: int, sampling: Sampling) -> list[Request]:
    prompts = [(1, 5, 9), (1, 5, 9, 11, 12), (7,)]
    return [Request(prompts[i % 3], sampling, derive(11, i)) for i in range(n)]


def same(one, other) -> None:
    assert (one.ids, one.stop, one.candidates) == (other.ids, other.stop, other.candidates)
    assert one.logps == pytest.approx(other.logps, abs=1e-5)


def exact_joint(model, prompt: tuple[int, ...], sampling: Sampling, length: int, vocab: int) -> dict[tuple[int, ...], float]:
    """Probability of every completion of up to `length` tokens, stop tokens ending it, by enumeration."""
    found: dict[tuple[int, ...], float] = {}

    def walk(ids: tuple[int, ...], mass: float) -> None:
        if len(ids) == length or (ids and ids[-1] in LAST):
            found[ids] = mass
            return
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *ids]])).logits[:, -1]
        for token, p in enumerate(warp(logits, sampling).double().softmax(-1)[0].tolist()):
            if p > 0:
                walk((*ids, token), mass * p)

    walk((), 1.0)
    assert math.isclose(sum(found.values()), 1.0, abs_tol=1e-9)
    return found


def chi_square(counts: Counter, exact: dict[tuple[int, ...], float], n: int) -> float:
    """p-value of the counts under the exact distribution; outcomes expected less than 5 times share one cell."""
    assert not counts.keys() - exact.keys()
    large = [ids for ids, mass in exact.items() if mass * n >= 5]
    observed, expected = [counts[ids] for ids in large], [exact[ids] * n for ids in large]
    if sum(expected) < n - 5:
        observed, expected = [*observed, n - sum(observed)], [*expected, n - sum(expected)]
    assert len(large) > 20
    scale = sum(observed) / sum(expected)  # a few draws of rare outcomes are in no cell
    return float(stats.chisquare(observed, [scale * mass for mass in expected]).pvalue)


def joint_p_value(toy, sampling: Sampling, n: int = 6000) -> float:
    model, draft = toy.model(7, seed=3, std=0.2), toy.model(7, seed=4, std=0.2)
    sampler = SpeculativeSampler(model, draft, LAST, LAST, max_rows=2000, ahead=2)
    drawn = sampler.generate([Request((1, 5, 4), sampling, derive(5, i)) for i in range(n)])
    counts = Counter(completion.ids for completion in drawn)
    return chi_square(counts, exact_joint(model, (1, 5, 4), sampling, 3, 7), n)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(max_tokens=3), Sampling(temperature=0.6, max_tokens=3), Sampling(top_k=5, top_p=0.95, min_p=0.05, max_tokens=3)],
    ids=("T1", "T0.6", "cut"),
)
def test_joint_distribution_of_three_tokens_is_exact(toy, sampling):
    assert joint_p_value(toy, sampling) > 0.01


def always(proposal, sampling, noise_BK3):
    return judge(proposal, sampling, noise_BK3 * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))


def residual_from_model(proposal, sampling, noise_BK3):
    """A refused proposal is replaced by a draw from p rather than from what is left of it."""
    p_NV = warp(proposal.model_BKV.flatten(0, 1), sampling)
    other_N, _ = draw(p_NV, Sampling(), noise_BK3.flatten(0, 1)[:, 2])
    found = judge(proposal, sampling, noise_BK3)
    refused_BK = torch.arange(found.ids_BK.shape[1]) >= found.accepted_B[:, None]
    return replace(found, ids_BK=torch.where(refused_BK, other_N.view_as(found.ids_BK), found.ids_BK))


@pytest.mark.parametrize("mutant", [always, residual_from_model])
def test_the_distribution_test_notices_a_wrong_rule(toy, monkeypatch, mutant):
    monkeypatch.setattr(speculative, "judge", mutant)
    assert joint_p_value(toy, Sampling(max_tokens=3)) < 1e-6


def test_one_place_by_hand():
    """p = (0.5, 0.5), q = (0.8, 0.2). Proposal 0 stays with 0.5/0.8 = 0.625: at u = 0.62 it does, at 0.63 the residual (0, 0.3) says 1.
    Proposal 1 always stays: 0.5/0.2 > 1."""
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.8, 0.2]).log()

    def decide(token: int, u: float):
        proposal = Proposal(torch.tensor([[token]]), q.view(1, 1, 2), p.view(1, 1, 2))
        return judge(proposal, Sampling(), torch.tensor([[[0.5, u, 0.9]]], dtype=torch.float64))

    for token, u, ids, accepted in ((0, 0.62, 0, 1), (0, 0.63, 1, 0), (1, 0.999, 1, 1)):
        verdict = decide(token, u)
        assert (verdict.ids_BK.item(), verdict.accepted_B.item(), verdict.decided_B.item()) == (ids, accepted, 1)
        assert verdict.logp_BK.item() == pytest.approx(math.log(0.5))


def test_a_refusal_hides_the_proposals_behind_it():
    """Three places; the second is refused: two tokens are decided, the third proposal is not looked at."""
    p, q = torch.tensor([[0.5, 0.5], [0.0, 1.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.5, 0.5]])
    proposal = Proposal(torch.tensor([[1, 0, 1]]), q.log()[None], p.log()[None])
    verdict = judge(proposal, Sampling(), torch.full((1, 3, 3), 0.5, dtype=torch.float64))
    assert (verdict.accepted_B.item(), verdict.decided_B.item()) == (1, 2)
    assert verdict.ids_BK[0, :2].tolist() == [1, 1]


def test_two_equal_distributions_never_refuse_for_good():
    logits = torch.tensor([[[0.3, -1.0, 0.7]]])
    verdict = judge(Proposal(torch.tensor([[1]]), logits, logits), Sampling(), torch.tensor([[[0.5, 1.0, 0.5]]], dtype=torch.float64))
    assert verdict.ids_BK.item() in (0, 1, 2)
    assert math.isfinite(verdict.logp_BK.item())


@pytest.mark.parametrize("layers", [None, 1])
def test_greedy_equals_the_plain_sampler(toy, layers):
    asked = requests(9, Sampling(temperature=0.0, max_tokens=12))
    plain = LocalSampler(toy.model(), STOP, CONTROL).generate(asked)
    done = sampler_of(toy, layers=layers).generate(asked)
    assert [(c.ids, c.logps, c.stop) for c in done] == [(c.ids, c.logps, c.stop) for c in plain]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_log_probabilities_and_candidates_are_those_of_the_model(toy, sampling):
    model, asked = toy.model(), requests(9, sampling)
    done = sampler_of(toy).generate(asked)
    assert max(len(c.ids) for c in done) > 5
    for request, completion in zip(asked, done, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*request.prompt, *completion.ids]])).logits[0, len(request.prompt) - 1 : -1]
        warped = warp(logits, sampling)
        scored = warped.log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None]).squeeze(-1)
        assert list(completion.logps) == pytest.approx(scored.tolist(), abs=1e-5)
        left = tuple(tuple(row.nonzero().squeeze(-1).tolist()) for row in ~warped.isneginf())
        assert completion.candidates == (left if sampling.cuts else ())


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_neither_mates_nor_proposals_per_pass_nor_order_change_a_result(toy, sampling):
    asked = requests(9, sampling)
    together = sampler_of(toy).generate(asked)
    assert len({c.ids for c in together}) > 5
    for one, other in zip(sampler_of(toy, max_rows=1).generate(asked), together, strict=True):
        same(one, other)
    for ahead in (1, 2, 7):
        for one, other in zip(sampler_of(toy, ahead=ahead).generate(asked[::-1])[::-1], together, strict=True):
            same(one, other)


@pytest.mark.parametrize("share", [0.0, 1.1])
def test_when_finished_rows_leave_changes_nothing(toy, monkeypatch, share):
    asked = requests(9, SAMPLINGS[0])
    together = sampler_of(toy).generate(asked)
    monkeypatch.setattr(speculative, "SHRINK", share)
    for one, other in zip(sampler_of(toy).generate(asked), together, strict=True):
        same(one, other)


def test_a_pause_changes_nothing(toy):
    sampling, sampler = Sampling(max_tokens=10), sampler_of(toy)
    asked = requests(9, sampling)
    for request, expected in zip(asked, sampler.generate(asked), strict=True):
        ids, logps, stop = (), (), StopReason.PAUSED
        while stop is StopReason.PAUSED:
            (part,) = sampler.generate([replace(request, drawn=ids, limit=3)])
            assert len(part.ids) <= 3
            ids, logps, stop = ids + part.ids, logps + part.logps, part.stop
        assert (ids, stop) == (expected.ids, expected.stop)
        assert logps == pytest.approx(expected.logps, abs=1e-5)


def only(model, token: int) -> None:
    """Make every next token `token`, whatever was read."""
    model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.bias.fill_(-50.0)
        model.lm_head.bias[token] = 50.0


@pytest.mark.parametrize(
    ("token", "stop", "length"),
    [(2, StopReason.END, 1), (3, StopReason.CONTROL, 1), (20, StopReason.LENGTH, 6)],
)
def test_an_end_inside_a_pass_ends(toy, token, stop, length):
    """Draft and model agree on everything, so that the stop token arrives as the first of four accepted proposals."""
    model = toy.model()
    only(model, token)
    sampler = SpeculativeSampler(model, first_layers(model, 1), STOP, CONTROL)
    (done,) = sampler.generate([Request((1, 5, 9), Sampling(max_tokens=6), 0)])
    assert (done.stop, done.ids) == (stop, (token,) * length)
    count = sampler.acceptance[1.0]
    assert (count.accepted, count.judged, count.passes) == (length, length, -(-length // 4))


def test_acceptance_of_a_perfect_and_of_a_foreign_draft(toy):
    model = toy.model()
    asked = requests(9, Sampling(max_tokens=10))
    perfect = SpeculativeSampler(model, toy.model(), frozenset(), frozenset())
    perfect.generate(asked)
    assert perfect.acceptance[1.0] == Acceptance(9 * 3, 9 * 3 * 4, 9 * 10, 9 * 10)  # passes of 4, 4 and 2 tokens
    assert perfect.acceptance[1.0].rate == 1.0
    foreign = SpeculativeSampler(model, toy.model(seed=1), frozenset(), frozenset())
    foreign.generate(asked)
    rate, length = foreign.acceptance[1.0].rate, foreign.acceptance[1.0].mean_length
    assert rate is not None
    assert length is not None
    assert 0.0 < rate < 0.7
    assert 0.0 < length < 2.0
    assert acceptance_alarm(foreign.acceptance[1.0], baseline=0.999, share=0.9) is not None
    assert acceptance_alarm(perfect.acceptance[1.0], baseline=0.999) is None


def test_rate_and_length_are_different_figures():
    """The example of the class: 6 of 7 judged, 3 per pass."""
    count = Acceptance(1, 4, 3, 2) + Acceptance(1, 4, 4, 4)
    assert count == Acceptance(2, 8, 7, 6)
    assert (count.rate, count.mean_length) == (6 / 7, 3.0)
    assert (Acceptance().rate, Acceptance().mean_length) == (None, None)


def test_the_acceptance_rate_is_the_overlap_of_the_two_distributions():
    """E[min(1, p/q)] under q is the sum of min(p, q); the rate over many uniforms must say so."""
    rng = numpy_rng(0, "test", "overlap")
    p, q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    n = 20_000
    noise = torch.from_numpy(rng.random((n, 1, 3)))
    ids, _ = draw(q.log().expand(n, 3), Sampling(), noise[:, 0, 0])
    verdict = judge(Proposal(ids[:, None], q.log().expand(n, 1, 3), p.log().expand(n, 1, 3)), Sampling(), noise)
    assert verdict.accepted_B.double().mean().item() == pytest.approx(0.2 + 0.3 + 0.1, abs=4 * math.sqrt(0.24 / n))
    shares = torch.bincount(verdict.ids_BK.flatten(), minlength=3) / n
    assert shares.tolist() == pytest.approx([0.6, 0.3, 0.1], abs=0.015)


def test_a_draft_of_the_first_layers_reads_the_live_weights(toy):
    model = toy.model()
    draft = first_layers(model, 1)
    assert len(draft.model.layers) == 1
    assert len(model.model.layers) == 2
    ids = torch.tensor([[1, 5, 9]])
    before = draft(input_ids=ids).logits
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert not torch.equal(draft(input_ids=ids).logits, before)


@pytest.mark.parametrize("layers", [0, 2, 5])
def test_a_draft_must_be_a_proper_part(toy, layers):
    with pytest.raises(ConfigError, match="choose between 1 and 1"):
        first_layers(toy.model(), layers)


def test_a_draft_with_another_vocabulary_is_refused(toy):
    with pytest.raises(ConfigError, match="61 tokens and the model 60"):
        SpeculativeSampler(toy.model(60), toy.model(61), STOP, CONTROL)
    with pytest.raises(ConfigError, match="id 1 is 'c' to the draft and 'b' to the model"):
        check_draft(toy.model(), toy.model(), {"a": 0, "b": 1}, {"a": 0, "c": 1})
    check_draft(toy.model(), toy.model(), {"a": 0, "b": 1}, {"b": 1, "a": 0})


def test_a_model_that_forgets_is_refused(toy):
    model = toy.model()
    model.config.sliding_window = 8
    with pytest.raises(ConfigError, match="the draft has layers that forget"):
        check_draft(toy.model(), model)


def test_version_progress_and_mixed_conditions(toy):
    sampler, told = sampler_of(toy, max_rows=4), []
    sampler.version = 7
    asked = list(itertools.chain(*zip(requests(5, SAMPLINGS[0]), requests(5, SAMPLINGS[1]), strict=True)))
    done = sampler.generate(asked, told.append)
    assert sum(told) == 10
    assert all(n > 0 for n in told)
    assert {c.version for c in done} == {7}
    assert set(sampler.acceptance) == {1.0, 0.5}
    for request, completion in zip(asked, done, strict=True):
        same(sampler.generate([request])[0], completion)
