"""The chained file under the claims: what was written stays, and whatever a stranger did to it is one error with its line."""

from __future__ import annotations

import hashlib
import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import PosttrainError, RunError, StorageError
from posttrain.core.files import encode_line
from posttrain.runs.claims import Claims
from posttrain.runs.ledger import START, append, head_file, parse, read_entries

AT = "2026-01-01T00:00:00+00:00"


@pytest.fixture
def ledger(tmp_path):
    path = tmp_path / "claims.jsonl"
    for number in range(3):
        append(path, [("note", {"number": number})], AT)
    return path


def test_every_line_names_the_digest_of_the_one_before(ledger):
    lines = ledger.read_bytes().split(b"\n")
    assert [entry.body["number"] for entry in read_entries(ledger)] == [0, 1, 2]
    assert json.loads(lines[0])["previous"] == START
    for before, line in zip(lines[:2], lines[1:3], strict=True):
        assert json.loads(line)["previous"] == hashlib.sha256(before).hexdigest()[:16]
    assert json.loads(head_file(ledger).read_text()) == {"schema": 1, "entries": 3, "digest": hashlib.sha256(lines[2]).hexdigest()[:16]}


def test_nothing_before_the_first_entry(tmp_path):
    assert read_entries(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", [0, 1])
def test_an_edited_entry_is_noticed_in_the_next_one(ledger, line):
    lines = ledger.read_bytes().split(b"\n")
    lines[line] = lines[line].replace(b'"number": %d' % line, b'"number": 7')
    ledger.write_bytes(b"\n".join(lines))
    with pytest.raises(RunError, match=rf"claims.jsonl:{line + 2}: follows an entry with digest .* history was edited"):
        read_entries(ledger)


def test_an_edited_last_entry_is_noticed_by_the_head(ledger):
    ledger.write_bytes(ledger.read_bytes().replace(b'"number": 2', b'"number": 7'))
    with pytest.raises(RunError, match="claims.jsonl:3: digest .* claims.head.json records .*: history was edited"):
        read_entries(ledger)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_deleted_entry_is_noticed(ledger, gone):
    lines = ledger.read_bytes().split(b"\n")
    del lines[gone]
    ledger.write_bytes(b"\n".join(lines))
    with pytest.raises(RunError, match="history was edited"):
        read_entries(ledger)


def test_a_shortened_end_is_noticed(ledger):
    lines = ledger.read_bytes().split(b"\n")
    ledger.write_bytes(b"\n".join(lines[:2]) + b"\n")
    with pytest.raises(RunError, match="2 entries, claims.head.json records 3: the end was deleted"):
        read_entries(ledger)
    head_file(ledger).unlink()
    with pytest.raises(RunError, match="claims.head.json: missing"):
        read_entries(ledger)


def test_an_append_into_a_broken_ledger_is_refused(ledger):
    ledger.write_bytes(ledger.read_bytes().replace(b'"number": 0', b'"number": 7'))
    before = ledger.read_bytes()
    with pytest.raises(RunError, match="history was edited"):
        append(ledger, [("note", {})])
    assert ledger.read_bytes() == before


def test_a_killed_writer_costs_only_its_own_entry(ledger):
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + b'{"schema": 1, "at": "2026' + b"x" * 5000)
    assert len(read_entries(ledger)) == 3
    append(ledger, [("note", {"number": 3})], AT)
    assert ledger.read_bytes().startswith(whole + b'{"schema": 1')
    assert [entry.body["number"] for entry in read_entries(ledger)] == [0, 1, 2, 3]


def test_killed_between_the_line_and_the_head(ledger):
    head = head_file(ledger).read_bytes()
    append(ledger, [("note", {"number": 3})], AT)
    head_file(ledger).write_bytes(head)
    assert len(read_entries(ledger)) == 4
    append(ledger, [("note", {"number": 4})], AT)
    assert json.loads(head_file(ledger).read_text())["entries"] == 5


def test_writers_take_turns(tmp_path):
    path = tmp_path / "claims.jsonl"
    threads = [threading.Thread(target=append, args=(path, [("note", {"number": number})])) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entry.body["number"] for entry in read_entries(path)) == list(range(8))


def test_line_separators_inside_a_text_end_no_line(tmp_path):
    path = tmp_path / "claims.jsonl"
    append(path, [("note", {"text": "a\u2028b\u2029c\x85d\ne"})])
    append(path, [("note", {})])
    assert read_entries(path)[0].body["text"] == "a\u2028b\u2029c\x85d\ne"
    assert path.read_bytes().count(b"\n") == 2


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="could not write"):
        append(tmp_path / "file" / "claims.jsonl", [("note", {})])


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "claims.jsonl"
    with open(path, "wb") as handle:
        handle.truncate(2 << 30)
    with pytest.raises(RunError, match="2048 MiB, at most 64 are read"):
        read_entries(path)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"{", "not a JSON value"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b"[" * 100_000, "nested too deeply|not a JSON value"),
        (b'"\\ud800"', "not a JSON value"),
        (b'"\xff"', "not a JSON value"),
        (b"1" * 5000, "not a JSON value"),
    ],
)
def test_values_that_are_none(raw, problem):
    with pytest.raises(RunError, match=problem) as caught:
        parse(raw, "here")
    assert str(caught.value).startswith("here: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": 2}, "not an entry of schema 1"),
        ({"schema": True}, "not an entry of schema 1"),
        ({"at": 5}, "'at' is 5, not a str"),
        ({"at": "yesterday"}, "'yesterday' is not a time"),
        ({"kind": None}, "'kind' is None, not a str"),
        ({"body": []}, r"'body' is \[\], not a dict"),
        ({"previous": "x"}, "history was edited"),
    ],
)
def test_an_entry_of_the_wrong_form(tmp_path, change, problem):
    path = tmp_path / "claims.jsonl"
    entry = {"schema": 1, "at": AT, "previous": START, "kind": "note", "body": {}}
    path.write_bytes(encode_line(entry | change))
    head_file(path).write_bytes(encode_line({"schema": 1, "entries": 0, "digest": START}))
    with pytest.raises(RunError, match=rf"claims.jsonl:1: .*{problem}"):
        read_entries(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("id", "text", "metric", "subject", "value", "unit", "basis", "scope", "grade", "interval", "n", "null", "conditions", "claim")
NAMES += ("how", "files", "pointers", "command", "transcribed", "status", "reason", "by")
VALUES = JSON | st.sampled_from(["a", "0.5", "items", "weak", "score", "file", "retracted", {}, {"file": {"path": "../x", "digest": "0"}}])
BODIES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=len(NAMES))


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.sampled_from(["claim", "evidence", "status", "other"]), BODIES), max_size=3),
    st.integers(0, 200),
    st.binary(max_size=5),
)
def test_whatever_stands_in_a_ledger_is_one_line_at_most(tmp_path_factory, bodies, cut, junk):
    path = tmp_path_factory.mktemp("fuzz") / "claims.jsonl"
    raw, before = b"", START
    for kind, body in bodies:
        entry = {"schema": 1, "at": AT, "previous": before, "kind": kind, "body": body}
        line = json.dumps(entry).encode()
        raw, before = raw + line + b"\n", hashlib.sha256(line).hexdigest()[:16]
    path.write_bytes(raw[: len(raw) - cut] + junk if cut else raw)
    head_file(path).write_bytes(encode_line({"schema": 1, "entries": 0, "digest": START}))
    said = ""
    try:
        Claims.read(path)
    except PosttrainError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000
