"""From raw records to the number that a claim states: a closed set of derivations, each computed again whenever a claim is checked.

| how     | files                         | pointers                       | gives                                                         |
|---------|-------------------------------|--------------------------------|---------------------------------------------------------------|
| pointer | file                          | value, and low, high, n, p     | the number that stands there                                  |
| mean    | file                          | values (with * for every item) | the mean with its t interval                                  |
| runs    | file                          | a, b (values of either arm)    | mean(b) - mean(a) over independent runs, Welch's interval     |
| wilson  | file                          | k, n                           | k of n with its Wilson interval                               |
| score   | file: an evaluation record    | none, or of: parsed, truncated | pass@1 from the outcomes, not from the record's summary       |
| compare | a, b: two evaluation records  | none                           | the paired change, refused when the conditions differ         |

Pointers are those of JSON (RFC 6901: /rungs/0/suites); in a .jsonl file the first part counts the lines from 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import EvidenceError, RunError
from posttrain.runs.ledger import parse, read_bytes, short
from posttrain.runs.reading import plain
from posttrain.stats.intervals import Interval, cluster_t, wilson
from posttrain.stats.paired import mcnemar_exact, paired_difference
from posttrain.stats.power import SigmaEstimate
from posttrain.stats.two_sample import welch

HOW: dict[str, tuple[frozenset[str], frozenset[str], frozenset[str]]] = {
    "pointer": (frozenset({"file"}), frozenset({"value"}), frozenset({"low", "high", "n", "p"})),
    "mean": (frozenset({"file"}), frozenset({"values"}), frozenset()),
    "runs": (frozenset({"file"}), frozenset({"a", "b"}), frozenset()),
    "wilson": (frozenset({"file"}), frozenset({"k", "n"}), frozenset()),
    "score": (frozenset({"file"}), frozenset(), frozenset({"of"})),
    "compare": (frozenset({"a", "b"}), frozenset(), frozenset()),
}
"""Derivation to its files, the pointers it needs and those it may have."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the evidence says.

    Example: Measured(0.964, Interval(0.944, 0.977, 0.95, "wilson"), n=500, p_value=None)
    """

    value: float
    interval: Interval | None
    n: int | None
    p_value: float | None = None
    sigma: SigmaEstimate | None = None
    """Spread between independent runs of one arm, for a difference over runs."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A link from a claim to raw records.

    Example: Evidence("score", {"file": ("ladder/grpo.arithmetic.json", "0c1d...")}, {}, "posttrain ladder --seed 0")
    """

    how: str
    files: Mapping[str, tuple[str, str]]
    """Role to path within the ledger's folder and digest of the file."""
    pointers: Mapping[str, str]
    command: str
    """What made the records."""
    transcribed: bool = False
    """The file repeats figures of a log by hand; the raw records are gone."""

    def to_json(self) -> dict[str, Any]:
        """The body of a ledger entry, without the claim's id."""
        files = {role: {"path": path, "digest": found} for role, (path, found) in self.files.items()}
        pointers = dict(self.pointers)
        return {"how": self.how, "files": files, "pointers": pointers, "command": self.command, "transcribed": self.transcribed}


def link(
    root: str | Path, how: str, files: Mapping[str, str], pointers: Mapping[str, str], command: str, transcribed: bool = False
) -> Evidence:
    """Evidence with the digests that the files have now. Raises EvidenceError or RunError when a part is missing or unknown."""
    _check_parts(how, files, pointers)
    if not command.strip():
        raise EvidenceError("evidence needs the command that made it, or it cannot be made again; pass one")
    found = {role: (path, digest_of(read_bytes(inside(root, path)))) for role, path in files.items()}
    return Evidence(how, found, dict(pointers), command, transcribed)


