"""Arithmetic, word problems, instruct and countdown: what is held out, what is asked, and what is refused."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.digest import digest
from posttrain.core.errors import ConfigError
from posttrain.core.tasks import Message, Task, tasks_digest
from posttrain.core.trajectory import RewardStatus
from posttrain.envs.arithmetic import Arithmetic
from posttrain.envs.countdown import Countdown, CountdownGrader, NotAnExpression, evaluate
from posttrain.envs.instruct import CAPITALS, GREETINGS, OPPOSITES, WORDINGS, WORDS, Instruct
from posttrain.envs.pairs import pair_held_out, walk_pairs
from posttrain.envs.sources import source
from posttrain.envs.word_problems import WordProblems


@given(st.integers(-500, 500), st.integers(-500, 500), st.integers(1, 90))
def test_a_pair_is_held_out_in_both_orders_or_in_none(a: int, b: int, percent: int) -> None:
    assert pair_held_out(a, b, percent) == pair_held_out(b, a, percent)
    assert pair_held_out(a, b, percent) == (int(digest([min(a, b), max(a, b)]), 16) % 100 < percent)


def test_about_the_stated_share_of_pairs_is_held_out() -> None:
    held = sum(pair_held_out(a, b, 15) for a in range(100) for b in range(a, 100))
    assert abs(held / 5050 - 0.15) < 0.02  # 4 standard errors of sqrt(.15 * .85 / 5050) = .005


def test_walk_visits_every_ordered_pair_once() -> None:
    assert sorted(walk_pairs(3, 5, "x")) == [(a, b) for a in (3, 4, 5) for b in (3, 4, 5)]
    assert list(walk_pairs(3, 5, "x")) == list(walk_pairs(3, 5, "x")) != list(walk_pairs(3, 5, "y"))


def test_arithmetic_prompt_answer_and_completions() -> None:
    asked = Arithmetic(response="{a} {op} {b} = {value}\n#### {value}")
    task = next(task for task in asked.tasks("train", 50, 0) if task.meta["op"] == "-")
    a, b = task.meta["a"], task.meta["b"]
    assert task.id == f"arithmetic-{a}-{b}"
    assert task.prompt == (Message("user", f"Compute {a} - {b}. Give the final integer after '####'."),)
    assert task.answer == str(a - b)
    assert asked.gold(task) == f"{a} - {b} = {a - b}\n#### {a - b}"
    assert asked.wrong(task) == f"#### {a - b + 1}"


def test_no_held_out_pair_is_ever_trained_in_any_order_or_with_any_operator() -> None:
    asked = Arithmetic(ops=("+", "-", "*"), high=12, harder_low=13, harder_high=20)
    trained = {frozenset((task.meta["a"], task.meta["b"])) for task in asked.tasks("train", 4000, 0)}
    held_out = {frozenset((a, b)) for a in range(13) for b in range(13) if asked.is_held_out(a, b)}
    assert not trained & held_out
    assert len(trained) + len(held_out) == 13 * 14 // 2  # 4000 draws over 91 pairs reach every one that may be trained


def test_arithmetic_held_out_is_large_unique_and_even_over_operators() -> None:
    asked = Arithmetic()
    tasks = asked.tasks("held_out", 2000, 0)
    assert len({task.id for task in tasks}) == len({task.prompt for task in tasks}) == 2000
    assert Counter(task.meta["op"] for task in tasks) == {"+": 1000, "-": 1000}
    assert all(asked.is_held_out(task.meta["a"], task.meta["b"]) for task in tasks)


def test_harder_has_an_operand_in_the_band() -> None:
    for task in Arithmetic().tasks("harder", 400, 0):
        a, b = sorted((task.meta["a"], task.meta["b"]))
        assert 0 <= a <= 199
        assert 100 <= b <= 199


def test_splits_are_pinned() -> None:
    """A changed digest means that scores on these sets are no longer comparable with earlier ones."""
    asked = Arithmetic()
    assert tasks_digest(asked.tasks("held_out", 64, 0)) == "c819c62cc05d14c0"
    assert tasks_digest(asked.tasks("harder", 64, 0)) == "23336db7895bd72a"
    assert tasks_digest(asked.tasks("train", 64, 0)) == "ad9a62e4c032c0cb"


def test_arithmetic_that_cannot_be_asked_is_refused() -> None:
    with pytest.raises(ConfigError, match="2972 exist"):
        Arithmetic().tasks("held_out", 3000, 0)
    closed = next(value for value in range(200) if pair_held_out(value, value, 15))
    with pytest.raises(ConfigError, match="every pair"):
        Arithmetic(low=closed, high=closed, harder_low=500, harder_high=501).tasks("train", 1, 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": "Compute {a} and {b}"}, "must contain"),
        ({"prompt": "Compute {a} {op} {b} {c}"}, "no other field"),
        ({"response": "{value}"}, "after '####'"),
        ({"response": "#### {value} #### {value}"}, "once"),
        ({"response": "#### {result}"}, "unknown field"),
        ({"ops": []}, "at least one"),
        ({"ops": ["+", "+"]}, "once"),
        ({"ops": ["/"]}, "ops"),
        ({"low": 50, "high": 40}, "must not be empty"),
        ({"harder_low": 50}, "harder must lie above"),
        ({"held_out_percent": 0}, "held_out_percent = 0"),
        ({"hihg": 9}, "did you mean 'high'"),
    ],
)
def test_arithmetic_settings_that_cannot_work(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source("arithmetic", **settings)


def test_unknown_source_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'arithmetic'"):
        source("arithmetics")
    with pytest.raises(ConfigError, match="known: arithmetic"):
        source("zzz")


def test_word_problems_hold_out_pairs_and_never_go_negative() -> None:
    asked = WordProblems(working=True)
    train, held_out = asked.tasks("train", 2000, 0), asked.tasks("held_out", 300, 0)
    assert not any(asked.is_held_out(task.meta["a"], task.meta["b"]) for task in train)
    assert all(asked.is_held_out(task.meta["a"], task.meta["b"]) for task in held_out)
    assert all(int(task.answer) >= 0 for task in train + held_out)
    assert Counter(task.meta["op"] for task in held_out) == {"+": 150, "-": 150}
    plus = next(task for task in train if task.meta["op"] == "+")
    a, b = plus.meta["a"], plus.meta["b"]
    assert str(a) in plus.prompt[0].content
    assert str(b) in plus.prompt[0].content
    assert asked.gold(plus) == f"{a} + {b} = {a + b}. #### {a + b}"
    assert WordProblems().gold(plus) == f"#### {a + b}"
    assert all(max(task.meta["a"], task.meta["b"]) >= 31 for task in asked.tasks("harder", 100, 0))


def test_instruct_holds_out_skills_by_word() -> None:
    asked = Instruct()
    train, held_out = asked.tasks("train", 6000, 0), asked.tasks("held_out", 150, 0)
    trained = {(task.meta["skill"], task.answer) for task in train}
    for skill in ("repeat", "upper", "plural", "first", "last"):
        kept = {answer for name, answer in trained if name == skill}
        apart = {task.answer for task in held_out if task.meta["skill"] == skill}
        assert kept
        assert apart
        assert not kept & apart
    assert {task.meta["skill"] for task in held_out} == set(WORDINGS)
    assert len(WORDS) == len(set(WORDS)) == 40


def test_every_fact_is_trained_and_asked_in_a_wording_of_its_own() -> None:
    asked = Instruct()
    train, held_out = ({task.prompt[0].content for task in asked.tasks(split, n, 0)} for split, n in (("train", 8000), ("held_out", 250)))
    shown = [word for pair in OPPOSITES for word in pair] + [country for country, _ in CAPITALS] + list(GREETINGS)
    for skill, words in (("opposite", shown[:16]), ("capital", shown[16:24]), ("greeting", shown[24:])):
        for word in words:
            asks = {wording.format(x=word) for wording in WORDINGS[skill]}
            assert (len(asks & train), len(asks & held_out)) == (2, 1)
        for wording in WORDINGS[skill]:
            assert any(wording.format(x=word) in train for word in words)


def test_instruct_examples() -> None:
    asked = Instruct()
    by_skill = {task.meta["skill"]: task for task in asked.tasks("train", 300, 0)}
    assert by_skill["upper"].answer.isupper()
    assert by_skill["upper"].answer.lower() in by_skill["upper"].prompt[0].content
    assert asked.grader(by_skill["upper"], by_skill["upper"].answer.lower()).value == 0.0
    assert by_skill["plural"].answer.endswith("s")
    assert by_skill["category"].answer in ("yes", "no")
    mentions = Instruct(grading="mentions")
    listed = by_skill["first"]
    assert mentions.grader(listed, f"It is {listed.answer}.").value == 1.0
    assert asked.grader(listed, f"It is {listed.answer}.").value == 0.0
    assert mentions.grader(listed, " ".join([listed.answer, *listed.meta["rivals"]])).value == 0.0
    assert mentions.grader(by_skill["category"], "yes no").value == 0.0


def test_category_questions_are_as_often_no_as_yes() -> None:
    answers = Counter(task.answer for task in Instruct()._all("train") if task.meta["skill"] == "category")
    assert answers["yes"] == answers["no"] > 0


@pytest.mark.parametrize(
    ("text", "value"),
    [("(3 + 5) * 2", Fraction(16)), ("3 - 5 - 2", Fraction(-4)), ("8 / 3 / 2", Fraction(4, 3)), ("2*(3+4)", Fraction(14))],
)
def test_evaluate(text: str, value: Fraction) -> None:
    assert evaluate(text)[0] == value


def test_evaluate_counts_the_numbers_used() -> None:
    assert evaluate("3 + 3 * 5")[1] == Counter({3: 2, 5: 1})


@pytest.mark.parametrize(
    "text",
    ["2 ** 9", "9 // 2", "-3 + 5", "+3", "3 5", "3 + ", "", "()", "3.5 + 1", "1e3", "a + 1", "f(1)", "3 == 3", "(" * 150, "1+" * 150 + "1"],
)
def test_evaluate_refuses_everything_else(text: str) -> None:
    with pytest.raises(NotAnExpression):
        evaluate(text)


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("#### (3 + 5) * 2", 1.0, RewardStatus.SCORED),
        ("#### 2 * (5 + 3)\n", 1.0, RewardStatus.SCORED),
        ("#### 3 + 5", 0.0, RewardStatus.SCORED),
        ("#### 16", 0.0, RewardStatus.SCORED),
        ("#### (3 + 5) * 2 * 2 / 2", 0.0, RewardStatus.SCORED),
        ("#### 5 / (3 - 3)", 0.0, RewardStatus.SCORED),
        ("#### (3 + 5) * 2 = 16", 0.0, RewardStatus.UNPARSEABLE),
        ("(3 + 5) * 2", 0.0, RewardStatus.UNPARSEABLE),
        ("#### 2 ** 4", 0.0, RewardStatus.UNPARSEABLE),
        ("#### (3 + 5) * 2 #### 1", 0.0, RewardStatus.UNPARSEABLE),
    ],
)
def test_countdown_grader(text: str, value: float, status: RewardStatus) -> None:
    task = Task("c", (), "(3 + 5) * 2", {"numbers": [2, 3, 5], "target": 16})
    outcome = CountdownGrader()(task, text)
    assert (outcome.value, outcome.status) == (value, status)


def test_countdown_holds_out_number_sets() -> None:
    asked = Countdown()
    train, held_out = asked.tasks("train", 300, 0), asked.tasks("held_out", 100, 0)
    assert not {tuple(task.meta["numbers"]) for task in train} & {tuple(task.meta["numbers"]) for task in held_out}
    assert asked.is_held_out((2, 3, 5)) == asked.is_held_out((5, 2, 3))
    assert all(len(task.meta["numbers"]) == 4 for task in asked.tasks("harder", 20, 0))
    assert all(task.meta["target"] not in task.meta["numbers"] for task in train)


def test_countdown_without_enough_tasks_says_so() -> None:
    with pytest.raises(ConfigError, match="widen the ranges"):
        Countdown(count=2, harder_count=3, low=1, high=2, target_low=1, target_high=5).tasks("held_out", 60, 0)
    with pytest.raises(ConfigError, match="harder_count"):
        source("countdown", count=4, harder_count=4)
