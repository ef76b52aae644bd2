"""Reading a run directory that nobody vouches for: a copy of another machine's, a half-written one, one that means harm.

Nothing here raises for what a file holds: every reader returns what could be read together with one line about what could not. A path that
a record names is opened only when it lies within the run directory, and nothing is read as a whole before its size is known.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import yaml

from posttrain.core.digest import digest

MOST_BYTES = 256 << 20
"""Largest JSON file that is read; the records of this package are far smaller."""
MOST_YAML_BYTES = 1 << 20
LONGEST_LINE = 16 << 20
"""Longest line of a JSON-lines file that is read; a longer one is skipped piece by piece."""
MOST_NODES = 100_000
"""Values in a settings file, aliases counted as often as they are used."""
DEEPEST = 50
LONGEST_SHOWN = 200
"""Characters of a foreign text that are shown."""


class Found(NamedTuple):
    """What a file held, and what is wrong with it: exactly one is None, except that a file may hold null.

    Example: Found(None, "not a JSON value (Expecting value: line 1 column 1 (char 0))")
    """

    value: Any
    problem: str | None


class Line(NamedTuple):
    """One line of a JSON-lines file. Example: Line(3, None, "not a JSON value (...)", 812)"""

    number: int
    value: Any
    problem: str | None
    end: int
    """Byte offset behind the line."""


def plain(text: Any, longest: int = LONGEST_SHOWN) -> str:
    """Any value as one printable line: control characters and line ends are escaped, and what is long is cut.

    >>> plain("a\\nb\\x1b[2J")
    'a\\\\nb\\\\x1b[2J'
    """
    if isinstance(text, int) and text.bit_length() > 4096:
        return "a number of more than a thousand digits"
    shown = str(text)[: longest + 1]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in shown)
    return shown if len(shown) <= longest else f"{shown[:longest]}..."


def parse_json(data: bytes | str) -> Found:
    """One JSON value. NaN, Infinity and numbers beyond the range of a float are none: they could not be compared with anything."""
    try:
        return Found(json.loads(data, parse_constant=_refuse, parse_float=_finite), None)
    except RecursionError:
        return Found(None, "not a JSON value (nested too deeply)")
    except ValueError as error:
        return Found(None, f"not a JSON value ({plain(error)})")


def load_json(path: Path) -> Found:
    """The JSON value in a file."""
    data, problem = _bytes(path, MOST_BYTES)
    if problem is not None:
        return Found(None, problem)
    value, problem = parse_json(data)
    return Found(value, problem and problem.replace("not a JSON value", "not readable as JSON", 1))


def load_mapping(path: Path) -> Found:
    """A JSON object in a file; anything else is a problem, and the value is then {}."""
    value, problem = load_json(path)
    if problem is None and not isinstance(value, dict):
        problem = f"must hold a JSON object, not {kind(value)}"
    return Found(value if problem is None else {}, problem)


def load_yaml_mapping(path: Path) -> Found:
    """A mapping of plain values in a YAML file; anything else is a problem, and the value is then {}."""
    data, problem = _bytes(path, MOST_YAML_BYTES)
    if problem is not None:
        return Found({}, problem)
    try:
        value = yaml.safe_load(data.decode("utf-8"))
    except RecursionError:
        return Found({}, "not readable as YAML (nested too deeply)")
    # The library's constructors fail with all of these on a value that contradicts its tag.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        return Found({}, f"not readable as YAML ({plain(str(error).split(chr(10), 1)[0] or type(error).__name__)})")
    if not isinstance(value, dict):
        return Found({}, f"must hold a mapping of settings, not {kind(value)}")
    if (reason := _not_plain(value)) is not None:
        return Found({}, reason)
    return Found(value, None)


def scan_lines(path: Path, start: int = 0) -> Iterator[Line]:
    """Every line of a JSON-lines file from byte `start` on, read piece by piece; nothing when there is no such file.

    A last line without a line end comes with the problem "unfinished". Only line feeds end lines: U+2028 and its kin are text.
    """
    if not is_file(path):
        return
    try:
        with open(path, "rb") as handle:
            handle.seek(start)
            number, offset = 0, start
            while piece := handle.readline(LONGEST_LINE):
                number, offset = number + 1, offset + len(piece)
                if piece.endswith(b"\n"):
                    yield Line(number, *parse_json(piece), offset)
                elif len(piece) < LONGEST_LINE:
                    yield Line(number, None, "unfinished", offset)
                else:
                    offset += _rest_of_line(handle)
                    yield Line(number, None, f"longer than {LONGEST_LINE >> 20} MiB", offset)
    except OSError as error:
        yield Line(0, None, f"not readable ({plain(error.strerror or error)})", 0)


def last_line(path: Path) -> Line | None:
    """The last finished line of a JSON-lines file, read from its end; None when there is none within reach."""
    size = file_size(path)
    for reach in (1 << 16, LONGEST_LINE):
        start = max(0, size - reach)
        found = [line for line in scan_lines(path, start) if line.problem != "unfinished"]
        found = found if start == 0 else found[1:]  # the first one begins somewhere in a line
        if found or start == 0:
            return found[-1] if found else None
    return None


def within(root: Path, name: Any) -> Path | None:
    """The file that a record of the run at `root` calls `name`; None when it is no path below `root` (also not through a link)."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name or len(name) > 1000:
        return None
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        return None
    try:
        place = (root / parts).resolve()
        return root / parts if place.is_relative_to(root.resolve()) else None
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that the file system cannot hold
        return None


