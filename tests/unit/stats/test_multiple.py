"""Holm's adjustment by hand."""

import pytest

from posttrain.core.errors import EvidenceError
from posttrain.stats.multiple import holm


def test_by_hand():
    # ascending .01 .02 .03 .04 times 4 3 2 1: .04 .06 .06 .04, and none below its predecessor
    adjusted = holm({"d": 0.04, "a": 0.01, "c": 0.03, "b": 0.02})
    assert adjusted == {"d": pytest.approx(0.06), "a": pytest.approx(0.04), "c": pytest.approx(0.06), "b": pytest.approx(0.06)}
    assert list(adjusted) == ["d", "a", "c", "b"]


def test_one_of_twenty_tasks_is_no_discovery():
    adjusted = holm({f"task{i}": 0.03 if i == 7 else 0.5 for i in range(20)})
    assert adjusted["task7"] == pytest.approx(0.6)
    assert max(adjusted.values()) == 1.0


def test_a_single_test_is_unchanged_and_none_is_none():
    assert holm({"only": 0.03}) == {"only": 0.03}
    assert holm({}) == {}


def test_impossible_values_are_refused():
    for value in (float("nan"), -0.1, 1.5):
        with pytest.raises(EvidenceError, match="'math' is not between 0 and 1"):
            holm({"math": value})
