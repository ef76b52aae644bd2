"""Graders: what a finished completion is worth. Each `name` ends in a version; a changed rule is a new name.

A grader never guesses: no answer in the required form is UNPARSEABLE with value 0, a gold answer that cannot be read raises GraderError
(which `rewards.types.score` records as ERROR, not as 0).
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from posttrain.core.errors import GraderError
from posttrain.core.tasks import Task
from posttrain.core.trajectory import RewardStatus, Score
from posttrain.rewards.equivalence import equal_numbers, equivalent
from posttrain.rewards.extract import boxed, hash_marker, last_number, number

Extraction = Literal["hash", "boxed", "last_number"]
EXTRACTORS: dict[Extraction, Callable[[str], str | None]] = {"hash": hash_marker, "boxed": boxed, "last_number": last_number}
VERSIONS: dict[Extraction, str] = {"hash": "hash/1", "boxed": "boxed/1", "last_number": "last-number-lenient/1"}
"""Of the rules in rewards/extract.py: a changed rule is a new version, so that two evaluations show what they differ in."""

_WORD = re.compile(r"\w+(?:['’-]\w+)*")


def _unparseable(grader: str, detail: str) -> Score:
    return Score(0.0, RewardStatus.UNPARSEABLE, grader=grader, detail=detail)


def _scored(grader: str, right: bool, parsed: str, detail: str = "") -> Score:
    return Score(1.0 if right else 0.0, RewardStatus.SCORED, parsed, grader, detail)


@dataclass(frozen=True, slots=True)
class HashMarkerGrader:
    """1 when the number after the only `####` equals the task's answer in value (12.0 is 12), else 0.

    Example: HashMarkerGrader()(Task("t", (), "5"), "#### 5")  ->  Score(1.0, SCORED, "5", "hash-marker/1")
    """

    name: str = "hash-marker/1"

    @property
    def extractor(self) -> str:
        return VERSIONS["hash"]

    def __call__(self, task: Task, text: str) -> Score:
        gold = number(task.answer)
        if gold is None:
            raise GraderError(f"task {task.id}: answer {task.answer[:40]!r} is not a number; {self.name} judges numbers only")
        parsed = hash_marker(text)
        if parsed is None:
            return _unparseable(self.name, "no single '#### number' line")
        return _scored(self.name, equal_numbers(parsed, gold), parsed)


@dataclass(frozen=True, slots=True)
class MathGrader:
    r"""1 when the extracted answer is mathematically equal to the task's answer, else 0. Numbers compare exactly, the rest by math-verify.

    `extraction` "hash" and "boxed" are strict; "last_number" is lenient, for measuring models that were never taught a form, and says so
    in the name of the grader. Safe to call from any thread.

    Example: MathGrader("boxed")(Task("t", (), "0.5"), r"\boxed{\frac{1}{2}}").value  ->  1.0
    """

    extraction: Extraction = "hash"

    @property
    def name(self) -> str:
        return {"hash": "math-hash/1", "boxed": "math-boxed/1", "last_number": "math-last-number-lenient/1"}[self.extraction]

    @property
    def extractor(self) -> str:
        return VERSIONS[self.extraction]

    def __call__(self, task: Task, text: str) -> Score:
        parsed = EXTRACTORS[self.extraction](text)
        if parsed is None:
            return _unparseable(self.name, f"no answer in {self.extraction} form")
        same = equivalent(task.answer, parsed)
        if same is None:
            return Score(0.0, RewardStatus.UNPARSEABLE, parsed[:200], self.name, "the answer cannot be read as mathematics")
        return _scored(self.name, same, parsed[:200])


def normalise(text: str, *, case_sensitive: bool = False) -> str:
    """Text without differences that do not matter: case (unless told), runs of whitespace, sentence punctuation at the end.

    >>> normalise("  Good   morning! ")
    'good morning'
    """
    collapsed = " ".join(text.split()).rstrip(".!?").rstrip()
    return collapsed if case_sensitive else collapsed.casefold()


@dataclass(frozen=True, slots=True)
class ExactTextGrader:
    """1 when the whole completion is the answer, up to `normalise`. A task with `meta["case_sensitive"]` also compares case.

    Example: ExactTextGrader()(Task("t", (), "cold"), "Cold.").value  ->  1.0
    """

    name: str = "exact-text/1"

    @property
    def extractor(self) -> str:
        return "whole-text/1"

    def __call__(self, task: Task, text: str) -> Score:
        case_sensitive = bool(task.meta.get("case_sensitive", False))
        said = normalise(text, case_sensitive=case_sensitive)
        if not said:
            return _unparseable(self.name, "empty")
        return _scored(self.name, said == normalise(task.answer, case_sensitive=case_sensitive), said[:200])


@dataclass(frozen=True, slots=True)
class MentionsGrader:
    """1 when the answer occurs as whole word(s) in a completion of at most `max_words` words, else 0.

    The limit, and `meta["rivals"]` (wrong answers that must not occur as well), keep a list of all candidates from scoring.
    A task with `meta["case_sensitive"]` also compares case.

    Example: MentionsGrader()(Task("t", (), "cold"), "It is cold.").value  ->  1.0;  "colder" -> 0.0
    """

    max_words: int = 8

    @property
    def name(self) -> str:
        return f"mentions-{self.max_words}/1"

    @property
    def extractor(self) -> str:
        return "words/1"

    def __call__(self, task: Task, text: str) -> Score:
        case_sensitive = bool(task.meta.get("case_sensitive", False))

        def words(of: str) -> list[str]:
            return _WORD.findall(of if case_sensitive else of.casefold())

        said = words(text)
        if not said:
            return _unparseable(self.name, "no words")
        answer = words(task.answer)
        if not answer:
            raise GraderError(f"task {task.id}: answer {task.answer[:40]!r} has no word to look for; use ExactTextGrader")
        parsed = " ".join(said)[:200]
        if len(said) > self.max_words:
            return _scored(self.name, False, parsed, f"{len(said)} words, at most {self.max_words} allowed")
        rival = next((rival for rival in task.meta.get("rivals", ()) if _occurs(words(rival), said)), None)
        if rival is not None:
            return _scored(self.name, False, parsed, f"also mentions '{rival}'")
        return _scored(self.name, _occurs(answer, said), parsed)


def _occurs(needle: list[str], haystack: list[str]) -> bool:
    return any(haystack[start : start + len(needle)] == needle for start in range(len(haystack) - len(needle) + 1))


@dataclass(frozen=True, slots=True)
class FunctionGrader:
    """A user's own reward function `(task, text) -> float`, or `-> {channel: float}` whose sum is the reward.

    None, NaN, infinities and anything that is not a real number have status ERROR and no value: a reward that was not given is not 0.
    An exception passes through, and `rewards.types.score` records it as ERROR.

    Example: FunctionGrader(lambda task, text: float(task.answer in text), "contains/1")
    """

    fn: Callable[[Task, str], float | Mapping[str, float] | None]
    name: str

    def __call__(self, task: Task, text: str) -> Score:
        value: object = self.fn(task, text)
        if isinstance(value, Mapping):
            return self._combined(value)
        if value is None:
            return Score(None, RewardStatus.ERROR, grader=self.name, detail="returned None, not a number")
        if not isinstance(value, numbers.Real | np.bool_):
            return Score(None, RewardStatus.ERROR, grader=self.name, detail=f"returned {type(value).__name__}, not a number")
        if not math.isfinite(value):
            return Score(None, RewardStatus.ERROR, grader=self.name, detail=f"returned {float(value)}, not a finite number")
        return Score(float(value), RewardStatus.SCORED, grader=self.name)

    def _combined(self, channels: Mapping[str, object]) -> Score:
        parts = []
        for name, part in channels.items():
            if not isinstance(part, numbers.Real | np.bool_) or not math.isfinite(part):
                return Score(None, RewardStatus.ERROR, grader=self.name, detail=f"channel '{name}' is {part!r}, not a finite number")
            parts.append((str(name), float(part)))
        if not parts:
            return Score(None, RewardStatus.ERROR, grader=self.name, detail="returned no channel")
        return Score(sum(part for _, part in parts), RewardStatus.SCORED, grader=self.name, parts=tuple(parts))
