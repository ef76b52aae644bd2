"""The probe: how a group is sorted, what is measured around it, and what it means."""

from dataclasses import replace

import pytest
from probe_groups import Sibling, group, groups

from posttrain.checks.probe import Bucket, Scale, bucket_of, probe_of
from posttrain.checks.probe_gate import READINGS, probe_gate, probe_lines, sequential
from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.verdicts import GateVerdict
from posttrain.stats.intervals import cluster_t, wilson

CUT, BAD, LOST = "truncated", "unparseable", "error"
SAMPLING = Sampling(max_tokens=16)


def judged(*kinds: tuple[int, list[Sibling]], sampling: Sampling = SAMPLING, scale: Scale | None = None) -> GateVerdict:
    return probe_gate(probe_of(groups(*kinds), sampling, scale), "toy")


@pytest.mark.parametrize(
    ("siblings", "scale", "bucket"),
    [
        ([1.0, 1.0, 1.0], Scale(), Bucket.ALL_RIGHT),
        ([0.0, 0.0, 0.0], Scale(), Bucket.ALL_WRONG),
        ([1.0, 0.0, 0.0], Scale(), Bucket.MIXED),
        ([0.3, 0.3, 0.3], Scale(), Bucket.UNANIMOUS_PARTIAL),
        ([0.3, 0.1 + 0.2, 0.3], Scale(), Bucket.UNANIMOUS_PARTIAL),  # 0.1 + 0.2 is not 0.3, and not another reward
        ([-1.0, -1.0], Scale(-1.0, 1.0), Bucket.ALL_WRONG),
        ([0.0, 0.0], Scale(-1.0, 1.0), Bucket.UNANIMOUS_PARTIAL),
        ([-0.96, -0.25], Scale(-1.0, 0.0), Bucket.MIXED),
        ([2.9999999999, 3.0], Scale(0.0, 3.0), Bucket.ALL_RIGHT),
        ([BAD, BAD, 1.0], Scale(), Bucket.UNPARSEABLE),  # two of three: mixed by its numbers, and it is not about the task
        ([BAD, 1.0, 1.0], Scale(), Bucket.MIXED_BY_FORM),
        ([CUT, 1.0, 1.0], Scale(), Bucket.MIXED_BY_FORM),
        ([BAD, 1.0, 0.0], Scale(), Bucket.MIXED),
        ([BAD, BAD, BAD], Scale(), Bucket.UNPARSEABLE),
        ([BAD, 0.0, 0.0], Scale(), Bucket.ALL_WRONG),
        ([CUT, CUT, CUT], Scale(), Bucket.TRUNCATED),
        ([LOST, LOST, 1.0], Scale(), Bucket.UNSCORED),
        ([LOST, 1.0, 0.0], Scale(), Bucket.MIXED),
    ],
)
def test_groups_are_sorted_by_the_range_of_the_reward_and_by_what_was_read(siblings, scale, bucket):
    assert bucket_of(group(siblings), scale) is bucket


def test_figures_by_hand():
    found = probe_of([group([1.0, 0.0]), group([0.0, 0.0], 1), group([1.0, 1.0], 2), group([BAD, LOST], 3)], SAMPLING)
    assert found.outcomes == ((2, 1), (2, 0), (2, 2), (1, 0))
    assert found.success == pytest.approx((0.5 + 0 + 1 + 0) / 4)
    assert found.success_interval() == cluster_t([0.5, 0.0, 1.0, 0.0])
    assert found.statuses == {"scored": 6 / 8, "unparseable": 1 / 8, "truncated": 0.0, "error": 1 / 8}
    assert found.teaching == 1
    assert found.mixed_interval() == wilson(1, 4)
    assert found.reward == pytest.approx((0.5 + 0 + 1 + 0) / 4)
    assert sum(found.buckets.values()) == 4


def test_a_probe_needs_two_prompts_and_a_range():
    with pytest.raises(ConfigError, match="at least 2"):
        probe_of([group([1.0, 0.0])], SAMPLING)
    with pytest.raises(ConfigError, match="range 1 to 1 is empty"):
        Scale(1.0, 1.0)


def test_an_answer_that_was_not_understood_is_found_unless_the_prompt_says_it():
    texts = ["the answer is 42.", "it is 421", "x 4.2", "42"]
    asked = group([BAD] * 4, texts=texts, answer="42")
    assert probe_of([asked, group([1.0] * 4, 1)], SAMPLING).unread == 2 / 8  # the first and the last of four
    told = replace(asked, task=replace(asked.task, prompt=(replace(asked.task.prompt[0], content="is it 42?"),)))
    assert probe_of([told, group([1.0] * 4, 1)], SAMPLING).unread == 0.0


def test_a_good_dataset_is_learnable():
    found = judged((10, [1.0, 0.0, 0.0, 1.0]), (3, [0.0] * 4), (3, [1.0] * 4))
    assert found.passed is True
    assert found.figures["reading"] == "learnable"
    assert found.figures["buckets"]["mixed"] == 10
    assert found.figures["recommended_siblings"] == 4


