"""One-step integer arithmetic: the smallest skill with a verifiable answer, a true held-out set, and a harder band."""

from __future__ import annotations

import string
from collections.abc import Iterator
from itertools import islice
from typing import Literal, Self

from pydantic import Field, model_validator

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.envs.pairs import draw_pair, pair_held_out, walk_pairs
from posttrain.envs.types import check_request, demonstrate
from posttrain.rewards.extract import hash_marker
from posttrain.rewards.graders import HashMarkerGrader

Op = Literal["+", "-", "*"]


class Arithmetic(Config):
    """`a op b` with operands in [low, high]; the answer is the integer after '####'.

    Example: source.tasks("train", 1, seed=0)  ->  [Task("arithmetic-12+7", (Message("user", "Compute 12 + 7. ..."),), "19", {a, b, op})]
    """

    ops: tuple[Op, ...] = ("+", "-")
    low: int = 0
    high: int = 99
    harder_low: int = 100
    """`harder` tasks have at least one operand in [harder_low, harder_high] and the other in [low, harder_high]."""
    harder_high: int = 199
    held_out_percent: int = Field(default=15, ge=1, le=90)
    """Share of unordered operand pairs that is never trained."""
    prompt: str = "Compute {a} {op} {b}. Give the final integer after '####'."
    response: str = "#### {value}"
    """The gold completion; may show working with {a}, {op}, {b}, and must end in a line that parses to {value}."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.ops or len(set(self.ops)) < len(self.ops):
            raise ValueError("ops must name each operator once and at least one, e.g. ['+', '-']")
        if not self.low <= self.high < self.harder_low <= self.harder_high:
            raise ValueError(
                f"ranges [{self.low}, {self.high}] and [{self.harder_low}, {self.harder_high}] must not be empty, and harder must lie above"
            )
        fields = {name for _, name, _, _ in string.Formatter().parse(self.prompt) if name is not None}
        if fields != {"a", "op", "b"}:
            raise ValueError("prompt must contain {a}, {op} and {b} and no other field")
        try:
            answered = hash_marker(self.response.format(a=9, op="-", b=3, value=6))
        except (KeyError, IndexError) as error:
            raise ValueError(f"response has unknown field {error}; use {{a}}, {{op}}, {{b}}, {{value}}") from None
        if answered != "6":
            raise ValueError("response must give {value} once, after '####', and nothing behind it on that line")
        return self

    @property
    def name(self) -> str:
        return "arithmetic"

    @property
    def grader(self) -> HashMarkerGrader:
        return HashMarkerGrader()

    def is_held_out(self, a: int, b: int) -> bool:
        """Whether the pair {a, b} is never trained, in any order and with any operator."""
        return pair_held_out(a, b, self.held_out_percent)

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """See TaskSource. Held-out and harder tasks are spread evenly over the operators."""
        which = check_request(self.name, split, n)
        if which == "train":
            return self._train(n, seed)
        walks = [self._walk(op, harder=which == "harder") for op in self.ops]
        found: list[Task] = []
        while walks and len(found) < n:
            batches = [list(islice(walk, 1)) for walk in walks]
            found += [task for batch in batches for task in batch]
            walks = [walk for walk, batch in zip(walks, batches, strict=True) if batch]
        if len(found) < n:
            raise ConfigError(f"arithmetic: {n} {which} tasks asked for, {len(found)} exist; ask for fewer or widen the range")
        return found[:n]

    def gold(self, task: Task) -> str:
        return self.response.format(a=task.meta["a"], op=task.meta["op"], b=task.meta["b"], value=task.answer)

    def wrong(self, task: Task) -> str:
        """The right form with the next integer."""
        return f"#### {int(task.answer) + 1}"

    def demonstration(self, task: Task) -> Demonstration:
        return demonstrate(task, self.gold(task))

    def _train(self, n: int, seed: int) -> list[Task]:
        rng = python_rng(seed, self.name, "train")
        drawn = []
        for _ in range(n):
            pair = draw_pair(rng, self.low, self.high, lambda a, b: not self.is_held_out(a, b))
            if pair is None:
                raise ConfigError(
                    f"arithmetic: every pair of [{self.low}, {self.high}] is held out; widen the range or lower held_out_percent"
                )
            drawn.append(self._task(*pair, rng.choice(self.ops)))
        return drawn

    def _walk(self, op: Op, *, harder: bool) -> Iterator[Task]:
        for a, b in walk_pairs(self.low, self.harder_high if harder else self.high, self.name, op):
            if max(a, b) >= self.harder_low if harder else self.is_held_out(a, b):
                yield self._task(a, b, op)

    def _task(self, a: int, b: int, op: Op) -> Task:
        value = {"+": a + b, "-": a - b, "*": a * b}[op]
        prompt = self.prompt.format(a=a, op=op, b=b)
        return Task(f"arithmetic-{a}{op}{b}", (Message("user", prompt),), str(value), {"a": a, "b": b, "op": op})
