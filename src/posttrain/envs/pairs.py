"""Holding out pairs of numbers: if {12, 7} is held out, no order of it and no operator on it is ever trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from posttrain.core.digest import digest
from posttrain.core.seeds import python_rng

WALK_LIMIT = 200_000
"""Most pairs visited when listing held-out tasks: all ordered pairs of a range up to 447 wide."""
DRAW_LIMIT = 10_000


def pair_held_out(a: int, b: int, percent: int) -> bool:
    """Whether the unordered pair {a, b} belongs to the held-out `percent` %: a fixed property of the pair, not of a seed or a list."""
    return int(digest([min(a, b), max(a, b)]), 16) % 100 < percent


def walk_pairs(low: int, high: int, *path: str | int) -> Iterator[tuple[int, int]]:
    """Ordered pairs of [low, high] in an order fixed by `path`, without repeats; at most WALK_LIMIT of them."""
    width = high - low + 1
    for index in python_rng(0, "pairs", *path).sample(range(width * width), min(width * width, WALK_LIMIT)):
        yield low + index // width, low + index % width


def draw_pair(rng: Random, low: int, high: int, accept: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """A uniform ordered pair of [low, high] that `accept` takes; None when DRAW_LIMIT draws found none."""
    for _ in range(DRAW_LIMIT):
        a, b = rng.randint(low, high), rng.randint(low, high)
        if accept(a, b):
            return a, b
    return None
