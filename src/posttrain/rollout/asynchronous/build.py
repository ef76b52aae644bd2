"""Puts an asynchronous stage together: jobs, samplers with their proof of delivery, and who moves them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

from torch import nn

from posttrain.core.tasks import Message
from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.delivery import Delivery
from posttrain.engine.types import Completion, Receiver, Request
from posttrain.render.renderer import ChatRenderer
from posttrain.rollout.asynchronous.flow import Flow, Line
from posttrain.rollout.asynchronous.jobs import Source
from posttrain.rollout.asynchronous.live import Live
from posttrain.rollout.asynchronous.ray_workers import ray_receiver
from posttrain.rollout.asynchronous.remote import Make, process_receiver
from posttrain.rollout.asynchronous.schedule import Replayer
from posttrain.rollout.asynchronous.settings import Async
from posttrain.rollout.asynchronous.workers import Crew, Driver

Canary = tuple[Sequence[int], Sequence[int]]


class ProvenHand:
    """A Receiver that draws with nothing but weights that were proven to have arrived. Example: ProvenHand(CopySampler(...), canary)"""

    def __init__(self, receiver: Receiver, canary: Canary):
        self._receiver, self._canary = receiver, canary
        self._delivery: Delivery | None = None

    def deliver(self, weights: nn.Module, version: int) -> None:
        """Send the weights of a module that nobody changes any more. Raises NotDelivered when they did not arrive."""
        if self._delivery is None:
            self._delivery = Delivery(weights, self._receiver, self._canary)
        self._delivery.model = weights
        self._delivery.send(version)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See Sampler."""
        assert self._delivery is not None, "weights are delivered before the first chunk"
        return self._delivery.generate(requests)

    def close(self) -> None:
        """End the process or actor behind it, if there is one."""
        close = getattr(self._receiver, "close", None)
        if close is not None:
            close()


def build_live(settings: Async, source: Source, ahead: int, steps: int, make: Make, script: Sequence[Line] = ()) -> Live:
    """The rollouts of a stage: drawn by workers, or as the schedule `script` says.

    `make` makes one sampler with weights of its own; it must be picklable unless the engine is threads.
    """
    flow = Flow(source, settings, ahead)
    canary = canary_of(source.collector.renderer)
    driver: Driver
    if script:
        driver = Replayer(flow, script, lambda: ProvenHand(make(), canary))
    else:
        place = {"threads": lambda one: one(), "processes": process_receiver, "ray": ray_receiver}[settings.engine]
        driver = Crew(flow, [ProvenHand(place(make), canary) for _ in range(settings.workers)])
    return Live(flow, driver, steps)


def sampler_of(model: nn.Module, renderer: ChatRenderer) -> Make:
    """Makes samplers for models of this shape, in this process or, pickled, in another."""
    return partial(CopySampler, model, renderer.stop_ids, renderer.special_ids)


def canary_of(renderer: ChatRenderer) -> Canary:
    """A fixed prompt and continuation, in the model's own tokens."""
    prompt = renderer.prompt((Message("user", "Name three birds."),)).ids
    return prompt, tuple(renderer.tokenizer.encode("A canary, a wren and an owl.", add_special_tokens=False))


def frozen_copy(model: nn.Module) -> nn.Module:
    """The model as it is now, for workers to read while the trainer goes on: trainable tensors are copied, frozen ones shared."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})
