"""Listing runs and checking them against what they recorded."""

from __future__ import annotations

import pytest

from posttrain.core.config import Config
from posttrain.core.digest import file_digest
from posttrain.core.errors import RunError
from posttrain.runs.listing import Problem, list_runs, verify
from posttrain.runs.run import Run


class Settings(Config):
    recipe: str = "toy"
    seed: int = 0


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run.create(tmp_path / "a", config=Settings(), command=["posttrain"], seeds={}, stages=["sft", "dpo"])
    run.metric("sft", 1, {"loss": 2.0})
    weights = run.checkpoint_root("sft") / "weights.bin"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    run.finish_stage("sft", {"digests": {"checkpoints/sft/weights.bin": file_digest(weights)}})
    run.save_eval("sft", {"score": 0.5})
    return run


def test_list_shows_how_far_a_run_got(tmp_path, run):
    run.metric("dpo", 1, {"loss": 0.7})
    (tmp_path / "not-a-run").mkdir()
    (only,) = list_runs(tmp_path)
    assert (only.path, only.kind, only.stages, only.state) == (run.path, "toy", ("sft",), "incomplete")
    assert only.last is not None
    assert (only.last["stage"], only.last["loss"]) == ("dpo", 0.7)
    run.finish_stage("dpo", {})
    assert list_runs(tmp_path)[0].state == "finished"
    assert [found.path for found in list_runs(run.path)] == [run.path]
    assert list_runs(tmp_path / "missing") == []


def test_undeclared_stages_are_those_that_wrote_metrics(tmp_path):
    run = Run.create(tmp_path / "a", config=Settings(), command=["posttrain"], seeds={})
    assert list_runs(tmp_path)[0].state == "incomplete"
    run.metric("sft", 1, {})
    assert list_runs(tmp_path)[0].state == "incomplete"
    run.finish_stage("sft", {})
    assert list_runs(tmp_path)[0].state == "finished"


def test_a_damaged_run_is_listed_as_such(tmp_path, run):
    (run.path / "manifest.json").write_text("{")
    assert list_runs(tmp_path)[0].state == "damaged"


def test_verify_accepts_an_untouched_run_and_changes_nothing(run):
    before = sorted(run.path.rglob("*"))
    assert verify(run.path) == []
    assert sorted(run.path.rglob("*")) == before


def test_verify_finds_a_changed_and_a_missing_file(run):
    weights = run.checkpoint_root("sft") / "weights.bin"
    recorded = file_digest(weights)
    weights.write_bytes(b"other")
    assert verify(run.path) == [
        Problem("checkpoints/sft/weights.bin", f"changed: digest {file_digest(weights)}, stages/sft.json records {recorded}")
    ]
    weights.unlink()
    assert verify(run.path) == [Problem("checkpoints/sft/weights.bin", "missing, though stages/sft.json records it")]


def test_verify_finds_a_changed_config(run):
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace("seed: 0", "seed: 1"))
    (problem,) = verify(run.path)
    assert problem.file == "config.yaml"
    assert "changed since the run began" in problem.detail


@pytest.mark.parametrize(
    ("name", "content", "detail"),
    [
        ("metrics.jsonl", b'{"a": 1}\n{"b"\n{"c": 3}\n', "metrics.jsonl:2: not a JSON value"),
        ("metrics.jsonl", b'{"a": 1}\n{"b"', "the last line is unfinished"),
        ("rollouts/sft.jsonl", b"x\n", "sft.jsonl:1: not a JSON value"),
        ("evals/sft.json", b"{", "not readable as JSON"),
        ("stages/sft.json", b"{", "not readable as JSON"),
        ("summary.json", b"{", "not readable as JSON"),
        ("config.yaml", b"a: [", "not readable"),
        ("manifest.json", b"{", "not readable as JSON"),
    ],
)
def test_verify_reports_every_file_that_does_not_parse(run, name, content, detail):
    path = run.path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    (problem,) = verify(run.path)
    assert problem.file == name
    assert detail in problem.detail


def test_verify_refuses_what_is_not_a_run(tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        verify(tmp_path)
