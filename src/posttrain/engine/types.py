"""The seam between a pipeline and the machine that runs it. Torch-free: any engine can stand behind these two Protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import StopReason

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to draw. Its result depends on its own prompt, sampling and seed, not on its batch mates.

    Example: Request(prompt=(1, 5, 9), sampling=Sampling(temperature=1.0, max_tokens=8), seed=derive(0, "grpo", 3, "add-2-3", 0))
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    """Of the whole completion: token t of it draws from place t of this stream, however many calls it takes."""
    drawn: tuple[int, ...] = ()
    """Tokens of this completion that an earlier call drew: read after the prompt, counted against max_tokens, not returned again."""
    limit: int | None = None
    """Most tokens to draw in this call; a completion cut by it ends as StopReason.PAUSED."""

    @property
    def room(self) -> int:
        """Tokens this call may draw."""
        left = self.sampling.max_tokens - len(self.drawn)
        return left if self.limit is None else min(left, self.limit)


@dataclass(frozen=True, slots=True)
class Completion:
    """What came back for one request, in request order.

    Example: Completion(ids=(40, 2), logps=(-0.1, -0.3), stop=StopReason.END, version=7)
    """

    ids: tuple[int, ...]
    """Ids sampled in this call, the stop token included."""
    logps: tuple[float, ...]
    """log-probability (nats) of each id under the sampling distribution; 0.0 throughout when greedy."""
    stop: StopReason
    version: int
    """Of the weights that drew it; of several the oldest."""
    versions: tuple[int, ...] = ()
    """Version of each id; empty means that `version` drew them all."""
    candidates: tuple[tuple[int, ...], ...] = ()
    """Ids that the cut (top-k, top-p, min-p) left at each position, ascending, the sampled one included; empty when nothing was cut."""


class Sampler(Protocol):
    """Draws completions from the current policy."""

    version: int
    """Optimizer steps behind the weights it draws with; stamped on every completion."""

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """Complete every request; `progress(n)` is told of each n finished. Order of results is the order of requests."""
        ...


class Receiver(Sampler, Protocol):
    """A sampler that computes with weights of its own, so that every change has to be sent to it, and proven to have arrived."""

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Take over these tensors, by Hugging Face parameter name of the plain (merged) model; from then on draw as `version`."""
        ...

    def digests(self) -> Mapping[str, str]:
        """Digest of every tensor it holds, by the same names, read from what it holds and not from what it was sent."""
        ...

    def logps(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Log-probability at temperature 1 of each of `ids` after `prompt`: what the weights really compute, for the canary."""
        ...
