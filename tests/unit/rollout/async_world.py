"""A world for asynchronous rollouts without a model: lengths are a function of seeds, and time is a number."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, RewardStatus, Score, StopReason, Tokens
from posttrain.engine.processes import Ranks
from posttrain.engine.types import Completion, Request
from posttrain.objectives.objective import Objective
from posttrain.rollout.asynchronous.flow import Chunk, Flow
from posttrain.rollout.asynchronous.jobs import Job, Source
from posttrain.rollout.asynchronous.live import Live
from posttrain.rollout.asynchronous.settings import Async
from posttrain.rollout.collect import Collector

FAST, SLOW = 4, 40
"""Mean tokens of a completion: half of the tasks take ten times longer."""
REINFORCE = Objective.load({"advantage": {"kind": "none"}, "kl": {"estimator": "none", "coef": 0.0}})


def draw_tasks(n: int, seed: int) -> list[Task]:
    """Fast and slow tasks, half and half on average."""
    rng = python_rng(seed, "world")
    kinds = rng.choices(("fast", "slow"), k=n)
    return [Task(f"{kind}-{rng.randrange(8)}", (Message("user", kind),), "x") for kind in kinds]


class Speech:
    """Renders a task as two ids, the second of which is its mean length."""

    def prompt(self, messages: Sequence[Message]) -> Tokens:
        mean = SLOW if messages[-1].content == "slow" else FAST
        return Tokens((1, mean), (Owner.TEMPLATE, Owner.USER))

    def reply(self, before: Sequence[Message], messages: Sequence[Message]) -> Tokens:
        assert before[-1].role == "assistant"
        return Tokens((90, 91), (Owner.TOOL, Owner.TEMPLATE))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)


class Judge:
    """Scores 1 or 0 by the first token; raises where it is told to."""

    name = "judge/1"

    def __init__(self, fails: Callable[[str], bool] = lambda text: False):
        self._fails = fails

    def __call__(self, task: Task, text: str) -> Score:
        if self._fails(text):
            raise RuntimeError("the judge has left")
        return Score(float(int(text.split()[0]) % 2), RewardStatus.SCORED, grader=self.name)


def length_of(request: Request) -> int:
    """Half to one and a half times the mean, by the request's own seed."""
    return _length(request.prompt[1], request.seed)


@cache
def _length(mean: int, seed: int) -> int:
    return max(1, round(mean * (0.5 + python_rng(seed, "length").random())))


def complete(request: Request, version: int) -> Completion:
    """What the world's sampler draws: token t of a completion is a function of seed and t alone."""
    total = min(length_of(request), request.sampling.max_tokens)
    before, n = len(request.drawn), min(total - len(request.drawn), request.room)
    ids = tuple((request.seed + t) % 97 for t in range(before, before + n))
    ends = before + n == total
    cut = total < length_of(request)
    stop = (StopReason.LENGTH if cut else StopReason.END) if ends else StopReason.PAUSED
    return Completion(ids, (-1.0,) * n, stop, version)


class Scripted:
    """A worker's sampler in the world. `before(requests)` is called first and may wait or raise."""

    def __init__(self, before: Callable[[Sequence[Request]], None] = lambda requests: None):
        self.before, self.version, self.delivered = before, -1, []
        self.closed = False

    def deliver(self, weights: Any, version: int) -> None:
        self.delivered.append((weights, version))
        self.version = version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.before(requests)
        return [complete(request, self.version) for request in requests]

    def close(self) -> None:
        self.closed = True


def source(siblings: int = 4, grader: Any = None, max_tokens: int = 64, seed: int = 0) -> Source:
    """Jobs of the world."""
    collector = Collector(None, Speech(), grader or Judge(), Sampling(max_tokens=max_tokens), siblings, Ranks())  # type: ignore[arg-type]
    return Source(draw_tasks, collector, seed, "rl")


@dataclass
class Clock:
    """A Driver in which every token takes a unit of time and training takes `training`; workers are as parallel as real ones."""

    flow: Flow
    training: float = 20.0
    now: float = 0.0
    waited: float = 0.0
    """Time in which the trainer had nothing to do."""
    busy: list[tuple[float, int, Chunk]] = field(default_factory=list)

    def open(self, step: int, version: int, weights: Any) -> None:
        self.flow.open(step, version)

    def changing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def take(self, n: int) -> list[Job]:
        while True:
            for number in self.flow.too_old():
                self.flow.again(number)
            self._start()
            numbers = self.flow.pick(n)
            if numbers is not None:
                return self.flow.take(numbers)
            before = self.now
            self._finish()
            self.waited += self.now - before

    def seal(self) -> None:
        end = self.now + self.training
        self._start()
        while self.busy and self.busy[0][0] <= end:
            self._finish()
            self._start()
        self.now = end

    def close(self) -> None:
        pass

    def _start(self) -> None:
        for worker in sorted(set(range(self.flow.settings.workers)) - {worker for _, worker, _ in self.busy}):
            chunk = self.flow.compose(worker)
            if chunk is None:
                return
            longest = max(len(complete(request, chunk.version).ids) for request in chunk.requests)
            heapq.heappush(self.busy, (self.now + longest, worker, chunk))

    def _finish(self) -> None:
        self.now, _, chunk = heapq.heappop(self.busy)
        completions = [complete(request, chunk.version) for request in chunk.requests]
        self.flow.apply(chunk, completions, self.flow.turns(chunk, completions))


@dataclass(frozen=True)
class Lived:
    """What a simulated run did."""

    live: Live
    driver: Clock
    consumed: list[str]
    """Task of each group that was taken."""
    lengths: list[int]
    metrics: list[dict[str, float | int]]

    @property
    def slow(self) -> float:
        """Share of slow tasks among those consumed."""
        return sum(task.startswith("slow") for task in self.consumed) / len(self.consumed)


def simulate(settings: Async, steps: int = 60, prompts: int = 8, siblings: int = 4, seed: int = 0, training: float = 20.0) -> Lived:
    """A run of one optimizer step per step; every step trains all groups of mixed rewards."""
    flow = Flow(source(siblings, seed=seed), settings, settings.ahead(1))
    driver = Clock(flow, training)
    live = Live(flow, driver, steps)
    consumed: list[str] = []
    lengths: list[int] = []
    metrics = []
    for step in range(steps):
        filled = live.fill(step, step, None, prompts, 1.0, lambda group: True)
        consumed += [group.task.id for group in filled.generated]
        lengths += [len(rollout.trajectory.ids) for group in filled.generated for rollout in group.rollouts]
        metrics.append(live.settle(filled, {}, REINFORCE))
    return Lived(live, driver, consumed, lengths, metrics)
