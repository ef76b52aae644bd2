"""How a recipe is watched: bounds from a calibration, pulses on items of their own, advice before the start."""

from __future__ import annotations

import pytest

from posttrain.checks.calibration import Family
from posttrain.core.errors import PosttrainError
from posttrain.core.sampling import Sampling
from posttrain.envs.arithmetic import Arithmetic
from posttrain.loops.guard import Guard
from posttrain.recipes.guarding import LEAST, advice_of, bounds_of, leave_postmortem, pulse_of, spare, watch_of
from posttrain.recipes.ladder import Ladder
from posttrain.recipes.presets import PRESETS
from posttrain.runs.run import Run


def test_bounds_come_from_the_family_and_only_those_it_knows(tmp_path):
    assert bounds_of(None) == {}
    Family({"stage": "grpo"}, ("a", "b", "c"), 3.0, kl_ceiling=0.25, entropy_floor=None).save(tmp_path / "family.json")
    assert bounds_of(str(tmp_path / "family.json")) == {"kl_ceiling": 0.25}
    (tmp_path / "other.json").write_text('{"bounds": 3}')
    with pytest.raises(PosttrainError, match="no calibration"):
        bounds_of(str(tmp_path / "other.json"))


def test_pulse_items_are_none_that_the_run_reports_or_trains_on():
    source, guard = Arithmetic(), Guard(pulse_items=20)
    measured = {task.id for task in source.tasks("held_out", 50, 0)}
    found = spare(source, 50, guard)
    assert len(found) == 20
    assert measured.isdisjoint(task.id for task in found)
    assert {task.id for task in source.tasks("train", 500, 0)}.isdisjoint(task.id for task in found)


def test_a_source_without_spare_items_has_no_pulse():
    small = Arithmetic(high=9)
    assert spare(small, 1000, Guard()) == []
    assert pulse_of(Guard(), small.tasks("held_out", LEAST - 1, 0), small.grader, Sampling()) is None
    assert pulse_of(Guard(pulse_every=0), small.tasks("held_out", LEAST - 1, 0) * 2, small.grader, Sampling()) is None


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_is_advised_against(name):
    assert advice_of(PRESETS[name], Guard()) == []


def test_a_preset_that_breaks_a_rule_is_told_before_it_starts():
    rash = Ladder().override(["grpo.optim.lr=1e-3", "grpo.optim.warmup=0"])
    (line,) = advice_of(rash, rash.guard)
    assert "C3" in line
    assert "optim.warmup=0.1" in line
    assert advice_of(rash, Guard(alarms="off")) == []


def test_a_run_is_watched_unless_told_otherwise():
    assert watch_of(Ladder(), Guard()) is not None
    assert watch_of(Ladder(), Guard(alarms="off")) is None


@pytest.mark.parametrize(("action", "left"), [("stop", True), ("pause", False)])
def test_a_stopped_run_leaves_a_postmortem(tmp_path, action, left):
    run = Run.create(tmp_path / "run", config=Ladder(), command=["posttrain"], seeds={"seed": 0}, stages=["grpo"])
    for step in range(15):
        run.metric("grpo", step, {"reward_mean": 0.5, "reward_std": 0.5, "entropy": 0.3, "ratio_max": 1.0})
    run.alarm("grpo", 14, "F5", "ratio explosion", {"action": action})
    run.close()
    found = leave_postmortem(run.path)
    assert (found is not None and found.is_file()) is left
    assert leave_postmortem(run.path) is None  # what is there stays
