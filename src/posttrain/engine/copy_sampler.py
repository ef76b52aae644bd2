"""A sampler with a copy of the model, for workers that draw while the trainer changes its own: asynchronous threads, other processes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.engine.delivery import NotDelivered, model_logps
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Completion, Request
from posttrain.engine.weights import LORA_A, LORA_B, DigestCache, fold
from posttrain.models.lora import merged

NOTHING = -1
"""Version before anything was received."""


class CopySampler:
    """A Receiver in this process. Calls from several threads wait for each other, so weights change between two calls of `generate`.

    Args:
        model: copied at once, adapters folded in; the copy draws nothing until weights were received.
        stop_ids: as LocalSampler takes them, like `control_ids` and `options`.
    """

    def __init__(self, model: nn.Module, stop_ids: frozenset[int], control_ids: frozenset[int], **options: Any):
        self.model = merged(copy.deepcopy(model)).eval().requires_grad_(False)
        self.version = NOTHING
        self._sampler = LocalSampler(self.model, stop_ids, control_ids, **options)
        self._parameters = dict(self.model.named_parameters())
        self._base: dict[str, Tensor] = {}
        self._adapters: dict[str, Tensor] = {}
        self._digests = DigestCache()
        self._lock = threading.RLock()

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """As LocalSampler does; raises NotDelivered before anything was received, and after a delivery that broke off."""
        with self._lock:
            if self.version == NOTHING:
                raise NotDelivered(
                    "the sampler's copy of the model has received no weights; deliver them before drawing, also after a resume"
                )
            return self._sampler.generate(requests, progress)

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy the tensors in, adapters to their layers. LocalSampler sees the change and drops what older ones computed."""
        with self._lock, torch.no_grad():
            self._check(list(weights))
            self.version = NOTHING  # half of a delivery is none
            if self._parameters.keys() <= weights.keys() and not any(_is_adapter(name) for name in weights):
                self._base, self._adapters = {}, {}  # a whole plain model
            for name, tensor in weights.items():
                self._store(name, tensor)
            for name, base in self._base.items():
                module = name.removesuffix(".weight")
                self._parameters[name].copy_(fold(base, self._adapters[module + LORA_A], self._adapters[module + LORA_B]))
            self._sampler.version = self.version = version

    def digests(self) -> dict[str, str]:
        """Of the tensors it holds; of a layer with adapters the three parts that its weight was made of."""
        with self._lock:
            held = {**self._parameters, **self._base, **self._adapters}
            return {name: self._digests.of(name, tensor) for name, tensor in held.items()}

    def logps(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """By the forward pass of the copy."""
        with self._lock:
            return model_logps(self.model, prompt, ids)

    def _check(self, names: Sequence[str]) -> None:
        parts = {name for name in names if _is_adapter(name)} | self._adapters.keys()
        half = [name for name in parts if not {_layer(name) + LORA_A, _layer(name) + LORA_B} <= parts]
        unknown = [name for name in names if (f"{_layer(name)}.weight" if _is_adapter(name) else name) not in self._parameters]
        if unknown or half:
            raise NotDelivered(
                f"the sampler's model has no place for '{(unknown or half)[0]}' ({len(unknown)} unknown names, {len(half)} halves of an "
                "adapter); send tensors by the names of the plain model"
            )

    def _store(self, name: str, tensor: Tensor) -> None:
        """Into the parameter; of an adapted layer beside it, since its parameter holds the sum."""
        if _is_adapter(name):
            weight = f"{_layer(name)}.weight"
            if weight not in self._base:
                self._base[weight] = self._parameters[weight].clone()
            place = self._adapters.get(name)
            if place is None or place.shape != tensor.shape:
                place = self._adapters[name] = torch.empty_like(tensor, device=self._base[weight].device)
        else:
            place = self._base.get(name, self._parameters[name])
        if place.shape != tensor.shape:
            raise NotDelivered(
                f"'{name}' arrived as {tuple(tensor.shape)} and the sampler's model has {tuple(place.shape)}; send the same model"
            )
        place.copy_(tensor)


def _is_adapter(name: str) -> bool:
    return name.endswith((LORA_A, LORA_B))


def _layer(name: str) -> str:
    return name.removesuffix(LORA_A).removesuffix(LORA_B)
