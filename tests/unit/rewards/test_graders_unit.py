"""Graders: each rule by one completion that scores and its nearest miss."""

from __future__ import annotations

import math
import signal
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

from posttrain.core.errors import GraderError
from posttrain.core.tasks import Task
from posttrain.core.trajectory import RewardStatus, StopReason, Tokens, Trajectory
from posttrain.rewards import equivalence
from posttrain.rewards.equivalence import equivalent, tractable
from posttrain.rewards.graders import ExactTextGrader, FunctionGrader, HashMarkerGrader, MathGrader, MentionsGrader
from posttrain.rewards.proof import NearMiss, prove
from posttrain.rewards.types import score


def task(answer: str, **meta: object) -> Task:
    return Task("t", (), answer, dict(meta))


def trajectory(text: str, stop: StopReason = StopReason.END) -> Trajectory:
    return Trajectory("t", 0, Tokens((), ()), (), (), stop, text, 0)


@pytest.mark.parametrize(
    ("answer", "text", "value"),
    [
        ("5", "#### 5", 1.0),
        ("5", "#### 5.0", 1.0),
        ("5", "#### -5", 0.0),
        ("-3", "#### 3", 0.0),
        ("12", "#### 12.5", 0.0),
        ("1,234", "#### 1234", 1.0),
        ("0.1", "#### 0.10000000000000000001", 0.0),
        ("9007199254740993", "#### 9007199254740992", 0.0),
    ],
)
def test_hash_marker_compares_values_exactly(answer: str, text: str, value: float) -> None:
    outcome = HashMarkerGrader()(task(answer), text)
    assert (outcome.value, outcome.status) == (value, RewardStatus.SCORED)


def test_hash_marker_without_marker_is_unparseable_and_names_itself() -> None:
    outcome = HashMarkerGrader()(task("5"), "5")
    assert (outcome.value, outcome.status, outcome.grader) == (0.0, RewardStatus.UNPARSEABLE, "hash-marker/1")


def test_gold_that_is_no_number_is_an_error_not_a_zero() -> None:
    with pytest.raises(GraderError, match="five"):
        HashMarkerGrader()(task("five"), "#### 5")
    outcome = score(HashMarkerGrader(), task("five"), trajectory("#### 5"))
    assert (outcome.value, outcome.status) == (None, RewardStatus.ERROR)


def test_truncated_completion_is_not_parsed() -> None:
    outcome = score(HashMarkerGrader(), task("5"), trajectory("#### 5", StopReason.LENGTH))
    assert (outcome.value, outcome.status) == (0.0, RewardStatus.TRUNCATED)


@pytest.mark.parametrize(
    ("answer", "text", "value", "status"),
    [
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0, RewardStatus.SCORED),
        ("0.5", r"\boxed{\frac{2}{3}}", 0.0, RewardStatus.SCORED),
        (r"2\sqrt{2}", r"\boxed{\sqrt{8}}", 1.0, RewardStatus.SCORED),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1.0, RewardStatus.SCORED),
        ("5", r"\boxed{5,6}", 0.0, RewardStatus.SCORED),
        ("5", r"\boxed{five}", 0.0, RewardStatus.UNPARSEABLE),
        ("5", r"\boxed{9^{9^{9}}}", 0.0, RewardStatus.UNPARSEABLE),
        ("5", r"\boxed{99999999!}", 0.0, RewardStatus.UNPARSEABLE),
        ("5", r"\boxed{5} \boxed{6}", 0.0, RewardStatus.UNPARSEABLE),
    ],
)
def test_math_grader_by_equivalence(answer: str, text: str, value: float, status: RewardStatus) -> None:
    outcome = MathGrader("boxed")(task(answer), text)
    assert (outcome.value, outcome.status) == (value, status)


def test_math_grader_names_say_what_was_extracted() -> None:
    names = [MathGrader(how).name for how in ("hash", "boxed", "last_number")]
    assert names == ["math-hash/1", "math-boxed/1", "math-last-number-lenient/1"]
    assert MathGrader("hash")(task("7"), "the answer is 7").value == 0.0
    assert MathGrader("last_number")(task("7"), "the answer is 7").value == 1.0


