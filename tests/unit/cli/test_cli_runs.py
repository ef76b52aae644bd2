"""What `posttrain runs` prints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from posttrain.cli.runs import diff_lines, list_lines, runs_app, show_lines, verify_lines
from posttrain.core.config import Config
from posttrain.core.errors import RunError
from posttrain.runs.diff import explain
from posttrain.runs.lineage import Parent
from posttrain.runs.listing import list_runs
from posttrain.runs.manifest import Code
from posttrain.runs.run import Run
from posttrain.runs.verify import Problem


class Settings(Config):
    recipe: str = "toy"
    algorithm: str = "grpo"
    seed: int = 0
    processes: int = 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for module in ("run", "manifest"):
        state = {"revision": "a" * 40, "dirty": True, "diff_digest": "12ab", "diff_file": None}
        monkeypatch.setattr(f"posttrain.runs.{module}.code_state", lambda folder, state=state: Code(state, b""))
    run = Run.create(tmp_path / "runs" / "a", config=Settings(), command=["posttrain", "toy"], seeds={"seed": 0}, stages=["sft", "grpo"])
    run.metric("sft", 0, {"loss": 2.0})
    run.finish_stage("sft", {"seconds": 61.0})
    run.close()
    return run


def test_a_listing_has_a_line_per_run_with_its_origin(run: Run) -> None:
    root = run.path.parent
    Run.create(root / "b", config=Settings(seed=1), command=["x"], seeds={}, stages=["sft"], parent=Parent(run.path, "config"))
    first, second = list_lines(list_runs(root), root)
    start = f"{run.path}  {run.manifest['id']}  incomplete  {run.manifest['created']}  toy  stages: sft"
    assert first == start
    assert second.endswith(f"toy  stages: none  one variable from {run.manifest['id']}: seed")
    assert list_lines([], root) == [f"no runs in {root}"]


def test_a_run_shows_origin_method_conditions_and_how_far_it_got(run: Run) -> None:
    run.note("detected", {"actor": {"dtype": "float32", "quantisation": "none"}})
    run.alarm("sft", 3, "spike", "loss jumped", {})
    run.close()
    Run.resume(run.path, config=Settings(processes=2), ignore=["processes"])
    lines = show_lines(run.path)
    assert lines[0] == f"{run.path}  {run.manifest['id']}  incomplete"
    assert lines[1] == f"started {run.manifest['created']} with: posttrain toy"
    assert lines[2] == (
        "method: grpo, aggregation seq_mean_token_mean, advantages from group mean in units of group standard deviation (ddof 0) + 1e-06, "
        "KL k3 in the loss x 0.04 in float32"
    )
    assert lines[3].startswith("code: aaaaaaaaaaaa... with uncommitted changes (12ab), posttrain ")
    assert lines[4] == "actor as loaded: float32, quantisation none"
    assert lines[5].endswith(": processes 1 -> 2")
    assert [line.split() for line in lines[6:8]] == [["sft", "0:01:01"], ["grpo", "not", "finished"]]
    assert lines[-1] == "alarm: sft step 3: loss jumped"


def test_a_run_of_the_first_schema_is_shown(run: Run) -> None:
    keep = ("created", "command", "seeds", "digests", "config_digest", "stages")
    (run.path / "manifest.json").write_text(json.dumps({name: run.manifest[name] for name in keep} | {"schema_version": 1, "parent": None}))
    lines = show_lines(run.path)
    assert lines[1] == f"started {run.manifest['created']} with: posttrain toy"
    assert not [line for line in lines if line.startswith(("method:", "schema"))]


def test_what_verify_found_is_a_line_each() -> None:
    assert verify_lines([Problem("a.json", "missing")], Path("r")) == ["a.json: missing"]
    assert verify_lines([], Path("r")) == ["r: everything recorded is still there, unchanged"]


def test_a_diff_begins_with_its_conclusion_and_shows_what_it_rests_on(run: Run, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run.path, tmp_path / "b"))
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["packages"]["torch"] = "1.0"
    (other / "manifest.json").write_text(json.dumps(manifest))
    text = (other / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace("2.0", "2.5"))
    lines = diff_lines(explain(run.path, other), run.path, other)
    torch = run.manifest["packages"]["torch"]
    assert lines[1] == (
        "conclusion: same seeds, method, config and code: first difference at sft step 0 in loss, more than last digits: "
        f"torch {torch} -> 1.0 is the most likely cause"
    )
    assert lines[2:4] == ["packages:", f"  torch {torch} -> 1.0"]
    assert lines[4].startswith("identical: seeds, method, config, code, ")
    assert lines[-2] == "metrics: 1 and 1 lines, 1 compared, 1 differ"
    assert lines[-1] == "  first at sft step 0: loss 2.0 -> 2.5, by more than the last digits"


def test_verify_ends_with_1_when_something_differs(run: Run) -> None:
    asked = CliRunner()
    good = asked.invoke(runs_app, ["verify", str(run.path)])
    assert (good.exit_code, good.output) == (0, f"{run.path}: everything recorded is still there, unchanged\n")
    (run.path / "metrics.jsonl").write_text("x\n")
    bad = asked.invoke(runs_app, ["verify", str(run.path)])
    assert bad.exit_code == 1
    assert bad.output.startswith("metrics.jsonl: ")


def test_a_report_of_records_that_cannot_be_read_is_refused_in_one_line(run: Run) -> None:
    asked = CliRunner()
    assert asked.invoke(runs_app, ["report", str(run.path)]).output == f"{run.path / 'report.html'}\n"
    (run.path / "metrics.jsonl").write_text('{"schema": 1}\n')
    refused = asked.invoke(runs_app, ["report", str(run.path)])
    assert isinstance(refused.exception, RunError)
    assert "cannot be reported: metrics.jsonl: " in str(refused.exception)


@pytest.mark.parametrize("command", ["show", "verify", "report"])
def test_what_is_no_run_is_refused(tmp_path: Path, command: str) -> None:
    found = CliRunner().invoke(runs_app, [command, str(tmp_path)])
    assert isinstance(found.exception, RunError)
    assert "is not a run (it has no manifest.json)" in str(found.exception)


def test_there_are_five_commands() -> None:
    group = typer.main.get_command(runs_app)
    assert sorted(group.commands) == ["diff", "list", "report", "show", "verify"]  # type: ignore[attr-defined]
