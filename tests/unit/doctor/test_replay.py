"""Alarms over a finished run with their lead over the fall and over the end, against what was raised live."""

from __future__ import annotations

import json

import pytest
from doctor_traces import LOW, entry, evidence, frame, step, wobble

from posttrain.core.errors import ConfigError
from posttrain.doctor.replay import replay, replay_json, replay_lines
from posttrain.doctor.signals import Level

N = 200
CATALOG = {one.id: one for one in (entry("F1", LOW), entry("F2", Level("reward_mean", "<", 0.3, last=5)))}
RUN = frame(N, reward_mean=step(0.6, 0.1, 120), entropy=step(0.5, 0.02, 80, 0.0))


def test_leads_are_counted_from_the_alarm():
    found = replay(evidence(RUN), CATALOG)
    assert [(drop.stage, drop.metric, drop.step) for drop in found.drops] == [("grpo", "reward_mean", 120)]
    first, second = found.raised
    # three rows from 80 on: step 82; five rows whose mean is below 0.3: one of .6 and four of .1 make .2, so step 123
    assert (first.alarm.id, first.alarm.step, first.over_fall, first.over_end) == ("F1", 82, 38, 117)
    assert (second.alarm.id, second.alarm.step, second.over_fall) == ("F2", 123, -3)
    assert (found.lead("F1"), found.lead("F2"), found.lead("F3")) == (38, -3, None)


def test_without_a_fall_there_is_no_lead_over_it():
    found = replay(evidence(frame(N, reward_mean=wobble(0.6), entropy=step(0.5, 0.02, 80, 0.0))), CATALOG)
    assert found.drops == ()
    assert found.raised[0].over_fall is None
    assert found.raised[0].over_end == 117
    assert replay_lines(found)[0] == "grpo: reward_mean never falls for good"


def test_another_metric_can_be_watched():
    found = replay(evidence(frame(N, reward_mean=wobble(0.6), reward_primary=step(0.5, 0.1, 150))), CATALOG, "reward_primary")
    assert [(drop.metric, drop.step) for drop in found.drops] == [("reward_primary", 150)]


def test_a_metric_that_no_stage_has_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="no stage recorded 'rewrd'; recorded are entropy, reward_mean"):
        replay(evidence(RUN), CATALOG, "rewrd")


def test_live_alarms_are_compared():
    live = (
        {"stage": "grpo", "step": 82, "name": "F1", "detail": ""},
        {"stage": "grpo", "step": 90, "name": "sampler_trainer_mismatch", "detail": ""},
    )
    found = replay(evidence(RUN, alarms=live), CATALOG)
    assert [item.live for item in found.raised] == [82, None]
    assert found.only_live == ("grpo step 90: sampler_trainer_mismatch",)
    text = "\n".join(replay_lines(found))
    assert "38 steps before the fall, 117 before the end, raised then as well" in text
    assert "3 steps after the fall, 76 before the end, not raised while it trained" in text
    assert "only while it trained: grpo step 90: sampler_trainer_mismatch" in text


def test_live_at_another_step_is_said():
    found = replay(evidence(RUN, alarms=({"stage": "grpo", "step": 85, "name": "failure F1"},)), CATALOG)
    assert "raised then at step 85" in "\n".join(replay_lines(found))


def test_steps_of_a_sparse_log_are_steps_not_rows():
    sparse = frame(0)
    for row in range(100):
        sparse.append(row * 10, {"reward_mean": 0.6 if row < 60 else 0.1, "entropy": 0.5 if row < 40 else 0.02})
    found = replay(evidence(sparse), CATALOG)
    assert found.drops[0].step == 600
    assert found.raised[0].alarm.step == 420
    assert found.raised[0].over_fall == 180


def test_each_stage_has_its_own_fall():
    other = frame(N, stage="later", reward_mean=wobble(0.6), entropy=0.5)
    found = replay(evidence(RUN, other), CATALOG)
    assert [drop.stage for drop in found.drops] == ["grpo"]
    assert found.watched == {"grpo": "reward_mean", "later": "reward_mean"}


def test_json_and_text_are_safe():
    evil = frame(N, stage="g\x1b[2J", reward_mean=step(0.6, 0.1, 120), entropy=step(0.5, 0.02, 80, 0.0))
    found = replay(evidence(evil, alarms=({"stage": "\x07", "step": "x", "name": None},)), CATALOG)
    assert all(line.isprintable() for line in replay_lines(found))
    assert json.loads(json.dumps(replay_json(found)))["alarms"][0]["lead_over_fall"] == 38
