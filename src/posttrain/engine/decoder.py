"""Cached decoding through a model's own modules: prompts are computed once, siblings share them, finished rows leave.

`LlamaDecoder` serves every decoder of the Llama shape (Llama, SmolLM, Qwen2, Qwen3, Mistral without a sliding window), with or without
LoRA, because it calls the model's own projections. Anything else goes through `GenericDecoder`, the library's forward, with the same
contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FAST_FAMILIES = frozenset({"llama", "qwen2", "qwen3", "mistral"})


class Decoder(Protocol):
    """Next-token logits for a set of live rows."""

    def start(self, prompts: Sequence[tuple[int, ...]], copies: Sequence[int], budget: int) -> Tensor:
        """Read each prompt once, make `copies[i]` rows of it with room for `budget` more tokens; logits [rows, V] of the next token."""
        ...

    def step(self, ids_B: Tensor) -> Tensor:
        """Append one token to each live row; logits [live, V] of the next."""
        ...

    def keep(self, rows: Tensor) -> None:
        """Only these row indices stay live."""
        ...


def decoder_for(model: nn.Module) -> Decoder:
    """The fast decoder when the model has the Llama shape, the generic one otherwise."""
    config = config_of(model)
    if config.model_type in FAST_FAMILIES and not getattr(config, "sliding_window", None):
        return LlamaDecoder(model)
    return GenericDecoder(model)


def config_of(model: nn.Module) -> Any:
    """The Hugging Face config of a model, whatever class it has."""
    return model.config


def backbone(model: nn.Module) -> nn.Module:
    """The module with `embed_tokens`, `layers` and `norm`, through any adapter wrapper."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return inner.model  # type: ignore[return-value]


