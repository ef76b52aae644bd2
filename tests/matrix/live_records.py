"""Faults of what a run leaves behind: it is killed, its log is cut, or its two measurements do not fit together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.matrix.checks_faults import retemplated
from tests.matrix.injection import Fault, by_doctor
from tests.matrix.live_bases import base, held_out, samples_of, speech
from tests.matrix.live_runs import MODEL, Play, brisk, played, recorded
from torch import nn

from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Score
from posttrain.evals.suite import Suite
from posttrain.loops.guard import Guard
from posttrain.loops.session import Session
from posttrain.loops.sft import sft
from posttrain.recipes.pipeline import measure
from posttrain.recipes.single import SFTRun
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.graders import ExactTextGrader


class Killed(BaseException):
    """What ends a process from outside, as far as the code inside can tell."""


class Mortal:
    """A grader in whose 400th judgement the process ends."""

    name = "mortal/1"

    def __init__(self) -> None:
        self._left = 400

    def __call__(self, task: Task, text: str) -> Score:
        self._left -= 1
        if self._left < 0:
            raise Killed
        return ExactTextGrader()(task, text)


def killed(folder: Path, seed: int) -> Path:
    """A run that ends in its seventh step without a word."""
    with suppress(Killed):
        played(folder, seed, Play(grader=Mortal, rl={"steps": 20}))
    return folder / "run"


def cut_short(folder: Path, seed: int) -> Path:
    """A run of which the copy lacks the end of the log, in the middle of a line."""
    path = played(folder, seed, Play(rl={"steps": 12})) / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 900 - seed])
    return folder / "run"


def suite_of(items: int, **sampling: float) -> Suite:
    """Held-out items under some conditions."""
    told = Sampling.load({"max_tokens": 4, **sampling})
    return Suite("held_out", tuple(held_out(items)), ExactTextGrader(), told, 1, True)


def measured(before: Suite, after: Suite, other: Callable[[], ChatRenderer] | None = None) -> Callable[[Path, int], Path]:
    """A supervised run between two measurements; the second through another renderer, when there is one."""

    def make(folder: Path, seed: int) -> Path:
        how, model, renderer = brisk(1e-3, epochs=4), base("guesser"), speech()[1]
        settings = SFTRun(model=MODEL, seed=seed, task="arithmetic", sft=how, guard=Guard(alarms="warn"))
        samples = samples_of("knower", 256, seed)

        def first(session: Session) -> None:
            measure(session, "before", model, renderer, [before], seed=seed)

        def last(session: Session, trained: nn.Module) -> None:
            measure(session, "after", trained, renderer if other is None else other(), [after], seed=seed)

        return recorded(folder, settings, "sft", lambda session: sft(session, model, samples, how), first, last)

    return make


def spaced() -> ChatRenderer:
    """A renderer whose template puts a space in front of what users say."""
    return retemplated(
        "{% else %}{{ message['content'] + '<|end|>' }}{% endif %}", "{% else %}{{ ' ' + message['content'] + '<|end|>' }}{% endif %}"
    )


FAULTS = (
    Fault("S91", "records", "a process that is killed in its seventh step", killed, by_doctor, 0.5),
    Fault("S90", "records", "a copy that lacks the end of the log", cut_short, by_doctor, 0.9),
    Fault("S54", "records", "a score of 36 items", measured(suite_of(36), suite_of(36)), by_doctor, 0.8),
    Fault("S56", "records", "greedy before and sampled after", measured(suite_of(120, temperature=0.0), suite_of(120)), by_doctor, 0.8),
    Fault("F12", "records", "two templates, one for each measurement", measured(suite_of(120), suite_of(120), spaced), by_doctor, 0.8),
)
"""All of them."""
