"""The chain of runs behind a run: each with what it failed of, and between two of them the variables that changed and what that did.

A parent is looked for beside the run, by its id and digest; the path that a manifest names is never followed. The failure ids of both sides
tell "the fix was wrong" (it is still there) from "the fix worked and revealed the next wall" (it is gone, and another came).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.core.errors import PosttrainError, RunError
from posttrain.doctor.entries import Entry
from posttrain.doctor.postmortem import Postmortem, postmortem_of
from posttrain.doctor.postmortem_file import FILE, read_postmortem
from posttrain.doctor.reading import read_evidence
from posttrain.doctor.text import INCONCLUSIVE, plain_json, printable
from posttrain.runs.manifest import MANIFEST, identity_digest, run_id
from posttrain.runs.reading import is_file, load_mapping, mapping, number, plain, strings

MOST_RUNS = 50
_MOST_BESIDE = 2000
_MOST_FAILURES = 50
_LINKABLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a chain.

    Example: Member(Path("runs/b"), "3f9a01bc", "collapsed", {"F1": ("grpo", 120)}, {"grpo": 410}, {"id": "29fc22aa", ...}, "open", True)
    """

    path: Path
    run: str
    verdict: str
    failures: Mapping[str, tuple[str, int]]
    """Failure id to the stage and the step at which it was first met."""
    reached: Mapping[str, int]
    """Stage to its last recorded step."""
    parent: Mapping[str, Any]
    """Label and changed variables of this run relative to its parent."""
    status: str
    written: bool
    """Whether this comes from its postmortem.md rather than from its records."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a change did. Example: Link("one variable: grpo.optim.lr 0.001 -> 0.0001", "fix was wrong: F1 is still there")"""

    change: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Chain:
    """Runs from the oldest known to the one asked for; `links[i]` leads from run i to run i + 1."""

    members: tuple[Member, ...]
    links: tuple[Link, ...]
    problem: str | None = None
    """Why the chain does not go further back."""


def chain_of(run: Path, catalog: Mapping[str, Entry]) -> Chain:
    """The chain that ends at `run`. Raises RunError when `run` is no run directory."""
    if not is_file(run / MANIFEST):
        raise RunError(f"{plain(run)} is not a run (it has no {MANIFEST}); give the directory that was --out")
    folder = run.resolve()
    members, seen, problem = [], set(), None
    while len(members) < MOST_RUNS:
        members.append(_member(folder, catalog))
        seen.add(folder)
        above = find_parent(folder)
        if isinstance(above, str):
            problem = above or None
            break
        if above in seen:
            problem = f"{plain(above.name, 80)} comes back: the runs name each other as parents"
            break
        folder = above
    members.reverse()
    pairs = zip(members, members[1:], strict=False)
    return Chain(tuple(members), tuple(Link(change_words(b.parent), outcome(a, b)) for a, b in pairs), problem)


def find_parent(run: Path) -> Path | str:
    """The directory of a run's parent, looked for beside it; otherwise why there is none ("" for a run that names no parent)."""
    parent = load_mapping(run / MANIFEST).value.get("parent")
    if not isinstance(parent, Mapping):
        return "" if parent is None else "its parent is named by a path alone, which is not followed"
    wanted, identity = parent.get("id"), parent.get("digest")
    for folder, manifest in _beside(run):
        if folder != run and run_id(manifest) == wanted and (identity is None or identity_digest(manifest) == identity):
            return folder
    return f"the parent {plain(wanted, 40)} does not lie beside it"


def parent_link(run: Path) -> str | None:
    """Relative path from a run's postmortem to its parent's, when there is one and its name can stand in a link."""
    if not is_file(run / MANIFEST):
        return None
    parent = find_parent(run.resolve())
    if isinstance(parent, str) or not _LINKABLE.fullmatch(parent.name) or read_postmortem(parent) is None:
        return None
    return f"../{parent.name}/{FILE}"


def outcome(a: Member, b: Member) -> str:
    """What the step from a run to the next did to its failures."""
    gone, still, new = ([id for id in x if (id in y) is wanted] for x, y, wanted in _sets(a, b))
    blame = "; several variables changed, so which one did it is not known" if b.parent.get("label") == "bundle" else ""
    early = [id for id in gone if _too_early(a.failures[id], b)]
    if INCONCLUSIVE in (a.verdict, b.verdict) and not still and not new:
        return "not to be told: one of the two has no verdict"
    if not a.failures:
        return f"it broke: new {_list(new)}{blame}" if new else "nothing failed before or after"
    parts = [f"{word} {_list(ids)}" for word, ids in (("still there", still), ("gone", gone), ("new", new)) if ids]
    if still:
        return f"fix was wrong: {'; '.join(parts)}{blame}"
    if early:
        stage, step = a.failures[early[0]]
        return f"too early to tell: {early[0]} came at {stage} step {step}, and the next run got to step {b.reached.get(stage, 0)}"
    return f"{'fix worked and revealed the next wall' if new else 'fix worked'}: {'; '.join(parts)}{blame}"


