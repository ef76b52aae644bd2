"""Speculative decoding: a small draft proposes, the model verifies several tokens in one pass, rejection keeps the distribution exact.

For a proposal d drawn from the draft's q, with p the model's distribution at that place (both after temperature, top-k, top-p, min-p):

    d stays with probability min(1, p(d) / q(d)); otherwise the token is drawn from max(p - q, 0), normalised.    (Leviathan et al. 2023)

What comes out has distribution p whatever q is; a bad draft costs time, not correctness. Every place t of a completion owns three uniforms
of its request (proposal, acceptance, residual), and every place is decided by this one rule: when all proposals are kept, the next token
is not drawn from p directly, as is usual, but waits for its own proposal in the next pass. So a token is a function of what stands before
it and of its place's uniforms: neither the number of proposals per pass, nor batch mates, nor a pause changes it. Greedy decoding is p with
all mass on one token: its output is that of decoding without a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive, uniforms
from posttrain.core.trajectory import StopReason
from posttrain.engine.draft import Acceptance, check_draft
from posttrain.engine.types import Completion, Request
from posttrain.objectives.logprobs import draw, warp

SHRINK = 0.75
"""Rows are compacted when fewer than this share of them is still alive."""


class SpeculativeSampler:
    """Samples from `model` with the proposals of `draft`.

    Args:
        model: in evaluation mode, with full attention in every layer; its live weights are read.
        draft: the same vocabulary; see `check_draft` and `first_layers`.
        ahead: proposals per pass of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        draft: nn.Module,
        stop_ids: frozenset[int],
        control_ids: frozenset[int],
        max_rows: int = 64,
        ahead: int = 4,
    ):
        if ahead < 1:
            raise ConfigError(f"{ahead} proposals per pass; use at least 1, 3 to 5 is usual")
        check_draft(model, draft)
        self.model, self.draft, self.stop_ids, self.control_ids = model, draft, stop_ids, control_ids
        self.max_rows, self.ahead, self.version = max_rows, ahead, 0
        self.acceptance: dict[float, Acceptance] = {}
        """By temperature, since the sampler was made."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """See `Sampler`; log-probabilities are those of the model, never of the draft."""
        results: list[Completion | None] = [None] * len(requests)
        for wave in self._waves(requests):
            rows = [_Row(index, requests[index]) for index in wave]
            self._decode(rows, requests[wave[0]].sampling, progress)
            for row in rows:
                results[row.index] = self._completion(row)
        return [completion for completion in results if completion is not None]

    def _waves(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Requests of one distribution that decode together, contexts of like length side by side."""

        def shape(index: int) -> tuple[str, int, int]:
            request = requests[index]
            return str(request.sampling.model_copy(update={"max_tokens": 1})), len(request.prompt) + len(request.drawn), index

        wave: list[int] = []
        for index in sorted(range(len(requests)), key=shape):
            if wave and (len(wave) >= self.max_rows or shape(wave[0])[0] != shape(index)[0]):
                yield wave
                wave = []
            wave.append(index)
        if wave:
            yield wave

    def _decode(self, rows: list[_Row], sampling: Sampling, progress: Callable[[int], None] | None) -> None:
        live = [row for row in rows if row.room > 0]
        if progress and len(live) < len(rows):
            progress(len(rows) - len(live))
        if not live:
            return
        caches = _Caches(self.model, self.draft, [row.context for row in live])
        count = Acceptance()
        while True:
            proposal = caches.propose(live, sampling, self.ahead)
            verdict = judge(proposal, sampling, torch.stack([row.uniforms_at(self.ahead) for row in live]))
            kept = []
            for place, row in enumerate(live):
                emitted = self._emit(row, verdict, place)
                kept.append(emitted)
                if emitted:
                    count += Acceptance(1, self.ahead, emitted, min(int(verdict.accepted_B[place]), emitted))
            caches.settle(verdict, kept)
            staying = [place for place, row in enumerate(live) if not row.done]
            if progress and len(staying) < len(live):
                progress(sum(row.done and not row.told for row in live))
            for row in live:
                row.told = row.done
            if not staying:
                break
            if len(staying) < SHRINK * len(live):
                caches.keep(torch.tensor(staying))
                live = [live[place] for place in staying]
        known = self.acceptance.get(sampling.temperature, Acceptance())
        self.acceptance[sampling.temperature] = known + count

    def _emit(self, row: _Row, verdict: Verdict, place: int) -> int:
        """Append the decided tokens of one pass to a row, up to its end; returns how many of the pass count."""
        if row.done:
            return 0
        for step in range(int(verdict.decided_B[place])):
            token = int(verdict.ids_BK[place, step])
            row.append(token, float(verdict.logp_BK[place, step]), verdict.kept(place, step))
            if token in self.stop_ids or token in self.control_ids or len(row.ids) >= row.room:
                row.done = True
                return step + 1
        return int(verdict.decided_B[place])

    def _completion(self, row: _Row) -> Completion:
        stop = StopReason.LENGTH if row.full else StopReason.PAUSED
        if row.ids and row.ids[-1] in self.stop_ids:
            stop = StopReason.END
        elif row.ids and row.ids[-1] in self.control_ids:
            stop = StopReason.CONTROL
        return Completion(tuple(row.ids), tuple(row.logps), stop, self.version, candidates=tuple(row.candidates))


