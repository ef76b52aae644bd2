"""Rollouts with 8-bit integer products: one scale per output channel of a weight, one per token of what is multiplied with it.

    W[o, :] ~ Q[o, :] * w[o]     w[o] = max |W[o, :]| / 127, fixed when the weights are read
    x[n, :] ~ P[n, :] * a[n]     a[n] = max |x[n, :]| / 127, computed anew for every token
    y[n, o] = (sum over i of P[n, i] Q[o, i], exact in int32) * a[n] * w[o] + b[o]

It changes the numbers, so it is lossy, and may sample for training only once its gates have passed (checks/acceleration.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posttrain.engine.decoder import Decoder, GenericDecoder, LlamaDecoder
from posttrain.engine.fused import Block, Fused, Norm, backbone, fuse, fusible
from posttrain.engine.local import LocalSampler
from posttrain.engine.prefix_cache import PrefixCache
from posttrain.models.lora import is_lora, merged

LEVELS = 127
"""Largest integer on both sides of 0: a symmetric range needs no offset."""
_LEAST = 1e-30
"""Scale of a row of zeros: any positive number does, its integers are 0."""
QUANTISATION = "int8 weights per output channel, int8 activations per token"


class Int8Dense(NamedTuple):
    """A linear layer whose product is one of 8-bit integers.

    Example, one token (127, 64) on the weight (1, -0.5): w = 1/127, Q = (127, -64) since -63.5 rounds to the even -64; a = 1,
    P = (127, 64); the integer product is 127 * 127 - 64 * 64 = 12033, and y = 12033 / 127 = 94.748 where the exact product is 95.
    """

    weight_q_OI: Tensor
    scale_O: Tensor
    bias_O: Tensor | None
    product: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> Int8Dense:
        """From a weight [out, in]."""
        kernel = weight.shape[1] > 1 and weight.device.type == "cpu"
        product = integer_product() if kernel else float_product
        return cls(*quantised(weight.detach()), None if bias is None else bias.detach(), product)

    def __call__(self, x_NI: Tensor) -> Tensor:
        q_NI, scale_N = quantised(x_NI)
        y_NO = self.product(q_NI, self.weight_q_OI).mul_(scale_N[:, None]).mul_(self.scale_O)
        return (y_NO if self.bias_O is None else y_NO.add_(self.bias_O)).to(x_NI.dtype)

    def onto(self, residual_NO: Tensor, x_NI: Tensor) -> Tensor:
        """residual + layer(x)."""
        return self(x_NI).add_(residual_NO)


class Int8Linear(nn.Module):
    """`Int8Dense` in place of a linear layer of a model."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.dense = Int8Dense.of(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O], in the precision of x."""
        return self.dense(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


def quantised(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in [-127, 127] and the scale of each row; halves round to even. A row with a NaN or an infinity has one as its scale.

    >>> quantised(torch.tensor([[254.0, -127.0]]))
    (tensor([[127, -64]], dtype=torch.int8), tensor([2.]))
    """
    x_NI = x_NI.float()
    scale_N = x_NI.abs().amax(-1).div_(LEVELS).clamp_(min=_LEAST)
    return (x_NI / scale_N[:, None]).round_().to(torch.int8), scale_N


def float_product(q_NI: Tensor, weight_q_OI: Tensor) -> Tensor:
    """The integer product simulated in float32: exact up to 1040 inputs (127 * 127 * 1040 < 2**24), rounded beyond, and no faster than
    float32 weights."""
    return q_NI.float() @ weight_q_OI.float().T


def int32_product(q_NI: Tensor, weight_q_OI: Tensor) -> Tensor:
    """The integer product through the library's 8-bit kernel, as float32."""
    return torch._int_mm(q_NI, weight_q_OI.T).float()  # type: ignore[attr-defined]


@cache
def integer_product() -> Callable[[Tensor, Tensor], Tensor]:
    """The 8-bit kernel where it is right on this machine, else its simulation.

    Some processors add pairs of products in 16 bits, which saturate; whether the library's kernel avoids that is asked once, at the
    largest values, rather than assumed. (A width of 1 gives garbage in torch 2.13; `Int8Dense` does not ask it for that.)
    """
    for sign in (1, -1):
        q_NI = torch.full((3, 64), LEVELS * sign, dtype=torch.int8)
        weight_q_OI = torch.full((5, 64), LEVELS, dtype=torch.int8)
        try:
            found = int32_product(q_NI, weight_q_OI)
        except RuntimeError:  # a build without the kernel says NotImplementedError, which is one
            return float_product
        if not bool((found == float(sign * LEVELS * LEVELS * 64)).all()):
            return float_product
    return int32_product


def product_name() -> str:
    """Which product `Int8Linear` uses on the CPU, for the key under which a measurement is recorded."""
    return integer_product().__name__


def quantise(model: nn.Module, *, head: bool = False) -> nn.Module:
    """A model that computes with int8 linear layers; `model` stays as it is. Everything else (embeddings, norms) is shared, not copied.

    Args:
        model: adapters are merged first: what is quantised is what the trainer's forward multiplies with.
        head: whether the output head is quantised too. Its rounding goes straight into every logit, so it is left alone by default.
    """
    plain = _plain(model)
    kept = set() if head else {id(plain.get_output_embeddings())}  # type: ignore[operator]
    return replaced(plain, lambda module: Int8Linear(module) if type(module) is nn.Linear and id(module) not in kept else None)


def replaced(module: nn.Module, swap: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """A second tree of modules over the same tensors, in which `swap` gave some modules a successor (None keeps the module)."""
    successor = swap(module)
    if successor is not None:
        return successor
    if not module._modules:
        return module
    twin = copy.copy(module)
    twin._modules = {name: child if child is None else replaced(child, swap) for name, child in module._modules.items()}
    return twin


def _plain(model: nn.Module) -> nn.Module:
    return merged(copy.deepcopy(model)) if is_lora(model) else model


def quantise_fused(model: nn.Module, *, head: bool = False) -> Fused:
    """What `quantise` computes, in the form that decodes fastest: the same integers, with one quantisation per set of matrices that read
    the same input.

    The weight of a norm is not multiplied into the matrix behind it, as `fuse` does: the columns of a matrix share one scale, which that
    would make coarser for the small ones.
    """
    plain = _plain(model)
    blocks: list[Any] = list(backbone(plain).layers)  # type: ignore[arg-type]
    norms = {id(norm): norm for block in blocks for norm in (block.input_layernorm, block.post_attention_layernorm)}
    bare = fuse(replaced(plain, lambda module: _without_weight(norms[id(module)]) if id(module) in norms else None))
    fused = tuple(_int8_block(ready, block) for ready, block in zip(bare.blocks, blocks, strict=True))
    last: Any = Int8Dense.of(*bare.head) if head else bare.head
    return replace(bare, blocks=fused, head=last)


def _without_weight(norm: Any) -> nn.Module:
    twin = copy.copy(norm)
    twin._parameters = {"weight": nn.Parameter(torch.ones_like(norm.weight), requires_grad=False)}
    return twin


def _int8_block(ready: Block, block: Any) -> Block:
    """A fused block with int8 products and its norms' weights."""
    dense: dict[str, Any] = {name: Int8Dense.of(*getattr(ready, name)) for name in ("qkv", "out", "gate_up", "down")}
    norms = {"before_attention": block.input_layernorm, "before_mlp": block.post_attention_layernorm}
    return ready._replace(**dense, **{name: Norm(norm.weight.detach(), norm.variance_epsilon) for name, norm in norms.items()})


class Int8Sampler(LocalSampler):
    """Samples from the int8 copy of `model`, which is made from the live weights in every call, so that it cannot be a step behind.

    The log-probabilities of its completions are those of the int8 model: it is what the tokens were drawn from.
    """

    def decoder(self) -> Decoder:
        """A decoder of the weights as they are now."""
        if fusible(self.model):
            return LlamaDecoder(quantise_fused(self.model), PrefixCache(0))
        return GenericDecoder(quantise(self.model))