@pytest.mark.parametrize(
    "hostile",
    ["9^{9^{9}}", "((9^{99})^{99})^{99}", "9999999!", "9**9**9", r"\binom{99}{9}", "factorial(9)", r"\sum_{k=1}^{9} k", "1" * 200],
)
def test_expressions_that_could_explode_are_refused_unread(hostile: str) -> None:
    assert not tractable(hostile)


def test_math_grader_works_in_threads_and_in_a_process_and_leaves_signals_alone() -> None:
    grader, asked, text = MathGrader("boxed"), task("0.5"), r"\boxed{\frac{1}{2}}"
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[1]
    with ThreadPoolExecutor(4) as threads:
        assert [outcome.value for outcome in threads.map(lambda _: grader(asked, text), range(8))] == [1.0] * 8
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        assert processes.submit(grader, asked, text).result(timeout=60).value == 1.0
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[1]) == before


def test_comparison_past_the_deadline_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(equivalence, "DEADLINE_SECONDS", 0.05)
    monkeypatch.setattr(equivalence, "_compare", lambda gold, answer: release.wait(10))
    outcome = score(MathGrader("boxed"), task("0.5"), trajectory(r"\boxed{\frac{1}{2}}"))
    release.set()
    assert (outcome.value, outcome.status) == (None, RewardStatus.ERROR)
    assert "TimeoutError" in outcome.detail


def test_unreadable_gold_is_an_error() -> None:
    with pytest.raises(ValueError, match="too complex"):
        equivalent("9^{9^{9}}", "5")


@pytest.mark.parametrize(
    ("answer", "text", "meta", "value"),
    [
        ("cold", "Cold.", {}, 1.0),
        ("good morning", "  Good \n morning! ", {}, 1.0),
        ("cold", "It is cold", {}, 0.0),
        ("CAT", "cat", {}, 1.0),
        ("CAT", "cat", {"case_sensitive": True}, 0.0),
        ("CAT", "CAT!", {"case_sensitive": True}, 1.0),
    ],
)
def test_exact_text(answer: str, text: str, meta: dict[str, object], value: float) -> None:
    assert ExactTextGrader()(task(answer, **meta), text).value == value


def test_exact_text_of_nothing_is_unparseable() -> None:
    assert ExactTextGrader()(task("cold"), " .\n").status is RewardStatus.UNPARSEABLE


@pytest.mark.parametrize(
    ("answer", "text", "meta", "value"),
    [
        ("cold", "It is cold.", {}, 1.0),
        ("cold", "colder", {}, 0.0),
        ("New York", "I say New York!", {}, 1.0),
        ("New York", "new old york", {}, 0.0),
        ("yes", "yes or no", {"rivals": ["no"]}, 0.0),
        ("yes", "yes", {"rivals": ["no"]}, 1.0),
        ("yes", "yes I know", {"rivals": ["no"]}, 1.0),
        ("CAT", "It is cat", {"case_sensitive": True}, 0.0),
        ("red", "a b c red", {}, 1.0),
        ("red", "a b c d red", {}, 0.0),
    ],
)
def test_mentions_of_at_most_four_words(answer: str, text: str, meta: dict[str, object], value: float) -> None:
    assert MentionsGrader(max_words=4)(task(answer, **meta), text).value == value


def test_mentions_carries_its_limit_in_the_name_and_refuses_an_answer_without_words() -> None:
    assert MentionsGrader(4).name == "mentions-4/1"
    with pytest.raises(GraderError, match="no word"):
        MentionsGrader()(task("!"), "x")


@pytest.mark.parametrize(("returned", "value"), [(0.25, 0.25), (True, 1.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0), (0, 0.0)])
def test_function_grader_passes_numbers_on(returned: float, value: float) -> None:
    outcome = FunctionGrader(lambda task, text: returned, "mine/1")(task("x"), "y")
    assert (outcome.value, outcome.status, outcome.grader) == (value, RewardStatus.SCORED, "mine/1")
    assert type(outcome.value) is float


