"""Where the metrics of two runs part: the first line that differs, and whether by more than the last digits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from posttrain.runs.reading import Line, exists, number, plain, scan_lines, within
from posttrain.runs.recorder import METRICS

ABSOLUTE = 1e-5
"""Quantities that are rounding themselves, such as the mismatch of sampler and trainer, may differ by this much."""
EXACT = ("lr", "epoch")
"""Computed from settings by a formula: any difference is one of settings."""
APART = ("schema", "seconds", "stage", "step")


@dataclass(frozen=True, slots=True)
class Parting:
    """The first difference. Example: Parting("grpo", 13, "entropy", 0.6931471, 0.6931472, True, ("entropy", "kl"))"""

    stage: str
    step: int | str
    metric: str
    """The one that differs most, by its share."""
    a: Any
    b: Any
    rounding: bool
    """Whether every difference of the line is within the last digits."""
    others: tuple[str, ...] = ()
    """The other metrics of the line that differ."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Two metrics files side by side."""

    compared: int
    """Lines that both have."""
    lines: tuple[int, int]
    differing: int
    """Of the compared lines."""
    parting: Parting | None
    problems: tuple[str, ...] = ()


def compare_metrics(a: Path, b: Path, relative: float = 1e-5) -> Metrics:
    """Line by line, in the order written, without what the clock decides. `relative` is the share that counts as last digits.

    Comparing ends where the runs are no longer at the same step of the same stage: from there on nothing corresponds.
    """
    compared = differing = 0
    lines, problems = [0, 0], []
    parting: Parting | None = None
    together = True
    for pair in zip_longest(_read(a, problems), _read(b, problems)):
        lines = [count + (line is not None) for count, line in zip(lines, pair, strict=True)]
        one, other = pair
        if one is None or other is None or not together:
            continue
        compared += 1
        found = _line(one.value, other.value, relative)
        differing += found is not None
        parting = parting or found
        together = _place(one.value) == _place(other.value)
    return Metrics(compared, (lines[0], lines[1]), differing, parting, tuple(problems))


def _read(run: Path, problems: list[str]) -> Iterator[Line]:
    """Good lines up to the first bad one, which is entered in `problems`; a last line that is unfinished is none."""
    if exists(run / METRICS) and within(run, METRICS) is None:
        problems.append(f"{run / METRICS}: leads out of the run directory; it was not read")
        return
    for line in scan_lines(run / METRICS):
        if line.problem == "unfinished":
            return
        problem = line.problem or (None if isinstance(line.value, dict) else "not an object")
        if problem:
            problems.append(f"{run / METRICS}:{line.number}: {problem}; what follows was not compared")
            return
        yield line


def _line(a: Mapping[str, Any], b: Mapping[str, Any], relative: float) -> Parting | None:
    (stage, step), other = _place(a), _place(b)
    if (stage, step) != other:
        return Parting(stage, step, "order of steps", f"{stage} step {step}", f"{other[0]} step {other[1]}", False)
    names = [name for name in sorted({*a, *b}) if name not in APART and a.get(name) != b.get(name)]
    if not names:
        return None
    shares = {name: _share(name, a.get(name), b.get(name), relative) for name in names}
    worst = max(names, key=lambda name: shares[name])
    rounding = all(share <= relative for share in shares.values())
    return Parting(stage, step, worst, a.get(worst), b.get(worst), rounding, tuple(name for name in names if name != worst))


def _share(name: str, a: Any, b: Any, relative: float) -> float:
    """How far two values differ, as a share of the larger one; infinite when one is no number or both are counts."""
    one, other = number(a), number(b)
    if one is None or other is None or (isinstance(a, int) and isinstance(b, int)):
        return float("inf")
    gap, size = abs(one - other), max(abs(one), abs(other))
    if gap <= ABSOLUTE and name not in EXACT:
        return min(gap / size, relative)
    return gap / size


def _place(line: Mapping[str, Any]) -> tuple[str, int | str]:
    step = line.get("step")
    return plain(line.get("stage"), 60), step if isinstance(step, int) else plain(step, 40)