def evidence_from_json(body: Mapping[str, Any], where: str) -> Evidence:
    """The evidence of a ledger entry; RunError starts with `where`."""
    how, files, pointers, command = (body.get(name) for name in ("how", "files", "pointers", "command"))
    transcribed = body.get("transcribed")
    if not isinstance(files, dict) or not all(isinstance(f, dict) and _texts(f.get("path"), f.get("digest")) for f in files.values()):
        raise RunError(f"{where}: 'files' must give each role a path and a digest; restore the file from a copy")
    if not isinstance(pointers, dict) or not _texts(how, command, *pointers.values()) or not isinstance(transcribed, bool):
        raise RunError(f"{where}: evidence needs texts for how, command and pointers, and transcribed true or false")
    said = (str(command), *pointers.values(), *(f["path"] for f in files.values()))
    if not all(text.isprintable() for text in said):
        raise RunError(f"{where}: a path, pointer or command holds a control character; restore the file from a copy")
    try:
        _check_parts(str(how), files, pointers)
    except EvidenceError as error:
        raise RunError(f"{where}: {error}") from None
    return Evidence(str(how), {role: (f["path"], f["digest"]) for role, f in files.items()}, pointers, str(command), transcribed)


def recompute(root: str | Path, evidence: Evidence) -> Measured:
    """The number, from the raw records below `root` as they are now.

    Raises EvidenceError when a file is missing, changed, outside of `root`, or does not hold what the derivation reads.
    """
    try:
        loaded = {role: _load(root, path, wanted) for role, (path, wanted) in evidence.files.items()}
        match evidence.how:
            case "pointer":
                return _pointed(loaded["file"], evidence.pointers)
            case "mean":
                return _mean(numbers(loaded["file"], evidence.pointers["values"]))
            case "runs":
                return _runs(*(numbers(loaded["file"], evidence.pointers[arm]) for arm in ("a", "b")))
            case "wilson":
                k, n = (number(loaded["file"], evidence.pointers[name]) for name in ("k", "n"))
                return Measured(k / _count(n), wilson(k, _count(n)), _count(n))
            case "score":
                return _score(_record(loaded["file"]), evidence.pointers.get("of", "value"))
            case _:
                return _compare(_record(loaded["a"]), _record(loaded["b"]))
    except RunError as error:
        raise EvidenceError(str(error)) from None


def inside(root: str | Path, path: str) -> Path:
    """The file `path` below `root`; EvidenceError for anything that leads out of it, also through a link."""
    top = Path(root).resolve()
    refused = EvidenceError(f"evidence path '{short(path)}' leads out of {root}; copy the record there and name it relative to that folder")
    if not path or "\0" in path or Path(path).is_absolute():
        raise refused
    try:
        found = (top / path).resolve()
    except (OSError, RuntimeError, ValueError):
        raise refused from None
    if not found.is_relative_to(top) or found == top:
        raise refused
    return found


def digest_of(raw: bytes) -> str:
    """16 hex digits of the SHA-256."""
    return hashlib.sha256(raw).hexdigest()[:16]


def number(value: Any, pointer: str) -> float:
    """The one number at a pointer."""
    found = numbers(value, pointer)
    if len(found) != 1:
        raise EvidenceError(f"pointer '{short(pointer)}' names {len(found)} numbers, one is needed")
    return found[0]


def numbers(value: Any, pointer: str) -> list[float]:
    """The numbers at a pointer, in which * stands for every entry of a list or mapping.

    >>> numbers({"rows": [{"x": 1}, {"x": 2.5}]}, "/rows/*/x")
    [1.0, 2.5]
    """
    if not pointer.startswith("/"):
        raise EvidenceError(f"pointer '{short(pointer)}' must begin with /, as in /rows/0/score")
    places = [value]
    for part in pointer[1:].split("/"):
        places = [below for place in places for below in _below(place, part.replace("~1", "/").replace("~0", "~"), pointer)]
    for place in places:
        if isinstance(place, bool) or not isinstance(place, int | float) or not abs(place) <= 1e300:
            raise EvidenceError(f"pointer '{short(pointer)}' names {plain(place, 80)}, not a number")
    return [float(place) for place in places]