class _Row:
    """One completion while it grows."""

    def __init__(self, index: int, request: Request):
        self.index, self.context = index, (*request.prompt, *request.drawn)
        total, first = request.sampling.max_tokens, len(request.drawn)
        streams = [uniforms(derive(request.seed, "speculative", name), total)[first:] for name in ("proposal", "acceptance", "residual")]
        self.noise_T3 = torch.from_numpy(np.stack(streams, axis=-1))
        self.room = request.room
        self.left = request.sampling.max_tokens - len(request.drawn)
        self.ids: list[int] = []
        self.logps: list[float] = []
        self.candidates: list[tuple[int, ...]] = []
        self.done = self.told = False

    @property
    def full(self) -> bool:
        """Whether max_tokens, rather than the limit of this call, ended it."""
        return len(self.ids) >= self.left

    def uniforms_at(self, ahead: int) -> Tensor:
        """[ahead, 3] of the next places; those beyond the budget are never used and read 0.5."""
        out_K3 = torch.full((ahead, 3), 0.5, dtype=torch.float64)
        mine = self.noise_T3[len(self.ids) : len(self.ids) + ahead]
        out_K3[: len(mine)] = mine
        return out_K3

    def append(self, token: int, logp: float, candidates: tuple[int, ...]) -> None:
        self.ids.append(token)
        self.logps.append(logp)
        if candidates:
            self.candidates.append(candidates)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a pass has to decide on: K proposed tokens per row, and what both models think of each place."""

    ids_BK: Tensor
    draft_BKV: Tensor
    """Logits of the draft, raw."""
    model_BKV: Tensor
    """Logits of the model, raw."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a pass decided: `decided` tokens per row, of which the first `accepted` are proposals."""

    ids_BK: Tensor
    logp_BK: Tensor
    """Of each token under the model's sampling distribution; 0 when greedy."""
    accepted_B: Tensor
    decided_B: Tensor
    support_BKV: Tensor | None = None
    """Which ids the cut left, when there is one."""

    def kept(self, row: int, step: int) -> tuple[int, ...]:
        """The ids that the cut left at one place, ascending; empty without a cut."""
        return () if self.support_BKV is None else tuple(self.support_BKV[row, step].nonzero().squeeze(-1).tolist())


def judge(proposal: Proposal, sampling: Sampling, noise_BK3: Tensor) -> Verdict:
    """Accept each proposal or replace it, up to the first replacement.

    Args:
        proposal: K proposals for each of B rows, drawn from `sampling` applied to the draft's logits.
        noise_BK3: uniforms; the second decides about acceptance, the third draws from the residual.

    Example, one place, p = (0.5, 0.5), q = (1, 0): the draft always says 0, which is kept with probability 0.5 / 1; otherwise the residual
    (0, 0.5), normalised to (0, 1), says 1. Both come out half of the time, as p demands.
    """
    B, K, V = proposal.model_BKV.shape
    model_NV, draft_NV, ids_N = proposal.model_BKV.flatten(0, 1), proposal.draft_BKV.flatten(0, 1), proposal.ids_BK.flatten()
    if sampling.greedy:
        best_N = model_NV.argmax(-1)
        return _verdict(best_N, torch.zeros_like(model_NV[:, 0]), best_N == ids_N, (B, K), None)
    warped_NV = warp(model_NV, sampling)
    p_NV, q_NV = warped_NV.double().softmax(-1), warp(draft_NV, sampling).double().softmax(-1)
    p_N, q_N = (x_NV.gather(-1, ids_N[:, None]).squeeze(-1) for x_NV in (p_NV, q_NV))
    noise_N3 = noise_BK3.flatten(0, 1)
    stays_N = noise_N3[:, 1] * q_N < p_N
    rest_NV = (p_NV - q_NV).clamp(min=0)
    # Where p and q agree to the last bit nothing is left over; a refusal there is a rounding error, and p is the distribution meant.
    rest_NV = torch.where(rest_NV.sum(-1, keepdim=True) > 0, rest_NV, p_NV)
    cdf_NV = rest_NV.cumsum(-1)
    other_N = torch.searchsorted(cdf_NV, noise_N3[:, 2:] * cdf_NV[:, -1:], right=True).squeeze(-1).clamp(max=V - 1)
    taken_N = torch.where(stays_N, ids_N, other_N)
    logp_N = warped_NV.log_softmax(-1).gather(-1, taken_N[:, None]).squeeze(-1)
    support = (~warped_NV.isneginf()).view(B, K, V) if sampling.cuts else None
    return _verdict(taken_N, logp_N, stays_N, (B, K), support)


