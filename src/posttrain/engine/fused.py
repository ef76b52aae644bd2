"""A Llama-shaped model's weights in the form that decoding reads fastest, copied once per version of the weights.

A decode step of a small model is many tiny operations, so their number is what costs. Here queries, keys and values are one matrix and
gate and up another; the weight of a norm is multiplied into the matrix that follows it; adapters are added into the matrices they adapt;
and the rows of every query and key head are reordered so that the two numbers which a rotary position turns lie side by side, which makes
the rotation one complex product. Scores between queries and keys do not see that order. On a CPU matrices lie with their inputs outermost.

`Watch` says when the copies are stale.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAST_FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral"})
STATIC_ROTARY = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angle is position times a constant; the others depend on the length of the sequence."""
EXACT = (torch.float32, torch.float64)
"""Where multiplying weights together costs no accuracy that matters. In 16 bits it does: norms stay apart, adapted models are not fused."""
PROBES = 16
"""Values of each tensor that `Watch` compares."""


def config_of(model: nn.Module) -> Any:
    """The Hugging Face config of a model, whatever class it has."""
    return model.config


def backbone(model: nn.Module) -> nn.Module:
    """The module with `embed_tokens`, `layers` and `norm`, through any adapter wrapper."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return inner.model  # type: ignore[return-value]


class Dense(NamedTuple):
    """One linear layer: weight [out, in] and an optional bias [out]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def onto(self, residual_NH: Tensor, x_NI: Tensor) -> Tensor:
        """residual + layer(x), in one pass over the result where there is no bias."""
        if self.bias is None:
            return torch.addmm(residual_NH, x_NI, self.weight.t())
        return residual_NH + F.linear(x_NI, self.weight, self.bias)

    def laid_out(self) -> Dense:
        """The same layer with its weight in the order in which a CPU multiplies few rows fastest: inputs outermost."""
        return Dense(self.weight.t().contiguous().t(), self.bias) if self.weight.device.type == "cpu" else self


class Norm(NamedTuple):
    """Root-mean-square norm over the last axis, in at least float32; `weight` is None where the next matrix already holds it."""

    weight: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        wide = x if x.dtype in EXACT else x.float()
        normed = (wide * (wide * wide).mean(-1, keepdim=True).add_(self.eps).rsqrt_()).to(x.dtype)
        return normed if self.weight is None else self.weight * normed


