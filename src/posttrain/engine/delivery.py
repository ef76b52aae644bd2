"""Weights from the trainer to a sampler that computes with weights of its own, with proof that they arrived.

A sampler with old weights, with half of the new ones, without the adapters or with another tensor's numbers still answers, and training
goes on against the wrong policy without an error (spec/faults.md 33-37, 64). So every delivery is proven before anything is drawn:

    digests   of every tensor, before sending, equal those of what the receiver holds after loading
    canary    log-probabilities of a fixed continuation agree on both sides; they move when weights moved, and do not when none did
    drawn     tokens that the receiver draws, through the path and the caches of rollouts, have the log-probabilities that the trainer gives
    version   what is drawn from now on is stamped with the version that was sent

A receiver may be unable to read some of its tensors (packed or fused formats). Those count as unproven, and the canary alone proves them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from posttrain.core.errors import PosttrainError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.engine.types import Completion, Receiver, Request, Sampler
from posttrain.engine.weights import DigestCache, Form, PlainWeights, overall_digest, tensor_digest

EXAMPLES = 3
"""Tensors that an error names; it counts all."""


class NotDelivered(PosttrainError):
    """A sampler does not hold the weights it was sent, or was asked before anything was sent. Nothing may be drawn from it."""

    exit_code = 5


class WrongVersion(NotDelivered):
    """A completion was drawn by other weights than the caller allows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """When two log-probabilities are the same. The defaults are for float32 on both sides; half precision needs about 0.05 and 0.005."""

    agree: float = 1e-4
    """Largest difference between trainer and receiver, nats."""
    noise: float = 1e-5
    """Largest difference between two computations of the receiver with equal weights."""
    drawn: int = 4
    """Tokens that the receiver draws as a check of its generation; 0 for none."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was sent, and what proves that it arrived. Differences are the largest over the canary's tokens, in nats.

    Example: Receipt(version=7, digest="9f...", tensors=30, sent=30, bytes=5440000, proven=30, gap=2e-6, moved=0.03, ...)
    """

    version: int
    digest: str | None
    """Over all tensors as sent; None when the sampler reads the trainer's own weights and nothing is sent."""
    tensors: int
    sent: int
    """Tensors that changed since the last proven delivery; the others stayed."""
    bytes: int
    proven: int
    """Tensors whose digest the receiver confirmed."""
    absent: tuple[str, ...]
    """Tensors that the receiver cannot read back: proven by the canary only."""
    gap: float | None
    """Receiver against trainer on the fixed continuation; None without a canary."""
    drawn_gap: float | None
    """The same on what the receiver drew."""
    moved: float | None
    """The trainer's canary since the last delivery."""
    receiver_moved: float | None
    seconds: Mapping[str, float]
    """Of digest, send and prove."""

    def record(self) -> dict[str, object]:
        """As JSON; the tensors without a digest as a number."""
        return asdict(self) | {"absent": len(self.absent), "seconds": dict(self.seconds)}


class _Said(NamedTuple):
    """Log-probabilities of the canary's continuation by both sides."""

    own: list[float]
    theirs: list[float]


class _Past(NamedTuple):
    """What the last proven delivery left behind."""

    held: Mapping[str, str]
    """Digest of every tensor that the receiver holds."""
    said: _Said | None = None
    """The canary then; None without one."""
    moved: _Said | None = None
    """The canary when it last moved clearly."""


