"""Promotion: a sound gain passes, and every way to be unsound is refused under its own name."""

import subprocess
import sys
from dataclasses import replace

import pytest
from promotion_records import CUT, GARBLED, RIGHT, WRONG, record, scored

from posttrain.checks.calibration import End, Family
from posttrain.checks.promotion import Candidate, Thresholds, promotion
from posttrain.core.verdicts import GateVerdict

END = End(steps=10, entropy=0.5, kl=0.1, zero_variance=0.3, all_right=0.2, reward_std=0.4, unparseable=0.01)
FAMILY = Family({}, ("a", "b", "c"), 3.0, kl_ceiling=0.3, entropy_floor=0.2)
GOOD = Candidate(scored("after", 360), scored("before", 300), None, END, FAMILY, Thresholds())


def judged(thresholds: Thresholds | None = None, **changed) -> GateVerdict:
    return promotion(replace(GOOD, **changed), thresholds)


def test_a_sound_gain_is_promoted():
    found = judged()
    assert found.passed is True, found.reason
    assert found.figures["delta"] == pytest.approx(0.1)
    assert [check.name for check in found.checks] == [
        "thresholds",
        "base",
        "held_out",
        "items",
        "format",
        "truncation",
        "variance",
        "drift",
        "entropy",
        "collapse",
    ]


def test_without_reinforcement_learning_there_is_no_end_to_judge():
    found = judged(end=None, family=None)
    assert found.passed is True
    assert "drift" not in [check.name for check in found.checks]


@pytest.mark.parametrize(
    ("changed", "failed"),
    [
        ({"base": None}, ["base", "held_out"]),
        ({"base": scored("before", 300, seed=1)}, ["base", "held_out"]),
        ({"base": scored("before", 300, template_digest="other")}, ["base", "held_out"]),
        ({"base": scored("after", 300)}, ["base"]),  # the same weights, measured twice
        ({"base": scored("before", 360)}, ["held_out"]),
        ({"base": scored("before", 361)}, ["held_out"]),
        ({"base": scored("before", 357)}, ["held_out"]),  # +0.005, less than the least effect
        ({"record": record("after", [RIGHT] * 360 + [WRONG] * 209 + [GARBLED] * 31)}, ["format"]),  # 31 of 600 is 5.2%
        ({"record": record("after", [RIGHT] * 360 + [WRONG] * 228 + [CUT] * 12)}, ["truncation"]),  # 12 of 600 is 2%
        ({"end": replace(END, zero_variance=0.95)}, ["variance"]),
        ({"end": replace(END, reward_std=0.0001)}, ["variance"]),
        ({"end": replace(END, kl=0.31)}, ["drift"]),
        ({"end": replace(END, entropy=0.05, zero_variance=0.95), "base": scored("before", 360)}, ["held_out", "variance", "collapse"]),
    ],
)
def test_each_gate_refuses_by_name(changed, failed):
    found = judged(**changed)
    assert [check.name for check in found.failures] == failed
    assert all(check.remedy for check in found.failures)


def test_the_differing_condition_is_named():
    assert "seed is 1 against 0" in judged(base=scored("before", 300, seed=1)).of("base").detail


def test_the_bounds_themselves_pass():
    # 30 of 600 unreadable is 5%; 11 of 600 cut is 1.8%
    assert judged(record=record("after", [RIGHT] * 360 + [WRONG] * 210 + [GARBLED] * 30)).of("format").passed is True
    assert judged(record=record("after", [RIGHT] * 360 + [WRONG] * 229 + [CUT] * 11)).of("truncation").passed is True
    assert judged(end=replace(END, kl=0.3)).of("drift").passed is True


def test_too_few_items_ask_for_another_evaluation():
    found = judged(record=scored("after", 300, 499), base=scored("before", 200, 499))
    assert found.passed is None
    assert [check.name for check in found.open] == ["items"]
    assert "at least 500" in found.of("items").remedy
    assert judged(record=scored("after", 300, 500), base=scored("before", 200, 500)).passed is True


