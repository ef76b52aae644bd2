"""Both decoders against the library's plain forward on one model."""

from __future__ import annotations

import pytest
import torch

from posttrain.engine.decoder import GenericDecoder, LlamaDecoder, _shared_prefix, decoder_for

PROMPTS = [(1, 5, 9, 10), (1, 5), (1, 5, 9)]


def plain(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, -1]


@pytest.mark.parametrize("kind", [LlamaDecoder, GenericDecoder])
def test_decoder_equals_the_plain_forward(toy, kind):
    model = toy.model()
    decoder = kind(model)
    copies = [2, 1, 3]
    live = [list(prompt) for prompt, n in zip(PROMPTS, copies, strict=True) for _ in range(n)]
    logits = decoder.start(PROMPTS, copies, 4)
    for position in range(4):
        torch.testing.assert_close(logits, torch.stack([plain(model, ids) for ids in live]), atol=2e-5, rtol=0)
        if position == 1:
            keep = [0, 2, 5]
            decoder.keep(torch.tensor(keep))
            live = [live[i] for i in keep]
        drawn = [20 + position + row for row in range(len(live))]
        for ids, token in zip(live, drawn, strict=True):
            ids.append(token)
        logits = decoder.step(torch.tensor(drawn))
    torch.testing.assert_close(logits, torch.stack([plain(model, ids) for ids in live]), atol=2e-5, rtol=0)


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
    assert LlamaDecoder(model).bytes_per_token() == GenericDecoder(model).bytes_per_token() == 2 * 2 * 2 * 8 * 4


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
