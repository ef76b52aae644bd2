"""The setting of a policy-gradient method: named algorithms as diffs, overrides, what is refused and what is warned of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.objectives.algorithms import ALGORITHMS, GRPO_AXES
from posttrain.objectives.axes import (
    CISPO,
    KL,
    Band,
    Batch,
    Channels,
    Clip,
    ClipCov,
    Critic,
    Decoupled,
    Mask,
    Mean,
    MeanStd,
    NoCorrection,
    NoLimit,
    PassAtK,
    Ramp,
    Squared,
    Steering,
    Truncate,
)
from posttrain.objectives.objective import Objective, check_siblings, merged, warnings

AXES = tuple(name for name in Objective.model_fields if name != "kind")


class Recipe(Config):
    """Something that holds an objective, as a run does."""

    objective: Objective = Objective()
    seed: int = 0


def of(kind: str, **changes: Any) -> Objective:
    return Objective.load({"kind": kind, **changes})


def axes(objective: Objective) -> dict[str, Any]:
    return {name: getattr(objective, name) for name in AXES}


def from_grpo(diff: Mapping[str, Any]) -> Objective:
    return Objective.load({**merged(GRPO_AXES, diff), "kind": "grpo"})


# --- named algorithms ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_its_diff_laid_over_grpo(name):
    assert axes(of(name)) == axes(from_grpo(ALGORITHMS[name].diff))
    assert of(name).kind == name


def test_class_defaults_are_the_default_algorithm():
    assert Objective() == of("default") == Objective.load({})


def test_grpo_is_as_published():
    # Shao et al. 2024: std, symmetric clip, 1/|y|, k3 in the loss with 0.04
    grpo = of("grpo")
    assert ALGORITHMS["grpo"].diff == {}
    assert grpo.advantage == MeanStd(ddof=0, eps=1e-6)
    assert (grpo.ratio, grpo.against, grpo.aggregation) == ("token", "old", "seq_mean_token_mean")
    assert grpo.limit == Clip(low=0.2, high=0.2)
    assert grpo.kl == KL(estimator="k3", placement="loss", coef=0.04)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dr_grpo", {"advantage": Mean(), "aggregation": "constant"}),
        ("dapo", {"limit": Clip(low=0.2, high=0.28), "aggregation": "token_mean", "overlong": Ramp(buffer=0.2)}),
        ("gspo", {"ratio": "sequence", "limit": Clip(low=3e-4, high=4e-4), "aggregation": "seq_mean_token_mean"}),
        ("cispo", {"limit": CISPO(low=None, high=4.0)}),
        ("ppo", {"advantage": Critic(gamma=1, lam=1), "kl": KL(estimator="k1", placement="reward", coef=0.02)}),
        ("icepop", {"correction": Mask(lower=0.5, upper=5.0, weight="ratio")}),
        (
            "mis_po",
            {
                "ratio": "none",
                "limit": NoLimit(),
                "correction": Mask(lower=0.5, upper=2.0, sequence_lower=0.996, sequence_upper=1.001, weight="one"),
            },
        ),
        ("areal", {"correction": Decoupled(), "limit": Clip(low=0.2, high=0.2)}),
        ("kimi_k2.5", {"advantage": Mean(), "limit": Squared(omega=0.1, lower=0.5, upper=2.0), "aggregation": "token_mean"}),
        ("mai", {"limit": Clip(low=0.2, high=0.2, cap=2.0, steer=Steering(entropy=0.3))}),
        ("mimo", {"against": "behaviour", "aggregation": "prompt_mean"}),
        ("sao", {"advantage": Critic(), "against": "behaviour", "limit": Band(lower=0.8, upper=1.28)}),
        ("grpo++", {"limit": ClipCov(low=0.2, high=0.28, fraction=0.001, lower=0.6, upper=5.0)}),
    ],
)
def test_settings_of_the_source(name, expected):
    found = axes(of(name))
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_axis_of_a_diff_is_needed(name):
    diff = ALGORITHMS[name].diff
    assert set(diff) <= set(AXES)
    for key in diff:
        without = {other: value for other, value in diff.items() if other != key}
        try:
            changed = axes(from_grpo(without)) != axes(of(name))
        except ConfigError:  # what is left makes no sense, so the axis was needed
            changed = True
        assert changed, f"{name}: {key} says what GRPO has anyway"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_dumped_objective_loads_to_the_same(name):
    assert Objective.load(of(name).model_dump(mode="json")) == of(name)


def test_an_objective_may_be_written_as_a_name():
    assert Objective.load("gspo") == Objective.load({"kind": "GSPO"}) == of("gspo")
    assert Recipe.load({"objective": "gspo"}).objective == of("gspo")
    assert of("Dr. GRPO").kind == "dr_grpo"


# --- overrides -------------------------------------------------------------------------------------------------------------------------


def test_one_bound_changes_and_the_rest_of_the_axis_stays():
    changed = of("gspo", limit={"high": 5e-4})
    assert changed.limit == Clip(low=3e-4, high=5e-4)
    assert {**axes(changed), "limit": None} == {**axes(of("gspo")), "limit": None}


def test_another_member_brings_its_own_defaults_not_those_of_the_member_it_replaces():
    assert of("dapo", limit="cispo").limit == CISPO()
    assert of("dapo", limit={"kind": "cispo", "high": 2.0}).limit == CISPO(high=2.0)
    assert of("gspo", ratio="token", limit={"kind": "band"}).limit == Band(lower=0.8, upper=1.28)
    assert of("mai", limit="none").limit == NoLimit()


def test_members_may_be_given_as_objects():
    assert Objective(kind="grpo", correction=Truncate(cap=3.0)).correction == Truncate(cap=3.0)
    assert Objective(kind="gspo", kl=KL(estimator="k2", coef=0.1)).kl.coef == 0.1


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        (["objective=dapo"], of("dapo")),
        (["objective=dapo", "objective.limit.high=0.3"], of("dapo", limit={"high": 0.3})),
        (["objective.kind=gspo"], of("gspo")),
        (["objective.limit.high=0.5"], of("default", limit={"high": 0.5})),
        (["objective.limit=cispo"], of("default", limit="cispo")),
        (["objective.limit=cispo", "objective.limit.high=3"], of("default", limit={"kind": "cispo", "high": 3.0})),
        (["objective.limit.kind=cispo"], of("default", limit="cispo")),
        (["objective.kl.coef=1e-3", "seed=1"], of("default", kl={"coef": 1e-3})),
        (["objective=gspo", "objective.limit.high=5e-4"], of("gspo", limit={"high": 5e-4})),
        (["objective=grpo", "objective.limit.cap=2"], of("grpo", limit={"cap": 2.0})),
        (["objective.advantage=leave_one_out"], of("default", advantage="leave_one_out")),
    ],
)
def test_assignments_of_the_command_line(assignments, expected):
    assert Recipe().override(assignments).objective == expected


def test_assignments_on_a_run_that_has_another_algorithm():
    run = Recipe.load({"objective": {"kind": "dapo", "limit": {"high": 0.3}}})
    assert run.override(["objective.limit.low=0.1"]).objective == of("dapo", limit={"low": 0.1, "high": 0.3})
    assert run.override(["objective=cispo"]).objective == of("cispo")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "gsop"}, "unknown algorithm 'gsop'; did you mean 'gspo'"),
        ({"limti": "none"}, "unknown key 'limti'; did you mean 'limit'"),
        ({"limit": {"hihg": 0.3}}, "did you mean 'limit.high'"),
        ({"limit": "clipp"}, "limit.*'clip'"),
        ({"ratio": "word"}, "ratio = 'word'"),
        ({"kl": {"estimator": "k4"}}, "kl.estimator = 'k4'"),
        ({"limit": {"low": 1.5}}, "limit.clip.low = 1.5"),
        ({"limit": {"kind": "clip_cov", "lower": 5.0, "upper": 1.0}}, "lower < upper, not 5 and 1"),
    ],
)
def test_mistakes_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        Objective.load(given)


# --- what is refused -------------------------------------------------------------------------------------------------------------------


REFUSALS = [
    # each: the combination, why, and the remedy
    ({"kind": "gspo", "limit": {"low": 0.2, "high": 0.28}}, "never leaves a token-scale band of 0.28.*inert", "limit.low=3e-4"),
    ({"kind": "gspo", "limit": {"low": 3e-4, "high": 0.05}}, "never leaves a token-scale band of 0.05", "ratio=token"),
    ({"kind": "gspo", "limit": "band"}, "never leaves a token-scale band", "limit.low=3e-4"),
    (
        {"kind": "grpo", "limit": {"low": 3e-4, "high": 4e-4}},
        "0.0003 is made for a sequence ratio",
        "use bounds near 0.2 or ratio=sequence",
    ),
    ({"kind": "gspo", "aggregation": "token_mean"}, "multiply it by the response's length", "use aggregation=seq_mean_token_mean"),
    ({"kind": "gspo", "aggregation": "constant"}, "multiply it by the response's length", "use aggregation=seq_mean_token_mean"),
    ({"kind": "grpo", "ratio": "none"}, "limit=clip acts on a ratio, and ratio=none has none", "use limit=none or ratio=token"),
    ({"kind": "kimi_k1.5", "ratio": "sentence"}, "adds up token log-ratios; ratio=sentence", "use ratio=token"),
    ({"kind": "grpo++", "ratio": "sentence"}, "clip_cov selects tokens", "use ratio=token"),
    ({"kind": "grpo", "ratio": "sentence", "limit": "kl_cov"}, "kl_cov selects tokens", "use ratio=token"),
    ({"kind": "mai", "limit": {"steer": {"highest": 0.1}}}, "limit.steer.highest", "high <= highest"),
    ({"kind": "grpo", "limit": {"cap": 1.1}}, "limit.cap = 1.1 lies inside the band up to 1.2", "raise it or lower limit.high"),
    ({"kind": "mimo", "correction": "mask"}, "already contains the mismatch.*correction=mask", "use against=old or correction=none"),
    ({"kind": "dppo", "correction": "truncate"}, "count it twice", "use against=old or correction=none"),
    ({"kind": "mis_po", "correction": {"sequence_upper": 1.5}}, r"bounds \[0.996, 1.5\].*never reject", "e.g. 0.996 and 1.001"),
    ({"kind": "mis_po", "correction": {"sequence_lower": 0.5}}, r"bounds \[0.5, 1.001\].*never reject", "e.g. 0.996 and 1.001"),
    ({"kind": "grpo", "kl": {"estimator": "k1"}}, "k1 in the loss: its expected gradient is zero", "use k2 or rho_k3 in the loss"),
    ({"kind": "grpo", "kl": {"placement": "reward"}}, "k3 in the reward", "use k1 in the reward, or k2 in the loss"),
    ({"kind": "grpo", "kl": {"coef": 0.0, "target": 0.1}}, "kl.coef = 0 with a kl.target.*cannot move it", "e.g. kl.coef=0.001"),
    ({"kind": "mai", "entropy": {"target": 0.3}}, "steer the same entropy by two means", "keep one"),
    ({"kind": "maxrl", "overlong": "ramp"}, "divides by the mean reward", "overlong=none or drop"),
    ({"kind": "maxrl", "kl": {"estimator": "k1", "placement": "reward"}}, "divides by the mean reward", "put the KL in the loss"),
    ({"kind": "ppo", "subgroups": "length"}, "advantage=critic does not compare siblings", "use subgroups=none"),
    ({"kind": "gdpo", "subgroups": "length"}, "advantage=channels does not compare siblings", "use subgroups=none"),
    (
        {"kind": "grpo", "advantage": "teacher", "kl": {"estimator": "k1", "placement": "reward"}},
        "advantage=teacher takes no reward",
        "use kl.placement=loss or kl.estimator=none",
    ),
]


@pytest.mark.parametrize(("given", "why", "remedy"), REFUSALS)
def test_a_combination_that_cannot_do_what_it_promises_is_refused(given, why, remedy):
    with pytest.raises(ConfigError, match=why) as raised:
        Objective.load(given)
    assert remedy in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "gspo", "limit": {"low": 3e-4, "high": 0.0499}},
        {"kind": "grpo", "limit": {"low": 0.0011, "high": 0.2}},
        {"kind": "lpo", "limit": {"low": 0.2, "high": 0.2}},
        {"kind": "grpo", "limit": {"cap": 1.2}},
        {"kind": "mai", "limit": {"steer": {"highest": 0.2}}},
        {"kind": "mis_po", "correction": {"sequence_upper": 1.049}},
        {"kind": "grpo", "kl": {"estimator": "k1", "coef": 0.0}},
        {"kind": "mai", "entropy": {"coef": 0.001}},
        {"kind": "maxrl", "overlong": "drop"},
        {"kind": "maxrl", "kl": {"estimator": "k2", "placement": "loss"}},
        {"kind": "grpo", "subgroups": "length"},
        {"kind": "grpo", "advantage": "teacher", "kl": {"estimator": "k2"}},
        {"kind": "rloo", "aggregation": "token_mean"},
    ],
)
def test_its_neighbours_are_allowed(given):
    assert Objective.load(given)


@pytest.mark.parametrize(
    ("given", "siblings", "message"),
    [
        ({"kind": "grpo"}, 1, "advantage=mean_std compares siblings, and 1 completion per prompt has none.*use siblings >= 2"),
        ({"kind": "reinforce++", "advantage": {"within": "group"}}, 1, "advantage=batch compares siblings"),
        ({"kind": "passk"}, 4, "advantage.k = 4 needs more than 4 siblings; use k <= 3"),
    ],
)
def test_groups_too_small_for_the_baseline_are_refused(given, siblings, message):
    with pytest.raises(ValueError, match=message):
        check_siblings(Objective.load(given), siblings)
    check_siblings(Objective.load(given), siblings + 1)


def test_early_exits_are_their_own_siblings():
    check_siblings(of("s_grpo"), 1)  # one chain and 4 cuts
    with pytest.raises(ValueError, match="advantage.k = 4 needs more than 3 siblings"):
        check_siblings(of("passk", drawing={"kind": "early_exit", "cuts": 2}), 8)


@pytest.mark.parametrize("name", ["reinforce", "reinforce++", "ppo", "sao", "mis_po"])
def test_one_completion_per_prompt_is_enough_without_a_group_baseline(name):
    check_siblings(of(name), 1)


# --- what is warned of, and what is needed -----------------------------------------------------------------------------------------------


def test_warnings_of_combinations_that_disappoint():
    (trap,) = [text for text in warnings(of("gdpo")) if "channel" in text]
    assert "trap" in trap
    assert any("KL(reference || policy)" in text for text in warnings(of("grpo")))
    assert warnings(of("grpo", kl={"coef": 0.0})) == []
    assert any("lam < 1" in text for text in warnings(of("ppo", advantage={"lam": 0.95})))
    assert any("fate_rejected" in text for text in warnings(of("mis_po")))
    for name in ("default", "ppo", "dapo", "gspo", "areal", "rloo"):
        assert warnings(of(name)) == [], name


@pytest.mark.parametrize(
    ("objective", "critic", "teacher", "group", "step"),
    [
        (of("grpo"), False, False, True, False),
        (of("ppo"), True, False, False, False),
        (of("grpo", advantage="teacher"), False, True, False, False),
        (of("reinforce"), False, False, False, False),
        (of("reinforce++"), False, False, False, False),
        (of("reinforce++", advantage=Batch(within="group")), False, False, True, False),
        (of("gdpo", advantage=Channels()), False, False, True, False),
        (of("passk", advantage=PassAtK(k=2)), False, False, True, False),
        (of("grpo++"), False, False, True, True),
        (of("grpo", limit="kl_cov"), False, False, True, True),
    ],
)
def test_what_an_objective_needs(objective, critic, teacher, group, step):
    needs = (objective.needs_critic, objective.needs_teacher, objective.group_relative, objective.needs_step_pass)
    assert needs == (critic, teacher, group, step)


def test_a_reference_is_scored_only_for_a_kl_that_pulls():
    assert KL(estimator="k2", coef=0.1).used
    assert not KL(estimator="k2", coef=0.0).used
    assert KL(estimator="k2", coef=0.0, target=0.5).used  # the coefficient is steered from there
    assert not KL(estimator="none", coef=0.1, target=0.5).used


def test_merging_refines_the_same_kind_and_replaces_another():
    base = {"limit": {"kind": "clip", "low": 0.2, "high": 0.2}, "ratio": "token"}
    assert merged(base, {"limit": {"high": 0.3}}) == {"limit": {"kind": "clip", "low": 0.2, "high": 0.3}, "ratio": "token"}
    assert merged(base, {"limit": {"kind": "clip", "high": 0.3}})["limit"] == {"kind": "clip", "low": 0.2, "high": 0.3}
    assert merged(base, {"limit": {"kind": "band"}})["limit"] == {"kind": "band"}
    assert merged(base, {"limit": "none"})["limit"] == {"kind": "none"}
    assert merged(base, {"ratio": "sequence"})["ratio"] == "sequence"
    assert base["limit"]["high"] == 0.2  # the base is left as it was


def test_corrections_default_to_none():
    assert of("grpo").correction == NoCorrection()
