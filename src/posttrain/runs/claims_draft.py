"""New claims from a file a person wrote: everything but the number, which comes from the evidence.

    - id: ladder.grpo
      text: "After GRPO {figure} of the held-out sums are right (n {n})"
      metric: pass@1 on arithmetic, sampled
      subject: ladder, preset tiny, seed 0, rung grpo
      unit: "%"
      digits: 1
      evidence: {how: score, files: {file: ladder/grpo.arithmetic.json}, command: posttrain ladder --seed 0}

Optional: basis (items), null, conditions, scope, interval (true), and of the evidence pointers and transcribed. `evidence` may be a list:
the first record carries the number, the others have to agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.core.errors import DataError
from posttrain.runs.claim import Claim, draft
from posttrain.runs.claims import Claims, Held
from posttrain.runs.evidence import Evidence, link, recompute
from posttrain.runs.ledger import read_bytes, short

_TEXTS = ("id", "text", "metric", "subject")
_OPTIONAL = ("unit", "basis", "null", "scope")
_KNOWN = frozenset({*_TEXTS, *_OPTIONAL, "digits", "conditions", "interval", "evidence"})
_OF_EVIDENCE = frozenset({"how", "files", "pointers", "command", "transcribed"})


def add_drafts(ledger: str | Path, file: str | Path) -> list[Held]:
    """Enter every claim of a YAML or JSON file; those before a faulty one are kept. Raises DataError, EvidenceError or RunError."""
    try:
        loaded = yaml.safe_load(read_bytes(Path(file)))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DataError(f"not readable as YAML or JSON ({short(str(error))})", file=file) from None
    rows = loaded if isinstance(loaded, list) else [loaded]
    return [_add(Path(ledger), row, f"{file}: claim {place}") for place, row in enumerate(rows, start=1)]


def _add(ledger: Path, row: Any, where: str) -> Held:
    values = _mapping(row, "a claim", _KNOWN, where)
    given: dict[str, Any] = {name: _text(values, name, where) for name in _TEXTS}
    given |= {name: str(values[name]) for name in _OPTIONAL if values.get(name) is not None}
    digits, interval = values.get("digits", 3), values.get("interval", True)
    if isinstance(digits, bool) or not isinstance(digits, int) or not 0 <= digits <= 12 or not isinstance(interval, bool):
        raise DataError(f"{where}: digits must be a count from 0 to 12 and interval true or false")
    conditions = {str(name): str(value) for name, value in _mapping(values.get("conditions") or {}, "conditions", None, where).items()}
    wanted = values.get("evidence")
    records = [_evidence(ledger.parent, record, where) for record in (wanted if isinstance(wanted, list) else [wanted])]
    if not records:
        raise DataError(f"{where}: a claim needs evidence; give how, files and command")
    template = Claim(value="0", conditions=conditions, **given)
    _check_null(template, where)
    claims = Claims.read(ledger)
    held = claims.add(draft(template, recompute(ledger.parent, records[0]), digits, interval), records[0])
    for record in records[1:]:
        held = Claims.read(ledger).link(held.claim.id, record)
    return held


def _evidence(root: Path, record: Any, where: str) -> Evidence:
    values = _mapping(record, "evidence", _OF_EVIDENCE, where)
    files = {str(role): str(path) for role, path in _mapping(values.get("files"), "files", None, where).items()}
    pointers = {str(name): str(path) for name, path in _mapping(values.get("pointers") or {}, "pointers", None, where).items()}
    transcribed = values.get("transcribed", False)
    if not isinstance(transcribed, bool):
        raise DataError(f"{where}: transcribed must be true or false")
    return link(root, _text(values, "how", where), files, pointers, _text(values, "command", where), transcribed)


def _mapping(value: Any, what: str, known: frozenset[str] | None, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: {what} must be a mapping, not {short(repr(value))}")
    if known is not None and (unknown := sorted(str(name) for name in value if name not in known)):
        raise DataError(f"{where}: {what} has no '{short(unknown[0])}'; it may have {', '.join(sorted(known))}")
    return value


def _text(values: Mapping[str, Any], name: str, where: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: '{name}' is {short(repr(value))}; a text is needed")
    return value.strip()


def _check_null(claim: Claim, where: str) -> None:
    if claim.null is not None:
        try:
            float(claim.null)
        except ValueError:
            raise DataError(f"{where}: null is '{short(claim.null)}', not the number that means no effect") from None
