"""The reduction law for policy objectives: at known limits a setting becomes a simpler one, with the same gradient on the same streams.

The table is made from the setting itself: every bound can be opened, every ratio can meet a response where it coincides with another, and
before the first update every setting is REINFORCE. Known identities between named algorithms are added by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from posttrain.checks.findings import CLOSE, Finding, absent, distance, largest, measured
from posttrain.checks.objective_oracle import found_expectation, sequence_case
from posttrain.checks.subjects import Subject, aggregated_gradient, on_policy, scene, subject
from posttrain.checks.tabular import divergence, softmax, world
from posttrain.objectives.axes import (
    CISPO,
    KL,
    Band,
    BinaryKL,
    Clip,
    ClipCov,
    Decoupled,
    Divergence,
    KLCov,
    Mask,
    NoCorrection,
    NoLimit,
    Squared,
    SquaredSequence,
    Truncate,
)
from posttrain.objectives.objective import Objective
from posttrain.objectives.streams import Streams

HUGE = 1e12
STEPS = 100
RETURNED = 1e-6
"""KL in nats at which the policy counts as returned to the reference."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """`left` on the streams seen through `view` has the gradient of `right`, times `scale`."""

    text: str
    left: Objective
    right: Objective
    view: Callable[[Streams], Streams] = lambda streams: streams
    scale: float = 1.0


def reduction_law(tested: Subject) -> list[Finding]:
    """Every reduction that the setting has."""
    if tested.setting is None:
        return [absent("reduction", "no limit at which a user's function becomes another one is known")]
    streams = scene()
    found = []
    for entry in reductions(tested.name, tested.setting):
        seen = entry.view(streams)
        left, right = (aggregated_gradient(subject(tested.name, setting), seen) for setting in (entry.left, entry.right))
        gap = distance(left, entry.scale * right) if np.linalg.norm(right) > 1e-3 else math.inf
        found.append((gap, entry.text))
    deviation, detail = largest(found)
    texts = "; ".join(text for _, text in found)
    return [measured("reduction", deviation, texts if deviation <= CLOSE else detail)]


def reductions(name: str, setting: Objective) -> Iterator[Reduction]:
    """All that apply to a setting."""
    reinforce = _with(setting, ratio="none", limit=NoLimit(), correction=NoCorrection(), surrogate=None)
    yield Reduction("before the first update: REINFORCE", setting, reinforce, on_policy)
    if not setting.surrogate:
        yield from _open_limit(setting)
        yield from _open_correction(setting)
        yield from _meeting_ratios(setting)
    if setting.kl.used and setting.kl.placement == "loss":
        yield Reduction("policy at the reference: no KL term", setting, _with(setting, kl=KL()), _at_the_reference)
    if name in IDENTITIES:
        yield IDENTITIES[name](setting)


def _open_limit(setting: Objective) -> Iterator[Reduction]:
    """The limit with bounds so wide that nothing reaches them."""
    free = _with(setting, limit=NoLimit())
    limit = setting.limit
    widest: dict[type, Any] = {
        Clip: Clip(low=1 - 1e-12, high=HUGE),
        CISPO: CISPO(high=HUGE),
        Band: Band(lower=0.0, upper=HUGE),
        Squared: Squared(omega=0.0, lower=1e-12, upper=HUGE),
        Divergence: Divergence(threshold=HUGE),
    }
    if type(limit) in widest:
        yield Reduction(f"bounds wide open: no {limit.kind}", _with(setting, limit=widest[type(limit)]), free)
    if isinstance(limit, Clip) and limit.dual is not None:
        yield Reduction("a huge dual bound: clip", _limit(setting, dual=HUGE), _limit(setting, dual=None))
    if isinstance(limit, Clip) and limit.cap is not None:
        yield Reduction("a huge cap: clip", _limit(setting, cap=HUGE), _limit(setting, cap=None))
    if isinstance(limit, SquaredSequence):
        score = _with(setting, ratio="none", limit=NoLimit())
        yield Reduction("tau = 0: A grad log pi, whatever the ratio", _limit(setting, tau=0.0), score)
    if isinstance(limit, ClipCov):
        clip = _with(setting, limit=Clip(low=limit.low, high=limit.high))
        yield Reduction("nothing gated: clip", setting, clip, _ungated)
    if isinstance(limit, KLCov):
        yield Reduction("nothing gated: no limit", setting, free, _ungated)


def _open_correction(setting: Objective) -> Iterator[Reduction]:
    how = setting.correction
    if isinstance(how, NoCorrection):
        return
    none = _with(setting, correction=NoCorrection())
    yield Reduction("a sampler that agrees: no correction", setting, none, _agreeing)
    widest: dict[type, Any] = {
        Truncate: Truncate(cap=HUGE),
        Decoupled: Decoupled(),
        Mask: Mask(lower=0.0, upper=HUGE, sequence_lower=None, sequence_upper=None),
    }
    if isinstance(how, BinaryKL) or (isinstance(how, Mask) and how.weight == "one"):
        open_ = BinaryKL(threshold=HUGE) if isinstance(how, BinaryKL) else widest[Mask].model_copy(update={"weight": "one"})
        yield Reduction("wide open: no correction", _with(setting, correction=open_), none)
    elif not isinstance(how, Decoupled) or how.cap is not None:
        yield Reduction("wide open: decoupled", _with(setting, correction=widest[type(how)]), _with(setting, correction=Decoupled()))
    if isinstance(how, Truncate) and how.level == "sequence":
        token = _with(setting, correction=Truncate(cap=how.cap))
        yield Reduction("one-token responses: truncation per token", setting, token, _one_token)


def _meeting_ratios(setting: Objective) -> Iterator[Reduction]:
    """Where the ratio of a segment is that of a token or of the response."""
    token, sequence = _with(setting, ratio="token"), _with(setting, ratio="sequence")
    if setting.ratio == "sequence":
        yield Reduction("one-token responses: the ratio of the token", setting, token, _one_token)
    if setting.ratio == "sentence":
        yield Reduction("one sentence: the ratio of the response", setting, sequence, lambda streams: _sentences(streams, 0))
        yield Reduction("a sentence per token: the ratio of the token", setting, token, lambda streams: _sentences(streams, 1))
    if setting.against == "behaviour":
        yield Reduction("a sampler that agrees: against old", setting, _with(setting, against="old"), _agreeing)


# --- identities between named algorithms -----------------------------------------------------------------------------------------------


def _ppo_clip(setting: Objective) -> Objective:
    """The objective's own aggregation and KL around the clip of PPO."""
    return _with(setting, ratio="token", against="old", limit=Clip(low=0.2, high=0.2), correction=NoCorrection())


