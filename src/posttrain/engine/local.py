"""The in-process sampler: reads the live weights of the model being trained, so no copy can go stale.

`generate` fills a number of seats with requests, siblings side by side, and steps: every living row draws one token, finished rows leave
at once, and when enough seats are empty waiting requests enter. What a request gets is a function of its own prompt, sampling and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import uniforms
from posttrain.core.trajectory import StopReason
from posttrain.engine.decoder import Context, Decoder, decoder_for
from posttrain.engine.fused import Watch
from posttrain.engine.prefix_cache import PrefixCache
from posttrain.engine.types import Completion, Request
from posttrain.objectives.logprobs import draw_kept

CACHE_BYTES = 1 << 30
"""Keys and values of the rows that decode together."""
PREFIX_BYTES = 1 << 28
"""Keys and values kept for prompts to come."""
REFILL = 0.5
"""Waiting requests enter when fewer than this share of the seats is taken: each entry moves the cache of the living, and a young row
attends over as many columns as its oldest neighbour."""


class LocalSampler:
    """Generates from `model` in this process.

    Args:
        model: in evaluation mode; dropout would make the sampler disagree with the trainer.
        stop_ids: tokens with which the assistant closes its turn.
        control_ids: every control token; drawing one that is no stop token also ends the completion, as StopReason.CONTROL.
        max_rows: most rows decoded together.
        prefix_bytes: most keys and values kept between calls, for prompts that extend what was read or drawn before; 0 keeps nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        stop_ids: frozenset[int],
        control_ids: frozenset[int],
        max_rows: int = 512,
        prefix_bytes: int = PREFIX_BYTES,
    ):
        self.model, self.stop_ids, self.control_ids = model, stop_ids, control_ids
        self.max_rows, self.prefixes = max_rows, PrefixCache(prefix_bytes)
        self.version = 0
        self._watch = Watch(model)
        self._decoder: Decoder | None = None
        self._decoder_version = 0

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        decoder, sheet = self.decoder(), _Sheet(requests, self.stop_ids | self.control_ids)
        waiting = [i for i, request in enumerate(requests) if not self._over(request)]
        if progress and len(waiting) < len(requests):
            progress(len(requests) - len(waiting))
        # Siblings side by side, prompts of like length together; `pop` takes from the end.
        waiting.sort(key=lambda i: (len(requests[i].prompt), requests[i].prompt, i), reverse=True)
        try:
            self._run(decoder, sheet, waiting, progress)
        finally:
            decoder.keep(())
        return [self._completion(request, *sheet.of(i)) for i, request in enumerate(requests)]

    def decoder(self) -> Decoder:
        """The decoder of the weights as they are now. It, and every prefix it remembers, is replaced when anything about them changed."""
        changed = self._watch.changed() or self.version != self._decoder_version
        if changed or self._decoder is None:
            self.prefixes.clear()
            self._decoder, self._decoder_version = decoder_for(self.model, self.prefixes), self.version
        return self._decoder

    def _run(self, decoder: Decoder, sheet: _Sheet, waiting: list[int], progress: Callable[[int], None] | None) -> None:
        live = np.zeros(0, dtype=np.int64)
        ids_R: Tensor | None = None
        seats = 0  # rows that lived after the last entry
        while len(live) or waiting:
            logits = [] if ids_R is None else [decoder.step(ids_R)]
            if waiting and (not len(live) or (decoder.joins and len(live) < REFILL * seats)):
                entering = self._next(decoder, sheet.requests, live, waiting)
                if entering:
                    logits.append(decoder.enter([_context(sheet.requests[i]) for i in entering]))
                    live = np.concatenate([live, np.array(entering, dtype=np.int64)])
                seats = len(live)
            ids_R, done_R = sheet.draw(torch.cat(logits) if len(logits) > 1 else logits[0], live)
            if done_R.any():
                for row in np.flatnonzero(done_R):
                    decoder.remember(int(row), sheet.read(int(live[row])))
                keep = np.flatnonzero(~done_R)
                decoder.keep(keep.tolist())
                ids_R, live = (ids_R[torch.from_numpy(keep).to(ids_R.device)], live[keep]) if len(keep) else (None, live[keep])
                if progress:
                    progress(int(done_R.sum()))

    def _next(self, decoder: Decoder, requests: Sequence[Request], live: np.ndarray, waiting: list[int]) -> list[int]:
        """Take from `waiting` what fits beside the living: at most max_rows rows and CACHE_BYTES, but at least one row in all."""
        members = [requests[i] for i in live]
        prompts = {request.prompt for request in members}
        shared = sum(len(prompt) for prompt in prompts)
        own = max((request.sampling.max_tokens for request in members), default=0)
        most = CACHE_BYTES / decoder.bytes_per_token()
        taken: list[int] = []
        while waiting and len(live) + len(taken) < self.max_rows:
            request, rows = requests[waiting[-1]], len(live) + len(taken) + 1
            own = max(own, request.sampling.max_tokens)
            if not (decoder.joins and request.prompt in prompts):
                prompts.add(request.prompt)
                shared += len(request.prompt)
            if rows > 1 and shared + rows * own > most:
                break
            taken.append(waiting.pop())
        return taken

    def _over(self, request: Request) -> bool:
        """Whether there is nothing to draw: no room, or what was drawn has ended."""
        return request.room <= 0 or bool(request.drawn and request.drawn[-1] in self.stop_ids | self.control_ids)

    def _completion(self, request: Request, ids: list[int], logps: list[float], candidates: list[tuple[int, ...]]) -> Completion:
        drawn = request.drawn + tuple(ids)
        if drawn and drawn[-1] in self.stop_ids:
            stop = StopReason.END
        elif drawn and drawn[-1] in self.control_ids:
            stop = StopReason.CONTROL
        else:
            stop = StopReason.LENGTH if len(drawn) >= request.sampling.max_tokens else StopReason.PAUSED
        return Completion(tuple(ids), tuple(logps), stop, self.version, candidates=tuple(candidates))


