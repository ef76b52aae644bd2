"""Data rows: what is read, and that every refusal names file, line and field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.core.errors import DataError
from posttrain.core.tasks import Demonstration, Message, Task
from posttrain.envs.files import source_name
from posttrain.envs.rows import Preference, demonstrations, kind, preferences, read_rows, task_rows, texts

USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


def refused(read: Callable[[str], Iterable[object]], source: str) -> DataError:
    with pytest.raises(DataError) as caught:
        list(read(source))
    assert "\n" not in str(caught.value)
    return caught.value


def test_rows_carry_file_and_line_and_blank_lines_are_skipped(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n{"a": "x\xe2\x80\xa8y"}\r\n')
    assert list(read_rows(str(file))) == [(str(file), 1, {"a": 1}), (str(file), 3, {"a": "x\u2028y"})]


def test_gzip_and_parquet(tmp_path: Path) -> None:
    packed = tmp_path / "p.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"a": 1}\n'))
    assert [row for _, _, row in read_rows(str(packed))] == [{"a": 1}]
    table = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT]}]), table)
    assert [line for _, line, _ in read_rows(str(table))] == [1, 2]
    assert demonstrations(str(table))[1] == Demonstration("p-2", (Message("user", "hi"), Message("assistant", "hello")))


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b'{"a": 1}\n{"a": \n', 2, "is not JSON"),
        (b'{"a": 1}\n[1]\n', 2, "holds a list, not an object"),
        (b'{"a": "\xff"}\n', 1, "is not UTF-8"),
        (b"[" * 100_000 + b"\n", 1, "is not JSON"),
        (b"\n\n", None, "holds no rows"),
        (b"", None, "holds no rows"),
    ],
)
def test_broken_files(file: Path, content: bytes, line: int | None, message: str) -> None:
    file.write_bytes(content)
    error = refused(read_rows, str(file))
    assert message in str(error)
    assert (error.file, error.line) == (str(file), line)


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    other = tmp_path / "rows.csv"
    other.write_text("a\n1\n")
    assert "no such file" in str(refused(read_rows, "missing/rows.jsonl"))
    assert "no such file" in str(refused(read_rows, "missing.parquet"))
    assert "ends in .jsonl" in str(refused(read_rows, str(other)))
    assert "neither an existing file nor a hub id" in str(refused(read_rows, "rows.csv"))
    bad = tmp_path / "bad.parquet"
    bad.write_text("no")
    assert "parquet" in str(refused(read_rows, str(bad)))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"a": 1}\n' * 99)[:-9])
    assert "cannot be read" in str(refused(read_rows, str(cut)))


def test_hub_ids_are_loaded_by_name_config_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[tuple[str, str | None, str]] = []

    def load(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        if name == "org/missing":
            raise FileNotFoundError("no data set called org/missing\nsecond line")
        return [{"text": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(read_rows("openai/gsm8k@main:test")) == [("openai/gsm8k@main:test", 1, {"text": "a"})]
    assert texts("imdb") == ["a"]
    assert asked == [("openai/gsm8k", "main", "test"), ("imdb", None, "train")]
    assert "no data set called org/missing" in str(refused(read_rows, "org/missing"))


def test_source_names() -> None:
    assert [source_name(name) for name in ("a/b.jsonl", "c.jsonl.gz", "openai/gsm8k@main:test")] == ["b", "c", "gsm8k-main-test"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ASSISTANT]}, "conversation"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"prompt": "a", "answer": "b"}, "task"),
        ({"question": "a", "answer": "b"}, "task"),
        ({"text": "a"}, "text"),
    ],
)
def test_kinds(file: Path, row: dict[str, object], expected: str) -> None:
    assert kind(write(file, row)) == expected


def test_unknown_kind_lists_what_is_accepted(file: Path) -> None:
    assert "accepted are: messages |" in str(refused(kind, write(file, {"input": "a", "output": "b"})))


def test_demonstrations_of_every_form(file: Path) -> None:
    system = {"role": "system", "content": "Be brief."}
    rows = [
        {"messages": [system, USER, ASSISTANT, USER, ASSISTANT], "id": "own"},
        {"prompt": "a", "completion": "b"},
        {"prompt": [system, USER], "completion": [ASSISTANT]},
        {"messages": [USER, ASSISTANT], "id": 7},
    ]
    first, second, third, fourth = demonstrations(write(file, *rows))
    assert (first.id, len(first.messages)) == ("own", 5)
    assert second == Demonstration("data-2", (Message("user", "a"), Message("assistant", "b")))
    assert third.messages == (Message("system", "Be brief."), Message("user", "hi"), Message("assistant", "hello"))
    assert fourth.id == "7"


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({"messages": []}, "messages", "is empty"),
        ({"messages": "hi"}, "messages", "not a list"),
        ({"messages": ["hi"]}, "messages[0]", "role and content"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "role and content"),
        ({"messages": [{"role": "human", "content": "x"}, ASSISTANT]}, "messages[0].role", "'human'"),
        ({"messages": [{"role": "user", "content": None}, ASSISTANT]}, "messages[0].content", "NoneType"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "messages[1].content", "empty"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{"name": "f"}]}]}, "messages[1].tool_calls", "not supported"),
        ({"messages": [USER]}, "messages", "no assistant turn"),
        ({"messages": [USER, ASSISTANT, USER]}, "messages", "ends with a user turn"),
        ({"prompt": "a", "completion": ""}, "completion", "is empty"),
        ({"prompt": 3, "completion": "b"}, "prompt", "int, not text"),
        ({"prompt": "a", "completion": [USER]}, "completion", "no assistant turn"),
        ({"text": "a"}, None, "`texts`"),
        ({"messages": [USER, ASSISTANT], "id": "same"}, "id", "also the id of line 1"),
        ({"messages": [USER, ASSISTANT], "id": 1.5}, "id", "1.5"),
    ],
)
def test_demonstrations_that_cannot_be_used(file: Path, row: dict[str, object], field: str | None, message: str) -> None:
    source = write(file, {"messages": [USER, ASSISTANT], "id": "same"}, row)
    error = refused(demonstrations, source)
    assert message in str(error)
    assert (error.file, error.line, error.field) == (source, 2, field)


def test_preferences_of_every_form(file: Path) -> None:
    worse = {"role": "assistant", "content": "what"}
    expected = (Message("user", "hi"),)
    rows = [
        {"prompt": "hi", "chosen": "hello", "rejected": "what"},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [worse]},
        {"prompt": "hi", "chosen": [USER, ASSISTANT], "rejected": [USER, worse]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, worse]},
    ]
    assert preferences(write(file, *rows)) == [Preference(f"data-{line}", expected, "hello", "what") for line in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({"prompt": "hi", "chosen": "a", "rejected": "a"}, "rejected", "equals chosen"),
        ({"prompt": "hi", "chosen": "a"}, "rejected", "is missing"),
        ({"chosen": "a", "rejected": "b"}, "prompt", "is missing"),
        ({"chosen": [USER, ASSISTANT], "rejected": [ASSISTANT]}, "prompt", "differ before their last turn"),
        ({"prompt": [USER, ASSISTANT], "chosen": "a", "rejected": "b"}, "prompt", "ends with an assistant turn"),
        ({"prompt": "other", "chosen": [USER, ASSISTANT], "rejected": "b"}, "chosen", "one assistant turn"),
        ({"prompt": "hi", "chosen": [USER], "rejected": "b"}, "chosen", "one assistant turn"),
        ({"prompt": "hi", "chosen": "", "rejected": "b"}, "chosen", "is empty"),
    ],
)
def test_preferences_that_cannot_be_used(file: Path, row: dict[str, object], field: str, message: str) -> None:
    error = refused(preferences, write(file, row))
    assert message in str(error)
    assert (error.line, error.field) == (1, field)


def test_tasks_and_texts(file: Path) -> None:
    rows = [{"question": "2+3?", "answer": 5, "level": "easy"}, {"prompt": [USER], "answer": "x", "id": "b"}]
    assert task_rows(write(file, *rows)) == [
        Task("data-1", (Message("user", "2+3?"),), "5", {"level": "easy"}),
        Task("b", (Message("user", "hi"),), "x", {}),
    ]
    assert texts(write(file, {"text": "one"}, {"text": "two"})) == ["one", "two"]


@pytest.mark.parametrize(
    ("row", "field", "message"),
    [
        ({"answer": "x"}, "prompt", "is missing"),
        ({"prompt": "a"}, "answer", "is None"),
        ({"prompt": "a", "answer": True}, "answer", "is True"),
        ({"prompt": "a", "answer": " "}, "answer", "must be a text or a number"),
        ({"prompt": [USER, ASSISTANT], "answer": "x"}, "prompt", "ends with an assistant turn"),
    ],
)
def test_tasks_that_cannot_be_used(file: Path, row: dict[str, object], field: str, message: str) -> None:
    error = refused(task_rows, write(file, row))
    assert message in str(error)
    assert (error.line, error.field) == (1, field)


def test_texts_need_text(file: Path) -> None:
    assert refused(texts, write(file, {"text": "a"}, {"prompt": "b"})).field == "text"
    assert refused(texts, write(file, {"text": ""})).field == "text"