class Delivery:
    """Sends the weights of `model` to `receiver`, and is itself a Sampler that refuses to draw before anything was delivered.

    A new Delivery has delivered nothing: after a resume the first `send` sends everything. Of a sharded model every process calls `send`,
    with the model complete (`Shards.whole`).

    Args:
        model: in training; neither its weights nor its mode are changed.
        receiver: a Receiver; or a sampler that reads the weights of `model` itself, to which only the version is told.
        canary: ids of a prompt and of a continuation. Without one a receiver has to confirm the digest of every tensor.
        how: "merged" sends W + scaling B A of each adapted layer, "adapter" sends W once and then only A and B (engine/weights.py).
        limits: when log-probabilities are the same.
        dtype: of the tensors as sent and as digested; that of the model when None.
    """

    def __init__(
        self,
        model: nn.Module,
        receiver: Receiver | Sampler,
        canary: tuple[Sequence[int], Sequence[int]] | None = None,
        how: Form = "merged",
        *,
        limits: Limits | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.model, self.receiver, self.limits, self.dtype = model, receiver, limits or Limits(), dtype
        self.how: Form = how
        self.canary = None if canary is None else (tuple(canary[0]), tuple(canary[1]))
        self.last: Receipt | None = None
        """Of the last proven delivery; None before the first and after a failed one."""
        self._past = _Past({})
        self._frozen = DigestCache()

    @property
    def version(self) -> int:
        """Of the sampler's weights."""
        return self.receiver.version

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """As the sampler does; raises NotDelivered when no delivery was proven, or when a completion carries another version."""
        if self.last is None:
            raise NotDelivered(
                "the sampler was asked for completions before weights were delivered to it; call send(version) first, also after a resume"
            )
        before = self.version
        completions = self.receiver.generate(requests, progress)
        check_versions(completions, self.version, staleness=self.version - before)
        return completions

    def send(self, version: int) -> Receipt:
        """Deliver the weights as they are now, as `version`. Raises NotDelivered when anything says that they did not arrive."""
        if not hasattr(self.receiver, "receive"):
            return self._live(version)
        receiver, started = cast(Receiver, self.receiver), time.perf_counter()
        weights = PlainWeights(self.model, self.how, self.dtype)
        sizes: dict[str, int] = {}
        expected: dict[str, str] = {}
        for name, tensor in weights.items():
            sizes[name] = tensor.numel() * tensor.element_size()
            source = weights.frozen.get(name)
            expected[name] = tensor_digest(tensor) if source is None else self._frozen.of(name, tensor, source)
        changed = weights.only(frozenset(name for name, found in expected.items() if self._past.held.get(name) != found))
        past, self._past, self.last = self._past, _Past({}), None  # what the receiver holds is unknown until it is proven
        digested = time.perf_counter()
        receiver.receive(changed, version)
        sent = time.perf_counter()
        if receiver.version != version:
            raise NotDelivered(f"the sampler took version {version} and draws as version {receiver.version}; its receive() must set it")
        found = receiver.digests()
        absent = tuple(name for name in expected if name not in found)
        self._compare(expected, found, past.held, version)
        if self.canary is None and absent:
            raise NotDelivered(
                f"nothing proves version {version}: the sampler confirms {len(expected) - len(absent)} of {len(expected)} tensors "
                f"(not '{absent[0]}') and there is no canary; give Delivery a canary"
            )
        said, moved, figures = self._canary(receiver, past, expected == past.held, version)
        self._past = _Past(expected, said, moved)
        now = time.perf_counter()
        self.last = Receipt(
            version,
            overall_digest(expected),
            tensors=len(expected),
            sent=len(changed),
            bytes=sum(sizes[name] for name in changed),
            proven=len(expected) - len(absent),
            absent=absent,
            **figures,
            seconds={"digest": digested - started, "send": sent - digested, "prove": now - sent},
        )
        return self.last

    def _live(self, version: int) -> Receipt:
        """The sampler reads the trainer's weights: tell it the version, which also ends its caches, and check what it draws."""
        started = time.perf_counter()
        self.last, self.receiver.version = None, version
        gap = None if self.canary is None else self._draw(version)
        seconds = {"digest": 0.0, "send": 0.0, "prove": time.perf_counter() - started}
        self.last = Receipt(version, None, 0, 0, 0, 0, (), None, gap, None, None, seconds)
        return self.last

    def _compare(self, expected: Mapping[str, str], found: Mapping[str, str], held: Mapping[str, str], version: int) -> None:
        """Every digest that the receiver reports is the expected one; otherwise the error says what it holds instead."""
        wrong = [name for name in expected if found.get(name, expected[name]) != expected[name]]
        if not wrong:
            return
        names = {value: name for name, value in expected.items()}
        bare = PlainWeights(self.model, "adapter", self.dtype) if self.how == "merged" else {}
        kinds = {name: _kind(name, found[name], held, names, bare) for name in wrong}
        counted = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds.values()).most_common(EXAMPLES))
        examples = "; ".join(f"{name} expected {expected[name]}, found {found[name]}" for name in wrong[:EXAMPLES])
        raise NotDelivered(
            f"version {version} did not arrive: {len(wrong)} of {len(expected)} tensors differ after loading ({counted}): {examples}; "
            "nothing may be drawn from this sampler until its receive() stores what it is given"
        )

    def _canary(
        self, receiver: Receiver, past: _Past, unchanged: bool, version: int
    ) -> tuple[_Said | None, _Said | None, dict[str, float | None]]:
        """The fixed continuation by both sides, now and at the last delivery; then a continuation that the receiver draws."""
        if self.canary is None:
            return None, None, {"gap": None, "drawn_gap": None, "moved": None, "receiver_moved": None}
        said = _Said(model_logps(self.model, *self.canary), list(receiver.logps(*self.canary)))
        moved, receiver_moved = None, None
        if past.said is not None:
            moved, receiver_moved = _gap(said.own, past.said.own), _gap(said.theirs, past.said.theirs)
            if unchanged:
                self._stood_still(moved, receiver_moved, version)
        last_move = said if past.moved is None else self._moved(said, past.moved, version)
        gap = _gap(said.own, said.theirs)
        if not gap <= self.limits.agree:
            raise NotDelivered(
                f"version {version} did not arrive: log-probabilities of the canary differ by {gap:.2g} nats between trainer and sampler "
                f"(limit {self.limits.agree:g}); the sampler computes with other weights, or with caches of older ones"
            )
        drawn_gap = self._draw(version)
        return said, last_move, {"gap": gap, "drawn_gap": drawn_gap, "moved": moved, "receiver_moved": receiver_moved}

    def _stood_still(self, moved: float, receiver_moved: float, version: int) -> None:
        """No weight changed, so nothing may move."""
        for who, by in (("trainer", moved), ("sampler", receiver_moved)):
            if not by <= self.limits.noise:
                raise NotDelivered(
                    f"no weight changed before version {version}, and the {who}'s canary moved by {by:.2g} nats "
                    f"(noise {self.limits.noise:g}); something else than the weights changes what it computes: dropout or a cache"
                )

    def _moved(self, said: _Said, since: _Said, version: int) -> _Said:
        """Where the trainer's canary moved clearly, the receiver's did too. Moves too small to tell add up until they are clear."""
        own, theirs = _gap(said.own, since.own), _gap(said.theirs, since.theirs)
        if not own > 3 * self.limits.noise:
            return since
        if not theirs > self.limits.noise:
            raise NotDelivered(
                f"version {version} did not arrive: the trainer's canary moved by {own:.2g} nats and the sampler's by {theirs:.2g}; "
                "it still computes with older weights, or without the adapters"
            )
        return said

    def _draw(self, version: int) -> float | None:
        """Let the sampler draw after the canary's prompt; the largest difference to the trainer's log-probabilities of the same tokens."""
        if self.canary is None or not self.limits.drawn:
            return None
        prompt, _ = self.canary
        request = Request(prompt, Sampling(max_tokens=self.limits.drawn), derive(0, "delivery", "canary"))
        (completion,) = self.receiver.generate([request])
        check_versions([completion], version)
        gap = _gap(completion.logps, model_logps(self.model, prompt, completion.ids))
        if not gap <= self.limits.agree:
            raise NotDelivered(
                f"version {version} did not reach generation: tokens drawn after the canary's prompt differ by {gap:.2g} nats from what "
                f"the trainer says of them (limit {self.limits.agree:g}); drop the sampler's prefix cache when weights change"
            )
        return gap


