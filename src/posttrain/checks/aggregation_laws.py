"""The laws for aggregations: what each token weighs, added up by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from posttrain.checks.findings import CLOSE, EXACT, Finding, absent, distance, largest, measured
from posttrain.checks.subjects import GARBAGE, check_shape, check_untouched, cited
from posttrain.objectives.aggregate import aggregate, denominator_of
from posttrain.objectives.axes import Aggregation

_MASK = ((1, 1, 0, 1, 0), (1, 0, 0, 0, 0), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1), (0, 1, 1, 0, 0))
PROMPTS = ("a", "a", "a", "b", "c")
CONSTANT = 12.5
WEIGHTS = {
    "token_mean": "1 / N",
    "seq_mean_token_mean": "1 / (B L)",
    "seq_mean_token_sum": "1 / B",
    "constant": "1 / c",
    "prompt_mean": "1 / (P M)",
}
"""What a token of a response with L of N tokens weighs; B responses, P prompts, M tokens of the prompt."""

Call = Callable[[Tensor, Tensor, float, Tensor], Tensor]
"""(values_BT, mask_BT, denominator, prompt_tokens_B) -> number."""


@dataclass(frozen=True, slots=True)
class Reducer:
    """An aggregation under test; `how` is None for a user's function."""

    name: str
    call: Call
    how: Aggregation | None = None

    def denominator(self, mask: Tensor, prompts: Sequence[str]) -> float:
        """That of a step with these rows; a user's function gets the number of trained tokens."""
        return denominator_of(mask.sum(-1).tolist(), self.how or "token_mean", CONSTANT, prompts)


def reducer(how: Aggregation) -> Reducer:
    """A registered aggregation."""
    return Reducer(how, lambda values, mask, denominator, prompt_B: aggregate(values, mask, how, denominator, prompt_B), how)


def guarded_reducer(name: str, function: Callable[[Tensor, Tensor, float], Tensor]) -> Reducer:
    """A user's function; Violation when it raises, does not give one number, or edits its inputs."""

    def call(values: Tensor, mask: Tensor, denominator: float, prompt_B: Tensor) -> Tensor:
        given = {"values": values * 1, "mask": mask.clone()}
        before = {key: value.detach().clone() for key, value in given.items()}
        with cited():
            found = function(given["values"], given["mask"], denominator)
        check_shape(found, (), "a single number")
        check_untouched(before, given)
        return found

    return Reducer(name, call)


@dataclass(frozen=True, slots=True)
class Scene:
    """A step of five responses: with a hole, of one token, of none, whole, and late."""

    values: Tensor
    mask: Tensor
    prompts: tuple[str, ...]

    @property
    def prompt_tokens_B(self) -> Tensor:
        """Trained tokens of each row's prompt."""
        lengths = self.mask.sum(-1).tolist()
        totals = {prompt: sum(n for n, p in zip(lengths, self.prompts, strict=True) if p == prompt) for prompt in self.prompts}
        return torch.tensor([float(totals[prompt]) for prompt in self.prompts], dtype=torch.float64)


def scene() -> Scene:
    """The step."""
    values = torch.linspace(-1.0, 2.0, 25, dtype=torch.float64).view(5, 5).sin() + 1.5
    return Scene(values, torch.tensor(_MASK, dtype=torch.bool), PROMPTS)


def _evaluate(tested: Reducer, values: Tensor, mask: Tensor, denominator: float, prompt_B: Tensor) -> tuple[float, Tensor]:
    leaf = values.detach().clone().requires_grad_()
    total = tested.call(leaf, mask, denominator, prompt_B)
    gradient = torch.autograd.grad(total, leaf, allow_unused=True)[0] if total.requires_grad else None
    return total.item(), torch.zeros_like(leaf) if gradient is None else gradient


def laws(tested: Reducer) -> list[Finding]:
    """All six."""
    step = scene()
    denominator = tested.denominator(step.mask, step.prompts)
    value, weight = _evaluate(tested, step.values, step.mask, denominator, step.prompt_tokens_B)
    return [
        _partition(tested, step, denominator, (value, weight)),
        _mask(tested, step, denominator, (value, weight)),
        _permutation(tested, step, denominator, (value, weight)),
        *_oracle(tested, step, denominator, (value, weight)),
        _conservation(tested, step, weight),
        _reduction(tested, step),
    ]


