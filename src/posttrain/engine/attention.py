"""Attention over packed rows without the products that a mask would throw away: exact, in memory linear in the tokens.

A batch of packed rows is a forest: prompts, and the siblings that continue them (engine/batch.py). A dense mask computes every slot of a
row against every other. Here a token meets its own prompt and its own continuation only:

    prompt tokens      causal attention among themselves
    a sibling's token  its prompt's keys, all of them, and its own earlier tokens, causally

The two parts of a sibling's softmax are computed apart and joined by their log-sum-exp. The backward pass calls each part's own backward
with the joint output and the joint log-sum-exp, which makes its probabilities, and so its gradients, those of the whole.

Rotary positions are a product of complex numbers: pairs of a head's numbers stand side by side here, not half a head apart as in the
library. A scalar product does not depend on the order of its terms, so only the projection that makes queries and keys has to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from posttrain.engine.batch import Batch

ALIKE = 0.7
"""Lengths of at least this share of the longest are padded to it and computed together: a call more costs about as much as the padding."""

_FORWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_BACKWARD = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def available() -> bool:
    """Whether this build of torch has the kernel that returns the log-sum-exp on a CPU."""
    return _FORWARD is not None and _BACKWARD is not None


class Segment(NamedTuple):
    """A run of tokens that follow each other: a prompt, or one continuation. Example: Segment(start=3, size=2), slots 3 and 4 of R*W."""

    start: int
    size: int


class Tree(NamedTuple):
    """A prompt and the continuations that share it; a document with one continuation is a single longer prompt."""

    prompt: Segment
    siblings: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Padded:
    """Segments side by side as a [segments, longest] block. Example, of lengths 3 and 2 that begin at token 5: start 5, tokens 5, shape
    (2, 3), source [5, 6, 7, 8, 9, 5], inside [0, 1, 2, 3, 4], outside [5]."""

    start: int
    """Place of the first token in the layout's order; the others follow without gaps."""
    tokens: int
    """Tokens without padding."""
    shape: tuple[int, int]
    source: Tensor | None = None
    """Token at each place of the block; None when it has no padding, and a block is a view."""
    inside: Tensor | None = None
    """Flat places of the tokens in the block."""
    outside: Tensor | None = None
    """Flat places of the padding."""

    def take(self, values_M: Tensor, *, clean: bool = False) -> Tensor:
        """The block [segments, longest, ...] of values [tokens of the layout, ...].

        Padding holds some token's values: as a key it comes after all that may look, as a query its result is dropped. `clean` puts zeros
        there, as a gradient needs.
        """
        if self.source is None:
            return values_M[self.start : self.start + self.tokens].view(*self.shape, *values_M.shape[1:])
        out = values_M.index_select(0, self.source)
        if clean and self.outside is not None:
            out.index_fill_(0, self.outside, 0.0)
        return out.view(*self.shape, *values_M.shape[1:])

    def put(self, block: Tensor, values_M: Tensor) -> None:
        """Write a block's tokens to where they belong; what stands in the padding is dropped."""
        flat = block.reshape(self.shape[0] * self.shape[1], *block.shape[2:])
        values_M[self.start : self.start + self.tokens] = flat if self.inside is None else flat.index_select(0, self.inside)


@dataclass(frozen=True, slots=True)
class Family:
    """Trees of like shape that are computed together: prompts [G, P] and, in order of length, their siblings [G * S, T]."""

    prompts: Padded
    siblings: tuple[Padded, ...]
    reach: Tensor | None
    """[G, 1, 1, P]: 0 at the keys of a prompt, -inf behind it; None when all are equally long."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The order in which a batch's tokens are computed, and who attends to whom."""

    slot_M: Tensor
    """Flat slot of R*W that each token comes from; padding has none."""
    families: tuple[Family, ...]
    needed_K: Tensor
    """Ascending tokens that predict a trained token: all that the last block has to finish."""
    source_N: Tensor
    """Index into `needed_K` of the state that predicts each trained token."""
    ordered: bool
    """Whether `source_N` is 0, 1, 2, ..."""


