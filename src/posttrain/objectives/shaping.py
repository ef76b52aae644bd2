"""Reward terms that look at length and repetition alone. Pure functions of plain numbers. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.core.errors import ConfigError


def soft_overlong(length: int, limit: int, buffer: int, scale: float = 1.0) -> float:
    """What a completion of `length` tokens adds to its reward: a ramp down before the limit instead of a cliff at it.

    0 up to the start limit - buffer, then scale * (start - length) / buffer, which is -scale at the limit, and -scale beyond.

    The source counts from the other end: its Lt is the start and its C the buffer, so that the limit is Lt + C.

    Example: Lt = 16,384 and C = 4,096, so limit = 20,480: 16,384 tokens add 0, 18,432 add -0.5, 20,480 and more add -1.
    Source: DAPO (Yu et al. 2025); scale 0.1 is Magistral's; spec/recipes-of-the-labs.md G-41a, T12.

    Raises:
        ConfigError: no room for the ramp.
    """
    if not 0 < buffer <= limit:
        raise ConfigError(f"an over-long ramp of {buffer} tokens before a limit of {limit}: the buffer must be 1 to {limit} tokens")
    return scale * max(min(limit - buffer - length, 0), -buffer) / buffer


def group_length_bonus(lengths: Sequence[int], correct: Sequence[bool]) -> list[float]:
    """What each sibling's length adds to its reward: 0.5 for the shortest of the group down to -0.5 for the longest.

    A wrong answer never earns a bonus: it gets min(0, bonus). Siblings of one length all get 0.

    Example: lengths 2,000, 4,000, 6,000 give +0.5, 0, -0.5 when correct and 0, 0, -0.5 when wrong.
    Source: Kimi k1.5 (2025), which trains without it first and adds it later; spec/recipes-of-the-labs.md G-41c, T13.
    """
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    bonuses = [0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0 for length in lengths]
    return [bonus if right else min(0.0, bonus) for bonus, right in zip(bonuses, correct, strict=True)]


def repetition_penalty(ids: Sequence[int], n: int, coef: float) -> list[float]:
    """-coef on each token that completes an n-gram seen before in the same completion, 0 on all others.

    The blame is on the token that closes the repeat, not on the whole completion. Occurrences may overlap: 7 7 7 repeats (7, 7) once.

    Example: ids 1 2 3 1 2 3 and n = 2: (1, 2) returns at the fifth token and (2, 3) at the sixth: 0 0 0 0 -coef -coef.
    """
    if n < 1:
        raise ValueError(f"n-grams of {n} tokens")
    seen: set[tuple[int, ...]] = set()
    penalties = [0.0] * len(ids)
    for end in range(n, len(ids) + 1):
        gram = tuple(ids[end - n : end])
        if gram in seen:
            penalties[end - 1] -= coef
        seen.add(gram)
    return penalties
