"""The accelerated samplers pass the checks of every sampler: speculative decoding against the model's own forward, int8 against its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from sampler_contract import CHECKS, CONTROL, STOP, Case, forward_of, llama, tiny

from posttrain.engine.draft import first_layers
from posttrain.engine.int8 import Int8Sampler, quantise
from posttrain.engine.speculative import SpeculativeSampler


def layer_skipping() -> Case:
    model = llama()
    return Case(SpeculativeSampler(model, first_layers(model, 1), STOP, CONTROL), forward_of(model))


def foreign_draft() -> Case:
    model = llama()
    return Case(SpeculativeSampler(model, tiny(llama(), 0.1), STOP, CONTROL, max_rows=5, ahead=3), forward_of(model))


def int8() -> Case:
    model = llama()
    # The checks score with a second pass, in which a value next to a rounding edge may fall on its other side.
    return Case(Int8Sampler(model, STOP, CONTROL), forward_of(quantise(model)), tolerance=0.05)  # type: ignore[arg-type]


CASES: dict[str, Callable[[], Case]] = {name.__name__: cache(name) for name in (layer_skipping, foreign_draft, int8)}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", list(CASES))
def test_contract(name, check):
    check(CASES[name]())