def change_words(parent: Mapping[str, Any]) -> str:
    """What was changed from the parent, in one line."""
    changed = mapping(parent.get("changed"))
    pairs = [f"{plain(k, 80)} {plain(v[0], 40)} -> {plain(v[1], 40)}" for k, v in changed.items() if isinstance(v, list) and len(v) == 2]
    label = plain(parent.get("label", "unknown"), 40)
    drift = strings(parent.get("drift"))
    besides = f" (and other {', '.join(sorted({plain(name.partition('.')[0], 30) for name in drift}))})" if drift else ""
    return label + (f": {', '.join(pairs[:6])}" if pairs else "") + (f" and {len(pairs) - 6} more" if len(pairs) > 6 else "") + besides


def chain_lines(found: Chain) -> list[str]:
    """One paragraph per run, with the change and its outcome between two."""
    lines = [f"({found.problem})"] if found.problem else []
    for place, member in enumerate(found.members):
        failed = ", ".join(f"{id} ({stage} step {step})" for id, (stage, step) in member.failures.items()) or "no failure"
        lines.append(f"{member.path.name}  {member.run}  {member.verdict}: {failed}  [{member.status}{_from(member)}]")
        if place < len(found.links):
            lines += [f"  | {found.links[place].change}", f"  v {found.links[place].outcome}"]
    return printable(lines)


def chain_json(found: Chain) -> dict[str, Any]:
    """The same as plain JSON values."""
    return plain_json(
        {
            "schema": 1,
            "runs": [
                {
                    "name": member.path.name,
                    "run": member.run,
                    "verdict": member.verdict,
                    "failures": {id: {"stage": stage, "step": step} for id, (stage, step) in member.failures.items()},
                    "status": member.status,
                    "from_postmortem": member.written,
                }
                for member in found.members
            ],
            "links": [{"change": link.change, "outcome": link.outcome} for link in found.links],
            "problem": found.problem,
        }
    )


def _member(folder: Path, catalog: Mapping[str, Entry]) -> Member:
    """A run from its postmortem.md when it has one, which a person may have corrected; otherwise from its records."""
    found = read_postmortem(folder)
    if found is not None:
        return _from_front(folder, found[0])
    try:
        return _from_records(folder, postmortem_of(read_evidence(folder), catalog))
    except PosttrainError as error:
        manifest = load_mapping(folder / MANIFEST).value
        return Member(folder, run_id(manifest), INCONCLUSIVE, {}, {}, mapping(manifest.get("parent")), plain(error, 200), written=False)


def _from_records(folder: Path, found: Postmortem) -> Member:
    at = {one["id"]: (one["stage"], one["first_step"]) for one in reversed(found.hypotheses) if one["decides"]}
    failures = {id: at.get(id, ("unknown", 0)) for id in found.failures}
    return Member(folder, found.run, found.verdict, failures, found.reached, found.parent, found.status, written=False)


def _from_front(folder: Path, front: Mapping[str, Any]) -> Member:
    listed = front.get("hypotheses")
    at: dict[str, tuple[str, int]] = {}
    for one in map(mapping, reversed(listed[:_MOST_FAILURES]) if isinstance(listed, list) else ()):
        step = number(one.get("first_step"))
        at[plain(one.get("id"), 20)] = (plain(one.get("stage"), 60), int(step) if step is not None else 0)
    failures = {plain(id, 20): at.get(plain(id, 20), ("unknown", 0)) for id in strings(front.get("failure_ids"))[:_MOST_FAILURES]}
    reached = {plain(k, 60): int(v) for k, v in mapping(front.get("reached")).items() if number(v) is not None}
    words = (plain(front.get(name), 60) for name in ("run", "verdict", "status"))
    run, verdict, status = words
    return Member(folder, run, verdict, failures, reached, mapping(front.get("parent")), status, written=True)


def _beside(run: Path) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Run directories in the folder that holds a run; links are left out."""
    try:
        folders = sorted(entry for entry in run.parent.iterdir() if entry.is_dir() and not entry.is_symlink())[:_MOST_BESIDE]
    except OSError:
        return
    for folder in folders:
        manifest, problem = load_mapping(folder / MANIFEST)
        if problem is None:
            yield folder, manifest


def _sets(a: Member, b: Member) -> tuple[tuple[Mapping[str, Any], Mapping[str, Any], bool], ...]:
    return (a.failures, b.failures, False), (a.failures, b.failures, True), (b.failures, a.failures, False)


def _too_early(met: tuple[str, int], b: Member) -> bool:
    """Whether the next run ended before the step at which a failure was met."""
    stage, step = met
    return stage in b.reached and b.reached[stage] < step


def _list(ids: list[str]) -> str:
    return ", ".join(ids)


def _from(member: Member) -> str:
    return f", {FILE}" if member.written else ""
