"""Preference optimisation: ln 2 at the start, a reference known by content, both rewards watched, the input model untouched."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.trajectory import Owner, Tokens
from posttrain.engine.machine import Machine
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import Optim
from posttrain.engine.weights import weights_digest
from posttrain.loops.preference import DPO, content_key, dpo, equation, reference_logps, rows_of
from posttrain.rollout.pack import Packing
from posttrain.rollout.samples import Pair


def pairs_of(n: int) -> list[Pair]:
    """Pairs of different prompts and lengths, so that one's reference never fits another."""

    def response(start: int, length: int) -> Tokens:
        ids = (*range(start, start + length), 2)
        return Tokens(ids, (Owner.SAMPLED,) * len(ids))

    return [
        Pair(f"p{i}", Tokens((1, 5 + i), (Owner.USER,) * 2), response(10 + i, i % 3 + 1), response(30 + i, i % 4 + 1)) for i in range(n)
    ]


def first_step(toy, model, pairs, machine: Machine | None = None, **settings) -> dict:
    run = toy.recorder()
    dpo(replace(toy.session(run), machine=machine or Machine()), model, pairs, DPO(**settings))
    return run.lines["metrics"][0]


@pytest.mark.parametrize("packing", [Packing(), Packing(row_tokens=1, micro_tokens=1)], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_first_step_is_ln_2(toy, packing, batch_size):
    line = first_step(toy, toy.model(), pairs_of(7), batch_size=batch_size, machine=Machine(packing=packing), beta=0.5)
    assert line["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert line["chosen_reward"] == pytest.approx(0.0, abs=1e-5)
    assert line["rejected_reward"] == pytest.approx(0.0, abs=1e-5)


def test_reference_is_known_by_content_whatever_the_order(toy):
    model, pairs = toy.model(), pairs_of(8)
    cached = reference_logps(model, pairs, Packing(), Ranks())
    assert len(cached) == 16
    assert max(cached.values()) - min(cached.values()) > 1.0
    mixed = random.Random(0).sample(pairs, len(pairs))
    other = reference_logps(model, mixed, Packing(row_tokens=8, micro_tokens=16), Ranks())
    assert other == {key: pytest.approx(value, abs=1e-4) for key, value in cached.items()}


def test_shuffled_pairs_still_start_at_ln_2(toy):
    pairs = random.Random(1).sample(pairs_of(8), 8)
    for batch_size in (2, 8):
        assert first_step(toy, toy.model(), pairs, batch_size=batch_size, beta=1.0)["loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_content_key_tells_prompt_from_response(toy):
    same = toy.row((1, 5), (20, 2), "a")
    assert content_key(same) == content_key(toy.row((1, 5), (20, 2), "b"))
    assert content_key(same) != content_key(toy.row((1,), (5, 20, 2), "a"))
    assert content_key(same) != content_key(toy.row((1, 5), (20, 3), "a"))


def test_rows_lie_side_by_side(toy):
    rows = rows_of(pairs_of(2))
    assert [row.tokens.ids[0] for row in rows] == [10, 30, 11, 31]


def test_training_prefers_the_chosen(toy):
    run = toy.recorder()
    settings = DPO(epochs=10, batch_size=4, optim=Optim(lr=3e-3, warmup=0.0))
    dpo(toy.session(run), toy.model(), pairs_of(8), settings)
    last = run.lines["metrics"][-1]
    assert last["accuracy"] == 1.0
    assert last["loss"] < 0.6
    assert last["chosen_reward"] > 0 > last["rejected_reward"]


def test_the_weights_themselves_prefer_the_chosen(toy):
    # measured from outside the loop: every chosen response gained on its rejected one
    model, pairs = toy.model(), pairs_of(8)
    before = reference_logps(model, pairs, Packing(), Ranks())
    trained = dpo(toy.session(), model, pairs, DPO(epochs=10, batch_size=4, optim=Optim(lr=3e-3, warmup=0.0)))
    after = reference_logps(trained, pairs, Packing(), Ranks())
    for pair in pairs:
        good, bad = (after[content_key(row)] - before[content_key(row)] for row in pair.samples())
        assert good > bad


@pytest.mark.parametrize(("count", "batch", "epochs", "steps"), [(7, 3, 1, 3), (7, 3, 2, 6), (4, 4, 2, 2), (1, 16, 1, 1)])
def test_steps_are_rounded_up_per_epoch(toy, count, batch, epochs, steps):
    run = toy.recorder()
    settings = DPO(batch_size=batch, epochs=epochs, optim=Optim(lr=1e-4, warmup=0.0))
    dpo(toy.session(run), toy.model(), pairs_of(count), settings)
    lines = run.lines["metrics"]
    assert len(lines) == lines[-1]["optimizer_step"] == steps
    assert sum(line["pairs"] for line in lines) == count * epochs
    assert lines[-1]["lr"] == pytest.approx(0.0 if steps > 1 else 1e-4)
    assert equation(count, settings).endswith(f"x {epochs} epoch(s) = {steps} optimizer steps")


def test_input_model_is_not_touched(toy):
    model = toy.model()
    before = weights_digest(model)
    trained = dpo(toy.session(), model, pairs_of(4), DPO(optim=Optim(lr=1e-3, warmup=0.0)))
    assert weights_digest(model) == before != weights_digest(trained)


def test_no_pairs_is_one_line(toy):
    with pytest.raises(ConfigError, match="dpo: no pairs to train on"):
        dpo(toy.session(), toy.model(), [], DPO())
