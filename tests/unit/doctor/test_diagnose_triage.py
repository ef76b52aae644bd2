"""What a stage is as a whole: the flat curves that look alike are told apart, and nothing is guessed."""

from __future__ import annotations

import pytest
from doctor_traces import every, frame, groups, ramp, step, wobble

from posttrain.doctor.changes import Trend
from posttrain.doctor.entries import Verdict
from posttrain.doctor.triage import read_stage

N = 120
ALIVE = wobble(0.5, 0.01)
FLAT = wobble(0.3)
HELD_UP = {"heldout_mean": every(20, ramp(0.3, 0.6, N, 0.0)), "heldout_n": every(20, wobble(500, 0.0))}
HELD_DOWN = {"heldout_mean": every(20, ramp(0.6, 0.3, N, 0.0)), "heldout_n": every(20, wobble(500, 0.0))}
VARYING = groups(mixed=0.7, zero_variance=0.3, all_right=0.1, all_wrong=0.2)


def verdict(rows: int = N, **columns) -> Verdict | None:
    return read_stage(frame(rows, **columns)).verdict


def test_a_rising_reward_is_healthy():
    assert verdict(reward_mean=ramp(0.2, 0.7, N), entropy=ALIVE, **VARYING, **HELD_UP) is Verdict.HEALTHY


def test_a_rising_reward_without_held_out_scores_says_what_is_missing():
    found = read_stage(frame(N, reward_mean=ramp(0.2, 0.7, N)))
    assert found.verdict is Verdict.HEALTHY
    assert found.unknown == ("heldout_mean",)


def test_flat_reward_and_rising_held_out_score_is_lag():
    found = read_stage(frame(N, reward_mean=FLAT, entropy=ALIVE, **VARYING, **HELD_UP))
    assert found.verdict is Verdict.HEALTHY
    assert "lags" in " ".join(found.why)


def test_falling_reward_and_rising_held_out_score_disagree():
    found = read_stage(frame(N, reward_mean=step(0.6, 0.2, 60), entropy=ALIVE, **VARYING, **HELD_UP))
    assert found.verdict is None
    assert "they disagree" in found.why[1]


def test_rising_reward_and_falling_held_out_score_is_hacked():
    assert verdict(reward_mean=ramp(0.3, 0.95, N), entropy=ALIVE, **VARYING, **HELD_DOWN) is Verdict.HACKED


def test_flat_and_unanimous_is_collapse():
    split = groups(zero_variance=0.96, mixed=0.04, all_right=0.3, all_wrong=0.66)
    assert verdict(reward_mean=FLAT, entropy=ALIVE, **split) is Verdict.COLLAPSED


def test_flat_and_varying_is_breakout_loading():
    assert verdict(reward_mean=FLAT, entropy=ALIVE, **VARYING) is Verdict.BREAKOUT_LOADING


def test_flat_and_varying_with_dead_entropy_is_not_told():
    assert verdict(reward_mean=FLAT, entropy=ramp(0.5, 0.02, N, 0.0), **VARYING) is None


def test_near_the_ceiling_with_groups_all_right_is_saturated():
    split = groups(zero_variance=0.85, mixed=0.15, all_right=0.85)
    assert verdict(reward_mean=wobble(0.97, 0.01), entropy=ALIVE, **split) is Verdict.SATURATED


def test_unanimous_away_from_the_ceiling_is_no_saturation():
    split = groups(zero_variance=0.96, mixed=0.04, all_right=0.6, all_wrong=0.36)
    assert verdict(reward_mean=wobble(0.62, 0.01), entropy=ALIVE, **split) is Verdict.COLLAPSED


def test_all_wrong_from_the_start_is_dead():
    split = groups(zero_variance=1.0, all_wrong=1.0)
    assert verdict(reward_mean=0.0, entropy=ALIVE, **split) is Verdict.DEAD


def test_dead_but_cut_says_to_look_at_the_budget_first():
    split = groups(zero_variance=1.0, all_wrong=1.0)
    found = read_stage(frame(N, reward_mean=0.0, truncated=0.99, **split))
    assert found.verdict is Verdict.DEAD
    assert any("truncated 99%" in line and "look there first" in line for line in found.why)


