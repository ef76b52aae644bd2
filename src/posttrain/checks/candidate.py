"""What a run directory says about the model it made: the records that a promotion judges. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from posttrain.checks.calibration import LAST, End, Family, end_of, family_key, stage_of
from posttrain.checks.promotion import Candidate, Thresholds
from posttrain.core.errors import ConfigError, EvidenceError, RunError
from posttrain.core.files import read_json
from posttrain.evals.record import EvalRecord
from posttrain.evals.shelf import read_records
from posttrain.runs.run import Run

THRESHOLDS = "thresholds.json"
AFTER = "after"
"""What the record of a single stage's result is called."""
Suites = Mapping[str, EvalRecord]


def candidate_of(
    path: str | Path,
    *,
    rung: str | None = None,
    suite: str | None = None,
    against: str | Path | None = None,
    family: Family | None = None,
    last: int = LAST,
) -> Candidate:
    """Read a candidate from its run.

    Args:
        rung: which model of the run; the last that was measured, unless named.
        suite: what it is judged by; the first suite that is not about retention, unless named.
        against: record, folder or run of the model that it would replace; the model measured before it in the same run, unless given.
        family: bounds of its family; a family of other runs is not used, and the check stays open.

    Raises EvidenceError when the run does not hold what is needed, RunError when it is no run.
    """
    run = Run.open(path)
    records = by_label(read_records(run.path), run.manifest.get("stages") or ())
    labels = list(records)
    rung = rung or labels[-1]
    if rung not in records:
        raise EvidenceError(f"{path} has no evaluation of '{rung}'; it has {', '.join(labels)}")
    suite = suite or first_suite(records[rung], rung)
    if suite not in records[rung]:
        raise EvidenceError(f"'{rung}' was not measured on '{suite}'; it was on {', '.join(records[rung])}")
    theirs = _base_of(records, rung, against, suite)
    off = next((name for name in records[rung] if "retention" in name and name in theirs and name != suite), None)
    retention = None if off is None else (theirs[off], records[rung][off])
    end, stage = end_and_stage(run, rung, last)
    fits = family is not None and stage is not None and dict(family.key) == family_key(run, stage)
    return Candidate(records[rung][suite], theirs.get(suite), retention, end, family if fits else None, registered(run.path))


def by_label(records: Sequence[EvalRecord], stages: Sequence[str]) -> dict[str, dict[str, EvalRecord]]:
    """Records by label and suite, labels in the order in which the run measured them."""
    order = [stage.removeprefix("eval.") for stage in stages if stage.startswith("eval.")]
    found = sorted({record.label for record in records}, key=lambda label: (order.index(label) if label in order else len(order), label))
    return {label: {record.conditions.suite: record for record in records if record.label == label} for label in found}


def first_suite(suites: Suites, label: str) -> str:
    """The suite that a model is judged by."""
    names = [name for name in suites if "retention" not in name]
    if not names:
        raise EvidenceError(f"'{label}' was measured on {', '.join(suites) or 'nothing'} alone; name the suite with --suite")
    return names[0]


def _base_of(records: Mapping[str, Suites], rung: str, against: str | Path | None, suite: str) -> Suites:
    """Records of the model that would be replaced; {} when there are none."""
    if against is None:
        place = list(records).index(rung)
        return records[list(records)[place - 1]] if place else {}
    found = read_records(against)
    labels = sorted({record.label for record in found})
    if len(labels) > 1:
        raise EvidenceError(f"{against} holds evaluations of {', '.join(labels)}; name one: {against}:{labels[0]}")
    suites = {record.conditions.suite: record for record in found}
    if suite not in suites and len(suites) == 1:  # a single record is meant, whatever its suite is called: comparing says what differs
        return {**suites, suite: found[0]}
    return suites


def end_and_stage(run: Run, rung: str, last: int) -> tuple[End | None, str | None]:
    """How reinforcement learning ended, if that is what made the rung."""
    stage = stage_of(run)
    if stage is None or rung not in (stage, AFTER):
        return None, None
    return end_of(run.metrics(stage), last), stage


def registered(run: str | Path) -> Thresholds | None:
    """The thresholds that a run kept from its start on; None when it kept none."""
    path = Path(run) / "gates" / THRESHOLDS
    if not path.is_file():
        return None
    record = read_json(path)
    if not isinstance(record, dict):
        raise RunError(f"{path}: not a record of thresholds; delete it, and say on promotion which ones hold")
    try:
        return Thresholds.load(record)
    except ConfigError as error:
        raise RunError(f"{path}: {error}") from None
