"""What two runs do differently: the step at which each metric parts beyond its noise, the suspects only one has, and what was set apart.

Metrics that part first and lead come first: what moves before the reward is nearer to the cause. Two runs are two samples: noise is judged
within each run, so what another seed alone would do can part as well, and the conclusion says so when the seeds differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posttrain.core.errors import EvidenceError, RunError
from posttrain.doctor.changes import first_parting
from posttrain.doctor.diagnose import Diagnosis, diagnose
from posttrain.doctor.entries import Entry, Tier
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.frame import Frame
from posttrain.doctor.text import plain_json, printable, verdict_word
from posttrain.doctor.triage import SICK
from posttrain.doctor.vocabulary import METRICS
from posttrain.doctor.windows import shown
from posttrain.runs.diff import RunDiff, explain
from posttrain.runs.manifest import differences
from posttrain.runs.manifest import shown as shown_differences
from posttrain.runs.reading import plain

MOST = 12
"""Lines of one section."""
_ORDER = (Tier.LEADING, Tier.MIDDLE, Tier.LAGGING)
_CLOCK = "seconds."


@dataclass(frozen=True, slots=True)
class Part:
    """One metric of one stage that parts.

    Example: Part("grpo", "entropy", Tier.LEADING, 41, 0.21, 0.05)
    """

    stage: str
    metric: str
    tier: Tier
    step: int
    a: float
    b: float
    """Means from `step` to the last common one."""


@dataclass(frozen=True, slots=True)
class RunsApart:
    """What two runs do differently.

    Example: RunsApart(parts=(Part(...),), equal_until={"grpo": 12}, compared=31, ...)
    """

    parts: tuple[Part, ...]
    """Leading before middle before lagging metrics, each in the order of their steps."""
    equal_until: Mapping[str, int | None]
    """Stage to the last step up to which every metric is the same number; None when not even the first is."""
    compared: int
    """Metrics that both have with enough values."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    """Suspects of one run that the other lacks."""
    verdicts: tuple[str, str]
    static: tuple[str, ...]
    """Settings, inputs, code and machine that differ."""
    conclusion: str


@np.errstate(all="ignore")  # a log may hold 1e308; what overflows is not finite, and no sign holds for it
def compare_runs(a: Evidence, b: Evidence, catalog: Mapping[str, Entry]) -> RunsApart:
    """Compare two runs. Raises EvidenceError when they have no stage in common."""
    pairs = _pairs(a, b)
    if not pairs:
        stages = f"{_names(a)} against {_names(b)}"
        raise EvidenceError(f"{a.path} and {b.path} have no stage in common ({stages}); compare runs of one recipe, or logs of one stage")
    parts, equal, compared = [], {}, 0
    for first, second in pairs:
        found, until, n = _stage(first, second)
        parts += found
        equal[first.stage] = until
        compared += n
    parts.sort(key=lambda part: (_ORDER.index(part.tier), part.step))
    sick = [diagnose(side, catalog) for side in (a, b)]
    ids = [{s.entry.id: s for s in one.suspects if s.confirmed and s.entry.verdict in SICK} for one in sick]
    only = [tuple(_suspect_words(s) for id, s in ids[i].items() if id not in ids[1 - i]) for i in (0, 1)]
    static, telling = _static(a, b)
    words = (verdict_word(sick[0].verdict), verdict_word(sick[1].verdict))
    return RunsApart(tuple(parts), equal, compared, only[0], only[1], words, static, _conclusion(parts, equal, static, sick, telling))


def difference_lines(found: RunsApart) -> list[str]:
    """The conclusion, the metrics that part, the suspects of one only, and what was set apart."""
    lines = [found.conclusion, "", f"first run: {found.verdicts[0]}", f"second run: {found.verdicts[1]}"]
    lines += [f"  only the first: {line}" for line in found.only_a[:MOST]] + [f"  only the second: {line}" for line in found.only_b[:MOST]]
    lines += [f"{stage}: {_until(step)}" for stage, step in found.equal_until.items()]
    for tier in _ORDER:
        inside = [part for part in found.parts if part.tier is tier]
        if inside:
            lines += ["", f"{tier.value} metrics that part"]
            lines += [f"  {p.stage} step {p.step:<6} {p.metric:22} {shown(p.a)} against {shown(p.b)} from there on" for p in inside[:MOST]]
            lines += [f"  and {len(inside) - MOST} more"] if len(inside) > MOST else []
    lines += ["", "set apart", *(f"  {line}" for line in found.static[:MOST])] if found.static else []
    lines += [f"  and {len(found.static) - MOST} more"] if len(found.static) > MOST else []
    return printable(lines)


def difference_json(found: RunsApart) -> dict[str, Any]:
    """The same as plain JSON values."""
    return plain_json(
        {
            "schema": 1,
            "conclusion": found.conclusion,
            "verdicts": list(found.verdicts),
            "compared": found.compared,
            "equal_until": dict(found.equal_until),
            "parts": [
                {"stage": p.stage, "metric": p.metric, "tier": p.tier.value, "step": p.step, "a": p.a, "b": p.b} for p in found.parts
            ],
            "only_a": list(found.only_a),
            "only_b": list(found.only_b),
            "static": list(found.static),
        }
    )


def _pairs(a: Evidence, b: Evidence) -> list[tuple[Frame, Frame]]:
    """Stages of the same name; or, of two logs with one stage each, those two."""
    shared = [(frame, b.frames[name]) for name, frame in a.frames.items() if name in b.frames]
    if not shared and len(a.frames) == len(b.frames) == 1:
        return [(next(iter(a.frames.values())), next(iter(b.frames.values())))]
    return shared


def _stage(a: Frame, b: Frame) -> tuple[list[Part], int | None, int]:
    """The metrics of a stage that part, the step up to which all are equal, and how many were compared."""
    parts, compared = [], 0
    common = np.intersect1d(np.asarray(a.steps), np.asarray(b.steps))
    differs = np.zeros(len(common), dtype=bool)
    for metric in sorted(set(a.columns) & set(b.columns)):
        steps, first, second = _aligned(a, b, metric)
        if metric.startswith(_CLOCK) or not len(steps):
            continue
        differs[np.searchsorted(common, steps[first != second])] = True
        at = first_parting(first, second)
        compared += 1
        if at is not None:
            tier = METRICS[metric].tier if metric in METRICS and METRICS[metric].tier in _ORDER else Tier.MIDDLE
            parts.append(Part(a.stage, metric, tier, int(steps[at]), float(first[at:].mean()), float(second[at:].mean())))
    unequal = np.flatnonzero(differs)
    last = len(common) - 1 if not len(unequal) else int(unequal[0]) - 1
    return parts, int(common[last]) if last >= 0 else None, compared


def _aligned(a: Frame, b: Frame, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The steps at which both know a metric, and both series there."""
    sides = [(np.asarray(frame.steps)[frame.columns[metric].positions], frame.columns[metric].values) for frame in (a, b)]
    steps, first, second = np.intersect1d(sides[0][0], sides[1][0], return_indices=True)
    return steps, sides[0][1][first], sides[1][1][second]


