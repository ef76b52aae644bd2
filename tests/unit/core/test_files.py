"""Atomic writes and JSON lines, with the disk failing or the process dying at every step."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.core.errors import RunError, StorageError
from posttrain.core.files import JsonlWriter, atomic_dir, encode_line, read_json, read_jsonl, tidy, write_atomic, write_json

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def fail_on_call(monkeypatch: pytest.MonkeyPatch, name: str, call: int, error: OSError = NO_SPACE) -> None:
    """Let the `call`-th use of os.<name> raise `error`; the others work."""
    real, calls = getattr(os, name), iter(range(1, 100))

    def sometimes(*args, **kwargs):
        if next(calls) == call:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, sometimes)


def replace_dir(path: Path, text: str) -> None:
    with atomic_dir(path) as folder:
        (folder / "a").write_text(text)
        (folder / "sub").mkdir()
        (folder / "sub" / "b").write_text(text)


def content(path: Path) -> tuple[str, str]:
    return (path / "a").read_text(), (path / "sub" / "b").read_text()


def test_write_atomic_makes_parents_and_replaces(tmp_path):
    path = tmp_path / "deep" / "file.txt"
    write_atomic(path, "one")
    write_atomic(path, b"two\n")
    assert path.read_bytes() == b"two\n"
    assert os.listdir(path.parent) == ["file.txt"]


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_full_disk_keeps_the_previous_file(tmp_path, monkeypatch, name):
    path = tmp_path / "state.json"
    write_atomic(path, "before")
    fail_on_call(monkeypatch, name, 1)
    with pytest.raises(StorageError) as caught:
        write_atomic(path, "after")
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert "No space left on device; the previous state.json is intact; free space, then resume" in message
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_forbidden_write_names_its_own_remedy(tmp_path, monkeypatch):
    fail_on_call(monkeypatch, "replace", 1, OSError(errno.EACCES, "Permission denied"))
    with pytest.raises(StorageError, match="Permission denied; nothing saved before is lost; make the place writable, then resume"):
        write_atomic(tmp_path / "new.txt", "x")


def test_write_json_round_trip_and_read_errors(tmp_path):
    path = tmp_path / "x.json"
    write_json(path, {"b": [1, 2.5, None], "a": "ü"})
    assert read_json(path) == {"b": [1, 2.5, None], "a": "ü"}
    path.write_text("{half")
    with pytest.raises(RunError, match="x.json: not readable as JSON"):
        read_json(path)
    with pytest.raises(RunError, match="gone.json: no such file"):
        read_json(tmp_path / "gone.json")


def test_write_json_names_the_key_that_is_not_finite(tmp_path):
    with pytest.raises(ValueError, match=r"'scores\.1\.kl' is not a finite number"):
        write_json(tmp_path / "x.json", {"scores": [{"kl": 0.0}, {"kl": float("nan")}]})
    assert os.listdir(tmp_path) == []


def test_atomic_dir_replaces_a_filled_directory(tmp_path):
    path = tmp_path / "step_1"
    replace_dir(path, "one")
    replace_dir(path, "two")
    assert content(path) == ("two", "two")
    assert os.listdir(tmp_path) == ["step_1"]


def test_atomic_dir_cleans_up_after_an_exception(tmp_path):
    path = tmp_path / "step_1"
    replace_dir(path, "one")
    with pytest.raises(KeyError), atomic_dir(path) as folder:  # noqa: PT012 - the failure comes after a partial write
        (folder / "a").write_text("partial")
        raise KeyError
    assert content(path) == ("one", "one")
    assert os.listdir(tmp_path) == ["step_1"]


@pytest.mark.parametrize(("name", "call"), [("replace", 1), ("replace", 2), ("fsync", 1), ("fsync", 2), ("fsync", 4)])
def test_a_full_disk_keeps_the_previous_directory(tmp_path, monkeypatch, name, call):
    path = tmp_path / "step_1"
    replace_dir(path, "one")
    fail_on_call(monkeypatch, name, call)
    with pytest.raises(StorageError, match=r"the previous step_1 is intact; free space, then resume"):
        replace_dir(path, "two")
    assert content(path) == ("one", "one")
    assert os.listdir(tmp_path) == ["step_1"]


KILLED = """
import os, shutil, sys
from pathlib import Path
from posttrain.core import files as storage
calls, stop = 0, int(sys.argv[2])
def dying(real):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == stop:
            os._exit(9)
        return real(*args, **kwargs)
    return call
for name in ("replace", "fsync"):
    setattr(os, name, dying(getattr(os, name)))
shutil.rmtree = dying(shutil.rmtree)
with storage.atomic_dir(Path(sys.argv[1])) as folder:
    (folder / "a").write_text("two")
    (folder / "sub").mkdir()
    (folder / "sub" / "b").write_text("two")