class _Sheet:
    """What every request has drawn so far, N requests by T tokens of this call, and the noise it draws with."""

    def __init__(self, requests: Sequence[Request], terminal: frozenset[int]):
        self.requests = requests
        self.ends_V = np.zeros(max(terminal, default=0) + 1, dtype=bool)
        """Whether an id ends a completion; ids beyond do not."""
        self.ends_V[list(terminal)] = True
        self.room_N = np.array([max(0, request.room) for request in requests], dtype=np.int64)
        shape = (len(requests), int(self.room_N.max(initial=0)))
        self.ids_NT, self.logp_NT, self.noise_NT = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape)
        self.count_N = np.zeros(len(requests), dtype=np.int64)
        self.candidates: list[list[tuple[int, ...]]] = [[] for _ in requests]
        for i, request in enumerate(requests):
            before, room = len(request.drawn), self.room_N[i]
            self.noise_NT[i, :room] = uniforms(request.seed, before + room)[before:]
        numbers: dict[tuple[float, ...], int] = {}
        kinds = [(s.temperature, s.top_p, s.top_k, s.min_p) for s in (request.sampling for request in requests)]
        self.kind_N = np.array([numbers.setdefault(kind, len(numbers)) for kind in kinds], dtype=np.int64)
        self.kinds = [Sampling(temperature=t, top_p=p, top_k=int(k), min_p=m) for t, p, k, m in numbers]

    def draw(self, logits_RV: Tensor, live: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Draw the next token of requests `live` from their logits; the tokens, and which requests are done."""
        at = self.count_N[live]
        noise_R = torch.from_numpy(self.noise_NT[live, at]).to(logits_RV.device)
        ids_R, logp_R, kept = _draw_each(logits_RV, self.kinds, self.kind_N[live], noise_R)
        drawn = ids_R.cpu().numpy()
        self.ids_NT[live, at], self.logp_NT[live, at] = drawn, logp_R.cpu().numpy()
        self.count_N[live] += 1
        for row, candidates in kept.items():
            self.candidates[live[row]].append(candidates)
        ends_R = self.ends_V[np.minimum(drawn, len(self.ends_V) - 1)] & (drawn < len(self.ends_V))
        return ids_R, ends_R | (self.count_N[live] >= self.room_N[live])

    def read(self, index: int) -> tuple[int, ...]:
        """The tokens after its prompt whose keys and values a request has computed: all but the last, which nothing has read."""
        return (self.requests[index].drawn + tuple(self.ids_NT[index, : self.count_N[index]].tolist()))[:-1]

    def of(self, index: int) -> tuple[list[int], list[float], list[tuple[int, ...]]]:
        """Ids, log-probabilities and candidates of one request."""
        n = self.count_N[index]
        return self.ids_NT[index, :n].tolist(), self.logp_NT[index, :n].tolist(), self.candidates[index]


def _context(request: Request) -> Context:
    return Context(request.prompt, request.drawn)


def _draw_each(
    logits_RV: Tensor, kinds: Sequence[Sampling], kind_R: np.ndarray, noise_R: Tensor
) -> tuple[Tensor, Tensor, dict[int, tuple[int, ...]]]:
    """One token per row, each under its own sampling conditions: ids, log-probabilities, and the candidates of rows with a cut."""
    if len(kinds) == 1:
        return _draw(logits_RV, kinds[0], noise_R)
    ids_R = torch.zeros(len(logits_RV), dtype=torch.long, device=logits_RV.device)
    logp_R = torch.zeros(len(logits_RV), device=logits_RV.device)
    kept: dict[int, tuple[int, ...]] = {}
    for kind in np.unique(kind_R):
        rows = np.flatnonzero(kind_R == kind)
        index = torch.from_numpy(rows).to(logits_RV.device)
        ids_R[index], logp, some = _draw(logits_RV[index], kinds[kind], noise_R[index])
        logp_R[index] = logp.to(logp_R.dtype)
        kept.update((int(rows[row]), candidates) for row, candidates in some.items())
    return ids_R, logp_R, kept


def _draw(logits_NV: Tensor, sampling: Sampling, noise_N: Tensor) -> tuple[Tensor, Tensor, dict[int, tuple[int, ...]]]:
    ids_N, logp_N, kept_NV = draw_kept(logits_NV, sampling, noise_N)
    if kept_NV is None:
        return ids_N, logp_N, {}
    counts = kept_NV.sum(-1).tolist()
    columns = kept_NV.nonzero()[:, 1].split(counts)
    return ids_N, logp_N, {row: tuple(ids.tolist()) for row, ids in enumerate(columns)}
