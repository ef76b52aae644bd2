"""An append-only file of records in which every line names the digest of the line before it.

A record that was edited, inserted, reordered or deleted breaks the chain, and a side file that holds the number of records and the
digest of the last one betrays a shortened end. Lines are read as strangers wrote them: whatever is wrong is one error with its line.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from posttrain.core.errors import RunError, StorageError
from posttrain.core.files import encode_line, write_json
from posttrain.runs.manifest import now

SCHEMA = 1
START = "0" * 16
"""What the first entry names as the digest before it."""
LARGEST = 64 << 20
"""Bytes of a ledger or of one evidence file that are still read."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a ledger.

    Example: Entry(line=1, at="2026-01-01T00:00:00+00:00", kind="status", body={"claim": "a", ...}, digest="5f0c9f1e23aa7b10")
    """

    line: int
    at: str
    kind: str
    body: Mapping[str, Any]
    digest: str
    """16 hex digits of the SHA-256 of the line, which the next line repeats."""


def read_entries(path: str | Path) -> list[Entry]:
    """All entries, [] when there is no file; an unfinished last line was never an entry.

    Raises RunError naming file and line when a line is malformed, the chain is broken, or entries are missing at the end.
    """
    path = Path(path)
    raw = read_bytes(path) if path.exists() else b""
    entries: list[Entry] = []
    before = START
    for number, line in enumerate(raw.split(b"\n")[:-1], start=1):
        entry = _entry(path, number, line, before)
        entries.append(entry)
        before = entry.digest
    _check_head(path, entries)
    return entries


def append(path: str | Path, records: Sequence[tuple[str, Mapping[str, Any]]], at: str | None = None) -> list[Entry]:
    """Add (kind, body) records as one write and return their entries; several writers take turns.

    Raises RunError when the ledger is broken already, StorageError when it cannot be written.
    """
    path, at = Path(path), at or now()
    with _locked(path) as handle:
        entries = read_entries(path)
        if not entries:
            _write_head(path, entries)
        lines, made = b"", list(entries)
        for kind, body in records:
            before = made[-1].digest if made else START
            line = encode_line({"schema": SCHEMA, "at": at, "previous": before, "kind": kind, "body": dict(body)})
            made.append(_entry(path, len(made) + 1, line[:-1], before))
            lines += line
        complete = _end_of_line(path, len(entries))
        os.ftruncate(handle, complete)  # what a killed writer left unfinished
        os.lseek(handle, complete, os.SEEK_SET)
        written = 0
        while written < len(lines):
            written += os.write(handle, lines[written:])
        os.fsync(handle)
        _write_head(path, made)
    return made[len(entries) :]


def head_file(path: str | Path) -> Path:
    """The side file with the number of entries and the digest of the last: claims.jsonl -> claims.head.json."""
    return Path(path).with_suffix(".head.json")


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """The contents of a file of a sane size; RunError names it otherwise."""
    try:
        if not path.is_file():
            raise RunError(f"{path}: no such file; restore it or name another")
        if (size := path.stat().st_size) > largest:
            raise RunError(f"{path}: {size / 2**20:.0f} MiB, at most {largest >> 20} are read; keep the records that are needed")
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror or error})") from None


def parse(raw: bytes, where: str) -> Any:
    """One JSON value without NaN, infinity, or a string that is no text; RunError starts with `where`."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a number that JSON has")

    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=refuse, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise RunError(f"{where}: nested too deeply to be read") from None
    except ValueError as error:  # covers broken UTF-8, half a value and lone surrogates
        raise RunError(f"{where}: not a JSON value ({short(str(error))}); restore the file from a copy") from None
    return value


def short(text: str, most: int = 80) -> str:
    """Text of a stranger as one printable line."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown if len(shown) <= most else shown[:most] + "..."


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large for a number")
    return value


def _entry(path: Path, number: int, line: bytes, before: str) -> Entry:
    where = f"{path}:{number}"
    value = parse(line, where)
    if not isinstance(value, dict) or value.get("schema") != SCHEMA or isinstance(value["schema"], bool):
        found = value.get("schema") if isinstance(value, dict) else type(value).__name__
        raise RunError(f"{where}: not an entry of schema {SCHEMA} ({short(repr(found))}); restore the file from a copy")
    for name, kind in (("at", str), ("previous", str), ("kind", str), ("body", dict)):
        if not isinstance(value.get(name), kind):
            raise RunError(f"{where}: '{name}' is {short(repr(value.get(name)))}, not a {kind.__name__}; restore the file from a copy")
    try:
        datetime.fromisoformat(value["at"])
    except ValueError:
        raise RunError(f"{where}: '{short(value['at'])}' is not a time; restore the file from a copy") from None
    if value["previous"] != before:
        raise RunError(
            f"{where}: follows an entry with digest {short(value['previous'])}, but the one before it has {before}: "
            "history was edited; restore the file from a copy and append a correction instead"
        )
    return Entry(number, value["at"], value["kind"], value["body"], hashlib.sha256(line).hexdigest()[:16])


def _check_head(path: Path, entries: Sequence[Entry]) -> None:
    head = head_file(path)
    if not head.exists():
        if entries:
            raise RunError(f"{head}: missing, so a shortened {path.name} would go unnoticed; restore it from a copy")
        return
    value = parse(read_bytes(head), str(head))
    count, wanted = (value.get("entries"), value.get("digest")) if isinstance(value, dict) else (None, None)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0 or not isinstance(wanted, str):
        raise RunError(f"{head}: must hold 'entries' and 'digest'; restore it from a copy")
    if count > len(entries):
        raise RunError(f"{path}: {len(entries)} entries, {head.name} records {count}: the end was deleted; restore the file from a copy")
    found = entries[count - 1].digest if count else START
    if found != wanted:
        raise RunError(f"{path}:{count}: digest {found}, {head.name} records {short(wanted)}: history was edited; restore both from a copy")


def _write_head(path: Path, entries: Sequence[Entry]) -> None:
    write_json(head_file(path), {"schema": SCHEMA, "entries": len(entries), "digest": entries[-1].digest if entries else START})


def _end_of_line(path: Path, lines: int) -> int:
    """Byte offset behind the first `lines` line ends."""
    raw, end = read_bytes(path), 0
    for _ in range(lines):
        end = raw.index(b"\n", end) + 1
    return end


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle
        finally:
            os.close(handle)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}; make the place writable and try again") from error
