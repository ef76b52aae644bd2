"""Objectives that sum over the vocabulary refuse every way to cut it."""

from __future__ import annotations

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.loops.rl_settings import RL, check
from posttrain.objectives.objective import Objective


@pytest.mark.parametrize("estimator", ["full", "top_k"])
@pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_divergence_over_the_vocabulary_needs_all_of_it(estimator, cut):
    objective = Objective.load({"kl": {"estimator": estimator}})
    check(RL(), objective, Sampling(), teacher=False)
    with pytest.raises(ConfigError, match=f"kl.estimator={estimator} sums over the vocabulary, .* top_p=1 and min_p=0"):
        check(RL(), objective, Sampling(**cut), teacher=False)
    check(RL(), Objective.load({"kl": {"estimator": "k2"}}), Sampling(**cut), teacher=False)
