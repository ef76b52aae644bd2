"""What a gate found: a verdict of three values, the numbers it rests on, and where it is kept.

A measurement belongs to the exact path it was made on. Its key names the weights, the acceleration and its version, the quantisation, the
code path, the precision and the engine's versions; any other path has no measurement, however similar it looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from posttrain.core.digest import digest
from posttrain.core.errors import RunError
from posttrain.core.files import read_json, write_json

SCHEMA = 1


class Verdict(StrEnum):
    """Outcome of a gate."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_SHOWN = "not shown"
    """The numbers decide neither way: more prompts, pairs or items would."""


class Gate(StrEnum):
    """What has to be shown of an acceleration."""

    DISTRIBUTION = "A"
    """Its distribution is close to the reference path's: forward KL per generated token."""
    SPEED = "B"
    """A whole training step takes less time with it."""
    LEARNING = "C"
    """A short run with it ends no worse on held-out items."""
    IDENTITY = "I"
    """Its output is the reference path's: bit by bit at matched seeds, or in distribution."""


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate's finding.

    Example: GateResult(Gate.SPEED, Verdict.PASSED, "step time x 0.81 [0.77, 0.86]", {"ratio": 0.81, "pairs": 5}, ())
    """

    gate: Gate
    verdict: Verdict
    summary: str
    measured: Mapping[str, Any]
    """Numbers and conditions, as JSON values."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Key:
    """The path that was measured.

    Example: Key("9f2c...", "int8", 1, "int8 weights per output channel, ...", "cpu, int32_product", "float32", "posttrain 0.1, torch 2.13")
    """

    model: str
    """Digest of the weights."""
    acceleration: str
    version: int
    quantisation: str
    path: str
    """Device and code path, with whatever else the numbers depend on (the draft's digest, the proposals per pass)."""
    dtype: str
    engine: str
    """Versions of the packages that compute."""

    @property
    def digest(self) -> str:
        """Identity of the key."""
        return digest(asdict(self))


class Store:
    """Records of gates as JSON files: `<folder>/<key digest>/<gate>.json`.

    Example: Store(cache_dir("contracts")).verdict(key, Gate.SPEED)  # None: never measured
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def save(self, key: Key, result: GateResult, conditions: Mapping[str, Any]) -> Path:
        """Write a result. An earlier one of the same key and gate gives way, but its verdict stays on record: a pass after four failures
        should look like one."""
        path = self._path(key, result.gate)
        known = self.read(key, result.gate)
        earlier = [*known["earlier"], known["verdict"]] if known else []
        write_json(
            path,
            {
                "schema": SCHEMA,
                "key": asdict(key),
                "gate": result.gate.value,
                "verdict": result.verdict.value,
                "summary": result.summary,
                "measured": dict(result.measured),
                "warnings": list(result.warnings),
                "conditions": dict(conditions),
                "earlier": earlier,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )
        return path

    def read(self, key: Key, gate: Gate) -> dict[str, Any] | None:
        """The stored record, or None. Raises RunError when the file is damaged, or holds another key or schema than its place says."""
        path = self._path(key, gate)
        if not path.is_file():
            return None
        record = read_json(path)
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            raise RunError(f"{path}: not a gate record of schema {SCHEMA}; measure again, or delete the file")
        if record.get("key") != asdict(key) or record.get("gate") != gate.value:
            raise RunError(f"{path}: the record is of another path than its place says; delete it and measure again")
        return record

    def verdict(self, key: Key, gate: Gate) -> Verdict | None:
        """The recorded verdict; None when this path was never measured."""
        record = self.read(key, gate)
        return Verdict(record["verdict"]) if record else None

    def _path(self, key: Key, gate: Gate) -> Path:
        return self.folder / key.digest / f"{gate.value}.json"
