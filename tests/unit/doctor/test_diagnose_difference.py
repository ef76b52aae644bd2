"""What two runs do differently: where each metric parts, whose suspect it is, and what was set apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_traces import LOW, entry, every, evidence, frame, step, wobble

from posttrain.core.errors import EvidenceError
from posttrain.doctor.difference import compare_runs, difference_json, difference_lines

N = 200
CATALOG = {"F1": entry("F1", LOW)}
WELL = frame(N, reward_mean=wobble(0.6), entropy=wobble(0.5), kl=wobble(0.01, 0.001))
SICK = frame(N, reward_mean=step(0.6, 0.2, 140, 0.02), entropy=step(0.5, 0.02, 100, 0.02), kl=wobble(0.01, 0.001))


def test_metrics_part_where_they_do_and_leading_ones_come_first():
    found = compare_runs(evidence(WELL), evidence(SICK), CATALOG)
    assert [(part.metric, part.tier.value, part.step) for part in found.parts] == [
        ("entropy", "leading", 100),
        ("reward_mean", "lagging", 140),
    ]
    assert found.parts[0].a == pytest.approx(0.5, abs=0.01)
    assert found.parts[0].b == pytest.approx(0.02, abs=0.01)
    assert found.compared == 3
    assert found.equal_until == {"grpo": 99}  # step(before=0.5) has the same saw as wobble(0.5)


def test_leading_metrics_go_before_lagging_ones_that_part_earlier():
    late = frame(N, reward_mean=step(0.6, 0.2, 60, 0.02), entropy=step(0.5, 0.02, 100, 0.02))
    found = compare_runs(evidence(WELL), evidence(late), CATALOG)
    assert [part.metric for part in found.parts] == ["entropy", "reward_mean"]
    assert found.conclusion.startswith("reward_mean (lagging) parts first, at grpo step 60")


def test_the_conclusion_names_the_first_and_how_long_before_the_reward():
    found = compare_runs(
        evidence(
            WELL,
        ),
        evidence(SICK),
        CATALOG,
    )
    assert found.conclusion.startswith("entropy (leading) parts first, at grpo step 100: 0.5 against 0.02")
    assert "reward_mean follows 40 steps later" in found.conclusion
    assert found.conclusion.endswith("nothing was set apart")


def test_suspects_of_one_run_only():
    found = compare_runs(evidence(WELL), evidence(SICK), CATALOG)
    assert found.only_a == ()
    assert found.only_b == ("F1 failure F1 in grpo from step 102 (confidence 100%)",)
    assert found.verdicts[1] == "collapsed"


def test_equal_runs_do_the_same():
    found = compare_runs(evidence(WELL), evidence(WELL), CATALOG)
    assert found.parts == ()
    assert found.equal_until == {"grpo": N - 1}
    assert found.conclusion == "the runs do the same; nothing was set apart"


def test_settings_that_differ_are_listed():
    first = evidence(WELL, config={"optim": {"lr": 0.1}, "seed": 0})
    second = evidence(SICK, config={"optim": {"lr": 0.2}, "seed": 0})
    found = compare_runs(first, second, CATALOG)
    assert found.static == ("optim.lr: 0.1 -> 0.2",)
    assert found.conclusion.endswith("; set apart: optim.lr: 0.1 -> 0.2")


def test_sparse_metrics_are_compared_where_both_know_them():
    first = frame(N, heldout_mean=every(10, wobble(0.5)))
    second = frame(N, heldout_mean=every(10, step(0.5, 0.1, 100)))
    found = compare_runs(evidence(first), evidence(second), {})
    assert [(part.metric, part.step) for part in found.parts] == [("heldout_mean", 100)]


def test_times_are_no_difference():
    first, second = frame(N, **{"seconds.step": 1.0}), frame(N, **{"seconds.step": 9.0})
    found = compare_runs(evidence(first), evidence(second), {})
    assert found.parts == ()
    assert found.equal_until == {"grpo": N - 1}


def test_two_logs_of_one_stage_are_compared_whatever_it_is_called():
    other = frame(N, stage="train", reward_mean=step(0.6, 0.2, 140, 0.02))
    assert compare_runs(evidence(WELL), evidence(other), {}).parts[0].metric == "reward_mean"


def test_runs_without_a_common_stage_are_refused():
    two = evidence(frame(N, stage="x", loss=1.0), frame(N, stage="y", loss=1.0))
    with pytest.raises(EvidenceError, match=r"no stage in common \(grpo against x, y\)"):
        compare_runs(evidence(WELL), two, {})


def test_text_and_json_are_safe():
    evil = replace(evidence(SICK, config={"a\x1b[2J": "\x07"}), path=Path("b"))
    found = compare_runs(evidence(WELL), evil, CATALOG)
    lines = difference_lines(found)
    assert lines[0] == found.conclusion[:400]
    assert all(line.isprintable() for line in lines)
    assert json.loads(json.dumps(difference_json(found)))["parts"][0]["metric"] == "entropy"
