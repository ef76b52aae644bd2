"""Supervised fine-tuning: every row once per epoch, token-exact loss, the closing token learnt, the input model untouched."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.tasks import Message
from posttrain.core.trajectory import StopReason
from posttrain.engine.local import LocalSampler
from posttrain.engine.machine import Machine
from posttrain.engine.trainer import Optim
from posttrain.engine.types import Request
from posttrain.engine.weights import weights_digest
from posttrain.loops.sft import SFT, equation, sft, steps_of
from posttrain.render.renderer import ChatRenderer
from posttrain.rollout.pack import Packing
from posttrain.rollout.samples import supervised_sample

FAST = Optim(lr=1e-2, schedule="constant", warmup=0.0)


def rows(toy, n: int):
    return [toy.row((1, 5), (20 + i,) * (i % 3 + 1), f"r{i}") for i in range(n)]


@pytest.mark.parametrize(("count", "batch", "epochs", "steps"), [(7, 3, 1, 3), (7, 3, 3, 9), (8, 4, 2, 4), (1, 32, 1, 1), (15, 8, 3, 6)])
def test_steps_are_rounded_up_per_epoch(toy, count, batch, epochs, steps):
    settings = SFT(batch_size=batch, epochs=epochs, optim=Optim(lr=1e-3, warmup=0.0))
    assert steps_of(count, settings) == steps
    run = toy.recorder()
    sft(toy.session(run), toy.model(), rows(toy, count), settings)
    lines = run.lines["metrics"]
    assert len(lines) == steps
    assert lines[-1]["optimizer_step"] == steps
    assert lines[-1]["lr"] == pytest.approx(0.0 if steps > 1 else 1e-3)
    assert sum(line["rows"] for line in lines) == count * epochs
    assert sum(line["tokens"] for line in lines) == epochs * sum(i % 3 + 1 for i in range(count))


def test_equation_in_words():
    assert equation(7, SFT(batch_size=3, epochs=2)) == (
        "7 rows / 3 rows per step = 3 steps per epoch (the last has 1) x 2 epoch(s) = 6 optimizer steps"
    )
    assert "1 steps per epoch (the last has 2)" in equation(2, SFT(batch_size=32))


def test_every_row_once_per_epoch_in_another_order_each_time(toy, monkeypatch):
    seen: list[int] = []
    from posttrain.loops import sft as module

    original = module.shard

    def watching(samples, rank, size):
        seen.extend(sample.tokens.ids[0] for sample in samples)
        return original(samples, rank, size)

    monkeypatch.setattr(module, "shard", watching)
    sft(toy.session(), toy.model(), rows(toy, 10), SFT(batch_size=4, epochs=2))
    first, second = seen[:10], seen[10:]
    assert sorted(first) == sorted(second) == list(range(20, 30))
    assert first != second


def test_no_rows_is_one_line(toy):
    with pytest.raises(ConfigError, match="sft: no rows to train on"):
        sft(toy.session(), toy.model(), [], SFT())


def test_input_model_is_not_touched(toy):
    model = toy.model()
    before = weights_digest(model)
    trained = sft(toy.session(), model, rows(toy, 4), SFT(optim=FAST))
    assert weights_digest(model) == before != weights_digest(trained)


def test_first_loss_is_the_mean_over_all_tokens_of_the_step(toy):
    model = toy.model()
    samples = [toy.row((1, 5), tuple(range(10, 30)), "long"), toy.row((1, 6), (30,), "short")]
    total = 0.0
    for sample in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*sample.prompt.ids, *sample.tokens.ids]])).logits[0, 1:-1]
        total -= logits.log_softmax(-1).gather(-1, torch.tensor(sample.tokens.ids)[:, None]).sum().item()
    run = toy.recorder()
    sft(toy.session(run), model, samples, SFT())
    assert run.lines["metrics"][0]["loss"] == pytest.approx(total / 21, rel=1e-5)


@pytest.mark.parametrize("packing", [Packing(row_tokens=4, micro_tokens=4), Packing(row_tokens=64, micro_tokens=64)], ids=str)
def test_packing_does_not_change_the_result(toy, packing):
    # plain numbers instead of a digest: the order of float additions differs
    whole = toy.weights(sft(toy.session(), toy.model(), rows(toy, 8), SFT(epochs=2, batch_size=4)))
    session = replace(toy.session(), machine=Machine(packing=packing))
    other = toy.weights(sft(session, toy.model(), rows(toy, 8), SFT(epochs=2, batch_size=4)))
    torch.testing.assert_close(other, whole, atol=1e-4, rtol=0)


def test_same_seed_same_weights_other_seed_other_order(toy):
    one, same, other = (weights_digest(sft(toy.session(seed=s), toy.model(), rows(toy, 8), SFT(batch_size=2))) for s in (0, 0, 1))
    assert one == same != other


def test_rows_with_one_id_are_still_two_rows(toy):
    same = [toy.row((1, 5), (20, 2), "x"), toy.row((1, 6), (21, 2), "x")]
    apart = [toy.row((1, 5), (20, 2), "x"), toy.row((1, 6), (21, 2), "y")]
    assert weights_digest(sft(toy.session(), toy.model(), same, SFT())) == weights_digest(sft(toy.session(), toy.model(), apart, SFT()))


def demonstration(toy, question: str, answer: str):
    chat = (Message("user", question), Message("assistant", answer))
    return toy.renderer.prompt(chat[:1]), supervised_sample(toy.renderer.conversation(chat), "r")


def test_one_example_is_learnt_from_its_first_token_to_its_last(toy):
    prompt, row = demonstration(toy, "2+3?", "it is 5")
    model = sft(toy.session(), toy.model(265, std=0.1), [row], SFT(epochs=40, optim=Optim(lr=1e-2, warmup=0.1)))
    sampler = LocalSampler(model, toy.renderer.stop_ids, toy.renderer.control_ids)
    (done,) = sampler.generate([Request(prompt.ids, Sampling(temperature=0.0, max_tokens=20), 0)])
    assert done.ids == row.tokens.ids
    assert done.stop is StopReason.END
    assert toy.renderer.decode(done.ids) == "it is 5"


def test_nothing_after_the_closing_token_is_trained(toy):
    # a, b and <|end|>; the <|eos|> that the template writes behind them is no target
    _, row = demonstration(toy, "hi", "ab")
    run = toy.recorder()
    sft(toy.session(run), toy.model(265), [row], SFT())
    assert run.lines["metrics"][0]["tokens"] == 3
    assert row.tokens.ids[-1] == 6


def test_padding_with_the_closing_token_is_harmless(toy):
    tokenizer = copy.deepcopy(toy.tokenizer)
    tokenizer.pad_token = "<|end|>"
    renderer = ChatRenderer(tokenizer)
    assert renderer.pad_id in renderer.stop_ids
    weights = []
    for speaker in (toy.renderer, renderer):
        chats = [(Message("user", "hi"), Message("assistant", text)) for text in ("a", "abcdef")]
        samples = [supervised_sample(speaker.conversation(chat), f"{i}") for i, chat in enumerate(chats)]
        assert [row.tokens.trained for row in samples] == [2, 7]
        session = replace(toy.session(), machine=Machine(packing=Packing(row_tokens=14)))
        weights.append(weights_digest(sft(session, toy.model(265), samples, SFT())))
    assert weights[0] == weights[1]


def test_the_loss_of_a_uniform_model_falls(toy):
    _, row = demonstration(toy, "hi", "ab")
    run = toy.recorder()
    sft(toy.session(run), toy.model(265, std=1e-4), [row], SFT(epochs=30, optim=FAST))
    losses = [line["loss"] for line in run.lines["metrics"]]
    assert losses[0] == pytest.approx(math.log(265), abs=1e-3)
    assert losses[-1] < 0.5 * losses[0]