def test_sparse_but_learning_is_not_dead():
    """Most steps score nothing; the mixed groups alone tell that it learns."""
    split = groups(zero_variance=0.9, mixed=0.1, all_wrong=0.9)
    found = verdict(reward_mean=wobble(0.02, 0.01), entropy=ALIVE, reward_mixed=ramp(0.2, 0.5, N), **split)
    assert found is Verdict.BREAKOUT_LOADING


def test_nearly_unanimous_but_learning_is_no_collapse():
    split = groups(zero_variance=0.96, mixed=0.04, all_wrong=0.9)
    course = {"reward_mean": wobble(0.02, 0.01), "entropy": ALIVE}
    assert verdict(**course, reward_mixed=ramp(0.2, 0.5, N), **split) is Verdict.BREAKOUT_LOADING
    assert verdict(**course, reward_mixed=wobble(0.3), **split) is Verdict.COLLAPSED


def test_sparse_and_rising_is_breakout_loading():
    split = groups(zero_variance=0.9, mixed=0.1, all_wrong=0.9)
    assert verdict(reward_mean=ramp(0.01, 0.06, N, 0.001), entropy=ALIVE, **split) is Verdict.BREAKOUT_LOADING


def test_sparse_and_still_is_not_told():
    split = groups(zero_variance=0.9, mixed=0.1, all_wrong=0.9)
    assert verdict(reward_mean=wobble(0.02, 0.01), entropy=ALIVE, **split) is None


def test_a_reward_lost_with_the_entropy_is_collapse():
    split = groups(zero_variance=step(0.2, 0.7, 60), mixed=step(0.8, 0.3, 60), all_wrong=step(0.1, 0.6, 60))
    assert verdict(reward_mean=step(0.6, 0.4, 60), entropy=step(0.5, 0.02, 55, 0.0), **split) is Verdict.COLLAPSED


@pytest.mark.parametrize(("after", "expected"), [(0.45, Verdict.DRIFTING), (0.1, Verdict.COLLAPSED)])
def test_a_lasting_fall_is_drift_or_collapse_by_its_depth(after, expected):
    found = read_stage(frame(N, reward_mean=step(0.6, after, 60), entropy=ALIVE, **VARYING))
    assert found.verdict is expected
    assert "at step 60" in found.why[0]


def test_a_dip_that_is_recovered_from_is_no_fall():
    course = lambda row: (0.6 if not 50 <= row < 70 else 0.2) + 0.01 * (row % 3 - 1)  # noqa: E731
    assert verdict(reward_mean=course, entropy=ALIVE, **VARYING) is Verdict.BREAKOUT_LOADING


def test_nine_rows_have_no_verdict_and_ten_may():
    split = groups(zero_variance=1.0, all_wrong=1.0)
    assert read_stage(frame(9, reward_mean=0.0, **split)).why == ("9 rows; fewer than 10 have no verdict",)
    assert verdict(10, reward_mean=0.0, **split) is Verdict.DEAD


def test_a_flat_reward_alone_names_what_would_tell():
    found = read_stage(frame(N, reward_mean=FLAT))
    assert found.verdict is None
    assert set(found.unknown) == {"zero_variance", "entropy", "heldout_mean"}


def test_evaluations_around_the_stage_stand_in_for_held_out_scores():
    one = frame(N, reward_mean=ramp(0.3, 0.95, N), entropy=ALIVE, **VARYING)
    assert read_stage(one, Trend("falls", 0.6, 0.3, 2)).verdict is Verdict.HACKED
    assert read_stage(one, Trend("rises", 0.3, 0.6, 2)).verdict is Verdict.HEALTHY


@pytest.mark.parametrize(
    ("kind", "metric", "course", "expected"),
    [
        ("sft", "loss", ramp(2.0, 0.5, N), Verdict.HEALTHY),
        ("sft", "loss", ramp(0.5, 2.0, N), Verdict.DRIFTING),
        ("sft", "loss", wobble(1.0), None),
        ("distill", "reverse_kl", ramp(1.0, 0.2, N), Verdict.HEALTHY),
        ("preference", "loss", ramp(0.7, 0.4, N), Verdict.HEALTHY),
    ],
)
def test_stages_that_descend_a_loss(kind, metric, course, expected):
    assert read_stage(frame(N, kind, **{metric: course})).verdict is expected


def test_rewards_below_zero_are_no_special_case():
    """From -0.96 to -0.25, the course of a run that was nearly given up."""
    assert verdict(reward_mean=ramp(-0.96, -0.25, N), entropy=ALIVE, **VARYING) is Verdict.HEALTHY
