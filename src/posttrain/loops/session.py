"""What surrounds every loop: records, progress, checkpoints, stopping. The loop calls these; nothing here calls a loop."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.digest import file_digest
from posttrain.core.errors import Interrupted
from posttrain.core.metrics import Metric, read
from posttrain.engine.checkpoint import NO_OTHERS, Checkpoint, discard_checkpoints, latest_checkpoint, save_checkpoint
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer
from posttrain.runs.console import Console
from posttrain.runs.interrupt import StopSignal, resume_hint
from posttrain.runs.recorder import Recorder


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

    def finished(self, name: str) -> dict[str, Any] | None:
        """What a finished stage left behind; also moves this session's notion of where the records stand."""
        info = self.ranks.first_says(self.run.finished(name))
        if info is not None:
            self.position, self.seconds[name] = info["position"], info["seconds"]
        return info

    @contextmanager
    def timed(self, name: str) -> Iterator[dict[str, Any]]:
        """Run a stage to its end: what the block puts into the yielded dict is stored with its duration, and the stage is not done
        again."""
        started = time.monotonic()
        info: dict[str, Any] = {}
        yield info
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

    def check_stop(self) -> bool:
        """Whether to stop now: the first rank's answer, on every rank."""
        return self.ranks.first_says(self.stop.requested)


class Stage:
    """The bookkeeping of one loop: which step comes next, what was measured, when to save.

    A stage that begins without a checkpoint forgets what was recorded since the last finished stage, so run it inside `Session.timed`.
    `state` holds whatever the loop must remember between steps besides weights and optimizer (JSON values only).
    `trainer` counts the optimizer steps that are recorded; `others` (name to trainer, e.g. {"critic": ...}) are saved and restored with it.
    """

    def __init__(self, session: Session, name: str, trainer: LocalTrainer, steps: int, others: Mapping[str, LocalTrainer] = NO_OTHERS):
        self.session, self.name, self.trainer, self.total, self.others = session, name, trainer, steps, others
        self.state: dict[str, Any] = {}
        self.root = session.run.checkpoint_root(name)
        self._shown: dict[str, float | int | str | None] = {}
        self.first = self._restore(session.ranks.first_says(latest_checkpoint(self.root)))

    def _restore(self, checkpoint: Checkpoint | None) -> int:
        if checkpoint is None:
            self.session.rewind()
            return 0
        checkpoint.restore(self.trainer, self.others)
        self.state = dict(checkpoint.state)
        self.session.run.rewind(checkpoint.position)
        self.session.console.line(f"{self.name}: resuming at step {checkpoint.step} of {self.total}")
        return checkpoint.step

    def steps(self) -> Iterator[int]:
        """The steps still to do. After each: progress, a checkpoint when one is due, and an orderly end when the user asked for it."""
        with self.session.console.stage(self.name, total=self.total, unit="step", done=self.first) as progress:
            for step in range(self.first, self.total):
                yield step
                progress.advance(1, **self._shown)
                stopping = self.session.check_stop()
                if stopping or ((step + 1) % self.session.save_every == 0 and step + 1 < self.total):
                    self._save(step + 1)
                if stopping:
                    raise Interrupted(
                        f"{self.name} stopped after step {step + 1} of {self.total}, saved; {resume_hint(self.session.command)}"
                    )

    def _save(self, step: int) -> None:
        if self.session.ranks.first:
            save_checkpoint(self.root, step, self.trainer, self.state, self.session.run.position(), self.others)

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        plain: Mapping[str, float | int | None],
        seconds: Mapping[str, float],
        show: Sequence[str],
    ) -> None:
        """Write one metrics line; `show` names what stands beside the progress bar."""
        values = {**read(metrics), **plain, "optimizer_step": self.trainer.version}
        self.session.run.metric(self.name, step, values, seconds)
        self._shown = {name: values.get(name) for name in show}


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
