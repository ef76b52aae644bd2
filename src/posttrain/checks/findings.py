"""What a law measured, and the certificate that collects it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LAWS = ("partition", "mask", "permutation", "oracle", "conservation", "reduction")
"""In the order in which they are shown.

partition      the same optimizer step, cut into parts in any way, gives the same gradient and the same metrics
mask           what stands in a slot that is not trained changes nothing
permutation    reordering rows or siblings reorders the answer; equal content does not make two things one
oracle         expected value and gradient are those of an exact enumeration, or of a target that is named
conservation   nothing is lost or counted twice: slots, weights, fates add up
reduction      at known limits it becomes something simpler
"""

EXACT = 0.0
"""Bound of laws under which nothing may change, not even the last bit."""
CLOSE = 1e-10
"""Bound of equalities between two computations in float64."""


class Violation(Exception):
    """A function under test cannot be measured: it raised, answered in the wrong shape, or changed its inputs."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One measurement.

    Example: Finding("oracle", 2.2e-16, 1e-10, True, "on-policy: the gradient of E[A]").
    """

    law: str
    deviation: float | None
    """Largest |found - expected|, relative to the largest expected number if that exceeds 1. None: not measured, see `detail`."""
    bound: float
    passed: bool
    detail: str

    @property
    def applies(self) -> bool:
        """False when the law says nothing about this kind of member; `detail` holds the reason."""
        return self.deviation is not None or not self.passed

    @property
    def severity(self) -> float:
        """How close to failing: deviation over bound, infinite when failed."""
        if not self.passed:
            return math.inf
        return (self.deviation or 0.0) / self.bound if self.bound else 0.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """All findings about one member, and what its expected gradient climbs."""

    name: str
    kind: str
    findings: tuple[Finding, ...]
    target: str

    @property
    def passed(self) -> bool:
        """Whether every law that applies holds."""
        return all(finding.passed for finding in self.findings)

    def worst(self, law: str) -> Finding:
        """The finding under `law` that is closest to failing; one that applies comes before one that does not."""
        found = [finding for finding in self.findings if finding.law == law]
        if not found:
            return absent(law, "not measured")
        return max(found, key=lambda finding: (finding.severity, finding.applies, finding.deviation or 0.0))

    def as_record(self) -> dict[str, Any]:
        """Plain values for JSON; an infinite deviation is the string "inf"."""
        rows = []
        for f in self.findings:
            deviation = f.deviation if f.deviation is None or math.isfinite(f.deviation) else "inf"
            verdict = ("pass" if f.passed else "fail") if f.applies else "-"
            rows.append({"law": f.law, "deviation": deviation, "bound": f.bound, "verdict": verdict, "detail": f.detail})
        return {"name": self.name, "kind": self.kind, "passed": self.passed, "target": self.target, "findings": rows}


def measured(law: str, deviation: float, detail: str, bound: float = CLOSE) -> Finding:
    """A finding that passes when the deviation is within the bound."""
    return Finding(law, deviation, bound, deviation <= bound, detail)


def absent(law: str, reason: str) -> Finding:
    """The law says nothing about this kind of member."""
    return Finding(law, None, 0.0, True, reason)


def failed(law: str, reason: str) -> Finding:
    """The law could not be measured, and that is the member's fault."""
    return Finding(law, None, 0.0, False, reason)


def distance(found: Any, expected: Any) -> float:
    """max |found - expected| / max(1, max |expected|); infinite when shapes differ or either is not finite.

    Example: distance([1, 2.5], [1, 2]) is 0.5 / 2 = 0.25.
    """
    a, b = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if a.shape != b.shape:
        return math.inf
    if not a.size:
        return 0.0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.inf
    return float(np.max(np.abs(a - b))) / max(1.0, float(np.max(np.abs(b))))


def alignment(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Cosine between two gradients, and how many times longer the first is. Example: (2, 0) against (1, 0): 1 and 2."""
    size, wanted = float(np.linalg.norm(found)), float(np.linalg.norm(expected))
    if size == 0.0 or wanted == 0.0 or not math.isfinite(size):
        return 0.0, size / wanted if wanted else math.inf
    return float(np.sum(found * expected)) / (size * wanted), size / wanted


def largest(deviations: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest deviation and what it belongs to. Example: [(0.0, "a"), (1e-9, "b")] -> (1e-9, "b")."""
    return max(deviations, key=lambda pair: pair[0])
