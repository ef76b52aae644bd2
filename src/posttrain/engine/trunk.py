"""The training forward pass of the Llama family on real tokens only: no padding, attention by trees, fewer passes over memory.

It computes what the library's modules compute, from their own parameters, to the last bits of float32: queries, keys and values in one
product, gate and up in another, norms, rotary positions and the gated unit as single steps of autograd, and of the last block only what a
trained token needs. `supports` says where it applies; everything else takes the library's forward with a mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posttrain.engine.attention import Heads, Layout, available, layout, tree_attention
from posttrain.engine.batch import Batch
from posttrain.engine.fused import FAST_FAMILIES


class Adapter(NamedTuple):
    """A low-rank addition to a linear map: scale * x A^T B^T, with A [rank, in] and B [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float


class Linear(NamedTuple):
    """What a projection holds."""

    weight: Tensor
    bias: Tensor | None
    adapter: Adapter | None


def supports(trunk: nn.Module) -> bool:
    """Whether `states` computes what this trunk's own forward does: plain or LoRA projections, no hooks, 32 or 64 bits, on a CPU."""
    config: Any = getattr(trunk, "config", None)
    if not available() or getattr(config, "model_type", None) not in FAST_FAMILIES or torch.is_autocast_enabled("cpu"):
        return False
    if getattr(config, "sliding_window", None) or config.hidden_act not in ("silu", "swish"):
        return False
    if trunk.training and getattr(config, "attention_dropout", 0.0):
        return False
    if any(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module) for module in trunk.modules()):
        return False  # sharded over processes, recomputed in the backward pass, or in bfloat16: only the modules' own calls know
    parameters = list(trunk.parameters())
    if any(type(p) not in (nn.Parameter, Tensor) or p.dtype != parameters[0].dtype or p.device.type != "cpu" for p in parameters):
        return False
    if parameters[0].dtype not in (torch.float32, torch.float64):
        return False
    blocks: list[Any] = list(trunk.layers)  # type: ignore[arg-type]
    home = f"transformers.models.{config.model_type}.modeling_{config.model_type}"
    own = [trunk.norm, trunk.rotary_emb, *(part for block in blocks for part in _library_parts(block))]
    if any(type(module).__module__ != home for module in own):
        return False  # somebody put another module in
    return all(linear(module) is not None for block in blocks for module in _projections(block))


