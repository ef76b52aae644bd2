"""Several tests at once: adjusted p-values, so that one of twenty tasks does not look like a discovery by chance."""

from __future__ import annotations

from collections.abc import Mapping

from posttrain.core.errors import EvidenceError


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down adjusted p-values (Holm 1979), in the order given.

    Claiming every task whose adjusted value is below 0.05 makes even one false claim with probability below 0.05, however the tests
    depend on each other. The smallest of m values is multiplied by m, the next by m - 1 and so on; none may fall below its predecessor.

    >>> adjusted = holm({"gsm8k": 0.01, "math": 0.04, "code": 0.03})  # .01 * 3, then .03 * 2, then max(.06, .04 * 1)
    >>> adjusted
    {'gsm8k': 0.03, 'math': 0.06, 'code': 0.06}
    """
    for name, value in p_values.items():
        if not 0 <= value <= 1:
            raise EvidenceError(f"p-value {value} of '{name}' is not between 0 and 1; leave the task out and say why")
    largest, adjusted = 0.0, dict[str, float]()
    for rank, name in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        largest = max(largest, min(1.0, p_values[name] * (len(p_values) - rank)))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