def _partition(tested: Reducer, step: Scene, denominator: float, whole: tuple[float, Tensor]) -> Finding:
    """Parts under the step's denominator add up to the step; wider padding changes nothing."""
    found = []
    splits = [[[0], [1], [2], [3], [4]], [[4, 3], [2], [1, 0]], [[0, 2, 4], [1, 3]]]
    if tested.how:
        splits.append([[0, 1, 2, 3], [], [4]])
    for rows_of_parts in splits:
        total, weight = 0.0, torch.zeros_like(step.values)
        for rows in rows_of_parts:
            index = torch.tensor(rows, dtype=torch.long)
            wide = torch.nn.functional.pad(step.values[index], (0, 2), value=math.nan)
            mask = torch.nn.functional.pad(step.mask[index], (0, 2), value=False)
            value, slope = _evaluate(tested, wide, mask, denominator, step.prompt_tokens_B[index])
            total, weight[index] = total + value, slope[:, :5]
        found.append((max(distance(total, whole[0]), distance(weight, whole[1])), str(rows_of_parts)))
    deviation, detail = largest(found)
    return measured("partition", deviation, f"{len(splits)} splits into wider parts under the denominator of the step; worst: {detail}")


def _mask(tested: Reducer, step: Scene, denominator: float, clean: tuple[float, Tensor]) -> Finding:
    found = []
    for what, numbers in GARBAGE.items():
        junk = torch.where(step.mask, step.values, torch.tensor(np.resize(numbers, (5, 5))))
        value, weight = _evaluate(tested, junk, step.mask, denominator, step.prompt_tokens_B)
        found.append((max(distance(value, clean[0]), distance(weight, torch.where(step.mask, clean[1], 0.0))), what))
    deviation, detail = largest(found)
    return measured("mask", deviation, f"{len(GARBAGE)} kinds of garbage where untrained" if deviation == 0 else f"{detail} leaks", EXACT)


def _permutation(tested: Reducer, step: Scene, denominator: float, whole: tuple[float, Tensor]) -> Finding:
    """Rows in any order; two responses, and two prompts, of equal content stay two."""
    order = [3, 1, 4, 0, 2]
    value, weight = _evaluate(tested, step.values[order], step.mask[order], denominator, step.prompt_tokens_B[order])
    found = [(distance(value, whole[0]), "value"), (distance(weight, whole[1][order]), "weights")]
    twice = [0, 0]
    pair = _evaluate(tested, step.values[twice], step.mask[twice], denominator, step.prompt_tokens_B[twice])[0]
    once = _evaluate(tested, step.values[:1], step.mask[:1], denominator, step.prompt_tokens_B[:1])[0]
    found.append((distance(pair, 2 * once), "two equal responses stay two"))
    if tested.how == "prompt_mean":
        found.append((distance(denominator_of([3, 3], "prompt_mean", prompts=["x", "y"]), 2.0), "two equal prompts stay two"))
    deviation, detail = largest(found)
    return measured("permutation", deviation, f"rows reordered and doubled; worst: {detail}", 1e-12)


def by_hand(how: Aggregation, mask: Sequence[Sequence[int]], prompts: Sequence[str]) -> list[list[float]]:
    """Weight of every slot from the table in aggregate.py, by loops."""
    lengths = [sum(row) for row in mask]
    tokens, responses = sum(lengths), sum(1 for length in lengths if length)
    alive = {prompt for prompt, length in zip(prompts, lengths, strict=True) if length}
    table = []
    for row, length, prompt in zip(mask, lengths, prompts, strict=True):
        siblings = sum(n for n, other in zip(lengths, prompts, strict=True) if other == prompt)
        each = {
            "token_mean": 1 / tokens,
            "seq_mean_token_mean": 1 / (responses * max(length, 1)),
            "seq_mean_token_sum": 1 / responses,
            "constant": 1 / CONSTANT,
            "prompt_mean": 1 / (len(alive) * max(siblings, 1)),
        }[how]
        table.append([each * slot for slot in row])
    return table


