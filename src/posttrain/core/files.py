"""Atomic writes and JSON lines: a killed process or a full disk never costs what was complete before.

A file or directory is built under a hidden sibling name and renamed into place, so that readers see the old one or the new one,
never a part. What a killed process leaves behind is either a temporary name, which `tidy` deletes, or a directory that was moved
aside for its successor, which `tidy` puts back.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posttrain.core.errors import RunError, StorageError

_TEMPORARY = re.compile(r"\.(?P<name>.+)\.tmp-[0-9a-f]{8}")
_ASIDE = re.compile(r"\.(?P<name>.+)\.previous")
# Some readers take these for line ends; JSON allows the escaped form instead.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def write_atomic(path: str | Path, data: str | bytes) -> None:
    """Replace the contents of `path`; text is written as UTF-8. Raises StorageError, with the previous file untouched."""
    path = Path(path)
    temporary = _temporary(path)
    with _saving(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as handle:
                handle.write(data.encode("utf-8") if isinstance(data, str) else data)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_directory(path.parent)


def write_json(path: str | Path, obj: Any) -> None:
    """Atomically write one indented JSON value. Raises ValueError naming the key of a non-finite number, StorageError."""
    write_atomic(path, _encode(obj, indent=2) + b"\n")


def read_json(path: str | Path) -> Any:
    """Read one JSON value; raises RunError naming the file when it is missing or malformed."""
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise RunError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise RunError(f"{path}: not readable as JSON ({error})") from None


@contextmanager
def atomic_dir(path: str | Path) -> Iterator[Path]:
    """Yield an empty hidden sibling of `path` to fill; on success it is flushed to disk and becomes `path`.

    At every instant a complete directory exists: under `path`, or, between the two renames that replace an existing one, under the
    name from which `tidy(path.parent)` restores it. On failure the sibling is removed and `path` is untouched. An OSError raised
    inside the block or while renaming becomes StorageError.
    """
    path = Path(path)
    temporary = _temporary(path)
    with _saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _restore(path)
        temporary.mkdir()
        try:
            yield temporary
            _sync_tree(temporary)
            _move_into_place(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _sync_directory(path.parent)


def tidy(parent: str | Path) -> None:
    """Clean one directory after a killed writer: restore what was moved aside, delete temporary names. Not for use beside a writer."""
    parent = Path(parent)
    if not parent.is_dir():
        return
    with _saving(parent):
        for entry in sorted(parent.iterdir()):
            if match := _ASIDE.fullmatch(entry.name):
                _restore(parent / match["name"])
        for entry in sorted(parent.iterdir()):
            if _TEMPORARY.fullmatch(entry.name):
                remove(entry)


def remove(entry: str | Path) -> None:
    """Delete a file, or a folder with all it holds. A folder first takes a temporary name: half-deleted, it is never taken for whole."""
    entry = Path(entry)
    if not entry.is_dir():
        entry.unlink(missing_ok=True)
        return
    if not _TEMPORARY.fullmatch(entry.name):
        doomed = _temporary(entry)
        os.replace(entry, doomed)
        entry = doomed
    shutil.rmtree(entry)


def is_leftover(name: str) -> bool:
    """Whether a directory entry is the trace of an unfinished write rather than something that was saved."""
    return bool(_TEMPORARY.fullmatch(name) or _ASIDE.fullmatch(name))


class JsonlWriter:
    """Appends one JSON value per line, flushed line by line. Opening removes an unfinished last line.

    Example: writer = JsonlWriter("metrics.jsonl"); writer.append({"step": 1}); writer.offset  # 12
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with _saving(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = open(self.path, "ab", buffering=0)
            self.offset = _complete_size(self.path)
            """Bytes written so far; always the end of a complete line."""
            if self.offset != os.fstat(self._handle.fileno()).st_size:
                self._handle.truncate(self.offset)

    def append(self, value: Any) -> None:
        """Write one line. Raises ValueError naming the key of a non-finite number; StorageError, with the earlier lines intact."""
        line = _encode(value) + b"\n"
        with _saving(self.path):
            try:
                written = 0
                while written < len(line):
                    written += self._handle.write(line[written:])
            except OSError:
                with suppress(OSError):
                    self._handle.truncate(self.offset)
                raise
        self.offset += len(line)

    def truncate(self, offset: int) -> None:
        """Forget everything after byte `offset`; raises RunError when the file is shorter than that."""
        if offset > self.offset:
            raise RunError(f"{self.path}: {self.offset} bytes, but {offset} were recorded; lines are missing, restore the file from a copy")
        with _saving(self.path):
            self._handle.truncate(offset)
        self.offset = offset

    def sync(self) -> None:
        """Force the lines to the disk, so that a recorded offset also survives a power cut."""
        with _saving(self.path):
            os.fsync(self._handle.fileno())

    def close(self) -> None:
        """Release the file."""
        self._handle.close()


def read_jsonl(path: str | Path) -> list[Any]:
    """All values of a JSON-lines file, [] when it does not exist. A last line without its line end was never finished and is ignored.

    Raises RunError naming file and line for any other malformed line.
    """
    path = Path(path)
    if not path.exists():
        return []
    values = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            values.append(json.loads(line))
        except ValueError as error:
            raise RunError(f"{path}:{number}: not a JSON value ({error}); restore the file from a copy or delete the line") from None
    return values


def encode_line(value: Any) -> bytes:
    """The exact bytes `JsonlWriter.append` writes for `value`, line end included."""
    return _encode(value) + b"\n"


def _encode(value: Any, indent: int | None = None) -> bytes:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent).translate(_LINE_ENDS)
    except ValueError:
        if (key := _non_finite(value, "")) is None:
            raise
        raise ValueError(f"'{key}' is not a finite number; convert it before it is written") from None
    # Lone surrogates, which half a UTF-8 character decodes to, only occur inside strings, where this handler's output is a JSON escape.
    return text.encode("utf-8", "backslashreplace")


def _non_finite(value: Any, key: str) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else key or "value"
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for name, item in items:
        if (found := _non_finite(item, f"{key}.{name}" if key else str(name))) is not None:
            return found
    return None


def _complete_size(path: Path) -> int:
    """Bytes up to and including the last line end."""
    with open(path, "rb") as handle:
        end = handle.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            handle.seek(start)
            found = handle.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


@contextmanager
def _saving(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        kept = f"the previous {path.name} is intact" if os.path.exists(path) else "nothing saved before is lost"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space, then resume"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            remedy = "make the place writable, then resume"
        else:
            remedy = "fix the cause, then resume"
        raise StorageError(f"could not save {path}: {reason}; {kept}; {remedy}") from error


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _move_into_place(temporary: Path, path: Path) -> None:
    if not path.exists():
        os.replace(temporary, path)
        return
    # A rename cannot replace a filled directory, so the old one steps aside first.
    aside = _aside(path)
    os.replace(path, aside)
    try:
        os.replace(temporary, path)
    except OSError:
        os.replace(aside, path)
        raise
    _sync_directory(path.parent)
    with suppress(OSError):  # the new directory is in place; `tidy` gets the old one another time
        remove(aside)


def _restore(path: Path) -> None:
    aside = _aside(path)
    if not aside.exists():
        return
    if path.exists():
        remove(aside)
    else:
        os.replace(aside, path)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _sync_directory(Path(folder, name))
        _sync_directory(Path(folder))
