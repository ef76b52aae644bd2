"""The command line as the tests use it: a ladder small enough for a few seconds, started as a process or called in this one."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.main import main
from posttrain.core.files import read_jsonl
from posttrain.runs.run import deterministic_bytes

SRC = Path(__file__).resolve().parents[2] / "src"
PATIENCE = 120
"""Seconds a process may take before a test gives up on it."""
ARITHMETIC: dict[str, Any] = {"ops": ["+"], "high": 5, "harder_low": 6, "harder_high": 9, "held_out_percent": 65}
TOY = [
    "processes=1",
    "save_every=5",
    "base.shape.hidden=48",
    "base.shape.mlp=96",
    "base.lines=4000",
    "base.batch=64",
    "base.lr=1e-2",
    "base.vocab=300",
    *(f"arithmetic.{key}={json.dumps(value)}" for key, value in ARITHMETIC.items()),
    "rows.arithmetic=1400",
    "rows.instruct=20",
    "sft.batch_size=16",
    "sft.optim.lr=1e-2",
    "sampling.max_tokens=8",
    "mine.prompts=24",
    "dpo.batch_size=4",
    "dpo.optim.lr=1e-4",
    "grpo.steps=12",
    "grpo.prompts=4",
    "grpo.siblings=4",
    "measure.arithmetic=8",
    "measure.harder=8",
    "measure.retention=8",
]
"""A model of 0.06M parameters that learns the form of an answer and is then right now and then, which is what pairs and GRPO need."""


def ladder(out: Path, *more: str, settings: Sequence[str] = TOY) -> list[str]:
    """Arguments of a toy ladder."""
    return ["ladder", "--out", str(out), *(word for setting in settings for word in ("--set", setting)), *more]


@dataclass
class Cli:
    """`posttrain` with a cache of its own. `start` and `run` make a process, `call` is the same entry point in this process."""

    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": str(SRC), "POSTTRAIN_CACHE": str(self.cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        return {**os.environ, **own}

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """A process in a group of its own, so that all of it can be killed."""
        command = [sys.executable, "-m", "posttrain.cli.main", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def run(self, arguments: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run to the end."""
        command = [sys.executable, "-m", "posttrain.cli.main", *arguments]
        return subprocess.run(command, env=self.environment, input=stdin, capture_output=True, text=True, timeout=PATIENCE, check=False)

    def call(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
        """Call the entry point here; returns the exit code. What it writes is captured by capsys."""
        monkeypatch.setattr(sys, "argv", ["posttrain", *arguments])
        monkeypatch.setenv("POSTTRAIN_CACHE", str(self.cache))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that is made once per test session, whichever of several workers asks first."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    root = factory.getbasetemp().parent if worker else factory.getbasetemp()
    folder = root / f"shared-{name}"
    with open(root / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            make(folder)
    return folder


def reference(factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted toy ladder that everything is compared with; its cache lies beside it in `cache`."""

    def make(folder: Path) -> None:
        done = Cli(folder / "cache").run(ladder(folder / "run"))
        (folder / "stdout").write_text(done.stdout)
        (folder / "stderr").write_text(done.stderr)
        assert done.returncode == 0, done.stderr

    return shared(factory, "ladder", make) / "run"


def cache_of(run: Path) -> Path:
    """The cache that holds the base model of the reference run."""
    return run.parent / "cache"


def numbers(run: Path) -> bytes:
    """What equal runs write alike: metrics without their timings."""
    return deterministic_bytes(run / "metrics.jsonl")


def results(run: Path) -> dict[str, Any]:
    """The summary without its timings."""
    summary = json.loads((run / "summary.json").read_text())
    del summary["seconds_per_stage"]
    return summary


def reached(run: Path, stage: str, step: int) -> Callable[[], bool]:
    """Whether a run has recorded `step` of `stage`; step -1: whether the stage is finished."""
    if step < 0:
        return (run / "stages" / f"{stage}.json").exists
    return lambda: any(line["stage"] == stage and line["step"] >= step for line in read_jsonl(run / "metrics.jsonl"))


def signal_when(process: subprocess.Popen[str], condition: Callable[[], bool], number: signal.Signals) -> tuple[int, str]:
    """Send a signal to the whole group once `condition` holds; returns the exit code and what was written to stderr."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "the run never got there"
        time.sleep(0.002)
    os.killpg(process.pid, number)
    return process.wait(PATIENCE), process.communicate()[1]


def last_error(stderr: str) -> str:
    """The one line a failed command ends with."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    assert "Traceback" not in stderr, stderr
    assert sum(line.startswith("error:") for line in lines) == 1, stderr
    assert lines[-1].startswith("error: "), stderr
    return lines[-1]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