def _static(a: Evidence, b: Evidence) -> tuple[tuple[str, ...], str | None]:
    """What was set apart, most likely cause first, and the explanation that the records alone give."""
    if a.source == b.source == "posttrain" and a.manifest and b.manifest:
        try:
            found: RunDiff = explain(a.path, b.path)
        except RunError:
            return _plain_static(a, b), None
        return tuple(f"{reason.group}: {reason}" for reason in found.reasons), found.conclusion
    return _plain_static(a, b), None


def _plain_static(a: Evidence, b: Evidence) -> tuple[str, ...]:
    return tuple(plain(line) for line in shown_differences(differences(a.config, b.config)))


def _conclusion(
    parts: Sequence[Part],
    equal: Mapping[str, int | None],
    static: Sequence[str],
    sick: Sequence[Diagnosis],
    telling: str | None,
) -> str:
    """One line: what parts first, how long before the reward, and what was set apart."""
    cause = f"; set apart: {static[0]}" + (f" and {len(static) - 1} more" if static[1:] else "") if static else "; nothing was set apart"
    if not parts:
        exact = all(step is not None for step in equal.values()) and not (telling or "").startswith("first difference")
        return ("the runs do the same" if exact else "no metric parts beyond its noise") + cause
    head = min(parts, key=lambda part: (part.step, _ORDER.index(part.tier)))
    text = f"{head.metric} ({head.tier.value}) parts first, at {head.stage} step {head.step}: {shown(head.a)} against {shown(head.b)}"
    late = [part for part in parts if part.tier is Tier.LAGGING and part.stage == head.stage and part is not head]
    if late:
        then = min(late, key=lambda part: part.step)
        text += f"; {then.metric} follows {then.step - head.step} steps later ({shown(then.a)} against {shown(then.b)})"
    words = [verdict_word(one.verdict) for one in sick]
    cause += " (another seed alone can do this)" if static and all(line.startswith("seeds") for line in static) else ""
    return text + (f"; {words[0]} against {words[1]}" if words[0] != words[1] else "") + cause


def _suspect_words(suspect: Any) -> str:
    return (
        f"{suspect.entry.id} {suspect.entry.name} in {suspect.stage} from step {suspect.first_step} (confidence {suspect.confidence:.0%})"
    )


def _until(step: int | None) -> str:
    return "different numbers from the first step on" if step is None else f"the same numbers up to step {step}"


def _names(evidence: Evidence) -> str:
    return ", ".join(plain(name, 40) for name in list(evidence.frames)[:6]) or "no stage"
