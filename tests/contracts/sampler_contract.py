"""What every sampler promises, as plain checks that take a Case. The expected numbers come from the model's own forward and from the
cuts written out once more below, in float64."""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.trajectory import StopReason
from posttrain.engine.types import Completion, Request

VOCAB = 64
STOP = frozenset({2, 3})
CONTROL = frozenset({0, 1, 2, 3})
PROMPTS = ((1, 5, 9), (1, 5, 9, 11, 12), (1, 7), (1, 5, 9, 11, 30, 31, 32))
UNCUT = (Sampling(max_tokens=12), Sampling(temperature=0.3, max_tokens=12), Sampling(temperature=2.0, max_tokens=12))
CUT = (
    Sampling(top_k=1, max_tokens=12),
    Sampling(top_k=7, max_tokens=12),
    Sampling(top_p=0.8, max_tokens=12),
    Sampling(min_p=0.1, max_tokens=12),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, max_tokens=12),
    Sampling(temperature=2.0, top_k=15, min_p=0.2, max_tokens=12),
)
BOTH_MASSES = Sampling(temperature=0.7, top_p=0.9, min_p=0.05, max_tokens=12)
"""Engines apply these two cuts in different orders, so only the kept ids say what the distribution was."""
DRAWS = 300
"""Of one token, to compare with its distribution."""


@dataclass
class Case:
    """A sampler and the model that it draws from."""

    sampler: Any
    forward: Callable[[Sequence[int]], Tensor]
    """Logits [T, V] of a sequence of ids, from the model's own forward."""
    tolerance: float = 1e-5
    """Largest difference of a log-probability."""
    splits: bool = True
    """Whether a completion drawn in several calls is the one that a single call draws."""
    gaps: list[float] = field(default_factory=list)
    """Every difference of log-probabilities seen so far, for a report."""

    def draw(self, requests: Sequence[Request]) -> list[Completion]:
        done = self.sampler.generate(requests)
        assert len(done) == len(requests)
        return done

    def compare(self, request: Request, done: Completion) -> None:
        """Each log-probability is that of the sampled id, under the distribution that it was drawn from."""
        expected = reference(self.forward, request, done)
        assert len(done.logps) == len(done.ids)
        self.gaps += [abs(one - other) for one, other in zip(done.logps, expected, strict=True)]
        assert max(self.gaps[-len(expected) :]) <= self.tolerance, (request.sampling, done.logps, expected)


def tiny(model: PreTrainedModel, std: float) -> PreTrainedModel:
    """Weights large enough that every token and position matters, from a stream of their own."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, std, generator=generator)
    return model.float().eval()


def llama() -> PreTrainedModel:
    """Heads of 32, the smallest that vLLM's CPU attention knows."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return tiny(LlamaForCausalLM(config), 0.15)


def neox() -> PreTrainedModel:
    """An architecture that the fast decoder does not know."""
    config = GPTNeoXConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    return tiny(GPTNeoXForCausalLM(config), 0.3)


def forward_of(model: PreTrainedModel) -> Callable[[Sequence[int]], Tensor]:
    def forward(ids: Sequence[int]) -> Tensor:
        with torch.no_grad():
            return model(input_ids=torch.tensor([list(ids)])).logits[0].float()

    return forward