def _below(place: Any, part: str, pointer: str) -> Sequence[Any]:
    if part == "*" and isinstance(place, list | dict):
        return list(place.values()) if isinstance(place, dict) else place
    if isinstance(place, dict) and part in place:
        return [place[part]]
    if isinstance(place, list) and part.isascii() and part.isdigit() and len(part) < 10 and int(part) < len(place):
        return [place[int(part)]]
    raise EvidenceError(f"pointer '{short(pointer)}' finds no '{short(part)}'")


def _load(root: str | Path, path: str, wanted: str) -> Any:
    file = inside(root, path)
    raw = read_bytes(file)
    if (found := digest_of(raw)) != wanted:
        raise EvidenceError(f"{path} has changed since it was entered: digest {found}, entered {short(wanted)}; restore it from a copy")
    if path.endswith(".jsonl"):
        return [parse(line, f"{path}:{n}") for n, line in enumerate(raw.split(b"\n")[:-1], start=1)]
    return parse(raw, path)


def _pointed(value: Any, pointers: Mapping[str, str]) -> Measured:
    found = {name: number(value, pointer) for name, pointer in pointers.items()}
    if ("low" in found) != ("high" in found):
        raise EvidenceError("an interval has two ends; give both pointers, low and high")
    interval = None
    if "low" in found:
        if not found["low"] <= found["high"]:
            raise EvidenceError(f"the interval [{found['low']}, {found['high']}] is empty")
        interval = Interval(found["low"], found["high"], 0.95, "as recorded")
    return Measured(found["value"], interval, _count(found["n"]) if "n" in found else None, found.get("p"))


def _mean(values: Sequence[float]) -> Measured:
    if not values:
        raise EvidenceError("the mean of no numbers is undefined; check the pointer")
    mean = math.fsum(values) / len(values)
    spread = len(values) > 1 and max(values) - min(values) > 1e-9 * max(1.0, abs(mean))
    return Measured(mean, cluster_t(values, bounds=None) if spread else None, len(values))


def _runs(a: Sequence[float], b: Sequence[float]) -> Measured:
    found = welch(a, b)
    spread = [math.fsum((x - math.fsum(arm) / len(arm)) ** 2 for x in arm) for arm in (a, b)]
    pooled = math.sqrt(math.fsum(spread) / (len(a) + len(b) - 2))
    sigma = SigmaEstimate("seed_to_seed", pooled, len(a) + len(b))
    return Measured(found.delta, found.interval, min(len(a), len(b)), found.p_value, sigma)


def _score(record: Mapping[str, Any], of: str) -> Measured:
    outcomes = _outcomes(record)
    if of == "value":
        means, single = _item_means(outcomes)
        values = list(means.values())
        interval = wilson(sum(values), len(values)) if single else cluster_t(values)
        return Measured(math.fsum(values) / len(values), interval, len(values))
    # A property of samples, by item: how many of its samples were parsed or cut.
    wanted = {"parsed": lambda o: o[1] == "scored", "truncated": lambda o: o[2] == "length"}.get(of)
    if wanted is None:
        raise EvidenceError(f"'of' is '{short(of)}'; a score is of value, parsed or truncated")
    shares = [sum(map(wanted, samples)) / len(samples) for samples in outcomes.values()]
    single = all(len(samples) == 1 for samples in outcomes.values())
    return Measured(math.fsum(shares) / len(shares), wilson(sum(shares), len(shares)) if single else cluster_t(shares), len(shares))


