"""Where two metrics files part, and whether by more than rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.runs.parting import compare_metrics


def write(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"schema": 1, "stage": "grpo", "seconds": {"step": 0.1}, **row}) + "\n" for row in rows]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def compare(tmp_path: Path, a: list[dict], b: list[dict], **how):
    return compare_metrics(write(tmp_path / "a", a), write(tmp_path / "b", b), **how)


def test_equal_runs_differ_in_seconds_only(tmp_path):
    rows = [{"step": step, "loss": 1 / (step + 1)} for step in range(5)]
    found = compare(tmp_path, rows, [{**row, "seconds": {"step": 9.9}} for row in rows])
    assert (found.compared, found.lines, found.differing, found.parting, found.problems) == (5, (5, 5), 0, None, ())


def test_the_first_difference_is_named_with_both_values(tmp_path):
    a = [{"step": step, "entropy": 0.5, "loss": 1.0} for step in range(20)]
    # from step 13 on: entropy moves by 2e-7 / 0.5 = 4e-7 of itself, the loss by 1e-7 / 1 = 1e-7
    b = [{**row, "entropy": 0.5000002, "loss": 1.0000001} if row["step"] >= 13 else row for row in a]
    found = compare(tmp_path, a, b)
    assert found.parting is not None
    assert (found.parting.stage, found.parting.step, found.parting.metric) == ("grpo", 13, "entropy")
    assert (found.parting.a, found.parting.b, found.parting.others) == (0.5, 0.5000002, ("loss",))
    assert found.parting.rounding
    assert found.differing == 7  # steps 13 to 19


@pytest.mark.parametrize(
    ("metric", "a", "b", "rounding"),
    [
        ("loss", 1.0, 1.000009, True),  # 9e-6 of itself
        ("loss", 1.0, 1.00002, False),  # 2e-5 of itself
        ("mismatch_max", 1.0e-5, 1.3e-5, True),  # 30 %, but only 3e-6: the quantity is rounding itself
        ("lr", 1.0e-6, 2.0e-6, False),  # a formula of settings has no rounding
        ("tokens", 100, 101, False),  # a count
        ("loss", 1.0, None, False),
        ("loss", "x", "y", False),
        ("loss", 0.0, 1e-4, False),
    ],
)
def test_last_digits_and_more_than_last_digits(tmp_path, metric, a, b, rounding):
    found = compare(tmp_path, [{"step": 0, metric: a}], [{"step": 0, metric: b}])
    assert found.parting is not None
    assert found.parting.rounding is rounding


def test_bfloat16_has_fewer_digits(tmp_path):
    found = compare(tmp_path, [{"step": 0, "loss": 1.0}], [{"step": 0, "loss": 1.005}], relative=1e-2)
    assert found.parting is not None
    assert found.parting.rounding


def test_one_real_difference_in_a_line_makes_it_real(tmp_path):
    found = compare(tmp_path, [{"step": 0, "a": 1.0, "b": 1.0}], [{"step": 0, "a": 1.0000001, "b": 2.0}])
    assert found.parting is not None
    assert (found.parting.metric, found.parting.rounding, found.parting.others) == ("b", False, ("a",))


def test_runs_at_other_steps_are_not_compared_further(tmp_path):
    found = compare(tmp_path, [{"step": 0}, {"step": 1}, {"step": 2}], [{"step": 0}, {"step": 2}, {"step": 2}])
    assert found.parting is not None
    assert (found.parting.metric, found.parting.a, found.parting.b) == ("order of steps", "grpo step 1", "grpo step 2")
    assert (found.compared, found.differing, found.lines) == (2, 1, (3, 3))


def test_a_shorter_run_is_compared_as_far_as_it_got(tmp_path):
    found = compare(tmp_path, [{"step": 0}, {"step": 1}], [{"step": 0}])
    assert (found.compared, found.lines, found.parting) == (1, (2, 1), None)


def test_a_metric_that_one_run_does_not_have_is_a_difference(tmp_path):
    found = compare(tmp_path, [{"step": 0, "kl": 0.1}], [{"step": 0}])
    assert found.parting is not None
    assert (found.parting.metric, found.parting.a, found.parting.b) == ("kl", 0.1, None)


def test_what_cannot_be_read_ends_the_comparison_with_a_line(tmp_path):
    a = write(tmp_path / "a", [{"step": 0}, {"step": 1}, {"step": 2}])
    b = write(tmp_path / "b", [{"step": 0}])
    with open(b / "metrics.jsonl", "a") as handle:
        handle.write("x\n")
    found = compare_metrics(a, b)
    assert (found.compared, found.lines) == (1, (3, 1))
    assert found.problems[0].startswith(f"{b / 'metrics.jsonl'}:2: not a JSON value")
    assert found.problems[0].endswith("what follows was not compared")
    assert compare_metrics(tmp_path, tmp_path).compared == 0


def test_metrics_that_lie_elsewhere_are_not_read(tmp_path):
    a = write(tmp_path / "a", [{"step": 0}])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").symlink_to("../a/metrics.jsonl")
    found = compare_metrics(a, tmp_path / "b")
    assert found.lines == (1, 0)
    assert found.problems == (f"{tmp_path / 'b' / 'metrics.jsonl'}: leads out of the run directory; it was not read",)
