"""What a gate says: one line per check, and the conjunction. A launch probe, a preflight, a hand-over and a promotion all answer in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.core.errors import RunError

SCHEMA = 1
MARKS: dict[bool | None, str] = {True: "pass", False: "FAIL", None: "look"}
"""How an outcome is printed."""
VERDICTS: dict[bool | None, str] = {True: "passed", False: "failed", None: "not shown"}
"""How an outcome is stored."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Example: Check("form", False, 0.41, 0.8, "41.0% of the answers could be parsed", "show the form more often in SFT", ("P33",))
    """

    name: str
    passed: bool | None
    """None: the numbers decide neither way, or a person should look before going on."""
    value: float | int | str | None
    bound: float | int | str | None
    """What `value` was held against; None where there is no number to hold it against."""
    detail: str
    remedy: str = ""
    """What to do when it did not pass."""
    catalog: tuple[str, ...] = ()
    """Ids of the failures in the catalog that it guards against, e.g. ("F2", "P20")."""

    def as_record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "name": self.name,
            "verdict": VERDICTS[self.passed],
            "value": self.value,
            "bound": self.bound,
            "detail": self.detail,
            "remedy": self.remedy,
            "catalog": list(self.catalog),
        }

    @property
    def sentence(self) -> str:
        """Detail, remedy and ids in one line."""
        ids = f" [{', '.join(self.catalog)}]" if self.catalog else ""
        return f"{self.detail}{'; ' + self.remedy if self.remedy else ''}{ids}"


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """All checks of a gate. Nothing weighs up against anything else: one failed check fails the gate.

    Example: GateVerdict("handover.sft", "sft -> dpo", (Check("form", True, 0.99, 0.8, "99.0% ..."),)).passed is True
    """

    gate: str
    subject: str
    """What was judged, in words."""
    checks: tuple[Check, ...]
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers and conditions, as JSON values."""

    @property
    def passed(self) -> bool | None:
        """False when a check failed, None when one is open, True when all passed."""
        outcomes = {check.passed for check in self.checks}
        return False if False in outcomes else None if None in outcomes else True

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.passed is False)

    @property
    def open(self) -> tuple[Check, ...]:
        """The checks that decided nothing."""
        return tuple(check for check in self.checks if check.passed is None)

    @property
    def reason(self) -> str:
        """Why it did not pass, in one line; empty when it did."""
        found = self.failures or self.open
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return f"{found[0].name}: {found[0].sentence}{more}" if found else ""

    def of(self, name: str) -> Check:
        """The check of this name."""
        return next(check for check in self.checks if check.name == name)

    def as_record(self) -> dict[str, Any]:
        """Plain values for JSON: what a run keeps as gates/NAME.json."""
        return {
            "schema": SCHEMA,
            "gate": self.gate,
            "subject": self.subject,
            "verdict": VERDICTS[self.passed],
            "checks": [check.as_record() for check in self.checks],
            "figures": dict(self.figures),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> GateVerdict:
        """The inverse of `as_record`; raises RunError on another schema or a missing field."""
        if not isinstance(record, Mapping) or record.get("schema") != SCHEMA:
            raise RunError(f"not a gate record of schema {SCHEMA}; run the gate again")
        outcomes = {name: passed for passed, name in VERDICTS.items()}
        try:
            checks = tuple(
                Check(
                    item["name"],
                    outcomes[item["verdict"]],
                    item["value"],
                    item["bound"],
                    item["detail"],
                    item["remedy"],
                    tuple(item["catalog"]),
                )
                for item in record["checks"]
            )
            return cls(record["gate"], record["subject"], checks, record["figures"])
        except (KeyError, TypeError) as error:
            raise RunError(f"the gate record is malformed ({type(error).__name__}: {error}); run the gate again") from None


def verdict_lines(found: GateVerdict) -> list[str]:
    """The gate as text: its outcome, then a line per check, with the remedy where it did not pass."""
    width = max((len(check.name) for check in found.checks), default=0)
    lines = [f"{found.gate}: {found.subject}: {VERDICTS[found.passed].upper()}"]
    for check in found.checks:
        lines.append(f"  {MARKS[check.passed]:5} {check.name:{width}}  {check.detail}")
        if check.passed is not True:
            ids = f"  [{', '.join(check.catalog)}]" if check.catalog else ""
            lines += [f"  {'':5} {'':{width}}  -> {check.remedy}{ids}"] if check.remedy else []
    return lines


def bounded(
    name: str,
    value: float,
    bounds: tuple[float, float],
    detail: str,
    remedy: str = "",
    catalog: Sequence[str] = (),
) -> Check:
    """A share that should be small: passes below bounds[0], fails from bounds[1] on, and is worth a look between.

    Example: bounded("truncation", 0.05, (0.02, 0.25), "5% cut").passed is None
    """
    look, stop = bounds
    passed = True if value < look else False if value >= stop else None
    return Check(name, passed, value, look, detail, remedy, tuple(catalog))
