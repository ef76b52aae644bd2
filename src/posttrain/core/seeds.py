"""Every random stream is derived from (seed, name path).

A step that knows its name can be repeated alone, so no generator state has to be saved: resuming at step 40 draws the same numbers
as a run that never stopped, and the order in which work is done cannot change what is drawn.
"""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache

import numpy as np


def derive(seed: int, *path: str | int) -> int:
    """A 63-bit seed for the stream called `path`.

    >>> derive(0, "sft", "order", 1) == derive(0, "sft", "order", 1)
    True
    >>> derive(0, "a", "b") == derive(0, "ab")
    False
    """
    name = "\x1f".join([str(int(seed)), *[f"{type(part).__name__}:{part}" for part in path]])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def numpy_rng(seed: int, *path: str | int) -> np.random.Generator:
    """A numpy generator for the stream called `path`."""
    return np.random.Generator(np.random.Philox(key=derive(seed, *path)))


def python_rng(seed: int, *path: str | int) -> random.Random:
    """A `random.Random` for the stream called `path`."""
    return random.Random(derive(seed, *path))


@lru_cache(maxsize=4)
def permutation(n: int, seed: int, *path: str | int) -> tuple[int, ...]:
    """0..n-1 in the order of the stream called `path`; remembered, since a loop asks for the same epoch at every step."""
    return tuple(numpy_rng(seed, *path).permutation(n).tolist())


def uniforms(seed: int, n: int) -> np.ndarray:
    """`n` float64 uniforms in [0, 1) owned by one sampling request, one per token."""
    return np.random.Generator(np.random.Philox(key=seed)).random(n)
