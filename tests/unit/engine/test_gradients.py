"""Gradients as a list: buckets, sums over ranks, norm, scaling."""

from __future__ import annotations

import torch

from posttrain.engine import gradients
from posttrain.engine.gradients import buckets, norm_of, scale, sum_over
from posttrain.engine.processes import Ranks


def sized(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size) for size in sizes]


def test_neighbours_travel_together_up_to_the_size():
    assert [[len(g) for g in bucket] for bucket in buckets(sized(3, 4, 9, 1), 8)] == [[3, 4], [9], [1]]
    assert [[len(g) for g in bucket] for bucket in buckets(sized(4, 4, 1), 8)] == [[4, 4], [1]]
    assert list(buckets([], 8)) == []


def test_types_do_not_mix_in_a_message():
    mixed = [torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(1)]
    assert [len(bucket) for bucket in buckets(mixed, 8)] == [1, 1, 1]


def test_one_process_sends_nothing_and_copies_nothing():
    class Alone(Ranks):
        def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
            raise AssertionError("nobody to send to")

    values = [torch.ones(3)]
    sum_over(Alone(), values)
    assert values[0].tolist() == [1.0, 1.0, 1.0]


def test_every_gradient_is_summed_whatever_its_shape_and_bucket(toy, monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET", 8)

    def body(ranks: Ranks) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(ranks.rank)
        mine = [torch.randn(shape, generator=generator) for shape in ((2, 3), (1,), (3, 4), (5, 2))]
        mine[3] = mine[3].T  # not contiguous, alone in its message
        before = [gradient.clone() for gradient in mine]
        sum_over(ranks, mine)
        return [*before, *mine]

    one, two = toy.together(2, body)
    for place in range(4):
        expected = one[place] + two[place]
        assert torch.equal(one[4 + place], expected)
        assert torch.equal(two[4 + place], expected)


def test_norm_by_hand():
    # 3^2 + 0^2 + 4^2 = 25
    assert norm_of([torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]).item() == 5.0


def test_scaling_is_in_place():
    values = [torch.tensor([2.0]), torch.tensor([[4.0]])]
    scale(values, 0.5)
    assert [value.item() for value in values] == [1.0, 2.0]
