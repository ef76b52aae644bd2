"""Who decides an update: the weight that each response has in the loss, against its length and the sign of its advantage. Torch-free.

Every aggregation favours some length. 1 / N per token lets long responses decide; 1 / (B L) gives a long wrong answer the same blame as a
short one, spread so thin that a token of it is hardly discouraged. Neither shows in the loss. The weights are those of `aggregate.py`,
written down per response:

    aggregation           one token      the response     (L trained tokens; step: N tokens, B responses, P prompts; M tokens of the prompt)
    token_mean            1 / N          L / N
    seq_mean_token_mean   1 / (B L)      1 / B
    seq_mean_token_sum    1 / B          L / B
    constant              1 / c          L / c
    prompt_mean           1 / (P M)      L / (P M)

Source: spec/book-2 items 85-88 and 7.1; spec/recipes-of-the-labs.md T11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.objectives.axes import Aggregation


@dataclass(frozen=True, slots=True)
class Side:
    """The responses whose advantage has one sign. Figures that need a response are None without one.

    Example: seq_mean_token_mean, two responses in the step, of 40 tokens with A > 0 and of 10 with A < 0. The positive side is
    Side(rows=1, tokens=40, share=0.5, per_token=0.0125, per_sequence=0.5, correlation=None): half the weight, 1 / (2 * 40) per token.
    """

    rows: int
    tokens: int
    share: float
    """Of the weight of the whole step."""
    per_token: float | None
    """Mean weight of a token."""
    per_sequence: float | None
    """Mean weight of a response."""
    correlation: float | None
    """Of a response's weight with its length; None where either does not vary."""


@dataclass(frozen=True, slots=True)
class Report:
    """Weights of one optimizer step, in the order of its responses, and their summary by the sign of the advantage.

    Example: lengths 40, 12, 9 under token_mean: token 1/61 each, shares 0.656, 0.197, 0.148.
    """

    how: Aggregation
    lengths: tuple[int, ...]
    token: tuple[float, ...]
    """Weight of one token of each response; 0 for a response without trained tokens."""
    sequence: tuple[float, ...]
    """Weight of each response: the sum over its tokens."""
    everyone: Side
    positive: Side
    negative: Side

    @property
    def shares(self) -> tuple[float, ...]:
        """Each response's part of the whole weight."""
        total = sum(self.sequence)
        return tuple(weight / total if total else 0.0 for weight in self.sequence)


def weight_report(
    lengths: Sequence[int], advantages: Sequence[float], prompts: Sequence[str], how: Aggregation, constant: float | None = None
) -> Report:
    """The weights of one optimizer step.

    Args:
        lengths: trained tokens of each response; a response with 0 counts nowhere.
        advantages: one per response, e.g. the mean over its tokens; its sign decides the side. Responses at 0 belong to neither.
        prompts: the prompt of each response; read by prompt_mean.
        constant: the denominator of "constant"; None: responses times the longest of them. It scales all weights alike.

    Raises:
        ValueError: lists of different lengths, a negative length, or a constant that is not positive.
    """
    sizes = np.asarray(lengths, dtype=np.float64)
    if not len(lengths) == len(advantages) == len(prompts):
        raise ValueError(f"{len(lengths)} lengths, {len(advantages)} advantages and {len(prompts)} prompts: one of each per response")
    if (sizes < 0).any():
        raise ValueError(f"a response of {sizes.min():g} tokens")
    sequence = _sequence_weights(sizes, prompts, how, constant)
    sign = np.sign(np.asarray(advantages, dtype=np.float64))
    return Report(
        how,
        tuple(int(length) for length in lengths),
        tuple((sequence / np.maximum(sizes, 1)).tolist()),
        tuple(sequence.tolist()),
        everyone=_side(sizes, sequence, sizes > 0),
        positive=_side(sizes, sequence, (sizes > 0) & (sign > 0)),
        negative=_side(sizes, sequence, (sizes > 0) & (sign < 0)),
    )


def weight_metrics(
    lengths: Sequence[int], advantages: Sequence[float], prompts: Sequence[str], how: Aggregation, constant: float | None = None
) -> dict[str, float | None]:
    """Four figures for a step's record: what the longer half of the responses weighs against the shorter half, by sign of the advantage.

    weight_long_positive, weight_long_negative: mean weight of a response, longer half over shorter half. 1: length does not matter; 2: a
    long response decides twice as much. weight_token_long_positive, weight_token_long_negative: the same for a token; 0.2 among A < 0 says
    that a token of a long wrong answer is discouraged a fifth as much as one of a short wrong answer. None with fewer than two responses.

    Halves hold the same number of responses; those that tie at the middle belong to both in parts, so that their order does not matter.

    Example: lengths 40 and 10, both A > 0: token_mean gives 4 and 1, seq_mean_token_mean gives 1 and 0.25.
    """
    report = weight_report(lengths, advantages, prompts, how, constant if constant else None)
    sizes, weights = np.asarray(lengths, dtype=np.float64), np.asarray(report.sequence)
    figures: dict[str, float | None] = {}
    for name, sign in (("positive", 1), ("negative", -1)):
        rows = (sizes > 0) & (np.sign(np.asarray(advantages, dtype=np.float64)) == sign)
        figures[f"weight_long_{name}"], figures[f"weight_token_long_{name}"] = _long_over_short(sizes[rows], weights[rows])
    return figures


def _sequence_weights(sizes: np.ndarray, prompts: Sequence[str], how: Aggregation, constant: float | None) -> np.ndarray:
    trained = sizes > 0
    responses = max(int(trained.sum()), 1)
    match how:
        case "token_mean":
            return sizes / max(sizes.sum(), 1)
        case "seq_mean_token_mean":
            return trained / responses
        case "seq_mean_token_sum":
            return sizes / responses
        case "constant":
            scale = responses * sizes.max(initial=1) if constant is None else constant
            if not scale > 0:
                raise ValueError(f"constant = {constant}: the denominator of aggregation=constant must be positive")
            return sizes / scale
        case "prompt_mean":
            numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
            index = np.array([numbers[prompt] for prompt in prompts], dtype=np.int64)
            tokens = np.bincount(index, sizes)
            return sizes / np.maximum(tokens[index], 1) / max(int((tokens > 0).sum()), 1)


def _side(sizes: np.ndarray, weights: np.ndarray, rows: np.ndarray) -> Side:
    count, tokens, weight = int(rows.sum()), int(sizes[rows].sum()), float(weights[rows].sum())
    share = weight / float(weights.sum()) if count else 0.0
    if not count:
        return Side(0, 0, share, None, None, None)
    return Side(count, tokens, share, weight / tokens, weight / count, _correlation(sizes[rows], weights[rows]))


def _correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson; a spread below rounding is none."""
    if np.ptp(x) == 0 or np.ptp(y) <= 1e-12 * np.abs(y).max():
        return None
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1.0, 1.0))


def _long_over_short(sizes: np.ndarray, weights: np.ndarray) -> tuple[float | None, float | None]:
    """Mean weight of a response and of a token, longer half over shorter half."""
    n = len(sizes)
    if n < 2:
        return None, None
    middle = np.sort(sizes)[n // 2]
    at_middle = (n / 2 - (sizes > middle).sum()) / (sizes == middle).sum()  # what is left of the longer half, shared among the ties
    long = np.where(sizes > middle, 1.0, np.where(sizes == middle, at_middle, 0.0))
    short = 1.0 - long
    weight = (long @ weights) / (short @ weights)  # both halves hold n / 2 responses
    return float(weight), float(weight * (short @ sizes) / (long @ sizes))
