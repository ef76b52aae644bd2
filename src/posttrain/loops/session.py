"""What surrounds every loop: records, progress, checkpoints, stopping. The loop calls these; nothing here calls a loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from posttrain.core.digest import file_digest
from posttrain.core.errors import Halted, Interrupted, StorageError
from posttrain.core.metrics import Metric, read
from posttrain.core.storage import Room, bytes_below, check_room
from posttrain.engine.checkpoint import NO_OTHERS, Checkpoint, Content, discard_checkpoints, latest_checkpoint, save_checkpoint
from posttrain.engine.export import export, export_bytes, training_bytes
from posttrain.engine.machine import Machine
from posttrain.engine.memory import resident_mib
from posttrain.engine.nonfinite import Diverged
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer
from posttrain.loops.guard import Guard, Raised, Watcher
from posttrain.runs.console import Console
from posttrain.runs.interrupt import StopSignal, resume_hint
from posttrain.runs.recorder import Recorder

RECORD_BYTES = 16_384
"""Allowed per step for its records: a line of metrics and the rollouts that are kept in full."""


@dataclass(slots=True)
class Session:
    """One run as one process sees it. On ranks other than the first, `run` and `console` are silent."""

    ranks: Ranks
    run: Recorder
    console: Console
    stop: StopSignal
    seed: int
    save_every: int = 20
    """Steps between checkpoints of a loop."""
    command: Sequence[str] = ("posttrain",)
    position: dict[str, int] = field(default_factory=dict)
    """Where the record files stood when the last finished stage ended."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock time of each finished stage."""
    machine: Machine = field(default_factory=Machine)
    tokenizer: PreTrainedTokenizerFast | None = None
    """Goes with every exported model; without one nothing is exported."""
    guard: Guard = field(default_factory=Guard)
    watcher: Watcher | None = None
    """Raises the alarms, on the first rank; None elsewhere, and where nothing is watched."""

    def finished(self, name: str) -> dict[str, Any] | None:
        """What a finished stage left behind; also moves this session's notion of where the records stand."""
        info = self.ranks.first_says(self.run.finished(name))
        if info is not None:
            self.position, self.seconds[name] = info["position"], info["seconds"]
            if self.ranks.first:  # a kill between the two writes that end a stage leaves them
                discard_checkpoints(self.run.checkpoint_root(name))
        return info

    @contextmanager
    def timed(self, name: str) -> Iterator[dict[str, Any]]:
        """Run a stage to its end: what the block puts into the yielded dict is stored with its duration, and the stage is not done
        again."""
        started = time.monotonic()
        info: dict[str, Any] = {}
        try:
            yield info
        except Diverged as error:  # no metrics line will say it: the step was not taken
            step = 0 if error.trace is None else error.trace.step
            self.run.alarm(name, step, "non_finite", str(error), {"action": "stop"})
            raise
        self.position = self.ranks.first_says(self.run.position())
        self.seconds[name] = self.ranks.first_says(round(time.monotonic() - started, 2))
        root = self.run.checkpoint_root(name)
        files = sorted(p for p in (root / "final").rglob("*") if p.is_file()) if self.ranks.first else []
        digests = {str(p.relative_to(root.parent.parent)): file_digest(p) for p in files}
        self.run.finish_stage(name, {**info, "seconds": self.seconds[name], "position": self.position, "digests": digests})
        if self.ranks.first:
            discard_checkpoints(root)

    def rewind(self) -> None:
        """Forget records of a stage that was begun and has no checkpoint."""
        self.run.rewind(self.position)

    @property
    def exports(self) -> bool:
        """Whether checkpoints carry the model in Hugging Face format."""
        return self.machine.export and self.tokenizer is not None

    def check_room(self, folder: Path, room: Room, *, warn: bool = True) -> None:
        """Raise StorageError, on every rank, when what is planned below `folder` does not fit; `warn` when little space will be left."""
        problem = warning = None
        if self.ranks.first:
            try:
                warning = check_room(folder, room)
            except StorageError as error:
                problem = str(error)
        if warning and warn:
            self.console.warn(warning)
        if problem := self.ranks.first_says(problem):
            raise StorageError(problem)

    def check_stop(self, halt: str | None = None) -> tuple[bool, str | None]:
        """Whether to stop now, because the user asked for it or for the reason `halt`: the first rank's answer, on every rank."""
        return self.ranks.first_says((self.stop.requested, halt))