@pytest.mark.parametrize("returned", [None, math.nan, math.inf, "1.0", [1.0], 1j])
def test_function_grader_never_turns_a_missing_number_into_zero(returned: object) -> None:
    outcome = FunctionGrader(lambda task, text: returned, "mine/1")(task("x"), "y")  # type: ignore[arg-type,return-value]
    assert (outcome.value, outcome.status) == (None, RewardStatus.ERROR)
    assert outcome.detail.startswith("returned ")


def test_channels_add_up_to_the_reward_and_stay_apart() -> None:
    outcome = FunctionGrader(lambda task, text: {"correct": np.float32(1.0), "cost": -0.25, "form": True}, "mine/1")(task("x"), "y")  # type: ignore[arg-type,return-value]
    assert (outcome.value, outcome.status, outcome.grader) == (1.75, RewardStatus.SCORED, "mine/1")
    assert outcome.parts == (("correct", 1.0), ("cost", -0.25), ("form", 1.0))
    assert FunctionGrader(lambda task, text: 1.0, "mine/1")(task("x"), "y").parts == ()


@pytest.mark.parametrize(
    ("returned", "detail"),
    [
        ({"correct": 1.0, "cost": math.nan}, "channel 'cost' is nan, not a finite number"),
        ({"correct": None}, "channel 'correct' is None, not a finite number"),
        ({"correct": "1"}, "channel 'correct' is '1', not a finite number"),
        ({}, "returned no channel"),
    ],
)
def test_a_channel_that_is_no_number_is_an_error_of_the_whole(returned: dict[str, object], detail: str) -> None:
    outcome = FunctionGrader(lambda task, text: returned, "mine/1")(task("x"), "y")  # type: ignore[arg-type,return-value]
    assert (outcome.value, outcome.status, outcome.parts) == (None, RewardStatus.ERROR, ())
    assert outcome.detail == detail


def test_function_grader_that_raises_is_recorded_as_error() -> None:
    outcome = score(FunctionGrader(lambda task, text: 1 / 0, "mine/1"), task("x"), trajectory("y"))
    assert (outcome.value, outcome.status) == (None, RewardStatus.ERROR)
    assert "ZeroDivisionError" in outcome.detail


def gold_text(asked: Task) -> str:
    return f"#### {asked.answer}"


def wrong_text(asked: Task) -> str:
    return f"#### {asked.answer}1"


def test_proof_counts_its_checks() -> None:
    near = [NearMiss(task("5"), "#### 5 or 6", 0.0), NearMiss(task("5"), "#### 5.0", 1.0)]
    report = prove(HashMarkerGrader(), [task("5"), task("6")], gold=gold_text, wrong=wrong_text, near_misses=near)
    assert (report.grader, report.tasks, report.checks) == ("hash-marker/1", 2, 2 * 3 + 2 + 1)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda task, text: 0.0, "the gold answer"),
        (lambda task, text: 1.0, "an empty answer"),
        (lambda task, text: float(bool(text)), "a wrong answer"),
        (lambda task, text: None, "returned None"),
        (lambda task, text: 1 / 0, "ZeroDivisionError"),
        (lambda task, text: float(text == "#### 5" and threading.current_thread() is threading.main_thread()), "worker thread"),
    ],
)
def test_proof_refuses_a_broken_grader(fn: object, message: str) -> None:
    with pytest.raises(GraderError, match=message):
        prove(FunctionGrader(fn, "mine/1"), [task("5")], gold=gold_text, wrong=wrong_text)  # type: ignore[arg-type]


def test_proof_refuses_a_near_miss_that_scores_and_an_empty_list() -> None:
    with pytest.raises(GraderError, match="near miss"):
        prove(HashMarkerGrader(), [task("5")], gold=gold_text, wrong=wrong_text, near_misses=[NearMiss(task("5"), "#### 5.0", 0.0)])
    with pytest.raises(GraderError, match="0 tasks"):
        prove(HashMarkerGrader(), [], gold=gold_text, wrong=wrong_text)
