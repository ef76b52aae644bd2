"""Gate A: numbers by hand, the direction of KL and ratio, and what it refuses to call a pass."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from posttrain.checks.gate_distribution import (
    Paths,
    TokenGaps,
    distribution_gate,
    first_divergence,
    model_scorer,
    summarise,
    token_gaps,
    traced,
)
from posttrain.checks.gates import Verdict
from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import StopReason
from posttrain.engine.int8 import Int8Sampler, quantise
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Completion, Request

STOP, CONTROL = frozenset({2}), frozenset({0, 1, 2, 3})
PROMPTS = [(1, 5, 9 + i) for i in range(12)]


def log(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows).log()


def test_numbers_by_hand():
    """p = (1/2, 1/2), a = (1/4, 3/4): KL(p||a) = 1/2 ln 2 + 1/2 ln(2/3) = 0.1438; KL(a||p) would be 0.1308. Token 0 was drawn:
    trainer over rollout is (1/2)/(1/4) = 2, not 1/2."""
    gaps = token_gaps(log((0.5, 0.5)), log((0.25, 0.75)), (0,), 1.0)
    assert gaps.kl64[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-7)
    assert gaps.kl32[0] == pytest.approx(gaps.kl64[0], abs=1e-6)
    assert gaps.log_ratio[0] == pytest.approx(math.log(2), abs=1e-6)
    assert gaps.accelerated[0] == pytest.approx(math.log(0.25), abs=1e-6)


def test_temperature_applies_to_both():
    """At T = 1/2 probabilities are squared: (0.5, 0.5) stays, (1/4, 3/4) becomes (1/10, 9/10): ratio 5."""
    gaps = token_gaps(log((0.5, 0.5)), log((0.25, 0.75)), (0,), 0.5)
    assert gaps.log_ratio[0] == pytest.approx(math.log(5), abs=1e-6)


def test_a_token_that_neither_path_can_draw_counts_nothing():
    gaps = token_gaps(log((0.5, 0.5, 0.0)), log((0.5, 0.5, 0.0)), (0,), 1.0)
    assert gaps.kl64 == (0.0,)
    lost = token_gaps(log((0.5, 0.5)), log((1.0, 0.0)), (0,), 1.0)
    assert lost.kl64 == (math.inf,)


def gaps_of(*log_ratios: float, kl: float = 0.01) -> TokenGaps:
    n = len(log_ratios)
    return TokenGaps((kl,) * n, (kl,) * n, log_ratios, (-1.0,) * n, (False,) * n)


def test_the_band_is_that_of_the_trainers_ratio():
    """Ratios 0.79, 0.81, 1.27, 1.29 against [0.8, 1.28]: the first and the last are outside. Of their inverses (1.27, 1.23, 0.79, 0.78)
    two others would be."""
    found = summarise([gaps_of(*map(math.log, (0.79, 0.81, 1.27, 1.29))), gaps_of(0.0, 0.0, 0.0, math.log(1.27))])
    assert found["outside_band"] == 2 / 8
    assert found["max_gap"] == pytest.approx(math.log(1.29))
    assert summarise([gaps_of(math.log(1.27)), gaps_of(math.log(1.2))])["outside_band"] == 0
    assert summarise([gaps_of(math.log(0.79)), gaps_of(math.log(1.3))], (0.5, 2.0))["outside_band"] == 0


def test_means_are_over_tokens_and_the_error_over_prompts():
    """Prompts of 1 and 3 tokens at KL 0.04 and 0.00: 0.04 / 4 = 0.01 and not the mean of means 0.02. Residual sums of the prompts
    0.04 - 0.01 = 0.03 and 0 - 0.03 = -0.03: sqrt(2/1 * 2 * 0.03^2) / 4 = 0.015."""
    found = summarise([gaps_of(0.0, kl=0.04), gaps_of(0.0, 0.0, 0.0, kl=0.0)])
    assert found["kl"] == pytest.approx(0.01)
    assert found["kl_se"] == pytest.approx(0.015)
    assert (found["n_prompts"], found["n_tokens"]) == (2, 4)


def test_kl_by_position():
    long = TokenGaps(*[tuple(float(t) for t in range(40))] * 2, (0.0,) * 40, (0.0,) * 40, (False,) * 40)
    rows = summarise([long, gaps_of(0.0, kl=1.0)])["kl_by_position"]
    assert [(row["from"], row["n"]) for row in rows] == [(0, 9), (8, 24), (32, 8)]
    assert rows[0]["kl"] == pytest.approx((sum(range(8)) + 1) / 9)
    assert rows[2]["kl"] == pytest.approx(sum(range(32, 40)) / 8)


def test_first_divergence_by_hand():
    def said(*ids: int) -> Completion:
        return Completion(ids, (0.0,) * len(ids), StopReason.LENGTH, 0)

    reference = [said(5, 6, 7), said(5, 6), said(5, 6), said(9)]
    accelerated = [said(5, 9), said(5, 6), said(5, 6, 7), said(8)]
    assert first_divergence(reference, accelerated) == {"parted": 3, "of": 4, "first": 0, "mean": 1.0}
    assert first_divergence(reference, reference) == {"parted": 0, "of": 4, "first": None, "mean": None}


def paths_of(model, other, sampler=None) -> Paths:
    accelerated = sampler or LocalSampler(other, STOP, CONTROL)
    return Paths(LocalSampler(model, STOP, CONTROL), accelerated, model_scorer(model), model_scorer(other))


def shaken(model, size: float):
    """A copy whose weights moved by a little noise."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))
    return other


