"""The walk through the layers of a run, in the order in which they are to be cleared before the algorithm is blamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from posttrain.core.verdicts import VERDICTS
from posttrain.doctor.entries import Entry, Layer
from posttrain.doctor.evidence import Evidence
from posttrain.doctor.frame import Frame, Kind
from posttrain.doctor.suspects import Suspect, state
from posttrain.doctor.triage import recent, values
from posttrain.doctor.windows import shown
from posttrain.runs.reading import plain

Found = Literal["ok", "suspect", "cannot tell", "does not apply"]
MOST_NAMED = 4
_LOOK: Mapping[Layer, tuple[str, ...]] = {
    Layer.DATA: ("mixed", "zero_variance", "all_right", "all_wrong", "unanimous_unparseable", "token_accuracy"),
    Layer.REWARD: ("reward_mean", "reward_std", "errors", "unparseable", "truncated"),
    Layer.EVALUATION: ("heldout_mean", "heldout_n", "heldout_parse_rate", "heldout_truncated"),
    Layer.SEAM: ("mismatch_max", "mismatch_mean", "ess_mismatch", "version_lag"),
    Layer.INFRASTRUCTURE: ("seconds.rss_mib", "seconds.peak_mib", "seconds.sample", "seconds.train", "seconds.step"),
    Layer.CONFIGURATION: ("lr", "grad_norm", "loss"),
    Layer.ALGORITHM: ("entropy", "kl", "clip_fraction", "ratio_max", "reverse_kl"),
}
"""Metrics that show a layer at a glance."""
_GATES: Mapping[str, Layer] = {"probe": Layer.DATA, "launch": Layer.DATA, "preflight": Layer.SEAM}
"""First part of a gate's name to what it looks at; other gates weigh evaluations."""
FAILED = VERDICTS[False]
_NEEDS: Mapping[Layer, frozenset[Kind]] = {Layer.REWARD: frozenset({"rl"}), Layer.SEAM: frozenset({"rl", "distill"})}
"""Layers that not every kind of training has."""


@dataclass(frozen=True, slots=True)
class Step:
    """One layer: what was looked at, and what was found.

    Example: Step(Layer.SEAM, "ok", "mismatch_max 7e-06, ess_mismatch 1; 5 of 6 failures can be told")
    """

    layer: Layer
    found: Found
    looked: str


def walk_layers(evidence: Evidence, catalog: Mapping[str, Entry], suspects: Sequence[Suspect]) -> list[Step]:
    """One step per layer, data first and the algorithm last."""
    return [_step(layer, evidence, catalog, [s for s in suspects if s.entry.layer is layer]) for layer in Layer]


def _step(layer: Layer, evidence: Evidence, catalog: Mapping[str, Entry], suspects: Sequence[Suspect]) -> Step:
    kinds = {frame.kind for frame in evidence.frames.values()}
    if kinds and layer in _NEEDS and not kinds & {*_NEEDS[layer], "other"}:
        return Step(layer, "does not apply", f"no stage of this run has one ({', '.join(sorted(kinds))})")
    told, blind = _coverage(layer, evidence, catalog)
    gates = _gates(layer, evidence)
    figures = [*_figures(layer, evidence), *_records(layer, evidence), *(f"gate {name} {verdict}" for name, verdict in gates)]
    looked = ", ".join(figures)
    if told or blind:
        looked += f"{'; ' if looked else ''}{told} of {told + len(blind)} failures can be told"
    if any(suspect.decides for suspect in suspects):
        named = [f"{s.entry.id} {s.entry.name}" for s in suspects if s.decides][:MOST_NAMED]
        return Step(layer, "suspect", f"{', '.join(named)}; looked at {looked}")
    if any(verdict == FAILED for _, verdict in gates):
        return Step(layer, "suspect", looked)
    if not figures and told <= len(blind):
        missing = list(dict.fromkeys([*_LOOK[layer], *(name for names in blind for name in names)]))[:MOST_NAMED]
        return Step(layer, "cannot tell", f"not recorded: {', '.join(missing)}" + (f"; {looked}" if looked else ""))
    milder = [f"{s.entry.id} {s.entry.name} ({_why_mild(s)})" for s in suspects if s.confirmed][:MOST_NAMED]
    return Step(layer, "ok", looked + (f"; in passing: {', '.join(milder)}" if milder else ""))


def _why_mild(suspect: Suspect) -> str:
    if suspect.risk:
        return "a setting"
    return "at the end" if suspect.still else f"last at step {suspect.last_step}"


def _coverage(layer: Layer, evidence: Evidence, catalog: Mapping[str, Entry]) -> tuple[int, list[tuple[str, ...]]]:
    """How many failures of a layer could be told in some stage, and the missing metrics of each that could not."""
    told, blind = 0, []
    for entry in catalog.values():
        frames = [frame for frame in evidence.frames.values() if frame.kind in entry.kinds and len(frame)]
        if entry.layer is not layer or not entry.signs or not frames:
            continue
        if any(_tells(entry, frame) for frame in frames):
            told += 1
        else:
            blind.append(tuple(name for sign in entry.signs for name in sign.metrics if all(name not in f.columns for f in frames)))
    return told, blind


def _tells(entry: Entry, frame: Frame) -> bool:
    """Whether an entry can be told at the end of a stage: all signs can, or one that can does not hold."""
    states = [state(sign, frame, len(frame) - 1) for sign in entry.signs]
    return None not in states or False in states


def _figures(layer: Layer, evidence: Evidence) -> list[str]:
    """Recent figures of a layer's metrics, from the last stage that recorded each."""
    found = []
    for metric in _LOOK[layer]:
        holding = [frame for frame in evidence.frames.values() if metric in frame.columns]
        if holding:
            found.append(f"{metric} {shown(recent(values(holding[-1], metric)) or 0.0)}")
    return found[:MOST_NAMED]


def _records(layer: Layer, evidence: Evidence) -> list[str]:
    return [f"{len(evidence.evals)} evaluation records"] if evidence.evals and layer is Layer.EVALUATION else []


def _gates(layer: Layer, evidence: Evidence) -> list[tuple[str, str]]:
    """Names and verdicts of the gates that looked at a layer."""
    found = []
    for name, record in evidence.gates.items():
        kind = name.partition(".")[0]
        if _GATES.get(kind, Layer.EVALUATION) is layer and isinstance(record.get("verdict"), str):
            found.append((plain(name, 40), plain(record["verdict"], 20)))
    return found[:MOST_NAMED]