def states(trunk: nn.Module, batch: Batch) -> Tensor:
    """States [N, H] after the last norm that predict each trained token of `batch`, in the order of `batch.target_N`."""
    plan = layout(batch)
    x_MH = trunk.embed_tokens(batch.ids_RW.flatten()[plan.slot_M])  # type: ignore[operator]
    cos, sin = trunk.rotary_emb(x_MH[None], position_ids=batch.position_RW.flatten()[plan.slot_M][None])  # type: ignore[operator]
    half = cos.shape[-1] // 2
    turn_MC = torch.complex(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
    blocks: list[Any] = list(trunk.layers)  # type: ignore[arg-type]
    for block in blocks:
        wanted_K = plan.needed_K if block is blocks[-1] and len(plan.needed_K) < len(x_MH) else None
        x_MH = _block(block, x_MH, turn_MC, plan, wanted_K)
    states_KH = _norm(trunk.norm, x_MH)
    return states_KH if plan.ordered else states_KH[plan.source_N]


def _block(block: Any, x_MH: Tensor, turn_MC: Tensor, plan: Layout, wanted_K: Tensor | None) -> Tensor:
    """One block; of its output only the rows `wanted_K`, when given."""
    attention, mlp = block.self_attn, block.mlp
    size = 2 * turn_MC.shape[-1]
    mixed_MH = tree_attention(_joint(attention, _norm(block.input_layernorm, x_MH), size), turn_MC, plan.families, _heads(attention, size))
    if wanted_K is not None:
        mixed_MH, x_MH = _Rows.apply(mixed_MH, wanted_K), _Rows.apply(x_MH, wanted_K)
    x_MH = x_MH + _apply(attention.o_proj, mixed_MH)
    both = _Joint.of([mlp.gate_proj, mlp.up_proj], _norm(block.post_attention_layernorm, x_MH))
    return x_MH + _apply(mlp.down_proj, _Gated.apply(both))


def _heads(attention: Any, size: int) -> Heads:
    width = [_weight(getattr(attention, name)).shape[0] // size for name in ("q_proj", "k_proj")]
    return Heads(width[0], width[1], size, float(attention.scaling))


def _joint(attention: Any, h_MH: Tensor, size: int) -> Tensor:
    """Queries, keys and values side by side, the rotated pairs of queries and keys next to each other."""
    joint_MJ = _Joint.of([attention.q_proj, attention.k_proj, attention.v_proj], h_MH, paired=(size, size, 0))
    if not hasattr(attention, "q_norm"):
        return joint_MJ
    widths = [_weight(getattr(attention, name)).shape[0] for name in ("q_proj", "k_proj", "v_proj")]
    q, k, v = joint_MJ.split(widths, -1)
    q, k = (_rms(x.unflatten(-1, (-1, size)), _side_by_side(norm.weight, size), norm.variance_epsilon).flatten(1)
            for x, norm in ((q, attention.q_norm), (k, attention.k_norm)))  # fmt: skip
    return torch.cat((q, k, v), -1)


def _side_by_side(rows: Tensor, size: int) -> Tensor:
    """Rows of a projection, head by head, in the order (0, size/2, 1, size/2 + 1, ...)."""
    return rows.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)


# --- linear maps ---


def _library_parts(block: Any) -> list[nn.Module]:
    attention = block.self_attn
    norms = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return [block, attention, block.mlp, block.input_layernorm, block.post_attention_layernorm, *norms]


def _projections(block: Any) -> list[nn.Module]:
    attention, mlp = block.self_attn, block.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def linear(module: Any) -> Linear | None:
    """What a projection computes with; None when it is neither a plain linear layer nor one with a single plain LoRA adapter."""
    if type(module) is nn.Linear:
        return Linear(module.weight, module.bias, None)
    base = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(module, "lora_A") or module.merged:
        return None
    if module.disable_adapters:
        return Linear(base.weight, base.bias, None)
    names = [name for name in module.active_adapters if name in module.lora_A]
    if not names:
        return Linear(base.weight, base.bias, None)
    if len(names) > 1 or getattr(module, "lora_variant", {}) or getattr(module, "use_dora", {}).get(names[0]):
        return None
    name = names[0]
    a, b = module.lora_A[name], module.lora_B[name]
    dropout = module.lora_dropout[name] if name in module.lora_dropout else None
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None or b.bias is not None:
        return None
    if isinstance(dropout, nn.Dropout) and dropout.training and dropout.p:
        return None
    return Linear(base.weight, base.bias, Adapter(a.weight, b.weight, float(module.scaling[name])))


def _weight(module: Any) -> Tensor:
    return module.weight if type(module) is nn.Linear else module.base_layer.weight


def _apply(module: Any, x_MH: Tensor) -> Tensor:
    return _Joint.of([module], x_MH)


class _Joint(torch.autograd.Function):
    """Several linear maps of one input, their outputs side by side: one product, and one per adapter for what it adds."""

    @classmethod
    def of(cls, modules: list[Any], x_MH: Tensor, paired: tuple[int, ...] | None = None) -> Tensor:
        """`paired` gives for each module the size of heads whose halves are to stand side by side, or 0."""
        parts = [linear(module) for module in modules]
        sizes = paired or (0,) * len(parts)
        assert all(part is not None for part in parts)
        laid = [_laid_out(part, size) for part, size in zip(parts, sizes, strict=True)]  # type: ignore[arg-type]
        weight = laid[0].weight if len(laid) == 1 else torch.cat([part.weight for part in laid])
        bias = None if laid[0].bias is None else torch.cat([part.bias for part in laid])  # type: ignore[misc]
        if all(part.adapter is None for part in laid):
            return F.linear(x_MH, weight, bias)
        spans, at = [], 0
        for part in laid:
            spans.append((at, at + len(part.weight)))
            at += len(part.weight)
        adapted = [(span, part.adapter) for span, part in zip(spans, laid, strict=True) if part.adapter is not None]
        where = tuple((span, adapter.scale) for span, adapter in adapted)
        return cls.apply(x_MH, weight, bias, where, *(matrix for _, adapter in adapted for matrix in (adapter.a, adapter.b)))

    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, weight: Tensor, bias: Tensor | None, where: Any, *adapters: Tensor) -> Tensor:
        out = F.linear(x_MH, weight, bias)
        low_MR = x_MH @ torch.cat(adapters[::2]).T
        parts = low_MR.split([len(a) for a in adapters[::2]], -1)
        for (span, scale), low, b in zip(where, parts, adapters[1::2], strict=True):
            out[:, slice(*span)].addmm_(low, b.T, alpha=scale)
        ctx.save_for_backward(x_MH, weight, low_MR, *adapters)
        ctx.where, ctx.has_bias = where, bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MH, weight, low_MR, *adapters = ctx.saved_tensors
        by_out = grads[0]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        by_low_MR = torch.empty_like(low_MR)
        by_b: list[Tensor] = []
        at = 0
        for (span, scale), b in zip(ctx.where, adapters[1::2], strict=True):
            own = by_out[:, slice(*span)]
            place = slice(at, at + b.shape[1])
            by_low_MR[:, place] = (own @ b).mul_(scale)
            by_b.append((own.T @ low_MR[:, place]).mul_(scale))
            at = place.stop
        by_a = (by_low_MR.T @ x_MH).split([len(a) for a in adapters[::2]])
        by_x = None
        if needs_x:
            by_x = (by_out @ weight).addmm_(by_low_MR, torch.cat(adapters[::2]))
        by_adapters = [gradient for pair in zip(by_a, by_b, strict=True) for gradient in pair]
        return (
            by_x,
            by_out.T @ x_MH if needs_weight else None,
            by_out.sum(0) if needs_bias and ctx.has_bias else None,
            None,
            *by_adapters,
        )