def test_a_gain_within_the_spread_of_seeds_is_refused():
    # one seed each at sigma 0.05: 2.8016 * 0.05 * sqrt(2) = 0.198; with 16 seeds 0.0495
    kept = Thresholds(seed_sigma=0.05)
    one = judged(registered=kept)
    assert one.of("held_out").passed is False
    assert one.of("held_out").bound == pytest.approx(0.1981, abs=1e-3)
    many = Thresholds(seed_sigma=0.05, seeds=16)
    assert judged(registered=many).of("held_out").passed is True
    assert judged(registered=many).of("held_out").bound == pytest.approx(0.0495, abs=1e-4)


def test_a_family_that_was_not_calibrated_is_unknown_and_not_a_pass():
    found = judged(family=None)
    assert found.passed is None
    assert found.of("drift").passed is None
    assert "calibrate" in found.of("drift").remedy
    assert judged(family=replace(FAMILY, kl_ceiling=None)).of("drift").passed is None
    assert judged(end=replace(END, kl=None)).of("drift").passed is None


def test_saturation_is_no_dead_variance():
    # 95% unanimous, 90% of all groups all right: there was nothing left to disagree about
    assert judged(end=replace(END, zero_variance=0.95, all_right=0.9, reward_std=1e-5)).of("variance").passed is True
    assert judged(end=replace(END, zero_variance=0.95, all_right=0.4)).of("variance").passed is False


LOW = replace(END, entropy=0.05)


def off_target(after: int, n: int = 600) -> tuple:
    return scored("before", 300, n, "chat"), scored("after", after, n, "chat")


@pytest.mark.parametrize(
    ("retention", "passed"),
    [
        (None, None),  # nothing was measured off target
        (off_target(300), True),
        (off_target(320), True),
        (off_target(200), False),
        ((scored("before", 10, 20, "chat"), scored("after", 9, 20, "chat")), None),  # 20 items exclude no loss
        ((scored("before", 300, 600, "chat", seed=3), scored("after", 300, 600, "chat")), None),  # not comparable
    ],
)
def test_low_entropy_is_no_failure_and_asks_for_an_evaluation_off_target(retention, passed):
    found = judged(end=LOW, retention=retention)
    assert found.of("entropy").passed is passed
    assert found.of("collapse").passed is True
    assert found.passed is passed


def test_entropy_above_its_floor_needs_nothing():
    assert judged(retention=off_target(0)).of("entropy").passed is True
    assert judged(end=replace(END, entropy=0.2)).of("entropy").passed is True  # the floor of the family
    assert judged(end=replace(END, entropy=0.15), family=None).of("entropy").passed is True  # the default floor is 0.1
    assert judged(end=replace(END, entropy=None)).of("entropy").passed is None


@pytest.mark.parametrize(
    ("entropy", "zero_variance", "before", "passed"),
    [(0.05, 0.95, 360, False), (0.5, 0.95, 360, True), (0.05, 0.3, 360, True), (0.05, 0.95, 300, True)],
)
def test_a_collapse_is_three_signs_together(entropy, zero_variance, before, passed):
    found = judged(end=replace(END, entropy=entropy, zero_variance=zero_variance), base=scored("before", before))
    assert found.of("collapse").passed is passed


def test_form_that_only_the_evaluation_misses_is_another_template():
    sick = record("after", [RIGHT] * 360 + [GARBLED] * 240)
    assert judged(record=sick).of("format").catalog == ("F12", "S111", "P33")
    assert judged(record=sick, end=replace(END, unparseable=0.4)).of("format").catalog == ("S111", "P33")


@pytest.mark.parametrize(
    ("kept", "used", "passed"),
    [
        (Thresholds(), Thresholds(), True),
        (Thresholds(), Thresholds(min_effect=0.02, items=550), True),
        (Thresholds(), Thresholds(min_effect=0.0), False),
        (Thresholds(), Thresholds(items=100), False),
        (Thresholds(), Thresholds(format_errors=0.5), False),
        (Thresholds(seed_sigma=0.01), Thresholds(), False),
        (Thresholds(), Thresholds(seed_sigma=0.001), True),
        (Thresholds(), Thresholds(last=3), False),
        (None, Thresholds(), None),
    ],
)
def test_thresholds_may_not_be_loosened_after_the_run(kept, used, passed):
    assert judged(used, registered=kept).of("thresholds").passed is passed


def test_it_judges_without_torch():
    code = "import sys, posttrain.checks.candidate, posttrain.checks.probe_gate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
