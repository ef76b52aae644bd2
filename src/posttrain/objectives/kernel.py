"""Log-probabilities and entropy from hidden states, with a slice of the logits alive at any time.

At a vocabulary of 150k the logits of a batch, and the copies that autograd keeps of them, need more memory than a small model. Here the
forward pass projects a slice of rows (a cut and the top K need whole rows), reduces it to the numbers that are wanted, and overwrites it
with the next one. The backward pass projects again, now a slice of the vocabulary (each row of the weight is read, and its gradient
written, once), and turns it in place into the gradient with respect to the logits:

    d log p_t / d x_v = [v = t] - p_v            d H / d x_v = -p_v (log p_v + H)

with x the logits divided by the temperature, p their softmax over the tokens that a cut leaves, t the target and H the entropy
(spec/faults.md 79). With a frozen head and no other gradient than that of log p_t, the derivative by the hidden state is one row per token
whatever the loss: the forward pass leaves it behind, and nothing is projected twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.core.sampling import Sampling
from posttrain.objectives.logprobs import Cut, Replay, TokenScores, cut_of, divisor, parts

SLICE = 2**25
"""Logits in a slice (one row or one column at least): 128 MiB in float32. At most two buffers of this size are alive."""

FLOOR = -1000.0
"""Stands for the log-probability -inf where it is multiplied by its probability: finite, and exp(-1000) is 0 in float64 too."""


def linear_scores(
    hidden_NH: Float[Tensor, "N H"],
    weight_VH: Float[Tensor, "V H"],
    targets_N: Int[Tensor, " N"],
    sampling: Sampling | Replay,
    *,
    bias_V: Float[Tensor, " V"] | None = None,
    entropy_gradient: bool = False,
    top_k: int = 0,
    at_NK: Int[Tensor, "N K"] | None = None,
) -> TokenScores:
    """`logit_scores(hidden_NH @ weight_VH.T + bias_V, ...)`, values and gradients, without ever holding [N, V].

    The projection has the precision of its operands, as in a linear layer; everything after it is float32 (float64 for float64
    operands), gradients included until they are complete. Differentiable once.

    Example: the state 1 and the weights 0 and log 3 make logits (0, log 3), probabilities 0.25 and 0.75. Target 1 has logp log 0.75; its
    gradient by the weights is (-0.25, 0.25), by the state 0.25 log 3. The entropy is 0.562.

    Args:
        hidden_NH: states that predict the targets.
        weight_VH: weight of the output head; gets a gradient when it requires one, as do hidden_NH and bias_V.
        targets_N: ids to score; they stay in the support whatever the cut of `sampling` says.
        sampling: the distribution to score under, perhaps with what the sampler's cut left.
        bias_V: bias of the output head.
        entropy_gradient: whether entropy is a term of a loss, or only measured.
        top_k: how many of the most likely tokens to return, at most V; 0 for none.
        at_NK: further ids to score, with gradient.
    """
    sampling, candidate_M2 = parts(sampling)
    head_frozen = not weight_VH.requires_grad and (bias_V is None or not bias_V.requires_grad)
    only_logp = torch.is_grad_enabled() and hidden_NH.requires_grad and not entropy_gradient and at_NK is None
    wanted = _Wanted(sampling, entropy_gradient, top_k, slope=head_frozen and only_logp)
    found = _LinearScores.apply(hidden_NH, weight_VH, bias_V, targets_N, at_NK, candidate_M2, wanted)
    logp_N, entropy_N, ids_NK, top_NK, found_NK = found
    return TokenScores(logp_N, entropy_N, (ids_NK, top_NK) if top_k else None, found_NK)


class _Wanted(NamedTuple):
    """What a call asks for, beside its tensors."""

    sampling: Sampling
    entropy_gradient: bool
    top_k: int
    slope: bool
    """Whether the forward pass leaves d log p_t / d hidden behind."""


class _LinearScores(torch.autograd.Function):
    """Outputs: logp_N, entropy_N, ids and log-probabilities of the top K, log-probabilities at given ids."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        at_NK: Tensor | None,
        candidate_M2: Tensor | None,
        wanted: _Wanted,
    ) -> tuple[Tensor | None, ...]:
        """A slice of rows at a time. What the backward pass needs of a row to know its distribution is kept: five numbers."""
        n, vocab, sampling = len(hidden_NH), len(weight_VH), wanted.sampling
        dtype = torch.float64 if hidden_NH.dtype == torch.float64 else torch.float32
        logp_N, entropy_N, peak_N, log_sum_N, edge_N = (hidden_NH.new_empty(n, dtype=dtype) for _ in range(5))
        restricted = candidate_M2 is not None or sampling.cuts
        last_N, ids_NK, top_NK = torch.empty_like(targets_N), targets_N.new_empty(n, wanted.top_k), logp_N.new_empty(n, wanted.top_k)
        found_NK = None if at_NK is None else logp_N.new_empty(at_NK.shape)
        slope_NH = torch.empty_like(hidden_NH) if wanted.slope else None
        rows = max(1, SLICE // vocab)
        buffers = [logp_N.new_empty(min(rows, n), vocab) for _ in range(2)]
        for start in range(0, n, rows):
            part = slice(start, min(start + rows, n))
            x_RV, logp_RV = (buffer[: part.stop - start] for buffer in buffers)
            _project(hidden_NH[part], weight_VH, bias_V, sampling, x_RV)
            if restricted:
                cut = cut_of(x_RV, sampling, targets_N[part], _rows(candidate_M2, part))
                edge_N[part], last_N[part] = cut.edge_N, cut.last_N
                x_RV.masked_fill_(cut.excludes(x_RV), -torch.inf)
            torch.log_softmax(x_RV, -1, out=logp_RV)
            # log p = (x - peak) - log sum. The last two as one number would cost a confident token its last digits.
            peak_N[part], log_sum_N[part] = x_RV.amax(-1), -logp_RV.amax(-1)
            logp_N[part] = _pick(logp_RV, targets_N[part])
            if at_NK is not None and found_NK is not None:
                found_NK[part] = logp_RV.gather(-1, at_NK[part])
            if wanted.top_k:
                top_NK[part], ids_NK[part] = logp_RV.topk(wanted.top_k)
            p_RV = torch.exp(logp_RV, out=x_RV)
            entropy_N[part] = -logp_RV.clamp_(min=FLOOR).mul_(p_RV).sum(-1)
            if slope_NH is not None:
                others_RV = p_RV.scatter_add_(-1, targets_N[part, None], torch.full_like(p_RV[:, :1], -1.0))
                slope_NH[part] = (others_RV.to(weight_VH.dtype) @ weight_VH) / -divisor(sampling)
        facts = (entropy_N, peak_N, log_sum_N, edge_N, last_N)
        ctx.save_for_backward(slope_NH, hidden_NH, weight_VH, bias_V, targets_N, at_NK, candidate_M2, found_NK, *facts)
        ctx.sampling, ctx.restricted = sampling, restricted
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(ids_NK, top_NK, *(() if wanted.entropy_gradient else (entropy_N,)))
        return logp_N, entropy_N, ids_NK, top_NK, found_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """A slice of the vocabulary at a time. Autograd rounds complete gradients to the precision of what they belong to."""
        slope_NH, hidden_NH, weight_VH, bias_V, targets_N, at_NK, candidate_M2, found_NK, *facts = ctx.saved_tensors
        entropy_N, peak_N, log_sum_N, edge_N, last_N = facts
        by_logp_N, by_entropy_N, _, _, by_at_NK = grads
        if slope_NH is not None and by_logp_N is not None:
            return by_logp_N[:, None] * slope_NH, None, None, None, None, None, None
        n, vocab = len(hidden_NH), len(weight_VH)
        by_NK, ids_NK = (torch.zeros_like(entropy_N) if by_logp_N is None else by_logp_N)[:, None], targets_N[:, None]
        if by_at_NK is not None:
            by_NK = torch.cat([by_NK, by_at_NK.masked_fill(found_NK.isneginf(), 0.0)], -1)
            ids_NK = torch.cat([ids_NK, at_NK], -1)
        by_NK = by_NK / divisor(ctx.sampling)
        entropy = None if by_entropy_N is None else (by_entropy_N[:, None] / divisor(ctx.sampling), entropy_N[:, None])
        cut = Cut(edge_N, last_N, targets_N, candidate_M2)
        states_NH = hidden_NH.to(entropy_N.dtype)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        by_hidden_NH = torch.zeros_like(states_NH) if needs_hidden else None
        by_weight_VH = torch.empty_like(weight_VH, dtype=states_NH.dtype) if needs_weight else None
        by_bias_V = torch.empty_like(bias_V, dtype=states_NH.dtype) if needs_bias else None
        columns = max(1, SLICE // max(1, *hidden_NH.shape))
        buffers = [entropy_N.new_empty(n * min(columns, vocab)) for _ in range(1 if entropy is None else 2)]
        for start in range(0, vocab, columns):
            part = slice(start, min(start + columns, vocab))
            width = part.stop - start
            x_NC, *spare = (buffer[: n * width].view(n, width) for buffer in buffers)
            _project(hidden_NH, weight_VH[part], None if bias_V is None else bias_V[part], ctx.sampling, x_NC)
            if ctx.restricted:
                x_NC.masked_fill_(cut.excludes(x_NC, start), -torch.inf)
            logp_NC = x_NC.sub_(peak_N[:, None]).sub_(log_sum_N[:, None])
            by_x_NC = _by_logits(logp_NC, by_NK, ids_NK - start, entropy, *spare)
            if by_hidden_NH is not None:
                by_hidden_NH.addmm_(by_x_NC, weight_VH[part].to(x_NC.dtype))
            if by_weight_VH is not None:
                torch.mm(by_x_NC.T, states_NH, out=by_weight_VH[part])
            if by_bias_V is not None:
                by_bias_V[part] = by_x_NC.sum(0)
        return by_hidden_NH, by_weight_VH, by_bias_V, None, None, None, None


def _rows(candidate_M2: Tensor | None, part: slice) -> Tensor | None:
    """The candidates of a slice of rows, counted from its first."""
    if candidate_M2 is None:
        return None
    bounds = torch.tensor([part.start, part.stop], device=candidate_M2.device)
    begin, end = torch.searchsorted(candidate_M2[:, 0].contiguous(), bounds).tolist()
    return candidate_M2[begin:end] - candidate_M2.new_tensor([part.start, 0])


def _project(hidden_RH: Tensor, weight_CH: Tensor, bias_C: Tensor | None, sampling: Sampling, out_RC: Tensor) -> None:
    """Logits divided by the temperature, in `out_RC`."""
    if hidden_RH.dtype != out_RC.dtype:
        out_RC.copy_(F.linear(hidden_RH, weight_CH, bias_C))
    elif bias_C is None:
        torch.mm(hidden_RH, weight_CH.T, out=out_RC)
    else:
        torch.addmm(bias_C, hidden_RH, weight_CH.T, out=out_RC)
    if divisor(sampling) != 1.0:
        out_RC.div_(divisor(sampling))


def _by_logits(
    logp_NC: Tensor, by_NK: Tensor, ids_NK: Tensor, entropy: tuple[Tensor, Tensor] | None, spare_NC: Tensor | None = None
) -> Tensor:
    """Gradient with respect to the logits of a loss whose gradient is `by_NK` at log p(ids) and e at the entropy H; overwrites `logp_NC`.

    `entropy` is (e, H), each [N, 1], and then `spare_NC` is overwritten as well. Ids outside the slice belong to another one.
    """
    total_N1 = by_NK.sum(-1, keepdim=True)
    if entropy is None or spare_NC is None:
        by_x_NC = logp_NC.exp_().mul_(-total_N1)
    else:
        by_entropy_N1, entropy_N1 = entropy
        slope_NC = torch.clamp(logp_NC, min=FLOOR, out=spare_NC).add_(entropy_N1).mul_(by_entropy_N1).add_(total_N1)
        by_x_NC = logp_NC.exp_().mul_(slope_NC).neg_()
    width = logp_NC.shape[-1]
    here_NK = torch.where((ids_NK >= 0) & (ids_NK < width), by_NK, 0.0)
    return by_x_NC.scatter_add_(-1, ids_NK.clamp(0, width - 1), here_NK)


def _pick(values_NV: Tensor, ids_N: Tensor) -> Tensor:
    """One value of each row."""
    return values_NV.gather(-1, ids_N[:, None]).squeeze(-1)