def _laid_out(part: Linear, size: int) -> Linear:
    """The same map with the halves of every head of `size` numbers side by side; 0 leaves it as it is."""
    if not size:
        return part
    bias = None if part.bias is None else _side_by_side(part.bias, size)
    adapter = part.adapter and Adapter(part.adapter.a, _side_by_side(part.adapter.b, size), part.adapter.scale)
    return Linear(_side_by_side(part.weight, size), bias, adapter)


# --- single steps of autograd ---


def _norm(module: Any, x: Tensor) -> Tensor:
    return _rms(x, module.weight, module.variance_epsilon)


def _rms(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return _RootMeanSquare.apply(x, weight_H, eps)


class _RootMeanSquare(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit = x * inverse
        ctx.save_for_backward(unit, weight_H, inverse)
        return unit * weight_H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        unit, weight_H, inverse = ctx.saved_tensors
        by_out = grads[0]
        product = by_out * unit
        by_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = (product @ weight_H[:, None]).div_(-unit.shape[-1])
        return (by_out * weight_H).addcmul_(unit, mean).mul_(inverse), by_weight, None


class _Gated(torch.autograd.Function):
    """silu(gate) * up of [M, 2 I], the gate first."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        active = F.silu(gate)
        ctx.save_for_backward(both, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        both, active = ctx.saved_tensors
        gate, up = both.chunk(2, -1)
        by_both = torch.empty_like(both)
        by_gate, by_up = by_both.chunk(2, -1)
        torch.mul(grads[0], active, out=by_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=by_gate)
        return by_both


class _Rows(torch.autograd.Function):
    """Distinct rows of a matrix."""

    @staticmethod
    def forward(ctx: Any, x_MH: Tensor, rows_K: Tensor) -> Tensor:
        ctx.save_for_backward(rows_K)
        ctx.size = len(x_MH)
        return x_MH[rows_K]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (rows_K,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size, grads[0].shape[1]).index_copy_(0, rows_K, grads[0]), None
