"""Reading files that nobody vouches for: one line of explanation, never an exception, nothing outside the run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from posttrain.runs import reading
from posttrain.runs.reading import (
    files,
    is_file,
    last_line,
    load_json,
    load_mapping,
    load_yaml_mapping,
    number,
    parse_json,
    plain,
    scan_lines,
    within,
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("NaN", "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ("1e999", "1e999 is out of range"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "not a JSON value"),
        (b"\xff\xfe\x00", "not a JSON value"),
        ("1" * 5000, "not a JSON value"),
    ],
)
def test_what_is_no_json_is_said_in_one_line(text, problem):
    found = parse_json(text)
    assert found.value is None
    assert problem in (found.problem or "")
    assert len((found.problem or "").splitlines()) == 1


def test_a_value_that_is_json_has_no_problem():
    assert parse_json(b'{"a": [1, 2.5, null, "\xe2\x80\xa8"]}') == ({"a": [1, 2.5, None, "\u2028"]}, None)


def test_a_file_that_is_no_object_is_empty_with_a_reason(tmp_path):
    (tmp_path / "a.json").write_text("[1]")
    assert load_mapping(tmp_path / "a.json") == ({}, "must hold a JSON object, not a list")
    assert load_json(tmp_path / "none.json") == (None, "missing")
    (tmp_path / "folder.json").mkdir()
    assert load_json(tmp_path / "folder.json") == (None, "not a file")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert not is_file(tmp_path / "metrics.jsonl")
    assert list(scan_lines(tmp_path / "metrics.jsonl")) == []
    assert load_json(tmp_path / "metrics.jsonl") == (None, "not a file")


def test_a_file_larger_than_any_record_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_BYTES", 5)
    (tmp_path / "a.json").write_text("[1, 2]")
    assert load_json(tmp_path / "a.json") == (None, "6 bytes; more than 5 are not read")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "not readable as YAML"),
        ("- 1", "must hold a mapping of settings, not a list"),
        ("1: 2", "has the key 1, which is not text"),
        ("null: 2", "has the key None, which is not text"),
        ("a: .nan", "holds nan, which JSON cannot say"),
        ("a: 2001-02-03", "holds 2001-02-03, which JSON cannot say"),
        ("a: !!int ''", "not readable as YAML"),
        ("a: !!timestamp x", "not readable as YAML"),
        ("a: !!python/object/apply:os.getcwd []", "not readable as YAML"),
        ("a: &x [*x]", "too many or too deeply nested"),
        (f"a: 0x{'f' * 5000}", "holds a number of more than a thousand digits"),
        ("a: " + "[" * 5000, "nested too deeply"),
    ],
)
def test_settings_that_are_none_are_refused_in_one_line(tmp_path, text, problem):
    (tmp_path / "c.yaml").write_text(text)
    found = load_yaml_mapping(tmp_path / "c.yaml")
    assert found.value == {}
    assert problem in (found.problem or "")
    assert len((found.problem or "").splitlines()) == 1


def test_aliases_of_aliases_do_not_take_forever(tmp_path):
    # 9 levels of 9 aliases each stand for 9^9 = 387 million values in 300 bytes.
    rows = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    (tmp_path / "c.yaml").write_text("\n".join(rows))
    assert load_yaml_mapping(tmp_path / "c.yaml").problem == "holds too many or too deeply nested values for settings"


def test_settings_that_are_plain_are_read(tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 0\nsft: {lr: 1.0e-3, names: [a, b]}\n")
    assert load_yaml_mapping(tmp_path / "c.yaml") == ({"seed": 0, "sft": {"lr": 0.001, "names": ["a", "b"]}}, None)


def test_lines_come_with_their_number_and_end(tmp_path):
    (tmp_path / "m.jsonl").write_bytes(b'{"a": 1}\nx\n\n{"b"')
    lines = list(scan_lines(tmp_path / "m.jsonl"))
    # 8 characters and a line end = 9; "x" and its end = 2, so 11; an empty line = 12; the unfinished rest of 4 = 16.
    assert [(line.number, line.value, line.end) for line in lines] == [(1, {"a": 1}, 9), (2, None, 11), (3, None, 12), (4, None, 16)]
    assert [line.problem is None for line in lines] == [True, False, False, False]
    assert lines[3].problem == "unfinished"


def test_a_line_separator_within_a_string_ends_no_line(tmp_path):
    (tmp_path / "m.jsonl").write_bytes('{"a": "x\u2028y\u0085z"}\n'.encode())
    assert [line.value for line in scan_lines(tmp_path / "m.jsonl")] == [{"a": "x\u2028y\u0085z"}]


def test_a_line_too_long_is_skipped_and_the_next_one_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 1 << 20)
    (tmp_path / "m.jsonl").write_bytes(b'"' + b"x" * (3 << 20) + b'"\n{"a": 1}\n')
    first, second = scan_lines(tmp_path / "m.jsonl")
    assert first.problem == "longer than 1 MiB"
    assert (second.number, second.value) == (2, {"a": 1})
    assert second.end == (3 << 20) + 3 + 9


def test_the_last_line_is_found_from_the_end(tmp_path):
    rows = [json.dumps({"step": step, "pad": "x" * 100}) for step in range(2000)]
    (tmp_path / "m.jsonl").write_text("\n".join(rows) + '\n{"half"')
    found = last_line(tmp_path / "m.jsonl")
    assert found is not None
    assert found.value["step"] == 1999
    assert last_line(tmp_path / "none.jsonl") is None
    (tmp_path / "long.jsonl").write_text(json.dumps({"pad": "x" * 100_000}) + "\n")
    found = last_line(tmp_path / "long.jsonl")
    assert found is not None
    assert len(found.value["pad"]) == 100_000


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "", "a\0b", "..", "..\\x", 3, None, "x" * 2000, "out/x", "loop", "up/secret"]
)
def test_a_name_that_leads_out_is_no_path_of_the_run(tmp_path, name):
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret").write_text("s")
    (run / "out").symlink_to("/")
    (run / "up").symlink_to("..")
    (run / "loop").symlink_to("loop")
    assert within(run, name) is None


def test_a_name_below_the_run_is_its_path(tmp_path):
    (tmp_path / "here").symlink_to("stages")
    assert within(tmp_path, "stages/a.json") == tmp_path / "stages/a.json"
    assert within(tmp_path, "here/a.json") == tmp_path / "here/a.json"


def test_files_leave_out_folders_and_what_leads_out(tmp_path):
    run = tmp_path / "run"
    (run / "stages" / "folder.json").mkdir(parents=True)
    (run / "stages" / "a.json").write_text("{}")
    (tmp_path / "secret.json").write_text("{}")
    (run / "stages" / "b.json").symlink_to(tmp_path / "secret.json")
    assert files(run, "stages/*.json") == [run / "stages" / "a.json"]
    assert files(Path("/nowhere-at-all"), "*.json") == []


def test_shown_text_is_one_printable_line():
    assert plain("a\nb\x1b[2J\u2028\ud800 é") == "a\\nb\\x1b[2J\\u2028\\ud800 é"
    assert plain("x" * 10, 4) == "xxxx..."
    assert plain(10**5000) == "a number of more than a thousand digits"


@pytest.mark.parametrize(("value", "wanted"), [(1, 1.0), (0.5, 0.5), (True, None), ("1", None), (float("nan"), None), (10**400, None)])
def test_a_number_is_finite_and_no_truth_value(value, wanted):
    assert number(value) == wanted
