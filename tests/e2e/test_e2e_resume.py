"""A run that was killed, interrupted or out of disk continues and ends with the numbers of one that never stopped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from e2e_cli import Cli, cache_of, ladder, last_error, numbers, reached, reference, results, signal_when, tree

from posttrain.core import storage
from posttrain.core.errors import ConfigError
from posttrain.core.files import read_jsonl
from posttrain.core.sampling import Sampling
from posttrain.recipes.single import SFTRun, train
from posttrain.runs.listing import list_runs, verify
from posttrain.runs.run import Run


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


def test_what_a_checkpoint_took_is_among_the_seconds_of_the_next_step(run: Path) -> None:
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if line["stage"] == "grpo"]
    took = {line["step"]: line["seconds"]["checkpoint"] for line in lines if "checkpoint" in line["seconds"]}
    assert sorted(took) == [5, 10]  # saved every 5 steps of 12
    assert all(value > 0 for value in took.values())


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


def test_resuming_a_finished_run_does_nothing_and_says_so(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(run, tmp_path / "copy"))
    before = tree(out)
    assert Cli(cache_of(run)).call(monkeypatch, "ladder", "--out", str(out), "--resume") == 0
    shown = capsys.readouterr()
    assert shown.err == f"{out} is finished already: nothing to do\n"
    assert shown.out == (run.parent / "stdout").read_text().replace(str(run), str(out))
    assert tree(out) == before


def test_a_run_that_was_killed_before_its_summary_writes_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(run, tmp_path / "copy"))
    before = tree(out)
    for name in ("summary.json", "report.html"):
        (out / name).unlink()
    assert Cli(cache_of(run)).call(monkeypatch, "ladder", "--out", str(out), "--resume") == 0
    assert "grpo: done already" in capsys.readouterr().err
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


def rows_file(folder: Path, words: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"say {n}", "completion": f"{words} {n}"}) + "\n" for n in range(8)))
    return path


def test_a_changed_input_is_refused_by_name_and_with_both_digests_unless_told(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli, out, data = Cli(cache_of(run)), tmp_path / "out", rows_file(tmp_path, "yes")
    model = Path(shutil.copytree(run / "checkpoints" / "sft" / "final", tmp_path / "model"))
    assert cli.call(monkeypatch, "train", "sft", "--model", str(model), "--data", str(data), "--out", str(out)) == 0
    started = Run.open(out).manifest["digests"]
    assert started.keys() == {"data", "model", "tokenizer", "template"}
    assert cli.call(monkeypatch, "train", "sft", "--out", str(out), "--resume") == 0
    rows_file(tmp_path, "no")
    (model / "chat_template.jinja").write_text((model / "chat_template.jinja").read_text() + " ")
    words = model / "tokenizer_config.json"
    words.write_text(json.dumps({**json.loads(words.read_text()), "padding_side": "left"}))
    before = tree(out)
    capsys.readouterr()
    assert cli.call(monkeypatch, "train", "sft", "--out", str(out), "--resume") == 2
    error = last_error(capsys.readouterr().err)
    for name in ("data", "template", "tokenizer"):
        assert f"{name}: '{started[name]}' -> '" in error
    assert error.endswith("--accept-changed data,template,tokenizer")
    assert "model:" not in error
    assert tree(out) == before
    given = ["resume", str(out), "--accept-changed"]
    assert cli.call(monkeypatch, *given, "data,tokenizer") == 2
    assert cli.call(monkeypatch, *given, "data, tokenizer, template") == 0
    (entry,) = Run.open(out).manifest["history"]
    assert sorted(entry["inputs"]) == ["data", "template", "tokenizer"]
    assert entry["inputs"]["data"][0] == started["data"]
    assert cli.call(monkeypatch, "train", "sft", "--out", str(out), "--resume") == 0
    assert verify(out) == []


def test_a_place_without_room_or_on_another_volume_is_refused_before_anything_is_computed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli, model, data = Cli(cache_of(run)), run / "checkpoints" / "sft" / "final", rows_file(tmp_path, "yes")
    given = ["train", "sft", "--model", str(model), "--data", str(data), "--out", str(tmp_path / "out")]
    with monkeypatch.context() as patch:
        patch.setattr(storage, "free_bytes", lambda path: 500_000)
        assert cli.call(patch, *given) == 2
    error = last_error(capsys.readouterr().err)
    assert "3 checkpoints of" in error
    assert "500 kB free; free some space, lower machine.save_total_limit, or set machine.export=false" in error
    assert not (tmp_path / "out").exists()  # the corrected command may use the same place
    monkeypatch.setenv("POSTTRAIN_EXPECTED_MOUNT", "/mnt/no-such-volume")
    assert cli.call(monkeypatch, *given) == 2
    assert "not on '/mnt/no-such-volume'" in last_error(capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
    mount = storage.mount_of(tmp_path)
    assert mount is not None
    monkeypatch.setenv("POSTTRAIN_EXPECTED_MOUNT", mount.point)
    assert cli.call(monkeypatch, *given) == 0


def test_resume_finds_out_what_kind_of_run_it_is(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = Cli(cache_of(run))
    assert cli.call(monkeypatch, "resume", str(run)) == 0
    assert "is finished already: nothing to do" in capsys.readouterr().err
    assert cli.call(monkeypatch, "resume", str(run), "--set", "dpo.beta=0.2") == 2
    assert "dpo.beta: 0.1 -> 0.2" in last_error(capsys.readouterr().err)
    Run.create(tmp_path / "other", config=Sampling(), command=["x"], seeds={}, stages=["mine"])
    assert cli.call(monkeypatch, "resume", str(tmp_path / "other")) == 2
    assert "has the stages mine and is no run of a recipe" in last_error(capsys.readouterr().err)
    with pytest.raises(ConfigError, match=r"nothing can have changed \(data\) in a run that begins; accept changes when resuming one"):
        train(SFTRun(model="x", data=str(rows_file(tmp_path, "yes"))), tmp_path / "new", accept_changed=["data"])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("1", "2"), ("2", "1")])
def test_a_run_goes_on_with_another_number_of_processes(run: Path, tmp_path: Path, before: str, after: str) -> None:
    cli, out = Cli(cache_of(run)), tmp_path / "run"
    signal_when(cli.start(ladder(out, "--processes", before)), reached(out, "sft", 41), signal.SIGKILL)
    process = cli.start(["resume", str(out), "--processes", after])
    _, stderr = signal_when(process, reached(out, "grpo", 6), signal.SIGKILL)
    assert f"goes on with processes = {after} instead of {before}; sums of floats run in another order, so last digits may differ" in stderr
    done = cli.run(["resume", str(out)])  # it stays with that number
    assert done.returncode == 0, done.stderr
    assert f"{after} process(es)" in done.stderr
    assert "instead of" not in done.stderr
    assert verify(out) == []
    (entry,) = Run.open(out).manifest["history"]
    assert entry["settings"] == {"processes": [int(before), int(after)]}
    ours, theirs = (read_jsonl(path / "metrics.jsonl") for path in (out, run))
    assert [(line["stage"], line["step"]) for line in ours] == [(line["stage"], line["step"]) for line in theirs]
    for line, other in zip(ours, theirs, strict=True):
        if line["stage"] == "sft":  # training from nothing before it has made 1e-7 into about 1e-4, and draws make more of it later
            assert line["loss"] == pytest.approx(other["loss"], abs=5e-3)
