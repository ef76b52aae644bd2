"""One-step word problems: the arithmetic of `arithmetic.py` behind a sentence or two. Held out by operand pair, whatever the story."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Self

from pydantic import Field, model_validator

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.envs.pairs import draw_pair, pair_held_out, walk_pairs
from posttrain.envs.types import check_request, demonstrate, first
from posttrain.rewards.graders import HashMarkerGrader

NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
OBJECTS = ("apples", "books", "coins", "cards", "eggs", "pens", "shells", "stamps")
STORIES: tuple[tuple[str, str], ...] = (
    ("+", "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?"),
    ("-", "{name} has {a} {things} and gives away {b}. How many {things} are left?"),
    ("+", "{name} finds {a} {things} in the morning and {b} in the evening. How many {things} is that in all?"),
    ("-", "{name} had {a} {things} and lost {b} of them. How many {things} does {name} still have?"),
    ("+", "There are {a} {things} on the table and {b} in a box. {name} counts them all. How many {things} are there?"),
    ("-", "There are {a} {things} in a box. {name} takes {b} out. How many {things} stay in the box?"),
    ("+", "{name} buys {a} {things} on Monday and {b} on Friday. How many {things} did {name} buy?"),
    ("-", "{name} wants {a} {things} and has {b}. How many {things} are missing?"),
)
"""(operator, story). In a subtraction the larger number comes first, so that no answer is negative. Operators alternate."""


class WordProblems(Config):
    """One-step stories with operands in [low, high]; the answer is the integer after '####'.

    Example: "Ana has 5 apples and gets 3 more. How many apples does Ana have now? Give the final integer after '####'."  ->  "#### 8"
    """

    low: int = Field(default=2, ge=0)
    high: int = 30
    harder_low: int = 31
    harder_high: int = 99
    held_out_percent: int = Field(default=15, ge=1, le=90)
    """Share of unordered operand pairs that is never trained."""
    working: bool = False
    """Gold completions open with one sentence of working: "5 + 3 = 8. #### 8"."""
    instruction: str = "Give the final integer after '####'."

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low <= self.high < self.harder_low <= self.harder_high:
            raise ValueError(
                f"ranges [{self.low}, {self.high}] and [{self.harder_low}, {self.harder_high}] must not be empty, and harder must lie above"
            )
        return self

    @property
    def name(self) -> str:
        return "word_problems"

    @property
    def grader(self) -> HashMarkerGrader:
        return HashMarkerGrader()

    def is_held_out(self, a: int, b: int) -> bool:
        """Whether the pair {a, b} is never trained, in any story."""
        return pair_held_out(a, b, self.held_out_percent)

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """See TaskSource. Held-out and harder tasks go round the stories, one pair after the other."""
        which = check_request(self.name, split, n)
        if which == "train":
            return self._train(n, seed)
        harder = which == "harder"
        pairs = [
            (a, b)
            for a, b in walk_pairs(self.low, self.harder_high if harder else self.high, self.name, which)
            if a >= b and (a >= self.harder_low if harder else self.is_held_out(a, b))
        ]
        rounds = range(len(STORIES) if pairs else 0)
        listed = ((pair, story) for turn in rounds for pair, story in zip(pairs, islice(cycle(rounds), turn, None), strict=False))
        rng = python_rng(0, self.name, which)
        found = []
        for (a, b), story in islice(listed, n):
            a, b = rng.choice([(a, b), (b, a)])
            found.append(self._task(a, b, story, rng.randrange(len(NAMES)), rng.randrange(len(OBJECTS))))
        return first(self.name, which, found, n, "widen the range")

    def gold(self, task: Task) -> str:
        working = f"{task.meta['a']} {task.meta['op']} {task.meta['b']} = {task.answer}. " if self.working else ""
        return f"{working}#### {task.answer}"

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
                    f"word_problems: every pair of [{self.low}, {self.high}] is held out; widen the range or lower held_out_percent"
                )
            drawn.append(self._task(*pair, rng.randrange(len(STORIES)), rng.randrange(len(NAMES)), rng.randrange(len(OBJECTS))))
        return drawn

    def _task(self, a: int, b: int, story: int, name: int, thing: int) -> Task:
        op, text = STORIES[story]
        if op == "-" and a < b:
            a, b = b, a
        told = text.format(name=NAMES[name], a=a, b=b, things=OBJECTS[thing])
        value = a + b if op == "+" else a - b
        meta = {"a": a, "b": b, "op": op, "story": story}
        identity = f"word-{story}-{NAMES[name]}-{OBJECTS[thing]}-{a}-{b}"
        return Task(identity, (Message("user", f"{told} {self.instruction}"),), str(value), meta)