def model_logps(model: nn.Module, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    """Log-probability at temperature 1 of each of `ids` after `prompt`, by the plain forward pass without dropout."""
    device = next(model.parameters()).device
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *ids]], device=device), use_cache=False).logits[0, len(prompt) - 1 : -1]
            wanted = torch.tensor(list(ids), device=device)
            return logits.float().log_softmax(-1).gather(-1, wanted[:, None]).squeeze(-1).tolist()
    finally:
        for module in training:
            module.training = True


def check_versions(completions: Sequence[Completion], expected: int, staleness: int = 0) -> int:
    """Every token was drawn by one of the versions expected - staleness .. expected. Returns how old the oldest is.

    Example: versions (6, 7) are fine for expected=7, staleness=1, and return 1; for staleness=0 they raise WrongVersion.
    """
    oldest = expected
    for place, completion in enumerate(completions):
        by = completion.versions or (completion.version,)
        if completion.versions and (len(by) != len(completion.ids) or min(by) != completion.version):
            raise WrongVersion(
                f"completion {place} of {len(completions)} says version {completion.version} and, of {len(completion.ids)} tokens, "
                f"versions {by[:8]}; a sampler gives one version per token and the oldest for all"
            )
        if min(by) < expected - staleness or max(by) > expected:
            raise WrongVersion(
                f"completion {place} of {len(completions)} was drawn by version {min(by)}..{max(by)}, wanted {expected - staleness}.."
                f"{expected}; deliver the weights before drawing, or allow more staleness"
            )
        oldest = min(oldest, *by)
    return expected - oldest


def _kind(name: str, found: str, held: Mapping[str, str], names: Mapping[str, str], bare: Mapping[str, torch.Tensor]) -> str:
    """What a receiver holds in place of a tensor."""
    if found in names:
        return f"with the numbers of another tensor, e.g. of {names[found]}"
    if found == held.get(name):
        return "stale"
    if name in bare and found == tensor_digest(bare[name]):
        return "without the adapter"
    return "with unknown numbers"


def _gap(some: Sequence[float], others: Sequence[float]) -> float:
    """Largest difference; NaN when there is one, infinite when the lengths differ."""
    if len(some) != len(others):
        return float("inf")
    return float((torch.tensor(some, dtype=torch.float64) - torch.tensor(others, dtype=torch.float64)).abs().max()) if len(some) else 0.0
