"""Intervals against arithmetic written out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import EvidenceError
from posttrain.stats.intervals import (
    Interval,
    clopper_pearson,
    cluster_t,
    half_width,
    item_clustered_se,
    same_method,
    student_t,
    wilson,
)


def test_wilson_at_half_of_thirty():
    # z = 1.95996, z^2 = 3.84146; centre .5; half = z sqrt(.25/30 + z^2/3600) / (1 + z^2/30) = 1.95996 * .096923 / 1.128049... = .1684
    interval = wilson(15, 30)
    assert interval.low == pytest.approx(0.3315, abs=1e-4)
    assert interval.high == pytest.approx(0.6685, abs=1e-4)
    assert (interval.level, interval.method) == (0.95, "wilson")


def test_wilson_of_no_success_is_z2_over_n_plus_z2():
    # high = z^2 / (n + z^2) = 3.84146 / 13.84146
    interval = wilson(0, 10)
    assert interval.low == 0.0
    assert interval.high == pytest.approx(3.84146 / 13.84146, abs=1e-5)
    assert wilson(10, 10).high == 1.0
    assert wilson(10, 10).low == pytest.approx(10 / 13.84146, abs=1e-5)


def test_wilson_narrows_with_a_lower_level():
    assert wilson(5, 10, level=0.8).low > wilson(5, 10, level=0.95).low


def test_cluster_t_by_hand():
    # means .25 .5 .75 .5 .5: mean .5, squared deviations .0625 * 2 = .125, sd = sqrt(.125/4) = .176777, se = .0790569, t(4) = 2.776445
    interval = cluster_t([0.25, 0.5, 0.75, 0.5, 0.5])
    assert interval.low == pytest.approx(0.5 - 2.776445 * 0.0790569, abs=1e-6)
    assert interval.high == pytest.approx(0.5 + 2.776445 * 0.0790569, abs=1e-6)
    assert interval.method == "cluster-t"


def test_cluster_t_is_clipped_only_when_bounded():
    # mean .75, sd .5, se .25, t(3) = 3.182446: upper end 1.5456
    assert cluster_t([1, 1, 1, 0]).high == 1.0
    assert cluster_t([1, 1, 1, 0], bounds=None).high == pytest.approx(0.75 + 3.182446 * 0.25, abs=1e-5)


def test_identical_items_do_not_read_as_certainty():
    assert cluster_t([1.0] * 10).low == pytest.approx(wilson(10, 10).low)
    assert cluster_t([0.0] * 10).high == pytest.approx(wilson(0, 10).high)
    assert "all equal" in cluster_t([0.0] * 10).method
    middle = cluster_t([0.5] * 10)  # u = .277532; .5 +- .5 u
    assert (middle.low, middle.high) == (pytest.approx(0.361234, abs=1e-5), pytest.approx(0.638766, abs=1e-5))


def test_items_equal_up_to_rounding_are_centred_on_their_mean():
    assert 5e-10 in cluster_t([1e-09, 0.0], level=0.5)  # around the first value it would start at 8e-10


def test_identical_items_without_bounds_are_refused():
    with pytest.raises(EvidenceError, match="no width"):
        cluster_t([2.0, 2.0], bounds=None)


@pytest.mark.parametrize(
    "make", [lambda: wilson(1, 1), lambda: wilson(0, 0), lambda: cluster_t([0.5]), lambda: item_clustered_se([[1, 0]])]
)
def test_fewer_than_two_items_are_refused(make):
    with pytest.raises(EvidenceError, match="at least 2 items"):
        make()


def test_impossible_inputs_are_refused():
    with pytest.raises(EvidenceError, match="5 successes in 4"):
        wilson(5, 4)
    with pytest.raises(EvidenceError, match="level 95"):
        wilson(1, 4, level=95)
    with pytest.raises(EvidenceError, match="outside the bounds"):
        cluster_t([0.5, 1.5])
    with pytest.raises(EvidenceError, match="finite"):
        cluster_t([0.5, math.nan])
    with pytest.raises(ValueError, match="empty"):
        Interval(1.0, 0.0, 0.95, "none")


def test_clustered_se_counts_items_not_samples():
    # 3 items of 2 samples, means 1, 0, .5: sd .5, se .5/sqrt(3) = .288675; as 6 independent samples it would be .2236
    assert item_clustered_se([[1, 1], [0, 0], [1, 0]]) == pytest.approx(0.288675, abs=1e-6)


def test_clustered_se_with_unequal_items():
    # mean of 1,1,1,0 = .75; residual sums 3*.25 = .75 and -.75; sqrt(2/1 * 1.125) / 4 = 1.5 / 4
    assert item_clustered_se([[1, 1, 1], [0]]) == pytest.approx(0.375)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(0.5, 0.99))
def test_cluster_t_stays_in_the_unit_range_and_holds_the_mean(values, level):
    interval = cluster_t(values, level)
    assert 0.0 <= interval.low < interval.high <= 1.0
    assert interval.low - 1e-12 <= sum(values) / len(values) <= interval.high + 1e-12


@given(st.integers(2, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_is_symmetric(counts):
    successes, n = counts
    interval, mirror = wilson(successes, n), wilson(n - successes, n)
    assert successes / n in interval
    assert interval.low == pytest.approx(1 - mirror.high)


def test_clopper_pearson_by_hand():
    # 0 of 10: high solves (1 - h)^10 = .025; 10 of 10 mirrors it; 1 of 2: low 1 - sqrt(.975), high sqrt(.975)
    none, every, half = clopper_pearson(0, 10), clopper_pearson(10, 10), clopper_pearson(1, 2)
    assert (none.low, every.high) == (0.0, 1.0)
    assert none.high == pytest.approx(1 - 0.025**0.1)
    assert every.low == pytest.approx(0.025**0.1)
    assert (half.low, half.high) == (pytest.approx(1 - math.sqrt(0.975)), pytest.approx(math.sqrt(0.975)))
    assert half.method == "clopper-pearson"
    with pytest.raises(EvidenceError, match="count each trial once"):
        clopper_pearson(1.5, 4)  # pyright: ignore[reportArgumentType]


def test_exact_is_wider_than_wilson():
    assert clopper_pearson(9, 30).low < wilson(9, 30).low
    assert clopper_pearson(9, 30).high > wilson(9, 30).high


def test_planning_widths():
    # 1.95996 * .5 / sqrt(n)
    points = {n: round(100 * half_width(n), 1) for n in (36, 50, 100, 200, 500, 1000)}
    assert points == {36: 16.3, 50: 13.9, 100: 9.8, 200: 6.9, 500: 4.4, 1000: 3.1}
    assert half_width(2401) == pytest.approx(0.02, abs=1e-5)  # +-2 points need 2401 items, not 100
    assert half_width(100, p=0.9) == pytest.approx(1.959964 * 0.03)
    assert half_width(30) == pytest.approx(0.1789, abs=1e-4)
    assert (wilson(15, 30).high - wilson(15, 30).low) / 2 == pytest.approx(0.1684, abs=1e-4)  # narrower than the planning width
    with pytest.raises(EvidenceError, match="0 items"):
        half_width(0)
    with pytest.raises(EvidenceError, match="between 0 and 1"):
        half_width(10, p=1.2)


def test_student_t_by_hand():
    # .50 .52 .57: mean .53, squared deviations 9e-4 + 1e-4 + 16e-4 = 26e-4, sd sqrt(13e-4) = .0360555, se .0208167, t(2) 4.302653
    interval = student_t([0.50, 0.52, 0.57])
    assert interval.low == pytest.approx(0.53 - 4.302653 * 0.0208167, abs=1e-6)
    assert interval.high == pytest.approx(0.53 + 4.302653 * 0.0208167, abs=1e-6)
    assert interval.method == "student-t"
    assert student_t([0.2, 0.9], bounds=(0, 1)).high == 1.0
    with pytest.raises(EvidenceError, match="no width"):
        student_t([3.0, 3.0, 3.0])
    assert student_t([1.0] * 10, bounds=(0, 1)).low == pytest.approx(wilson(10, 10).low)


def test_one_table_has_one_method():
    assert same_method([wilson(1, 4), wilson(3, 9)]) == "wilson 95%"
    assert same_method([cluster_t([0.1, 0.4]), cluster_t([0.0, 0.0])]) == "cluster-t 95%"  # the second says that it differs, and why
    assert same_method([]) == "none"
    with pytest.raises(EvidenceError, match="clopper-pearson 0.95, wilson 0.95"):
        same_method([wilson(1, 4), clopper_pearson(1, 4)])
    with pytest.raises(EvidenceError, match="wilson 0.9, wilson 0.95"):
        same_method([wilson(1, 4), wilson(1, 4, level=0.9)])
