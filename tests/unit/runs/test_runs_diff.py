"""Why one run does not reproduce another: the causes in order, and the conclusion."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.config import Config
from posttrain.core.errors import RunError
from posttrain.runs.diff import ALL_GROUPS, RunDiff, explain
from posttrain.runs.run import Run


class Optim(Config):
    lr: float = 1e-3


class Machine(Config):
    precision: str = "float32"


class Settings(Config):
    model: str = "base"
    algorithm: str = "grpo"
    seed: int = 0
    processes: int = 1
    save_every: int = 50
    sft: Optim = Optim()
    grpo: Optim = Optim()
    machine: Machine = Machine()


DEFAULTS = Settings()


def run(path: Path, settings: Settings = DEFAULTS, nudge: float = 0.0, at: int = 3, digests: dict[str, str] | None = None) -> Path:
    """A run of 5 steps whose entropy is off by `nudge` from step `at` on."""
    seeds, inputs = {"seed": settings.seed}, digests or {"model": "m1"}
    made = Run.create(path, config=settings, command=["x"], seeds=seeds, digests=inputs, stages=["grpo"])
    for step in range(5):
        made.metric("grpo", step, {"entropy": 0.5 + (nudge if step >= at else 0.0), "loss": 1.0 / (step + 1)}, {"step": 0.1})
    made.note("kernels", {"threads": 1})
    made.note("detected", {"actor": {"dtype": "float32"}})
    made.finish_stage("grpo", {})
    made.close()
    return path


def edit(path: Path, **sections: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    for name, value in sections.items():
        manifest[name] = {**manifest[name], **value} if isinstance(value, dict) else value
    (path / "manifest.json").write_text(json.dumps(manifest))


def twin(a: Path, **sections: Any) -> Path:
    """A copy of `a`, as it would lie on another machine, with some sections of its manifest changed."""
    b = Path(shutil.copytree(a, a.parent / "copies" / "b"))
    edit(b, **sections)
    return b


def nudged(b: Path, by: float, at: int = 3) -> Path:
    rows = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "entropy": row["entropy"] + by} if row["step"] >= at else row for row in rows]
    (b / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return b


def named(found: RunDiff) -> list[tuple[str, str]]:
    return [(reason.group, reason.name) for reason in found.reasons]


def test_a_copy_of_a_run_is_the_same_in_everything(tmp_path):
    a = run(tmp_path / "a")
    found = explain(a, twin(a))
    assert found.reasons == ()
    assert found.unknown == ()
    assert found.same == tuple(group for group in ALL_GROUPS if group != "on the way")  # neither was resumed with changes
    assert found.conclusion == "same inputs, seeds, method, config, code and packages: the same numbers in all 5 lines"


def test_last_digits_and_another_number_of_processes(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", Settings(processes=2), nudge=2e-7)
    edit(b, code=json.loads((a / "manifest.json").read_text())["code"])
    found = explain(a, b)
    assert named(found) == [("processes and kernels", "processes")]
    assert found.conclusion == (
        "same inputs, seeds, method, config, code and packages: first difference at grpo step 3 in entropy, last digits: "
        "processes 1 -> 2 explains it"
    )


def test_of_last_digits_the_order_of_additions_is_suspected_before_the_code(tmp_path):
    a = run(tmp_path / "a")
    b = nudged(twin(a, kernels={"threads": 2}, code={"diff_digest": "77"}), 2e-7)
    assert explain(a, b).conclusion.endswith("last digits: threads 1 -> 2 would explain it (1 more listed)")


def test_another_number_of_processes_does_not_explain_more_than_last_digits(tmp_path):
    a = run(tmp_path / "a")
    b = nudged(twin(a, kernels={"threads": 2}), 0.01)
    assert explain(a, b).conclusion.endswith(
        "more than last digits: threads 1 -> 2 can only have done this by rounding that tipped a sampled token"
    )


def test_a_setting_of_the_stage_where_they_part_comes_first(tmp_path):
    a = run(tmp_path / "a")
    b = run(tmp_path / "b", Settings(sft=Optim(lr=0.1), grpo=Optim(lr=0.2)), nudge=0.1)
    edit(b, code=json.loads((a / "manifest.json").read_text())["code"])
    found = explain(a, b)
    assert named(found) == [("config", "grpo.lr"), ("config", "sft.lr")]
    assert found.conclusion.endswith("more than last digits: grpo.lr 0.001 -> 0.2 is the most likely cause (1 more listed)")


def test_an_upgrade_that_nobody_mentioned_is_found(tmp_path):
    a = run(tmp_path / "a")
    b = nudged(twin(a, packages={"torch": "1.0", "numpy": "0.1"}), 0.05)
    found = explain(a, b)
    assert named(found) == [("packages", "torch"), ("packages", "numpy")]  # what computes before what helps
    assert "packages" not in found.same
    assert found.conclusion.startswith("same inputs, seeds, method, config and code: first difference at grpo step 3 in entropy")
    assert " -> 1.0 is the most likely cause (1 more listed)" in found.conclusion


def test_of_a_real_difference_inputs_come_before_everything_else(tmp_path):
    a = run(tmp_path / "a")
    b = nudged(twin(a, digests={"model": "m2"}, packages={"torch": "1.0"}, seeds={"seed": 1}, environment={"OMP_NUM_THREADS": "7"}), 0.05)
    found = explain(a, b)
    assert [group for group, _ in named(found)] == ["inputs", "seeds", "packages", "environment"]
    assert "model m1 -> m2 is the most likely cause (3 more listed)" in found.conclusion


def test_uncommitted_changes_and_a_users_script_are_code(tmp_path):
    a = run(tmp_path / "a")
    b = twin(a, code={"diff_digest": "77"})
    manifest = json.loads((b / "manifest.json").read_text())
    (b / "manifest.json").write_text(json.dumps({**manifest, "script": {"name": "t.py", "digest": "88"}}))
    assert named(explain(a, b)) == [("code", "script"), ("code", "uncommitted changes")]


def test_another_path_to_the_same_content_has_no_effect(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", Settings(model="elsewhere/base", save_every=7))
    edit(b, code=json.loads((a / "manifest.json").read_text())["code"])
    found = explain(a, b)
    assert named(found) == [("no effect", "model"), ("no effect", "save_every")]
    assert found.conclusion.endswith("the same numbers in all 5 lines")


def test_an_algorithm_is_one_method_and_not_also_a_setting(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", Settings(algorithm="dr_grpo"), nudge=0.1)
    edit(b, code=json.loads((a / "manifest.json").read_text())["code"])
    found = explain(a, b)
    assert {group for group, _ in named(found)} == {"method"}
    assert ("method", "aggregation") in named(found)
    assert ("method", "advantage_normalisation.scale") in named(found)


def test_what_was_changed_on_resuming_is_a_cause(tmp_path):
    a = run(tmp_path / "a")
    b = nudged(twin(a, history=[{"at": "now", "settings": {}, "inputs": {"data": ["d1", "d2"]}, "drift": {}}]), 0.1)
    found = explain(a, b)
    assert [group for group, _ in named(found)] == ["on the way"]
    assert "change 1 none -> {'data': ['d1', 'd2']} is the most likely cause" in found.conclusion


def test_with_nothing_recorded_the_conclusion_says_so(tmp_path):
    a = run(tmp_path / "a")
    assert explain(a, nudged(twin(a), 0.1)).conclusion.endswith(
        "nothing that was recorded explains it; repeat one of them to see whether it reproduces itself"
    )


def test_a_loaded_precision_that_was_not_asked_for_shows(tmp_path):
    a = run(tmp_path / "a")
    b = nudged(twin(a, detected={"actor": {"dtype": "bfloat16"}}), 1e-7)
    found = explain(a, b)
    assert named(found) == [("precision", "actor.dtype")]
    assert found.conclusion.endswith("last digits: actor.dtype float32 -> bfloat16 explains it")


def test_bfloat16_runs_may_differ_more(tmp_path):
    settings = Settings(machine=Machine(precision="bfloat16"))
    a = run(tmp_path / "a", settings)
    assert "last digits" in explain(a, nudged(twin(a), 0.003)).conclusion  # 0.003 / 0.503 = 0.6 %
    assert "more than" not in explain(a, tmp_path / "copies" / "b").conclusion


def test_differences_without_consequence_are_still_said(tmp_path):
    a = run(tmp_path / "a")
    found = explain(a, twin(a, packages={"torch": "1.0"}))
    assert "the same numbers in all 5 lines, although torch " in found.conclusion


def test_without_metrics_the_likeliest_cause_is_named(tmp_path):
    a = run(tmp_path / "a")
    b = twin(a, seeds={"seed": 1})
    (b / "metrics.jsonl").unlink()
    assert explain(a, b).conclusion.endswith("no metrics to compare; most likely to change them: seed 0 -> 1")


def test_a_run_cut_short_is_compared_as_far_as_it_got(tmp_path):
    a = run(tmp_path / "a")
    b = twin(a)
    lines = (b / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (b / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + b'{"half')
    assert explain(a, b).conclusion.endswith("the same numbers as far as both got (2 of 5 lines)")


def test_a_run_of_the_first_schema_is_compared_in_what_it_recorded(tmp_path):
    a = run(tmp_path / "a")
    b = twin(a)
    manifest = json.loads((b / "manifest.json").read_text())
    keep = ("created", "command", "seeds", "digests", "config_digest", "posttrain", "stages", "cpu", "environment")
    (b / "manifest.json").write_text(json.dumps({name: manifest[name] for name in keep} | {"schema_version": 1}))
    found = explain(a, b)
    assert found.unknown == ("packages", "precision")
    assert {"inputs", "seeds", "method", "config"} <= set(found.same)


def test_scores_that_differ_are_listed(tmp_path):
    a = run(tmp_path / "a")
    for place, score in ((a, 0.5), (twin(a), 0.6)):
        (place / "evals").mkdir()
        (place / "evals" / "sft.held_out.json").write_text(json.dumps({"summary": {"pass_at_1": score}}))
        (place / "evals" / "odd.json").write_text("[]")
    (score,) = explain(a, tmp_path / "copies" / "b").scores
    assert str(score) == "sft.held_out 0.5 -> 0.6"


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        explain(tmp_path, tmp_path)


def test_a_broken_side_is_said_and_the_rest_compared(tmp_path):
    a = run(tmp_path / "a")
    b = twin(a)
    (b / "config.yaml").write_text("a: [")
    found = explain(a, b)
    assert "config.yaml: not readable as YAML" in found.problems[0]
    assert "config" in found.unknown
    (b / "manifest.json").write_text("[]")
    assert any("must hold a JSON object" in problem for problem in explain(a, b).problems)
