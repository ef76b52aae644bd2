"""Mask, permutation and conservation for policy objectives, on one scene of eight rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from posttrain.checks.findings import EXACT, Finding, distance, largest, measured
from posttrain.checks.subjects import (
    GARBAGE,
    Outcome,
    Subject,
    aggregated_gradient,
    fates,
    on_policy,
    outcome,
    scene,
    select_rows,
    soiled,
    subject,
)
from posttrain.core.metrics import Mean, Metric, Sum, read
from posttrain.objectives.axes import KL, Entropy
from posttrain.objectives.streams import LEFT_OUT, Fate, Streams, Terms

SAME = 1e-12
"""Bound for the same arithmetic at another place in memory, where vectorised exponentials may differ in the last bit."""


def mask_law(tested: Subject) -> list[Finding]:
    """Garbage in untrained slots changes no trained value, no gradient, no fate and no metric; no gradient reaches those slots."""
    streams = scene()
    clean = outcome(tested, streams)
    found = []
    for what in GARBAGE:
        dirty = outcome(tested, soiled(streams, what))
        found += [(gap, f"{name} with {what} in untrained slots") for name, gap in _differences(dirty, clean, streams).items()]
        leaked = max(float(torch.nan_to_num(g[~streams.mask_BT], nan=torch.inf).abs().max()) for g in dirty.gradients.values())
        found.append((leaked, f"a gradient in untrained slots, {what} there"))
    deviation, detail = largest(found)
    said = f"{len(GARBAGE)} kinds of garbage in every untrained slot of every stream" if deviation == 0 else detail
    return [measured("mask", deviation, said, EXACT)]


def permutation_law(tested: Subject) -> list[Finding]:
    """Rows in another order, rows alone, rows twice."""
    streams = scene()
    whole = outcome(tested, streams)
    order = [5, 2, 7, 0, 4, 6, 1, 3]
    moved = outcome(tested, select_rows(streams, order))
    wanted = Outcome(_reordered(whole, order), {name: g[order] for name, g in whole.gradients.items()})
    found = [(gap, f"{name} after reordering rows") for name, gap in _differences(moved, wanted, select_rows(streams, order)).items()]
    for row in range(len(order)):
        alone = outcome(tested, select_rows(streams, [row]))
        mask_T = streams.mask_BT[row]
        gap = distance(alone.terms.loss_BT[0, mask_T].detach(), whole.terms.loss_BT[row, mask_T].detach())
        found.append((gap, f"row {row} alone and among others"))
    twice = aggregated_gradient(tested, select_rows(streams, [0, 0, 1, 1]))
    once = aggregated_gradient(tested, select_rows(streams, [0, 1]))
    found.append((distance(twice, np.repeat(once, 2, axis=0)), "two rows of equal content stay two"))
    deviation, detail = largest(found)
    return [measured("permutation", deviation, f"rows reordered, alone, and doubled; worst: {detail}", SAME)]


def _reordered(whole: Outcome, order: list[int]) -> Terms:
    """The terms of reordered rows; metrics stay."""
    terms = whole.terms
    return Terms(terms.loss_BT[order], terms.fate_BT[order], terms.metrics)


def _differences(found: Outcome, wanted: Outcome, streams: Streams) -> dict[str, float]:
    """Distance per part of an answer; only trained slots count for values and gradients."""
    mask_BT = streams.mask_BT
    gaps = {
        "value": distance(found.terms.loss_BT[mask_BT].detach(), wanted.terms.loss_BT[mask_BT].detach()),
        "fates": distance(found.terms.fate_BT, wanted.terms.fate_BT),
        "metrics": distance(*(list(_plain(outcome_.terms.metrics).values()) for outcome_ in (found, wanted))),
    }
    for name, gradient in wanted.gradients.items():
        gaps[f"gradient of {name}"] = distance(found.gradients[name][mask_BT], gradient[mask_BT])
    return gaps


def _plain(metrics: dict[str, Metric]) -> dict[str, float]:
    return {name: -1.0 if value is None else value for name, value in read(metrics).items()}


def conservation_law(tested: Subject) -> list[Finding]:
    """Every trained slot meets exactly one fate, and the fate says the truth about the gradient."""
    if tested.setting is None:
        return [_no_token_is_lost(tested)]
    plain = subject(tested.name, tested.setting.model_copy(update={"kl": KL(), "entropy": Entropy()}))
    streams = scene()
    met = outcome(plain, streams)
    fate_BT, mask_BT, slope_BT = met.terms.fate_BT, streams.mask_BT, met.gradients["logp_BT"]
    counted = fates(met.terms)
    wrong = int(((fate_BT == Fate.UNTRAINED) == mask_BT).sum())
    wrong += abs(int(mask_BT.sum()) - sum(n for name, n in counted.items() if name != "UNTRAINED"))
    wrong += _metrics_disagree(met, int(mask_BT.sum()))
    wrong += _half_rejected(met, streams)
    silent_BT = (fate_BT == Fate.TRAINED) & (streams.advantage_BT != 0) & (slope_BT == 0)
    extremes = [_overflowing(streams, log_ratio, sign) for log_ratio in (800.0, -800.0) for sign in (1.0, -1.0)]
    loud = max(_loudest(plain, seen) for seen in (streams, *extremes))
    shown = ", ".join(f"{name} {n}" for name, n in counted.items())
    return [
        measured(
            "conservation", float(wrong), f"slots without exactly one fate, metrics that miscount, responses half rejected ({shown})", EXACT
        ),
        measured("conservation", loud, "largest gradient of a token that is left out, ratios that overflow included", EXACT),
        measured("conservation", float(silent_BT.sum()), "trained tokens with advantage and without gradient", EXACT),
    ]


def _loudest(tested: Subject, streams: Streams) -> float:
    """Largest gradient of a token that is left out; infinite when it is not a number."""
    met = outcome(tested, streams)
    left_BT = streams.mask_BT & (met.terms.fate_BT != Fate.TRAINED)
    slopes_N = torch.nan_to_num(met.gradients["logp_BT"][left_BT].abs(), nan=torch.inf)
    return float(slopes_N.max()) if left_BT.any() else 0.0


def _overflowing(streams: Streams, log_ratio: float, sign: float) -> Streams:
    """The first token of row 0 at a ratio of e^800 or e^-800, by staleness; that of row 1 by a sampler that disagrees."""
    old_BT, behaviour_BT, advantage_BT = (value.clone() for value in (streams.old_BT, streams.behaviour_BT, streams.advantage_BT))
    old_BT[0, 0] = behaviour_BT[0, 0] = streams.logp_BT[0, 0] - log_ratio
    behaviour_BT[1, 0] = old_BT[1, 0] - log_ratio
    advantage_BT[:2, 0] = sign
    return replace(streams, old_BT=old_BT, behaviour_BT=behaviour_BT, advantage_BT=advantage_BT)


def _metrics_disagree(met: Outcome, trained: int) -> int:
    """How many metrics count other numbers than the fates themselves."""
    metrics = met.terms.metrics
    wrong = int(metrics["tokens"] != Sum(trained))
    return wrong + sum(metrics[f"fate_{fate.name.lower()}"] != Mean(fates(met.terms).get(fate.name, 0), trained) for fate in LEFT_OUT)


def _half_rejected(met: Outcome, streams: Streams) -> int:
    """Responses of which some trained tokens are REJECTED and others are not."""
    rejected_BT = met.terms.fate_BT == Fate.REJECTED
    some_B, all_B = rejected_BT.any(-1), (rejected_BT | ~streams.mask_BT).all(-1)
    return int((some_B & ~all_B).sum())


def _no_token_is_lost(tested: Subject) -> Finding:
    """A user's function names no fates; before the first update every trained token with an advantage still has to count."""
    streams = on_policy(scene())
    slope_BT = outcome(tested, streams).gradients["logp_BT"]
    lost = int((streams.mask_BT & (streams.advantage_BT != 0) & (slope_BT == 0)).sum())
    return measured("conservation", float(lost), "on-policy, trained tokens with advantage and without gradient", EXACT)
