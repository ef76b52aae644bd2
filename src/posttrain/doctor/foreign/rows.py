"""JSON lines, one JSON value, and CSV: any keys, one row per step."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.doctor.foreign.table import Table, add_row
from posttrain.doctor.lines import Limits, Problems, json_lines, step_of, text_lines
from posttrain.runs.reading import file_size, kind, load_json, mapping

_ENVELOPES = ("data", "metrics", "values", "log", "logs")
"""Keys under which some loggers put the figures of a row."""


def read_jsonl(path: Path, table: Table, problems: Problems, limits: Limits) -> None:
    """Rows of a JSON-lines file; a last line without its end is whole when it is a JSON value."""
    for number, row in json_lines(path, path.name, problems, limits, whole_last=True):
        add_row(table, flattened(row), path.name, number, problems, limits)


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the figures of its envelope, if it has one, beside its own; other nested mappings as NAME/KEY.

    Example: flattened({"step": 1, "data": {"loss": 2.0}, "rewards": {"acc": 0.5}})  # {"step": 1, "loss": 2.0, "rewards/acc": 0.5}
    """
    found: dict[str, Any] = {}
    for key, value in row.items():
        if not isinstance(value, Mapping):
            found[key] = value
        elif key in _ENVELOPES:
            found |= {name: item for name, item in value.items() if name not in row}
        else:
            found |= {f"{key}/{name}": item for name, item in value.items()}
    return found


def read_json_value(path: Path, table: Table, problems: Problems, limits: Limits) -> None:
    """One JSON value: a list of rows, or an object of series {name: {step: value}} or {name: [values]}."""
    if (size := file_size(path)) > limits.records_bytes:
        problems.add(path.name, f"{size} bytes; more than {limits.records_bytes} are not read as one JSON value")
        return
    value, problem = load_json(path)
    if problem is not None:
        problems.add(path.name, problem)
        return
    if isinstance(value, list):
        for number, row in enumerate(value, start=1):
            if isinstance(row, dict):
                add_row(table, flattened(row), path.name, number, problems, limits)
            else:
                problems.add(path.name, f"holds {kind(row)} where a row should be; skipped")
        return
    _series(mapping(value), path.name, table, problems, limits)


def _series(value: Mapping[str, Any], where: str, table: Table, problems: Problems, limits: Limits) -> None:
    """Columns: name to {step: value}, or to a list whose places are the steps."""
    for name, column in value.items():
        points: Any = column.items() if isinstance(column, dict) else enumerate(column) if isinstance(column, list) else ()
        for at, figure in points:
            step = step_of(int(at) if isinstance(at, str) and at.isascii() and at.isdigit() and len(at) < 17 else at)
            if step is None or isinstance(figure, dict | list):
                problems.add(where, "holds a series that is not STEP: VALUE; left out")
                break
            add_row(table, {"step": step, name: figure}, where, 0, problems, limits)


def read_csv(path: Path, table: Table, problems: Problems, limits: Limits) -> None:
    """Rows of a CSV file with a header; commas, semicolons and tabs are told apart by the header."""
    lines = (text for _, text in text_lines(path, path.name, problems, limits, whole_last=True))
    head = next(lines, None)
    if head is None:
        return
    mark = max(",;\t", key=head.count)
    try:
        names = _header(next(csv.reader([head.lstrip("\ufeff")], delimiter=mark, strict=True)), path)
        for number, cells in enumerate(_cells(lines, mark), start=2):
            add_row(table, dict(zip(names, cells, strict=False)), path.name, number, problems, limits)
            if len(cells) != len(names):
                problems.add(path.name, f"has {len(cells)} cells for {len(names)} columns", number)
    except csv.Error as error:
        problems.add(path.name, "not readable as CSV from here on", detail=str(error))


def _header(names: list[str], path: Path) -> list[str]:
    """The columns; one tag exported by TensorBoard is called Value, and its name stands in that of the file (run-A-tag-loss.csv)."""
    if [name.lower() for name in names] == ["wall time", "step", "value"]:
        return ["_timestamp", "step", path.stem.rpartition("tag-")[2]]
    return [name.strip() for name in names]


def _cells(lines: Iterator[str], mark: str) -> Iterator[list[str]]:
    return iter(csv.reader(lines, delimiter=mark))
