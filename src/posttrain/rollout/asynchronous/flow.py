"""Where every job is: waiting, being drawn, arrived, taken. A state machine without threads or clocks; whoever drives it decides when.

    issue -> waiting -> chunk -> waiting (paused) -> chunk -> ... -> arrived -> taken by a training step
                                                                        \\-> too old: discarded, its task issued again

Every change is one line of the schedule, so the lines alone bring another run through the same states (schedule.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from posttrain.engine.types import Completion, Request
from posttrain.rollout.asynchronous.accounting import Count, Ledger
from posttrain.rollout.asynchronous.jobs import Draw, Job, Source
from posttrain.rollout.asynchronous.rows import Turn
from posttrain.rollout.asynchronous.settings import Async

Key = tuple[int, int]
"""Job number and sibling."""
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one worker draws in one go, with one set of weights.

    Example: Chunk(worker=0, step=3, version=3, limit=16, keys=((12, 0), (12, 1)), requests=(...)): up to 16 tokens of two siblings.
    """

    worker: int
    step: int
    version: int
    limit: int
    keys: tuple[Key, ...]
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """The buffer at the moment when groups were last taken from it, while workers go on filling it."""

    generated: Count = field(default_factory=Count)
    in_flight: Count = field(default_factory=Count)
    lengths: list[list[int]] = field(default_factory=list)
    """Tokens so far of every begun completion in flight, per job."""
    groups: int = 0
    """Jobs in flight, begun or not."""
    attempts: int = 0
    """Most times that the task of one of them was issued again."""