def layout(batch: Batch) -> Layout:
    """How to compute `batch`; ValueError when its rows are no sequence of documents with a prompt and then continuations each."""
    width = batch.ids_RW.shape[1]
    families: list[Family] = []
    order: list[Segment] = []
    for group in _alike(_trees(batch)):
        families.append(_family(group, order, sum(segment.size for segment in order)))
    slot_M = torch.cat([torch.arange(segment.start, segment.start + segment.size) for segment in order])
    place = torch.full((len(batch.ids_RW) * width,), -1, dtype=torch.long)
    place[slot_M] = torch.arange(len(slot_M))
    needed_K, source_N = torch.unique(place[batch.source_N], return_inverse=True)
    ordered = len(source_N) == len(needed_K) and bool((source_N == torch.arange(len(source_N))).all())
    return Layout(slot_M, tuple(families), needed_K, source_N, ordered)


def _trees(batch: Batch) -> list[Tree]:
    """The documents of a batch, from its streams alone."""
    rows, width = batch.ids_RW.shape
    row_S = torch.arange(rows)[:, None].expand(rows, width).flatten()
    document_S, branch_S = batch.document_RW.flatten(), batch.branch_RW.flatten()
    key_SK = torch.stack([row_S, document_S, branch_S], -1)
    change = (key_SK[1:] != key_SK[:-1]).any(-1).nonzero().squeeze(-1) + 1
    starts = [0, *change.tolist()]
    ends = [*starts[1:], rows * width]
    trees: list[Tree] = []
    seen: set[tuple[int, ...]] = set()
    last = (-1, -1)
    for start, end, key in zip(starts, ends, key_SK[starts].tolist(), strict=True):
        row, document, branch = key
        if document < 0:
            continue
        if tuple(key) in seen or (branch == 0) == ((row, document) == last):
            raise ValueError(f"row {row} of a batch does not hold document {document} as one prompt and whole continuations after it")
        seen.add(tuple(key))
        segment = Segment(start, end - start)
        if branch == 0:
            trees.append(Tree(segment, ()))
            last = (row, document)
        else:
            trees[-1] = Tree(trees[-1].prompt, (*trees[-1].siblings, segment))
    return [_straight(tree) for tree in trees]


def _straight(tree: Tree) -> Tree:
    """A prompt with one continuation is one causal sequence."""
    if len(tree.siblings) != 1:
        return tree
    return Tree(Segment(tree.prompt.start, tree.prompt.size + tree.siblings[0].size), ())


def _alike(trees: Sequence[Tree]) -> Iterator[list[Tree]]:
    """Trees that pad to one shape at little cost, each with its siblings in order of decreasing length."""
    ordered = [Tree(tree.prompt, tuple(sorted(tree.siblings, key=lambda segment: -segment.size))) for tree in trees]
    for alone in (True, False):
        kind = sorted((tree for tree in ordered if alone != bool(tree.siblings)), key=lambda tree: -tree.prompt.size)
        for near in _runs(kind, [tree.prompt.size for tree in kind]):
            near.sort(key=lambda tree: -sum(segment.size for segment in tree.siblings))
            yield from _runs(near, [sum(segment.size for segment in tree.siblings) for tree in near], ALIKE**2)


def _runs(items: Sequence[Any], sizes: Sequence[int], alike: float = ALIKE) -> Iterator[list[Any]]:
    """Cut a list of decreasing sizes where a size falls below the share `alike` of its run's first."""
    run: list[Any] = []
    first = 0
    for item, size in zip(items, sizes, strict=True):
        if run and size < alike * first:
            yield run
            run = []
        if not run:
            first = size
        run.append(item)
    if run:
        yield run


def _family(trees: Sequence[Tree], order: list[Segment], at: int) -> Family:
    """Lay out trees as blocks, the first token at `at`, and append their segments to `order`."""
    prompts = _padded([tree.prompt for tree in trees], order, at)
    at += prompts.tokens
    ranks = max(len(tree.siblings) for tree in trees)
    by_rank = [[tree.siblings[rank] if rank < len(tree.siblings) else Segment(0, 0) for tree in trees] for rank in range(ranks)]
    blocks: list[Padded] = []
    for chunk in _runs(by_rank, [max(segment.size for segment in rank) for rank in by_rank]):
        blocks.append(_padded([rank[tree] for tree in range(len(trees)) for rank in chunk], order, at))
        at += blocks[-1].tokens
    sizes_G = torch.tensor([tree.prompt.size for tree in trees])
    beyond_GP = torch.arange(prompts.shape[1]) >= sizes_G[:, None]
    reach = torch.zeros(beyond_GP.shape).masked_fill(beyond_GP, -torch.inf)[:, None, None] if ranks and beyond_GP.any() else None
    return Family(prompts, tuple(block for block in blocks if block.tokens), reach)


