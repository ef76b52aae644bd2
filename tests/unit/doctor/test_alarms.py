"""Alarms: once per illness, with their evidence; live and replayed alike; a loop acts on them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from posttrain.core.errors import Halted
from posttrain.doctor.alarms import QUIET, WINDOW, Alarm, Monitor, Watch, replayed
from posttrain.doctor.combined import Event
from posttrain.doctor.entries import Action, Entry, Layer, Status, Verdict, checked
from posttrain.doctor.frame import Frame, frame_of
from posttrain.doctor.signals import Level
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.loops.session import Stage

LOW = Entry(
    "X1",
    "low",
    Status.MEASURED,
    Layer.ALGORITHM,
    Verdict.COLLAPSED,
    "s",
    "o",
    "c",
    "raise it",
    "look",
    "here",
    signs=(Level("x", "<", 0.5),),
)
HIGH = replace(LOW, id="X2", name="high", signs=(Level("x", ">", 2.0),), action=Action.STOP)


def frame(values: list[float]) -> Frame:
    return frame_of("rl", "rl", [(10 * i, {"x": x, "reward_mean": 0.0}) for i, x in enumerate(values)])


def test_an_alarm_is_raised_once_and_again_after_quiet():
    sick_twice = [1.0, 0.1, 0.1, 0.1] + [1.0] * QUIET + [0.1]
    assert [alarm.step for alarm in replayed(frame(sick_twice), [LOW])] == [10, 10 * (4 + QUIET)]
    too_soon = [1.0, 0.1] + [1.0] * (QUIET - 1) + [0.1]  # one row less of quiet
    assert [alarm.step for alarm in replayed(frame(too_soon), [LOW])] == [10]


def test_an_alarm_says_what_was_seen_and_keeps_its_window():
    values = [1.0] * 30 + [0.25]
    (alarm,) = replayed(frame(values), [LOW])
    assert (alarm.stage, alarm.step, alarm.id, alarm.action) == ("rl", 300, "X1", Action.WARN)
    assert "x 0.25, bound < 0.5" in alarm.detail
    assert "raise it" in alarm.detail
    assert alarm.evidence["x"] == [[10 * i, values[i]] for i in range(31 - WINDOW, 31)]


def test_live_and_replayed_alarms_are_the_same():
    values = (1.25 + 1.25 * np.sin(np.arange(300) / 12)).tolist()  # below 0.5 and above 2 for a while, four times
    monitor, live = Monitor(Frame("rl", "rl"), [LOW, HIGH]), []
    for row, x in enumerate(values):
        live += monitor.see(10 * row, {"x": x, "reward_mean": 0.0})
    assert live == replayed(frame(values), [LOW, HIGH])
    assert [alarm.id for alarm in live] == ["X2", "X1"] * 4


def test_what_is_no_finite_number_is_not_known():
    monitor = Monitor(Frame("rl", "rl"), [LOW])
    for x in (math.nan, None, "0.1", True, -math.inf, -(10**400)):
        assert monitor.see(0, {"x": x}) == []


def test_a_resumed_watch_remembers_warnings_and_repeats_stops():
    lines = [(0, {"x": 0.1, "reward_mean": 0.0}), (1, {"x": 3.0, "reward_mean": 0.0})]
    watch = Watch([LOW, HIGH], lambda stage: {})
    watch.begin("rl", lines)
    assert watch.see("rl", 2, {"x": 0.1, "reward_mean": 0.0}) == []
    assert [alarm.id for alarm in watch.see("rl", 3, {"x": 3.0, "reward_mean": 0.0})] == ["X2"]


def test_a_watch_that_may_not_act_only_warns():
    watch = Watch([HIGH], lambda stage: {}, act=False)
    assert [alarm.action for alarm in watch.see("rl", 0, {"x": 3.0, "reward_mean": 0.0})] == [Action.WARN]


def test_entries_of_other_kinds_are_not_watched():
    assert Watch([LOW], lambda stage: {}).see("sft", 0, {"x": 0.1, "loss": 1.0}) == []


def test_a_catalog_refuses_two_of_a_name_and_references_to_none():
    with pytest.raises(ValueError, match="two catalog entries are called X1"):
        checked([LOW, replace(LOW, name="other")])
    with pytest.raises(ValueError, match="X1 refers to X9"):
        checked([replace(LOW, confused={"X9": "by looking"})])


class Raises:
    """A watcher that raises one alarm at one step."""

    def __init__(self, action: Action, at: int):
        self.action, self.at, self.begun = action, at, []

    def begin(self, stage, lines):
        self.begun.append((stage, [step for step, _ in lines]))

    def see(self, stage, step, values):
        return [Alarm(stage, step, "X1", "low", "x is low", {"x": [[step, 0.1]]}, self.action)] if step == self.at else []


def steps_taken(toy, watcher, run) -> list[int]:
    session = replace(toy.session(run, save_every=100), watcher=watcher)
    stage, seen = Stage(session, "rl", LocalTrainer(toy.model(), Optim(), 5, Ranks()), 5), []
    for step in stage.steps():
        seen.append(step)
        stage.record(step, {}, {"x": 0.1}, {}, show=())
    return seen


@pytest.mark.parametrize("action", [Action.NOTE, Action.WARN])
def test_a_loop_goes_on_after_a_note_or_a_warning(toy, action):
    run = toy.recorder()
    assert steps_taken(toy, Raises(action, at=2), run) == [0, 1, 2, 3, 4]
    assert [(line["step"], line["name"]) for line in run.lines["alarms"]] == [(2, "X1")]


@pytest.mark.parametrize(("action", "said"), [(Action.PAUSE, "paused after step 3 of 5"), (Action.STOP, "guard.alarms=warn")])
def test_a_loop_saves_and_ends_when_an_alarm_asks_for_it(toy, action, said):
    run = toy.recorder()
    with pytest.raises(Halted, match=said) as ended:
        steps_taken(toy, Raises(action, at=2), run)
    assert "posttrain doctor" in str(ended.value)
    resumed = Raises(Action.WARN, at=99)
    assert steps_taken(toy, resumed, run) == [3, 4]
    assert resumed.begun == [("rl", [0, 1, 2])]


def test_a_number_that_is_not_finite_is_an_event_while_the_run_trains():
    broken = replace(LOW, id="X3", name="broken", signs=(Event("non_finite"),))
    monitor = Monitor(Frame("rl", "rl"), [broken])
    assert monitor.see(0, {"x": 1.0, "seconds.train": math.nan}) == []  # a clock that fails is no broken number
    assert [alarm.id for alarm in monitor.see(1, {"x": math.inf})] == ["X3"]
    assert monitor.frame.events == {"non_finite": 1}
