"""Columns that follow from others: the arithmetic, and that nothing recorded is overwritten."""

from __future__ import annotations

import pytest

from posttrain.doctor.derived import derived


def test_groups_split_by_why_they_agree():
    found = derived({"zero_variance": 0.75, "all_right": 0.25, "all_wrong": 0.125, "unanimous_unparseable": 0.125})
    assert found == {"mixed": 0.25, "unanimous_partial": 0.25}  # 1 - 0.75;  0.75 - 0.25 - 0.125 - 0.125


def test_mixed_alone_gives_zero_variance():
    assert derived({"mixed": 0.25}) == {"zero_variance": 0.75}


def test_fates_add_up():
    fates = {"fate_clipped": 0.1, "fate_out_of_band": 0.2, "fate_mismatched": 0.05, "fate_rejected": 0.15, "fate_gated": 0.0}
    found = derived(fates)
    assert found["left_out"] == pytest.approx(0.5)
    assert found["starved"] == pytest.approx(0.2)


def test_masked_rollouts_are_a_share_of_those_kept_and_silence_is_no_masking():
    counts = {"left_overlong": 6, "left_pivot": 2, "left_unscored": 0, "left_too_few": 0, "left_no_signal": 100, "rollouts_generated": 64}
    assert derived(counts) == {"dropped": 0.125}  # (6 + 2) / 64
    assert derived({**counts, "rollouts_kept": 32}) == {"dropped": 0.25}  # groups without signal are never trained


def test_tokens_per_correct_needs_rewards_of_0_and_1():
    # 3 of 4 right: variance 0.75 * 0.25 = 0.1875. 30 tokens on average, so 30 / 0.75 = 40 for each right answer.
    assert derived({"reward_mean": 0.75, "reward_std": 0.1875**0.5, "length": 30.0}) == {"tokens_per_correct": 40.0}
    assert derived({"reward_mean": 0.75, "reward_std": 0.2, "length": 30.0}) == {}
    assert derived({"reward_mean": 0.0, "reward_std": 0.0, "length": 30.0}) == {}


def test_what_was_recorded_stays():
    recorded = {"zero_variance": 0.5, "mixed": 0.4, "unparseable": 0.5, "parsed": 0.9, "fate_clipped": 0.5, "left_out": 0.1}
    assert derived(recorded) == {}


def test_shares_stay_in_0_to_1_and_everything_is_finite():
    assert derived({"unparseable": 0.75, "truncated": 0.5}) == {"parsed": 0.0}
    assert derived({"left_overlong": 1e308, "rollouts_kept": 1e-300}) == {}
