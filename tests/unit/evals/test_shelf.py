"""Records on the disk: what a path may name, and one clear line for everything else that lies there."""

import json
from dataclasses import replace

import pytest
from eval_records import values

from posttrain.core.errors import EvidenceError
from posttrain.core.files import write_json
from posttrain.evals.shelf import pair_up, read_record, read_records, tell_apart


def put(folder, name: str, record) -> None:
    write_json(folder / name, record.to_json())


def one(label: str = "a", suite: str = "s", right: int = 1):
    return values([[1]] * right + [[0]] * 3, label, suite=suite)


def test_a_file_a_folder_a_run_and_a_model_of_a_run(tmp_path):
    evals = tmp_path / "run" / "evals"
    for label in ("sft", "grpo"):
        for suite in ("sums", "chat"):
            put(evals, f"{label}.{suite}.json", one(label, suite))
    assert [record.label for record in read_records(evals / "sft.sums.json")] == ["sft"]
    assert len(read_records(evals)) == len(read_records(tmp_path / "run")) == 4
    assert {(r.label, r.conditions.suite) for r in read_records(f"{tmp_path}/run:grpo")} == {("grpo", "sums"), ("grpo", "chat")}
    with pytest.raises(EvidenceError, match="run has no evaluation of 'dpo'; it has grpo, sft"):
        read_records(f"{tmp_path}/run:dpo")
    (tmp_path / "a:b").mkdir()
    put(tmp_path / "a:b", "x.json", one())
    assert len(read_records(tmp_path / "a:b")) == 1


def test_folders_without_records(tmp_path):
    with pytest.raises(EvidenceError, match="nowhere: no such file or folder"):
        read_records(tmp_path / "nowhere")
    with pytest.raises(EvidenceError, match=r"no evaluation record \(\*.json\) in it"):
        read_records(tmp_path)
    with pytest.raises(EvidenceError, match="is a folder; name one record in it"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not readable as JSON"),
        (b'{"schema": 2, "lab', "not readable as JSON"),
        (b"\xff\xfe\x00", "not readable as JSON"),
        (b"[1, 2]", "is a list, not a mapping"),
        (b"NaN", "is a float, not a mapping"),
        (b"null", "is a NoneType, not a mapping"),
        (b'{"schema": 1}', "has schema 1, this version reads 2; evaluate again"),
        (b'{"schema": 2}', "malformed"),
        (b'{"schema": 2, "items": 3}', "malformed"),
        (b'{"schema": 2, "items": [{"id": ["x"], "outcomes": []}], "conditions": null}', "malformed"),
        (b'{"schema": 2, "items": [], "conditions": {"sampling": {"a\\u2028b": NaN}}, "label": "x\\ny"}', "malformed"),
        (b"[" * 100_000, "x.json: "),
        (b"1" * 10_000, "not readable as JSON"),
    ],
)
def test_anything_else_is_one_line(tmp_path, content, said):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(EvidenceError, match=said.replace("(", r"\(")) as raised:
        read_record(tmp_path / "x.json")
    assert len(str(raised.value).splitlines()) == 1
    assert "x.json" in str(raised.value)


def test_nan_and_wrong_types_inside_a_record(tmp_path):
    for place, value in (
        ((0, "outcomes", 0, 0), float("nan")),
        ((0, "outcomes", 0, 3), "three"),
        ((0, "outcomes"), {"a": 1}),
        ((0, "id"), 5),
    ):
        data = one().to_json()
        inside = data["items"]
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = value
        (tmp_path / "x.json").write_text(json.dumps(data))
        with pytest.raises(EvidenceError, match="malformed"):
            read_record(tmp_path / "x.json")


def test_a_huge_file_is_not_read(tmp_path):
    with open(tmp_path / "x.json", "wb") as handle:
        handle.truncate(2 << 30)
    with pytest.raises(EvidenceError, match="it has 2048 MB, too large for an evaluation record"):
        read_record(tmp_path / "x.json")


def test_one_record_per_model_and_suite(tmp_path):
    put(tmp_path, "x.json", one())
    put(tmp_path, "y.json", one(right=2))
    with pytest.raises(EvidenceError, match="two records of 'a' on 's'"):
        read_records(tmp_path)


def test_models_with_one_name_are_told_apart_by_their_place():
    a, b, c = one("grpo"), replace(one("grpo"), model_digest="other"), one("sft")
    told = tell_apart([("runs/a", [a, c]), ("runs/b:grpo", [b])])
    assert [[record.label for record in side] for side in told] == [["runs/a:grpo", "sft"], ["runs/b:grpo"]]
    assert tell_apart([("x", [a]), ("y", [a])]) == [[a], [a]]


def test_suites_pair_up_by_name():
    a = [one("a", "sums"), one("a", "chat"), one("a", "only")]
    b = [one("b", "chat"), one("b", "sums"), one("b", "other")]
    assert [(x.label, y.label, x.conditions.suite, y.conditions.suite) for x, y in pair_up(a, b)] == [
        ("a", "b", "sums", "sums"),
        ("a", "b", "chat", "chat"),
    ]
    runs = [one(label, "sums") for label in ("sft", "grpo")]
    assert [(x.label, y.label) for x, y in pair_up(runs, runs[::-1])] == [("sft", "sft"), ("grpo", "grpo")]
    with pytest.raises(EvidenceError, match="one side holds 2 models .sft, grpo.; choose one of them, as PATH:sft"):
        pair_up(runs, b)
    with pytest.raises(EvidenceError, match="no suite was measured on both sides: sums against other"):
        pair_up(a[:1], b[2:])