class Block(NamedTuple):
    """One layer of the decoder."""

    before_attention: Norm
    qkv: Dense
    """To [query heads | key heads | value heads], each `head_dim` wide."""
    head_norms: Norm | None
    """Of every query and key head (Qwen3), weights [query + key heads, head_dim]."""
    out: Dense
    before_mlp: Norm
    gate_up: Dense
    act: Callable[[Tensor], Tensor]
    down: Dense

    def mlp_onto(self, x_NH: Tensor) -> Tensor:
        """x + mlp(norm(x))."""
        both = self.gate_up(self.before_mlp(x_NH))
        gate, up = both.chunk(2, dim=-1)
        return self.down.onto(x_NH, self.act(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class Fused:
    """The prepared weights of one model."""

    embed_VH: Tensor
    blocks: tuple[Block, ...]
    norm: Norm
    head: Dense
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    """What scores are multiplied by before the softmax."""
    frequency_F: Tensor
    """Angle per position of each of the head_dim / 2 rotated pairs."""
    magnitude: float
    """What a rotation multiplies lengths by (YaRN); else 1."""

    def turns(self, position_N: Tensor) -> Tensor:
        """Unit complex numbers [N, 1, head_dim / 2] that rotate the pairs of a head to their positions."""
        angle_NF = position_N[:, None].float() * self.frequency_F
        wide = torch.float64 if self.embed_VH.dtype == torch.float64 else torch.float32
        return torch.complex((angle_NF.cos() * self.magnitude).to(wide), (angle_NF.sin() * self.magnitude).to(wide))[:, None]

    def project(self, block: Block, x_NH: Tensor, turns_N1F: Tensor) -> Tensor:
        """Queries, keys and values [N, (heads + 2 kv_heads) head_dim] of flat tokens, positions applied."""
        qkv = block.qkv(block.before_attention(x_NH))
        rotated = self.heads + self.kv_heads
        qk = qkv[:, : rotated * self.head_dim].view(len(qkv), rotated, self.head_dim)
        if block.head_norms is None and qkv.dtype in EXACT:
            torch.view_as_complex(qk.view(len(qkv), rotated, -1, 2)).mul_(turns_N1F)
            return qkv
        turned = qk if block.head_norms is None else block.head_norms(qk)
        wide = turned if turned.dtype in EXACT else turned.float()
        pairs = torch.view_as_complex(wide.reshape(len(qkv), rotated, -1, 2)) * turns_N1F
        qk.copy_(torch.view_as_real(pairs).flatten(-2))
        return qkv


def fusible(model: nn.Module) -> bool:
    """Whether `fuse` can represent this model exactly: the Llama shape, plain or low-rank adapted linear layers, full attention."""
    config = config_of(model)
    if config.model_type not in FAST_FAMILIES or getattr(config, "sliding_window", None):
        return False
    trunk, head = backbone(model), model.get_output_embeddings()  # type: ignore[operator]
    rotary = trunk.rotary_emb
    known = type(trunk.embed_tokens) is nn.Embedding and rotary.rope_type in STATIC_ROTARY  # type: ignore[union-attr]
    linears = [head, *(layer for block in trunk.layers for layer in _linears(block))]  # type: ignore[union-attr]
    return known and all(_plain(layer) or _adapted(layer) for layer in linears)


def fuse(model: nn.Module) -> Fused:
    """Copy the weights of a `fusible` model; the embedding is shared with it."""
    config, trunk = config_of(model), backbone(model)
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pairs_D = torch.arange(head_dim).view(2, -1).t().flatten()
    with torch.no_grad():
        blocks = tuple(_block(block, head_dim, pairs_D) for block in trunk.layers)  # type: ignore[union-attr]
        return Fused(
            trunk.embed_tokens.weight.detach(),  # type: ignore[union-attr]
            blocks,
            _norm(trunk.norm),  # type: ignore[arg-type]
            _dense(model.get_output_embeddings()).laid_out(),  # type: ignore[operator]
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            trunk.layers[0].self_attn.scaling,  # type: ignore[index, union-attr]
            trunk.rotary_emb.inv_freq.float().to(trunk.embed_tokens.weight.device),  # type: ignore[union-attr]
            float(trunk.rotary_emb.attention_scaling),  # type: ignore[union-attr]
        )


def _block(block: Any, head_dim: int, pairs_D: Tensor) -> Block:
    attention, mlp = block.self_attn, block.mlp
    q, k, v = (_dense(layer) for layer in (attention.q_proj, attention.k_proj, attention.v_proj))
    before_attention, before_mlp = _norm(block.input_layernorm), _norm(block.post_attention_layernorm)
    qkv = _stack(before_attention, _reorder(q, head_dim, pairs_D), _reorder(k, head_dim, pairs_D), v)
    gate_up = _stack(before_mlp, _dense(mlp.gate_proj), _dense(mlp.up_proj))
    return Block(
        _bare(before_attention),
        qkv.laid_out(),
        _head_norms(attention, head_dim, pairs_D) if hasattr(attention, "q_norm") else None,
        _dense(attention.o_proj).laid_out(),
        _bare(before_mlp),
        gate_up.laid_out(),
        mlp.act_fn,
        _dense(mlp.down_proj).laid_out(),
    )


def _linears(block: Any) -> list[nn.Module]:
    attention, mlp = block.self_attn, block.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear


def _adapted(layer: nn.Module) -> bool:
    """A linear layer with adapters that are W + scale B A and nothing else."""
    base: Any = getattr(layer, "base_layer", None)
    if base is None or not hasattr(layer, "get_delta_weight") or not _plain(base):
        return False
    return base.weight.dtype in EXACT and not getattr(layer, "lora_variant", None) and not any(getattr(layer, "lora_bias", {}).values())


def _dense(layer: Any) -> Dense:
    if _plain(layer):
        return Dense(layer.weight.detach(), None if layer.bias is None else layer.bias.detach())
    base = layer.base_layer
    weight = base.weight.detach()
    if not (layer.disable_adapters or layer.merged):
        for name in layer.active_adapters:
            if name in layer.lora_A:
                weight = weight + layer.get_delta_weight(name).detach()
    return Dense(weight, None if base.bias is None else base.bias.detach())


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight.detach(), norm.variance_epsilon)


def _bare(norm: Norm) -> Norm:
    assert norm.weight is not None
    return Norm(None, norm.eps) if norm.weight.dtype in EXACT else norm


def _stack(norm: Norm, *parts: Dense) -> Dense:
    """Layers that read the same input as one, with the weight of the norm before them multiplied in where that is exact."""
    assert norm.weight is not None
    weight = torch.cat([part.weight for part in parts])
    if norm.weight.dtype in EXACT:
        weight.mul_(norm.weight)
    biases = [weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in parts]
    return Dense(weight, None if all(part.bias is None for part in parts) else torch.cat(biases))


def _reorder(layer: Dense, head_dim: int, pairs_D: Tensor) -> Dense:
    """Rows (0, 1, ..., d-1) of every head as (0, d/2, 1, d/2 + 1, ...)."""
    order = pairs_D.to(layer.weight.device)
    weight = layer.weight.view(-1, head_dim, layer.weight.shape[1])[:, order].flatten(0, 1)
    return Dense(weight, None if layer.bias is None else layer.bias.view(-1, head_dim)[:, order].flatten())


def _head_norms(attention: Any, head_dim: int, pairs_D: Tensor) -> Norm:
    rows = [norm.weight.detach()[pairs_D.to(norm.weight.device)] for norm in (attention.q_norm, attention.k_norm)]
    counts = [layer.out_features // head_dim for layer in (attention.q_proj, attention.k_proj)]
    return Norm(torch.cat([row.expand(n, -1) for row, n in zip(rows, counts, strict=True)]), attention.q_norm.variance_epsilon)


class Watch:
    """Notices that the weights of a model are not those it saw last.

    It compares the tensors' identity, storage and write counters, the state of adapters, and, because a write through `.data` moves no
    counter, some values of every tensor. A write through `.data` to a few single values can escape it; nothing in training does that.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._tensors: list[Tensor] = []
        self._state: tuple[Any, ...] = ()
        self._values = torch.zeros(0)

    def changed(self) -> bool:
        """Whether anything changed since the last call. The first call says yes."""
        tensors = list(itertools.chain(self.model.parameters(), self.model.buffers()))
        state = (*((t.data_ptr(), _writes(t)) for t in tensors), *_adapter_state(self.model))
        values = torch.cat([_probe(t) for t in tensors])
        same = (
            len(tensors) == len(self._tensors)
            and all(new is old for new, old in zip(tensors, self._tensors, strict=True))
            and state == self._state
            and torch.equal(values, self._values)
        )
        self._tensors, self._state, self._values = tensors, state, values
        return not same


def _writes(tensor: Tensor) -> int:
    """How often a tensor was written to; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _probe(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // PROBES)][: PROBES + 1].double()


def _adapter_state(model: nn.Module) -> list[Any]:
    """What of the adapters counts: which are active, at what scale, and whether they are merged or switched off."""
    if not hasattr(model, "peft_config"):
        return []
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    return [(tuple(m.active_adapters), m.disable_adapters, m.merged, *sorted(m.scaling.items())) for m in layers]
