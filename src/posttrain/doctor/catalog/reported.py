"""How entries are written that others report: short, since most have no signs of their own or are another name for one that has."""

from __future__ import annotations

from collections.abc import Callable

from posttrain.doctor.entries import Action, Entry, FoundBy, Layer, Status, Tier, Verdict
from posttrain.doctor.frame import Kind
from posttrain.doctor.signals import Signal

TRAINED: tuple[Kind, ...] = ("sft", "preference", "rl", "distill")


def reporter(
    layer: Layer, verdict: Verdict, onset: str, kinds: tuple[Kind, ...] = TRAINED, tier: Tier = Tier.STATIC
) -> Callable[..., Entry]:
    """A way to write the entries of one group, which share what is given here unless they say otherwise.

    Example: reporter(Layer.SEAM, Verdict.BROKEN_SEAM, "from the first step")("U26", "name", "symptom", "cause", "fix", "check", "TRL #1")
    """

    def entry(
        id: str,
        name: str,
        symptom: str,
        cause: str,
        fix: str,
        check: str,
        source: str,
        *,
        found_by: FoundBy = "certify",
        same_as: str | None = None,
        signs: tuple[Signal, ...] = (),
        against: tuple[Signal, ...] = (),
        action: Action = Action.WARN,
        confused: dict[str, str] | None = None,
        **other: object,
    ) -> Entry:
        place = {"layer": layer, "verdict": verdict, "onset": onset, "kinds": kinds, "tier": tier, **other}
        return Entry(
            id,
            name,
            Status.EXTERNAL,
            symptom=symptom,
            cause=cause,
            fix=fix,
            check=check,
            source=source,
            found_by=found_by,
            same_as=same_as,
            signs=signs,
            against=against,
            action=action,
            confused=confused or {},
            **place,  # type: ignore[arg-type]
        )

    return entry
