"""What every engine outside this package has to be told and what is made of its answers, the same for all of them. Torch-free.

Such an engine draws from a generator of its own, seeded per call. A completion that is drawn in several calls is therefore another one
than if it were drawn in one (each is reproducible): "token t draws from place t of the stream" is the promise of the local sampler only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from posttrain.core.errors import ConfigError, PosttrainError
from posttrain.core.seeds import derive
from posttrain.core.trajectory import StopReason
from posttrain.engine.types import Completion, Request

ALL_MASS = 1 - 1e-5
"""Listed alternatives whose probabilities reach this sum are all that a cut left; float32 log-softmax is not more exact than that."""
COLDEST = 0.01
"""vLLM raises lower temperatures to this one without an error, so that log-probabilities would describe another distribution."""
NO_CHANCE = -9000.0
"""A log-probability below this stands for zero: JSON has no -inf, vLLM's server writes -9999."""


class EngineError(PosttrainError):
    """An engine that answered with something no completion can be made of, or did not answer at all."""


def check(requests: Sequence[Request], context: int | None) -> None:
    """Refuse what an engine would silently bend: a temperature it raises, more tokens than its context holds.

    Args:
        requests: to be answered.
        context: most tokens of prompt and completion together; None if unknown.
    """
    for request in requests:
        temperature = request.sampling.temperature
        if 0.0 < temperature < COLDEST:
            raise ConfigError(f"temperature {temperature} is below {COLDEST}, which vLLM would use instead; take 0 for greedy")
        if not request.prompt:
            raise ConfigError("a prompt of 0 tokens; give it at least one, e.g. the token that begins a text")
        if request.room < 1:
            raise ConfigError(f"a request with room for {request.room} more tokens; do not ask for completions that are finished")
        needed = len(request.prompt) + len(request.drawn) + request.room
        if context is not None and needed > context:
            raise ConfigError(
                f"prompt and completion need {needed} tokens, the engine holds {context}; raise its context or lower max_tokens"
            )


def call_seed(request: Request) -> int:
    """Seed of this call: a continuation must not see the noise that drew its first part once more."""
    return derive(request.seed, "from", len(request.drawn)) if request.drawn else request.seed


def wants_candidates(request: Request) -> bool:
    """Whether the ids that a cut left have to be kept; greedy draws score no distribution."""
    return request.sampling.cuts and not request.sampling.greedy


def kept(listed: Mapping[int, float]) -> tuple[int, ...] | None:
    """Ids with a chance among the listed log-probabilities, ascending; None when the list may not hold all of them.

    Example: {4: -0.1, 9: -2.4, 5: -inf} gives (4, 9): an excluded token stands in the list, so no included one is missing from it.
    """
    inside = {token: logp for token, logp in listed.items() if logp > NO_CHANCE}
    complete = len(inside) < len(listed) or math.fsum(math.exp(logp) for logp in inside.values()) >= ALL_MASS
    return tuple(sorted(inside)) if complete else None


def completion(
    request: Request,
    ids: Sequence[int],
    logps: Sequence[float],
    candidates: Sequence[tuple[int, ...]],
    version: int,
    ends: tuple[frozenset[int], frozenset[int]],
) -> Completion:
    """The completion that an engine's answer amounts to, cut after its first terminal token.

    Args:
        request: what was asked for.
        ids: sampled ids, the stop token included.
        logps: of each id under the sampling distribution, nats; ignored when greedy.
        candidates: of each id, or empty.
        version: of the weights.
        ends: stop ids, and control ids that end a completion as well.

    Raises:
        EngineError: no ids, more than were asked for, not one log-probability per id, or an ending that nothing explains.
    """
    stop_ids, control_ids = ends
    if len(ids) != len(logps) and not request.sampling.greedy:
        raise EngineError(f"the engine returned {len(ids)} token ids and {len(logps)} log-probabilities; one per token is needed")
    if not ids or len(ids) > request.room:
        raise EngineError(f"the engine returned {len(ids)} token ids where 1 to {request.room} were asked for; check its version")
    length = next((place + 1 for place, token in enumerate(ids) if token in stop_ids or token in control_ids), len(ids))
    stop = _why(request, ids[length - 1], length, ends)
    if request.sampling.greedy:
        logps = (0.0,) * length
    return Completion(tuple(ids[:length]), tuple(logps[:length]), stop, version, candidates=tuple(candidates[:length]))


def _why(request: Request, last: int, length: int, ends: tuple[frozenset[int], frozenset[int]]) -> StopReason:
    stop_ids, control_ids = ends
    if last in stop_ids:
        return StopReason.END
    if last in control_ids:
        return StopReason.CONTROL
    if length < request.room:
        raise EngineError(f"the engine ended after {length} of {request.room} tokens on id {last}, which is no stop id; name it as one")
    return StopReason.LENGTH if len(request.drawn) + length >= request.sampling.max_tokens else StopReason.PAUSED
