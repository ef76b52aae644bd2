"""Parts that are handed to a run in place of sound ones: graders, samplers, worlds and task streams that carry one fault each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tests.matrix.live_bases import ANSWERS, draw, prompt_of, speech, task_of
from torch import nn

from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import RewardStatus, Score
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Sampler
from posttrain.render.tool_calls import BadCall, parse
from posttrain.rewards.graders import FunctionGrader
from posttrain.rewards.types import Grader


def right(task: Task, text: str) -> float:
    """1 for the right letter alone."""
    return float(text == task.answer)


def paid(fn: Callable[[Task, str], object]) -> Callable[[], Grader]:
    """A grader factory from a user's function."""
    return lambda: FunctionGrader(fn, "paid/1")  # type: ignore[arg-type]


@dataclass
class Later:
    """One grader for the first `calls` judgements, another from then on."""

    first: Grader
    then: Grader
    calls: int
    name: str = "later/1"

    def __call__(self, task: Task, text: str) -> Score:
        self.calls -= 1
        return (self.first if self.calls >= 0 else self.then)(task, text)


@dataclass(frozen=True)
class Strict:
    """Wants "#### LETTER", as another extractor would."""

    name: str = "strict/1"

    def __call__(self, task: Task, text: str) -> Score:
        if not text.startswith("#### "):
            return Score(0.0, RewardStatus.UNPARSEABLE, grader=self.name, detail="no ####")
        return Score(float(text[5:] == task.answer), RewardStatus.SCORED, text[5:], self.name)


@dataclass(frozen=True)
class Lettered:
    """One of the answer's letters and nothing else, or it cannot be parsed; 1 for the right one."""

    name: str = "lettered/1"

    def __call__(self, task: Task, text: str) -> Score:
        if text not in ANSWERS.values():
            return Score(0.0, RewardStatus.UNPARSEABLE, grader=self.name, detail="not one of the letters")
        return Score(right(task, text), RewardStatus.SCORED, text, self.name)


@dataclass(frozen=True)
class Lenient:
    """Half a point for an answer that it cannot read."""

    name: str = "lenient/1"

    def __call__(self, task: Task, text: str) -> Score:
        found = Lettered()(task, text)
        return found if found.status is RewardStatus.SCORED else Score(0.5, RewardStatus.UNPARSEABLE, grader=self.name)


@dataclass(frozen=True)
class Gated:
    """Form is paid only when the answer is right, and it never is."""

    name: str = "gated/1"

    def __call__(self, task: Task, text: str) -> Score:
        correct, form = right(task, text), float(text.startswith("#"))
        return Score(correct * form, RewardStatus.SCORED, text, self.name, parts=(("correct", correct), ("form", form)))


class Stale:
    """Samples from a copy of the weights that it saw first, whatever is delivered."""

    def __init__(self) -> None:
        self._held: nn.Module | None = None

    def __call__(self, model: nn.Module) -> Sampler:
        if self._held is None:
            self._held = copy.deepcopy(model)
        return local(self._held)


class Noisy:
    """Samples from weights with noise on them, from its `since`-th sampler on."""

    def __init__(self, scale: float, since: int = 0):
        self._scale, self._since, self._made = scale, since, 0

    def __call__(self, model: nn.Module) -> Sampler:
        self._made += 1
        if self._made <= self._since:
            return local(model)
        held, generator = copy.deepcopy(model), torch.Generator().manual_seed(self._made)
        with torch.no_grad():
            for parameter in held.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=self._scale)
        return local(held)


def local(model: nn.Module) -> LocalSampler:
    """The plain sampler over a model."""
    _, renderer = speech()
    return LocalSampler(model, renderer.stop_ids, renderer.special_ids)


class Shelf:
    """A world that answers every call with what it has seen; an answer without a call ends the episode."""

    def reply(self, text: str) -> tuple[Message, ...]:
        return (Message("tool", "seen"),) if parse(text) else ()


class Failing:
    """A world whose tool gives out: it answers everything, calls or not, until an episode has had `most` answers."""

    def __init__(self, most: int):
        self._left = most

    def reply(self, text: str) -> tuple[Message, ...]:
        self._left -= 1
        return (Message("tool", "seen"),) if self._left >= 0 else ()


class Worlds:
    """Shelves for the first `sound` episodes, failing tools after them."""

    def __init__(self, sound: int, most: int):
        self._sound, self._most = sound, most

    def __call__(self, task: Task) -> Shelf | Failing:
        self._sound -= 1
        return Shelf() if self._sound >= 0 else Failing(self._most)


def calls_of(text: str) -> int:
    """Calls in a text that can be read."""
    return sum(not isinstance(call, BadCall) for call in parse(text))


def easy_or_impossible(keys: str = "cd") -> Callable[[int, int], Sequence[Task]]:
    """Tasks of the keys a and b as they are; those of `keys` want an answer that nobody gives."""

    def drawn(n: int, seed: int) -> list[Task]:
        rng = python_rng(seed, "matrix", "easy or impossible")
        prompts = [prompt_of(rng) for _ in range(n)]
        return [task_of(prompt, "q" if prompt[0] in keys else None) for prompt in prompts]

    return drawn


class Turning:
    """One stream of tasks for the first `steps` draws, another from then on."""

    def __init__(self, then: Callable[[int, int], Sequence[Task]], steps: int):
        self._then, self._left = then, steps

    def __call__(self, n: int, seed: int) -> Sequence[Task]:
        self._left -= 1
        return (draw if self._left >= 0 else self._then)(n, seed)
