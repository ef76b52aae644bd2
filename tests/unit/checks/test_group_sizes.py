"""How many siblings: shares of mixed groups by hand, and what is extrapolated."""

import math

import pytest

from posttrain.checks.group_sizes import SizeRow, recommended, size_table


def test_a_subset_of_what_was_drawn_is_counted_exactly():
    # 4 answers, 1 right: of the 6 pairs 3 hold the right one; of the 4 triples 3 do
    rows = {row.siblings: row for row in size_table([(4, 1), (4, 1)], sizes=(2, 3, 4))}
    assert rows[2].mixed == pytest.approx(3 / 6)
    assert rows[3].mixed == pytest.approx(3 / 4)
    assert rows[4].mixed == pytest.approx(1.0)
    assert rows[2].cost == pytest.approx(2 / 0.5)
    assert all(row.measured for row in rows.values())


def test_prompts_of_unequal_difficulty_are_averaged_prompt_by_prompt():
    # one prompt always solved, one never: no group disagrees, though the mean success is one half
    rows = size_table([(4, 4), (4, 0)], sizes=(2, 4, 8, 16))
    assert [row.mixed for row in rows] == [0.0, 0.0, 0.0, 0.0]
    assert [row.cost for row in rows] == [None] * 4
    assert [row.measured for row in rows] == [True, True, False, False]


def test_beyond_what_was_drawn_equal_prompts_follow_the_formula():
    # 20 prompts, each 2 of 4 right: spread between prompts is below that of coin tosses, so all are taken as p = 1/2
    (row,) = size_table([(4, 2)] * 20, sizes=(8,))
    assert not row.measured
    assert row.mixed == pytest.approx(1 - 2 * 0.5**8)


def test_beyond_what_was_drawn_spread_lowers_the_share():
    # half the prompts 3 of 4 right, half 1 of 4: mean 1/2, variance of shares 1/16 * 8/7 = 1/14 over 8 prompts
    # noise 1/4; rho = (4/14 - 1/4) / (3/4) = (1/28) / (3/4) = 1/21; a + b = 20, a = b = 10
    # all right in 8: B(18, 10) / B(10, 10) = (17! 19!) / (27! 9!)
    (row,) = size_table([(4, 3), (4, 1)] * 4, sizes=(8,))
    all_right = math.factorial(17) * math.factorial(19) / (math.factorial(27) * math.factorial(9))
    assert row.mixed == pytest.approx(1 - 2 * all_right, rel=1e-9)
    assert row.mixed < 1 - 2 * 0.5**8


def test_never_right_gives_no_mixed_group_of_any_size():
    assert [row.mixed for row in size_table([(8, 0)] * 4, sizes=(4, 64))] == [0.0, 0.0]
    assert size_table([(0, 0)]) == []


def test_the_smallest_size_with_half_of_the_groups_mixed_is_recommended():
    rows = [SizeRow(2, 0.9, 2.2, True), SizeRow(4, 0.49, 8.2, True), SizeRow(8, 0.5, 16.0, True), SizeRow(16, 0.8, 20.0, False)]
    assert recommended(rows) == 8
    assert recommended(rows[:2]) is None  # a pair is no baseline, however mixed