def _compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Measured:
    if differing := [
        name for name in sorted({*a["conditions"], *b["conditions"]}) if a["conditions"].get(name) != b["conditions"].get(name)
    ]:
        raise EvidenceError(f"the two records differ in {short(', '.join(differing))}; measure both under the same conditions")
    outcomes_a, outcomes_b = _outcomes(a), _outcomes(b)
    if outcomes_a.keys() != outcomes_b.keys():
        raise EvidenceError(
            f"{len(outcomes_a.keys() ^ outcomes_b.keys())} items are in one of the two records only; measure the same items"
        )
    (means_a, single_a), (means_b, single_b) = _item_means(outcomes_a), _item_means(outcomes_b)
    shared = [name for name in means_a if name in means_b]
    before, after = [means_a[name] for name in shared], [means_b[name] for name in shared]
    found = paired_difference(before, after)
    p_value = found.p_value
    if single_a and single_b:
        pairs = list(zip(before, after, strict=True))
        p_value = mcnemar_exact(sum(x > y for x, y in pairs), sum(y > x for x, y in pairs))
    return Measured(found.delta, found.interval, found.n, p_value)


def _record(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not isinstance(value.get("items"), list) or not isinstance(value.get("conditions"), dict):
        raise EvidenceError("the file is no evaluation record (it has no items or no conditions)")
    return value


def _outcomes(record: Mapping[str, Any]) -> dict[str, list[tuple[float | None, str, str]]]:
    """Item id to (value, status, stop reason) of its samples, each checked."""
    found: dict[str, list[tuple[float | None, str, str]]] = {}
    for place, item in enumerate(record["items"]):
        if not isinstance(item, dict) or not isinstance(item.get("id"), str) or not isinstance(item.get("outcomes"), list):
            raise EvidenceError(f"item {place} of the evaluation record has no id or no outcomes")
        if item["id"] in found or not item["outcomes"]:
            raise EvidenceError(f"item '{short(item['id'])}' of the evaluation record is there twice or has no outcomes")
        found[item["id"]] = [_outcome(outcome, item["id"]) for outcome in item["outcomes"]]
    if len(found) < 2:
        raise EvidenceError(f"the evaluation record has {len(found)} items, an interval needs 2")
    return found


def _outcome(outcome: Any, item: str) -> tuple[float | None, str, str]:
    if isinstance(outcome, list) and len(outcome) >= 3 and _texts(outcome[1], outcome[2]):
        value = outcome[0]
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1):
            return None if value is None else float(value), outcome[1], outcome[2]
    raise EvidenceError(f"item '{short(item)}' has the outcome {plain(outcome, 80)}, not [value in 0..1, status, stop reason, length]")


def _item_means(outcomes: Mapping[str, Sequence[tuple[float | None, str, str]]]) -> tuple[dict[str, float], bool]:
    """Means over the scored samples, and whether every item has one sample, scored 0 or 1."""
    scored = {name: [value for value, *_ in samples if value is not None] for name, samples in outcomes.items()}
    single = all(len(samples) == 1 and len(scored[name]) == 1 for name, samples in outcomes.items())
    single = single and all(value in (0.0, 1.0) for values in scored.values() for value in values)
    means = {name: math.fsum(values) / len(values) for name, values in scored.items() if values}
    if len(means) < 2:
        raise EvidenceError(f"the grader scored {len(means)} items of the evaluation record, an interval needs 2")
    return means, single


def _count(value: float) -> int:
    if value != int(value) or value < 1:
        raise EvidenceError(f"a count of {value:g} is impossible; check the pointer")
    return int(value)


def _texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _check_parts(how: str, files: Mapping[str, Any], pointers: Mapping[str, Any]) -> None:
    if how not in HOW:
        raise EvidenceError(f"'{short(how)}' is no derivation; known are {', '.join(HOW)}")
    roles, needed, optional = HOW[how]
    if files.keys() != roles:
        raise EvidenceError(f"'{how}' reads the files {', '.join(sorted(roles))}, got {short(', '.join(sorted(files))) or 'none'}")
    if missing := sorted(needed - pointers.keys()):
        raise EvidenceError(f"'{how}' needs the pointer '{missing[0]}'")
    if unknown := sorted(pointers.keys() - needed - optional):
        raise EvidenceError(f"'{how}' has no pointer '{short(unknown[0])}'; it takes {', '.join(sorted(needed | optional)) or 'none'}")
