"""Reading text that nobody vouches for, line by line and with a bound on everything; what cannot be read is counted, not raised."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from posttrain.runs.reading import exists, file_size, is_file, load_mapping, number, plain, within

CUT = "the last line is cut"
"""How the problem of a file begins whose writer was killed in the middle of a line (or is writing it now)."""
SKIPPED = "; skipped"
"""How the problem of a line ends that was left out."""
STEPS = 1 << 53
"""Steps lie below this: every integer there is a float too."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is read. Example: Limits(rollouts=10)"""

    line_bytes: int = 1 << 20
    file_bytes: int = 4 << 30
    """Of a file that is read line by line; the rest is left out."""
    record_bytes: int = 16 << 20
    """Of one record that has to be read as a whole."""
    records_bytes: int = 64 << 20
    """Of all records of one folder together."""
    records: int = 1000
    """Files of one folder."""
    stages: int = 100
    columns: int = 2000
    """Metrics of one stage."""
    rows: int = 1_000_000
    alarms: int = 10_000
    rollouts: int = 200
    """Last rollouts of each stage."""
    rollout_bytes: int = 2 << 20
    """Read from the end of each rollout file."""


@dataclass(slots=True)
class Problems:
    """What could not be read: one line for each sort of thing in each file, however often it occurs.

    Example: p = Problems(); p.add("a.jsonl", "is no JSON object; skipped", 3); p.add("a.jsonl", "is no JSON object; skipped", 9)
             p.lines()  # ["a.jsonl: line 3 is no JSON object; skipped (1 more like it)"]
    """

    found: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    """Lines of each file that were left out."""

    def cut(self, where: str) -> bool:
        """Whether a file ends in the middle of a line."""
        return any(file == where and what.startswith(CUT) for file, what in self.found)

    def lines_of(self, where: str | None) -> int:
        """Lines left out of one file, or of all."""
        return sum(count for file, count in self.skipped.items() if where in (None, file))

    def add(self, where: str, what: str, line: int | None = None, detail: str = "") -> None:
        """Count one. Of equal ones the first gives its line and detail."""
        if what.endswith(SKIPPED):
            self.skipped[where] = self.skipped.get(where, 0) + 1
        key = (where, what)
        said, count = self.found.get(key, ("", 0))
        if not count:
            told = what if line is None else f"line {line} {what}"
            said = f"{plain(where)}: {told}{f' ({plain(detail)})' if detail else ''}"
        self.found[key] = (said, count + 1)

    def lines(self) -> list[str]:
        """One line each, in order of appearance."""
        return [said if count == 1 else f"{said} ({count - 1} more like it)" for said, count in self.found.values()]


def text_lines(path: Path, where: str, problems: Problems, limits: Limits, *, whole_last: bool = False) -> Iterator[tuple[int, str]]:
    """Number and text of every line, empty ones left out. Only line feeds end lines: U+2028 and its kin are text.

    A last line without its end counts as cut, unless `whole_last` says that this kind of file may end without one.
    """
    if not is_file(path):
        problems.add(where, "not a file" if exists(path) else "missing")
        return
    try:
        with open(path, "rb") as handle:
            for number_, piece in _pieces(handle, where, problems, limits):
                if not piece.endswith(b"\n") and not whole_last:
                    problems.add(where, f"{CUT}; ignored")
                elif (text := _decoded(piece)) is None:
                    problems.add(where, "is not UTF-8; skipped", number_)
                elif text:
                    yield number_, text
    except OSError as error:
        problems.add(where, "not readable", detail=error.strerror or str(error))


def _pieces(handle: BinaryIO, where: str, problems: Problems, limits: Limits) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of every line that is not too long, up to the most bytes of a file."""
    number_, offset = 0, 0
    while piece := handle.readline(limits.line_bytes):
        number_, offset = number_ + 1, offset + len(piece)
        if offset > limits.file_bytes:
            problems.add(where, f"what follows byte {limits.file_bytes} is not read")
            return
        if len(piece) == limits.line_bytes and not piece.endswith(b"\n"):
            problems.add(where, f"is longer than {limits.line_bytes >> 10} KiB; skipped", number_)
            offset += _skip_line(handle, limits.file_bytes)
        else:
            yield number_, piece


def _decoded(piece: bytes) -> str | None:
    """The text without white space around it; None when it is not UTF-8."""
    try:
        return piece.decode("utf-8").strip()
    except UnicodeDecodeError:
        return None


def _skip_line(handle: BinaryIO, most: int) -> int:
    """Leave out the rest of a line, in one buffer however long it is; returns its bytes."""
    buffer, skipped = bytearray(1 << 22), 0
    while skipped < most and (count := handle.readinto(buffer)):  # type: ignore[attr-defined]
        end = buffer.find(b"\n", 0, count)
        if end >= 0:
            handle.seek(end + 1 - count, os.SEEK_CUR)
            return skipped + end + 1
        skipped += count
    return skipped


def json_lines(
    path: Path, where: str, problems: Problems, limits: Limits, *, whole_last: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and value of every line that is a JSON object. NaN and Infinity come as floats that are not finite."""
    decode = json.JSONDecoder().decode
    for number_, text in text_lines(path, where, problems, limits, whole_last=whole_last):
        try:
            value = decode(text)
        except RecursionError:
            problems.add(where, "is nested too deeply; skipped", number_)
            continue
        except ValueError as error:
            problems.add(where, "is no JSON value; skipped", number_, str(error))
            continue
        if isinstance(value, dict):
            yield number_, value
        else:
            problems.add(where, "is no JSON object; skipped", number_)


