"""The evidence grade of a claim: a verdict on what may be said, not on the result.

Two questions have two functions. `grade_of_runs` grades a claim about a method, over training runs that differ in their seed.
`grade_of_comparison` grades a claim about two given checkpoints, over evaluation items; however many items it has, it never says that the
method would win again.

The labels are not one scale: UNDERPOWERED means measured with care and not resolved, SUGGESTIVE means a large effect on too little.
Ask `claimable` whether a claim may be made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from posttrain.core.errors import EvidenceError
from posttrain.stats.intervals import Interval
from posttrain.stats.power import SigmaEstimate, seeds_needed

FEW_SEEDS = 8
"""Below this many seeds an unresolved effect is one seen on few runs; from here on the budget was real and the effect too small."""

PULSE_ITEMS, SELECTION_ITEMS, PUBLICATION_ITEMS = 100, 500, 1000
"""Items for a pulse that decides nothing, for choosing a checkpoint (+-4.4 points), and for publishing small differences (+-3.1)."""


class Grade(StrEnum):
    """How much a claim can bear."""

    ANECDOTE = "anecdote"
    WEAK = "weak"
    SUGGESTIVE = "suggestive"
    UNDERPOWERED = "underpowered"
    DEFENSIBLE = "defensible"
    STRONG = "strong"

    @property
    def claimable(self) -> bool:
        """Whether the claim may be stated as a result."""
        return self in (Grade.DEFENSIBLE, Grade.STRONG)


GRADE_MEANING: Mapping[Grade, str] = MappingProxyType(
    {
        Grade.ANECDOTE: "seen once or too small to tell from noise; do not repeat it as a finding",
        Grade.WEAK: "a hint on too few runs or items; a reason to measure, not to claim",
        Grade.SUGGESTIVE: "a large effect on too little data; worth the full budget",
        Grade.UNDERPOWERED: "measured with care, but the effect is too small for this budget; no claim in either direction",
        Grade.DEFENSIBLE: "the budget resolves an effect of this size; state it with n and interval",
        Grade.STRONG: "resolved with room to spare; may be published with its conditions",
    }
)
"""One line per grade, for reports."""


def grade_of_runs(delta: float, seeds: int, sigma: SigmaEstimate) -> Grade:
    """The grade of a difference `delta` between two methods with `seeds` independent runs each.

    With the budget of `seeds_needed` at 95% and power 80%: defensible from the full budget on, strong from twice the budget on, and
    below it underpowered, or with fewer than 8 seeds suggestive from a tenth of the budget, weak from a fortieth, anecdote under that. One
    seed is never more than weak. At sigma 0.05 and 1, 3, 16, 44, 99 seeds:

        +2 points   anecdote  weak        underpowered  underpowered  defensible
        +3 points   anecdote  weak        underpowered  defensible    strong
        +5 points   weak      suggestive  defensible    strong        strong

    Calling +5 points defensible at three seeds, as is sometimes done, contradicts the formula, which asks for 16.
    """
    if seeds < 1:
        raise EvidenceError(f"{seeds} seeds are no evidence; train at least one")
    if not math.isfinite(delta):
        raise EvidenceError(f"a difference of {delta} is no measurement; leave out the runs that failed and say so")
    if delta == 0:
        return Grade.ANECDOTE if seeds < FEW_SEEDS else Grade.UNDERPOWERED
    share = seeds / seeds_needed(delta, sigma)
    if share >= 1 and seeds >= 2:
        return Grade.STRONG if share >= 2 else Grade.DEFENSIBLE
    if seeds >= FEW_SEEDS:
        return Grade.UNDERPOWERED
    if share >= 0.1 and seeds >= 2:
        return Grade.SUGGESTIVE
    return Grade.WEAK if share >= 0.025 else Grade.ANECDOTE


def grade_of_comparison(delta: float, interval: Interval, p_value: float, n: int) -> Grade:
    """The grade of a difference between two given checkpoints, measured on the same n items.

    The difference counts as resolved when its interval leaves out 0 and p is below 0.05.

        items         unresolved     resolved
        below 100     anecdote       weak
        100 to 499    underpowered   suggestive
        500 to 999    underpowered   defensible
        from 1000     underpowered   defensible, strong with p below 0.01

    >>> grade_of_comparison(0.06, Interval(0.02, 0.1, 0.95, "cluster-t"), 0.004, 500)
    <Grade.DEFENSIBLE: 'defensible'>
    """
    if n < 1 or not math.isfinite(delta) or not 0 <= p_value <= 1:
        raise EvidenceError(
            f"a difference of {delta} with p {p_value} on {n} items is no comparison; evaluate both models on the same items"
        )
    resolved = p_value < 0.05 and 0.0 not in interval
    if n < PULSE_ITEMS:
        return Grade.WEAK if resolved else Grade.ANECDOTE
    if not resolved:
        return Grade.UNDERPOWERED
    if n < SELECTION_ITEMS:
        return Grade.SUGGESTIVE
    return Grade.STRONG if n >= PUBLICATION_ITEMS and p_value < 0.01 else Grade.DEFENSIBLE
