"""The run directory: creating, resuming, recording, rewinding."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.core.config import Config
from posttrain.core.errors import RunError, StorageError
from posttrain.runs.listing import verify
from posttrain.runs.manifest import Code
from posttrain.runs.recorder import Recorder
from posttrain.runs.run import Run, deterministic_bytes


class Inner(Config):
    lr: float = 1e-5
    epochs: int = 1


class Outer(Config):
    recipe: str = "toy"
    seed: int = 0
    sft: Inner = Inner()


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
COMMAND = ["posttrain", "ladder", "--out", "x"]


def create(path: Path, **overrides) -> Run:
    return Run.create(path, config=Outer(**overrides), command=COMMAND, seeds={"seed": 0}, digests={"data": "aa"})


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def files(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_create_writes_manifest_and_config(tmp_path):
    run = create(tmp_path / "a")
    assert set(os.listdir(run.path)) - {"code.diff"} == {"config.yaml", "manifest.json"}
    assert run.config() == {"recipe": "toy", "seed": 0, "sft": {"lr": 1e-5, "epochs": 1}}
    assert run.manifest["kind"] == "toy"
    assert run.manifest["command"] == COMMAND
    assert os.listdir(tmp_path) == ["a"]


def test_create_takes_an_empty_directory_and_refuses_a_filled_one(tmp_path):
    (tmp_path / "a" / ".x.tmp-0123abcd").mkdir(parents=True)
    create(tmp_path / "a")
    before = files(tmp_path)
    with pytest.raises(RunError, match="exists and is not empty; continue it with --resume or choose another --out"):
        create(tmp_path / "a")
    assert files(tmp_path) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(RunError, match="is not empty; choose another --out"):
        create(tmp_path / "mine")
    with pytest.raises(RunError, match="is not empty; choose another --out"):
        create(tmp_path / "mine" / "thesis.txt")


def test_a_start_killed_half_way_can_simply_be_started_again(tmp_path):
    code = """
import os, sys
from posttrain.core.config import Config
from posttrain.runs.run import Run
os.replace = lambda *a: os._exit(9)
Run.create(sys.argv[1], config=Config(), command=["x"], seeds={})
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], check=False, env=ENVIRONMENT).returncode == 9
    assert not (tmp_path / "a").exists()
    assert create(tmp_path / "a").config()["seed"] == 0


def test_resume_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        Run.resume(tmp_path / "none", config=Outer())
    with pytest.raises(RunError, match="is not a run"):
        Run.open(tmp_path)


def test_resume_names_the_differing_keys_and_both_values(tmp_path):
    create(tmp_path / "a")
    changed = Outer(seed=3, sft=Inner(lr=3e-5))
    with pytest.raises(RunError, match=r"seed: 0 -> 3, sft\.lr: 1e-05 -> 3e-05; resume with the same"):
        Run.resume(tmp_path / "a", config=changed)
    with pytest.raises(RunError, match=r"other settings: seed: 0 -> 3; resume"):
        Run.resume(tmp_path / "a", config=changed, ignore=["sft"])
    with pytest.raises(RunError, match="seed: 0 -> 3"):
        Run.resume(tmp_path / "a", config=Outer(seed=3), ignore=["see"])


def test_resume_refuses_other_inputs_and_names_each_with_both_digests(tmp_path):
    create(tmp_path / "a")
    Run.resume(tmp_path / "a", config=Outer(), digests={"data": "aa"})
    before = files(tmp_path)
    with pytest.raises(RunError) as caught:
        Run.resume(tmp_path / "a", config=Outer(), digests={"data": "bb", "template": "cc"})
    assert str(caught.value) == (
        f"{tmp_path / 'a'} was started with other inputs: data: 'aa' -> 'bb', template: unset -> 'cc'; restore them or choose another "
        f"--out, or go on with what is there now: posttrain resume {tmp_path / 'a'} --accept-changed data,template"
    )
    with pytest.raises(RunError, match="other inputs: data: 'aa' -> unset"):
        Run.resume(tmp_path / "a", config=Outer(), digests={})
    with pytest.raises(RunError, match="other inputs: template: unset -> 'cc'; .*--accept-changed data,template"):
        Run.resume(tmp_path / "a", config=Outer(), digests={"data": "bb", "template": "cc"}, accept=["data"])
    assert files(tmp_path) == before


