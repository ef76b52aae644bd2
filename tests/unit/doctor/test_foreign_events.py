"""TensorBoard event files, written here byte by byte from the format's definition."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from posttrain.core.errors import RunError
from posttrain.doctor.reading import read_evidence


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def part(field: int, data: bytes) -> bytes:
    """A length-delimited field."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def simple(tag: str, value: float) -> bytes:
    return part(1, part(1, tag.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value))


def tensor(tag: str, body: bytes) -> bytes:
    return part(1, part(1, tag.encode()) + part(8, body))


def event(step: int, *values: bytes) -> bytes:
    payload = varint(1 << 3 | 1) + struct.pack("<d", 1.5) + varint(2 << 3 | 0) + varint(step) + part(5, b"".join(values))
    return record(payload)


def record(payload: bytes) -> bytes:
    return struct.pack("<Q", len(payload)) + b"\0" * 4 + payload + b"\0" * 4


VERSION = record(varint(1 << 3 | 1) + struct.pack("<d", 1.5) + part(3, b"brain.Event:2"))


def write(folder: Path, data: bytes, stamp: int = 100) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"events.out.tfevents.{stamp}.host.1.0"
    path.write_bytes(data)
    return path


def test_scalars_in_every_form(tmp_path: Path):
    forms = [
        simple("train/reward", 0.5),
        tensor("actor/entropy", b"\x08\x01" + part(4, struct.pack("<f", 0.25))),  # dtype float, its bytes
        tensor("kl", b"\x08\x02" + part(4, struct.pack("<d", 0.125))),  # dtype double
        tensor("length", b"\x08\x01" + part(5, struct.pack("<f", 64.0))),  # packed float_val
        tensor("lr", b"\x08\x02" + part(6, struct.pack("<d", 1e-5))),  # packed double_val
        tensor("text", b"\x08\x07" + part(8, b"hello")),
    ]
    found = read_evidence(write(tmp_path, VERSION + event(3, *forms) + event(5, simple("train/reward", 0.75))))
    frame = found.frames["train"]
    assert {name: column.values.tolist() for name, column in frame.columns.items()} == {
        "reward_mean": [0.5, 0.75],
        "entropy": [0.25],
        "kl": [0.125],
        "length": [64.0],
        "lr": [1e-5],
    }
    assert (frame.steps, found.source, found.problems) == ([3, 5], "tensorboard", [])


def test_files_of_one_folder_are_one_log_and_the_newest_folder_is_read(tmp_path: Path):
    write(tmp_path / "old", event(0, simple("loss", 9.0)), stamp=100)
    write(tmp_path / "new", event(0, simple("loss", 2.0)), stamp=200)
    write(tmp_path / "new", event(1, simple("loss", 1.0)), stamp=201)
    found = read_evidence(tmp_path)
    assert found.frames["train"].columns["loss"].values.tolist() == [2.0, 1.0]
    assert (found.manifest["not_read"], found.problems) == (["events.out.tfevents.100.host.1.0"], [])


def test_a_part_of_a_record_and_a_record_that_is_none(tmp_path: Path):
    whole = event(0, simple("loss", 2.0))
    found = read_evidence(write(tmp_path, whole + record(b"\xff\xff\xff") + event(1, simple("loss", float("nan"))) + whole[:-3]))
    assert found.frames["train"].columns["loss"].values.tolist() == [2.0]
    name = "events.out.tfevents.100.host.1.0"
    assert found.problems == [
        f"{name}: record 2 is no event; skipped",
        f"{name}: holds NaN or Infinity; it counts as not known (loss)",
        f"{name}: ends within a record; the part is ignored",
    ]
    assert found.frames["train"].events == {"non_finite": 1}


def test_a_record_that_claims_exabytes_is_not_read(tmp_path: Path):
    found = read_evidence(write(tmp_path, event(0, simple("loss", 2.0)) + struct.pack("<Q", 1 << 60) + b"\0" * 90))
    assert found.problems == [f"events.out.tfevents.100.host.1.0: names a record of {1 << 60} bytes; what follows is not read"]


@pytest.mark.parametrize("data", [b"", b"\0" * 5, b"\xff" * 100, VERSION, record(b"")])
def test_without_a_scalar_one_line_says_so(tmp_path: Path, data: bytes):
    with pytest.raises(RunError, match="nothing can be read as the log of a run"):
        read_evidence(write(tmp_path, data))


def test_negative_steps_are_a_problem(tmp_path: Path):
    found = read_evidence(write(tmp_path, event(-1, simple("loss", 9.0)) + event(0, simple("loss", 2.0))))
    assert (found.frames["train"].steps, found.problems) == ([0], ["events.out.tfevents.100.host.1.0: record 1 has the step -1; skipped"])