def _padded(segments: Sequence[Segment], order: list[Segment], at: int) -> Padded:
    longest = max(segment.size for segment in segments)
    order += [segment for segment in segments if segment.size]
    shape, tokens = (len(segments), longest), sum(segment.size for segment in segments)
    if tokens == shape[0] * shape[1]:
        return Padded(at, tokens, shape)
    full = (torch.arange(longest) < torch.tensor([segment.size for segment in segments])[:, None]).flatten()
    inside = full.nonzero().squeeze(-1)
    source = torch.full(full.shape, at).index_copy_(0, inside, torch.arange(at, at + tokens))
    return Padded(at, tokens, shape, source, inside, (~full).nonzero().squeeze(-1))


class Heads(NamedTuple):
    """Attention heads, those of keys and values, numbers per head, and the scale of a product."""

    queries: int
    keys: int
    size: int
    scale: float


def tree_attention(joint_MJ: Tensor, turn_MC: Tensor, families: Sequence[Family], heads: Heads) -> Tensor:
    """Rotate queries and keys to their positions, and mix values.

    Args:
        joint_MJ: queries, keys and values of M tokens in a layout's order, [M, (queries + 2 keys) * size]; in queries and keys the two
            numbers of a rotated pair stand side by side.
        turn_MC: cos + i sin of each pair's angle, [M, size / 2] complex.

    Returns:
        [M, queries * size].
    """
    return _TreeAttention.apply(joint_MJ, turn_MC, tuple(families), heads)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint_MJ: Tensor, turn_MC: Tensor, families: tuple[Family, ...], heads: Heads) -> Tensor:
        turned_MHD, v_MHD = _turned(joint_MJ, turn_MC, heads), _split(joint_MJ, heads)[1]
        out_MHD = joint_MJ.new_empty(len(joint_MJ), heads.queries, heads.size)
        sums: list[Tensor] = []
        for family in families:
            q, k, v = _parts(family.prompts, turned_MHD, v_MHD, heads)
            mixed, log_sum = _attend(q, k, v, heads, causal=True)
            family.prompts.put(mixed.transpose(1, 2), out_MHD)
            sums.append(log_sum)
            for block in family.siblings:
                q, near_k, near_v = _parts(block, turned_MHD, v_MHD, heads)
                far, far_sum = _attend(_by_tree(q, family), k, v, heads, mask=family.reach)
                near, near_sum = _attend(q, near_k, near_v, heads, causal=True)
                far, far_sum = _by_sibling(far, block), _by_sibling(far_sum[..., None], block)[..., 0]
                share = torch.sigmoid(near_sum - far_sum)[..., None]
                block.put(torch.lerp(far.transpose(1, 2), near.transpose(1, 2), share.transpose(1, 2)), out_MHD)
                sums.append(torch.logaddexp(near_sum, far_sum))
        ctx.save_for_backward(turned_MHD, v_MHD, turn_MC, out_MHD, *sums)
        ctx.families, ctx.heads = families, heads
        return out_MHD.flatten(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        turned_MHD, v_MHD, turn_MC, out_MHD, *sums = ctx.saved_tensors
        families, heads = ctx.families, ctx.heads
        by_out_MHD = grads[0].view_as(out_MHD)
        by_joint_MJ = out_MHD.new_empty(len(out_MHD), (heads.queries + 2 * heads.keys) * heads.size)
        by_turned_MHD, by_v_MHD = torch.empty_like(turned_MHD), _split(by_joint_MJ, heads)[1]
        rest = iter(sums)
        for family in families:
            q, k, v = _parts(family.prompts, turned_MHD, v_MHD, heads)
            out, by_out = family.prompts.take(out_MHD).transpose(1, 2), family.prompts.take(by_out_MHD, clean=True).transpose(1, 2)
            by_q, by_k, by_v = _attend_back(by_out, q, k, v, (out, next(rest)), heads, causal=True)
            family.prompts.put(by_q.transpose(1, 2), by_turned_MHD[:, : heads.queries])
            for block in family.siblings:
                q, near_k, near_v = _parts(block, turned_MHD, v_MHD, heads)
                log_sum = next(rest)
                out, by_out = block.take(out_MHD).transpose(1, 2), block.take(by_out_MHD, clean=True).transpose(1, 2)
                near = _attend_back(by_out, q, near_k, near_v, (out, log_sum), heads, causal=True)
                whole = (_by_tree(out, family), _by_tree(log_sum[..., None], family)[..., 0])
                far = _attend_back(_by_tree(by_out, family), _by_tree(q, family), k, v, whole, heads, mask=family.reach)
                by_q = near[0].transpose(1, 2) + _by_sibling(far[0], block).transpose(1, 2)
                block.put(by_q, by_turned_MHD[:, : heads.queries])
                block.put(_ungrouped(near[1], heads), by_turned_MHD[:, heads.queries :])
                block.put(_ungrouped(near[2], heads), by_v_MHD)
                by_k, by_v = by_k + far[1], by_v + far[2]
            family.prompts.put(_ungrouped(by_k, heads), by_turned_MHD[:, heads.queries :])
            family.prompts.put(_ungrouped(by_v, heads), by_v_MHD)
        back_MC = turn_MC.conj_physical()[:, None]
        torch.mul(_pairs(by_turned_MHD), back_MC, out=_pairs(_split(by_joint_MJ, heads)[0]))
        return by_joint_MJ, None, None, None


def _split(joint_MJ: Tensor, heads: Heads) -> tuple[Tensor, Tensor]:
    """Views: queries and keys [M, queries + keys, size], values [M, keys, size]."""
    both = heads.queries + heads.keys
    joint_MHD = joint_MJ.view(len(joint_MJ), both + heads.keys, heads.size)
    return joint_MHD[:, :both], joint_MHD[:, both:]


def _pairs(values_MHD: Tensor) -> Tensor:
    return torch.view_as_complex(values_MHD.unflatten(-1, (-1, 2)))


def _turned(joint_MJ: Tensor, turn_MC: Tensor, heads: Heads) -> Tensor:
    return torch.view_as_real(_pairs(_split(joint_MJ, heads)[0]) * turn_MC[:, None]).flatten(-2)


def _parts(block: Padded, turned_MHD: Tensor, v_MHD: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a block, each [B, query heads, T, size]; heads that share a key get a copy."""
    q, k = block.take(turned_MHD).transpose(1, 2).split([heads.queries, heads.keys], dim=1)
    v = block.take(v_MHD).transpose(1, 2)
    if heads.keys == heads.queries:
        return q, k, v
    return q, *(x.repeat_interleave(heads.queries // heads.keys, dim=1) for x in (k, v))  # type: ignore[return-value]


def _ungrouped(by_BHTD: Tensor, heads: Heads) -> Tensor:
    """Gradient of keys or values as [B, T, key heads, size]: copies add up."""
    if heads.keys != heads.queries:
        by_BHTD = by_BHTD.unflatten(1, (heads.keys, -1)).sum(2)
    return by_BHTD.transpose(1, 2)


def _by_tree(values: Tensor, family: Family) -> Tensor:
    """[G * S, heads, T, D] as [G, heads, S * T, D]."""
    trees = family.prompts.shape[0]
    return values.transpose(1, 2).reshape(trees, -1, values.shape[1], values.shape[3]).transpose(1, 2)


def _by_sibling(values: Tensor, block: Padded) -> Tensor:
    """The inverse of `_by_tree`."""
    return values.transpose(1, 2).reshape(*block.shape, values.shape[1], values.shape[3]).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: Heads, *, causal: bool = False, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mixed values [B, heads, T, D] and log-sum-exp [B, heads, T]."""
    assert _FORWARD is not None
    return _FORWARD(q, k, v, 0.0, causal, attn_mask=mask if mask is None else mask.to(q.dtype), scale=heads.scale)


def _attend_back(
    by_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    found: tuple[Tensor, Tensor],
    heads: Heads,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given what the whole softmax mixed and summed to."""
    assert _BACKWARD is not None
    return _BACKWARD(by_out, q, k, v, *found, 0.0, causal, attn_mask=mask if mask is None else mask.to(q.dtype), scale=heads.scale)
