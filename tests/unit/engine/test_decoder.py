"""Both decoders against the library's plain forward."""

from __future__ import annotations

import pytest
import torch

from posttrain.engine.decoder import Context, GenericDecoder, LlamaDecoder, _shared_prefix, decoder_for
from posttrain.engine.fused import fuse
from posttrain.engine.prefix_cache import PrefixCache
from posttrain.engine.table import places_per_group

CONTEXTS = [
    Context((1, 5, 9, 10)),
    Context((1, 5)),
    Context((1, 5, 9, 10), (30, 31)),
    Context((1, 5, 9)),
    Context((1, 5), (40,)),
    Context((1, 5, 9)),
]


def plain(model, rows) -> torch.Tensor:
    """Logits after each of `rows`, read alone."""
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in rows])


def llama(model) -> LlamaDecoder:
    return LlamaDecoder(fuse(model), PrefixCache(0))


@pytest.mark.parametrize("kind", [llama, GenericDecoder])
@pytest.mark.parametrize("crowded", [0.0, 2.0])
def test_decoder_equals_the_plain_forward(toy, monkeypatch, kind, crowded):
    monkeypatch.setattr("posttrain.engine.decoder.CROWDED", crowded)
    model = toy.model()
    decoder = kind(model)
    live = [[*c.prompt, *c.drawn] for c in CONTEXTS]
    logits = decoder.enter(CONTEXTS)
    for position in range(20):
        torch.testing.assert_close(logits, plain(model, live), atol=2e-5, rtol=0)
        if position in (1, 3):
            keep = [0, 2, 3, 5] if position == 1 else [1, 3]
            decoder.keep(keep)
            live = [live[i] for i in keep]
        drawn = [20 + position + row for row in range(len(live))]
        for ids, token in zip(live, drawn, strict=True):
            ids.append(token)
        logits = decoder.step(torch.tensor(drawn))
    torch.testing.assert_close(logits, plain(model, live), atol=2e-5, rtol=0)


def test_rows_enter_beside_living_ones(toy):
    model = toy.model()
    decoder = llama(model)
    live = [[1, 5, 9], [1, 5, 9], [7, 8]]
    decoder.enter([Context((1, 5, 9)), Context((1, 5, 9)), Context((7, 8))])
    for position in range(18):
        drawn = [20 + position + row for row in range(len(live))]
        for ids, token in zip(live, drawn, strict=True):
            ids.append(token)
        logits = decoder.step(torch.tensor(drawn))
        torch.testing.assert_close(logits, plain(model, live), atol=2e-5, rtol=0)
        if position == 2:
            decoder.keep([0, 2])
            live = [live[0], live[2]]
        if position in (5, 16):  # a sibling of a living row, one with tokens of its own, a longer prompt
            entering = [Context((1, 5, 9)), Context((7, 8), (33, 34, 35, 36, 37, 38, 39, 40, 41, 42)), Context((1, 5, 9, 10, 11))]
            fresh = [[*c.prompt, *c.drawn] for c in entering]
            torch.testing.assert_close(decoder.enter(entering), plain(model, fresh), atol=2e-5, rtol=0)
            live += fresh


def test_choice_of_decoder(toy):
    model = toy.model()
    assert isinstance(decoder_for(model), LlamaDecoder)
    model.config.sliding_window = 16
    assert isinstance(decoder_for(model), GenericDecoder)
    model.config.sliding_window = None
    model.config.model_type = "another"
    assert isinstance(decoder_for(model), GenericDecoder)


def test_cache_size(toy):
    # keys and values x 2 layers x 2 heads x 8 numbers x 4 bytes
    model = toy.model()
    assert llama(model).bytes_per_token() == GenericDecoder(model).bytes_per_token() == 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([(1, 2, 3)], 0),
        ([(1, 2, 3), (1, 2, 4)], 2),
        ([(1, 2), (1, 2, 3)], 1),
        ([(1, 2), (3, 4)], 0),
        ([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 9)], 2),
    ],
)
def test_shared_prefix_leaves_each_prompt_a_token(prompts, shared):
    assert _shared_prefix(prompts) == shared


@pytest.mark.parametrize(("counts", "size"), [([8, 8, 8, 7], 8), ([1, 1, 1, 8], 1), ([3], 3), ([4, 4, 2], 4)])
def test_places_per_group(counts, size):
    # places plus groups: [8, 8, 8, 7] needs 4 x 9 with 8, 5 x 8 with 7; [1, 1, 1, 8] needs 11 x 2 with 1, 4 x 9 with 8
    assert places_per_group(counts) == size