def distribution(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities of the sampling distribution, -inf outside: temperature, top-k, top-p, min-p, float64."""
    logp_V = (logits_V.double() / (sampling.temperature or 1.0)).log_softmax(-1)
    if not sampling.cuts:
        return logp_V
    logps = logp_V.tolist()
    ranked = sorted(range(len(logps)), key=lambda token: (-logps[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    if sampling.top_p < 1.0:
        total = sum(math.exp(logps[token]) for token in ranked)
        mass, nucleus = 0.0, []
        for token in ranked:
            if mass >= sampling.top_p:
                break
            nucleus.append(token)
            mass += math.exp(logps[token]) / total
        ranked = nucleus
    if sampling.min_p:
        bar = logps[ranked[0]] + math.log(sampling.min_p)
        ranked = [token for token in ranked if logps[token] >= bar]
    return renormalised(logp_V, ranked)


def renormalised(logp_V: Tensor, kept: Sequence[int]) -> Tensor:
    out_V = torch.full_like(logp_V, -torch.inf)
    out_V[list(kept)] = logp_V[list(kept)].log_softmax(-1)
    return out_V


def steps(forward: Callable[[Sequence[int]], Tensor], request: Request, ids: Sequence[int]) -> Tensor:
    """Logits [len(ids), V] that each of `ids` was drawn from."""
    before = [*request.prompt, *request.drawn]
    return forward([*before, *ids])[len(before) - 1 : -1]


def reference(forward: Callable[[Sequence[int]], Tensor], request: Request, done: Completion) -> list[float]:
    """Log-probability of each sampled id; over the kept ids where there are some."""
    if request.sampling.greedy:
        return [0.0] * len(done.ids)
    expected = []
    for place, (token, logits_V) in enumerate(zip(done.ids, steps(forward, request, done.ids), strict=True)):
        if request.sampling.cuts:
            logp_V = renormalised(logits_V.double() / request.sampling.temperature, done.candidates[place])
        else:
            logp_V = distribution(logits_V, request.sampling)
        expected.append(float(logp_V[token]))
    return expected


def requests(n: int, sampling: Sampling, name: str = "contract") -> list[Request]:
    """`n` requests, siblings apart from each other."""
    return [Request(PROMPTS[i % len(PROMPTS)], sampling, derive(3, name, i)) for i in range(n)]


def same(one: Completion, other: Completion, tolerance: float) -> None:
    assert (one.ids, one.stop, one.candidates) == (other.ids, other.stop, other.candidates)
    assert all(abs(a - b) <= tolerance for a, b in zip(one.logps, other.logps, strict=True))


def unpaused(request: Request, done: Completion) -> StopReason:
    """How a completion has to end that no limit cut, from its ids alone."""
    assert all(token not in CONTROL for token in done.ids[:-1])
    if done.ids[-1] in STOP:
        return StopReason.END
    if done.ids[-1] in CONTROL:
        return StopReason.CONTROL
    assert len(request.drawn) + len(done.ids) == request.sampling.max_tokens
    return StopReason.LENGTH


# ---------------------------------------------------------------- the checks


def no_requests(case: Case) -> None:
    assert case.sampler.generate([]) == []


def order_is_that_of_the_requests(case: Case) -> None:
    asked = [Request(PROMPTS[i % 4], Sampling(temperature=0.0, max_tokens=n), i) for i, n in enumerate((9, 1, 5, 2, 8, 3, 1, 7, 12, 4))]
    for request, done in zip(asked, case.draw(asked), strict=True):
        assert list(done.ids) == greedy(case.forward, request)


def greedy(forward: Callable[[Sequence[int]], Tensor], request: Request) -> list[int]:
    ids: list[int] = []
    while len(ids) < request.room and (not ids or ids[-1] not in CONTROL):
        ids.append(int(forward([*request.prompt, *request.drawn, *ids])[-1].argmax()))
    return ids


def greedy_has_no_log_probability(case: Case) -> None:
    for sampling in (Sampling(temperature=0.0, max_tokens=8), Sampling(temperature=0.0, top_k=5, top_p=0.9, max_tokens=8)):
        asked = [Request(prompt, sampling, seed) for seed, prompt in enumerate(PROMPTS)]
        for request, done in zip(asked, case.draw(asked), strict=True):
            assert list(done.ids) == greedy(case.forward, request)
            assert done.logps == (0.0,) * len(done.ids)


def endings_have_their_reasons(case: Case) -> None:
    asked = requests(48, Sampling(max_tokens=12))
    done = case.draw(asked)
    for request, one in zip(asked, done, strict=True):
        assert one.stop is unpaused(request, one)
    seen = Counter(one.stop for one in done)
    assert min(seen[reason] for reason in (StopReason.END, StopReason.CONTROL, StopReason.LENGTH)) > 2, seen
    last = [Request(r.prompt, Sampling(max_tokens=len(one.ids)), r.seed) for r, one in zip(asked, done, strict=True)]
    for request, one, again in zip(last, done, case.draw(last), strict=True):
        assert again.ids == one.ids  # a smaller budget draws the same tokens
        assert again.stop is unpaused(request, again)


def log_probabilities_are_those_of_the_draw(case: Case) -> None:
    unlikely = 0
    for sampling in UNCUT:
        asked = requests(16, sampling)
        for request, done in zip(asked, case.draw(asked), strict=True):
            case.compare(request, done)
            assert done.candidates == ()
            best = steps(case.forward, request, done.ids).argmax(-1).tolist()
            unlikely += sum(token != top for token, top in zip(done.ids, best, strict=True))
    assert unlikely > 50


def cuts_keep_their_ids(case: Case) -> None:
    for sampling in CUT:
        asked = requests(12, sampling)
        for request, done in zip(asked, case.draw(asked), strict=True):
            for kept, logits_V in zip(done.candidates, steps(case.forward, request, done.ids), strict=True):
                assert kept == tuple(distribution(logits_V, sampling).isfinite().nonzero().flatten().tolist()), sampling
            assert all(token in kept for token, kept in zip(done.ids, done.candidates, strict=True))
            case.compare(request, done)


def any_cut_can_be_replayed_from_its_ids(case: Case) -> None:
    asked = requests(12, BOTH_MASSES)
    sizes: list[int] = []
    for request, done in zip(asked, case.draw(asked), strict=True):
        assert len(done.candidates) == len(done.ids)
        case.compare(request, done)
        sizes += [len(kept) for kept in done.candidates]
    assert 2 < sum(sizes) / len(sizes) < VOCAB / 2


def conditions_may_differ_within_a_call(case: Case) -> None:
    mixed = [Sampling(temperature=0.0, max_tokens=6), *UNCUT, *CUT, Sampling(max_tokens=3)]
    asked = [Request(PROMPTS[i % 4], sampling, derive(4, i)) for i, sampling in enumerate(mixed)]
    for request, done in zip(asked, case.draw(asked), strict=True):
        same(done, case.draw([request])[0], 2 * case.tolerance)
        case.compare(request, done)


def draws_follow_the_distribution(case: Case) -> None:
    for sampling, drawn in ((Sampling(temperature=0.7, max_tokens=1), ()), (Sampling(top_p=0.8, max_tokens=2), (20,))):
        asked = [Request(PROMPTS[1], sampling, derive(8, i), drawn) for i in range(DRAWS)]
        counts = Counter(done.ids[0] for done in case.draw(asked))
        expected_V = DRAWS * distribution(case.forward([*PROMPTS[1], *drawn])[-1], sampling).exp()
        assert all(expected_V[token] > 0 for token in counts)
        cells = [(counts[token], float(e)) for token, e in enumerate(expected_V) if e >= 5]
        cells.append((DRAWS - sum(n for n, _ in cells), DRAWS - sum(e for _, e in cells)))
        squares = sum((n - e) ** 2 / e for n, e in cells if e > 0.5)
        freedom = len(cells) - 1
        assert squares < freedom + 5 * math.sqrt(2 * freedom), (squares, freedom)


def seeds_decide(case: Case) -> None:
    asked = requests(12, Sampling(max_tokens=10))
    first, again = case.draw(asked), case.draw(asked)
    for one, other in zip(first, again, strict=True):
        same(one, other, 2 * case.tolerance)
    siblings = case.draw([Request(PROMPTS[0], Sampling(max_tokens=10), derive(5, i)) for i in range(12)])
    assert len({done.ids for done in siblings}) > 8


def batch_mates_do_not_matter(case: Case) -> None:
    asked = requests(14, Sampling(max_tokens=10)) + requests(4, Sampling(temperature=0.5, top_p=0.9, max_tokens=10))
    together = case.draw(asked)
    for request, expected in zip(asked, together, strict=True):
        same(case.draw([request])[0], expected, 2 * case.tolerance)
    order = list(range(len(asked)))
    random.Random(3).shuffle(order)
    for place, done in zip(order, case.draw([asked[i] for i in order]), strict=True):
        same(done, together[place], 2 * case.tolerance)


def drawn_tokens_are_read_and_counted(case: Case) -> None:
    sampling = Sampling(temperature=0.8, max_tokens=8)
    asked = [Request(prompt, sampling, derive(6, i), (20 + i, 33)[: 1 + i % 2]) for i, prompt in enumerate(PROMPTS * 4)]
    for request, done in zip(asked, case.draw(asked), strict=True):
        assert 1 <= len(done.ids) <= 8 - len(request.drawn)
        assert done.stop is unpaused(request, done)
        case.compare(request, done)


def a_continuation_sees_new_noise(case: Case) -> None:
    """The noise of place 0 must not decide place 1: the same seed reads one sequence once as prompt, once as drawn."""
    sampling = Sampling(max_tokens=2)
    later = case.draw([Request(PROMPTS[0], sampling, derive(9, i), (20,)) for i in range(40)])
    first = case.draw([Request((*PROMPTS[0], 20), sampling, derive(9, i)) for i in range(40)])
    agree = sum(one.ids[0] == other.ids[0] for one, other in zip(later, first, strict=True))
    assert agree < 25, agree


def a_limit_pauses(case: Case) -> None:
    for limit in (1, 4, 40):
        asked = [Request(r.prompt, r.sampling, r.seed, limit=limit) for r in requests(12, Sampling(max_tokens=12))]
        whole = case.draw([Request(r.prompt, r.sampling, r.seed) for r in asked])
        for request, done, full in zip(asked, case.draw(asked), whole, strict=True):
            same(done, dataclasses.replace(full, ids=full.ids[:limit], logps=full.logps[:limit], stop=done.stop), 2 * case.tolerance)
            assert done.stop is (full.stop if len(full.ids) <= limit else StopReason.PAUSED)
            assert len(done.ids) <= request.room


def parts_add_up(case: Case) -> None:
    """Completions drawn three tokens at a time: never more than max_tokens, one ending, log-probabilities of the whole."""
    asked = requests(8, Sampling(temperature=1.2, max_tokens=11)) + requests(8, Sampling(temperature=1.2, top_k=9, max_tokens=11))
    whole = case.draw(asked)
    parts: list[list[Completion]] = [[] for _ in asked]
    waiting = list(range(len(asked)))
    while waiting:
        calls = [
            Request(asked[i].prompt, asked[i].sampling, asked[i].seed, tuple(t for p in parts[i] for t in p.ids), limit=3) for i in waiting
        ]
        for i, request, done in zip(waiting, calls, case.draw(calls), strict=True):
            case.compare(request, done)
            parts[i].append(done)
        waiting = [i for i in waiting if parts[i][-1].stop is StopReason.PAUSED]
    assert max(len(drawn) for drawn in parts) == 4
    for request, drawn, full in zip(asked, parts, whole, strict=True):
        ids, logps, candidates = (tuple(item for part in drawn for item in getattr(part, name)) for name in ("ids", "logps", "candidates"))
        joined = Completion(ids, logps, drawn[-1].stop, drawn[0].version, candidates=candidates)
        assert joined.stop is unpaused(request, joined)
        if case.splits:
            same(joined, full, 2 * case.tolerance)


def versions_are_stamped(case: Case) -> None:
    before = case.sampler.version
    case.sampler.version = 7
    done = case.draw(requests(5, Sampling(max_tokens=4)))
    case.sampler.version = before
    assert {one.version for one in done} == {7}
    assert all(set(one.versions) <= {7} and len(one.versions) in (0, len(one.ids)) for one in done)


def progress_adds_up(case: Case) -> None:
    told: list[int] = []
    asked = requests(11, Sampling(max_tokens=6)) + requests(2, Sampling(temperature=0.0, max_tokens=6))
    assert len(case.sampler.generate(asked, told.append)) == 13
    assert sum(told) == 13
    assert all(n > 0 for n in told)


CHECKS: tuple[Callable[[Case], None], ...] = (
    no_requests,
    order_is_that_of_the_requests,
    greedy_has_no_log_probability,
    endings_have_their_reasons,
    log_probabilities_are_those_of_the_draw,
    cuts_keep_their_ids,
    any_cut_can_be_replayed_from_its_ids,
    conditions_may_differ_within_a_call,
    draws_follow_the_distribution,
    seeds_decide,
    batch_mates_do_not_matter,
    drawn_tokens_are_read_and_counted,
    a_continuation_sees_new_noise,
    a_limit_pauses,
    parts_add_up,
    versions_are_stamped,
    progress_adds_up,
)
