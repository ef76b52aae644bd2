"""Any data set of the reasoning-gym package (procedural tasks with their own scoring) as a task source."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.seeds import derive
from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.core.trajectory import RewardStatus, Score
from posttrain.envs.types import Split, check_request, demonstrate, first
from posttrain.rewards.extract import marked_line

_SEEDS: dict[Split, int] = {"held_out": 0, "harder": 1_000_000, "train": 10_000_000}
"""Where each split's seeds begin. reasoning-gym seeds item i with seed + i, so ranges that only differ by one would overlap."""
_CHUNK = 1_000
"""Items per generator. Some data sets prepare all their items up front, so the size must stay modest; further items use further seeds."""
_TRIES = 40
"""Items generated per item kept before a data set is judged too small."""
_KEPT_GENERATORS = 32
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tagged(text: str) -> str | None:
    """The content of the only <answer>...</answer> of `text`, stripped; None for none, two, or a stray tag."""
    found = _TAGGED.findall(text)
    if len(found) != 1 or text.count("<answer>") != 1 or text.count("</answer>") != 1:
        return None
    return found[0].strip() or None


@dataclass(frozen=True, slots=True)
class _Generated:
    """One seeded data set and the entries it was asked for so far."""

    dataset: Any
    entries: dict[int, dict[str, Any]] = field(default_factory=dict)

    def entry(self, index: int) -> dict[str, Any]:
        if index not in self.entries:
            self.entries[index] = self.dataset[index]
        return self.entries[index]


@dataclass(frozen=True, slots=True)
class GymGrader:
    """The data set's own `score_answer` on the extracted answer; below full marks is 0 unless the source counts partial marks.

    The entry is generated anew from the task's seed and index, so that tasks read back from a run can be judged again.
    """

    source: Gym
    name: str

    def __call__(self, task: Task, text: str) -> Score:
        answer = tagged(text) if self.source.form == "tag" else marked_line(text)
        if answer is None:
            return Score(0.0, RewardStatus.UNPARSEABLE, grader=self.name, detail=f"no single answer in {self.source.form} form")
        value = self.source.judge(task, answer)
        counted = value if self.source.partial or value >= 1.0 else 0.0
        return Score(counted, RewardStatus.SCORED, answer[:200], self.name, f"score_answer {value:g}")


