"""Preflight of the seam between sampler and trainer: they agree before a step, and again after it, on a policy that has moved.

A sampler that keeps older weights answers without an error, and the reward never moves. So the sampler draws, the trainer says how likely
those tokens are to it, and after a step both are asked again. Sources: spec/faults.md 30-37; P1, P12 of the catalog.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.core.verdicts import Check
from posttrain.engine.delivery import Delivery, Limits, NotDelivered, Receipt
from posttrain.engine.scoring import score, shares_prompts
from posttrain.engine.types import Completion, Receiver, Request, Sampler
from posttrain.rollout.pack import Packing, pack

REMEDY = "deliver the weights after every step, drop older caches, and give both sides one temperature, top-p and top-k"


@dataclass(frozen=True, slots=True)
class Side:
    """What the sampler drew after some prompts, and what the trainer says of it.

    Example: Side(completions, gap=2e-6): on no drawn token do the two differ by more than 2e-6 nats
    """

    completions: tuple[Completion, ...]
    said: tuple[float, ...]
    """The trainer's log-probabilities of all drawn tokens."""
    gap: float
    tokens: int


def side(sampler: Sampler, model: nn.Module, prompts: Sequence[Tokens], sampling: Sampling, seed: int) -> Side:
    """Draw once per prompt, and score what was drawn."""
    requests = [Request(prompt.ids, sampling, seed + place) for place, prompt in enumerate(prompts)]
    completions = tuple(sampler.generate(requests))
    said = scored(model, prompts, completions, sampling)
    drawn = [logp for completion in completions for logp in completion.logps]
    return Side(completions, said, gap_of(drawn, said), len(drawn))


def scored(model: nn.Module, prompts: Sequence[Tokens], completions: Sequence[Completion], sampling: Sampling) -> tuple[float, ...]:
    """The trainer's log-probabilities of what was drawn, by the pass that a training step makes."""
    samples = [
        Sample(prompt, Tokens(done.ids, (Owner.SAMPLED,) * len(done.ids)), str(place), logps=done.logps, candidates=done.candidates)
        for place, (prompt, done) in enumerate(zip(prompts, completions, strict=True))
    ]
    found: dict[int, list[float]] = {}
    for batch in pack(samples, Packing(), share_prompts=shares_prompts(model)):
        logp_BT = score(model, batch, sampling).logp_BT.detach()
        for b, place in enumerate(batch.sample_B):
            found[place] = logp_BT[b, : len(samples[place].tokens)].tolist()
    return tuple(value for place in range(len(samples)) for value in found[place])


def gap_of(some: Sequence[float], others: Sequence[float]) -> float:
    """Largest difference of two lists of numbers; infinite when one of them is no number."""
    gaps = [abs(a - b) for a, b in zip(some, others, strict=True)]
    return max((gap if math.isfinite(gap) else math.inf for gap in gaps), default=0.0)


def agreement_check(before: Side, limits: Limits) -> Check:
    """Sampler and trainer agree on what was drawn before any step."""
    detail = f"sampler and trainer differ by {before.gap:.2g} nats at most on {before.tokens} drawn tokens"
    return Check("agreement", before.gap <= limits.agree, _finite(before.gap), limits.agree, detail, REMEDY, ("S70", "P12"))


def sync_check(before: Side, after: Side, moved: float, limits: Limits) -> Check:
    """After a step they agree again, on a policy that has moved.

    Args:
        moved: largest change of the trainer's log-probabilities of the tokens drawn before the step.
    """
    detail = (
        f"the step moved the trainer by {moved:.2g} nats; after it sampler and trainer differ by {after.gap:.2g} on {after.tokens} tokens "
        f"(before {before.gap:.2g})"
    )
    passed: bool | None = after.gap <= limits.agree
    if passed and not moved > 3 * limits.noise:
        passed, detail = None, f"{detail}: too small a step to tell a sampler with old weights from one with new"
    return Check("sync", passed, _finite(after.gap), limits.agree, detail, REMEDY, ("P12", "P1"))


def delivery_check(receipts: Sequence[Receipt], error: NotDelivered | None) -> Check:
    """A sampler with weights of its own took two deliveries, and proved both."""
    remedy = "see what the error says that the sampler holds"
    if error is not None:
        return Check("delivery", False, len(receipts), 2, str(error), remedy, ("P12", "P1"))
    last = receipts[-1]
    detail = (
        f"{len(receipts)} deliveries of {last.tensors} tensors proven by digest; canary: differs by {last.gap or 0:.2g}, moved by "
        f"{last.receiver_moved or 0:.2g} nats in the sampler and {last.moved or 0:.2g} in the trainer"
    )
    return Check("delivery", True, len(receipts), 2, detail, remedy, ("P12", "P1"))


class Courier:
    """Delivers the weights of a model to a sampler's copy before and after a step, and remembers how that went."""

    def __init__(self, model: nn.Module, receiver: Receiver, canary: tuple[Sequence[int], Sequence[int]], limits: Limits):
        self._delivery = Delivery(model, receiver, canary, limits=limits)
        self.receipts: list[Receipt] = []
        self.error: NotDelivered | None = None

    def send(self, version: int) -> None:
        """One delivery; after one that failed there is no other."""
        if self.error is not None:
            return
        try:
            self.receipts.append(self._delivery.send(version))
        except NotDelivered as error:
            self.error = error

    @property
    def check(self) -> Check:
        """What the deliveries showed."""
        return delivery_check(self.receipts, self.error)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