def files(root: Path, *patterns: str) -> list[Path]:
    """Regular files below `root` that match one of the patterns and lie within it, in name order."""
    try:
        found = {path for pattern in patterns for path in root.glob(pattern)}
    except OSError:
        return []
    return sorted(path for path in found if is_file(path) and within(root, path.relative_to(root).as_posix()) is not None)


def is_file(path: Path) -> bool:
    """Whether `path` is a regular file (or a link to one): no folder, no pipe that would never answer."""
    return _mode(path) == stat.S_IFREG


def exists(path: Path) -> bool:
    """Whether there is anything at `path`."""
    return _mode(path) != 0


def file_size(path: Path) -> int:
    """Bytes of a regular file; 0 for anything else."""
    try:
        return path.stat().st_size if is_file(path) else 0
    except (OSError, ValueError):
        return 0


def kind(value: Any) -> str:
    """What JSON calls a value. Example: kind([1]) -> "a list"."""
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` when it is a mapping, {} otherwise."""
    return value if isinstance(value, Mapping) else {}


def strings(value: Any) -> list[str]:
    """The texts of a list of texts; [] for anything else."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def safe_digest(value: Any) -> str | None:
    """The digest of a JSON value; None for one that is nested too deeply to be written again."""
    try:
        return digest(value)
    except (RecursionError, ValueError, TypeError):
        return None


def number(value: Any) -> float | None:
    """A finite number, or None. Truth values are none; neither are integers that no float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _rest_of_line(handle: BinaryIO) -> int:
    """Skip to the next line without keeping this one; the number of bytes skipped."""
    skipped = 0
    while piece := handle.readline(LONGEST_LINE):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped


def _bytes(path: Path, most: int) -> tuple[bytes, str | None]:
    if not is_file(path):
        return b"", "not a file" if exists(path) else "missing"
    if (size := file_size(path)) > most:
        return b"", f"{size} bytes; more than {most} are not read"
    try:
        return path.read_bytes(), None
    except OSError as error:
        return b"", f"not readable ({plain(error.strerror or error)})"


def _mode(path: Path) -> int:
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):
        return 0


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:20]} is out of range")
    return value


def _not_plain(value: Any) -> str | None:
    """Why settings are not what JSON can say, walked with a bound: aliases can make a short file endless."""
    waiting, seen = [(value, 0)], 0
    while waiting:
        item, depth = waiting.pop()
        seen += 1
        if seen > MOST_NODES or depth > DEEPEST:
            return "holds too many or too deeply nested values for settings"
        if isinstance(item, dict):
            if odd := [key for key in item if not isinstance(key, str)]:
                return f"has the key {plain(odd[0])}, which is not text"
            waiting += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            waiting += [(inner, depth + 1) for inner in item]
        elif item is not None and number(item) is None and not isinstance(item, str | bool):
            return f"holds {plain(item, 40)}, which JSON cannot say"
    return None
