"""The acceleration contract: a faster path may sample for training once the gates of its class have passed, for exactly that path.

    class    what it claims                              gates
    safe     the same computation, faster                B
    exact    the same output                             B, and I: bit by bit at matched seeds, or in distribution
    lossy    other numbers, close enough to train on     A, B and C

"97 % of the quality when serving" says nothing here: what counts for RL is the distance per token (A), the whole step (B) and what is
learned (C). The classes are claims; gates check them, so that a lossy path registered as exact fails gate I.
"""

from __future__ import annotations

import difflib
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
import transformers
from torch import nn

import posttrain
from posttrain.checks.gates import Gate, Key, Store, Verdict
from posttrain.core.errors import ConfigError, PosttrainError
from posttrain.engine.int8 import QUANTISATION, Int8Sampler, product_name, quantise
from posttrain.engine.local import LocalSampler
from posttrain.engine.speculative import SpeculativeSampler
from posttrain.engine.types import Completion, Request, Sampler
from posttrain.engine.weights import weights_digest


class NotProven(PosttrainError):
    """An acceleration whose gates have no recorded pass for this path."""


class Kind(StrEnum):
    """What an acceleration claims about its numbers."""

    SAFE = "safe"
    EXACT = "exact"
    LOSSY = "lossy"


GATES: Mapping[Kind, tuple[Gate, ...]] = {
    Kind.SAFE: (Gate.SPEED,),
    Kind.EXACT: (Gate.IDENTITY, Gate.SPEED),
    Kind.LOSSY: (Gate.DISTRIBUTION, Gate.SPEED, Gate.LEARNING),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What a path is built from. Example: Setup(model, frozenset({2}), frozenset({0, 1, 2, 3}))."""

    model: nn.Module
    stop_ids: frozenset[int]
    control_ids: frozenset[int]
    draft: nn.Module | None = None
    """The small model of speculative decoding."""
    ahead: int = 4
    """Its proposals per pass."""


def plain(setup: Setup) -> Sampler:
    """The reference path: the local sampler over the model's own weights."""
    return LocalSampler(setup.model, setup.stop_ids, setup.control_ids)


class Unshared:
    """The reference of shared prefill: siblings of one prompt are asked in different calls of fresh samplers, and share nothing."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self.version = 0

    def generate(self, requests: Sequence[Request], progress: Callable[[int], None] | None = None) -> list[Completion]:
        """See `Sampler`."""
        results: dict[int, Completion] = {}
        turns: dict[tuple[int, ...], int] = {}
        calls: list[list[int]] = []
        for place, request in enumerate(requests):
            turn = turns[request.prompt] = turns.get(request.prompt, -1) + 1
            calls += [[]] if turn == len(calls) else []
            calls[turn].append(place)
        for call in calls:
            sampler = plain(self._setup)
            sampler.version = self.version
            results.update(zip(call, sampler.generate([requests[place] for place in call], progress), strict=True))
        return [results[place] for place in range(len(requests))]


def _speculative(setup: Setup) -> Sampler:
    return SpeculativeSampler(setup.model, _draft_of(setup), setup.stop_ids, setup.control_ids, ahead=setup.ahead)


def _draft_of(setup: Setup) -> nn.Module:
    if setup.draft is None:
        raise ConfigError("speculative decoding needs a draft: a smaller model of the same tokenizer, or the first layers of this one")
    return setup.draft


@dataclass(frozen=True, slots=True)
class Acceleration:
    """One faster path, what it claims, and how to build it. A lossy one must have a `view`: gate A scores with it."""

    name: str
    version: int
    """Raise it when the path's computation changes: older measurements are then no longer its own."""
    kind: Kind
    about: str
    build: Callable[[Setup], Sampler]
    reference: Callable[[Setup], Sampler] = plain
    view: Callable[[Setup], nn.Module] | None = None
    """The model that the path computes with; None means the reference's."""
    same: Literal["bits", "distribution"] = "bits"
    """In which sense an exact path's output is the reference's."""
    needs: str = ""
    quantisation: str = "none"
    path: Callable[[Setup], str] = lambda setup: ""
    """What else the numbers depend on, as text."""

    def __post_init__(self) -> None:
        if self.kind is Kind.LOSSY and self.view is None:
            raise ValueError(f"acceleration '{self.name}' is lossy and has no view of its model that gate A could score with")

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The gates that its class has to pass."""
        return GATES[self.kind]


ACCELERATIONS: dict[str, Acceleration] = {
    "shared_prefill": Acceleration(
        "shared_prefill",
        1,
        Kind.EXACT,
        "the siblings of a group read their prompt once, and decode together",
        build=plain,
        reference=Unshared,
    ),
    "int8": Acceleration(
        "int8",
        1,
        Kind.LOSSY,
        "8-bit weights per output channel, 8-bit activations per token; the head stays as it is",
        build=lambda setup: Int8Sampler(setup.model, setup.stop_ids, setup.control_ids),
        view=lambda setup: quantise(setup.model),
        quantisation=QUANTISATION,
        path=lambda setup: f"{product_name()}, head not quantised",
    ),
    "speculative": Acceleration(
        "speculative",
        1,
        Kind.EXACT,
        "a draft proposes tokens, the model verifies them in one pass",
        build=_speculative,
        same="distribution",
        needs="a draft",
        path=lambda setup: f"draft {weights_digest(_draft_of(setup))}, {setup.ahead} proposals per pass",
    ),
}
"""Every faster path that can be asked for. A new one is an entry here."""


def acceleration(name: str, registry: Mapping[str, Acceleration] = ACCELERATIONS) -> Acceleration:
    """The acceleration of this name; ConfigError with the nearest name otherwise."""
    if name not in registry:
        near = difflib.get_close_matches(name, registry, n=1)
        raise ConfigError(f"unknown acceleration '{name}'; " + (f"did you mean '{near[0]}'?" if near else f"known: {', '.join(registry)}"))
    return registry[name]


def key_of(member: Acceleration, setup: Setup) -> Key:
    """The path that a measurement of `member` on `setup` belongs to. Raises ConfigError when `setup` lacks what it needs."""
    parameter = next(setup.model.parameters())
    parts = [parameter.device.type, type(setup.model).__name__, platform.machine(), member.path(setup)]
    engine = f"posttrain {posttrain.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
    return Key(
        model=weights_digest(setup.model),
        acceleration=member.name,
        version=member.version,
        quantisation=member.quantisation,
        path=", ".join(part for part in parts if part),
        dtype=str(parameter.dtype).removeprefix("torch."),
        engine=engine,
    )


def require(
    name: str, setup: Setup, store: Store, *, label: str = "MODEL", registry: Mapping[str, Acceleration] = ACCELERATIONS
) -> Acceleration:
    """The acceleration, if every gate of its class has a recorded pass for exactly this path; NotProven with the remedy otherwise.

    Args:
        label: what to call the model in the remedy.
    """
    member = acceleration(name, registry)
    key = key_of(member, setup)
    verdicts = {gate: store.verdict(key, gate) for gate in member.gates}
    missing = [gate for gate, verdict in verdicts.items() if verdict is not Verdict.PASSED]
    if missing:
        found = ", ".join(f"{gate.value} {verdicts[gate] or 'not measured'}" for gate in missing)
        raise NotProven(
            f"acceleration '{name}' is {member.kind} and has not passed its gates on this model ({found}); "
            f"run: posttrain contract {name} {label}"
        )
    return member


def proven_sampler(name: str, setup: Setup, store: Store, *, label: str = "MODEL") -> Sampler:
    """The accelerated sampler for training, after `require`."""
    return require(name, setup, store, label=label).build(setup)