os._exit(0)
"""


def test_a_process_killed_at_any_write_leaves_a_complete_directory(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    outcomes = []
    for stop in range(1, 40):
        root = tmp_path / str(stop)
        path = root / "step_1"
        replace_dir(path, "one")
        code = subprocess.run([sys.executable, "-c", KILLED, str(path), str(stop)], check=False, env=environment).returncode
        tidy(root)
        assert os.listdir(root) == ["step_1"]
        assert content(path) in {("one", "one"), ("two", "two")}
        outcomes.append((code, content(path)[0]))
        if code == 0:
            break
    # Kills before the new directory is in place keep the old one; later kills keep the new one; in the end nothing dies.
    assert outcomes[-1] == (0, "two")
    assert [text for _, text in outcomes] == sorted(text for _, text in outcomes)
    assert (9, "one") in outcomes
    assert (9, "two") in outcomes


def test_tidy_does_not_restore_over_a_complete_directory(tmp_path):
    replace_dir(tmp_path / "step_1", "new")
    replace_dir(tmp_path / ".step_1.previous", "old")
    write_atomic(tmp_path / ".note.tmp-0123abcd", "partial")
    write_atomic(tmp_path / ".hidden", "mine")
    tidy(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".hidden", "step_1"]
    assert content(tmp_path / "step_1") == ("new", "new")


def test_atomic_dir_first_restores_what_a_killed_writer_moved_aside(tmp_path):
    replace_dir(tmp_path / ".step_1.previous", "one")
    with pytest.raises(KeyError), atomic_dir(tmp_path / "step_1"):
        raise KeyError
    assert os.listdir(tmp_path) == ["step_1"]
    assert content(tmp_path / "step_1") == ("one", "one")


def test_jsonl_bytes_and_offset(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.append({"b": 1, "a": "x\ny"})
    assert writer.offset == len(b'{"b": 1, "a": "x\\ny"}\n') == 22
    assert (tmp_path / "m.jsonl").read_bytes() == b'{"b": 1, "a": "x\\ny"}\n'


def test_jsonl_text_never_splits_a_line_or_breaks_utf8(tmp_path):
    value = {"text": "a\u2028b\x85c\ud83d", "more": "é漢"}
    line = encode_line(value)
    assert line.decode("utf-8").splitlines() == [line.decode("utf-8")[:-1]]
    assert "é漢" in line.decode("utf-8")
    JsonlWriter(tmp_path / "m.jsonl").append(value)
    assert read_jsonl(tmp_path / "m.jsonl") == [value]


def test_jsonl_refuses_non_finite_numbers_by_key_and_writes_nothing(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match=r"'logps\.1' is not a finite number"):
        writer.append({"logps": [-0.5, float("-inf")]})
    assert (writer.offset, (tmp_path / "m.jsonl").read_bytes()) == (0, b"")


def test_jsonl_truncate_then_append(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.append(1)
    kept = writer.offset
    writer.append(22)
    writer.truncate(kept)
    writer.append(3)
    assert (tmp_path / "m.jsonl").read_bytes() == b"1\n3\n"
    assert writer.offset == 4
    with pytest.raises(RunError, match="4 bytes, but 9 were recorded"):
        writer.truncate(9)


def test_jsonl_ignores_a_half_line_and_the_writer_removes_it(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"ste')
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]
    writer = JsonlWriter(path)
    assert writer.offset == 24
    writer.append({"step": 3})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_jsonl_half_line_longer_than_a_read_block(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"1\n" + b'"' + b"x" * 200_000)
    assert JsonlWriter(path).offset == 2
    assert path.read_bytes() == b"1\n"


def test_jsonl_malformed_middle_line_names_file_and_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"m\.jsonl:2: not a JSON value"):
        read_jsonl(path)
    assert read_jsonl(tmp_path / "none.jsonl") == []


def test_jsonl_full_disk_leaves_only_whole_lines(tmp_path):
    writer = JsonlWriter(tmp_path / "m.jsonl")
    writer.append({"step": 1})
    writer.close()

    class Full:
        """A file that takes four more bytes and then is full."""

        def __init__(self, handle):
            self.handle, self.taken = handle, False

        def write(self, data):
            if self.taken:
                raise NO_SPACE
            self.taken = True
            return self.handle.write(data[:4])

        def truncate(self, size):
            self.handle.truncate(size)

    writer._handle = Full(open(tmp_path / "m.jsonl", "ab", buffering=0))  # type: ignore[assignment]
    with pytest.raises(StorageError, match=r"the previous m\.jsonl is intact"):
        writer.append({"step": 2})
    assert (tmp_path / "m.jsonl").read_bytes() == b'{"step": 1}\n'
    assert writer.offset == 12
