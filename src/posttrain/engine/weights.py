"""The identity of a set of weights, and the tensors of the plain model behind a model in training.

Plain means: by the names and shapes that the Hugging Face model has without adapters, so that a receiver need not know how the model is
trained. A tied tensor appears once, under its first name.

    merged     model.layers.0.mlp.up_proj.weight                      W + scaling B A
    adapter    model.layers.0.mlp.up_proj.weight                      W, frozen
               model.layers.0.mlp.up_proj.lora_A.weight               A, rank x inputs
               model.layers.0.mlp.up_proj.lora_B.weight               scaling B, outputs x rank
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posttrain.core.errors import ConfigError
from posttrain.models.lora import is_lora

Form = Literal["merged", "adapter"]
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


def weights_digest(model: nn.Module) -> str:
    """16 hex digits over names, shapes and bytes of all parameters."""
    hasher = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        hasher.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        hasher.update(_bytes(parameter))
    return hasher.hexdigest()[:16]


def tensor_digest(tensor: Tensor) -> str:
    """16 hex digits over shape, type and bytes. SHA-256 is the fastest sound hash of the standard library where the CPU computes it.

    Example: equal numbers in float32 and float64 have different digests; a view and its contiguous copy have the same.
    """
    hasher = hashlib.sha256(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
    hasher.update(_bytes(tensor))
    return hasher.hexdigest()[:16]


def overall_digest(digests: Mapping[str, str]) -> str:
    """16 hex digits over names and digests, in the order of the names."""
    return hashlib.sha256("".join(f"{name}={found};" for name, found in sorted(digests.items())).encode()).hexdigest()[:16]


def model_digests(model: nn.Module, form: Form = "merged") -> dict[str, str]:
    """Digest of every tensor of the plain model."""
    return {name: tensor_digest(tensor) for name, tensor in PlainWeights(model, form).items()}


def _bytes(tensor: Tensor) -> memoryview:
    """The numbers as bytes, in memory order; not copied when they are contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class PlainWeights(Mapping[str, Tensor]):
    """The plain model's tensors by name, in order of name; adapters are added when a tensor is asked for, one at a time.

    The model is not changed. Tensors without an adapter are those of the model itself: copy what is to be kept. Pickled, it becomes a
    dict of all of them.

    Raises ConfigError when something trainable would not be delivered.
    """

    def __init__(self, model: nn.Module, form: Form = "merged", dtype: torch.dtype | None = None):
        self._dtype = dtype
        self._makers: dict[str, Callable[[], Tensor]] = {}
        self.frozen: dict[str, Tensor] = {}
        """Parameters that this training does not change, by name."""
        inner: nn.Module = model.get_base_model() if is_lora(model) else model  # type: ignore[operator]
        adapted = {name: module for name, module in inner.named_modules() if _has_adapter(module)}
        delivered = set()
        for full_name, parameter in inner.named_parameters():
            name = full_name.replace(".base_layer.", ".")
            module = name.removesuffix(".weight")
            if ".lora_" in name or ".modules_to_save." in name:
                continue
            delivered.add(full_name)
            if form == "merged" and name.endswith(".weight") and module in adapted:
                self._makers[name] = partial(_folded, parameter, adapted[module])
            else:
                self._makers[name] = partial(_as_is, parameter)
                if not parameter.requires_grad:
                    self.frozen[name] = parameter
        for name, module in adapted.items():
            delivered |= {f"{name}.{kind}.{a}.weight" for kind in ("lora_A", "lora_B") for a in _adapters_of(name, module)}
            if form == "adapter":
                self._makers[name + LORA_A] = partial(_down, module)
                self._makers[name + LORA_B] = partial(_up, module)
        for name, parameter in inner.named_parameters():
            if parameter.requires_grad and name not in delivered:
                raise ConfigError(
                    f"trainable tensor '{name}' cannot be delivered to a sampler as part of a plain model; use plain LoRA on linear layers "
                    "or train the model itself"
                )
        self._makers = dict(sorted(self._makers.items()))

    def __getitem__(self, name: str) -> Tensor:
        with torch.no_grad():
            tensor = self._makers[name]()
            return tensor if self._dtype is None else tensor.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)

    def only(self, names: frozenset[str]) -> PlainWeights:
        """The same, restricted to some names."""
        part = object.__new__(PlainWeights)
        part._dtype, part.frozen = self._dtype, {name: p for name, p in self.frozen.items() if name in names}
        part._makers = {name: make for name, make in self._makers.items() if name in names}
        return part


def fold(weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """What a receiver of adapters computes with: W + B A, with `down` A and `up` the scaled B."""
    return weight + up @ down


def _has_adapter(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def _adapters_of(name: str, module: Any) -> list[str]:
    """Active adapters of a layer, of the plain kind: W x + scaling B A x."""
    active = [a for a in module.active_adapters if a in module.lora_A]
    other = [a for a in active if a in module.lora_variant or module.lora_bias.get(a)]
    if other or module.merged or not isinstance(module.base_layer, nn.Linear) or getattr(module, "fan_in_fan_out", False):
        raise ConfigError(
            f"the adapter of '{name}' cannot be delivered: it is merged, has a bias, is a variant of LoRA, or sits on a "
            f"{type(module.base_layer).__name__}; use plain LoRA on linear layers"
        )
    return active


def _as_is(parameter: Tensor) -> Tensor:
    return parameter.detach()


def _folded(weight: Tensor, module: Any) -> Tensor:
    """The sum in the order in which peft merges, so that an exported model has the same bytes."""
    total = weight.detach().clone()
    for a in module.active_adapters:
        if a in module.lora_A:
            total += module.get_delta_weight(a)
    return total


def _down(module: Any) -> Tensor:
    return torch.cat([module.lora_A[a].weight for a in module.active_adapters if a in module.lora_A]).detach()


def _up(module: Any) -> Tensor:
    return torch.cat([module.lora_B[a].weight * module.scaling[a] for a in module.active_adapters if a in module.lora_A], dim=1).detach()


class DigestCache:
    """Digests that are computed again only when torch's counter of in-place changes says that a tensor changed.

    The fused optimizers of torch, writes through `.data` and writes from outside torch do not move that counter. So it serves only tensors
    that nobody trains, or that their owner writes with `copy_`, and only beside a canary.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[weakref.ref[Tensor], tuple[int, int], str]] = {}

    def of(self, name: str, tensor: Tensor, source: Tensor | None = None) -> str:
        """Digest of `tensor`, which is made of `source` (or is itself what is watched)."""
        watched = tensor if source is None else source
        state = (watched.data_ptr(), watched._version)
        if name in self._known:
            known, before, found = self._known[name]
            if known() is watched and before == state:  # the memory of a tensor that is gone may be used again
                return found
        found = tensor_digest(tensor)
        self._known[name] = (weakref.ref(watched), state, found)
        return found