def test_an_accepted_change_is_recorded_and_holds_from_then_on(tmp_path):
    create(tmp_path / "a")
    run = Run.resume(tmp_path / "a", config=Outer(), digests={"data": "bb"}, accept=["data"], command=["posttrain", "--resume"])
    assert run.notes == ["goes on with another data: aa -> bb, as was asked for"]
    (entry,) = Run.open(tmp_path / "a").manifest["history"]
    assert (entry["inputs"], entry["settings"], entry["command"]) == ({"data": ["aa", "bb"]}, {}, ["posttrain", "--resume"])
    again = Run.resume(tmp_path / "a", config=Outer(), digests={"data": "bb"})
    assert again.notes == []
    assert len(again.manifest["history"]) == 1
    with pytest.raises(RunError, match="other inputs: data: 'bb' -> 'aa'"):
        Run.resume(tmp_path / "a", config=Outer(), digests={"data": "aa"})
    assert verify(tmp_path / "a") == []


def test_accepting_what_is_no_input_is_refused(tmp_path):
    create(tmp_path / "a")
    with pytest.raises(RunError, match="'date' is no input of .*; its inputs are: data"):
        Run.resume(tmp_path / "a", config=Outer(), digests={"data": "bb"}, accept=["date"])


def test_a_setting_that_may_change_is_recorded_and_the_first_one_kept(tmp_path):
    create(tmp_path / "a")
    text = (tmp_path / "a" / "config.yaml").read_bytes()
    changed = Outer(seed=3, sft=Inner(lr=3e-5))
    run = Run.resume(tmp_path / "a", config=changed, ignore=["seed", "sft.lr"])
    assert run.notes == ["goes on with seed = 3 instead of 0", "goes on with sft.lr = 3e-05 instead of 1e-05"]
    assert (tmp_path / "a" / "config.yaml").read_bytes() == text
    again = Run.open(tmp_path / "a")
    assert again.config() == changed.model_dump(mode="json")
    assert again.first_config() == Outer().model_dump(mode="json")
    assert verify(tmp_path / "a") == []
    assert Run.resume(tmp_path / "a", config=changed).notes == []
    back = Run.resume(tmp_path / "a", config=Outer(), ignore=["seed", "sft"])
    assert back.config() == Outer().model_dump(mode="json")
    assert len(back.manifest["history"]) == 2


def test_another_number_of_processes_says_what_it_costs(tmp_path):
    class Parallel(Config):
        processes: int = 1

    Run.create(tmp_path / "a", config=Parallel(), command=COMMAND, seeds={})
    run = Run.resume(tmp_path / "a", config=Parallel(processes=2), ignore=["processes"])
    (note,) = run.notes
    assert note.startswith("goes on with processes = 2 instead of 1; ")
    assert "last digits may differ" in note


def test_a_change_that_was_killed_in_its_write_is_as_if_not_made(tmp_path, monkeypatch):
    create(tmp_path / "a")
    monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StorageError, match="Input/output error"):
        Run.resume(tmp_path / "a", config=Outer(seed=3), ignore=["seed"])
    monkeypatch.undo()
    assert Run.open(tmp_path / "a").config()["seed"] == 0
    assert Run.resume(tmp_path / "a", config=Outer()).notes == []


def test_a_run_is_complete_when_every_declared_stage_is(tmp_path):
    run = Run.create(tmp_path / "a", config=Outer(), command=COMMAND, seeds={}, stages=["sft", "dpo"])
    assert not run.complete
    run.finish_stage("sft", {})
    assert not run.complete
    run.finish_stage("dpo", {})
    assert run.complete
    assert not create(tmp_path / "b").complete


def test_resume_cleans_what_a_killed_process_left(tmp_path):
    run = create(tmp_path / "a")
    root = run.checkpoint_root("sft")
    (root / ".step_2.tmp-0123abcd").mkdir(parents=True)
    (root / ".step_1.previous").mkdir()
    (run.path / ".x.tmp-0123abcd").write_text("partial")
    Run.resume(run.path, config=Outer())
    assert os.listdir(root) == ["step_1"]
    assert ".x.tmp-0123abcd" not in os.listdir(run.path)


