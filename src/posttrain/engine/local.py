"""The in-process sampler: reads the live weights of the model being trained, so no copy can go stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import nn

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import uniforms
from posttrain.core.trajectory import StopReason
from posttrain.engine.decoder import decoder_for
from posttrain.engine.types import Completion, Request
from posttrain.objectives.logprobs import draw

CACHE_BYTES = 1 << 30
"""Key/value cache of one wave of rows."""
SHRINK = 0.75
"""Rows are compacted when fewer than this share of them is still alive: copying the cache costs less than decoding the dead."""


class LocalSampler:
    """Generates from `model` in this process.

    Args:
        model: in evaluation mode; dropout would make the sampler disagree with the trainer.
        stop_ids: tokens with which the assistant closes its turn.
        control_ids: every control token; drawing one that is no stop token also ends the completion, as StopReason.CONTROL.
        max_rows: most rows decoded together.
    """

    def __init__(self, model: nn.Module, stop_ids: frozenset[int], control_ids: frozenset[int], max_rows: int = 256):
        self.model, self.stop_ids, self.control_ids, self.max_rows = model, stop_ids, control_ids, max_rows
        self.version = 0
        self._terminal = torch.tensor(sorted(stop_ids | control_ids))

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        results: list[Completion | None] = [None] * len(requests)
        for wave in self._waves(requests):
            for index, completion in zip(wave, self._decode([requests[i] for i in wave], progress), strict=True):
                results[index] = completion
        return [completion for completion in results if completion is not None]

    def _waves(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Indices of requests that decode together: siblings side by side, prompts of like length together, within the cache budget."""
        per_token = decoder_for(self.model).bytes_per_token()  # type: ignore[attr-defined]
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt), requests[i].prompt, i))
        wave: list[int] = []
        budget = 0
        for index in order:
            request = requests[index]
            budget = max(budget, request.sampling.max_tokens)
            if wave and (len(wave) >= self.max_rows or (len(wave) + 1) * (len(request.prompt) + budget) * per_token > CACHE_BYTES):
                yield wave
                wave, budget = [], request.sampling.max_tokens
            wave.append(index)
        if wave:
            yield wave

    @torch.no_grad()
    def _decode(self, requests: Sequence[Request], progress: Callable[[int], None] | None) -> list[Completion]:
        prompts, copies = _siblings(requests)
        budgets = torch.tensor([request.sampling.max_tokens for request in requests])
        longest = int(budgets.max())
        noise_BT = torch.from_numpy(np.stack([uniforms(request.seed, longest) for request in requests]))
        kinds = sorted(dict.fromkeys(request.sampling for request in requests), key=str)
        kind_B = torch.tensor([kinds.index(request.sampling) for request in requests])
        ids_BT = torch.zeros(len(requests), longest, dtype=torch.long)
        logp_BT = torch.zeros(len(requests), longest)
        count_B = torch.zeros(len(requests), dtype=torch.long)
        decoder = decoder_for(self.model)
        logits = decoder.start(prompts, copies, longest)
        row_L = torch.arange(len(requests))  # live row -> request
        alive_L = torch.ones(len(requests), dtype=torch.bool)
        for position in range(longest):
            drawn_L, logp_L = _draw_each(logits, kinds, kind_B[row_L], noise_BT[row_L, position])
            writing = row_L[alive_L]
            ids_BT[writing, position], logp_BT[writing, position] = drawn_L[alive_L], logp_L[alive_L]
            count_B[writing] += 1
            finished_L = alive_L & (torch.isin(drawn_L, self._terminal) | (position + 1 >= budgets[row_L]))
            alive_L = alive_L & ~finished_L
            if progress and finished_L.any():
                progress(int(finished_L.sum()))
            if not alive_L.any():
                break
            if alive_L.float().mean() < SHRINK:
                keep = alive_L.nonzero().squeeze(-1)
                decoder.keep(keep)
                row_L, drawn_L, alive_L = row_L[keep], drawn_L[keep], alive_L[keep]
            logits = decoder.step(drawn_L)
        return [self._completion(ids_BT[b, :n].tolist(), logp_BT[b, :n].tolist()) for b, n in enumerate(count_B.tolist())]

    def _completion(self, ids: list[int], logps: list[float]) -> Completion:
        stop = StopReason.LENGTH
        if ids[-1] in self.stop_ids:
            stop = StopReason.END
        elif ids[-1] in self.control_ids:
            stop = StopReason.CONTROL
        return Completion(tuple(ids), tuple(logps), stop, self.version)


def _siblings(requests: Sequence[Request]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Runs of equal prompts: each is read once. Requests of one prompt arrive side by side (`_waves` sorts them so)."""
    prompts: list[tuple[int, ...]] = []
    copies: list[int] = []
    for request in requests:
        if prompts and prompts[-1] == request.prompt:
            copies[-1] += 1
        else:
            prompts.append(request.prompt)
            copies.append(1)
    return prompts, copies


def _draw_each(
    logits: torch.Tensor, kinds: Sequence[Sampling], kind_L: torch.Tensor, noise_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row, each under its own sampling conditions."""
    if len(kinds) == 1:
        return draw(logits, kinds[0], noise_L)
    ids = torch.zeros(len(logits), dtype=torch.long)
    logps = torch.zeros(len(logits))
    for index, sampling in enumerate(kinds):
        rows = (kind_L == index).nonzero().squeeze(-1)
        if len(rows):
            ids[rows], logps[rows] = draw(logits[rows], sampling, noise_L[rows])
    return ids, logps