def test_the_same_model_passes_with_nothing_to_see(toy):
    model = toy.model()
    result = distribution_gate(paths_of(model, model), PROMPTS, Sampling(max_tokens=8), 0)
    assert result.verdict is Verdict.PASSED
    assert abs(result.measured["kl"]) < 1e-9
    assert result.measured["max_gap"] < 1e-9
    assert result.measured["outside_band"] == 0
    assert result.measured["divergence"]["parted"] == 0
    assert result.measured["argmax_disagreement"] == 0


def test_only_generated_positions_are_scored(toy):
    model = toy.model()
    logits = model_scorer(model)((1, 5, 9), (11, 12))
    with torch.no_grad():
        whole = model(input_ids=torch.tensor([[1, 5, 9, 11, 12]])).logits[0]
    torch.testing.assert_close(logits, whole[2:4])


def test_another_model_fails_and_int8_of_a_smooth_one_passes(toy):
    model = toy.model()
    result = distribution_gate(paths_of(model, toy.model(seed=1)), PROMPTS, Sampling(max_tokens=8), 0)
    assert result.verdict is Verdict.FAILED
    assert result.measured["kl"] > 1
    smooth = toy.model(std=0.1)
    int8 = paths_of(smooth, quantise(smooth), Int8Sampler(smooth, STOP, CONTROL))
    result = distribution_gate(int8, PROMPTS, Sampling(max_tokens=8), 0)
    assert result.verdict is Verdict.PASSED
    assert 0 < result.measured["kl"] < 0.01


def test_near_the_threshold_nothing_is_shown(toy):
    """The bar is laid onto the measured value: neither side of it is shown, and it says so."""
    model = toy.model()
    paths = paths_of(model, shaken(model, 0.02))
    kl = distribution_gate(paths, PROMPTS, Sampling(max_tokens=8), 0).measured["kl"]
    result = distribution_gate(paths, PROMPTS, Sampling(max_tokens=8), 0, threshold=1.02 * kl)
    assert result.verdict is Verdict.NOT_SHOWN
    assert any("of the threshold" in warning for warning in result.warnings)
    assert distribution_gate(paths, PROMPTS, Sampling(max_tokens=8), 0, threshold=5 * kl).verdict is Verdict.PASSED
    assert distribution_gate(paths, PROMPTS, Sampling(max_tokens=8), 0, threshold=kl / 5).verdict is Verdict.FAILED


