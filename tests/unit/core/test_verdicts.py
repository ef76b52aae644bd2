"""Verdicts: the conjunction of three-valued checks, the record, the lines."""

import json

import pytest

from posttrain.core.errors import RunError
from posttrain.core.verdicts import Check, GateVerdict, bounded, verdict_lines


def gate(*outcomes: bool | None) -> GateVerdict:
    checks = tuple(
        Check(f"c{n}", passed, n, 1.5, f"detail {n}", f"remedy {n}", ("F2", "P20") if n else ()) for n, passed in enumerate(outcomes)
    )
    return GateVerdict("handover.sft", "sft, measured", checks, {"items": 8})


@pytest.mark.parametrize(
    ("outcomes", "passed"),
    [((True, True), True), ((True, None), None), ((None, False, True), False), ((False, False), False), ((), True)],
)
def test_one_failed_check_fails_and_one_open_check_leaves_open(outcomes, passed):
    assert gate(*outcomes).passed is passed


def test_the_reason_is_the_first_failure_before_any_open_check():
    found = gate(True, None, False, False)
    assert found.reason == "c2: detail 2; remedy 2 [F2, P20] (and 1 more)"
    assert [check.name for check in found.failures] == ["c2", "c3"]
    assert [check.name for check in found.open] == ["c1"]
    assert gate(None, True).reason == "c0: detail 0; remedy 0"
    assert gate(True).reason == ""


def test_a_record_comes_back_as_it_was():
    found = gate(True, None, False)
    record = json.loads(json.dumps(found.as_record()))
    assert record["verdict"] == "failed"
    assert [check["verdict"] for check in record["checks"]] == ["passed", "not shown", "failed"]
    assert GateVerdict.from_record(record) == found


@pytest.mark.parametrize("change", [{"schema": 9}, {"checks": [{"name": "x"}]}, {"checks": 3}, {"checks": [3]}])
def test_a_foreign_record_is_refused_in_one_line(change):
    with pytest.raises(RunError, match="run the gate again"):
        GateVerdict.from_record({**gate(True).as_record(), **change})


def test_lines_name_the_remedy_only_of_what_did_not_pass():
    lines = verdict_lines(gate(True, None, False))
    assert lines[0] == "handover.sft: sft, measured: FAILED"
    assert lines[1].split() == ["pass", "c0", "detail", "0"]
    assert lines[2].split() == ["look", "c1", "detail", "1"]
    assert lines[3].strip() == "-> remedy 1  [F2, P20]"
    assert lines[4].split()[0] == "FAIL"
    assert not any("remedy 0" in line for line in lines)


@pytest.mark.parametrize(("value", "passed"), [(0.0, True), (0.019, True), (0.02, None), (0.2499, None), (0.25, False)])
def test_bounded_passes_below_looks_between_and_fails_above(value, passed):
    assert bounded("truncation", value, (0.02, 0.25), "cut").passed is passed