def _verdict(taken_N: Tensor, logp_N: Tensor, stays_N: Tensor, shape: tuple[int, int], support: Tensor | None) -> Verdict:
    accepted_B = stays_N.view(shape).long().cumprod(-1).sum(-1)
    return Verdict(taken_N.view(shape), logp_N.view(shape), accepted_B, (accepted_B + 1).clamp(max=shape[1]), support)


class _Caches:
    """Both models' caches of the same tokens, slot by slot. The last token of each row is pending: known, and not yet in a cache.

    A pass writes `ahead` slots per row into both; slots of tokens that were not kept stay where they are and are hidden by the mask, so
    that rows which keep different numbers of tokens remain one rectangle.
    """

    def __init__(self, model: nn.Module, draft: nn.Module, contexts: Sequence[tuple[int, ...]]):
        self.models = (model, draft)
        self.caches: list[Any] = [None, None]
        self.pending_B = torch.tensor([context[-1] for context in contexts])
        self.position_B = torch.tensor([len(context) - 1 for context in contexts])
        self.mask_BS = torch.zeros(len(contexts), 0, dtype=torch.long)
        longest = int(self.position_B.max())
        if longest == 0:
            return
        read = list(dict.fromkeys(context[:-1] for context in contexts))  # siblings share a prompt: it is read once
        ids_PT = torch.zeros(len(read), longest, dtype=torch.long)
        mask_PT = torch.zeros_like(ids_PT)
        for row, ids in enumerate(read):
            ids_PT[row, longest - len(ids) :], mask_PT[row, longest - len(ids) :] = torch.tensor(ids), 1
        self.mask_BS = mask_PT
        rows = torch.tensor([read.index(context[:-1]) for context in contexts])
        for which in (0, 1):
            self._read(which, ids_PT, mask_PT, (mask_PT.cumsum(-1) - 1).clamp(min=0), keep=1)
            self.caches[which].batch_select_indices(rows)
        self.mask_BS = mask_PT[rows]

    def _read(self, which: int, ids_BT: Tensor, mask_BS: Tensor, position_BT: Tensor, keep: int) -> Tensor:
        out = self.models[which](
            input_ids=ids_BT,
            attention_mask=mask_BS,
            position_ids=position_BT,
            cache=self.caches[which],
            use_cache=True,
            logits_to_keep=keep,
        )
        self.caches[which] = out.cache
        return out.logits

    def propose(self, rows: Sequence[_Row], sampling: Sampling, ahead: int) -> Proposal:
        """`ahead` tokens per row from the draft, and the model's logits at the places they stand at."""
        noise_BK = torch.stack([row.uniforms_at(ahead) for row in rows])[:, :, 0]
        read, drafts, proposed = [self.pending_B], [], []
        for step in range(ahead):
            mask_BS = torch.cat([self.mask_BS, self.mask_BS.new_ones(len(rows), step + 1)], dim=1)
            logits_BV = self._read(1, read[-1][:, None], mask_BS, (self.position_B + step)[:, None], keep=1)[:, -1]
            ids_B, _ = draw(logits_BV, sampling, noise_BK[:, step])
            drafts.append(logits_BV)
            proposed.append(ids_B)
            read.append(ids_B)
        mask_BS = torch.cat([self.mask_BS, self.mask_BS.new_ones(len(rows), ahead)], dim=1)
        position_BK = self.position_B[:, None] + torch.arange(ahead)
        model_BKV = self._read(0, torch.stack(read[:-1], dim=1), mask_BS, position_BK, keep=ahead)
        return Proposal(torch.stack(proposed, dim=1), torch.stack(drafts, dim=1), model_BKV)

    def settle(self, verdict: Verdict, kept: Sequence[int]) -> None:
        """Take over the first `kept[row]` tokens of a verdict: the last becomes pending, the slots before it stay visible."""
        kept_B = torch.tensor(kept)
        slot_BK = torch.arange(verdict.ids_BK.shape[1]) < kept_B[:, None]  # slot 0 held the old pending token
        self.mask_BS = torch.cat([self.mask_BS, slot_BK.long()], dim=1)
        last_B = verdict.ids_BK.gather(1, (kept_B - 1).clamp(min=0)[:, None]).squeeze(1)
        self.pending_B = torch.where(kept_B > 0, last_B, self.pending_B)
        self.position_B = self.position_B + kept_B

    def keep(self, rows: Tensor) -> None:
        """Only these rows stay."""
        self.pending_B, self.position_B, self.mask_BS = self.pending_B[rows], self.position_B[rows], self.mask_BS[rows]
        for held in self.caches:
            held.batch_select_indices(rows)