def last_objects(path: Path, where: str, problems: Problems, limits: Limits) -> list[dict[str, Any]]:
    """The last JSON objects of a JSON-lines file, read from its end."""
    size = file_size(path)
    start = max(0, size - limits.rollout_bytes)
    try:
        with open(path, "rb") as handle:
            handle.seek(start)
            data = handle.read(limits.rollout_bytes)
    except OSError as error:
        problems.add(where, "not readable", detail=error.strerror or str(error))
        return []
    lines = data.split(b"\n")
    if lines.pop():
        problems.add(where, f"{CUT}; ignored")
    if start:
        lines = lines[1:]  # it begins somewhere in a line
        if not lines:
            problems.add(where, f"no line ends within its last {limits.rollout_bytes >> 10} KiB; ignored")
    found = []
    for line in lines[-limits.rollouts :]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif line.strip():
            problems.add(where, "a line near the end is no JSON object; skipped")
    return found


def records(root: Path, folder: str, problems: Problems, limits: Limits) -> dict[str, dict[str, Any]]:
    """Name to content of the JSON objects in one folder of a run, in name order."""
    found: dict[str, dict[str, Any]] = {}
    total = 0
    for path in listed(root, folder, ".json", problems, limits):
        where = f"{folder}/{path.name}"
        size = file_size(path)
        total += size
        if size > limits.record_bytes or total > limits.records_bytes:
            problems.add(where, f"not read: it is one of those that make the folder larger than {limits.records_bytes >> 20} MiB")
            continue
        value, problem = load_mapping(path)
        if problem is None:
            found[path.name.removesuffix(".json")] = value
        else:
            problems.add(where, problem)
    return found


def listed(root: Path, folder: str, ending: str, problems: Problems, limits: Limits) -> list[Path]:
    """Files of a folder of a run by their ending, in name order; what is no file, lies elsewhere or is hidden is left out."""
    place = root / folder
    if not exists(place):
        if place.is_symlink():
            problems.add(folder, "a link that leads nowhere; ignored")
        return []
    try:
        names = sorted(entry.name for entry in os.scandir(place) if entry.name.endswith(ending) and not entry.name.startswith("."))
    except OSError as error:
        problems.add(folder, "not readable as a folder", detail=error.strerror or str(error))
        return []
    if len(names) > limits.records:
        problems.add(folder, f"holds {len(names)} files; the first {limits.records} are read")
    found = []
    for name in names[: limits.records]:
        if within(root, f"{folder}/{name}") is None:
            problems.add(f"{folder}/{name}", "leads out of the run; ignored")
        elif not is_file(place / name):
            problems.add(f"{folder}/{name}", "not a file; ignored")
        else:
            found.append(place / name)
    return found


def step_of(value: Any) -> int | None:
    """A step number, or None: steps are whole, not negative and below 2^53."""
    figure = number(value)
    if figure is None or figure != int(figure) or not 0 <= figure < STEPS:
        return None
    return int(figure)


@dataclass(slots=True)
class Names:
    """Names of columns as one printable line each, at most `most` of them.

    Example: Names(2).of("reward\\x1b[2J")  # 'reward\\\\x1b[2J'
    """

    most: int
    known: dict[str, str] = field(default_factory=dict)
    dropped: bool = False
    """Whether there were more."""

    def of(self, name: str) -> str | None:
        """The name to use; None when there are too many."""
        if (found := self.known.get(name)) is not None:
            return found
        if len(self.known) >= self.most:
            self.dropped = True
            return None
        self.known[name] = name if name.isprintable() and len(name) <= 200 else plain(name)
        return self.known[name]


class Figures(NamedTuple):
    """What a line holds: finite numbers, the first name of one that is not finite, the first name of what is no number at all."""

    known: dict[str, float]
    broken: str | None
    odd: str | None


def figures(values: Mapping[str, Any], names: Names, prefix: str = "", skip: frozenset[str] = frozenset()) -> Figures:
    """The numbers of one line; text and null are no figures, and no fault either.

    Example: figures({"loss": nan, "lr": 0.1, "note": "x", "odd": []}, Names(9))  # Figures({"lr": 0.1}, "loss", "odd")
    """
    known: dict[str, float] = {}
    broken = odd = None
    clean = names.known
    for key, value in values.items():
        kind = type(value)  # exact: a truth value is an int to isinstance
        if kind is float or kind is int:
            if key in skip:
                continue
            name = clean.get(prefix + key) or names.of(prefix + key)
            if name is None:
                continue
            if kind is float and isfinite(value):
                known[name] = value
            elif (figure := number(value)) is None:
                broken = broken or name
            else:
                known[name] = figure
        elif kind is not str and value is not None and key not in skip:
            odd = odd or key
    return Figures(known, broken, odd)
