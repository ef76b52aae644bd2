"""Countdown: reach a target from given numbers, each used at most once. Every task is built from a solution, so it has one."""

from __future__ import annotations

import ast
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Self

from pydantic import Field, model_validator

from posttrain.core.config import Config
from posttrain.core.digest import digest
from posttrain.core.errors import ConfigError
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.core.trajectory import RewardStatus, Score
from posttrain.envs.types import check_request, demonstrate
from posttrain.rewards.extract import marked_line

_MAX_CHARACTERS = 200
_CHARACTERS = re.compile(r"[0-9+\-*/() ]+")
_DRAWS_PER_TASK = 2_000


class NotAnExpression(ValueError):
    """Text that is not numbers joined by + - * / and brackets."""


def evaluate(text: str) -> tuple[Fraction, Counter[int]]:
    """Exact value of an expression and the numbers it uses, with counts.

    Only binary + - * / over integer literals exist here; there is no name, call, power or sign to abuse.
    Raises NotAnExpression for anything else and ZeroDivisionError for a division by zero.

    >>> evaluate("(3 + 5) * 2")
    (Fraction(16, 1), Counter({3: 1, 5: 1, 2: 1}))
    """
    if len(text) > _MAX_CHARACTERS or not _CHARACTERS.fullmatch(text):
        raise NotAnExpression(f"{text[:60]!r} holds more than numbers, + - * / and brackets")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotAnExpression(f"{text[:60]!r} is not an expression") from None
    used: Counter[int] = Counter()
    return _value(tree, used), used


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):
        raise NotAnExpression(f"{type(node).__name__} is not allowed")
    left, right = _value(node.left, used), _value(node.right, used)
    match node.op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Div():
            return left / right
        case _:
            raise NotAnExpression(f"operator {type(node.op).__name__} is not allowed")


@dataclass(frozen=True, slots=True)
class CountdownGrader:
    """1 when the expression after the only `####` uses only the task's numbers, each at most as often as given, and hits the target.

    Example: numbers (3, 5, 2), target 16: "#### (3 + 5) * 2" -> 1.0; "#### 16" -> 0.0; "#### 4 ** 2" -> 0.0, unparseable
    """

    name: str = "countdown/1"

    def __call__(self, task: Task, text: str) -> Score:
        line = marked_line(text)
        if line is None:
            return Score(0.0, RewardStatus.UNPARSEABLE, grader=self.name, detail="no single '#### expression' line")
        try:
            value, used = evaluate(line)
        except NotAnExpression as error:
            return Score(0.0, RewardStatus.UNPARSEABLE, grader=self.name, detail=str(error))
        except ZeroDivisionError:
            return Score(0.0, RewardStatus.SCORED, line, self.name, "division by zero")
        extra = used - Counter(task.meta["numbers"])
        if extra:
            return Score(0.0, RewardStatus.SCORED, line, self.name, f"uses {sorted(extra.elements())}, which were not given")
        return Score(1.0 if value == task.meta["target"] else 0.0, RewardStatus.SCORED, line, self.name, f"value {value}")


class Countdown(Config):
    """Reach a target from `count` numbers of [low, high]. Held out by the set of numbers: a held-out set is never trained with any target.

    Example: "Use the numbers 2, 3, 5 and + - * / to reach 16, ..."  ->  "#### (3 + 5) * 2"
    """

    count: int = Field(default=3, ge=2, le=6)
    harder_count: int = Field(default=4, ge=3, le=7)
    low: int = Field(default=1, ge=1)
    high: int = Field(default=20, le=999)
    target_low: int = Field(default=1, ge=1)
    target_high: int = 100
    held_out_percent: int = Field(default=15, ge=1, le=90)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low >= self.high or self.target_low > self.target_high:
            raise ValueError(f"ranges [{self.low}, {self.high}] and [{self.target_low}, {self.target_high}] must not be empty")
        if self.harder_count <= self.count:
            raise ValueError(f"harder_count {self.harder_count} must be above count {self.count}")
        return self

    @property
    def name(self) -> str:
        return "countdown"

    @property
    def grader(self) -> CountdownGrader:
        return CountdownGrader()

    def is_held_out(self, numbers: tuple[int, ...]) -> bool:
        """Whether this set of numbers, in any order, is never trained."""
        return int(digest(sorted(numbers)), 16) % 100 < self.held_out_percent

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """See TaskSource."""
        which = check_request(self.name, split, n)
        rng = python_rng(seed if which == "train" else 0, self.name, which)
        found: dict[str | int, Task] = {}
        for _ in range(_DRAWS_PER_TASK * n):
            task = self._draw(rng, self.harder_count if which == "harder" else self.count)
            if task is None or (which != "harder" and self.is_held_out(tuple(task.meta["numbers"])) != (which == "held_out")):
                continue
            found.setdefault(len(found) if which == "train" else task.id, task)
            if len(found) == n:
                return list(found.values())
        raise ConfigError(f"countdown: {n} {which} tasks asked for, {len(found)} found; ask for fewer or widen the ranges")

    def gold(self, task: Task) -> str:
        return f"#### {task.answer}"

    def wrong(self, task: Task) -> str:
        """One of the numbers alone, which is never the target."""
        return f"#### {task.meta['numbers'][0]}"

    def demonstration(self, task: Task) -> Demonstration:
        return demonstrate(task, self.gold(task))

    def _draw(self, rng: Random, count: int) -> Task | None:
        numbers = tuple(sorted(rng.randint(self.low, self.high) for _ in range(count)))
        value, expression = _combine(rng, numbers)
        if not self.target_low <= value <= self.target_high or value in numbers:
            return None
        listed = ", ".join(str(number) for number in numbers)
        prompt = f"Use the numbers {listed} and + - * / to reach {value}, each number at most once. Give the expression after '####'."
        identity = f"countdown-{'-'.join(str(number) for number in numbers)}-to-{value}"
        return Task(identity, (Message("user", prompt),), expression, {"numbers": list(numbers), "target": value})


def _combine(rng: Random, numbers: tuple[int, ...]) -> tuple[int, str]:
    """Join all numbers by random operations, divisions only where they leave no remainder."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (a, left), (b, right), *rest = parts
        choices = {"+": a + b, "-": a - b, "*": a * b}
        if b != 0 and a % b == 0:
            choices["/"] = a // b
        op = rng.choice(sorted(choices))
        parts = [*rest, (choices[op], f"({left} {op} {right})")]
    value, expression = parts[0]
    return value, expression[1:-1]
