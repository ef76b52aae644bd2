"""Reading rows from data files and the hub. Every refusal names file and line, so that the row can be found and fixed.

A source is a `.jsonl` path (also `.jsonl.gz`), a `.parquet` path, or a hub id `name[@config][:split]` (split `train` unless said).
Lines are counted from 1; in parquet files and hub data sets they are row numbers.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.core.errors import DataError

Row = tuple[str, int, dict[str, Any]]
"""(file, line, fields)"""

_JSON = (".jsonl", ".jsonl.gz", ".ndjson")
_PARQUET = (".parquet",)
_HUB = re.compile(r"(?P<id>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<config>[\w.-]+))?(?::(?P<split>[\w.\[\]%:+-]+))?")


def read_rows(source: str) -> Iterator[Row]:
    """Every row of `source` in order, read lazily.

    Raises DataError for a missing or unreadable file, a line that is not a JSON object, an unknown hub id, and a source without rows.
    """
    empty = True
    for row in _reader(source):
        empty = False
        yield row
    if empty:
        raise DataError("holds no rows; give a file with at least one", file=source)


def source_name(source: str) -> str:
    """Short name of a source for row ids. Example: "data/train.jsonl" -> "train", "openai/gsm8k@main:test" -> "gsm8k-main-test"."""
    name = source.rsplit("/", 1)[-1]
    for suffix in (*_JSON, *_PARQUET):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return re.sub(r"[@:]", "-", name)


def _reader(source: str) -> Iterator[Row]:
    if source.endswith(_JSON):
        return _json_rows(source)
    if source.endswith(_PARQUET):
        return _parquet_rows(source)
    if Path(source).exists():
        raise DataError(f"cannot be read: use a file that ends in {', '.join((*_JSON, *_PARQUET))}, or a hub id", file=source)
    if _HUB.fullmatch(source) is None or source.endswith((".json", ".csv", ".txt", ".tsv")):
        raise DataError("is neither an existing file nor a hub id such as 'openai/gsm8k@main:train'", file=source)
    return _hub_rows(source)


def _json_rows(source: str) -> Iterator[Row]:
    if not Path(source).is_file():
        raise DataError("no such file; check the path", file=source)
    try:
        # bytes, so that only \n ends a line: text mode would also split inside strings that hold a bare carriage return
        with gzip.open(source, "rb") if source.endswith(".gz") else open(source, "rb") as handle:
            for line, raw in enumerate(handle, start=1):
                if raw.strip():
                    yield source, line, _object(source, line, raw)
    except (OSError, EOFError) as error:
        raise DataError(f"cannot be read: {error}", file=source) from None


def _object(source: str, line: int, raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig" if line == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 at byte {error.start}; convert the file", file=source, line=line) from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}; write one object per line", file=source, line=line) from None
    if not isinstance(value, dict):
        raise DataError(f"holds a {type(value).__name__}, not an object; write one object per line", file=source, line=line)
    return value


def _parquet_rows(source: str) -> Iterator[Row]:
    if not Path(source).is_file():
        raise DataError("no such file; check the path", file=source)
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError("parquet needs the package pyarrow; install it with: pip install pyarrow", file=source) from None
    line = 0
    try:
        with ParquetFile(source) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    line += 1
                    yield source, line, row
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read as parquet: {error}", file=source) from None


def _hub_rows(source: str) -> Iterator[Row]:
    match = _HUB.fullmatch(source)
    if match is None:
        raise DataError("is not a hub id", file=source)
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError("hub data needs the package datasets; install it with: pip install datasets", file=source) from None
    try:
        rows = load_dataset(match["id"], match["config"], split=match["split"] or "train")
    except (OSError, ValueError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"cannot be loaded as a file or hub data set: {problem}", file=source) from None
    for line, row in enumerate(rows, start=1):
        yield source, line, dict(row)
