"""vLLM in process passes the contract of every sampler."""

from __future__ import annotations

import dataclasses

import pytest
from sampler_contract import CHECKS, CONTROL, PROMPTS, cuts_keep_their_ids, log_probabilities_are_those_of_the_draw, requests

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.engine.types import Request


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vllm_keeps_the_contract(vllm_case, check):
    check(vllm_case)


def test_log_probabilities_agree_to_1e_5_on_average(vllm_case):
    case = dataclasses.replace(vllm_case, gaps=[])
    log_probabilities_are_those_of_the_draw(case)
    cuts_keep_their_ids(case)
    assert len(case.gaps) > 500
    assert sum(case.gaps) / len(case.gaps) < 1e-5


def test_a_cut_that_keeps_more_than_was_listed_is_asked_again(vllm_case, monkeypatch):
    asked = requests(12, Sampling(temperature=1.5, top_p=0.95, max_tokens=8))
    expected = vllm_case.draw(asked)
    assert max(len(kept) for done in expected for kept in done.candidates) > 20
    told: list[int] = []
    monkeypatch.setattr("posttrain.engine.vllm_sampler.WIDTH", 2)
    again = vllm_case.sampler.generate(asked, told.append)
    assert sum(told) == 12
    for one, other in zip(again, expected, strict=True):
        assert (one.ids, one.stop, one.candidates) == (other.ids, other.stop, other.candidates)


def test_an_interrupted_call_leaves_nothing_behind(vllm_case):
    class Interrupted(Exception):
        """Raised by whoever watches the progress."""

    def stop(done: int) -> None:
        raise Interrupted

    asked = [Request(PROMPTS[i % 4], Sampling(max_tokens=1 + 9 * (i % 2)), i) for i in range(8)]
    with pytest.raises(Interrupted):
        vllm_case.sampler.generate(asked, stop)
    assert len(vllm_case.draw(asked)) == 8


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(PROMPTS[0], Sampling(temperature=0.001), 0), "temperature 0.001 is below 0.01"),
        (Request(PROMPTS[0], Sampling(max_tokens=126), 0), "need 129 tokens, the engine holds 128"),
    ],
)
def test_what_vllm_would_bend_is_refused(vllm_case, request_, said):
    with pytest.raises(ConfigError, match=said):
        vllm_case.sampler.generate([request_])


def test_a_completion_may_fill_the_context(vllm_case):
    (done,) = vllm_case.draw([Request(tuple(range(4, 60)) + (9,) * 68, Sampling(temperature=0.0, max_tokens=4), 0)])
    assert len(done.ids) == 4 or done.ids[-1] in CONTROL


def test_more_prompts_than_one_step_reads(vllm_case):
    """With vLLM's default, a seeded request whose prompt is read in two steps ends the engine on a CPU."""
    sampling = Sampling(max_tokens=2)
    asked = [Request(tuple(4 + (7 * i + j * j) % 60 for j in range(120)), sampling, i) for i in range(80)]
    for request, done in zip(asked, vllm_case.draw(asked), strict=True):
        vllm_case.compare(request, done)
