"""Listing runs."""

from __future__ import annotations

import json

import pytest

from posttrain.core.config import Config
from posttrain.core.digest import file_digest
from posttrain.runs.lineage import find_parent
from posttrain.runs.listing import list_runs
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


def test_a_listing_says_where_a_run_comes_from_and_who_it_is(tmp_path, run):
    settings = Settings(seed=3)
    parent = find_parent({}, ["posttrain", "--config", str(run.path / "config.yaml")])
    Run.create(tmp_path / "b", config=settings, command=["posttrain"], seeds={}, stages=["sft", "dpo"], parent=parent)
    first, second = list_runs(tmp_path)
    assert (first.id, first.origin) == (run.manifest["id"], None)
    assert second.origin == f"one variable from {first.id}: seed"


def test_a_run_of_the_first_schema_is_listed_and_one_of_a_later_schema_too(tmp_path, run):
    manifest = json.loads((run.path / "manifest.json").read_text())
    for version, note in ((1, None), (7, "schema 7, which this version knows in part")):
        (run.path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": version, "parent": "runs/base"}))
        (found,) = list_runs(tmp_path)
        assert (found.state, found.kind, found.note, found.origin) == ("incomplete", "toy", note, "from runs/base")


@pytest.mark.parametrize("content", [b"[]", b'"x"', b"\xff", b"", b"null", b"[" * 50_000])
def test_a_manifest_of_another_kind_is_damage(tmp_path, run, content):
    (run.path / "manifest.json").write_bytes(content)
    (found,) = list_runs(tmp_path)
    assert found.state == "damaged"
    assert found.note


def test_only_the_end_of_long_metrics_is_read(tmp_path, run, monkeypatch):
    (run.path / "metrics.jsonl").write_bytes(b"garbage\n" * 20_000 + b'{"schema": 1, "stage": "sft", "step": 9}\n')
    (found,) = list_runs(tmp_path)
    assert found.last == {"schema": 1, "stage": "sft", "step": 9}
