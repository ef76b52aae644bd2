"""The scripted sampler ends completions as a real one does."""

from __future__ import annotations

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import StopReason
from posttrain.engine.replies import EngineError
from posttrain.engine.scripted import Answer, ScriptedSampler
from posttrain.engine.types import Completion, Request


def asking(n: int = 8, **options) -> Request:
    return Request((1, 5), Sampling(max_tokens=n), 0, **options)


def test_answers_from_a_list_in_the_order_of_asking():
    sampler = ScriptedSampler([(40, 2), Answer((41, 42, 2), (-0.1, -0.2, -0.3))], version=3)
    done = sampler.generate([asking(), asking()])
    assert done[0] == Completion((40, 2), (0.0, 0.0), StopReason.END, 3)
    assert done[1] == Completion((41, 42, 2), (-0.1, -0.2, -0.3), StopReason.END, 3)
    with pytest.raises(ConfigError, match="the script has 2 answers and was asked for one more"):
        sampler.generate([asking()])


def test_answers_by_a_function_of_prompt_and_request():
    sampler = ScriptedSampler(lambda prompt, request: (*prompt, request.seed, 2))
    assert [done.ids for done in sampler.generate([Request((7,), Sampling(), 20), Request((8,), Sampling(), 21)])] == [
        (7, 20, 2),
        (8, 21, 2),
    ]


def test_counts_what_it_was_asked():
    told: list[int] = []
    sampler = ScriptedSampler(lambda prompt, request: (2,))
    first, second = asking(), asking(3)
    sampler.generate([first, second], told.append)
    sampler.generate([first])
    assert (sampler.calls, sampler.asked, told) == (2, [first, second, first], [1, 1])


@pytest.mark.parametrize(
    ("ids", "request_", "expected", "stop"),
    [
        ((40, 2, 41), asking(), (40, 2), StopReason.END),
        ((40, 3), asking(), (40, 3), StopReason.CONTROL),
        ((40, 41, 42, 2), asking(3), (40, 41, 42), StopReason.LENGTH),
        ((40, 41, 42, 2), asking(limit=2), (40, 41), StopReason.PAUSED),
        ((40, 41, 42, 2), asking(drawn=(40, 41), limit=2), (42, 2), StopReason.END),
        ((40, 41, 42, 43), asking(4, drawn=(40, 41), limit=2), (42, 43), StopReason.LENGTH),
    ],
)
def test_why_a_completion_ends(ids, request_, expected, stop):
    (done,) = ScriptedSampler([ids], frozenset({2}), frozenset({3})).generate([request_])
    assert (done.ids, done.stop) == (expected, stop)


def test_an_answer_that_ends_without_a_reason_is_a_fault_of_the_script():
    with pytest.raises(EngineError, match="ended after 1 of 8 tokens on id 40, which is no stop id"):
        ScriptedSampler([(40,)]).generate([asking()])


def test_a_script_that_forgot_what_it_said():
    with pytest.raises(ConfigError, match=r"the script answers \(40, 2\), but \(41,\) was drawn before"):
        ScriptedSampler([(40, 2)]).generate([asking(drawn=(41,))])


def test_candidates_are_handed_on():
    request = Request((1,), Sampling(top_k=2, max_tokens=4), 0, drawn=(40,))
    (done,) = ScriptedSampler([Answer((40, 41, 2), (-1.0, -2.0, -3.0), ((40, 50), (41, 51), (2, 52)))]).generate([request])
    assert (done.logps, done.candidates) == ((-2.0, -3.0), ((41, 51), (2, 52)))
