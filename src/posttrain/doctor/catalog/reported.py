"""How entries are written that others report: short, since most have no signs of their own or are another name for one that has."""

from __future__ import annotations

from typing import Any, Protocol

from posttrain.doctor.entries import Entry, Layer, Status, Tier, Verdict
from posttrain.doctor.frame import Kind

TRAINED: tuple[Kind, ...] = ("sft", "preference", "rl", "distill")


class Reporter(Protocol):
    """Writes entries of one group."""

    def __call__(self, id: str, name: str, symptom: str, cause: str, fix: str, check: str, source: str, **more: Any) -> Entry:
        """An entry; `more` are other fields of Entry, such as found_by (certify, unless it is given), same_as and signs."""
        ...


def reporter(layer: Layer, verdict: Verdict, onset: str, kinds: tuple[Kind, ...] = TRAINED, tier: Tier = Tier.STATIC) -> Reporter:
    """A way to write the entries of one group, which share what is given here unless they say otherwise.

    Example: reporter(Layer.SEAM, Verdict.BROKEN_SEAM, "from the first step")("U26", "name", "symptom", "cause", "fix", "check", "TRL #1")
    """
    shared: dict[str, Any] = {"layer": layer, "verdict": verdict, "onset": onset, "kinds": kinds, "tier": tier, "found_by": "certify"}

    def entry(id: str, name: str, symptom: str, cause: str, fix: str, check: str, source: str, **more: Any) -> Entry:
        texts = {"symptom": symptom, "cause": cause, "fix": fix, "check": check, "source": source}
        return Entry(id, name, Status.EXTERNAL, **texts, **{**shared, **more})

    return entry
