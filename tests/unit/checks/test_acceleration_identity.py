"""Gate I: equality at matched seeds, and the law of the drawn tokens where seeds cannot match."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from posttrain.checks.acceleration import Setup, Unshared, plain
from posttrain.checks.gate_distribution import model_scorer
from posttrain.checks.gate_identity import before, differences, identity_gate, law_of, sibling_requests, uniform_p
from posttrain.checks.gates import Verdict
from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import numpy_rng
from posttrain.core.trajectory import StopReason
from posttrain.engine import speculative
from posttrain.engine.local import LocalSampler
from posttrain.engine.speculative import SpeculativeSampler, judge
from posttrain.engine.types import Completion

STOP, CONTROL = frozenset({2}), frozenset({0, 1, 2, 3})
FREE = frozenset()
PROMPTS = [(1, 5, 9 + i) for i in range(20)]


def test_shared_prefill_gives_the_same_ids_and_log_probabilities(toy):
    setup = Setup(toy.model(), STOP, CONTROL)
    requests = sibling_requests(PROMPTS[:5], 4, Sampling(max_tokens=10), 0)
    result = identity_gate(Unshared(setup), plain(setup), model_scorer(setup.model), requests, "bits")
    assert result.verdict is Verdict.PASSED
    assert result.measured["sampled"]["of"] == 20
    assert result.measured["sampled"]["logp_gap"] < 2e-6
    alone = [plain(setup).generate([request])[0] for request in requests]
    assert differences(alone, plain(setup).generate(requests))["differ"] == 0


def test_differences_by_hand():
    """The first pair differs at its second id, where log-probabilities no longer compare; the second in its ending only."""
    a = [Completion((5, 6), (-2.0, -2.0), StopReason.END, 0), Completion((5,), (-0.5,), StopReason.END, 0)]
    b = [Completion((5, 7), (-2.5, -9.0), StopReason.END, 0), Completion((5,), (-0.4,), StopReason.LENGTH, 0)]
    assert differences(a, b) == {"differ": 2, "of": 2, "first": 0, "logp_gap": 0.5, "logp_share": 0.25}
    with pytest.raises(EvidenceError, match="1 completions for 2"):
        differences(a, b[:1])


class Skewed:
    """A sampler that reports log-probabilities a little off, and draws what it should."""

    version = 0

    def __init__(self, inner, by: float):
        self.inner, self.by = inner, by

    def generate(self, requests, progress=None):
        return [replace(c, logps=tuple(lp + self.by for lp in c.logps)) for c in self.inner.generate(requests)]


def test_wrong_log_probabilities_alone_are_a_difference(toy):
    model = toy.model()
    inner = LocalSampler(model, STOP, CONTROL)
    requests = sibling_requests(PROMPTS[:4], 2, Sampling(max_tokens=6), 0)
    result = identity_gate(inner, Skewed(inner, 1e-4), model_scorer(model), requests, "bits")
    assert result.verdict is Verdict.FAILED
    assert "more than rounding" in result.summary


def speculative_pair(toy, **options):
    model = toy.model()
    return model, SpeculativeSampler(model, toy.model(seed=1), FREE, FREE, **options)


def gate_of(toy, sampler, model, sampling=None):
    requests = sibling_requests(PROMPTS, 4, sampling or Sampling(max_tokens=8), 0)
    return identity_gate(LocalSampler(model, FREE, FREE), sampler, model_scorer(model), requests, "distribution")


@pytest.mark.parametrize("sampling", [Sampling(max_tokens=8), Sampling(temperature=0.6, top_p=0.9, max_tokens=8)], ids=str)
def test_speculative_decoding_has_the_law_of_the_model(toy, sampling):
    model, sampler = speculative_pair(toy)
    result = gate_of(toy, sampler, model, sampling)
    assert result.verdict is Verdict.PASSED, result.summary
    assert result.measured["law"]["n_tokens"] == 20 * 4 * 8
    assert result.measured["greedy"]["differ"] == 0


def test_accepting_every_proposal_is_caught(toy, monkeypatch):
    def always(proposal, sampling, noise_BK3):
        return judge(proposal, sampling, noise_BK3 * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))

    model, sampler = speculative_pair(toy)
    monkeypatch.setattr(speculative, "judge", always)
    result = gate_of(toy, sampler, model)
    assert result.verdict is Verdict.FAILED
    assert "another distribution" in result.summary


def test_log_probabilities_of_the_draft_are_caught(toy):
    model, sampler = speculative_pair(toy)
    result = gate_of(toy, Skewed(sampler, 0.01), model)
    assert result.verdict is Verdict.FAILED
    assert "nats from the reference's" in result.summary


def test_too_few_tokens_show_nothing(toy):
    model, sampler = speculative_pair(toy)
    requests = sibling_requests(PROMPTS[:3], 1, Sampling(max_tokens=8), 0)
    result = identity_gate(LocalSampler(model, FREE, FREE), sampler, model_scorer(model), requests, "distribution")
    assert result.verdict is Verdict.NOT_SHOWN
    assert "24 tokens are too few" in result.summary


def test_a_small_tilt_of_the_distribution_is_seen_with_enough_tokens(toy):
    """Drawn at temperature 0.8 and passed off as 1."""
    model = toy.model(std=0.15)
    sharp = [replace(r, sampling=Sampling(temperature=0.8, max_tokens=8)) for r in sibling_requests(PROMPTS, 4, Sampling(), 0)]
    drawn = LocalSampler(model, FREE, FREE).generate(sharp)
    asked = sibling_requests(PROMPTS, 4, Sampling(max_tokens=8), 0)
    p_values = law_of(asked, drawn, model_scorer(model), 0)["p_values"]
    assert min(p_values["surprise"], p_values["place by probability"]) < 1e-3


def test_parts_of_the_transform():
    p = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    assert before(p, torch.tensor([2, 0])).tolist() == pytest.approx([0.5, 0.0])
    rng = numpy_rng(0, "test", "uniform")
    assert uniform_p(rng.random(500).tolist()) > 0.01
    assert uniform_p((rng.random(500) ** 1.3).tolist()) < 1e-3
    assert uniform_p([0.5, float("nan")]) == 0.0


def test_nothing_to_compare_is_refused(toy):
    sampler = LocalSampler(toy.model(), STOP, CONTROL)
    with pytest.raises(EvidenceError, match="give it some prompts"):
        identity_gate(sampler, sampler, model_scorer(toy.model()), [], "bits")
