"""Credit per token: from a critic (GAE), from rewards alone (reward-to-go), or from a teacher (log-ratio).

Everything is float64 numpy on one row; torch is not needed. A row interleaves tokens that the policy chose (trained) with tokens that it
did not: prompt, tool output, padding. Only a trained token is a decision. Tool output is part of what happens between two decisions, so the
next state is the next trained token: nothing is discounted in between and no value is read there.

Untrained slots of a value, KL or log-probability stream may hold anything. A reward is different: an environment may pay at a tool token,
so a finite reward on an untrained slot counts, for the decision that led there. Padding therefore holds reward 0 or NaN, no other number.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64
from numpy.typing import ArrayLike


def gae(
    rewards_T: ArrayLike, values_T: ArrayLike, trained_T: ArrayLike, gamma: float, lam: float, bootstrap: float = 0.0
) -> tuple[Float64[np.ndarray, " T"], Float64[np.ndarray, " T"]]:
    """Generalised advantage estimates and returns (the targets of the critic), both exactly 0 where untrained.

        delta_n = r_n + gamma V_{n+1} - V_n        A_n = delta_n + gamma lam A_{n+1}        return_n = A_n + V_n

    n counts trained tokens only.

    Args:
        rewards_T: a finite reward on an untrained slot goes to the last trained token before it; before the first one it goes to nobody.
        values_T: the critic's estimate in the state in which each token was chosen.
        trained_T: True where the policy chose the token.
        gamma: discount per trained token.
        lam: 1 for return minus value (no bias of the critic), 0 for one-step differences.
        bootstrap: value of the state after the last trained token: 0 where the episode ended, the critic's estimate where it was cut.

    Example: rewards (0, 0, 1), values (.3, .5, .8), gamma 1: lam 1 gives (.7, .5, .2), lam 0 (.2, .3, .2), lam .95 (.6655, .49, .2).

    Raises:
        ValueError: streams of different lengths; a trained token whose reward or value is not finite.

    Source: Schulman et al. 2016; spec/recipes-of-the-labs.md G-23, T44.
    """
    trained_T, rewards_N = _collect(rewards_T, trained_T)
    values_N = _decisions("values_T", values_T, trained_T)
    delta_N = rewards_N + gamma * np.append(values_N, bootstrap)[1:] - values_N
    advantage_N = np.zeros_like(delta_N)
    following = 0.0
    for n in reversed(range(len(delta_N))):
        following = advantage_N[n] = delta_N[n] + gamma * lam * following
    return _spread(advantage_N, trained_T), _spread(advantage_N + values_N, trained_T)


def reward_to_go(rewards_T: ArrayLike, trained_T: ArrayLike, gamma: float = 1.0) -> Float64[np.ndarray, " T"]:
    """Discounted sum of the rewards from each trained token on; 0 where untrained. `gae` without a critic.

    Example: rewards (1, 0, 2), gamma 0.5: (1.5, 1, 2). Rewards on untrained slots count as in `gae`.
    """
    return gae(rewards_T, np.zeros(np.shape(trained_T)), trained_T, gamma, 1.0)[0]


def token_rewards(score: float, kl_T: ArrayLike, trained_T: ArrayLike, coef: float) -> Float64[np.ndarray, " T"]:
    """PPO's rewards with the KL term inside: -coef * kl on every trained token, and the score on the last of them, wherever the row ends.

    They sum to score - coef * sum of kl for short and full-length rows alike (spec/faults.md 21). A row without trained tokens gets zeros:
    nobody earned its score.

    Args:
        kl_T: per-token estimate of log(policy / reference), in nats.

    Example: score 1, kl (.5, .25, junk), trained (yes, yes, no), coef .1: (-.05, .975, 0).
    """
    trained_T = np.asarray(trained_T, dtype=bool)
    rewards_N = -coef * _decisions("kl_T", kl_T, trained_T)
    rewards_N[-1:] += score
    return _spread(rewards_N, trained_T)


def teacher_advantage(teacher_T: ArrayLike, student_T: ArrayLike, trained_T: ArrayLike, clip: float | None) -> Float64[np.ndarray, " T"]:
    """log teacher - log student of each sampled token, in nats, bounded to +-clip; 0 where untrained. On-policy distillation.

    Its policy gradient descends KL(student || teacher). One token that the teacher would never write has a log-ratio without bound; `clip`
    keeps it from drowning the rest.

    Args:
        teacher_T: log-probabilities of the sampled tokens; -inf, a token outside the teacher's support, becomes -clip.
        student_T: log-probabilities under the policy that sampled them.
        clip: None for no bound.

    Example: probabilities .9 and .9 give 0; .001 and .4 give ln(.0025) = -5.9915, with clip 5 it is -5.

    Raises:
        ValueError: streams of different lengths; a trained token without a finite result.

    Source: spec/recipes-of-the-labs.md T20, T48.
    """
    trained_T = np.asarray(trained_T, dtype=bool)
    teacher_N = _pick("teacher_T", teacher_T, trained_T)
    ratio_N = teacher_N - _decisions("student_T", student_T, trained_T)
    if clip is not None:
        ratio_N = np.clip(ratio_N, -clip, clip)
    return _spread(_finite("teacher_T - student_T", ratio_N), trained_T)


def _collect(rewards_T: ArrayLike, trained_T: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The mask as booleans, and what each trained token earned: its own reward and those up to the next trained token."""
    mask_T = np.asarray(trained_T, dtype=bool)
    _decisions("rewards_T", rewards_T, mask_T)
    reward_T = np.asarray(rewards_T, dtype=np.float64)
    earner_T = np.cumsum(mask_T) - 1
    counts_T = (earner_T >= 0) & np.isfinite(reward_T)
    return mask_T, np.bincount(earner_T[counts_T], reward_T[counts_T], minlength=int(mask_T.sum()))


def _pick(name: str, stream_T: ArrayLike, trained_T: np.ndarray) -> np.ndarray:
    """The trained slots of a stream."""
    stream = np.asarray(stream_T, dtype=np.float64)
    if stream.shape != trained_T.shape or stream.ndim != 1:
        raise ValueError(f"{name} has shape {stream.shape}, trained_T {trained_T.shape}; both are one row")
    return stream[trained_T]


def _decisions(name: str, stream_T: ArrayLike, trained_T: np.ndarray) -> np.ndarray:
    """The trained slots of a stream that has to be finite there."""
    return _finite(name, _pick(name, stream_T, trained_T))


def _finite(name: str, stream_N: np.ndarray) -> np.ndarray:
    if not np.isfinite(stream_N).all():
        place = int(np.flatnonzero(~np.isfinite(stream_N))[0])
        raise ValueError(f"{name} is {stream_N[place]} at trained token {place}; it has to be finite wherever the policy is trained")
    return stream_N


def _spread(stream_N: np.ndarray, trained_T: np.ndarray) -> np.ndarray:
    """One number per trained token back to their slots, 0 elsewhere."""
    out_T = np.zeros(trained_T.shape)
    out_T[trained_T] = stream_N
    return out_T
