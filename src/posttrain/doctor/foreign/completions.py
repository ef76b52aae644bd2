"""Completions that another trainer kept in full, as rollouts under our names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.doctor.lines import Limits, Problems, last_objects
from posttrain.runs.reading import file_size, number, plain

JSON_LINES = re.compile(r"(?:.*completions|.*rollouts?|.*generations|.*samples)\w*\.jsonl")
PARQUET = re.compile(r"completions_\d+\.parquet")
_OURS = {"input": "prompt", "output": "completion", "response": "completion", "score": "value", "reward": "value"}
_FIELDS = frozenset({"step", "prompt", "completion", "value", "advantage", "tokens", "task", "status", "stop"})
_MOST, _MOST_UNPACKED = 32 << 20, 128 << 20
"""Bytes of a parquet file, and of what it holds."""


def rollout(row: Mapping[str, Any]) -> dict[str, Any]:
    """A kept completion under our names: conversations as text, other numbers under "parts"; one part alone is the value.

    Example: rollout({"step": 3, "prompt": "2+2", "completion": [{"role": "assistant", "content": "4"}], "exact": 1.0})
             # {"step": 3, "prompt": "2+2", "completion": "4", "value": 1.0, "parts": {"exact": 1.0}}
    """
    found: dict[str, Any] = {}
    parts: dict[str, float] = {}
    for theirs, value in row.items():
        name = _OURS.get(theirs, theirs)
        if name in ("prompt", "completion"):
            found[name] = _text(value)
        elif name in _FIELDS:
            found[name] = value
        elif (figure := number(value)) is not None:
            parts[plain(theirs)] = figure
    if len(parts) == 1:
        found.setdefault("value", next(iter(parts.values())))
    return found | ({"parts": parts} if parts else {})


def _text(value: Any) -> str:
    """A text, or what is said last in a list of messages."""
    while isinstance(value, list) and value:
        value = value[-1]
    return str(value.get("content", "")) if isinstance(value, Mapping) else value if isinstance(value, str) else ""


def last_completions(files: list[Path], problems: Problems, limits: Limits) -> list[dict[str, Any]]:
    """The last completions in the newest of `files`, which are all that were found."""
    parquet = [file for file in files if PARQUET.fullmatch(file.name)]
    lines = [file for file in files if JSON_LINES.fullmatch(file.name.lower())]
    if lines:
        rows = last_objects(lines[-1], lines[-1].name, problems, limits)
    elif parquet:
        rows = _parquet(max(parquet, key=lambda file: file.name), problems, limits)
    else:
        return []
    return [rollout(row) for row in rows]


def _parquet(path: Path, problems: Problems, limits: Limits) -> list[dict[str, Any]]:
    if (size := file_size(path)) > _MOST:
        problems.add(path.name, f"{size} bytes; completions of more than {_MOST} are not read")
        return []
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        problems.add(path.name, "completions in parquet need the package pyarrow: pip install pyarrow")
        return []
    try:
        with ParquetFile(path) as file:
            groups = file.metadata.num_row_groups
            if sum(file.metadata.row_group(place).total_byte_size for place in range(groups)) > _MOST_UNPACKED:
                problems.add(path.name, f"more than {_MOST_UNPACKED} bytes when unpacked; not read")
                return []
            table = file.read()
        return table.slice(max(0, table.num_rows - limits.rollouts)).to_pylist()
    except (OSError, ValueError, TypeError, LookupError) as error:  # what pyarrow says of a file that is none
        problems.add(path.name, "not readable as parquet", detail=str(error))
        return []