def test_metric_line_is_in_name_order_with_the_clock_apart(tmp_path):
    run = create(tmp_path / "a")
    run.metric("sft", 1, {"loss": 2.5, "acc": 0, "note": None}, {"step": 0.25})
    assert (run.path / "metrics.jsonl").read_text() == (
        '{"schema": 1, "stage": "sft", "step": 1, "acc": 0, "loss": 2.5, "note": null, "seconds": {"step": 0.25}}\n'
    )
    run.metric("dpo", 1, {})
    assert [line["stage"] for line in run.metrics()] == ["sft", "dpo"]
    assert [line["stage"] for line in run.metrics("dpo")] == ["dpo"]
    with pytest.raises(ValueError, match="'step' is a field of every metrics line"):
        run.metric("sft", 2, {"step": 1})


def test_equal_runs_differ_only_in_seconds(tmp_path):
    one, two = create(tmp_path / "a"), create(tmp_path / "b")
    one.metric("sft", 1, {"loss": 2.5, "acc": 0.5}, {"step": 0.25})
    two.metric("sft", 1, {"acc": 0.5, "loss": 2.5}, {"step": 0.75})
    first, second = one.path / "metrics.jsonl", two.path / "metrics.jsonl"
    assert first.read_bytes() != second.read_bytes()
    assert (
        deterministic_bytes(first)
        == deterministic_bytes(second)
        == (b'{"schema": 1, "stage": "sft", "step": 1, "acc": 0.5, "loss": 2.5}\n')
    )
    two.metric("sft", 2, {"acc": 0.5})
    assert deterministic_bytes(first) != deterministic_bytes(second)


def test_a_non_finite_metric_is_null_and_an_alarm(tmp_path):
    run = create(tmp_path / "a")
    run.metric("grpo", 4, {"kl": float("inf"), "loss": float("nan"), "reward": 0.5}, {"step": float("nan"), "sync": None})
    assert run.metrics() == [
        {"schema": 1, "stage": "grpo", "step": 4, "kl": None, "loss": None, "reward": 0.5, "seconds": {"step": None, "sync": None}}
    ]
    assert run.alarms() == [
        {
            "schema": 1,
            "stage": "grpo",
            "step": 4,
            "name": "non_finite",
            "detail": "not a finite number: kl = inf, loss = nan",
            "evidence": {"kl": "inf", "loss": "nan"},
        }
    ]


def test_alarm_evidence_keeps_non_finite_numbers_readable(tmp_path):
    run = create(tmp_path / "a")
    run.alarm("sft", 1, "spike", "loss jumped", {"loss": [1.0, float("nan")], "more": {"x": float("-inf")}})
    assert run.alarms()[0]["evidence"] == {"loss": [1.0, "nan"], "more": {"x": "-inf"}}


def test_rewind_restores_every_file_and_empties_new_ones(tmp_path):
    run = create(tmp_path / "a")
    run.metric("sft", 1, {"loss": 2.0})
    run.rollout("grpo", {"task": "t1"})
    position = run.position()
    at_checkpoint = files(run.path)
    assert position == {"metrics.jsonl": len(at_checkpoint["metrics.jsonl"]), "rollouts/grpo.jsonl": 28}
    run.metric("sft", 2, {"loss": float("nan")})
    run.rollout("grpo", {"task": "t2"})
    resumed = Run.resume(run.path, config=Outer())
    resumed.rewind(position)
    assert files(run.path) == {**at_checkpoint, "alarms.jsonl": b""}
    resumed.metric("sft", 2, {"loss": 1.0})
    assert [line["step"] for line in resumed.metrics()] == [1, 2]


def test_position_counts_whole_lines_only(tmp_path):
    run = create(tmp_path / "a")
    run.metric("sft", 1, {})
    whole = (run.path / "metrics.jsonl").stat().st_size
    with open(run.path / "metrics.jsonl", "ab") as handle:
        handle.write(b'{"schema"')
    assert Run.resume(run.path, config=Outer()).position() == {"metrics.jsonl": whole}


