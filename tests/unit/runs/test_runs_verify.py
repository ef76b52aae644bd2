"""Checking a run against what it recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from posttrain.core.config import Config
from posttrain.core.digest import digest, file_digest
from posttrain.core.errors import RunError
from posttrain.runs.run import Run
from posttrain.runs.verify import Problem, unreadable, verify

LINE = b'{"schema": 1, "stage": "sft", "step": 1, "loss": 2.0, "seconds": {}}\n'


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
    run.finish_stage("sft", {"digests": {"checkpoints/sft/weights.bin": file_digest(weights)}, "position": run.position()})
    run.save_eval("sft", {"score": 0.5})
    return run


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def details(run: Run) -> list[tuple[str, str]]:
    return [(problem.file, problem.detail) for problem in verify(run.path)]


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
        ("metrics.jsonl", LINE + b'{"b"\n' + LINE, "metrics.jsonl:2: not a JSON value"),
        ("metrics.jsonl", LINE + b'{"b"', "the last line is unfinished"),
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


def test_a_finished_run_knows_every_record_it_wrote(run):
    run.finish()
    assert set(run.manifest["produced"]) == {"metrics.jsonl", "evals/sft.json", "stages/sft.json"}
    assert verify(run.path) == []
    edit(run.path / "evals" / "sft.json", score=0.9)
    (problem,) = verify(run.path)
    assert problem.file == "evals/sft.json"
    assert problem.detail.startswith("changed: digest ")
    assert problem.detail.endswith(" when the run was finished")
    (run.path / "evals" / "sft.json").unlink()
    assert verify(run.path) == [Problem("evals/sft.json", "missing, though manifest.json records it")]


def test_a_manifest_edited_by_hand_is_found(run):
    edit(run.path / "manifest.json", seeds={"seed": 7})
    ((file, detail),) = details(run)
    assert file == "manifest.json"
    assert detail.startswith("changed by hand: digest ")


def test_the_stored_diff_is_checked(tmp_path, run):
    (run.path / "code.diff").write_text("diff --git a b\n")
    manifest = json.loads((run.path / "manifest.json").read_text())
    manifest["code"] |= {"diff_file": "code.diff", "diff_file_digest": file_digest(run.path / "code.diff")}
    del manifest["record_digest"]
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    assert verify(run.path) == []
    (run.path / "code.diff").write_text("diff --git a c\n")
    ((file, detail),) = details(run)
    assert (file, detail[:15]) == ("code.diff", "changed: digest")


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "checkpoints/../../secret", "out/secret", "", "a\0b", "checkpoints\\..\\..\\secret"]
)
def test_a_name_that_leads_out_of_the_run_is_not_read(run, name):
    secret = run.path.parent / "secret"
    secret.write_text("s")
    (run.path / "out").symlink_to("..")
    edit(run.path / "stages" / "sft.json", digests={name: "0" * 16})
    (problem,) = verify(run.path)
    assert problem.file == "stages/sft.json"
    assert "which is no path within the run; it was not read" in problem.detail
    assert file_digest(secret) not in problem.detail


def test_a_record_that_is_a_link_to_elsewhere_is_not_read(run):
    (run.path.parent / "secret.jsonl").write_text("secret\n")
    (run.path / "alarms.jsonl").symlink_to("../secret.jsonl")
    assert details(run) == [("alarms.jsonl", "leads out of the run directory; it was not read")]


@pytest.mark.parametrize(
    ("name", "changes", "detail"),
    [
        ("manifest.json", {"stages": "sft"}, "'stages' must be a list, not text"),
        ("manifest.json", {"digests": [1]}, "'digests' must be an object, not a list"),
        ("manifest.json", {"stages": [3]}, "'stages' must list names, not a number"),
        ("manifest.json", {"schema_version": 9}, "has schema 9, this version reads 1, 2; compared as far as known"),
        ("stages/sft.json", {"digests": "x"}, "digests must be an object, not text"),
        ("stages/sft.json", {"stage": "dpo"}, "is the record of stage dpo"),
        ("stages/sft.json", {"position": {"../x": 3}}, "records the position 3 of ../x, which is none"),
        ("stages/sft.json", {"position": {"metrics.jsonl": True}}, "records the position True of metrics.jsonl, which is none"),
        ("stages/sft.json", {"position": 3}, "'position' must be an object, not a number"),
        ("evals/sft.json", {"items": [{"id": "a"}], "conditions": {"n_items": 2}}, "holds 1 items, its conditions say 2"),
        ("evals/sft.json", {"items": {"id": "a"}}, "'items' must be a list, not an object"),
        ("evals/sft.json", {"items": [{"id": 3}, {"id": "a"}]}, "1 of 2 items have no id"),
    ],
)
def test_every_record_of_the_wrong_shape_is_named(run, name, changes, detail):
    edit(run.path / name, **changes)
    assert (name, detail) in details(run)


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        (b"[1]\n", "must be an object, not a list"),
        (b'{"a": 1}\n', "has schema None, this version reads 1"),
        (LINE.replace(b'"sft"', b"7"), "'stage' must be text, not a number"),
        (LINE.replace(b'"step": 1', b'"step": -1'), "'step' must be a whole number from 0 on, not -1"),
        (LINE.replace(b'"step": 1', b'"step": true'), "'step' must be a whole number from 0 on, not True"),
        (LINE.replace(b"2.0", b"NaN"), "NaN is no JSON number"),
        (LINE.replace(b"2.0", b"[2.0]"), "'loss' must be a number, text or null, not a list"),
        (LINE.replace(b"{}", b'{"step": "x"}'), "'seconds' must be an object of numbers"),
        (LINE.replace(b'"step": 1', b'"step": 0'), "step 0 of sft follows step 1"),
    ],
)
def test_every_line_of_the_wrong_shape_is_named(run, line, detail):
    with open(run.path / "metrics.jsonl", "ab") as handle:
        handle.write(line)
    ((file, found),) = details(run)
    assert file == "metrics.jsonl"
    assert "metrics.jsonl:2: " in found
    assert detail in found


def test_of_many_bad_lines_five_are_shown_and_the_rest_counted(run):
    (run.path / "alarms.jsonl").write_bytes(b"x\n" * 12)
    found = details(run)
    assert len(found) == 6
    assert found[-1] == ("alarms.jsonl", "and 7 more lines")


def test_lines_that_a_finished_stage_counted_on_are_missed(run):
    whole = (run.path / "metrics.jsonl").read_bytes()
    (run.path / "metrics.jsonl").write_bytes(b"")
    assert details(run) == [("metrics.jsonl", f"0 bytes, but stages/sft.json records {len(whole)}; lines are missing")]
    (run.path / "metrics.jsonl").write_bytes(LINE.replace(b"2.0", b"2.000000000001") + LINE)
    ((_, detail),) = details(run)
    assert detail.startswith("no line ends at byte ")


def test_a_table_that_says_something_else_than_its_records_is_found(run):
    suites = {"held_out": {"pass_at_1": 0.75}}
    run.save_eval("sft.held_out", {"items": [], "summary": {"pass_at_1": 0.5}})
    (run.path / "summary.json").write_text(json.dumps({"schema": 1, "rungs": [{"rung": "sft", "suites": suites}]}))
    assert details(run) == [("summary.json", "says pass@1 0.7500 for held_out, evals/sft.held_out.json holds 0.5000")]


def test_a_name_full_of_control_characters_is_one_line(run):
    edit(run.path / "stages" / "sft.json", digests={"a\n\x1b[2J\u2028b": "0"})
    (problem,) = verify(run.path)
    assert problem.file == "a\\n\\x1b[2J\\u2028b"
    assert problem.detail == "missing, though stages/sft.json records it"


def test_a_run_of_the_first_schema_is_verified_as_far_as_it_recorded(run):
    manifest = json.loads((run.path / "manifest.json").read_text())
    old = {name: manifest[name] for name in ("created", "command", "seeds", "digests", "config_digest", "stages")}
    (run.path / "manifest.json").write_text(json.dumps({**old, "schema_version": 1, "parent": None}))
    assert verify(run.path) == []
    assert manifest["config_digest"] == digest({"recipe": "toy", "seed": 0})


def test_what_only_differs_can_still_be_read(run):
    (run.checkpoint_root("sft") / "weights.bin").write_bytes(b"other")
    assert len(verify(run.path)) == 1
    assert unreadable(run.path) == []
    (run.path / "summary.json").write_text("[]")
    assert unreadable(run.path) == [Problem("summary.json", "must hold a JSON object, not a list")]


def test_a_pipe_among_the_records_is_named_and_not_waited_for(run):
    os.mkfifo(run.path / "alarms.jsonl")
    assert details(run) == [("alarms.jsonl", "is not a file")]
