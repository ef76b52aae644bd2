"""The seam between a pipeline and the machine that runs it. Torch-free: any engine can stand behind these two Protocols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import StopReason


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to draw. Its result depends on its own prompt, sampling and seed, not on its batch mates.

    Example: Request(prompt=(1, 5, 9), sampling=Sampling(temperature=1.0, max_tokens=8), seed=derive(0, "grpo", 3, "add-2-3", 0))
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What came back for one request, in request order.

    Example: Completion(ids=(40, 2), logps=(-0.1, -0.3), stop=StopReason.END, version=7)
    """

    ids: tuple[int, ...]
    """Sampled ids, the stop token included."""
    logps: tuple[float, ...]
    """log-probability (nats) of each id under the sampling distribution; 0.0 throughout when greedy."""
    stop: StopReason
    version: int


class Sampler(Protocol):
    """Draws completions from the current policy."""

    version: int

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """Complete every request; `progress(n)` is told of each n finished. Order of results is the order of requests."""
        ...
