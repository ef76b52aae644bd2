"""The recorded schedule, and a driver that repeats it.

One line per change, in the order of the changes:

    {"kind": "issue", "step": 3, "draw": [5, 0, 4, 0]}                 the tasks of step 5 were issued at the start of step 3
    {"kind": "chunk", "step": 3, "version": 3, "worker": 0, "limit": 16, "rows": [[12, 0, 0, 16], [12, 1, 0, 9]]}
                                                                       job 12: sibling 0 went from 0 to 16 tokens, sibling 1 to 9
    {"kind": "take", "step": 4, "version": 4, "jobs": [8, 9, 12, 10]}  a training step took these groups
    {"kind": "again", "step": 4, "job": 7, "as": 20}                   job 7 had grown too old; its task is job 20
    {"kind": "resume", "issued": 20}                                   the run was continued from a checkpoint, with fresh samplers

A chunk is written when it ends. It may end after a later version was published and was still drawn with its own, so the replay draws all
chunks of a step's weights before it trains that step, and enters each where its line stands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from posttrain.core.errors import PosttrainError, RunError
from posttrain.core.files import read_jsonl
from posttrain.engine.types import Completion
from posttrain.rollout.asynchronous.flow import Chunk, Flow, Key, Line
from posttrain.rollout.asynchronous.jobs import Job
from posttrain.rollout.asynchronous.rows import Row, Turn
from posttrain.rollout.asynchronous.workers import Hand, Weights


class ReplayError(PosttrainError):
    """The schedule and what happens now are not the same run."""


def read_schedule(file: Path) -> list[Line]:
    """The lines of a schedule. Raises RunError when there are none."""
    lines = read_jsonl(file)
    if not lines:
        raise RunError(f"{file} holds no schedule; asynchronous.replay takes the directory of an asynchronous run, or its schedule file")
    return [{key: value for key, value in line.items() if key != "schema"} for line in lines]


class Replayer:
    """Repeats a schedule in the calling thread; a Driver.

    Args:
        flow: fresh, as the recorded run's was.
        lines: the schedule.
        hand: makes a sampler; every worker of the recorded run gets one, since a sampler may remember what it has read.
    """

    def __init__(self, flow: Flow, lines: Sequence[Line], hand: Callable[[], Hand]):
        self.flow, self.lines, self._hand = flow, lines, hand
        self._next = 0
        self._of_step: dict[int, list[int]] = defaultdict(list)
        for place, line in enumerate(lines):
            if line["kind"] == "chunk":
                self._of_step[line["step"]].append(place)
        self._drawn: dict[int, tuple[list[Completion], list[Turn | None]]] = {}
        """What came of chunks that are drawn and whose line has not come up."""
        self._rows: dict[Key, Row] = {}
        """Siblings in flight with everything that is drawn, also what is not entered yet."""
        self._hands: dict[int, Hand] = {}
        self._holds: dict[int, int] = {}
        self._weights: Weights | None = None
        flow.listeners.append(self._confirm)

    def open(self, step: int, version: int, weights: Weights | None) -> None:
        """See Driver."""
        self._catch_up()
        while self._next < len(self.lines) and self.lines[self._next]["kind"] == "resume":
            self._hands, self._holds = {}, {}
            self.flow.emit({"kind": "resume", "issued": self.flow.issued})
        self.flow.open(step, version)
        self._weights = self._weights if weights is None else weights

    def changing(self) -> AbstractContextManager[object]:
        """See Driver: what ended before the change is entered before it."""
        self._catch_up()
        return nullcontext()

    def take(self, n: int) -> list[Job]:
        """See Driver. Raises ReplayError when the schedule says otherwise."""
        while self._next < len(self.lines):
            line = self.lines[self._next]
            if line["kind"] == "chunk":
                self._enter(self._next, line)
            elif line["kind"] == "again" and line["job"] in self.flow.too_old():
                self.flow.again(line["job"])
            elif line["kind"] == "take" and len(line["jobs"]) == n and self.flow.jobs.keys() >= set(line["jobs"]):
                return self.flow.take(line["jobs"])
            else:
                raise ReplayError(f"schedule line {self._next + 1} is {line}, and step {self.flow.step} takes {n} groups; {_REMEDY}")
        raise ReplayError(
            f"the schedule ends before step {self.flow.step} has its groups; replay with at most the steps that were recorded"
        )

    def seal(self) -> None:
        """Draw every chunk of these weights whose line has not come up."""
        for place in self._of_step.pop(self.flow.step, ()):
            if place >= self._next and place not in self._drawn:
                self._draw(place, self.lines[place])

    def close(self) -> None:
        """Nothing to stop."""

    def _catch_up(self) -> None:
        while (
            self._next < len(self.lines) and self.lines[self._next]["kind"] == "chunk" and self.lines[self._next]["step"] <= self.flow.step
        ):
            self._enter(self._next, self.lines[self._next])

    def _enter(self, place: int, line: Line) -> None:
        if place not in self._drawn:
            self._draw(place, line)
        chunk = self._chunk(line, {key: self.flow.jobs[key[0]].rows[key[1]] for key in _keys(line)})
        self.flow.waiting -= set(chunk.keys)
        self.flow.apply(chunk, *self._drawn.pop(place))
        for number, index in chunk.keys:
            if self.flow.jobs[number].rows[index].stop is not None:
                del self._rows[number, index]

    def _draw(self, place: int, line: Line) -> None:
        if line["version"] != self.flow.version or self._weights is None:
            detail = f"was drawn with version {line['version']}, and the weights are at {self.flow.version}"
            raise ReplayError(f"schedule line {place + 1} {detail}; {_REMEDY}")
        worker = line["worker"]
        if worker not in self._hands:
            self._hands[worker] = self._hand()
        if self._holds.get(worker) != line["version"]:
            self._hands[worker].deliver(self._weights, line["version"])
            self._holds[worker] = line["version"]
        rows = {key: self._row(key) for key in _keys(line)}
        chunk = self._chunk(line, rows)
        completions = self._hands[worker].generate(chunk.requests)
        turns = self.flow.source.turns([self.flow.jobs[number].task for number, _ in rows], list(rows.values()), completions)
        for row, request, done, turn in zip(rows.values(), chunk.requests, completions, turns, strict=True):
            row.extend(done, request.room, turn)
        self._drawn[place] = (completions, turns)

    def _row(self, key: Key) -> Row:
        if key[0] not in self.flow.jobs:
            raise ReplayError(f"the schedule draws job {key[0]}, which is not in flight; {_REMEDY}")
        if key not in self._rows:
            self._rows[key] = self.flow.jobs[key[0]].rows[key[1]].ahead()
        return self._rows[key]

    def _chunk(self, line: Line, rows: Mapping[Key, Row]) -> Chunk:
        requests = [self.flow.source.request(self.flow.jobs[key[0]], row, line["limit"]) for key, row in rows.items()]
        return Chunk(line["worker"], line["step"], line["version"], line["limit"], tuple(rows), tuple(requests))

    def _confirm(self, line: Line) -> None:
        """A change that just happened must be the next line."""
        said = self.lines[self._next] if self._next < len(self.lines) else "the end"
        if line != said:
            raise ReplayError(f"schedule line {self._next + 1} is {said}, and what happened is {line}; {_REMEDY}")
        self._next += 1


def _keys(line: Line) -> list[Key]:
    return [(number, index) for number, index, _, _ in line["rows"]]


_REMEDY = "replay with the settings, model and code of the recorded run"
