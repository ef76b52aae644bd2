"""The exact world: all sequences of a tiny vocabulary under a softmax table, in numpy float64, without autograd.

A policy is one row of logits per prefix. Its scores are (onehot - p) per token; derivatives of anything else are taken by complex step,
f'(x) = Im f(x + ih) / h, which subtracts nothing and is exact to the last bits. Neither shares code or method with what is certified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from posttrain.core.seeds import numpy_rng

END = 0
"""The token that ends a sequence in trees of variable length."""


@dataclass(frozen=True, slots=True)
class Tree:
    """All sequences of a vocabulary, padded to the longest.

    Example: vocabulary 2, length 2, fixed: sequences 00 01 10 11 and prefixes "", 0, 1. With an end token 0: sequences 0, 10, 11 and
    prefixes "" and 1.
    """

    vocabulary: int
    tokens_BT: np.ndarray
    states_BT: np.ndarray
    """The prefix that each token was chosen in, as a row of the logits."""
    mask_BT: np.ndarray
    states: int

    @property
    def lengths_B(self) -> np.ndarray:
        """Tokens of each sequence."""
        return self.mask_BT.sum(-1)

    def read(self, table_SV: np.ndarray) -> np.ndarray:
        """Entry of each token in a table of [prefixes, vocabulary]; 0 where padded."""
        return np.where(self.mask_BT, table_SV[self.states_BT, self.tokens_BT], 0.0)

    def visits(self, weight_BT: np.ndarray) -> np.ndarray:
        """Sum of the weights of all tokens chosen in each prefix, [prefixes]."""
        return np.bincount(self.states_BT[self.mask_BT], weight_BT[self.mask_BT], minlength=self.states)


def tree(vocabulary: int, length: int, *, ends: bool = False) -> Tree:
    """Every sequence of `length` tokens; with `ends`, every one that stops at its first 0 or at `length`."""
    prefixes: dict[tuple[int, ...], int] = {(): 0}
    done: list[tuple[int, ...]] = []
    open_: list[tuple[int, ...]] = [()]
    while open_:
        prefix = open_.pop(0)
        for token in range(vocabulary):
            longer = (*prefix, token)
            if len(longer) == length or (ends and token == END):
                done.append(longer)
            else:
                prefixes[longer] = len(prefixes)
                open_.append(longer)
    tokens_BT, states_BT = (np.zeros((len(done), length), dtype=np.int64) for _ in range(2))
    mask_BT = np.zeros((len(done), length), dtype=bool)
    for b, sequence in enumerate(done):
        for t, token in enumerate(sequence):
            tokens_BT[b, t], states_BT[b, t], mask_BT[b, t] = token, prefixes[sequence[:t]], True
    return Tree(vocabulary, tokens_BT, states_BT, mask_BT, len(prefixes))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis; complex logits give complex ones, which is what the derivative below needs."""
    exps = np.exp(logits - np.max(np.real(logits), axis=-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def probabilities(where: Tree, logits_SV: np.ndarray) -> np.ndarray:
    """Probability of each sequence, [B]; they sum to 1."""
    return np.where(where.mask_BT, softmax(logits_SV)[where.states_BT, where.tokens_BT], 1.0).prod(-1)


def score_sum(where: Tree, logits_SV: np.ndarray, weight_BT: np.ndarray) -> np.ndarray:
    """Sum over all tokens of weight * grad log pi(token | prefix), with grad log pi = onehot - p, [prefixes, vocabulary].

    Example: one prefix, p = (.5, .5), weights 1 on token 0 and 0 on token 1: (1 - .5, 0 - .5).
    """
    p_SV = softmax(logits_SV)
    total = np.zeros_like(p_SV)
    for b, t in np.argwhere(where.mask_BT):
        state = where.states_BT[b, t]
        total[state] -= weight_BT[b, t] * p_SV[state]
        total[state, where.tokens_BT[b, t]] += weight_BT[b, t]
    return total


def derivative(function: Callable[[np.ndarray], complex], at: np.ndarray) -> np.ndarray:
    """Gradient of an analytic function of real logits, by complex step: no rounding beyond that of the function.

    Example: x^2 at 3: Im((3 + ih)^2) / h = 6.
    """
    step = 1e-30
    gradient = np.zeros(at.shape)
    for index in np.ndindex(at.shape):
        moved = at.astype(np.complex128)
        moved[index] += 1j * step
        gradient[index] = np.imag(function(moved)) / step
    return gradient


def expectation(where: Tree, reward_B: np.ndarray) -> Callable[[np.ndarray], complex]:
    """J(logits) = sum over sequences of probability * reward, as a function to take the derivative of."""
    return lambda logits_SV: (probabilities(where, logits_SV) * reward_B).sum()


def divergence(p_SV: np.ndarray, q_SV: np.ndarray) -> np.ndarray:
    """KL(p || q) of each row."""
    return (p_SV * (np.log(p_SV) - np.log(q_SV))).sum(-1)


def divergence_gradient(logits_SV: np.ndarray, reference_SV: np.ndarray, weight_S: np.ndarray, direction: str) -> np.ndarray:
    """Gradient of sum over prefixes of weight * divergence, the weights held fixed.

    Args:
        direction: "KL(policy || reference)" or "KL(reference || policy)".
    """
    q_SV = softmax(reference_SV)
    if direction == "KL(policy || reference)":
        return derivative(lambda logits: (weight_S * divergence(softmax(logits), q_SV)).sum(), logits_SV)
    if direction == "KL(reference || policy)":
        return derivative(lambda logits: (weight_S * divergence(q_SV, softmax(logits))).sum(), logits_SV)
    raise ValueError(f"no divergence is called '{direction}'")


@dataclass(frozen=True, slots=True)
class World:
    """A tree with four policies on it, as logits [prefixes, vocabulary]."""

    where: Tree
    logits_SV: np.ndarray
    old_SV: np.ndarray
    behaviour_SV: np.ndarray
    reference_SV: np.ndarray

    def on_policy(self) -> World:
        """The same before any update, with a sampler that agrees: old and behaviour are the policy itself."""
        return World(self.where, self.logits_SV, self.logits_SV, self.logits_SV, self.reference_SV)

    def draw(self, *shape: int, name: str) -> np.ndarray:
        """Standard normal numbers that depend on the name alone."""
        return numpy_rng(0, "certificate", name, *shape).normal(size=shape)


def world(vocabulary: int, length: int, *, ends: bool = False, spread: float = 0.5) -> World:
    """Policies apart: each logit of `old` is `spread` (standard deviation) from the policy's, the sampler's 0.8 of that further."""
    where = tree(vocabulary, length, ends=ends)
    normal = numpy_rng(0, "certificate", "world", vocabulary, length, int(ends)).normal
    size = (where.states, vocabulary)
    logits_SV = normal(size=size)
    old_SV = logits_SV + spread * normal(size=size)
    behaviour_SV = old_SV + 0.8 * spread * normal(size=size)
    return World(where, logits_SV, old_SV, behaviour_SV, logits_SV + 0.7 * normal(size=size))
