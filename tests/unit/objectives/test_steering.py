"""Numbers of an objective that move between steps: where they start, which way they go, and that they reach the loss."""

from __future__ import annotations

import json

import pytest

from posttrain.objectives.axes import Clip
from posttrain.objectives.objective import Objective
from posttrain.objectives.steering import advance, current

FIXED = Objective.load({"kind": "grpo", "kl": {"estimator": "k2", "coef": 0.1}, "entropy": {"coef": 0.002}})
STEERED = Objective.load(
    {
        "kind": "grpo",
        "kl": {"estimator": "k2", "coef": 0.1, "target": 0.05},
        "entropy": {"coef": 0.002, "target": 0.4, "step": 0.001, "highest": 0.004},
    }
)
WIDENING = Objective.load({"kind": "mai", "limit": {"high": 0.2, "steer": {"entropy": 0.3, "step": 0.02, "highest": 0.25}}})


def high(objective: Objective) -> float:
    """Upper bound of a clip."""
    assert isinstance(objective.limit, Clip)
    return objective.limit.high


def test_nothing_is_steered_without_a_target():
    assert advance(FIXED, {}, 0.1, 0.1) == {}
    assert current(FIXED, {}) is FIXED


def test_the_first_step_starts_from_the_setting():
    # KL 0.055 at target 0.05: error 0.1, factor 1 + 0.1 x 0.1; entropy 0.3 below 0.4: one step up
    assert advance(STEERED, {}, 0.3, 0.055) == {"kl_coef": pytest.approx(0.101), "entropy_coef": pytest.approx(0.003)}
    # entropy 0.25 below 0.3: the bound opens
    assert advance(WIDENING, {}, 0.25, None) == {"clip_high": pytest.approx(0.22)}


def test_later_steps_continue_from_the_state():
    state = {"kl_coef": 0.2, "entropy_coef": 0.0035}
    # KL 0.01: error -0.8 counts -0.2, factor 0.98; entropy still low, up to the highest
    assert advance(STEERED, state, 0.3, 0.01) == {"kl_coef": pytest.approx(0.196), "entropy_coef": pytest.approx(0.004)}
    assert advance(STEERED, state, 0.5, 0.05) == {"kl_coef": pytest.approx(0.2), "entropy_coef": pytest.approx(0.0025)}
    assert advance(WIDENING, {"clip_high": 0.24}, 0.25, None) == {"clip_high": pytest.approx(0.25)}
    assert advance(WIDENING, {"clip_high": 0.24}, 0.35, None) == {"clip_high": pytest.approx(0.22)}
    # never below the lower bound of the same clip
    assert advance(WIDENING, {"clip_high": 0.21}, 0.35, None) == {"clip_high": pytest.approx(0.2)}


def test_a_step_without_measurement_keeps_what_was_there():
    state = {"kl_coef": 0.2, "entropy_coef": 0.003}
    assert advance(STEERED, state, None, None) == state
    assert advance(STEERED, {}, None, None) == {"kl_coef": 0.1, "entropy_coef": 0.002}


def test_the_state_reaches_the_objective_and_nothing_else_changes():
    now = current(STEERED, {"kl_coef": 0.2, "entropy_coef": 0.003})
    assert (now.kl.coef, now.entropy.coef) == (0.2, 0.003)
    assert now.model_copy(update={"kl": STEERED.kl, "entropy": STEERED.entropy}) == STEERED
    wide = current(WIDENING, {"clip_high": 0.24})
    assert high(wide) == 0.24
    assert wide.model_copy(update={"limit": WIDENING.limit}) == WIDENING
    assert (STEERED.kl.coef, high(WIDENING)) == (0.1, 0.2)


@pytest.mark.parametrize(("objective", "measured"), [(STEERED, (0.3, 0.2)), (WIDENING, (0.25, None))])
def test_the_state_survives_being_written_down(objective, measured):
    state: dict[str, float] = {}
    written: dict[str, float] = {}
    for _ in range(20):
        state = advance(current(objective, state), state, *measured)
        written = json.loads(json.dumps(advance(objective, written, *measured)))
    assert state == written
    assert current(objective, state) == current(objective, written)


def test_entropy_that_falls_and_rises_brings_the_bound_back():
    state: dict[str, float] = {}
    seen = []
    for entropy in (0.2, 0.2, 0.2, 0.3, 0.4, 0.4, 0.4):
        state = advance(WIDENING, state, entropy, None)
        seen.append(round(state["clip_high"], 9))
    assert seen == [0.22, 0.24, 0.25, 0.25, 0.23, 0.21, 0.2]
