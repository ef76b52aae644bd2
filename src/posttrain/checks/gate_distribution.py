"""Gate A: how far the accelerated path's distribution is from the reference's, on tokens that the accelerated path itself draws.

The accelerated sampler generates at a fixed seed; the reference then scores exactly those tokens, teacher-forced, and only the generated
positions count (no prompt, no padding). The accelerated distribution is the one that the tokens were drawn from, recorded while they were,
or else that of a second, teacher-forced pass. The two need not agree: a path that rounds to integers turns last-bit differences into
steps, and how far two of its own passes are apart is a figure of its own (`self_kl`). Per position, with p the reference and a the
accelerated distribution at the sampling temperature:

    KL(p || a) = sum over v of p(v) (log p(v) - log a(v))            nats, over the whole vocabulary
    ratio      = p(x) / a(x) = exp(lp_reference - lp_accelerated)    what the trainer multiplies an advantage with: trainer over rollout

The ratio is not the one of exp(lp_accelerated - lp_reference): a clip band is not symmetric under inversion (0.8 <-> 1.25).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from scipy import special
from torch import Tensor, nn

from posttrain.checks.gates import Gate, GateResult, Verdict
from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.engine.local import LocalSampler
from posttrain.engine.types import Completion, Request, Sampler
from posttrain.stats.intervals import item_clustered_se

THRESHOLD = 0.05
"""Largest mean forward KL per generated token, in nats (spec/book-6 1.A.1)."""
BAND = (0.8, 1.28)
"""Trainer-over-rollout ratios that the usual clip range leaves alone."""
SPEAKS = 1e-4
SPEAKS_SHARE = 0.1
"""What was scored is what was sampled from while log-probabilities differ by no more than this on average from those that the sampler
recorded, or by no more than this share of what separates the two paths."""
SELF_SHARE, SELF_LEAST = 0.1, 1e-5
"""Two passes of a path that differ by more than this share of its KL to the reference, and by more than this, are worth a warning."""
BUCKETS = (0, 8, 32, 128, 512)
"""First positions of the buckets by which the KL is reported: does it grow with what was generated before?"""
LEAST_IN_BUCKET = 30
"""Tokens below which a bucket is reported, and not judged."""


class Scorer(Protocol):
    """What a path says about given tokens."""

    def __call__(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Raw logits [T, V] at the places of `ids` after `prompt`."""
        ...


def model_scorer(model: nn.Module) -> Scorer:
    """The scorer of a model: one forward pass over prompt and completion."""

    @torch.no_grad()
    def scored(prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        tokens = torch.tensor([[*prompt, *ids]])
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=len(ids) + 1).logits
        return logits[0, -len(ids) - 1 : -1]

    return scored


Trace = Callable[[Request], tuple[Completion, Tensor]]
"""Draws one request, and gives the raw logits [T, V] that its tokens were drawn from."""


class _Recording:
    """A decoder that keeps the logits it gives out."""

    def __init__(self, decoder: Any):
        self._decoder = decoder
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def enter(self, contexts: Any) -> Tensor:
        self.logits.append(self._decoder.enter(contexts))
        return self.logits[-1]

    def step(self, ids_R: Tensor) -> Tensor:
        self.logits.append(self._decoder.step(ids_R))
        return self.logits[-1]


def traced(sampler: LocalSampler) -> Trace:
    """The trace of a local sampler, asked for one request at a time."""

    def trace(request: Request) -> tuple[Completion, Tensor]:
        recording, twin = _Recording(sampler.decoder()), copy.copy(sampler)
        twin.decoder = lambda: recording  # type: ignore[method-assign, assignment, return-value]
        (completion,) = twin.generate([request])
        return completion, torch.cat(recording.logits)[: len(completion.ids)].clone()

    return trace


@dataclass(frozen=True, slots=True)
class Paths:
    """Both paths, each as a sampler and as the scorer that speaks for it."""

    reference: Sampler
    accelerated: Sampler
    reference_scorer: Scorer
    accelerated_scorer: Scorer
    trace: Trace | None = None
    """Of the accelerated sampler, when it can say what it drew from; then this is what is measured."""


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """What two paths disagree about on the tokens of one completion.

    Example, one token with p = (0.5, 0.5), a = (0.25, 0.75), drawn token 0: kl = 0.5 ln 2 + 0.5 ln (2/3) = 0.1438, log_ratio = ln 2.
    """

    kl32: tuple[float, ...]
    """Forward KL per token with the log-softmax and the sum in float32."""
    kl64: tuple[float, ...]
    """The same from the same logits, in float64."""
    log_ratio: tuple[float, ...]
    """lp_reference - lp_accelerated of the drawn token."""
    accelerated: tuple[float, ...]
    """lp_accelerated of the drawn token, from the scorer."""
    disagrees: tuple[bool, ...]
    """Whether the most likely tokens differ."""


