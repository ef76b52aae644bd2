"""A run that was killed, interrupted or out of disk continues and ends with the numbers of one that never stopped."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
from e2e_cli import Cli, cache_of, ladder, last_error, numbers, reached, reference, results, signal_when, tree

from posttrain.runs.listing import list_runs, verify


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference(tmp_path_factory)


def assert_equal_runs(out: Path, run: Path) -> None:
    assert numbers(out) == numbers(run)
    assert results(out) == results(run)
    assert verify(out) == []
    weights = "checkpoints/grpo/final/model.safetensors"
    assert (out / weights).read_bytes() == (run / weights).read_bytes()
    assert (out / "rollouts/grpo.jsonl").read_bytes() == (run / "rollouts/grpo.jsonl").read_bytes()


def killed_and_resumed(cli: Cli, out: Path, points: list[tuple[str, int]]) -> None:
    """Kill the run's whole process group at each point in turn, then let it finish."""
    for place, point in enumerate(points):
        process = cli.start(ladder(out, *(["--resume"] if place else [])))
        code, _ = signal_when(process, reached(out, *point), signal.SIGKILL)
        assert code == -signal.SIGKILL
        assert list_runs(out)[0].state == "incomplete"
    done = cli.run(ladder(out, "--resume"))
    assert done.returncode == 0, done.stderr


def test_killed_in_base_sft_and_grpo_then_resumed_equals_an_uninterrupted_run(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    killed_and_resumed(Cli(tmp_path / "cache"), out, [("base", 22), ("sft", 41), ("grpo", 6)])
    assert_equal_runs(out, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "point", [("base", 3), ("base", -1), ("sft", 0), ("sft", -1), ("mine", 0), ("dpo", 1), ("eval.dpo", -1), ("grpo", -1)]
)
def test_killed_anywhere_then_resumed_equals_an_uninterrupted_run(run: Path, tmp_path: Path, point: tuple[str, int]) -> None:
    out = tmp_path / "run"
    killed_and_resumed(Cli(tmp_path / "cache"), out, [point])
    assert_equal_runs(out, run)


@pytest.mark.slow
def test_killed_with_two_processes_then_resumed_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    cli, out, whole = Cli(tmp_path / "cache"), tmp_path / "run", tmp_path / "whole"
    assert cli.run(ladder(whole, "--processes", "2")).returncode == 0
    process = cli.start(ladder(out, "--processes", "2"))
    signal_when(process, reached(out, "grpo", 6), signal.SIGKILL)
    done = cli.run(["ladder", "--out", str(out), "--resume"])
    assert done.returncode == 0, done.stderr
    assert_equal_runs(out, whole)


def test_interrupt_saves_says_how_to_continue_and_continues(run: Path, tmp_path: Path) -> None:
    cli, out = Cli(cache_of(run)), tmp_path / "run"
    code, stderr = signal_when(cli.start(ladder(out)), reached(out, "sft", 17), signal.SIGINT)
    assert code == 130
    error = last_error(stderr)
    assert "SIGINT received: finishing this step, then saving" in stderr
    assert "sft stopped after step" in error
    assert f"to continue: posttrain ladder --out {out}" in error
    assert error.endswith("--resume")
    step = int(error.partition("after step ")[2].split()[0])
    assert (out / "checkpoints" / "sft" / f"step_{step}" / "state.json").is_file()
    done = cli.run(["ladder", "--out", str(out), "--resume"])
    assert done.returncode == 0, done.stderr
    assert f"sft: resuming at step {step} of 89" in done.stderr
    assert_equal_runs(out, run)


def test_resuming_a_finished_run_changes_no_number(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(run, tmp_path / "copy"))
    before = tree(out)
    assert Cli(cache_of(run)).call(monkeypatch, "ladder", "--out", str(out), "--resume") == 0
    shown = capsys.readouterr()
    assert "grpo: done already" in shown.err
    assert "had no effect" not in shown.err
    assert shown.out == (run.parent / "stdout").read_text().replace(str(run), str(out))
    after = tree(out)
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] != before[name] and name != "report.html"] == []


def test_resuming_with_other_settings_is_refused_and_names_them(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(run)
    code = Cli(cache_of(run)).call(monkeypatch, "ladder", "--out", str(run), "--resume", "--set", "dpo.beta=0.2", "--seed", "5")
    assert code == 2
    error = last_error(capsys.readouterr().err)
    assert "dpo.beta: 0.1 -> 0.2" in error
    assert "seed: 0 -> 5" in error
    assert tree(run) == before


def test_full_disk_keeps_earlier_checkpoints_and_the_run_continues(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cli, flush = tmp_path / "run", Cli(cache_of(run)), os.fsync

    def full(descriptor: int) -> None:
        if list(out.glob("checkpoints/sft/.*step_15*")) or list(out.glob("checkpoints/sft/step_15*")):
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert cli.call(patch, *ladder(out)) == 2
    error = last_error(capsys.readouterr().err)
    assert "No space left on device" in error
    assert "step_15" in error
    kept = sorted(path.name for path in (out / "checkpoints" / "sft").iterdir())
    assert kept == ["step_10", "step_5"]
    assert verify(out) == []
    assert cli.call(monkeypatch, *ladder(out, "--resume")) == 0
    assert "sft: resuming at step 10 of 89" in capsys.readouterr().err
    assert_equal_runs(out, run)
