"""Whole surrogates under one name: what stands in for ratio, limit and correction when a method is none of their choices.

A surrogate is a function of `Streams` that returns the loss of every token, unreduced. To add one: write it in a file of its own, certify
it (`posttrain certify FILE.py:FUNCTION`), and enter it here. A function outside the package needs no entry: it is given as
`objective.surrogate=FILE.py:FUNCTION`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from posttrain.objectives.sapo import sapo
from posttrain.objectives.streams import Streams

Surrogate = Callable[[Streams], Tensor]

SURROGATES: dict[str, Surrogate] = {"sapo": sapo}
