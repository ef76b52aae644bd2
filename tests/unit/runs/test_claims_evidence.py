"""Numbers out of raw records: every derivation by hand, and nothing outside the evidence folder."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import EvidenceError, PosttrainError
from posttrain.runs.evidence import Evidence, inside, link, numbers, recompute
from posttrain.stats.intervals import wilson


def record(values, **changes):
    """An evaluation record with one list of sample values per item."""
    items = [
        {"id": f"i{at}", "outcomes": [[v, "error" if v is None else "scored", "end", 3] for v in row]} for at, row in enumerate(values)
    ]
    return {"schema": 2, "model_digest": "abc", "conditions": {"suite": "sums", "seed": 0}, "items": items} | changes


def put(root, name, value) -> str:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(json.dumps(value))
    return name


def measure(root, how, pointers=None, **files):
    return recompute(root, link(root, how, files, pointers or {}, "made by hand"))


def test_a_pointer_with_its_interval(tmp_path):
    put(tmp_path, "a.json", {"rows": {"x/y": {"ratio": 2.5, "low": 2.0, "high": 3.0, "n": 7, "p": 0.01}}})
    pointers = {name: f"/rows/x~1y/{part}" for name, part in (("value", "ratio"), ("low", "low"), ("high", "high"), ("n", "n"), ("p", "p"))}
    found = measure(tmp_path, "pointer", pointers, file="a.json")
    assert (found.value, found.n, found.p_value) == (2.5, 7, 0.01)
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == (2.0, 3.0)


def test_a_line_of_a_jsonl_file(tmp_path):
    (tmp_path / "m.jsonl").write_bytes(b'{"loss": 2}\n{"loss": 1}\n{"lo')
    assert measure(tmp_path, "pointer", {"value": "/1/loss"}, file="m.jsonl").value == 1.0


def test_a_mean_over_seeds(tmp_path):
    put(tmp_path, "a.json", {"seeds": [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}]})
    found = measure(tmp_path, "mean", {"values": "/seeds/*/x"}, file="a.json")
    # mean 2, sd 1, se 1/sqrt(3) = .57735, t(2) = 4.30265: 2 -+ 2.48414
    assert (found.value, found.n) == (2.0, 3)
    assert found.interval is not None
    assert found.interval.low == pytest.approx(2 - 2.48414, abs=1e-4)


def test_a_difference_over_runs(tmp_path):
    put(tmp_path, "a.json", {"a": [1.0, 2.0, 3.0], "b": [3.0, 5.0, 7.0]})
    found = measure(tmp_path, "runs", {"a": "/a/*", "b": "/b/*"}, file="a.json")
    # means 2 and 5; pooled sigma sqrt((2 + 8) / 4) = 1.5811 from 6 runs
    assert (found.value, found.n) == (3.0, 3)
    assert found.sigma is not None
    assert (round(found.sigma.value, 4), found.sigma.n_runs, found.sigma.kind) == (1.5811, 6, "seed_to_seed")


def test_k_of_n(tmp_path):
    put(tmp_path, "a.json", {"k": 15, "n": 30})
    found = measure(tmp_path, "wilson", {"k": "/k", "n": "/n"}, file="a.json")
    assert (found.value, found.n) == (0.5, 30)
    assert found.interval is not None
    assert (round(found.interval.low, 3), round(found.interval.high, 3)) == (0.332, 0.668)


def test_a_score_comes_from_the_outcomes_not_from_the_summary(tmp_path):
    put(tmp_path, "a.json", record([[1.0], [0.0], [1.0], [1.0]], summary={"pass_at_1": 0.1}))
    found = measure(tmp_path, "score", file="a.json")
    assert (found.value, found.n, found.interval) == (0.75, 4, wilson(3, 4))


def test_several_samples_count_by_item(tmp_path):
    put(tmp_path, "a.json", record([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]))
    found = measure(tmp_path, "score", file="a.json")
    assert (found.value, found.n) == (0.5, 3)  # item means 1, .5, 0
    assert found.interval is not None
    assert found.interval.method == "cluster-t"


def test_a_grader_error_is_neither_right_nor_wrong(tmp_path):
    put(tmp_path, "a.json", record([[1.0], [None], [0.0], [0.0]]))
    found = measure(tmp_path, "score", file="a.json")
    assert (round(found.value, 4), found.n) == (0.3333, 3)
    assert found.interval is not None
    assert found.interval.method == "cluster-t"


def test_rates_of_a_record(tmp_path):
    value = record([[1.0], [0.0], [0.0], [0.0]])
    value["items"][1]["outcomes"][0] = [0.0, "unparseable", "length", 16]
    put(tmp_path, "a.json", value)
    assert measure(tmp_path, "score", {"of": "truncated"}, file="a.json").value == 0.25
    assert measure(tmp_path, "score", {"of": "parsed"}, file="a.json").value == 0.75


def test_a_paired_change(tmp_path):
    put(tmp_path, "a.json", record([[0.0], [0.0], [0.0], [1.0], [0.0], [0.0]]))
    put(tmp_path, "b.json", record([[1.0], [1.0], [1.0], [0.0], [1.0], [1.0]]))
    found = measure(tmp_path, "compare", a="a.json", b="b.json")
    assert (round(found.value, 4), found.n) == (0.6667, 6)
    assert found.p_value == pytest.approx(0.21875)  # 1 lost, 5 gained: 2 * (1 + 6) / 64


@pytest.mark.parametrize(
    ("b", "problem"),
    [
        (record([[1.0], [1.0]], conditions={"suite": "sums", "seed": 1}), "differ in seed"),
        (record([[1.0], [1.0], [1.0]]), "1 items are in one of the two records only"),
    ],
)
def test_unmatched_records_are_not_compared(tmp_path, b, problem):
    put(tmp_path, "a.json", record([[0.0], [1.0]]))
    put(tmp_path, "b.json", b)
    with pytest.raises(EvidenceError, match=problem):
        measure(tmp_path, "compare", a="a.json", b="b.json")


def test_a_changed_file_is_no_evidence(tmp_path):
    put(tmp_path, "a.json", record([[0.0], [1.0]]))
    evidence = link(tmp_path, "score", {"file": "a.json"}, {}, "made by hand")
    assert recompute(tmp_path, evidence).value == 0.5
    put(tmp_path, "a.json", record([[1.0], [1.0]]))
    with pytest.raises(EvidenceError, match="a.json has changed since it was entered"):
        recompute(tmp_path, evidence)
    (tmp_path / "a.json").unlink()
    with pytest.raises(EvidenceError, match="no such file"):
        recompute(tmp_path, evidence)


@pytest.mark.parametrize(
    "path", ["../secret.json", "/etc/passwd", "a/../../secret.json", "link.json", "folder/secret.json", "", ".", "a\0b"]
)
def test_nothing_outside_the_folder_is_read(tmp_path, path):
    root = tmp_path / "evidence"
    root.mkdir()
    put(tmp_path, "secret.json", {"k": 1})
    (root / "link.json").symlink_to(tmp_path / "secret.json")
    (root / "folder").symlink_to(tmp_path)
    with pytest.raises(EvidenceError, match="leads out of"):
        inside(root, path)
    with pytest.raises(EvidenceError, match="leads out of"):
        recompute(root, Evidence("pointer", {"file": (path, "0" * 16)}, {"value": "/k"}, "by hand"))


@pytest.mark.parametrize(
    ("how", "files", "pointers", "problem"),
    [
        ("recollect", {"file": "a.json"}, {}, "'recollect' is no derivation; known are pointer"),
        ("score", {}, {}, "'score' reads the files file, got none"),
        ("compare", {"a": "a.json"}, {}, "'compare' reads the files a, b, got a"),
        ("wilson", {"file": "a.json"}, {"k": "/k"}, "'wilson' needs the pointer 'n'"),
        ("mean", {"file": "a.json"}, {"values": "/x", "n": "/n"}, "'mean' has no pointer 'n'"),
    ],
)
def test_a_derivation_needs_its_parts(tmp_path, how, files, pointers, problem):
    put(tmp_path, "a.json", {})
    with pytest.raises(EvidenceError, match=problem):
        link(tmp_path, how, files, pointers, "by hand")


def test_evidence_says_what_made_it(tmp_path):
    put(tmp_path, "a.json", {})
    with pytest.raises(EvidenceError, match="needs the command that made it"):
        link(tmp_path, "score", {"file": "a.json"}, {}, " ")


@pytest.mark.parametrize(
    ("pointer", "problem"),
    [
        ("rows", "must begin with /"),
        ("/none", "finds no 'none'"),
        ("/rows/9", "finds no '9'"),
        ("/rows/-1", "finds no '-1'"),
        ("/text", "names half, not a number"),
        ("/flag", "names True, not a number"),
        ("/big", "not a number"),
    ],
)
def test_pointers_that_name_no_number(pointer, problem):
    with pytest.raises(EvidenceError, match=problem):
        numbers({"rows": [1, 2], "text": "half", "flag": True, "big": 10**400}, pointer)


ODD = st.none() | st.booleans() | st.integers(-2, 2) | st.floats(-2, 2) | st.sampled_from(["scored", "end", "", "\u2028", 10**400])
OUTCOMES = st.lists(st.lists(ODD, max_size=4) | ODD, max_size=3)
ITEMS = st.lists(st.fixed_dictionaries({}, optional={"id": ODD, "outcomes": OUTCOMES | ODD}) | ODD, max_size=4)
RECORDS = (
    st.fixed_dictionaries({}, optional={"items": ITEMS | ODD, "conditions": st.dictionaries(st.text(max_size=3), ODD, max_size=2) | ODD})
    | ODD
)


@settings(deadline=None, max_examples=80)
@given(RECORDS, RECORDS, st.text(max_size=6))
def test_whatever_a_record_holds_is_a_number_or_one_line(tmp_path_factory, a, b, pointer):
    root = tmp_path_factory.mktemp("records")
    put(root, "a.json", a)
    put(root, "b.json", b)
    wanted = [
        ("score", {"file": "a.json"}, {}),
        ("compare", {"a": "a.json", "b": "b.json"}, {}),
        ("mean", {"file": "a.json"}, {"values": pointer}),
    ]
    for how, files, pointers in wanted:
        value, said = 0.0, ""
        try:
            value = recompute(root, link(root, how, files, pointers, "fuzz")).value
        except PosttrainError as error:
            said = str(error)
        assert math.isfinite(value)
        assert "\n" not in said
