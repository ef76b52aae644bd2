"""Findings, certificates, and how the command line shows them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from posttrain.checks.findings import (
    LAWS,
    Certificate,
    Finding,
    absent,
    alignment,
    distance,
    failed,
    largest,
    measured,
)
from posttrain.cli import certify as command
from posttrain.core.errors import ConfigError


def certificate(*findings: Finding) -> Certificate:
    return Certificate("x", "limit", findings, "E[A]")


def test_distance_is_relative_to_large_numbers_only():
    assert distance([1.0, 2.5], [1.0, 2.0]) == 0.25  # 0.5 / 2
    assert distance([0.1], [0.0]) == pytest.approx(0.1)
    assert distance([], []) == 0.0
    assert distance([1.0], [1.0, 1.0]) == math.inf
    assert distance([math.nan], [math.nan]) == math.inf
    assert distance([math.inf], [math.inf]) == math.inf


def test_alignment():
    assert alignment(np.array([2.0, 0.0]), np.array([1.0, 0.0])) == (1.0, 2.0)
    assert alignment(np.array([0.0, -3.0]), np.array([0.0, 1.0])) == (-1.0, 3.0)
    assert alignment(np.zeros(2), np.ones(2)) == (0.0, 0.0)


def test_a_bound_is_kept_or_broken():
    assert measured("mask", 0.0, "", 0.0).passed
    assert not measured("mask", 1e-300, "", 0.0).passed
    assert not measured("oracle", math.inf, "").passed
    assert not measured("oracle", math.nan, "").passed
    assert measured("oracle", 1e-10, "").passed
    assert largest([(0.0, "a"), (1e-9, "b")]) == (1e-9, "b")


def test_the_worst_finding_of_a_law_is_shown():
    good, near = measured("oracle", 1e-16, "far"), measured("oracle", 1e-7, "near", 1e-6)
    assert certificate(good, near).worst("oracle") is near
    assert certificate(good, absent("oracle", "why")).worst("oracle") is good
    assert certificate(good, failed("oracle", "no")).worst("oracle").detail == "no"
    assert not certificate(good, failed("oracle", "no")).passed
    assert certificate(good, absent("mask", "why")).passed


def test_lines():
    found = certificate(
        measured("partition", 2.6e-16, "a"), measured("mask", 0.0, "b", 0.0), failed("oracle", "raises"), absent("reduction", "c")
    )
    line = command.summary_line(found)
    assert line.split() == ["x", "3e-16", "0", "-", "FAIL", "-", "-"]
    assert command.header().split() == list(LAWS)
    table = command.table_lines(found)
    assert table[0] == "x (limit): NOT CERTIFIED"
    assert table[1] == "target: E[A]"
    assert table[3].split() == ["partition", "3e-16", "1e-10", "pass", "a"]
    assert table[5].split() == ["oracle", "FAIL", "raises"]
    assert table[6].split() == ["reduction", "-", "c"]


def test_json_has_stable_keys_and_no_infinity():
    record = certificate(measured("oracle", math.inf, "d"), absent("mask", "e")).as_record()
    assert list(record) == ["name", "kind", "passed", "target", "findings"]
    assert record["findings"] == [
        {"law": "oracle", "deviation": "inf", "bound": 1e-10, "verdict": "fail", "detail": "d"},
        {"law": "mask", "deviation": None, "bound": 0.0, "verdict": "-", "detail": "e"},
    ]
    json.dumps(record, allow_nan=False)


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(command, "members", lambda: ["aggregation:token_mean", "advantage:teacher"])


def test_everything_is_one_line_per_member(two, capsys):
    assert command.run(None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["aggregation:token_mean", "advantage:teacher"]
    assert lines[-1] == "all 2 members keep every law that applies to them"


def test_one_member_is_a_table(capsys):
    assert command.run("kl:top_k") == 0
    out = capsys.readouterr().out
    assert out.startswith("kl:top_k (kl): all laws hold\ntarget: in the loss: KL(policy || reference) of k tokens")
    assert "takes the distributions of trained tokens only" in out


def test_json(two, capsys):
    assert command.run(None, as_json=True) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["aggregation:token_mean", "advantage:teacher"]


def test_a_failure_is_exit_code_one(tmp_path, capsys, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text("def total(values, mask, denominator): return values.sum() / denominator\n", encoding="utf-8")
    assert command.run(f"{path}:total") == 1
    assert "total (aggregation): NOT CERTIFIED" in capsys.readouterr().out
    broken = certificate(failed("oracle", "no"))
    monkeypatch.setattr(command, "members", lambda: ["x"])
    monkeypatch.setattr(command, "certify", lambda name: [broken])
    assert command.run(None) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 of 1 members fail: x"


def test_an_unknown_name_is_one_line():
    with pytest.raises(ConfigError, match="did you mean"):
        command.run("limit:clp")
