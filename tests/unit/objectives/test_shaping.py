"""Length and repetition shaping by hand."""

from __future__ import annotations

import math

import pytest

from posttrain.core.errors import ConfigError
from posttrain.objectives.shaping import group_length_bonus, repetition_penalty, soft_overlong


@pytest.mark.parametrize(
    # limit 20,480 and buffer 4,096: the ramp starts at 16,384; 2,048 of 4,096 further is half of it
    ("length", "expected"),
    [(0, 0.0), (16_384, 0.0), (16_385, -1 / 4096), (18_432, -0.5), (20_480, -1.0), (20_481, -1.0), (60_000, -1.0)],
)
def test_the_ramp_before_the_limit(length, expected):
    assert soft_overlong(length, 20_480, 4_096) == expected
    assert soft_overlong(length, 20_480, 4_096, scale=0.1) == pytest.approx(0.1 * expected)


def test_no_penalty_is_plus_zero():
    assert math.copysign(1.0, soft_overlong(10, 20_480, 4_096)) == 1.0
    assert all(math.copysign(1.0, value) == 1.0 for value in repetition_penalty([7, 7, 7], 2, 0.0))


def test_a_ramp_over_the_whole_length():
    assert [soft_overlong(length, 4, 4) for length in (0, 1, 2, 4)] == [0.0, -0.25, -0.5, -1.0]


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_a_ramp_without_room_is_refused(buffer):
    with pytest.raises(ConfigError, match=f"ramp of {buffer} tokens before a limit of 100: the buffer must be 1 to 100 tokens"):
        soft_overlong(50, 100, buffer)


def test_short_correct_answers_earn_and_wrong_ones_never_do():
    # (l - 2,000) / 4,000 = 0, .5, 1: .5, 0, -.5 when correct, min(0, .) when wrong
    lengths = [2_000, 4_000, 6_000]
    assert group_length_bonus(lengths, [True] * 3) == [0.5, 0.0, -0.5]
    assert group_length_bonus(lengths, [False] * 3) == [0.0, 0.0, -0.5]
    # shortest and longest are of the whole group, wrong answers included: (3,000 - 2,000) / 4,000 = .25
    assert group_length_bonus([6_000, 3_000, 2_000], [False, True, False]) == [-0.5, 0.25, 0.0]


def test_siblings_of_one_length_get_nothing():
    assert group_length_bonus([500, 500, 500], [True, False, True]) == [0.0, 0.0, 0.0]
    assert group_length_bonus([500], [True]) == [0.0]
    assert group_length_bonus([], []) == []


@pytest.mark.parametrize("lengths", [[1, 2], [2, 2]])
def test_every_sibling_needs_its_verdict(lengths):
    with pytest.raises(ValueError, match="shorter"):
        group_length_bonus(lengths, [True])


@pytest.mark.parametrize(
    ("ids", "n", "expected"),
    [
        ([1, 2, 3, 1, 2, 3], 2, [0, 0, 0, 0, 1, 1]),  # (1, 2) returns at the fifth token, (2, 3) at the sixth; (3, 1) is new
        ([1, 2, 3, 1, 2, 3], 3, [0, 0, 0, 0, 0, 1]),
        ([1, 2, 3, 1, 2, 3], 4, [0, 0, 0, 0, 0, 0]),
        ([7, 7, 7, 7], 2, [0, 0, 1, 1]),  # occurrences overlap
        ([5, 6, 5], 1, [0, 0, 1]),
        ([1, 2, 2, 1], 2, [0, 0, 0, 0]),  # (2, 1) is not (1, 2)
        ([2, 1, 2, 1], 2, [0, 0, 0, 1]),
        ([1], 2, [0]),
        ([], 2, []),
    ],
)
def test_the_token_that_completes_a_repeat_pays(ids, n, expected):
    assert repetition_penalty(ids, n, 0.25) == [-0.25 * value for value in expected]


def test_an_n_gram_has_tokens():
    with pytest.raises(ValueError, match="n-grams of 0 tokens"):
        repetition_penalty([1, 2], 0, 1.0)
