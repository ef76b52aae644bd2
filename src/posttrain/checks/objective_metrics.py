"""The oracle law for what an objective reports: every figure of a row against plain sums over its trained tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from posttrain.checks.coefficients import Row, correction_weight, kl_effect, log_ratios
from posttrain.checks.findings import Finding, distance, largest, measured
from posttrain.checks.subjects import Subject, rows_of, scene, select_rows, subject, tensors
from posttrain.core.metrics import read
from posttrain.objectives.axes import KL
from posttrain.objectives.objective import Objective


def metrics_law(tested: Subject, setting: Objective) -> Finding:
    """Each row of the scene alone, so that a figure of padding, or of another row, shows."""
    plain = subject(tested.name, setting.model_copy(update={"kl": KL()}))  # what is reported does not depend on what is paid for
    exact = scene()
    found = []
    for b, row in enumerate(rows_of(exact)):
        if not row.logp:
            continue
        wanted = figures(row, setting)
        means = {name: _mean(table[b, exact.mask_BT[b]].tolist()) for name, table in tensors(exact) if table.is_floating_point()}
        for streams, kl in ((exact, means["divergence_BT"]), (replace(exact, divergence_BT=None), wanted["kl"])):
            got = read(plain.terms(select_rows(streams, [b])).metrics)
            known = wanted | {"entropy": means["entropy_BT"], "kl": kl}
            found += [(distance(got[name], value), f"{name} of row {b}") for name, value in known.items()]
    deviation, detail = largest(found)
    return measured("oracle", deviation, f"metrics of single rows against plain sums; worst: {detail}")


def figures(row: Row, setting: Objective) -> dict[str, float]:
    """What to read for one response. Example: token ratios 2 and 1/2 have ess_staleness 2.5^2 / (2 * 4.25) = 0.735."""
    base = row.old if setting.against == "old" else row.behaviour
    ratios = [math.exp(x) for x in log_ratios([a - b for a, b in zip(row.logp, base, strict=True)], row.sentence, setting.ratio)]
    stale = [a - b for a, b in zip(row.logp, row.old, strict=True)]
    kappas = [a - b for a, b in zip(row.old, row.behaviour, strict=True)]
    weights = [correction_weight(kappas, t, row.old[t], row.behaviour[t], setting.correction) for t in range(len(kappas))]
    if setting.surrogate:  # it stands in for the correction too
        weights = [1.0 for _ in kappas]
    k3 = [kl_effect(a - b, "k3").value for a, b in zip(row.logp, row.reference, strict=True)]
    return {
        "ratio_mean": _mean(ratios),
        "ratio_max": max(ratios),
        "staleness_mean": _mean([abs(x) for x in stale]),
        "mismatch_mean": _mean([abs(x) for x in kappas]),
        "mismatch_max": max(abs(x) for x in kappas),
        "ess_staleness": _effective([math.exp(x) for x in stale]),
        "ess_mismatch": _effective([math.exp(x) for x in kappas]),
        "correction_mean": _mean(weights),
        "kl": _mean(k3),
        "tokens": float(len(row.logp)),
    }


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _effective(weights: Sequence[float]) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