def token_gaps(reference_TV: Tensor, accelerated_TV: Tensor, ids: Sequence[int], temperature: float) -> TokenGaps:
    """Compare two paths' raw logits at the same places."""
    kl32, _, _ = _kl(reference_TV.float() / temperature, accelerated_TV.float() / temperature)
    kl64, p, a = _kl(reference_TV.double() / temperature, accelerated_TV.double() / temperature)
    drawn = torch.tensor(list(ids))[:, None]
    lp, la = (x.gather(-1, drawn).squeeze(-1) for x in (p, a))
    disagrees = reference_TV.argmax(-1) != accelerated_TV.argmax(-1)
    return TokenGaps(*(tuple(x.tolist()) for x in (kl32, kl64, lp - la, la, disagrees)))


def _kl(reference_TV: Tensor, accelerated_TV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    p, a = reference_TV.log_softmax(-1), accelerated_TV.log_softmax(-1)
    terms = torch.where(p.isneginf(), torch.zeros_like(p), p.exp() * (p - a))
    return terms.sum(-1), p, a


def distribution_gate(
    paths: Paths,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    seed: int,
    *,
    threshold: float = THRESHOLD,
    band: tuple[float, float] = BAND,
) -> GateResult:
    """Run gate A on `prompts`, one completion each at `sampling`'s temperature without cuts, and greedily for the first divergence.

    Passes when the mean forward KL lies below the threshold by more than its sampling error (95 %, over prompts) and its dtype error
    together, fails when it lies above by as much, and is otherwise not shown. Fails as well when a number is not finite, and when the
    accelerated scorer does not reproduce what the accelerated sampler recorded: then the wrong path was measured.
    """
    if sampling.greedy:
        raise EvidenceError("gate A compares distributions; give it the temperature of training, above 0")
    if len(prompts) < 2:
        raise EvidenceError(f"gate A needs at least 2 prompts, got {len(prompts)}; 100 to 500 are usual")
    plain = Sampling(temperature=sampling.temperature, max_tokens=sampling.max_tokens)
    asked = [Request(prompt, plain, derive(seed, "contract", "A", place)) for place, prompt in enumerate(prompts)]
    drawn, gaps, own = [], [], []
    for request in asked:
        completion, logits_TV = _drawn(paths, request)
        reference_TV = paths.reference_scorer(request.prompt, completion.ids)
        again_TV = paths.accelerated_scorer(request.prompt, completion.ids)
        drawn.append(completion)
        gaps.append(token_gaps(reference_TV, again_TV if logits_TV is None else logits_TV, completion.ids, plain.temperature))
        own += [] if logits_TV is None else token_gaps(again_TV, logits_TV, completion.ids, plain.temperature).kl64
    at_zero = plain.model_copy(update={"temperature": 0.0})
    greedy = [Request(request.prompt, at_zero, request.seed) for request in asked]
    parted = first_divergence(paths.reference.generate(greedy), paths.accelerated.generate(greedy))
    apart = [abs(a - b) for gap, done in zip(gaps, drawn, strict=True) for a, b in zip(gap.accelerated, done.logps, strict=True)]
    speaks = math.fsum(apart) / len(apart)
    measured = summarise(gaps, band) | {
        "sampler_scorer_gap": _finite(speaks),
        "sampler_scorer_max": _finite(max(apart)),
        "self_kl": _finite(math.fsum(own) / len(own)) if own else None,
        "recorded_while_drawn": paths.trace is not None,
        "divergence": parted,
        "estimator": "forward KL(reference || accelerated), whole vocabulary, mean over generated tokens",
        "threshold": threshold,
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
    }
    return _judged(measured, gaps, speaks, threshold)


def _drawn(paths: Paths, request: Request) -> tuple[Completion, Tensor | None]:
    if paths.trace is not None:
        return paths.trace(request)
    (completion,) = paths.accelerated.generate([request])
    return completion, None


def summarise(gaps: Sequence[TokenGaps], band: tuple[float, float] = BAND) -> dict[str, Any]:
    """The figures of gate A over all completions; means are over tokens, the standard error over prompts. Not finite reads None."""
    kl = [value for gap in gaps for value in gap.kl64]
    ratios = [value for gap in gaps for value in gap.log_ratio]
    n = len(kl)
    outside = sum(not math.log(band[0]) <= value <= math.log(band[1]) for value in ratios)
    by_position = []
    for low, high in zip(BUCKETS, (*BUCKETS[1:], None), strict=True):
        held = [gap.kl64[low:high] for gap in gaps if len(gap.kl64) > low]
        if held:
            values = [value for part in held for value in part]
            by_position.append({"from": low, "n": len(values), "kl": _finite(math.fsum(values) / len(values))})
    finite = all(map(math.isfinite, kl))
    return {
        "kl": _finite(math.fsum(kl) / n),
        "kl_float32": _finite(math.fsum(value for gap in gaps for value in gap.kl32) / n),
        "kl_se": item_clustered_se([gap.kl64 for gap in gaps]) if finite else None,
        "mean_gap": _finite(math.fsum(map(abs, ratios)) / n) if all(map(math.isfinite, ratios)) else None,
        "max_gap": _finite(max(map(abs, ratios))) if all(map(math.isfinite, ratios)) else None,
        "outside_band": outside / n,
        "band": list(band),
        "ratio": "exp(lp_reference - lp_accelerated), trainer over rollout",
        "argmax_disagreement": sum(value for gap in gaps for value in gap.disagrees) / n,
        "n_prompts": len(gaps),
        "n_tokens": n,
        "kl_by_position": by_position,
    }


def first_divergence(reference: Sequence[Completion], accelerated: Sequence[Completion]) -> dict[str, float | int | None]:
    """Where greedy outputs part: how many do, and the first and mean position (from 0) of those that do.

    Example: (5, 6, 7) against (5, 9) parts at 1; (5, 6) against (5, 6) does not part: {"parted": 1, "of": 2, "first": 1, "mean": 1.0}
    """
    places = []
    for one, other in zip(reference, accelerated, strict=True):
        if one.ids != other.ids:
            pairs = zip(one.ids, other.ids, strict=False)
            places.append(next((t for t, (a, b) in enumerate(pairs) if a != b), min(len(one.ids), len(other.ids))))
    mean = sum(places) / len(places) if places else None
    return {"parted": len(places), "of": len(reference), "first": min(places, default=None), "mean": mean}


def _judged(measured: dict[str, Any], gaps: Sequence[TokenGaps], speaks: float, threshold: float) -> GateResult:
    kl, kl32, error = measured["kl"], measured["kl_float32"], measured["kl_se"]
    warnings = []
    if kl is None or kl32 is None or error is None or measured["max_gap"] is None:
        text = "the KL is not a finite number: one of the paths computes NaN or infinity"
        return GateResult(Gate.DISTRIBUTION, Verdict.FAILED, text, measured)
    if not speaks <= max(SPEAKS, SPEAKS_SHARE * measured["mean_gap"]):
        text = (
            f"what was scored is not what was sampled from: log-probabilities differ by {speaks:.2g} nats on average; the wrong path was "
            "scored, or it does not reproduce itself and has to be recorded while it draws"
        )
        return GateResult(Gate.DISTRIBUTION, Verdict.FAILED, text, measured)
    margin = float(special.stdtrit(len(gaps) - 1, 0.975)) * error + abs(kl - kl32)
    measured["kl_margin"] = margin
    verdict = Verdict.PASSED if kl + margin < threshold else Verdict.FAILED if kl - margin > threshold else Verdict.NOT_SHOWN
    if verdict is Verdict.NOT_SHOWN:
        warnings.append(f"KL {kl:.4g} is within {margin:.2g} of the threshold {threshold:g} (sampling and dtype error): use more prompts")
    growth = _growth(measured["kl_by_position"])
    if growth is not None and growth > 2:
        warnings.append(f"the KL grows with the context: x {growth:.1f} from the first to the last positions; test the longest completions")
    if measured["self_kl"] is not None and measured["self_kl"] > SELF_SHARE * kl and measured["self_kl"] > SELF_LEAST:
        warnings.append(
            f"two passes of this path differ by KL {measured['self_kl']:.3g} between themselves: its log-probabilities cannot be computed "
            "again, keep those recorded at sampling; results depend on batch mates"
        )
    text = (
        f"KL {kl:.4g} +- {margin:.2g} nats/token (bar {threshold:g}), ratios outside the band {measured['outside_band']:.2%}, "
        f"argmax differs {measured['argmax_disagreement']:.2%}, n {measured['n_tokens']} tokens of {measured['n_prompts']} prompts"
    )
    return GateResult(Gate.DISTRIBUTION, verdict, text, measured, tuple(warnings))


def _growth(buckets: Sequence[dict[str, Any]]) -> float | None:
    """Mean KL of the last bucket over that of the first, of those with enough tokens; None with one of them, or nothing to divide by."""
    told = [row["kl"] for row in buckets if row["n"] >= LEAST_IN_BUCKET and row["kl"] is not None]
    return told[-1] / told[0] if len(told) > 1 and told[0] else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