def test_a_scorer_that_is_not_the_samplers_is_found_out(toy):
    """The sampler is int8, the scorer that speaks for it the plain model: KL 0, and yet no pass."""
    model = toy.model()
    paths = Paths(LocalSampler(model, STOP, CONTROL), Int8Sampler(model, STOP, CONTROL), model_scorer(model), model_scorer(model))
    result = distribution_gate(paths, PROMPTS, Sampling(max_tokens=8), 0)
    assert result.measured["kl"] == 0
    assert result.verdict is Verdict.FAILED
    assert "not what was sampled from" in result.summary


def test_not_a_number_is_a_failure(toy):
    model = toy.model()

    def broken(prompt, ids) -> Tensor:
        return model_scorer(model)(prompt, ids) * float("nan")

    sampler = LocalSampler(model, STOP, CONTROL)
    result = distribution_gate(Paths(sampler, sampler, model_scorer(model), broken), PROMPTS, Sampling(max_tokens=4), 0)
    assert result.verdict is Verdict.FAILED
    assert "not a finite number" in result.summary
    assert result.measured["kl"] is None


def test_a_kl_that_grows_with_the_context_is_warned_about(toy):
    model = toy.model()
    plain = model_scorer(model)

    def drifting(prompt, ids) -> Tensor:
        logits = plain(prompt, ids)
        place_T1 = torch.arange(len(ids))[:, None]
        return logits + 0.004 * place_T1 * torch.linspace(-1, 1, logits.shape[1])

    free = LocalSampler(model, frozenset(), frozenset())
    paths = Paths(free, free, plain, drifting)
    result = distribution_gate(paths, PROMPTS, Sampling(max_tokens=12), 0)
    assert any("grows with the context" in warning for warning in result.warnings) or "not what was sampled" in result.summary
    rows = result.measured["kl_by_position"]
    assert rows[-1]["kl"] > 2 * rows[0]["kl"]


def test_what_it_refuses(toy):
    paths = paths_of(toy.model(), toy.model())
    with pytest.raises(EvidenceError, match="temperature of training"):
        distribution_gate(paths, PROMPTS, Sampling(temperature=0.0), 0)
    with pytest.raises(EvidenceError, match="at least 2 prompts"):
        distribution_gate(paths, PROMPTS[:1], Sampling(), 0)


def test_a_trace_holds_what_the_tokens_were_drawn_from(toy):
    model = toy.model()
    sampler = LocalSampler(model, STOP, CONTROL)
    request = Request((1, 5, 9), Sampling(max_tokens=8), 3)
    completion, logits = traced(sampler)(request)
    assert completion.ids == sampler.generate([request])[0].ids
    assert logits.shape == (len(completion.ids), 60)
    torch.testing.assert_close(logits, model_scorer(model)(request.prompt, completion.ids), atol=1e-4, rtol=0)
    scored = logits.log_softmax(-1).gather(-1, torch.tensor(completion.ids)[:, None]).squeeze(-1)
    assert scored.tolist() == pytest.approx(completion.logps, abs=1e-6)


def test_a_path_that_does_not_reproduce_itself_is_measured_as_it_drew(toy):
    """The sampler is int8 and so is what is recorded; its scorer is another model. The KL is that of the recording, and the distance to the
    scorer is reported and warned about."""
    model = toy.model(std=0.1)
    reference, sampler = LocalSampler(model, STOP, CONTROL), Int8Sampler(model, STOP, CONTROL)
    sound = Paths(reference, sampler, model_scorer(model), model_scorer(quantise(model)), traced(sampler))
    result = distribution_gate(sound, PROMPTS, Sampling(max_tokens=8), 0)
    assert result.verdict is Verdict.PASSED
    assert result.measured["self_kl"] < 1e-5
    assert result.warnings == ()
    noisy = replace(sound, accelerated_scorer=model_scorer(shaken(model, 0.02)))
    again = distribution_gate(noisy, PROMPTS, Sampling(max_tokens=8), 0)
    assert again.measured["kl"] == result.measured["kl"]
    assert again.measured["self_kl"] > 1e-3
    assert any("cannot be computed again" in warning for warning in again.warnings)
