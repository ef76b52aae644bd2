"""GSM8K: grade-school word problems with worked solutions (Cobbe et al. 2021, arXiv:2110.14168), from the hub or from JSONL files."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import PrivateAttr

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.envs.files import read_rows, source_name
from posttrain.envs.types import Split, check_request, demonstrate, first
from posttrain.rewards.extract import hash_marker
from posttrain.rewards.graders import Extraction, MathGrader

INSTRUCTIONS: dict[Extraction, str] = {
    "hash": "Give the final number after '####'.",
    "boxed": r"Give the final number in \boxed{}.",
    "last_number": "End with the final number.",
}
_LOADED_BEFORE: dict[Split, tuple[Literal["held_out", "harder"], ...]] = {
    "held_out": (), "harder": ("held_out",), "train": ("held_out", "harder"),
}  # fmt: skip
"""The splits whose questions each split must not repeat."""
_CALCULATOR = re.compile(r"<<[^<>]*>>")
"""Calculator annotations of the data set, such as <<16-3=13>>: not text a model should write."""


class GSM8K(Config):
    """Rows with `question` and `answer` (a worked solution that ends in `#### number`).

    Example: GSM8K(train="train.jsonl", held_out="test.jsonl").tasks("held_out", 200, seed=0)
    """

    train: str = "openai/gsm8k@main:train"
    """JSONL or parquet path, or a hub id `name[@config][:split]`. Questions that also occur in held_out are left out."""
    held_out: str = "openai/gsm8k@main:test"
    harder: str | None = None
    """An optional third file for the harder split."""
    extraction: Extraction = "hash"
    """How the answer is found. last_number is lenient: for measuring a model that was never taught a form, not for training it."""
    instruction: str | None = None
    """Appended to the question on its own line; None chooses the one that fits `extraction`, "" adds nothing."""
    solution: Literal["full", "answer"] = "full"
    """Gold completions show the worked solution, or only the final answer."""
    _loaded: dict[str, list[Task]] = PrivateAttr(default_factory=dict)

    @property
    def name(self) -> str:
        return "gsm8k"

    @property
    def grader(self) -> MathGrader:
        return MathGrader(self.extraction)

    def tasks(self, split: str, n: int, seed: int) -> list[Task]:
        """See TaskSource. Training tasks repeat only after all were drawn; held-out tasks come in one fixed shuffled order."""
        which = check_request(self.name, split, n)
        pool = self._pool(which)
        if which != "train":
            return first(self.name, which, pool, n, "give a larger file")
        rng, drawn = python_rng(seed, self.name, "train"), list[Task]()
        while len(drawn) < n:
            drawn += rng.sample(pool, len(pool))
        return drawn[:n]

    def gold(self, task: Task) -> str:
        final = rf"\boxed{{{task.answer}}}" if self.extraction == "boxed" else f"#### {task.answer}"
        working = str(task.meta["working"]) if self.solution == "full" else ""
        return f"{working}\n{final}" if working else final

    def wrong(self, task: Task) -> str:
        """The right form with another number."""
        number = f"{task.answer}1"
        return rf"\boxed{{{number}}}" if self.extraction == "boxed" else f"#### {number}"

    def demonstration(self, task: Task) -> Demonstration:
        return demonstrate(task, self.gold(task))

    def _pool(self, split: Split) -> list[Task]:
        if split not in self._loaded:
            self._loaded[split] = self._load(split)
        return self._loaded[split]

    def _load(self, split: Split) -> list[Task]:
        source = {"train": self.train, "held_out": self.held_out, "harder": self.harder}[split]
        if source is None:
            raise ConfigError("gsm8k: the harder split has no file; set harder to a JSONL path or hub id")
        seen = {_key(task) for earlier in _LOADED_BEFORE[split] for task in self._known(earlier)}
        tasks = []
        for file, line, row in read_rows(source):
            task = self._task(f"{source_name(source)}-{line}", file, line, row)
            if _key(task) not in seen:
                seen.add(_key(task))
                tasks.append(task)
        if not tasks:
            raise DataError("every question also occurs in the held-out file; give separate files", file=source)
        if split != "train":
            python_rng(0, self.name, split).shuffle(tasks)
        return tasks

    def _known(self, split: Literal["held_out", "harder"]) -> list[Task]:
        return self._pool(split) if split == "held_out" or self.harder is not None else []

    def _task(self, identity: str, file: str, line: int, row: dict[str, object]) -> Task:
        question, answer = row.get("question"), row.get("answer")
        for field, value in (("question", question), ("answer", answer)):
            if not isinstance(value, str) or not value.strip():
                raise DataError(f"must be text, is {value!r}", file=file, line=line, field=field)
        final = hash_marker(str(answer))
        if final is None:
            raise DataError(f"must end in one '#### number', is ...{str(answer)[-40:]!r}", file=file, line=line, field="answer")
        instruction = INSTRUCTIONS[self.extraction] if self.instruction is None else self.instruction
        prompt = f"{str(question).strip()}\n{instruction}" if instruction else str(question).strip()
        working = _CALCULATOR.sub("", str(answer).split("####")[0]).strip()
        return Task(identity, (Message("user", prompt),), final, {"working": working})


def _key(task: Task) -> str:
    """The question without differences of case and spacing."""
    return " ".join(task.prompt[0].content.casefold().split())
