"""Scalars of TensorBoard event files, read without TensorBoard.

A file is a sequence of records: length (8 bytes, little-endian), a checksum of it (4), the payload, a checksum of that (4). A payload is a
protocol buffer: Event{step = 2, summary = 5{value = 1{tag = 1, simple_value = 2, tensor = 8}}}. Checksums are not compared; a record that
makes no sense ends the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from posttrain.doctor.foreign.table import Table
from posttrain.doctor.lines import Limits, Problems, step_of
from posttrain.runs.reading import number

_MOST_RECORD = 64 << 20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT, _DOUBLE = 1, 2
"""DataType of a tensor."""


def read_events(path: Path, table: Table, problems: Problems, limits: Limits) -> None:
    """Add every scalar of an event file under its tag."""
    for number_, payload in enumerate(_records(path, problems, limits), start=1):
        try:
            step, scalars = _event(payload)
        except (ValueError, IndexError, struct.error):
            problems.add(path.name, f"record {number_} is no event; skipped")
            continue
        if (at := step_of(step)) is None:
            problems.add(path.name, f"record {number_} has the step {step}; skipped")
            continue
        if at not in table.rows and len(table.rows) >= limits.rows:
            problems.add(path.name, f"more than {limits.rows} steps; the others are left out")
            return
        for tag, value in scalars:
            if (name := table.names.of(tag)) is None:
                continue
            if (finite := number(value)) is None:
                problems.add(path.name, "holds NaN or Infinity; it counts as not known", detail=name)
                table.spoilt(at)
                table.rows.setdefault(at, {})
            else:
                table.add(at, {name: finite})


def _records(path: Path, problems: Problems, limits: Limits) -> Iterator[bytes]:
    """Payloads in order; large ones, which hold images or graphs, are passed over."""
    read = 0
    try:
        with open(path, "rb") as handle:
            while len(head := handle.read(12)) == 12 and read < limits.file_bytes:
                (length,) = struct.unpack("<Q", head[:8])
                read += length + 16
                if length > _MOST_RECORD:
                    problems.add(path.name, f"names a record of {length} bytes; what follows is not read")
                    return
                payload = handle.read(length)
                if len(payload) < length or len(handle.read(4)) < 4:
                    problems.add(path.name, "ends within a record; the part is ignored")
                    return
                yield payload
            if 0 < len(head) < 12:
                problems.add(path.name, "ends within a record; the part is ignored")
    except OSError as error:
        problems.add(path.name, "not readable", detail=error.strerror or str(error))


def _fields(data: bytes) -> Iterator[tuple[int, int, bytes | int]]:
    """Number, wire type and raw value of every field. Raises ValueError, IndexError or struct.error for what is no protocol buffer."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        field, wire = key >> 3, key & 7
        value: bytes | int
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire == _BYTES:
            size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {wire}")
        if at > len(data):
            raise ValueError("a field reaches over the end")
        yield field, wire, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
    raise ValueError("a number of more than ten bytes")


def _event(data: bytes) -> tuple[int, list[tuple[str, float]]]:
    step, scalars = 0, []
    for field, wire, value in _fields(data):
        if field == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >> 63 else value
        elif field == 5 and wire == _BYTES and isinstance(value, bytes):
            scalars += [found for f, w, v in _fields(value) if f == 1 and isinstance(v, bytes) and w == _BYTES and (found := _value(v))]
    return step, scalars


def _value(data: bytes) -> tuple[str, float] | None:
    """Tag and scalar of a summary value; None for images, texts and histograms."""
    tag, scalar = "", None
    for field, wire, value in _fields(data):
        if field == 1 and isinstance(value, bytes):
            tag = value.decode("utf-8", "replace")
        elif field == 2 and wire == _FIXED32 and isinstance(value, bytes):
            scalar = struct.unpack("<f", value)[0]
        elif field == 8 and isinstance(value, bytes):
            scalar = _tensor(value)
    return None if not tag or scalar is None else (tag, scalar)


def _tensor(data: bytes) -> float | None:
    """The number of a tensor of one float, in whichever of its forms: dtype = 1, tensor_content = 4, float_val = 5, double_val = 6."""
    kind, found = 0, None
    for field, _, value in _fields(data):
        if field == 1 and isinstance(value, int):
            kind = value
        elif field in (4, 5, 6) and isinstance(value, bytes):
            wide = field == 6 or (field == 4 and kind == _DOUBLE)
            if kind in (_FLOAT, _DOUBLE) and len(value) == (8 if wide else 4):
                found = struct.unpack("<d" if wide else "<f", value)[0]
    return found
