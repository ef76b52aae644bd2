"""Next-token logits of a changing set of rows: rows enter, take steps together, and leave.

`LlamaDecoder` serves every decoder of the Llama shape (Llama, SmolLM, Qwen2, Qwen3, Mistral without a sliding window), with or without
LoRA. Anything else goes through `GenericDecoder`, the library's own forward, with the same contract.

A token's way through a step: `fused.project` turns it into query, key and value; `table.attend` stores key and value and mixes what the
row may see; the block's `out` and `mlp` add to it; the head reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from posttrain.engine.decoding import Context as Context
from posttrain.engine.decoding import Decoder as Decoder
from posttrain.engine.fused import FAST_FAMILIES as FAST_FAMILIES
from posttrain.engine.fused import Fused, fuse, fusible
from posttrain.engine.fused import backbone as backbone
from posttrain.engine.fused import config_of as config_of
from posttrain.engine.generic_decoder import GenericDecoder
from posttrain.engine.prefix_cache import Match, PrefixCache
from posttrain.engine.table import Row, Table

READ_TOKENS = 8192
"""Tokens that are read in one pass, padding included."""
WORTH_SHARING = 64
"""Tokens that reading a common head of several prompts once must save."""
CROWDED = 0.5
"""The table is rebuilt when fewer than this share of its places is taken."""


def decoder_for(model: nn.Module, prefixes: PrefixCache | None = None) -> Decoder:
    """The fast decoder when the model has the Llama shape, the generic one otherwise. It holds the weights as they are now.

    Args:
        prefixes: where to keep what later prompts may begin with; it must hold nothing of other weights.
    """
    return LlamaDecoder(fuse(model), PrefixCache(0) if prefixes is None else prefixes) if fusible(model) else GenericDecoder(model)


class LlamaDecoder:
    """Decodes with prepared weights, and remembers prefixes."""

    joins = True

    def __init__(self, weights: Fused, prefixes: PrefixCache):
        self.weights, self.prefixes = weights, prefixes
        self.computed = 0
        """Prompt tokens read so far, those found in the prefix cache not counted."""
        self._known: dict[tuple[int, ...], Match] = {}
        self._table = self._empty()

    def _empty(self) -> Table:
        w = self.weights
        return Table(len(w.blocks), w.kv_heads, w.head_dim, w.heads, w.embed_VH)

    def bytes_per_token(self) -> int:
        w = self.weights
        return 2 * len(w.blocks) * w.kv_heads * w.head_dim * w.embed_VH.element_size()

    @torch.inference_mode()
    def enter(self, contexts: Sequence[Context]) -> Tensor:
        prompts = list(dict.fromkeys(c.prompt for c in contexts))
        states = self._read({prompt: self.prefixes.match(prompt[:-1]) for prompt in prompts})
        longer = {c.prompt + c.drawn: self._longest(c, states[c.prompt][0]) for c in contexts if c.drawn}
        states.update(self._read({ids: match for ids, match in longer.items() if ids not in states}))
        self._known.update((prompt, states[prompt][0]) for prompt in prompts)
        rows = [Row(c.prompt, -len(c.drawn)) for c in contexts]
        own = [_joined(states[c.prompt + c.drawn][0], len(c.prompt)) if c.drawn else self.weights.embed_VH for c in contexts]
        kv = {prompt: _joined(states[prompt][0]) for prompt in prompts}
        self._table.rebuild(range(len(self._table.rows)), rows, kv, own)
        distinct = {ids: index for index, ids in enumerate(states)}
        hidden_DH = torch.stack([hidden_H for _, hidden_H in states.values()])
        index = torch.tensor([distinct[c.prompt + c.drawn] for c in contexts], device=hidden_DH.device)
        return self.weights.head(self.weights.norm(hidden_DH))[index]

    @torch.inference_mode()
    def step(self, ids_R: Tensor) -> Tensor:
        table, w = self._table, self.weights
        table.open_column()
        x_RH = w.embed_VH[ids_R]
        turns_R1F = w.turns(table.position_R)
        for layer, block in enumerate(w.blocks):
            mixed = table.attend(layer, w.project(block, x_RH, turns_R1F), w.scaling)
            x_RH = block.mlp_onto(block.out.onto(x_RH, mixed))
        table.tick()
        return w.head(w.norm(x_RH))

    @torch.inference_mode()
    def remember(self, row: int, drawn: Sequence[int]) -> None:
        prompt = self._table.rows[row].prompt
        if self.prefixes.continued:
            self.prefixes.add(prompt + tuple(drawn), self._known[prompt], self._table.own_of(row))
        elif self.prefixes.max_bytes:
            self.prefixes.add_ids(prompt + tuple(drawn))

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        if not rows:
            self._table = self._empty()
            self._known.clear()
        elif len(rows) < CROWDED * self._table.places:
            self._table.rebuild(rows, (), {}, ())
        else:
            self._table.keep(rows)

    def _longest(self, context: Context, prompt: Match) -> Match:
        """What is known of a prompt and what was drawn after it: at least the prompt."""
        found = self.prefixes.match((context.prompt + context.drawn)[:-1])
        return found if found.length > prompt.length else prompt

    def _read(self, known: dict[tuple[int, ...], Match]) -> dict[tuple[int, ...], tuple[Match, Tensor]]:
        """Read sequences of which so much is known: a match that covers each, and the state [H] that predicts what follows it."""
        sequences = list(known)
        head = _shared_prefix(sequences)
        if head * (len(sequences) - 1) >= WORTH_SHARING and all(match.length < head for match in known.values()):
            start = sequences[0][:head]
            ((shared, _),) = self._read_together([start], [self.prefixes.match(start[:-1])])
            known = dict.fromkeys(sequences, shared)
        states = {}
        for part in _portions(sorted(sequences, key=lambda ids: len(ids) - known[ids].length), known):
            states.update(zip(part, self._read_together(part, [known[ids] for ids in part]), strict=True))
        return states

    def _read_together(self, sequences: Sequence[tuple[int, ...]], known: Sequence[Match]) -> list[tuple[Match, Tensor]]:
        """One pass over the unknown tokens of a few sequences. Keys and values lie at their positions: kv[..., p, :] is position p's."""
        w, device = self.weights, self.weights.embed_VH.device
        fresh = [len(ids) - match.length for ids, match in zip(sequences, known, strict=True)]
        rows, width, longest = len(sequences), max(len(ids) for ids in sequences), max(fresh)
        kv = w.embed_VH.new_zeros(len(w.blocks), 2, rows, w.kv_heads, width, w.head_dim)
        for row, match in enumerate(known):
            for start, piece in match.pieces():
                kv[:, :, row, :, start : start + piece.shape[-2]] = piece
        start_R = torch.tensor([match.length for match in known], device=device)
        fresh_R = torch.tensor(fresh, device=device)
        offset_RT = torch.arange(longest, device=device).expand(rows, -1)
        row_N, offset_N = (offset_RT < fresh_R[:, None]).nonzero().unbind(1)
        position_N = start_R[row_N] + offset_N
        flat_RT = (fresh_R.cumsum(0) - fresh_R)[:, None] + offset_RT.clamp(max=fresh_R[:, None] - 1)
        visible_RTW = torch.arange(width, device=device) <= (start_R[:, None] + offset_RT)[:, :, None]
        mask = torch.zeros(visible_RTW.shape, dtype=kv.dtype, device=device).masked_fill_(~visible_RTW, -torch.inf)[:, None]
        unknown = [token for ids, match in zip(sequences, known, strict=True) for token in ids[match.length :]]
        x_NH = w.embed_VH[torch.tensor(unknown, device=device)]
        turns_N1F = w.turns(position_N)
        for layer, block in enumerate(w.blocks):
            qkv = w.project(block, x_NH, turns_N1F)
            split = w.heads * w.head_dim
            kv[layer][:, row_N, :, position_N] = qkv[:, split:].view(-1, 2, w.kv_heads, w.head_dim)
            if layer == len(w.blocks) - 1:  # nothing reads the other tokens' states
                last_R1 = flat_RT[torch.arange(rows, device=device), fresh_R - 1][:, None]
                mask, flat_RT, x_NH = mask[torch.arange(rows, device=device), :, fresh_R - 1][:, :, None], last_R1, x_NH[last_R1[:, 0]]
                row_N, offset_N = torch.arange(rows, device=device), torch.zeros_like(fresh_R)
            q = qkv[flat_RT, :split].view(rows, -1, w.heads, w.head_dim).transpose(1, 2)
            keys, values = kv[layer]
            mixed = F.scaled_dot_product_attention(q, keys, values, mask, scale=w.scaling, enable_gqa=w.heads != w.kv_heads)
            x_NH = block.mlp_onto(block.out.onto(x_NH, mixed.transpose(1, 2)[row_N, offset_N].flatten(1)))
        self.computed += len(unknown)
        matches = [
            self.prefixes.add(ids, match, kv[:, :, row, :, match.length : len(ids)])
            for row, (ids, match) in enumerate(zip(sequences, known, strict=True))
        ]
        return list(zip(matches, x_NH, strict=True))


def _joined(match: Match, start: int = 0) -> Tensor:
    """Keys and values of the matched tokens from position `start` on."""
    pieces = [piece if at >= start else piece[..., start - at :, :] for at, piece in match.pieces() if at + piece.shape[-2] > start]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces[::-1], dim=-2)


def _portions(sequences: Sequence[tuple[int, ...]], known: dict[tuple[int, ...], Match]) -> Iterator[list[tuple[int, ...]]]:
    """Sequences, the one with the least to read first, in portions of at most READ_TOKENS."""
    portion: list[tuple[int, ...]] = []
    for ids in sequences:
        if portion and (len(portion) + 1) * (len(ids) - known[ids].length) > READ_TOKENS:
            yield portion
            portion = []
        portion.append(ids)
    if portion:
        yield portion


def _shared_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many leading tokens all prompts share (a system prompt, a template head), leaving at least one token to each."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return min(shared, min(len(prompt) for prompt in prompts) - 1)
