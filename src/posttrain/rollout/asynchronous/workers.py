"""Workers: one thread each, with a sampler of its own, drawing while the trainer trains.

A thread only waits and hands over; whether its sampler computes in the thread, in another process or on another machine is the receiver's
business. Between two chunks it looks for newer weights, so a swap happens in flight, at most `chunk` tokens late.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from posttrain.core.errors import PosttrainError
from posttrain.engine.types import Completion, Request
from posttrain.rollout.asynchronous.flow import Chunk, Flow
from posttrain.rollout.asynchronous.jobs import Job

Weights = Any
"""What a hand takes its weights from: a module that nobody changes any more."""
PATIENCE = 10.0
"""Seconds that an ending run waits for a worker to finish its chunk."""


class WorkerFailed(PosttrainError):
    """A worker could not draw what it was given."""

    exit_code = 3


class Hand(Protocol):
    """A worker's sampler."""

    def deliver(self, weights: Weights, version: int) -> None:
        """Take over these weights, or raise."""
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See Sampler."""
        ...

    def close(self) -> None:
        """Let go of what draws."""
        ...


class Driver(Protocol):
    """Who moves the jobs along: threads, or a recorded schedule."""

    def open(self, step: int, version: int, weights: Weights | None) -> None:
        """A training step begins; None says that the weights are those of the last one."""
        ...

    def changing(self) -> AbstractContextManager[object]:
        """Held while the jobs are changed or read from outside."""
        ...

    def take(self, n: int) -> list[Job]:
        """The next n finished jobs; waits for them."""
        ...

    def seal(self) -> None:
        """The step's groups are taken; its training follows, after which its weights are gone."""
        ...

    def close(self) -> None:
        """Stop drawing. What is unfinished stays in the flow."""
        ...


@dataclass(frozen=True, slots=True)
class Published:
    """The newest weights. Example: Published(7, a copy of the model as it was after 7 optimizer steps)"""

    version: int
    weights: Weights


class Crew:
    """Threads around the flow; a Driver.

    Args:
        flow: the jobs; touched under `changing` only.
        hands: one sampler per worker; closed with the crew.
    """

    def __init__(self, flow: Flow, hands: Sequence[Hand]):
        self.flow, self.hands = flow, hands
        self._changed = threading.Condition()
        self._published: Published | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(worker, hand), name=f"rollouts-{worker}", daemon=True)
            for worker, hand in enumerate(hands)
        ]
        for thread in self._threads:
            thread.start()

    def open(self, step: int, version: int, weights: Weights | None) -> None:
        """See Driver."""
        with self._changed:
            self.flow.open(step, version)
            if weights is not None:
                self._published = Published(version, weights)

    def changing(self) -> AbstractContextManager[object]:
        """See Driver; workers look for new jobs afterwards."""
        return _Changing(self._changed)

    def take(self, n: int) -> list[Job]:
        """See Driver. Raises what a worker failed of."""
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                for number in self.flow.too_old():
                    self.flow.again(number)
                    self._changed.notify_all()
                numbers = self.flow.pick(n)
                if numbers is not None:
                    return self.flow.take(numbers)
                self._changed.wait()

    def seal(self) -> None:
        """Nothing: workers keep a copy of the weights."""

    def close(self) -> None:
        """End the threads, each after the chunk it is at."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(PATIENCE)
        for hand in self.hands:
            hand.close()

    def _work(self, worker: int, hand: Hand) -> None:
        holds: int | None = None
        chunk: Chunk | None = None
        try:
            while (given := self._next(worker)) is not None:
                chunk, published = given
                if holds != published.version:
                    hand.deliver(published.weights, published.version)
                    holds = published.version
                completions = hand.generate(chunk.requests)
                turns = self.flow.turns(chunk, completions)
                with self._changed:
                    if self._closing:
                        return
                    self.flow.apply(chunk, completions, turns)
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the trainer's thread raises it: a dead worker must not look like a slow one
            with self._changed:
                self._failure = self._failure or named(error, worker, chunk, self.flow)
                self._changed.notify_all()

    def _next(self, worker: int) -> tuple[Chunk, Published] | None:
        """The worker's next chunk and the weights to draw it with; None when the crew closes."""
        with self._changed:
            while True:
                if self._closing or self._failure is not None:
                    return None
                chunk = self.flow.compose(worker) if self._published is not None else None
                if chunk is not None and self._published is not None:
                    return chunk, self._published
                self._changed.wait()


class _Changing:
    """Holds the lock and wakes everybody at the end."""

    def __init__(self, changed: threading.Condition):
        self._changed = changed

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(self, *error: object) -> None:
        self._changed.notify_all()
        self._changed.release()


def named(error: BaseException, worker: int, chunk: Chunk | None, flow: Flow) -> BaseException:
    """The error of a worker with the jobs it was at: a user's error stays one line, any other keeps its traceback as the cause."""
    numbers = sorted({number for number, _ in chunk.keys}) if chunk else []
    tasks = [flow.jobs[number].task.id for number in numbers if number in flow.jobs]
    where = f"worker {worker} failed at job(s) {_some(numbers)} (task(s) {_some(tasks)})"
    kind: type[Exception] = WorkerFailed if isinstance(error, PosttrainError) else RuntimeError
    wrapped = kind(f"{where}: {'' if isinstance(error, PosttrainError) else type(error).__name__ + ': '}{error}")
    wrapped.__cause__ = error
    return wrapped


def _some(things: Sequence[object]) -> str:
    return ", ".join(str(thing) for thing in things[:3]) + (f" and {len(things) - 3} more" if len(things) > 3 else "")
