"""Which divergence each way of penalising the distance to a reference descends, and which ways make no sense. Torch-free.

`kl.py` derives the entries and computes the terms; `tests/unit/objectives/test_kl_oracle.py` proves them by enumeration.
"""

from __future__ import annotations

from typing import Literal

from posttrain.core.errors import ConfigError

KLEstimator = Literal["k1", "k2", "k3", "rho_k3"]
"""Estimators from the sampled token alone."""
ExactKL = Literal["full", "top_k"]
"""Sums over the vocabulary: `full_kl` (direction "reverse") and `top_k_kl`."""
KLPlacement = Literal["reward", "loss"]

DESCENDS: dict[tuple[str, str], str] = {
    ("reward", "k1"): "KL(policy || reference)",
    ("loss", "k2"): "KL(policy || reference)",
    ("loss", "k3"): "KL(reference || policy)",
    ("loss", "rho_k3"): "KL(policy || reference)",
    ("loss", "full"): "KL(policy || reference)",
    ("loss", "top_k"): "KL(policy || reference) of k tokens and one bucket for all others",
}
"""What each allowed (placement, estimator) descends in expectation over tokens of the policy."""

_ALSO_BELOW = "is positive also for a token that the policy makes less likely than the reference, and would push it further down"
_EXACT = "is the same for every token that could be drawn at its position, so as a reward it does not say which token to prefer"
_REMEDY = "use k1 in the reward, or k2 in the loss"
REFUSED: dict[tuple[str, str], str] = {
    ("loss", "k1"): "its expected gradient is zero: it adds noise and holds nothing; use k2 or rho_k3 in the loss, or k1 in the reward",
    ("reward", "k2"): f"it {_ALSO_BELOW}; its expected gradient, grad E[k2] - grad KL(policy || reference), is of no divergence; {_REMEDY}",
    ("reward", "k3"): (
        f"it {_ALSO_BELOW}; its expected gradient, grad KL(policy || reference) - grad KL(reference || policy), "
        f"is of no divergence; {_REMEDY}"
    ),
    ("reward", "rho_k3"): f"the ratio of a reward is 1, so it is k3 there, which {_ALSO_BELOW}; {_REMEDY}",
    ("reward", "full"): f"it {_EXACT}; use full in the loss, or k1 in the reward",
    ("reward", "top_k"): f"it {_EXACT}; use top_k in the loss, or k1 in the reward",
}
"""Why every other (placement, estimator) makes no sense, and what to use instead."""


def check_placement(placement: KLPlacement, estimator: KLEstimator | ExactKL) -> None:
    """Raise ConfigError, with reason and remedy, for a combination that descends no divergence."""
    if (placement, estimator) in REFUSED:
        raise ConfigError(f"KL estimator {estimator} in the {placement}: {REFUSED[placement, estimator]}")