class Gym(Config):
    """Tasks of one reasoning-gym data set; needs the `reasoning-gym` package.

    Example: Gym(dataset="chain_sum", settings={"max_terms": 3}, harder={"min_terms": 5, "max_terms": 6})
    """

    dataset: str
    """Name of the data set, e.g. "basic_arithmetic"."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Its own settings, without seed and size."""
    harder: dict[str, Any] = Field(default_factory=dict)
    """Settings that differ in the harder split; empty means that there is none."""
    held_out_size: int = Field(default=128, ge=1)
    """How many held-out (and harder) questions are set aside; none of them is ever trained."""
    form: Literal["tag", "marker"] = "tag"
    """Where the answer stands: between <answer> and </answer> (may span lines), or on the line after '####'."""
    partial: bool = False
    """Pass the data set's partial marks through instead of counting only full marks."""
    instruction: str | None = None
    """Appended to the question; None chooses the one that fits `form`, "" adds nothing."""
    _pools: dict[str, list[Task]] = PrivateAttr(default_factory=dict)
    _generated: dict[tuple[Split, int], _Generated] = PrivateAttr(default_factory=dict)

    @property
    def name(self) -> str:
        return f"gym-{self.dataset}"

    @property
    def grader(self) -> GymGrader:
        return GymGrader(self, f"gym-{self.dataset}-{self.form}{'-partial' if self.partial else ''}/1")

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """See TaskSource. ConfigError names the nearest data set for an unknown name."""
        which = check_request(self.name, split, n)
        if which != "train":
            return first(self.name, which, self._pool(which), n, "raise held_out_size")
        barred = {_question(task) for task in self._pool("held_out")}
        if self.harder:
            barred |= {_question(task) for task in self._pool("harder")}
        start = _SEEDS["train"] + derive(seed, self.name, "train") % 2**30
        drawn = []
        for task in self._stream("train", start, _TRIES * n):
            if _question(task) not in barred:
                drawn.append(task)
            if len(drawn) == n:
                return drawn
        raise ConfigError(f"{self.name}: nearly every question is held out; lower held_out_size or widen settings")

    def gold(self, task: Task) -> str:
        return self._form(task.answer)

    def wrong(self, task: Task) -> str:
        """The right form around words that answer nothing."""
        return self._form("none of these")

    def demonstration(self, task: Task) -> Demonstration:
        return demonstrate(task, self.gold(task))

    def judge(self, task: Task, answer: str) -> float:
        """The data set's score in [0, 1] of a bare answer."""
        generated = self._generator(task.meta["split"], task.meta["seed"])
        return float(generated.dataset.score_answer(answer, generated.entry(task.meta["index"])))

    def _form(self, answer: str) -> str:
        return f"<answer>{answer}</answer>" if self.form == "tag" else f"#### {answer}"

    def _pool(self, split: Split) -> list[Task]:
        if split == "harder" and not self.harder:
            raise ConfigError(f"{self.name}: no harder split; set harder to the settings that differ, e.g. harder={{'min_terms': 6}}")
        if split not in self._pools:
            barred = {_question(task) for task in self._pool("held_out")} if split == "harder" else set[str]()
            kept: dict[str, Task] = {}
            for task in self._stream(split, _SEEDS[split], _TRIES * self.held_out_size):
                if _question(task) not in barred:
                    kept.setdefault(_question(task), task)
                if len(kept) == self.held_out_size:
                    break
            self._pools[split] = list(kept.values())
        return self._pools[split]

    def _stream(self, split: Split, seed: int, size: int) -> Iterator[Task]:
        default = "Give the answer between <answer> and </answer>." if self.form == "tag" else "Give the answer after '####'."
        instruction = default if self.instruction is None else self.instruction
        for position in range(size):
            chunk_seed, index = seed + position // _CHUNK * _CHUNK, position % _CHUNK
            entry = self._generator(split, chunk_seed).entry(index)
            question = str(entry["question"])
            prompt = f"{question}\n{instruction}" if instruction else question
            meta = {"split": split, "seed": chunk_seed, "index": index}
            yield Task(f"{self.name}-{split}-{chunk_seed}-{index}", (Message("user", prompt),), str(entry["answer"]), meta)

    def _generator(self, split: Split, seed: int) -> _Generated:
        if (split, seed) not in self._generated:
            if len(self._generated) >= _KEPT_GENERATORS:  # every training seed makes one; the oldest is the least likely to be asked again
                self._generated.pop(next(iter(self._generated)), None)
            self._generated[split, seed] = _Generated(self._create(split, seed))
        return self._generated[split, seed]

    def _create(self, split: Split, seed: int) -> Any:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError:
            raise ConfigError("gym needs the package reasoning-gym; install it with: pip install reasoning-gym") from None
        if self.dataset not in DATASETS:
            near = difflib.get_close_matches(self.dataset, DATASETS, n=1, cutoff=0.4)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {len(DATASETS)}, e.g. {', '.join(sorted(DATASETS)[:5])}"
            raise ConfigError(f"reasoning-gym has no data set '{self.dataset}'; {hint}")
        settings = {**self.settings, **(self.harder if split == "harder" else {})}
        if {"seed", "size"} & settings.keys():
            raise ConfigError(f"{self.name}: settings must not hold seed or size; they are chosen per split")
        try:
            return reasoning_gym.create_dataset(self.dataset, seed=seed, size=_CHUNK, **settings)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(f"{self.name}: settings {settings} are refused: {error}") from None


def _question(task: Task) -> str:
    """The prompt without differences of spacing: what two tasks must not share."""
    return " ".join(task.prompt[0].content.split())