def test_position_is_on_the_disk_before_it_is_returned(tmp_path, monkeypatch):
    run = create(tmp_path / "a")
    run.metric("sft", 1, {})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"metrics\.jsonl: No space left on device; the previous metrics\.jsonl is intact"):
        run.position()


def test_rewind_refuses_when_lines_are_missing(tmp_path):
    run = create(tmp_path / "a")
    with pytest.raises(RunError, match="0 bytes, but 50 were recorded"):
        run.rewind({"metrics.jsonl": 50})


def test_stages_and_evals_round_trip(tmp_path):
    run = create(tmp_path / "a")
    assert run.finished("sft") is None
    assert run.eval("base.greedy") is None
    run.finish_stage("sft", {"steps": 3})
    run.save_eval("base.greedy", {"score": 0.5})
    reader = Run.open(run.path)
    assert reader.finished("sft") == {"schema": 1, "stage": "sft", "steps": 3}
    assert reader.eval("base.greedy") == {"schema": 1, "score": 0.5}
    assert reader.checkpoint_root("sft") == run.path / "checkpoints" / "sft"


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b", "a b"])
def test_names_that_are_not_file_names_are_refused(tmp_path, name):
    run = create(tmp_path / "a")
    with pytest.raises(ValueError, match="cannot name a stage"):
        run.finish_stage(name, {})
    with pytest.raises(ValueError, match="cannot name a stage"):
        run.checkpoint_root(name)


def test_an_opened_run_writes_nothing(tmp_path):
    create(tmp_path / "a")
    before = files(tmp_path)
    run = Run.open(tmp_path / "a")
    for write in (
        lambda: run.metric("sft", 1, {}),
        lambda: run.rollout("sft", {}),
        lambda: run.alarm("sft", 1, "x", "y", {}),
        lambda: run.rewind({"metrics.jsonl": 0}),
        lambda: run.finish_stage("sft", {}),
        lambda: run.save_eval("x", {}),
    ):
        with pytest.raises(RunError, match="opened for reading only"):
            write()
    assert files(tmp_path) == before


def test_silent_takes_every_call_and_writes_nothing(tmp_path):
    run = create(tmp_path / "a")
    run.finish_stage("sft", {"steps": 3})
    before = files(tmp_path)
    recorders: list[Recorder] = [Run.silent(), Run.silent(run.path)]
    for recorder in recorders:
        recorder.metric("sft", 1, {"loss": float("nan")}, {"step": 1.0})
        recorder.rollout("sft", {"x": 1})
        recorder.alarm("sft", 1, "x", "y", {})
        recorder.rewind({"metrics.jsonl": 9})
        recorder.finish_stage("dpo", {})
        recorder.note("kernels", {"threads": 1})
        recorder.save_eval("x", {})
        assert recorder.position() == {}
        assert recorder.eval("x") is None
        assert recorder.metrics() == []
        assert not recorder.checkpoint_root("sft").exists()
    assert [recorder.finished("sft") is None for recorder in recorders] == [True, False]
    assert files(tmp_path) == before


def test_an_unwritable_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="Not a directory; .*fix the cause, then resume") as caught:
        create(tmp_path / "file" / "deep" / "run")
    assert "\n" not in str(caught.value)


def test_the_package_imports_without_torch():
    package = Path(sys.modules["posttrain.runs.run"].__file__ or "").parent
    names = sorted(f"posttrain.runs.{path.stem}" for path in package.glob("*.py") if path.stem != "__init__")
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=ENVIRONMENT).returncode == 0


def test_manifest_on_disk_is_plain_json(tmp_path):
    run = create(tmp_path / "a")
    stored = json.loads((run.path / "manifest.json").read_text())
    assert stored == run.manifest
    assert stored["digests"] == {"data": "aa"}
    assert stored["stages"] == []


