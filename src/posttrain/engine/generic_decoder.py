"""Decoding through the library's own forward and cache: right for any model that has them, at the price of speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.engine.decoding import Context


class GenericDecoder:
    """Rows padded on the left and decoded together until all are done; equal contexts are read once."""

    joins = False

    def __init__(self, model: nn.Module):
        self.model = model
        self.device = next(model.parameters()).device
        self.cache: Any = None
        self.mask_RS = torch.zeros(0, 0, dtype=torch.long)

    def bytes_per_token(self) -> int:
        config: Any = self.model.config.get_text_config()  # type: ignore[operator, union-attr]
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers * heads * head_dim * next(self.model.parameters()).element_size()

    @torch.inference_mode()
    def enter(self, contexts: Sequence[Context]) -> Tensor:
        read = [c.prompt + c.drawn for c in contexts]
        distinct = {ids: index for index, ids in enumerate(dict.fromkeys(read))}
        longest = max(len(ids) for ids in distinct)
        ids_DT = torch.zeros(len(distinct), longest, dtype=torch.long)
        mask_DT = torch.zeros_like(ids_DT)
        for ids, row in distinct.items():
            ids_DT[row, longest - len(ids) :] = torch.tensor(ids)
            mask_DT[row, longest - len(ids) :] = 1
        self.cache, self.mask_RS = None, mask_DT.to(self.device)
        logits_DV = self._forward(ids_DT.to(self.device), (self.mask_RS.cumsum(-1) - 1).clamp(min=0))
        rows = [distinct[ids] for ids in read]
        self.keep(rows)
        return logits_DV[torch.tensor(rows, device=self.device)]

    @torch.inference_mode()
    def step(self, ids_R: Tensor) -> Tensor:
        self.mask_RS = torch.cat([self.mask_RS, self.mask_RS.new_ones(len(ids_R), 1)], dim=1)
        return self._forward(ids_R[:, None], self.mask_RS.sum(-1, keepdim=True) - 1)

    def remember(self, row: int, drawn: Sequence[int]) -> None:
        """Nothing: the library's cache cannot be taken apart for every architecture."""

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        if not rows:
            self.cache, self.mask_RS = None, self.mask_RS[:0]
        elif list(rows) != list(range(len(self.mask_RS))):
            index = torch.tensor(rows, device=self.device)
            self.mask_RS = self.mask_RS[index]
            self.cache.batch_select_indices(index)

    def _forward(self, ids_RT: Tensor, position_RT: Tensor) -> Tensor:
        out = self.model(
            input_ids=ids_RT, attention_mask=self.mask_RS, position_ids=position_RT, cache=self.cache, use_cache=True, logits_to_keep=1
        )
        self.cache = out.cache
        return out.logits[:, -1]