class LlamaDecoder:
    """Preallocated key/value cache [rows, kv heads, capacity, head dim] per layer, one write position per row."""

    def __init__(self, model: nn.Module):
        self.trunk = backbone(model)
        self.head = model.get_output_embeddings()  # type: ignore[operator]
        config = config_of(model)
        self.kv_heads: int = config.num_key_value_heads
        self.groups: int = config.num_attention_heads // config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.lengths = torch.zeros(0, dtype=torch.long)

    def bytes_per_token(self) -> int:
        """Cache bytes that one token of one row takes."""
        return 2 * len(self.trunk.layers) * self.kv_heads * self.head_dim * 4  # type: ignore[arg-type]

    @torch.no_grad()
    def start(self, prompts: Sequence[tuple[int, ...]], copies: Sequence[int], budget: int) -> Tensor:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest, shared = int(lengths.max()), _shared_prefix(prompts)
        self._allocate(len(prompts), longest)
        if shared:
            self._extend(torch.tensor([prompts[0][:shared]]), torch.zeros(1, dtype=torch.long), rows=1)
            for cache in (*self.keys, *self.values):
                cache[1:, :, :shared] = cache[:1, :, :shared]
        rest_PT = torch.zeros(len(prompts), longest - shared, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            rest_PT[row, : len(prompt) - shared] = torch.tensor(prompt[shared:])
        hidden_PTH = self._extend(rest_PT, torch.full((len(prompts),), shared), rows=len(prompts))
        last_PH = hidden_PTH[torch.arange(len(prompts)), lengths - shared - 1]
        rows = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(copies))
        self._spread(rows, longest + budget)
        self.lengths = lengths[rows]
        return self.head(last_PH)[rows]

    @torch.no_grad()
    def step(self, ids_B: Tensor) -> Tensor:
        hidden_B1H = self._extend(ids_B[:, None], self.lengths, rows=len(ids_B))
        self.lengths = self.lengths + 1
        return self.head(hidden_B1H[:, 0])

    def keep(self, rows: Tensor) -> None:
        self.keys = [cache[rows] for cache in self.keys]
        self.values = [cache[rows] for cache in self.values]
        self.lengths = self.lengths[rows]

    def _allocate(self, rows: int, capacity: int) -> None:
        shape = (rows, self.kv_heads, capacity, self.head_dim)
        dtype = next(self.trunk.parameters()).dtype
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in self.trunk.layers]  # type: ignore[union-attr]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in self.trunk.layers]  # type: ignore[union-attr]

    def _spread(self, rows: Tensor, capacity: int) -> None:
        """Give each sibling its own copy of its prompt's cache, with room to grow."""
        for caches in (self.keys, self.values):
            for layer, cache in enumerate(caches):
                grown = cache.new_zeros(len(rows), self.kv_heads, capacity, self.head_dim)
                grown[:, :, : cache.shape[2]] = cache[rows]
                caches[layer] = grown

    def _extend(self, ids_BT: Tensor, start_B: Tensor, rows: int) -> Tensor:
        """Run T more tokens of the first `rows` rows from position start_B; writes the cache, returns final hidden states [rows, T, H]."""
        steps = ids_BT.shape[1]
        position_BT = start_B[:, None] + torch.arange(steps)
        reach = int(start_B.max()) + steps
        visible_BTS = torch.arange(reach) <= position_BT[:, :, None]
        # Query heads that share a key head become extra queries of it: no copy of the cache is made.
        mask = visible_BTS[:, None].repeat(1, 1, self.groups, 1)
        x_BTH = self.trunk.embed_tokens(ids_BT)  # type: ignore[operator]
        cos, sin = self.trunk.rotary_emb(x_BTH, position_ids=position_BT)  # type: ignore[operator]
        batch = torch.arange(rows)[:, None]
        for layer, block in enumerate(self.trunk.layers):  # type: ignore[arg-type]
            q, k, v = self._project(block.self_attn, block.input_layernorm(x_BTH), cos, sin)
            self.keys[layer][batch, :, position_BT] = k
            self.values[layer][batch, :, position_BT] = v
            q = q.view(rows, steps, self.kv_heads, self.groups, self.head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
            mixed = F.scaled_dot_product_attention(
                q, self.keys[layer][:rows, :, :reach], self.values[layer][:rows, :, :reach], mask, scale=block.self_attn.scaling
            )
            mixed = mixed.view(rows, self.kv_heads, self.groups, steps, self.head_dim).permute(0, 3, 1, 2, 4).reshape(rows, steps, -1)
            x_BTH = x_BTH + block.self_attn.o_proj(mixed)
            x_BTH = x_BTH + block.mlp(block.post_attention_layernorm(x_BTH))
        return self.trunk.norm(x_BTH)  # type: ignore[operator]

    def _project(self, attention: nn.Module, h_BTH: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as [B, T, heads, head dim], positions applied."""
        shape = (*h_BTH.shape[:-1], -1, self.head_dim)
        q, k, v = (getattr(attention, name)(h_BTH).view(shape) for name in ("q_proj", "k_proj", "v_proj"))
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)  # type: ignore[operator]
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _rotate(x_BTHD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
    """Rotary positions in the half-split layout of the Llama family."""
    first, second = x_BTHD.chunk(2, dim=-1)
    return x_BTHD * cos_BTD[:, :, None] + torch.cat((-second, first), dim=-1) * sin_BTD[:, :, None]


def _shared_prefix(prompts: Sequence[tuple[int, ...]]) -> int:
    """How many leading tokens all prompts share (a system prompt, a template head), leaving at least one token to each."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)
    shared = 0
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return min(shared, min(len(prompt) for prompt in prompts) - 1)


class GenericDecoder:
    """The library's own forward with its dynamic cache, prompts padded on the left."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.cache: object | None = None
        self.mask_BS = torch.zeros(0, 0, dtype=torch.long)

    def bytes_per_token(self) -> int:
        """Cache bytes that one token of one row takes, from the config."""
        config = config_of(self.model).get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * head_dim * 4

    @torch.no_grad()
    def start(self, prompts: Sequence[tuple[int, ...]], copies: Sequence[int], budget: int) -> Tensor:
        longest = max(len(prompt) for prompt in prompts)
        ids_PT = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask_PT = torch.zeros_like(ids_PT)
        for row, prompt in enumerate(prompts):
            ids_PT[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask_PT[row, longest - len(prompt) :] = 1
        self.cache, self.mask_BS = None, mask_PT
        logits_PV = self._forward(ids_PT, (mask_PT.cumsum(-1) - 1).clamp(min=0))
        rows = torch.repeat_interleave(torch.arange(len(prompts)), torch.tensor(copies))
        self.keep(rows)
        return logits_PV[rows]

    @torch.no_grad()
    def step(self, ids_B: Tensor) -> Tensor:
        self.mask_BS = torch.cat([self.mask_BS, torch.ones(len(ids_B), 1, dtype=torch.long)], dim=1)
        return self._forward(ids_B[:, None], self.mask_BS.sum(-1, keepdim=True) - 1)

    def keep(self, rows: Tensor) -> None:
        self.mask_BS = self.mask_BS[rows]
        self.cache.batch_select_indices(rows)  # type: ignore[union-attr]

    def _forward(self, ids_BT: Tensor, position_BT: Tensor) -> Tensor:
        out = self.model(
            input_ids=ids_BT, attention_mask=self.mask_BS, position_ids=position_BT, cache=self.cache, use_cache=True, logits_to_keep=1
        )
        self.cache = out.cache
        return out.logits[:, -1]