def test_what_is_found_out_while_running_goes_to_the_manifest(tmp_path):
    run = create(tmp_path / "a")
    run.note("detected", {"actor": {"dtype": "float32"}})
    run.note("detected", {"teacher": {"dtype": "bfloat16"}})
    written = (run.path / "manifest.json").read_bytes()
    run.note("detected", {"actor": {"dtype": "float32"}})
    assert (run.path / "manifest.json").read_bytes() == written
    again = Run.open(run.path)
    assert again.manifest["detected"] == {"actor": {"dtype": "float32"}, "teacher": {"dtype": "bfloat16"}}
    assert "history" not in again.manifest
    with pytest.raises(RunError, match="opened for reading only"):
        again.note("kernels", {"threads": 1})
    with pytest.raises(ValueError, match="'seeds' is no section"):
        run.note("seeds", {"seed": 1})


def test_a_fact_that_changes_on_the_way_is_kept_in_the_history(tmp_path):
    run = create(tmp_path / "a")
    run.note("kernels", {"threads": 1, "mkl": True})
    run.note("kernels", {"threads": 2, "mkl": True})
    assert run.manifest["kernels"] == {"threads": 2, "mkl": True}
    (entry,) = run.manifest["history"]
    assert entry["drift"] == {"kernels.threads": [1, 2]}
    assert Run.resume(run.path, config=Outer()).config() == Outer().model_dump(mode="json")
    assert verify(run.path) == []


def test_a_resumed_run_says_when_its_surroundings_have_changed(tmp_path, monkeypatch):
    for module in ("run", "manifest"):
        monkeypatch.setattr(f"posttrain.runs.{module}.code_state", lambda folder: Code({"revision": "0" * 40}, b""))
    create(tmp_path / "a")
    assert Run.resume(tmp_path / "a", config=Outer(), command=COMMAND).notes == []
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    run = Run.resume(tmp_path / "a", config=Outer(), command=COMMAND)
    assert run.notes == ["goes on with other code, packages or machine: environment.ATEN_CPU_CAPABILITY: None -> 'default'"]
    (entry,) = run.manifest["history"]
    assert (entry["settings"], entry["drift"]) == ({}, {"environment.ATEN_CPU_CAPABILITY": [None, "default"]})
    again = Run.resume(tmp_path / "a", config=Outer(), command=COMMAND)
    assert (again.notes, len(again.manifest["history"])) == ([], 1)


def test_surroundings_of_a_complete_run_do_not_matter_any_more(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "a", config=Outer(), command=COMMAND, seeds={}, stages=["sft"])
    run.finish_stage("sft", {})
    run.finish()
    before = files(tmp_path)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert Run.resume(tmp_path / "a", config=Outer(), command=COMMAND).notes == []
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must hold a JSON object, not a list; posttrain runs verify"),
        ("{", "not readable as JSON"),
        ('{"schema_version": 3}', "has schema 3, and this version reads 1, 2; use the version that wrote it"),
    ],
)
def test_a_manifest_that_is_none_is_one_line(tmp_path, content, message):
    create(tmp_path / "a")
    (tmp_path / "a" / "manifest.json").write_text(content)
    with pytest.raises(RunError, match=message) as caught:
        Run.open(tmp_path / "a")
    assert "\n" not in str(caught.value)


def test_a_run_of_the_first_schema_can_be_continued(tmp_path):
    run = create(tmp_path / "a")
    keep = ("created", "command", "seeds", "digests", "config_digest", "stages", "packages")
    old = {name: run.manifest[name] for name in keep} | {"schema_version": 1, "parent": None}
    (run.path / "manifest.json").write_text(json.dumps(old))
    resumed = Run.resume(run.path, config=Outer(), digests={"data": "aa"}, command=COMMAND)
    resumed.note("kernels", {"threads": 1})
    assert verify(run.path) == []


def test_the_uncommitted_changes_lie_in_the_run(tmp_path, monkeypatch):
    patch = b"diff --git a/x b/x\n"
    state = {"revision": "0" * 40, "dirty": True, "diff_digest": "1", "diff_file": "code.diff", "diff_file_digest": digest_of(patch)}
    monkeypatch.setattr("posttrain.runs.run.code_state", lambda folder: Code(state, patch))
    run = create(tmp_path / "a")
    assert (run.path / "code.diff").read_bytes() == patch
    assert run.manifest["code"]["diff_file"] == "code.diff"
    assert verify(run.path) == []
