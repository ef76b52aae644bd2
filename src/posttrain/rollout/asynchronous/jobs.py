"""Jobs: what workers are given to draw. A job is one group, from its task to the completions of all its siblings.

The task stream and the seeds are those of the synchronous loop: call `call` of step `step` draws its n tasks from (seed, stage, "tasks",
step, call), and sibling `index` of the task at `place` from (seed, stage, step, label, place, index). A job is therefore known by its place
in the stream, and a checkpoint stores that place instead of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.seeds import derive
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Tokens
from posttrain.engine.types import Completion, Request
from posttrain.rollout.asynchronous.rows import Row, Turn
from posttrain.rollout.collect import Collector


@dataclass(frozen=True, slots=True)
class Draw:
    """One call of the task stream.

    Example: Draw(step=3, call=1, n=2, label=16): the second call of step 3, for 2 tasks, when 16 groups had been generated in it.
    """

    step: int
    call: int
    n: int
    label: int

    def json(self) -> list[int]:
        """As a list of numbers."""
        return [self.step, self.call, self.n, self.label]


@dataclass(slots=True)
class Job:
    """A group on its way. Example: Job(number=12, root=12, step=1, draw=Draw(3, 0, 4, 0), place=0, attempt=0, task=..., ...)."""

    number: int
    """Counts issued jobs."""
    root: int
    """Number of the first job of this task: another one when a job that had grown too old was issued again."""
    step: int
    """Training step at whose start it was issued."""
    draw: Draw
    place: int
    """Which of the draw's tasks."""
    attempt: int
    """How many times the task was issued before."""
    task: Task
    prompt: Tokens
    rows: list[Row]

    @property
    def done(self) -> bool:
        """Whether every sibling has ended."""
        return all(row.stop is not None for row in self.rows)

    @property
    def tokens(self) -> int:
        """Drawn so far."""
        return sum(row.drawn for row in self.rows)

    @property
    def begun(self) -> int:
        """Siblings with at least one token, or an end."""
        return sum(bool(row.ids) or row.stop is not None for row in self.rows)

    @property
    def oldest(self) -> int | None:
        """Version behind its oldest token; None before the first."""
        return min((min(row.versions) for row in self.rows if row.versions), default=None)

    def json(self) -> dict[str, Any]:
        """As plain values, for a checkpoint; the task is drawn again from its place."""
        place = {"number": self.number, "root": self.root, "step": self.step, "place": self.place, "attempt": self.attempt}
        return {**place, "draw": self.draw.json(), "rows": [row.json() for row in self.rows]}


class Source:
    """Makes jobs: tasks from the stream of (seed, stage), prompts in the model's template, a seed per sibling."""

    def __init__(self, tasks: Callable[[int, int], Sequence[Task]], collector: Collector, seed: int, name: str):
        self._tasks, self.collector, self._seed, self._name = tasks, collector, seed, name

    def tasks(self, draw: Draw) -> Sequence[Task]:
        """The tasks of one call of the stream."""
        return self._tasks(draw.n, derive(self._seed, self._name, "tasks", draw.step, draw.call))

    def jobs(self, draw: Draw, first: int, step: int) -> list[Job]:
        """Jobs `first`, `first` + 1, ... for the tasks of one call."""
        return [self._job(first + place, first + place, step, draw, place, 0, task) for place, task in enumerate(self.tasks(draw))]

    def again(self, job: Job, number: int, step: int) -> Job:
        """The task of `job` as a new job, drawn from other seeds."""
        return self._job(number, job.root, step, job.draw, job.place, job.attempt + 1, job.task)

    def restored(self, stored: Sequence[Mapping[str, Any]]) -> list[Job]:
        """Jobs as a checkpoint holds them, each with its task."""
        drawn: dict[Draw, Sequence[Task]] = {}
        jobs = []
        for entry in stored:
            draw = Draw(*entry["draw"])
            if draw not in drawn:
                drawn[draw] = self.tasks(draw)
            job = self._job(
                entry["number"], entry["root"], entry["step"], draw, entry["place"], entry["attempt"], drawn[draw][entry["place"]]
            )
            job.rows = [Row.of(row) for row in entry["rows"]]
            jobs.append(job)
        return jobs

    def request(self, job: Job, row: Row, chunk: int) -> Request:
        """What is left to draw of a sibling's present turn, at most `chunk` tokens."""
        return row.request(job.prompt.ids, self.collector, chunk)

    def turns(self, tasks: Sequence[Task], rows: Sequence[Row], completions: Sequence[Completion]) -> list[Turn | None]:
        """What follows from each completion, before it is entered. Worlds are asked here, by whoever draws: they may take time."""
        return [row.turn(task, done, self.collector) for task, row, done in zip(tasks, rows, completions, strict=True)]

    def _job(self, number: int, root: int, step: int, draw: Draw, place: int, attempt: int, task: Task) -> Job:
        phase = derive(derive(self._seed, self._name, draw.step), draw.label)
        more = ("again", attempt) if attempt else ()
        rows = [Row(derive(phase, place, index, *more)) for index in range(self.collector.siblings)]
        return Job(number, root, step, draw, place, attempt, task, self.collector.renderer.prompt(task.prompt), rows)
