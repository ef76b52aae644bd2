"""The diagnosis of a run: what it is, who is suspected with which figures, which layers are clear, and the next cheapest check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.core.errors import EvidenceError
from posttrain.doctor.entries import Entry, Verdict
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.lines import CUT
from posttrain.doctor.scores import around
from posttrain.doctor.suspects import Suspect, find_suspects
from posttrain.doctor.triage import FEWEST, SICK, Reading, read_stage
from posttrain.doctor.walk import Step, walk_layers


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the records of a run say.

    Example: Diagnosis(Verdict.COLLAPSED, "F1 entropy collapse in grpo since step 120", (Suspect(...),), (Step(...), ...), "...", ...)
    """

    verdict: Verdict | None
    """None: the records do not tell. What would is in `next_check`."""
    because: str
    """Why, in one line."""
    suspects: tuple[Suspect, ...]
    walk: tuple[Step, ...]
    next_check: str
    readings: tuple[Reading, ...] = ()
    """What each stage is as a whole, in the order in which they ran."""
    open_stages: tuple[str, ...] = ()
    """Stages that have not ended: still running, or stopped."""
    problems: tuple[str, ...] = ()

    @property
    def sick(self) -> bool:
        """Whether something has to be done."""
        return self.verdict in SICK

    @property
    def failures(self) -> tuple[str, ...]:
        """Ids of the failures that the run has, likeliest first."""
        return tuple(dict.fromkeys(s.entry.id for s in self.suspects if s.decides and s.entry.verdict in SICK))


@np.errstate(all="ignore")  # a log may hold 1e308; what overflows is not finite, and no sign holds for it
def diagnose(evidence: Evidence, catalog: Mapping[str, Entry], *, live: bool = False) -> Diagnosis:
    """The diagnosis. Raises EvidenceError when there is nothing to look at.

    `live` says that the run is being written now: then a line that is half written and a stage without an ending are as they should be.
    """
    if not any(len(frame) for frame in evidence.frames.values()) and not evidence.evals:
        told = [str(alarm.get("detail", ""))[:300] for alarm in evidence.alarms[-1:]]  # e.g. it diverged before its first line
        first = f": {said}" if (said := (told or list(evidence.problems) or [""])[0]) else ""
        raise EvidenceError(
            f"{evidence.path} holds no metrics and no evaluation record that can be read{first}; give a run directory or a log"
        )
    evidence = _being_written(evidence) if live else evidence
    readings = {name: read_stage(frame, around(evidence, name)) for name, frame in evidence.frames.items()}
    suspects = find_suspects(evidence, catalog, readings)
    verdict, because = _verdict(suspects, list(readings.values()))
    walk = walk_layers(evidence, catalog, suspects)
    return Diagnosis(
        verdict=verdict,
        because=because,
        suspects=tuple(suspects),
        walk=tuple(walk),
        next_check=_next_check(verdict, suspects, readings),
        readings=tuple(readings.values()),
        open_stages=tuple(name for name in evidence.frames if name not in evidence.finished) if evidence.source == "posttrain" else (),
        problems=tuple(evidence.problems),
    )


def _being_written(evidence: Evidence) -> Evidence:
    """The same run without the facts that only a run that is over can have."""
    cut = sum(CUT in problem for problem in evidence.problems)
    frames = {}
    for name, frame in evidence.frames.items():
        facts = {"last_line_cut": False, "ended_silently": False, "problems": len(evidence.problems) - cut}
        open_now = name not in evidence.finished
        frames[name] = replace(frame, facts={**frame.facts, **{key: facts[key] for key in facts.keys() & frame.facts.keys() if open_now}})
    return replace(evidence, frames=frames)


def _verdict(suspects: Sequence[Suspect], readings: Sequence[Reading]) -> tuple[Verdict | None, str]:
    """The likeliest suspect decides; without one, a stage that is sick as a whole; without one, the last stage that has a verdict."""
    deciding = [suspect for suspect in suspects if suspect.decides and suspect.entry.verdict in SICK]
    if deciding:
        top = deciding[0]
        since = f"since step {top.first_step}" if top.still else f"from step {top.first_step} to {top.last_step}"
        return top.entry.verdict, f"{top.entry.id} {top.entry.name} in {top.stage} {since}"
    told = [reading for reading in readings if reading.verdict is not None]
    sick = [reading for reading in told if reading.verdict in SICK]
    if sick or told:
        chosen = (sick or told)[-1]
        return chosen.verdict, f"{chosen.stage}: {'; '.join(chosen.why[:2])}"
    if not readings:
        return None, "evaluation records only, no metrics of training"
    last = readings[-1]
    return None, f"{last.stage}: {'; '.join(last.why)}"


def _next_check(verdict: Verdict | None, suspects: Sequence[Suspect], readings: Mapping[str, Reading]) -> str:
    """The cheapest thing to do next."""
    deciding = [suspect for suspect in suspects if suspect.decides and suspect.entry.verdict in SICK]
    if deciding:
        top = deciding[0]
        return f"{top.entry.check} (confirms or clears {top.entry.id}); then first: {top.entry.fix}"
    missing = Counter(name for reading in readings.values() for name in reading.unknown)
    if verdict is not Verdict.HEALTHY:
        missing += Counter(name for suspect in suspects if not suspect.confirmed for name in suspect.unknown)
    wanted = missing.most_common(1)[0][0] if missing else None
    if verdict in SICK:
        return f"record {wanted}: it would tell why" if wanted else "read the last rollouts: no failure of the catalog explains the curve"
    if verdict is Verdict.BREAKOUT_LOADING:
        return "wait: go on until the held-out score has had longer than its lag to move, and do not judge by the reward alone"
    if verdict is Verdict.SATURATED:
        return "stop or take harder data: compare held-out scores with the start of the stage (posttrain compare BEFORE AFTER)"
    if verdict is Verdict.HEALTHY:
        passed = next((s for s in suspects if s.confirmed and not s.risk and s.entry.verdict in SICK), None)
        if passed is not None:
            return f"{passed.entry.check} ({passed.entry.id} was seen in passing)"
        return f"none is due; recording {wanted} would widen what can be told" if wanted else "none is due"
    if any(len(reading.why) == 1 and f"fewer than {FEWEST} have no verdict" in reading.why[0] for reading in readings.values()):
        return f"let it run: a stage has a verdict from {FEWEST} rows on"
    return f"record {wanted}: it would decide" if wanted else "measure held-out items before and after (posttrain eval)"
