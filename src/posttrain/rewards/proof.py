"""A grader proves itself before a run: gold scores 1, nothing and a wrong answer score 0, near misses score what they should.

A broken verifier does not stop training, it only ruins it; three calls per task find most of them (spec/faults.md 55 and 57).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from posttrain.core.errors import GraderError
from posttrain.core.tasks import Task
from posttrain.core.trajectory import RewardStatus, Score
from posttrain.rewards.types import Grader


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A completion whose score is known by hand. Example: NearMiss(task, "#### 5 or 6", 0.0)"""

    task: Task
    text: str
    value: float


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What was checked. Example: ProofReport(grader="hash-marker/1", tasks=8, checks=26)"""

    grader: str
    tasks: int
    checks: int
    """Calls of the grader whose result was as required."""


def prove(
    grader: Grader,
    tasks: Sequence[Task],
    *,
    gold: Callable[[Task], str],
    wrong: Callable[[Task], str],
    near_misses: Sequence[NearMiss] = (),
) -> ProofReport:
    """Check `grader` on `tasks`; the first is also judged in another thread, because rollouts are often scored in one.

    Raises GraderError at the first score that differs, and for an empty list of tasks, which would prove nothing.
    """
    if not tasks:
        raise GraderError(f"grader {grader.name} cannot be proven on 0 tasks; give at least one")
    checks = 0
    for task in tasks:
        for what, text, value in (("the gold answer", gold(task), 1.0), ("an empty answer", "", 0.0), ("a wrong answer", wrong(task), 0.0)):
            _check(grader, task, what, text, value)
            checks += 1
    for near in near_misses:
        _check(grader, near.task, "a near miss", near.text, near.value)
    first = tasks[0]
    _check_elsewhere(grader, first, gold(first))
    return ProofReport(grader.name, len(tasks), checks + len(near_misses) + 1)


def _check(grader: Grader, task: Task, what: str, text: str, value: float) -> None:
    outcome = _outcome(grader, task, text)
    if outcome.value != value:
        detail = f", {outcome.detail}" if outcome.detail else ""
        raise GraderError(
            f"grader {grader.name} gives {what} {text[:60]!r} of task {task.id} {outcome.value} ({outcome.status.value}{detail}), "
            f"not {value:g}; fix the grader or the answer {task.answer[:40]!r}"
        )


def _outcome(grader: Grader, task: Task, text: str) -> Score:
    try:
        return grader(task, text)
    except Exception as error:  # noqa: BLE001 - user code: whatever it raises is the finding
        return Score(None, RewardStatus.ERROR, grader=grader.name, detail=f"{type(error).__name__}: {error}"[:200])


def _check_elsewhere(grader: Grader, task: Task, text: str) -> None:
    outcomes: list[Score] = []
    worker = threading.Thread(target=lambda: outcomes.append(_outcome(grader, task, text)), name="grader-proof")
    worker.start()
    worker.join()
    if not outcomes or outcomes[0].value != 1.0:
        found = f"{outcomes[0].value} ({outcomes[0].detail or outcomes[0].status.value})" if outcomes else "nothing"
        raise GraderError(
            f"grader {grader.name} gives the gold answer of task {task.id} {found} in a worker thread, not 1; a grader must not use signals"
        )
