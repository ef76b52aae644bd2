"""Short chat skills with checkable answers: what a model should still do after it was trained on something else.

Two kinds. *Skills* (repeat, first, last, upper case, plural, yes or no) are held out by (word, skill): the words are known from other
skills, the combination is new. *Facts* (opposites, capitals, greetings) cannot be worked out, so every fact is trained in two wordings, and
its held-out question is a third, which was trained with other facts. Facts therefore measure retention, not generalisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from posttrain.core.config import Config
from posttrain.core.digest import digest
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.envs.types import Split, check_request, demonstrate, first
from posttrain.rewards.graders import ExactTextGrader, MentionsGrader
from posttrain.rewards.types import Grader

CATEGORIES: dict[str, tuple[str, ...]] = {
    "an animal": ("cat", "dog", "horse", "zebra", "frog", "snake", "lion", "tiger", "bear", "bird"),
    "a food": ("apple", "bean", "egg", "cake", "plum", "pear", "carrot", "onion", "lemon", "cookie"),
    "a tool": ("hammer", "saw", "spoon", "pen", "broom", "drill", "fork", "rake", "shovel", "ladder"),
    "a vehicle": ("car", "truck", "van", "train", "ship", "boat", "plane", "tram", "rocket", "wagon"),
}
WORDS: tuple[str, ...] = tuple(word for words in CATEGORIES.values() for word in words)
"""40 nouns whose plural is formed with s."""
OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("open", "closed"), ("fast", "slow"), ("old", "young"),
    ("wet", "dry"),
)  # fmt: skip
CAPITALS: tuple[tuple[str, str], ...] = (
    ("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"), ("Egypt", "Cairo"), ("Peru", "Lima"),
    ("Norway", "Oslo"), ("Kenya", "Nairobi"),
)  # fmt: skip
GREETINGS: tuple[str, ...] = ("Hello", "Hi", "Good morning", "Good evening")
REPLY = "Hello, how can I help?"

WORDINGS: dict[str, tuple[str, ...]] = {
    "repeat": ("Repeat this word: {x}", "Say {x}."),
    "upper": ("Write {x} in upper case.", "Put {x} in capital letters."),
    "plural": ("What is the plural of {x}?", "Give the plural of {x}."),
    "first": ("What is the first word of this list: {x}?", "Give the first word: {x}"),
    "last": ("What is the last word of this list: {x}?", "Give the last word: {x}"),
    "category": ("Is {x}? Answer yes or no.", "Yes or no: is {x}?"),
    "opposite": ("What is the opposite of {x}?", "Give the opposite of {x}.", "Opposite of {x}?"),
    "capital": ("What is the capital of {x}?", "Name the capital of {x}.", "Capital of {x}?"),
    "greeting": ("{x}!", "{x}.", "{x} there!"),
}
_LISTS_PER_WORD = 6


class Instruct(Config):
    """Nine short skills over about forty words; `harder` asks the same of several words at once.

    Example: "What is the plural of cat?"  ->  "cats"; held out for about `held_out_percent` % of the words
    """

    grading: Literal["exact", "mentions"] = "exact"
    """exact: the completion is the answer; mentions: a short completion that contains it ("It is cold.") also counts."""
    max_words: int = Field(default=8, ge=1)
    """Longest completion, in words, that `mentions` accepts."""
    held_out_percent: int = Field(default=20, ge=5, le=50)
    """Share of (word, skill) combinations that is never trained. Facts do not depend on it."""

    @property
    def name(self) -> str:
        return "instruct"

    @property
    def grader(self) -> Grader:
        return ExactTextGrader() if self.grading == "exact" else MentionsGrader(self.max_words)

    def is_held_out(self, skill: str, word: str) -> bool:
        """Whether no question about this skill of this word is ever trained. Facts have one held-out wording each instead."""
        return int(digest([skill, word]), 16) % 100 < self.held_out_percent

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """See TaskSource. Tasks go round the skills."""
        which = check_request(self.name, split, n)
        by_skill: dict[str, list[Task]] = {}
        for task in self._all(which):
            by_skill.setdefault(task.meta["skill"], []).append(task)
        skills = sorted(by_skill)
        if which == "train":
            rng = python_rng(seed, self.name, "train")
            return [rng.choice(by_skill[rng.choice(skills)]) for _ in range(n)]
        for skill in skills:
            python_rng(0, self.name, which, skill).shuffle(by_skill[skill])
        longest = max((len(tasks) for tasks in by_skill.values()), default=0)
        found = [by_skill[skill][turn] for turn in range(longest) for skill in skills if turn < len(by_skill[skill])]
        return first(self.name, which, found, n, "raise held_out_percent")

    def gold(self, task: Task) -> str:
        return task.answer

    def wrong(self, task: Task) -> str:
        """A fluent wrong answer: the other of yes and no, lower case for upper, otherwise a word that is never an answer."""
        if task.meta["skill"] == "category":
            return "no" if task.answer == "yes" else "yes"
        return task.answer.lower() if task.meta.get("case_sensitive") else "cabbage"

    def demonstration(self, task: Task) -> Demonstration:
        return demonstrate(task, self.gold(task))

    def _all(self, split: Split) -> Iterator[Task]:
        """Every task of a split. Splits are disjoint: each question belongs to one (word, skill), each fact's wording to one side."""
        if split == "harder":
            yield from _harder()
            return
        for skill, word, shown, answer, meta in _skills():
            if self.is_held_out(skill, word) == (split == "held_out"):
                yield from (_task(skill, wording, shown, answer, meta) for wording in range(len(WORDINGS[skill])))
        for position, (skill, word, answer) in enumerate(_facts()):
            reserved = position % len(WORDINGS[skill])  # neighbours differ, so that every wording is trained with some facts
            for wording in range(len(WORDINGS[skill])):
                if (wording == reserved) == (split == "held_out"):
                    yield _task(skill, wording, word, answer, {})