class Stage:
    """The bookkeeping of one loop: which step comes next, what was measured, when to save.

    A stage that begins without a checkpoint forgets what was recorded since the last finished stage, so run it inside `Session.timed`.
    `state` holds whatever the loop must remember between steps besides weights and optimizer (JSON values only).
    `trainer` counts the optimizer steps that are recorded; `others` (name to trainer, e.g. {"critic": ...}) are saved and restored with it.
    Raises StorageError at once when the checkpoints that the stage is going to write do not fit on the disk.
    """

    def __init__(self, session: Session, name: str, trainer: LocalTrainer, steps: int, others: Mapping[str, LocalTrainer] = NO_OTHERS):
        self.session, self.name, self.trainer, self.total, self.others = session, name, trainer, steps, others
        self.state: dict[str, Any] = {}
        self.root = session.run.checkpoint_root(name)
        self._shown: dict[str, float | int | str | None] = {}
        self._kept: dict[str, Callable[[], Any]] = {}
        self._saving: dict[str, float] = {}
        self._halt: str | None = None
        self._found: Checkpoint | None = session.ranks.first_says(latest_checkpoint(self.root))
        if trainer.warning:
            session.console.warn(f"{name}: {trainer.warning}")
        session.check_room(self.root, self._room(), warn=False)  # a recipe has looked at the whole run and said so
        self.first = self._restore(self._found)

    def _restore(self, checkpoint: Checkpoint | None) -> int:
        if checkpoint is None:
            self.session.rewind()
            self._watch_from([])
            return 0
        checkpoint.restore(self.trainer, self.others)
        self.state = dict(checkpoint.state)
        self.session.run.rewind(checkpoint.position)
        self._watch_from(self.session.run.metrics(self.name))
        self.session.console.line(f"{self.name}: resuming at step {checkpoint.step} of {self.total}")
        return checkpoint.step

    def _watch_from(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """The watcher sees what is recorded of the stage."""
        if self.session.watcher is not None:
            self.session.watcher.begin(self.name, [(line["step"], seen_by_watcher(line, line.get("seconds", {}))) for line in lines])

    def steps(self) -> Iterator[int]:
        """The steps still to do. After each: progress, a checkpoint when one is due, and an orderly end when the user or an alarm asks for
        it."""
        with self.session.console.stage(self.name, total=self.total, unit="step", done=self.first) as progress:
            for step in range(self.first, self.total):
                yield step
                progress.advance(1, **self._shown)
                stopping, halt = self.session.check_stop(self._halt)
                if stopping or halt or ((step + 1) % self.session.save_every == 0 and step + 1 < self.total):
                    started = time.perf_counter()
                    self._save(step + 1)
                    self._saving = {"checkpoint": round(time.perf_counter() - started, 4)}
                if halt:
                    raise Halted(f"{self.name} was {halt}")
                if stopping:
                    raise Interrupted(
                        f"{self.name} stopped after step {step + 1} of {self.total}, saved; {resume_hint(self.session.command)}"
                    )

    def keep(self, name: str, state: Callable[[], Any]) -> list[Any]:
        """Let `state()` be asked, on every rank, whenever a checkpoint is written, and its JSON value be kept in a file of its own.

        For what is larger than `self.state`: buffered groups, completions in flight. Returns what every rank had kept under `name` in the
        checkpoint that this stage goes on from, in rank order (there may have been another number of ranks); [] when it starts afresh.
        """
        self._kept[name] = state
        found = self._found.extra(name) if self._found is not None and self.session.ranks.first else None
        return self.session.ranks.first_says(found or [])

    def _save(self, step: int) -> None:
        session, trainers = self.session, (self.trainer, *self.others.values())
        extras = {name: session.ranks.gather(state()) for name, state in self._kept.items()}
        if session.ranks.first:
            content = Content(step, self.state, session.run.position(), extras)
            keep = session.machine.save_total_limit
            save_checkpoint(self.root, content, self.trainer, self.others, keep=keep, export=self._export if session.exports else None)
            return
        for trainer in trainers:  # what the first rank writes lies on all of them, and they answer in the order in which it asks
            if trainer.together:
                trainer.snapshot()
        if session.exports and self.trainer.together:
            self.trainer.plain()

    def _export(self, folder: Path) -> None:
        assert self.session.tokenizer is not None
        export(self.trainer.plain(), self.session.tokenizer, folder)

    def _room(self) -> Room:
        """What the stage is going to write, less what an earlier process wrote of it. A stop may save one where none is due."""
        exported = export_bytes(self.trainer.model, self.session.tokenizer)
        size = sum(training_bytes(trainer.model, self.session.machine.optimizer) for trainer in (self.trainer, *self.others.values()))
        copies = max(1, min(self.session.machine.save_total_limit + 1, (self.total - 1) // self.session.save_every))
        present = bytes_below(self.root) if self.session.ranks.first else 0
        return Room(size + exported * self.session.exports, copies, exported, RECORD_BYTES * self.total, present)

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        plain: Mapping[str, float | int | None],
        seconds: Mapping[str, float | None],
        show: Sequence[str],
    ) -> None:
        """Write one metrics line; `show` names what stands beside the progress bar. A checkpoint before the step is among its seconds."""
        seconds, self._saving = {**seconds, **self._saving}, {}
        values = {**read(metrics), **plain, "optimizer_step": self.trainer.version}
        seconds = {**seconds, "peak_mib": self.trainer.peak_mib, "rss_mib": resident_mib()}
        self.session.run.metric(self.name, step, values, seconds)
        self._shown = {name: values.get(name) for name in show}
        if self.session.watcher is not None:
            for alarm in self.session.watcher.see(self.name, step, seen_by_watcher(values, seconds)):
                self._raise(step, alarm)

    def _raise(self, step: int, alarm: Raised) -> None:
        """Record an alarm, say it, and end after this step when it asks for that."""
        session = self.session
        session.run.alarm(self.name, step, alarm.id, alarm.detail, {**alarm.evidence, "action": str(alarm.action)})
        if alarm.action == "note":
            return
        session.console.warn(f"{self.name} step {step}: {alarm.id} {alarm.detail}")
        if alarm.action in ("pause", "stop") and self._halt is None:
            look = f"what it rests on: posttrain doctor {session.run.path}"
            on = f"to go on: posttrain resume {session.run.path}"
            again = "" if alarm.action == "pause" else " --set guard.alarms=warn (as it is, it would stop again)"
            done = "paused" if alarm.action == "pause" else "stopped"
            self._halt = f"{done} after step {step + 1} of {self.total} by alarm {alarm.id}: {alarm.detail}; saved; {look}; {on}{again}"


def seen_by_watcher(values: Mapping[str, Any], seconds: Mapping[str, float | None]) -> dict[str, Any]:
    """A metrics line as one mapping; what the clock decides is named seconds.NAME."""
    return {**values, **{f"seconds.{name}": value for name, value in seconds.items()}}


class Stopwatch:
    """Seconds spent per activity within one step. Example: with watch("sample"): ..."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block under `name`."""
        started = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 4)