def _oracle(tested: Reducer, step: Scene, denominator: float, whole: tuple[float, Tensor]) -> list[Finding]:
    value, weight = whole
    if tested.how is not None:
        expected = np.array(by_hand(tested.how, _MASK, step.prompts))
        gap = max(distance(weight, expected), distance(value, (expected * step.values.numpy()).sum()))
        return [measured("oracle", gap, f"every token weighs {WEIGHTS[tested.how]}, by hand loops")]
    other = step.values.flip(0, 1) ** 2 - 1.0
    moved, moved_weight = _evaluate(tested, other, step.mask, denominator, step.prompt_tokens_B)
    linear = max(distance(value, (weight * step.values).sum()), distance(moved, (weight * other).sum()), distance(moved_weight, weight))
    halved = _evaluate(tested, step.values, step.mask, 2 * denominator, step.prompt_tokens_B)[0]
    return [
        measured("oracle", linear, "a weighted sum whose weights do not depend on the values"),
        measured("oracle", distance(2 * halved, value), "inversely proportional to the denominator that it is given"),
    ]


def _conservation(tested: Reducer, step: Scene, weight: Tensor) -> Finding:
    """The weights of all tokens sum to what the table says; every trained token weighs something, no other does."""
    outside = float(weight[~step.mask].abs().max())
    lost = float((weight[step.mask] == 0).sum())
    total = float(weight.sum())
    lengths = [sum(row) for row in _MASK]
    responses = sum(1 for length in lengths if length)
    sums = {"seq_mean_token_sum": sum(lengths) / responses, "constant": sum(lengths) / CONSTANT}
    if tested.how is None:
        return measured(
            "conservation", max(outside, lost), f"trained tokens all count, others do not; the weights sum to {total:.4g}", EXACT
        )
    expected = sums.get(tested.how, 1.0)
    gap = max(outside, lost, distance(total, expected))
    return measured("conservation", gap, f"trained tokens all count, others do not; the weights sum to {expected:.4g}", 1e-12)


def _reduction(tested: Reducer, step: Scene) -> Finding:
    """Where lengths or prompts leave no difference between two aggregations."""
    if tested.how is None:
        return absent("reduction", "no limit at which a user's function becomes another one is known")
    even = Scene(step.values[:4], torch.tensor([[1, 1, 1, 0, 0]] * 4, dtype=torch.bool), ("a", "b", "c", "d"))
    one = Scene(step.values, step.mask, ("a",) * 5)
    own = Scene(step.values, step.mask, ("a", "b", "c", "d", "e"))
    tokens = float(step.mask.sum())

    def of(how: Aggregation, on: Scene, denominator: float | None = None) -> Tensor:
        given = denominator or denominator_of(on.mask.sum(-1).tolist(), how, CONSTANT, on.prompts)
        return _evaluate(reducer(how), on.values, on.mask, given, on.prompt_tokens_B)[1]

    cases: dict[str, list[tuple[str, Tensor, Tensor]]] = {
        "token_mean": [("equal lengths: seq_mean_token_mean", of("token_mean", even), of("seq_mean_token_mean", even))],
        "seq_mean_token_mean": [("equal lengths: token_mean", of("seq_mean_token_mean", even), of("token_mean", even))],
        "seq_mean_token_sum": [("equal lengths: L times token_mean", of("seq_mean_token_sum", even), 3 * of("token_mean", even))],
        "constant": [("c = N: token_mean", of("constant", step, tokens), of("token_mean", step))],
        "prompt_mean": [
            ("one prompt: token_mean", of("prompt_mean", one), of("token_mean", one)),
            ("one response per prompt: seq_mean_token_mean", of("prompt_mean", own), of("seq_mean_token_mean", own)),
        ],
    }
    found = [(distance(left, right), text) for text, left, right in cases[tested.how]]
    deviation, detail = largest(found)
    return measured("reduction", deviation, "; ".join(text for _, text in found) if deviation <= CLOSE else detail, 1e-12)