IDENTITIES: dict[str, Callable[[Objective], Reduction]] = {
    "dapo": lambda o: Reduction("equal bounds: PPO clip", _limit(o, high=0.2), _ppo_clip(o)),
    "default": lambda o: Reduction("equal bounds: PPO clip", _limit(o, high=0.2), _ppo_clip(o)),
    "gspo": lambda o: Reduction(
        "one-token responses, bounds 0.2: PPO clip", _limit(o, low=0.2, high=0.2), _ppo_clip(o), lambda streams: _one_token(streams)
    ),
    "lpo": lambda o: Reduction(
        "a sentence per token, bounds 0.2: PPO clip", _limit(o, low=0.2, high=0.2), _ppo_clip(o), lambda streams: _sentences(streams, 1)
    ),
    "dr_grpo": lambda o: Reduction("is PPO clip but for its weights", o, _ppo_clip(o)),
    "areal": lambda o: Reduction("a sampler that agrees: PPO clip", o, _ppo_clip(o), lambda streams: _agreeing(streams)),
    "icepop": lambda o: Reduction("a sampler that agrees: GRPO", o, Objective.load({"kind": "grpo"}), lambda streams: _agreeing(streams)),
    "s_grpo": lambda o: Reduction("is GRPO but for how it samples", o, Objective.load({"kind": "grpo"})),
    "sao": lambda o: Reduction("equal band for both signs: MiMo's limit", o, _with(o, limit=Band(lower_negative=0.8, upper_negative=1.28))),
}


def return_to_reference(setting: Objective) -> float:
    """KL(policy || reference) after STEPS exact gradient steps on the KL term alone, from a policy 0.04 nats away."""
    case = sequence_case(world(4, 1))
    case = replace(case, advantage_BT=np.zeros_like(case.advantage_BT))
    alone = subject("kl alone", Objective.load({"kind": "reinforce", "kl": setting.kl.model_copy(update={"coef": 1.0})}))
    logits_SV = case.on.logits_SV
    for _ in range(STEPS):
        on = replace(case.on, logits_SV=logits_SV, old_SV=logits_SV, behaviour_SV=logits_SV)
        logits_SV = logits_SV - 6.0 * found_expectation(alone, replace(case, on=on)).gradient_SV
    return float(np.abs(divergence(softmax(logits_SV), softmax(case.on.reference_SV))).max())


# --- views of the streams ---------------------------------------------------------------------------------------------------------------


def _agreeing(streams: Streams) -> Streams:
    """The sampler's record is the old policy's."""
    return replace(streams, behaviour_BT=streams.old_BT)


def _at_the_reference(streams: Streams) -> Streams:
    return replace(streams, reference_BT=streams.logp_BT)


def _ungated(streams: Streams) -> Streams:
    return replace(streams, gate_BT=None)


def _one_token(streams: Streams) -> Streams:
    """Only the first trained token of each row stays trained."""
    first_BT = streams.mask_BT & (streams.mask_BT.long().cumsum(-1) == 1)
    return replace(streams, mask_BT=first_BT)


def _sentences(streams: Streams, tokens: int) -> Streams:
    """0: the whole row is one sentence; 1: every token is one."""
    index_BT = torch.arange(streams.mask_BT.shape[1]).expand(streams.mask_BT.shape)
    return replace(streams, sentence_BT=index_BT * tokens)


def _with(setting: Objective, **changes: Any) -> Objective:
    """Changed axes without the checks for sense: a limit is often where a setting stops making sense."""
    return setting.model_copy(update=changes)


def _limit(setting: Objective, **changes: Any) -> Objective:
    return _with(setting, limit=setting.limit.model_copy(update=changes))
