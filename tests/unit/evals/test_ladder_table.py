"""The ladder summary and its table."""

import pytest
from eval_records import values

from posttrain.core.errors import EvidenceError, RunError
from posttrain.evals.compare import compare
from posttrain.evals.ladder_table import summarise, table_rows
from posttrain.evals.record import EvalRecord
from posttrain.runs.summary import markdown_table


def record(label: str, right: int, suite: str = "sums") -> EvalRecord:
    return values([[float(n < right)] for n in range(20)], label, suite=suite)


def ladder() -> dict:
    records = {"base": {"sums": record("base", 1)}, "sft": {"sums": record("sft", 10), "hard": record("sft", 2, "hard")}}
    return summarise(records, ["base", "sft"], "quick", 3, {"sft": 12.5})


def test_summary_holds_figures_and_paired_changes():
    summary = ladder()
    assert (summary["schema"], summary["preset"], summary["seed"], summary["seconds_per_stage"]) == (1, "quick", 3, {"sft": 12.5})
    base, sft = summary["rungs"]
    assert (base["rung"], base["suites"]["sums"]["pass_at_1"], base["suites"]["sums"]["paired_change"]) == ("base", 0.05, None)
    assert sft["suites"]["hard"]["paired_change"] is None
    change, expected = sft["suites"]["sums"]["paired_change"], compare(record("base", 1), record("sft", 10))
    assert change["delta"] == pytest.approx(0.45)
    assert change["p_value"] == expected.p_value == pytest.approx(2 / 2**9)
    assert change["interval"] == [expected.interval.low, expected.interval.high]
    assert change["against"] == "base"
    assert sft["suites"]["sums"]["interval_method"] == "wilson"


def test_each_rung_is_compared_with_the_one_before():
    records = {name: {"sums": record(name, right)} for name, right in (("base", 1), ("sft", 10), ("grpo", 16))}
    changes = [rung["suites"]["sums"]["paired_change"] for rung in summarise(records, ["base", "sft", "grpo"], "p", 0, {})["rungs"]]
    assert [(change or {}).get("against") for change in changes] == [None, "base", "sft"]
    assert changes[2]["delta"] == pytest.approx(0.3)


def test_a_missing_rung_is_named():
    with pytest.raises(EvidenceError, match="no evaluation of rung 'dpo'; evaluated are base"):
        summarise({"base": {"sums": record("base", 1)}}, ["base", "dpo"], "p", 0, {})


def test_rows_and_markdown():
    rows = table_rows(ladder())
    assert [row[:2] for row in rows] == [("base", "sums"), ("sft", "sums"), ("sft", "hard")]
    assert rows[0] == ("base", "sums", "0.050 [0.009, 0.236]", "-", "-", "100.0%", "0.0%", "0.0%", "20 x 1")
    assert rows[1][2].startswith("0.500 [0.299, 0.701]")
    assert rows[1][3].startswith("+0.450 [+0.211, +0.689] vs base")
    assert rows[1][4] == "0.004"
    lines = markdown_table(ladder()).splitlines()
    assert len(lines) == 2 + 3
    assert len({len(line) for line in lines}) == 1
    assert set(lines[1]) == {"|", "-"}


def test_another_schema_is_refused():
    with pytest.raises(RunError, match="schema 2"):
        table_rows({"schema": 2, "rungs": []})
