"""Kill an RL run with SIGKILL again and again, resume it each time, and compare what is left with a run that nobody killed.

    python tests/e2e/kill_points.py 50                        half of the kills after a random time, half inside a random write
    python tests/e2e/kill_points.py 50 --run tools            episodes of several turns with a calculator
    python tests/e2e/kill_points.py 50 --run s_grpo           forced tokens, and two calls of the sampler per step
    python tests/e2e/kill_points.py 50 --asynchronous         every resume must complete; the numbers depend on arrival and are not compared
    python tests/e2e/kill_points.py 10 --fresh                a new interpreter per attempt instead of a fork of this one (slower)

An attempt is the command line in a process group of its own. A kill "inside a write" ends the group from within: before, half-way through
or after one of its file operations, counted over the run. The exit code is 0 when every resume completed and every record, digest and final
weight equals the uninterrupted run's byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from e2e_cli import ARITHMETIC, Cli, ladder

from posttrain.cli.main import main as posttrain
from posttrain.core import files
from posttrain.core.files import JsonlWriter, encode_line, is_leftover
from posttrain.engine import trainer
from posttrain.envs.calculator import Calculator
from posttrain.models.loading import load
from posttrain.recipes import single
from posttrain.runs.listing import verify
from posttrain.runs.run import MANIFEST, Run, deterministic_bytes

RECIPE = single.train
"""Imported here, so that a forked attempt need not."""
PATIENCE = 300
"""Seconds an attempt may take."""
COMMON = ["save_every=2", "held_out=8", "rl.steps=12", "rl.prompts=4", "rl.siblings=4", "rl.patience=12"]
TOOLS = {**ARITHMETIC, "describe": False}
RUNS = {
    "default": ["task=arithmetic", f"task_settings={json.dumps(ARITHMETIC)}", "sampling.max_tokens=8"],
    "s_grpo": [
        "task=arithmetic",
        f"task_settings={json.dumps(ARITHMETIC)}",
        "sampling.max_tokens=10",
        "objective=s_grpo",
        'objective.drawing={"kind": "early_exit", "cue": "#### ", "cuts": 3}',
    ],
    "tools": ["task=calculator", f"task_settings={json.dumps(TOOLS)}", "sampling.max_tokens=120"],
}
ASYNCHRONOUS = ['asynchronous={"bound": 1, "workers": 2, "chunk": 4}']


@dataclass
class Attempts:
    """How attempts are made: by forking this process, which has imported everything, or afresh."""

    cache: Path
    fresh: bool = False

    def start(self, arguments: Sequence[str], log: Path, dies: int | None, count: Path | None = None) -> int:
        """Start `posttrain` in a group of its own; returns its process id. It kills itself in its `dies`-th file operation."""
        if self.fresh:
            environment = {**Cli(self.cache).environment, "KILL_DIES": str(dies or 0), "KILL_COUNT": str(count or "")}
            with open(log, "ab") as out:
                command = [sys.executable, __file__, "--child", *arguments]
                return subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True).pid
        if pid := os.fork():
            return pid
        code = 70
        try:
            os.setsid()
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            os.environ |= {"POSTTRAIN_CACHE": str(self.cache), "HF_HUB_OFFLINE": "1"}
            code = child(arguments, dies, count)
        except BaseException:  # noqa: BLE001  a forked copy must not go on as its parent would
            traceback.print_exc()
        finally:
            os._exit(code)


def child(arguments: Sequence[str], dies: int | None, count: Path | None) -> int:
    """Run the command line here, with its file operations counted; returns the exit code."""
    torch.set_num_threads(1)  # a forked copy gets its thread pool anew, here and not in two workers of its own at once
    counter = Counter(dies)
    counter.install()
    sys.argv = ["posttrain", *arguments]
    code = 0
    try:
        posttrain()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if count is not None:
        count.write_text(str(counter.seen))
    return code


class Counter:
    """Counts file operations and kills the process group in one of them."""

    def __init__(self, dies: int | None):
        self.dies, self.seen = dies, 0

    def install(self) -> None:
        """Put itself in front of everything by which a run changes its directory."""
        for name in ("fsync", "replace", "unlink"):
            setattr(os, name, self._around(getattr(os, name)))
        trainer.save_file = self._around(trainer.save_file, halved=lambda given: given[1])
        torch.save = self._around(torch.save, halved=lambda given: given[1])
        JsonlWriter.append = self._append(JsonlWriter.append)  # type: ignore[method-assign]

    def _around(self, call: Callable[..., Any], halved: Callable[[Any], Path] | None = None) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.seen += 1
            if self.seen != self.dies:
                return call(*given, **named)
            if self.seen % 2:  # half of the kills come after the operation, or half-way through it
                call(*given, **named)
                if halved is not None:
                    place = halved(given)
                    os.truncate(place, place.stat().st_size // 2)
            return os.killpg(os.getpgrp(), signal.SIGKILL)

        return counted

    def _append(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(writer: JsonlWriter, value: Any) -> None:
            self.seen += 1
            if self.seen == self.dies:
                line = encode_line(value)
                writer._handle.write(line[: len(line) // 2])
                os.killpg(os.getpgrp(), signal.SIGKILL)
            call(writer, value)

        return counted


@dataclass
class Tally:
    """What happened. Example: Tally(kills=["write 17 -> rl step 3"], runs=2, problems=[])"""

    kills: list[str] = field(default_factory=list)
    runs: int = 0
    problems: list[str] = field(default_factory=list)


def waited(pid: int, seconds: float | None) -> int:
    """Wait for an attempt, killing its group after `seconds`; returns the exit code, -9 when it was killed."""
    deadline, killed = time.monotonic() + PATIENCE, False
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if not killed and (now > deadline or (end is not None and now > end)):
            os.killpg(pid, signal.SIGKILL)
            killed = True
        time.sleep(0.002)


def records(run: Path) -> dict[str, bytes]:
    """Everything a run leaves that must not depend on the clock."""
    found = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        name = path.relative_to(run).as_posix()
        if name.endswith(".jsonl"):
            if content := deterministic_bytes(path):  # a file that was emptied again is as good as none
                found[name] = content
        elif name.startswith("stages/") or name == "summary.json":
            record = {
                key: value
                for key, value in json.loads(path.read_bytes()).items()
                if key not in ("seconds", "position", "seconds_per_stage")
            }
            found[name] = encode_line(record)
        elif name not in (MANIFEST, "report.html"):
            found[name] = path.read_bytes()
    return found


def place_of(run: Path) -> str:
    """How far a killed run is, for people."""
    if not (run / MANIFEST).is_file():
        return "before the run existed"
    last = (files.read_jsonl(run / "metrics.jsonl") or [{"stage": "before", "step": 0}])[-1]
    steps = sorted(int(p.name[5:]) for p in run.glob("checkpoints/rl/step_*") if not is_leftover(p.name))
    return f"{last['stage']} step {last['step']}, checkpoints {steps}"


def kill_until_done(points: int, attempts: Attempts, command: Callable[[Path], list[str]], work: Path, seed: int, compare: bool) -> Tally:
    """Spread `points` kills over as many runs as it takes; every run is resumed until it is complete and then compared."""
    rng, tally, whole = random.Random(seed), Tally(), work / "whole"
    began = time.monotonic()
    if code := waited(attempts.start(command(whole), work / "log-whole", None, work / "count"), None):
        raise SystemExit(f"the uninterrupted run failed with exit code {code}:\n{(work / 'log-whole').read_text()}")
    took, writes = time.monotonic() - began, int((work / "count").read_text())
    expected = records(whole)
    while len(tally.kills) < points and not tally.problems:
        out, log = work / f"run{tally.runs}", work / f"log{tally.runs}"
        tally.runs += 1
        code = -signal.SIGKILL
        while code == -signal.SIGKILL:
            left = points - len(tally.kills)
            inside = rng.randrange(1, writes + 1) if left and len(tally.kills) % 2 else None
            seconds = rng.uniform(0, took) if left and inside is None else None
            there = (out / MANIFEST).is_file()
            code = waited(attempts.start([*command(out), *(["--resume"] if there else [])], log, inside), seconds)
            if code == -signal.SIGKILL:
                how = f"write {inside} of {writes}" if inside else f"after {seconds:.2f} of {took:.2f} s" if seconds else "out of patience"
                tally.kills.append(f"run {tally.runs - 1}: {how} -> {place_of(out)}")
        if code:
            tally.problems.append(f"run {tally.runs - 1}: a resume ended with exit code {code}:\n{log.read_text()[-2000:]}")
            continue
        tally.problems += differing(out, expected, compare)
        shutil.rmtree(out)
    return tally


def differing(out: Path, expected: dict[str, bytes], compare: bool) -> list[str]:
    """What a run that was killed and resumed has otherwise than the uninterrupted one."""
    found = [f"{out.name}: {problem.file}: {problem.detail}" for problem in verify(out)]
    if not Run.open(out).complete:
        found.append(f"{out.name}: not every stage is finished")
    left = [str(p.relative_to(out)) for p in out.rglob("*") if is_leftover(p.name) or p.name.startswith("step_")]
    found += [f"{out.name}: {name} was left behind" for name in left]
    if not compare:
        return found
    now = records(out)
    return found + [f"{out.name}: {name} differs" for name in sorted({*now, *expected}) if now.get(name) != expected.get(name)]


def rl_command(model: Path, run: str, more: Sequence[str]) -> Callable[[Path], list[str]]:
    """Arguments of the run that is killed, as a function of its directory."""
    chosen = [word for setting in (*COMMON, *RUNS[run], *more) for word in ("--set", setting)]
    return lambda out: ["train", "rl", "--model", str(model), "--out", str(out), *chosen]


def taught(work: Path, run: str) -> Path:
    """A tiny model that is right now and then: the SFT rung of the toy ladder, or, for tools, its base after an SFT of its own."""
    cli, rung = Cli(work / "cache"), work / "ladder" / "checkpoints"
    commands = [ladder(work / "ladder")]
    if run == "tools":
        source, data = Calculator.load(TOOLS), work / "rows.jsonl"
        shown = [source.demonstration(task).messages for task in source.tasks("train", 3200, 0)]
        data.write_text("".join(json.dumps({"messages": [asdict(m) for m in messages]}) + "\n" for messages in shown))
        given = ["--set", "sft.batch_size=16", "--set", "sft.optim.lr=1e-2", "--out", str(work / "tools")]
        commands.append(["train", "sft", "--model", str(rung / "base" / "final"), "--data", str(data), *given])
    for command in commands:
        done = cli.run(command)
        if done.returncode:
            raise SystemExit(done.stderr)
    return (work / "tools" / "checkpoints" if run == "tools" else rung) / "sft" / "final"


def main() -> int:
    """Parse, kill, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("points", type=int)
    parser.add_argument("--run", choices=sorted(RUNS), default="default")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="folder of a model that sometimes answers; by default one is made")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more settings of the run")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kill-points-") as folder:
        work = Path(folder)
        model = given.model or taught(work, given.run)
        command = rl_command(model, given.run, [*(ASYNCHRONOUS if given.asynchronous else []), *given.set])
        load(str(model))  # with the imports of this file, what an attempt would import
        began = time.monotonic()
        attempts = Attempts(work / "cache", given.fresh)
        tally = kill_until_done(given.points, attempts, command, work, given.seed, compare=not given.asynchronous)
    for line in (*tally.kills, *tally.problems):
        sys.stdout.write(f"{line}\n")
    same = "completed" if given.asynchronous else "completed with the bytes of the uninterrupted run"
    verdict = f"{len(tally.problems)} problem(s)" if tally.problems else f"all {same}"
    took = time.monotonic() - began
    sys.stdout.write(f"{given.run}: {len(tally.kills)} kills over {tally.runs} runs in {took:.0f} s: {verdict}\n")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        counted = os.environ["KILL_COUNT"]
        sys.exit(child(sys.argv[2:], int(os.environ["KILL_DIES"]) or None, Path(counted) if counted else None))
    sys.exit(main())