class Flow:
    """The jobs of one stage.

    Args:
        source: makes jobs and requests.
        settings: bound, order and sizes.
        ahead: training steps that a job may be issued before it is taken.
    """

    def __init__(self, source: Source, settings: Async, ahead: int):
        self.source, self.settings, self.ahead = source, settings, ahead
        self.listeners: list[Callable[[Line], None]] = []
        """Told of every change, in order."""
        self.step = self.version = 0
        self.issued = 0
        self.batches = 0
        """Calls with number 0 that were made: the steps whose first tasks are issued."""
        self.jobs: dict[int, Job] = {}
        """Every job that no training step has taken."""
        self.waiting: set[Key] = set()
        self.arrived: list[int] = []
        """Finished jobs, in the order in which they finished."""
        self.ledger = Ledger()
        self.seen = Seen()

    def emit(self, line: Line) -> None:
        """Report a change."""
        for listener in self.listeners:
            listener(line)

    # --- in ---------------------------------------------------------------------------------------------------------------------------

    def open(self, step: int, version: int) -> None:
        """A training step begins, on weights of this version."""
        self.step, self.version = step, version

    def issue(self, call: int, n: int, label: int, batch: int | None = None) -> None:
        """Issue n tasks: call `call` of the present step, or the first call of step `batch` ahead of it."""
        draw = Draw(self.step if batch is None else batch, call, n, label)
        self._add(self.source.jobs(draw, self.issued, self.step))
        self.emit({"kind": "issue", "step": self.step, "draw": draw.json()})

    def issue_ahead(self, n: int, steps: int) -> None:
        """Issue the first tasks of every step up to `ahead` from now, of a run of so many steps."""
        while self.batches <= min(self.step + self.ahead, steps - 1):
            self.issue(0, n, 0, batch=self.batches)
            self.batches += 1

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.jobs[job.number] = job
            self.issued += 1
            self.waiting |= {(job.number, index) for index in range(len(job.rows))}
            if not job.attempt:
                self.ledger.offered.append(job.task.id)

    # --- drawing ----------------------------------------------------------------------------------------------------------------------

    def compose(self, worker: int) -> Chunk | None:
        """Waiting completions for one worker: begun ones first, then by age; an equal share of what waits. None when nothing does."""
        if not self.waiting:
            return None
        share = min(self.settings.rows, -(-len(self.waiting) // self.settings.workers))
        keys = sorted(self.waiting, key=lambda key: (not self.jobs[key[0]].rows[key[1]].ids, key))[:share]
        self.waiting -= set(keys)
        requests = [self.source.request(self.jobs[number], self.jobs[number].rows[index], self.settings.chunk) for number, index in keys]
        return Chunk(worker, self.step, self.version, self.settings.chunk, tuple(keys), tuple(requests))

    def turns(self, chunk: Chunk, completions: Sequence[Completion]) -> list[Turn | None]:
        """What follows from each completion. Whoever drew the chunk has its rows alone, so nothing needs to be held meanwhile."""
        jobs = [self.jobs[number] for number, _ in chunk.keys]
        rows = [job.rows[index] for job, (_, index) in zip(jobs, chunk.keys, strict=True)]
        return self.source.turns([job.task for job in jobs], rows, completions)

    def apply(self, chunk: Chunk, completions: Sequence[Completion], turns: Sequence[Turn | None]) -> None:
        """Enter what a worker drew and what followed. Raises ValueError when that is not what it was asked for."""
        rows = []
        for (number, index), request, completion, turn in zip(chunk.keys, chunk.requests, completions, turns, strict=True):
            job = self.jobs[number]
            row = job.rows[index]
            if completion.version != chunk.version:
                raise ValueError(f"job {number} was to be drawn with version {chunk.version} and was drawn with {completion.version}")
            rows.append([number, index, len(row.ids), len(completion.ids)])
            self.ledger.generated.add(not row.ids, len(completion.ids))
            row.extend(completion, request.room, turn)
            if row.stop is None:
                self.waiting.add((number, index))
            elif job.done:
                self.arrived.append(number)
        line = {"kind": "chunk", "step": chunk.step, "version": chunk.version, "worker": chunk.worker, "limit": chunk.limit}
        self.emit({**line, "rows": rows})

    # --- out --------------------------------------------------------------------------------------------------------------------------

    def too_old(self) -> list[int]:
        """Finished jobs with a token older than the bound."""
        return [n for n in self.arrived if (oldest := self.jobs[n].oldest) is not None and self.version - oldest > self.settings.bound]

    def again(self, number: int) -> None:
        """Discard a finished job and issue its task again."""
        job = self.jobs.pop(number)
        self.arrived.remove(number)
        self.ledger.discard(job)
        self._add([self.source.again(job, self.issued, self.step)])
        self.emit({"kind": "again", "step": self.step, "job": number, "as": self.issued - 1})

    def pick(self, n: int) -> list[int] | None:
        """The n jobs to take next, or None while one of them is not finished.

        `due`: jobs that would be too old at the next step come first and are waited for, the rest as they arrived. There are never more
        than n of them (see `Async.ahead`): by step s - ahead at most (s + 1) n and as many replacements as were taken have been issued.
        """
        order = self.settings.order
        if order == "issue":
            chosen = sorted(self.jobs)[:n]
        else:
            due = [number for number in sorted(self.jobs) if order == "due" and self.step - self.jobs[number].step >= self.ahead][:n]
            chosen = due + [number for number in self.arrived if number not in due][: n - len(due)]
        finished = set(self.arrived)
        return sorted(chosen) if len(chosen) == n and finished.issuperset(chosen) else None

    def take(self, numbers: Sequence[int]) -> list[Job]:
        """Hand these jobs to the training step."""
        self.emit({"kind": "take", "step": self.step, "version": self.version, "jobs": list(numbers)})
        self.arrived = [number for number in self.arrived if number not in numbers]
        taken = [self.jobs.pop(number) for number in numbers]
        lengths = [[row.drawn for row in job.rows if row.ids] for job in self.jobs.values()]
        attempts = max((job.attempt for job in self.jobs.values()), default=0)
        self.seen = Seen(replace(self.ledger.generated), self.in_flight(), lengths, len(self.jobs), attempts)
        return taken

    # --- what is there ----------------------------------------------------------------------------------------------------------------

    def in_flight(self) -> Count:
        """Rollouts with at least one token that no training step has taken, and their tokens."""
        return Count(sum(job.begun for job in self.jobs.values()), sum(job.tokens for job in self.jobs.values()))

    def json(self) -> dict[str, Any]:
        """As plain values, for a checkpoint. What is being drawn counts as waiting: its tokens are drawn again."""
        jobs = [job.json() for job in self.jobs.values()]
        return {"issued": self.issued, "batches": self.batches, "jobs": jobs, "arrived": list(self.arrived), "ledger": self.ledger.json()}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """The inverse of `json`."""
        self.issued, self.batches, self.arrived = stored["issued"], stored["batches"], list(stored["arrived"])
        self.jobs = {job.number: job for job in self.source.restored(stored["jobs"])}
        self.waiting = {(job.number, index) for job in self.jobs.values() for index, row in enumerate(job.rows) if row.stop is None}
        self.ledger = Ledger.of(stored["ledger"])
        self.emit({"kind": "resume", "issued": self.issued})
