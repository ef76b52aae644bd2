"""A step's leading signals, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from posttrain.core.tasks import Message
from posttrain.core.trajectory import Group, Owner, RewardStatus, Rollout, StopReason
from posttrain.rollout.behaviour import behaviour, repetition, turns
from posttrain.rollout.health import channels, health, kind_of_group


def unparseable(group: Group) -> Group:
    rollouts = tuple(replace(r, score=replace(r.score, value=0.0, status=RewardStatus.UNPARSEABLE)) for r in group.rollouts)
    return replace(group, rollouts=rollouts)


def test_every_group_is_of_one_kind(toy):
    assert kind_of_group(toy.group([1.0, 0.0])) == "mixed"
    assert kind_of_group(toy.group([1.0, 1.0])) == "all_right"
    assert kind_of_group(toy.group([0.0, 0.0])) == "all_wrong"
    assert kind_of_group(toy.group([-0.5, -0.5])) == "all_wrong"
    assert kind_of_group(toy.group([0.3, 0.3])) == "unanimous_partial"
    assert kind_of_group(toy.group([None, 1.0])) == "all_right"
    assert kind_of_group(toy.group([None, None])) == "unanimous_partial"
    assert kind_of_group(unparseable(toy.group([0.0, 0.0]))) == "unanimous_unparseable"


def test_shares_add_up_and_the_mixed_mean_is_of_mixed_groups(toy):
    groups = [toy.group([1.0, 0.0]), toy.group([1.0, 1.0]), toy.group([0.0, 0.0]), unparseable(toy.group([0.0, 0.0]))]
    found = health(groups)
    assert [found[k] for k in ("mixed", "all_right", "all_wrong", "unanimous_partial", "unanimous_unparseable")] == [
        0.25,
        0.25,
        0.25,
        0,
        0.25,
    ]
    assert found["zero_variance"] == 0.75
    assert found["reward_mean"] == pytest.approx(3 / 8)
    assert found["reward_mixed"] == 0.5
    assert found["parsed"] == 0.75
    assert found["unparseable"] == 0.25


def test_lengths_by_outcome(toy):
    found = health([toy.group([1.0, 0.0, 0.0], ids=[(9, 2), (9, 9, 9, 2), (9, 9, 9, 9, 9, 2)])])
    assert found["length"] == 4.0
    assert found["length_p50"] == 4.0
    assert found["length_right"] == 2.0
    assert found["length_wrong"] == 5.0
    assert found["tokens_per_correct"] == 12.0


def test_without_a_right_answer_nothing_is_said_about_right_ones(toy):
    found = health([toy.group([0.0, 0.0])])
    assert "length_right" not in found
    assert "tokens_per_correct" not in found
    assert "reward_mixed" not in found


def test_channels_share_the_variance(toy):
    parts = [{"correct": 1.0, "form": 0.2}, {"correct": 0.0, "form": 0.2}, {"correct": 0.0, "form": 0.1}]
    found = channels(toy.group([1.2, 0.2, 0.1], parts=parts).rollouts)
    # total: mean .5, deviations .7, -.3, -.4, variance .74 / 3; correct: deviations 2/3, -1/3, -1/3, covariance .7 / 3
    assert found["channel_correct_share"] == pytest.approx(0.7 / 0.74)
    assert found["channel_form_share"] == pytest.approx(0.04 / 0.74)
    assert found["reward_primary"] == pytest.approx(1 / 3)
    assert channels(toy.group([1.0, 0.0]).rollouts) == {}


def test_duplicates_are_siblings_that_say_the_same(toy):
    group = toy.group([1.0, 1.0, 0.0], ids=[(7, 2), (7, 2), (8, 2)])
    assert behaviour([group])["duplicates"] == pytest.approx(1 / 3)
    assert behaviour([toy.group([1.0], ids=[(7, 2)]), toy.group([1.0], ids=[(7, 2)])])["duplicates"] == 0.0  # other groups are no siblings


def test_repetition():
    assert repetition([5] * 40) == pytest.approx(36 / 40)
    assert repetition(list(range(40))) == 0.0
    assert repetition([5] * 31) == 0.0  # too short to loop


def test_turns_and_calls(toy):
    owners = [Owner.SAMPLED, Owner.TOOL, Owner.TOOL, Owner.SAMPLED, Owner.SAMPLED]
    group = toy.group([1.0], ids=[(7, 8, 9, 7, 2)], owners=[owners])
    trajectory = group.rollouts[0].trajectory
    assert turns(trajectory) == 2
    assert "calls" not in behaviour([group])
    told = replace(group, task=replace(group.task, prompt=(Message("system", "write <tool_call>{...}</tool_call>"), *group.task.prompt)))
    assert behaviour([told])["calls"] == 0.0  # the prompt says how, and nobody does
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    said = replace(trajectory, transcript=f"{call} noon {call} <tool_call>oops</tool_call> 12", stop=StopReason.TURNS)
    found = health([replace(group, rollouts=(Rollout(said, group.rollouts[0].score),))])
    assert found["calls"] == 3.0
    assert found["repeated_calls"] == pytest.approx(1 / 3)
    assert found["malformed_calls"] == pytest.approx(1 / 3)
    assert found["turn_capped"] == 1.0
    assert found["length"] == 3.0  # what a tool wrote is not the policy's