@pytest.mark.parametrize(
    ("kinds", "reading", "failed", "open_checks"),
    [
        ([(64, [0.0] * 8)], "too hard", ["signal"], ["difficulty"]),
        ([(64, [1.0] * 8)], "too easy", ["signal"], ["difficulty"]),
        ([(58, [0.0] * 8), (6, [1.0] + [0.0] * 7)], "too hard", [], ["difficulty"]),
        ([(58, [1.0] * 8), (6, [1.0] + [0.0] * 7)], "too easy", [], ["difficulty"]),
        ([(64, [BAD] * 8)], "form not taught", ["parser", "signal"], []),
        ([(60, [CUT] * 8), (4, [1.0, 0.0] * 4)], "truncated", ["truncation"], []),
        ([(32, [CUT] + [1.0, 0.0] * 3), (32, [1.0, 0.0] * 4)], "truncated", [], ["truncation"]),
        ([(8, [LOST] * 8), (56, [1.0, 0.0] * 4)], "grader fails", ["grader"], []),
        ([(64, [0.3] * 8)], "no signal", ["signal"], []),
        ([(16, [0.3] * 8)], "too few prompts", [], ["signal"]),
        ([(64, [BAD] + [1.0] * 7)], "form only", [], ["signal"]),
        ([(64, [7.0, 0.0] * 4)], "wrong range", ["range"], []),
    ],
)
def test_every_sickness_has_its_own_name(kinds, reading, failed, open_checks):
    found = judged(*kinds)
    assert found.figures["reading"] == reading
    assert found.figures["next"] == READINGS[reading]
    assert [check.name for check in found.failures] == failed
    assert [check.name for check in found.open] == open_checks
    assert all(check.catalog and check.remedy for check in found.failures)


def test_truncation_is_named_before_difficulty():
    # every group is unanimous at 0, as if the task were too hard; the answers were cut
    found = judged((64, [CUT] * 8))
    assert found.figures["reading"] == "truncated"
    assert found.of("difficulty").passed is True


def test_a_parser_that_loses_right_answers_fails_even_when_most_are_read():
    unread = [group([BAD, 1.0, 0.0, 1.0], n, texts=[f"= answer{n}", "a", "b", "c"]) for n in range(16)]
    found = probe_gate(probe_of(unread, SAMPLING), "toy")
    assert found.figures["reading"] == "parser bug"
    assert found.of("parser").passed is False
    assert found.of("parser").value == 0.25


def test_one_text_for_everything_is_a_collapse():
    same = [group([0.0] * 4, n, texts=["42"] * 4) for n in range(16)]
    found = probe_gate(probe_of(same, SAMPLING), "toy")
    assert found.figures["reading"] == "collapsed"
    assert found.of("collapse").catalog == ("F1", "P19")
    assert found.of("duplicates").passed is False


def test_siblings_that_are_one_text_are_duplicates_unless_they_are_right():
    def same(reward: float) -> list:
        return [group([reward] * 4, n, texts=[f"text {n}"] * 4) for n in range(14)] + [group([1.0, 0.0, 1.0, 0.0], n) for n in (14, 15)]

    wrong = probe_gate(probe_of(same(0.0), SAMPLING), "toy")
    assert wrong.of("duplicates").passed is None
    assert wrong.figures["reading"] == "duplicates"
    assert probe_gate(probe_of(same(1.0), SAMPLING), "toy").of("duplicates").passed is True


def test_greedy_siblings_are_refused():
    assert judged((8, [1.0, 0.0]), sampling=Sampling(temperature=0.0)).of("duplicates").passed is False


def test_uneven_difficulty_is_said():
    # 24 of 64 always right, 24 never, 16 mixed: 25% mixed where the mean success of one half would give 99%
    lines = probe_lines(judged((24, [1.0] * 8), (24, [0.0] * 8), (16, [1.0, 0.0] * 4)))
    assert any("difficulty is uneven: prompts that were all alike would give 99% mixed groups, measured 25%" in line for line in lines)
    assert not any("uneven" in line for line in probe_lines(judged((60, [1.0, 0.0] * 4), (4, [0.0] * 8))))


def test_lines_show_buckets_sizes_and_the_next_step():
    lines = probe_lines(judged((10, [1.0, 0.0, 0.0, 1.0]), (6, [0.0] * 4)))
    assert "  mixed                10   62.5%" in lines
    assert any(line.split()[:2] == ["4", "62.5%"] for line in lines)
    assert lines[-1] == "the data is to this model: learnable; next: train"


def test_the_range_of_a_reward_changes_what_is_wrong():
    assert judged((64, [-1.0] * 4)).figures["reading"] == "wrong range"
    found = judged((64, [-1.0] * 4), scale=Scale(-1.0, 1.0))
    assert found.figures["reading"] == "too hard"
    assert found.figures["success"] == 0.0


@pytest.mark.parametrize(("first", "most", "calls"), [(16, 64, [16, 48]), (8, 8, [8])])
def test_a_launch_gate_looks_further_only_while_it_has_to(first, most, calls):
    assert sequential(first, most) == calls


def test_a_launch_gate_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="cannot be"):
        sequential(1, 64)