def _task(skill: str, wording: int, shown: str, answer: str, meta: dict[str, object]) -> Task:
    prompt = WORDINGS[skill][wording].format(x=shown)
    identity = f"instruct-{skill}-{wording}-{shown.replace(', ', '-').replace(' ', '-')}"
    return Task(identity, (Message("user", prompt),), answer, {"skill": skill, **meta})


def _skills() -> Iterator[tuple[str, str, str, str, dict[str, object]]]:
    """(skill, word it is held out by, what is shown, answer, meta) for everything that can be worked out."""
    for word in WORDS:
        yield "repeat", word, word, word, {}
        yield "upper", word, word, word.upper(), {"case_sensitive": True}
        yield "plural", word, word, f"{word}s", {}
        rng = python_rng(0, "instruct", "lists", word)
        others = [other for other in WORDS if other != word]
        for _ in range(_LISTS_PER_WORD):
            pair = rng.sample(others, 2)
            yield "first", word, ", ".join([word, *pair]), word, {"rivals": pair}
            yield "last", word, ", ".join([*pair, word]), word, {"rivals": pair}
        own = next(category for category, words in CATEGORIES.items() if word in words)
        article = "an" if word[0] in "aeio" else "a"
        # as many questions whose answer is no as yes: "always yes" must not do well
        other = rng.choice([category for category in CATEGORIES if category != own])
        yield "category", word, f"{article} {word} {own}", "yes", {"rivals": ["no"]}
        yield "category", word, f"{article} {word} {other}", "no", {"rivals": ["yes"]}


def _facts() -> Iterator[tuple[str, str, str]]:
    """(skill, word, answer) for everything that must be known."""
    for one, other in OPPOSITES:
        yield "opposite", one, other
        yield "opposite", other, one
    for country, capital in CAPITALS:
        yield "capital", country, capital
    for greeting in GREETINGS:
        yield "greeting", greeting, REPLY


def _harder() -> Iterator[Task]:
    """Two words to repeat or to write in upper case, and lists of five."""
    for word in WORDS:
        rng = python_rng(0, "instruct", "harder", word)
        others = rng.sample([other for other in WORDS if other != word], 4)
        two = f"{word} {others[0]}"
        yield _task("repeat", 0, two, two, {})
        yield _task("upper", 0, two, two.upper(), {"case_sensitive": True})
        yield _task("first", 0, ", ".join([word, *others]), word, {"rivals": others})
        yield _task("last", 0, ", ".join([*others, word]), word, {"rivals": others})
