"""A step that is not finite is traced to loss or gradient, micro-batch, rows and parameters, and leaves everything as it was."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch

from posttrain.core.metrics import read
from posttrain.engine.nonfinite import SHOWN, Diverged, Place, Trace, broken, first_bad, in_order
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.loops.sft import imitation
from posttrain.rollout.pack import Packing, pack, shard

ALONE = Ranks()
NAN, INF = math.nan, math.inf
POISONED = "model.layers.1.mlp.up_proj.weight"


def rows(toy):
    return [toy.row((1, 5 + i), (20 + i, 21, 2), f"{i}") for i in range(4)]


def batches(toy, ranks: Ranks = ALONE):
    """A row each; rows are numbered 10, 11, ... in the step."""
    mine = shard(rows(toy), ranks.rank, ranks.size)
    numbers = [10 + int(row.group) for row in mine]
    found = pack(mine, Packing(row_tokens=1, micro_tokens=1))
    return [replace(batch, row_B=tuple(numbers[i] for i in batch.sample_B)) for batch in found]


def trainer_of(model, ranks: Ranks = ALONE) -> LocalTrainer:
    return LocalTrainer(model, Optim(lr=1e-2, schedule="constant", warmup=0.0), 10, ranks)


def infinite_at(row: int, calls: list[int] | None = None):
    """Loss of imitation, infinite for one row."""

    def loss(batch, scores):
        if calls is not None:
            calls.append(batch.row_B[0])
        value, metrics = imitation(12)(batch, scores)
        return (value + INF if row in batch.row_B else value), metrics

    return loss


def steep_at(*poisoned: int):
    """Loss of imitation with an infinite slope and no height for some rows: sqrt at 0."""

    def loss(batch, scores):
        value, metrics = imitation(12)(batch, scores)
        return (value + (value * 0).sqrt() if set(batch.row_B) & set(poisoned) else value), metrics

    return loss


def refused(trainer: LocalTrainer, toy, loss, given=None) -> Diverged:
    """The error of a step, after proof that it left weights, optimizer and version alone."""
    weights, state, version = toy.weights(trainer.model), copy.deepcopy(trainer.optimizer.state_dict()), trainer.version
    with pytest.raises(Diverged) as caught:
        trainer.step(given or batches(toy), loss)
    assert torch.equal(toy.weights(trainer.model), weights)
    assert trainer.version == version
    now = trainer.optimizer.state_dict()["state"]
    assert now.keys() == state["state"].keys()
    assert all(torch.equal(now[key][name], value) for key, entry in state["state"].items() for name, value in entry.items())
    assert all(p.grad is None for p in trainer.model.parameters())
    return caught.value


def place_of(row: int, toy) -> int:
    return [batch.row_B for batch in batches(toy)].index((row,))


def test_an_infinite_loss_is_traced_to_its_row(toy):
    trainer = trainer_of(toy.model())
    trainer.step(batches(toy), imitation(12))
    calls: list[int] = []
    error = refused(trainer, toy, infinite_at(12, calls))
    assert len(calls) == 4  # the losses are known already: nothing is computed again
    trace = error.trace
    assert trace is not None
    assert (trace.step, trace.what, trace.loss) == (1, "loss", INF)
    assert trace.place == Place(0, place_of(12, toy), 4, (12,))
    assert trace.parameters == ()  # the slope of a constant is 0: only the loss is infinite
    assert str(error).endswith(f"look at micro-batch {place_of(12, toy)} of 4 of process 0 (rows 12), whose loss is not finite")
    assert "\n" not in str(error)


def test_a_broken_gradient_of_one_parameter_is_traced_to_its_name(toy):
    model = toy.model()
    trainer = trainer_of(model)
    hook = trainer.parameters[POISONED].register_hook(lambda gradient: gradient * NAN)
    trace = refused(trainer, toy, imitation(12)).trace
    assert trace is not None
    assert (trace.step, trace.what, trace.parameters, trace.trainable) == (0, "gradient", (POISONED,), len(trainer.parameters))
    assert math.isfinite(trace.loss)
    assert trace.place is not None
    assert trace.place.micro_batch == 0  # every micro-batch has it: the first is named
    assert f"the gradient of 1 of {trace.trainable} parameters is not finite, first '{POISONED}'" in str(trace)
    hook.remove()
    assert math.isfinite(read(trainer.step(batches(toy), imitation(12)))["grad_norm"] or NAN)


def test_a_broken_gradient_of_one_row_is_traced_to_it(toy):
    trainer = trainer_of(toy.model())
    trace = refused(trainer, toy, steep_at(11)).trace
    assert trace is not None
    assert trace.what == "gradient"
    assert trace.place == Place(0, place_of(11, toy), 4, (11,))
    assert trace.parameters == tuple(trainer.parameters)


def test_a_sum_that_overflows_has_no_place(toy):
    model = toy.model()
    trainer = trainer_of(model)
    trainer.parameters["model.norm.weight"].register_hook(lambda gradient: torch.full_like(gradient, 3e38))
    trace = refused(trainer, toy, imitation(12)).trace
    assert trace is not None
    assert (trace.place, trace.parameters) == (None, ("model.norm.weight",))
    assert "the sum over micro-batches: each alone is finite" in str(trace)


def test_a_norm_that_overflows_names_no_parameter(toy):
    trainer = trainer_of(toy.model())
    trainer.parameters["model.norm.weight"].register_hook(lambda gradient: torch.full_like(gradient, 1e30))
    trace = refused(trainer, toy, imitation(12)).trace
    assert trace is not None
    assert (trace.what, trace.parameters, trace.place, trace.norm) == ("gradient", (), None, INF)


def test_a_good_step_looks_at_no_single_parameter(toy, monkeypatch):
    monkeypatch.setattr("posttrain.engine.trainer.broken", lambda gradients: pytest.fail("looked at every parameter"))
    trainer_of(toy.model()).step(batches(toy), imitation(12))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_every_rank_learns_where_it_was(toy, what):
    def body(ranks: Ranks) -> Diverged:
        trainer = trainer_of(toy.model(), ranks)
        return refused(trainer, toy, infinite_at(12) if what == "loss" else steep_at(12), batches(toy, ranks))

    one, two = toy.together(2, body)
    assert str(one) == str(two)
    holder = next(rank for rank in range(2) if any(12 in batch.row_B for batch in batches(toy, Ranks(rank, 2))))
    assert one.trace is not None
    assert two.trace is not None
    assert one.trace.place == two.trace.place
    assert one.trace.parameters == two.trace.parameters
    assert one.trace.place is not None
    assert (one.trace.what, one.trace.place.process, one.trace.place.rows) == (what, holder, (12,))


def test_of_two_ranks_the_one_that_broke_earlier_is_named(toy):
    shares = [[batch.row_B[0] for batch in batches(toy, Ranks(rank, 2))] for rank in range(2)]
    late, early = shares[0][1], shares[1][0]

    def body(ranks: Ranks) -> Diverged:
        return refused(trainer_of(toy.model(), ranks), toy, steep_at(late, early), batches(toy, ranks))

    for error in toy.together(2, body):
        assert error.trace is not None
        assert error.trace.place == Place(1, 0, 2, (early,))


def test_of_two_broken_micro_batches_the_earlier_is_named(toy):
    second, third = (batch.row_B[0] for batch in batches(toy)[1:3])
    trace = refused(trainer_of(toy.model()), toy, steep_at(third, second)).trace
    assert trace is not None
    assert trace.place is not None
    assert trace.place.rows == (second,)


def test_rows_without_identity_are_named_by_their_place(toy):
    given = [replace(batch, row_B=()) for batch in batches(toy)]
    trace = refused(trainer_of(toy.model()), toy, lambda batch, scores: (scores.logp_BT.sum() * NAN, {}), given).trace
    assert trace is not None
    assert trace.place is not None
    assert trace.place.rows == given[0].sample_B


def test_the_message_stays_short_and_the_fields_stay_whole():
    place = Place(1, 0, 2, tuple(range(20)))
    assert str(place) == f"micro-batch 0 of 2 of process 1 (rows {', '.join(map(str, range(SHOWN)))} and 12 more)"
    assert str(Place(None, 0, 1, ())) == "micro-batch 0 of 1 of every process (rows none)"


def test_it_travels_between_processes():
    trace = Trace(3, "gradient", 0.5, NAN, ("w",), 2, Place(0, 1, 2, (5,)))
    error = Diverged.at(trace, 1e-4)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.trace.place == trace.place
    assert again.exit_code == 4


def test_small_pieces_by_hand():
    assert first_bad([0.5, NAN, INF]) == 1
    assert first_bad([0.5]) is None
    assert broken({"a": torch.tensor([1.0]), "b": None, "c": torch.tensor([INF]), "d": torch.tensor([1.0, NAN])}) == ["c", "d"]
    assert in_order(["a", "b", "c"], [["c"], ["a", "c"]]) == ("a", "c")
