"""Every sampler passes the same checks; vLLM does in tests/with_vllm, in an environment of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch
from completion_server import serving
from sampler_contract import CHECKS, CONTROL, STOP, Case, distribution, forward_of, llama, neox
from transformers import PreTrainedModel

from posttrain.core.seeds import uniforms
from posttrain.engine.completions_server import CompletionsSampler, ServerOptions
from posttrain.engine.decoder import GenericDecoder, LlamaDecoder, decoder_for
from posttrain.engine.local import LocalSampler
from posttrain.engine.scripted import Answer, ScriptedSampler
from posttrain.engine.types import Request


def script_of(model: PreTrainedModel) -> Callable[[tuple[int, ...], Request], Answer]:
    """The completion by one full forward per token: the plainest sampler there is."""
    forward = forward_of(model)

    def script(prompt: tuple[int, ...], request: Request) -> Answer:
        noise = uniforms(request.seed, request.sampling.max_tokens)
        ids, logps, candidates = list(request.drawn), [0.0] * len(request.drawn), [(token,) for token in request.drawn]
        while len(ids) < request.sampling.max_tokens and (len(ids) == len(request.drawn) or ids[-1] not in CONTROL):
            logits_V = forward([*prompt, *ids])[-1]
            logp_V = distribution(logits_V, request.sampling)
            token = int(torch.searchsorted(logp_V.exp().cumsum(0), float(noise[len(ids)])).clamp(max=len(logp_V) - 1))
            ids.append(int(logits_V.argmax()) if request.sampling.greedy else token)
            logps.append(float(logp_V[ids[-1]]))
            candidates.append(tuple(logp_V.isfinite().nonzero().flatten().tolist()))
        keep = request.sampling.cuts and not request.sampling.greedy
        return Answer(tuple(ids), tuple(logps), tuple(candidates) if keep else ())

    return script


@pytest.fixture(scope="module")
def members() -> Iterator[Callable[[str], Case]]:
    """A case by its name; each is built once."""
    made: dict[str, Case] = {}
    with ExitStack() as stack:

        def build(name: str) -> Case:
            model = neox() if name == "generic" else llama()
            forward = forward_of(model)
            if name == "scripted":
                return Case(ScriptedSampler(script_of(model), STOP, CONTROL), forward)
            if name == "server":
                server = stack.enter_context(serving(model))
                sampler = CompletionsSampler(server.url, "toy", STOP, CONTROL, ServerOptions(alternatives=64, concurrency=8))
                stack.callback(sampler.close)
                return Case(sampler, forward, splits=False)
            return Case(LocalSampler(model, STOP, CONTROL), forward)

        def case(name: str) -> Case:
            if name not in made:
                made[name] = build(name)
            return made[name]

        yield case


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ["fast", "generic", "scripted", "server"])
def test_contract(members, name, check):
    check(members(name))


def test_both_local_decoders_are_members():
    assert isinstance(decoder_for(llama()), LlamaDecoder)
    assert isinstance(decoder_for(neox()), GenericDecoder)
