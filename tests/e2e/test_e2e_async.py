"""Asynchronous training through the command line: killed, resumed, replayed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from e2e_cli import ARITHMETIC, Cli, cache_of, last_error, numbers, reached, reference, signal_when

from posttrain.core.files import read_jsonl
from posttrain.runs.listing import verify
from posttrain.runs.run import Run

PARTS = ("trained", "filtered", "stale", "errored", "in_flight")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory)


def train(run: Path, out: Path, *more: str) -> list[str]:
    """Arguments of a small asynchronous run from the reference run's SFT model."""
    given = [
        "rl.steps=8",
        "rl.prompts=4",
        "rl.siblings=4",
        "sampling.max_tokens=8",
        "held_out=8",
        "save_every=2",
        f"task_settings={json.dumps(ARITHMETIC)}",
        "objective.correction=truncate",
        "asynchronous.bound=2",
        "asynchronous.workers=2",
        "asynchronous.chunk=3",
        *more,
    ]
    setting = [word for one in given for word in ("--set", one)]
    return ["train", "rl", "--model", f"{run}:sft", "--task", "arithmetic", "--out", str(out), *setting]


def weights(out: Path) -> bytes:
    return (out / "checkpoints" / "rl" / "final" / "model.safetensors").read_bytes()


def assert_accounted(out: Path) -> None:
    """Every step is there once, every issued group was taken once, and the account is closed at each step."""
    lines = Run.open(out).metrics("rl")
    assert [line["step"] for line in lines] == list(range(8))
    for line in lines:
        for unit in ("rollouts", "tokens"):
            assert line[f"account_generated_{unit}"] == sum(line[f"account_{part}_{unit}"] for part in PARTS)
        assert line["age_max"] <= 2
    schedule = read_jsonl(out / "rollouts" / "rl.schedule.jsonl")
    issued = sum(line["draw"][2] for line in schedule if line["kind"] == "issue")
    assert sorted(job for line in schedule if line["kind"] == "take" for job in line["jobs"]) == list(range(issued))
    assert lines[-1]["account_in_flight_rollouts"] == 0
    assert verify(out) == []


def replayed(cli: Cli, run: Path, of: Path, out: Path) -> None:
    done = cli.run(train(run, out, f"asynchronous.replay={of}"))
    assert done.returncode == 0, done.stderr
    assert numbers(out) == numbers(of)
    assert weights(out) == weights(of)
    for name in ("rl.jsonl", "rl.schedule.jsonl"):
        assert (out / "rollouts" / name).read_bytes() == (of / "rollouts" / name).read_bytes()


def test_a_killed_run_resumes_with_nothing_lost_and_replays_to_the_last_byte(run: Path, tmp_path: Path) -> None:
    cli, out = Cli(cache_of(run)), tmp_path / "run"
    code, _ = signal_when(cli.start(train(run, out)), reached(out, "rl", 4), signal.SIGKILL)
    assert code == -signal.SIGKILL
    done = cli.run([*train(run, out), "--resume"])
    assert done.returncode == 0, done.stderr
    assert "no token older than 2 optimizer step(s)" in done.stdout + done.stderr
    assert_accounted(out)
    replayed(cli, run, out, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, 2, 5, 7])
def test_killed_anywhere_it_resumes_and_replays(run: Path, tmp_path: Path, step: int) -> None:
    cli, out = Cli(cache_of(run)), tmp_path / "run"
    signal_when(cli.start(train(run, out)), reached(out, "rl", step), signal.SIGKILL)
    done = cli.run([*train(run, out), "--resume"])
    assert done.returncode == 0, done.stderr
    assert_accounted(out)
    replayed(cli, run, out, tmp_path / "again")


@pytest.mark.slow
def test_workers_as_processes(run: Path, tmp_path: Path) -> None:
    """Ctrl-C ends them too; what they drew replays in one process."""
    cli, out = Cli(cache_of(run)), tmp_path / "run"
    engine, one = "asynchronous.engine=processes", "asynchronous.workers=1"  # each process takes its time to import torch
    code, stderr = signal_when(cli.start(train(run, out, engine, one)), reached(out, "rl", 2), signal.SIGINT)
    assert code == 130
    assert "to continue: posttrain train rl" in last_error(stderr)
    done = cli.run([*train(run, out, engine, one), "--resume"])
    assert done.returncode == 0, done.stderr
    assert_accounted(out)
    done = cli.run(train(run, tmp_path / "again", engine, one, f"asynchronous.replay={out}"))
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "again") == numbers(out)
    assert weights(tmp_path / "again") == weights(out)


def test_what_cannot_work_is_one_line(run: Path, tmp_path: Path) -> None:
    cli = Cli(cache_of(run))
    done = cli.run(train(run, tmp_path / "a", "rl.minibatches=4", "asynchronous.bound=2"))
    assert "asynchronous.bound = 2 is less than the 4 optimizer steps of one training step" in last_error(done.stderr)
    done = cli.run(train(run, tmp_path / "b", "asynchronous.order=random"))
    assert "asynchronous.order" in last_error(done.stderr)
    done = cli.run(train(run, tmp_path / "c", f"asynchronous.replay={tmp_path}"))
    assert "holds no schedule; asynchronous.replay takes the directory" in last_error(done.stderr)
