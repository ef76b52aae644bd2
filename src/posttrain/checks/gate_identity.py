"""Gate I: an exact path gives the reference path's output: the same ids at matched seeds, or, where seeds cannot match, the same law.

A path that is exact in distribution draws with other random numbers, so its tokens are held against the reference distribution itself. For
a token x drawn at a place where the reference has distribution p, and F the sum of p over what comes before x in some order,

    u = F(x) + v p(x),   v uniform and independent

is uniform on [0, 1) given everything before it, if x has distribution p. Two orders are tested, by id and by probability, and the mean
surprise -log p(x) against the entropy of p: three tests that a sampler with another distribution fails in one way or another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from scipy import special
from torch import Tensor

from posttrain.checks.gate_distribution import Scorer
from posttrain.checks.gates import Gate, GateResult, Verdict
from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive, numpy_rng
from posttrain.engine.types import Completion, Request, Sampler
from posttrain.objectives.logprobs import warp

SAME = 1e-5
"""Largest difference of two log-probabilities that float32 sums in another order may have, as a share of the larger of 1 and the value."""
SCORED = 1e-4
"""The same, against a pass without a cache."""
LEVEL = 1e-3
"""Chance of refusing an exact path, all three tests together."""
LEAST_TOKENS = 500
_FAR = 1e9
"""Stands for a gap that is not a finite number, which JSON cannot hold."""


def identity_gate(
    reference: Sampler,
    accelerated: Sampler,
    scorer: Scorer,
    requests: Sequence[Request],
    same: Literal["bits", "distribution"],
    seed: int = 0,
) -> GateResult:
    """Run gate I. `requests` are asked as they are and greedily; siblings of a prompt stand together, as in training.

    Args:
        scorer: of the reference path; only `same="distribution"` asks it.
        same: "bits" compares ids and log-probabilities request by request; "distribution" does so greedily, and tests the law otherwise.
    """
    if not requests:
        raise EvidenceError("gate I needs requests to compare; give it some prompts")
    greedy = [Request(r.prompt, r.sampling.model_copy(update={"temperature": 0.0}), r.seed) for r in requests]
    measured: dict[str, Any] = {"same": same, "requests": len(requests), "sampling": str(requests[0].sampling)}
    measured["greedy"] = differences(reference.generate(greedy), accelerated.generate(greedy))
    drawn = accelerated.generate(requests)
    problems = _problems("greedy", measured["greedy"])
    if same == "bits":
        measured["sampled"] = differences(reference.generate(requests), drawn)
        problems += _problems("sampled", measured["sampled"])
        text = f"{len(requests)} sampled and greedy completions equal, log-probabilities to {measured['sampled']['logp_gap']:.1g}"
    else:
        law = law_of(requests, drawn, scorer, seed)
        measured["law"] = law
        if not law["logp_share"] <= SCORED:
            problems.append(f"recorded log-probabilities are off by up to {law['logp_gap']:.2g} nats from the reference's")
        if min(law["p_values"].values()) < LEVEL / len(law["p_values"]):
            worst = min(law["p_values"], key=law["p_values"].get)
            problems.append(f"another distribution: {worst} has p = {law['p_values'][worst]:.2g} over {law['n_tokens']} tokens")
        elif law["n_tokens"] < LEAST_TOKENS and not problems:
            few = f"{law['n_tokens']} tokens are too few to tell distributions apart; ask for at least {LEAST_TOKENS}"
            return GateResult(Gate.IDENTITY, Verdict.NOT_SHOWN, few, measured)
        smallest = min(law["p_values"].values())
        text = (
            f"greedy equal; {law['n_tokens']} sampled tokens have the reference's distribution (smallest p {smallest:.2g}; a distance "
            f"above {law['detectable']:.3f} would show)"
        )
    if problems:
        return GateResult(Gate.IDENTITY, Verdict.FAILED, "; ".join(problems), measured)
    return GateResult(Gate.IDENTITY, Verdict.PASSED, text, measured)


def differences(reference: Sequence[Completion], accelerated: Sequence[Completion]) -> dict[str, Any]:
    """Completions that differ in ids or ending, and the largest gap of two log-probabilities before they do."""
    if len(reference) != len(accelerated):
        raise EvidenceError(f"{len(accelerated)} completions for {len(reference)} requests; none may be dropped or repeated")
    parted = [i for i, (a, b) in enumerate(zip(reference, accelerated, strict=True)) if (a.ids, a.stop) != (b.ids, b.stop)]
    gap = share = 0.0
    for one, other in zip(reference, accelerated, strict=True):
        for a, b, lp, la in zip(one.ids, other.ids, one.logps, other.logps, strict=False):
            if a != b:
                break
            gap, share = max(gap, abs(lp - la)), max(share, abs(lp - la) / max(1.0, abs(lp)))
    first = parted[0] if parted else None
    return {"differ": len(parted), "of": len(reference), "first": first, "logp_gap": gap, "logp_share": share}


def _problems(which: str, found: dict[str, Any]) -> list[str]:
    problems = []
    if found["differ"]:
        problems.append(
            f"{found['differ']} of {found['of']} {which} completions differ from the reference (the first is request {found['first']})"
        )
    if not found["logp_share"] <= SAME:
        problems.append(f"{which} log-probabilities differ by up to {found['logp_gap']:.2g} nats, more than rounding ({SAME:g} of them)")
    return problems


def law_of(requests: Sequence[Request], drawn: Sequence[Completion], scorer: Scorer, seed: int) -> dict[str, Any]:
    """p-values of the three tests that drawn tokens have the reference's sampling distribution."""
    rng = numpy_rng(seed, "contract", "law")
    by_id, by_rank, surprise, spread, gaps = [], [], [], [], [(0.0, 0.0)]
    for request, completion in zip(requests, drawn, strict=True):
        logp_TV = warp(scorer(request.prompt, completion.ids).double(), request.sampling).log_softmax(-1)
        p_TV, ids_T = logp_TV.exp(), torch.tensor(completion.ids)
        p_T = p_TV.gather(-1, ids_T[:, None]).squeeze(-1)
        noise_T = torch.from_numpy(rng.random(len(ids_T)))
        by_id += (before(p_TV, ids_T) + noise_T * p_T).tolist()
        order_TV = p_TV.argsort(dim=-1, descending=True, stable=True)
        place_T = (order_TV == ids_T[:, None]).long().argmax(-1)
        by_rank += (before(p_TV.gather(-1, order_TV), place_T) + noise_T * p_T).tolist()
        safe_TV = logp_TV.masked_fill(logp_TV.isneginf(), 0.0)
        entropy_T = -(p_TV * safe_TV).sum(-1)
        surprise += (-p_T.log() - entropy_T).tolist()
        spread += ((p_TV * safe_TV**2).sum(-1) - entropy_T**2).tolist()
        gaps += [(abs(a - b), abs(a - b) / max(1.0, abs(a))) for a, b in zip(p_T.log().tolist(), completion.logps, strict=True)]
    n = len(by_id)
    variance = math.fsum(spread)
    z = math.fsum(surprise) / math.sqrt(variance) if variance > 0 else 0.0
    p_values = {
        "place by id": uniform_p(by_id),
        "place by probability": uniform_p(by_rank),
        "surprise": float(2 * special.ndtr(-abs(z))) if math.isfinite(z) else 0.0,
    }
    gap, share = (max(values) if all(map(math.isfinite, values)) else _FAR for values in zip(*gaps, strict=True))
    return {"p_values": p_values, "n_tokens": n, "logp_gap": gap, "logp_share": share, "detectable": 1.95 / math.sqrt(max(n, 1))}


def before(p_TV: Tensor, ids_T: Tensor) -> Tensor:
    """Mass of the columns before each id. Example: before([[0.2, 0.3, 0.5]], [2]) is [0.5]."""
    return torch.where(torch.arange(p_TV.shape[-1]) < ids_T[:, None], p_TV, torch.zeros_like(p_TV)).sum(-1)


def uniform_p(values: Sequence[float]) -> float:
    """Kolmogorov-Smirnov p-value of the hypothesis that values are uniform on [0, 1); 0 when one of them is not a number."""
    array = np.asarray(values, dtype=np.float64)
    if not len(array) or not np.isfinite(array).all():
        return 0.0
    from scipy import stats  # half a second that nothing else needs

    return float(stats.kstest(array, "uniform").pvalue)


def sibling_requests(prompts: Sequence[tuple[int, ...]], siblings: int, sampling: Sampling, seed: int) -> list[Request]:
    """Requests as training asks them: the siblings of a prompt side by side, each with a seed of its own."""
    return [
        Request(prompt, sampling, derive(seed, "contract", "I", place, index))
        for place, prompt in enumerate(prompts)
        for index in range(siblings)
    ]
