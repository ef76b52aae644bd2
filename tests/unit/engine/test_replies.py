"""What is made of an engine's answers."""

from __future__ import annotations

import math

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.engine.replies import EngineError, call_seed, check, completion, kept
from posttrain.engine.types import Request

ENDS = (frozenset({2}), frozenset({2, 3}))


def asking(**options) -> Request:
    return Request((1, 5), Sampling(**{"max_tokens": 4, **options}), 9)


def test_ids_with_a_chance_are_kept():
    assert kept({9: -2.4, 4: -0.1, 5: -math.inf}) == (4, 9)
    assert kept({9: -2.4, 4: -0.1, 5: -9999.0}) == (4, 9)
    assert kept({4: math.log(0.6), 9: math.log(0.4)}) == (4, 9)
    assert kept({4: math.log(0.6), 9: math.log(0.3999)}) is None  # 1e-4 of the mass is elsewhere


def test_a_continuation_has_a_seed_of_its_own():
    first = asking()
    later = Request(first.prompt, first.sampling, first.seed, drawn=(20,))
    longer = Request(first.prompt, first.sampling, first.seed, drawn=(20, 21))
    assert call_seed(first) == 9
    assert len({9, call_seed(later), call_seed(longer)}) == 3
    assert call_seed(later) == call_seed(Request((7,), Sampling(), 9, drawn=(30,)))


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (asking(temperature=0.005), "temperature 0.005 is below 0.01"),
        (Request((), Sampling(), 0), "a prompt of 0 tokens"),
        (Request((1,), Sampling(max_tokens=2), 0, drawn=(4, 5)), "room for 0 more tokens"),
        (Request((1,) * 9, Sampling(max_tokens=8), 0), "need 17 tokens, the engine holds 16"),
        (Request((1,) * 9, Sampling(max_tokens=8), 0, drawn=(4,) * 6, limit=2), "need 17 tokens"),
    ],
)
def test_what_an_engine_would_bend_is_refused(request_, said):
    with pytest.raises(ConfigError, match=said):
        check([asking(), request_], 16)
    if "engine holds" in said or "17" in said:
        check([request_], 17)
        check([request_], None)


@pytest.mark.parametrize(
    ("ids", "logps", "said"),
    [
        ((4, 2), (-1.0,), "2 token ids and 1 log-probabilities"),
        ((), (), "0 token ids where 1 to 4 were asked for"),
        ((4, 5, 6, 7, 8), (-1.0,) * 5, "5 token ids where 1 to 4"),
        ((4, 5), (-1.0,) * 2, "ended after 2 of 4 tokens on id 5"),
    ],
)
def test_answers_that_are_no_completion(ids, logps, said):
    with pytest.raises(EngineError, match=said):
        completion(asking(), ids, logps, (), 0, ENDS)


def test_nothing_follows_a_terminal_token():
    done = completion(asking(), (4, 3, 7), (-1.0, -2.0, -3.0), ((4,), (3,), (7,)), 5, ENDS)
    assert (done.ids, done.logps, done.candidates, done.stop, done.version) == ((4, 3), (-1.0, -2.0), ((4,), (3,)), "control", 5)


def test_greedy_has_no_log_probabilities():
    assert completion(asking(temperature=0.0), (4, 2), (), (), 0, ENDS).logps == (0.0, 0.0)
