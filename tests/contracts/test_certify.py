"""Every registered objective, estimator and aggregation keeps the laws: the certificate itself, one row per member."""

from __future__ import annotations

from functools import cache
from typing import Annotated, get_args, get_origin

import pytest

from posttrain.checks.certificate import certify, certify_objective, members, objective_of
from posttrain.checks.findings import LAWS, Certificate
from posttrain.checks.members import MEMBERS
from posttrain.checks.subjects import fates, outcome, scene, subject
from posttrain.core.errors import ConfigError
from posttrain.objectives import axes
from posttrain.objectives.advantages import TARGETS
from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.kl import DESCENDS
from posttrain.objectives.objective import Objective
from posttrain.objectives.streams import Fate
from posttrain.objectives.surrogates import SURROGATES

EXEMPT = {
    "permutation": {"advantage:critic", "advantage:critic.lam"},
    "mask": {"kl:full", "kl:top_k"},
}
"""Members to which a law does not apply. Every other law has to be measured on every member."""


@cache
def only(name: str) -> Certificate:
    found = certify(name)
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("name", members())
def test_member_keeps_every_law(name):
    certificate = only(name)
    broken = [f"{f.law}: {f.deviation} > {f.bound}: {f.detail}" for f in certificate.findings if not f.passed]
    assert not broken, "\n".join([name, *broken])
    for law in LAWS:
        assert certificate.worst(law).applies != (name in EXEMPT.get(law, ())), f"{name}: {law}"
    assert all(finding.bound <= 1e-10 or "KL in nats" in finding.detail for finding in certificate.findings)
    assert certificate.target


def kinds(axis: object) -> set[str]:
    """The `kind` of every class of a discriminated union."""
    union = get_args(axis)[0] if get_origin(axis) is Annotated else axis
    return {member.model_fields["kind"].default for member in get_args(union)}


def named(prefix: str) -> set[str]:
    return {name.partition(":")[2].partition(".")[0] for name in members() if name.startswith(f"{prefix}:")}


def test_nothing_that_is_registered_is_left_out():
    assert set(ALGORITHMS) <= set(members())
    assert named("advantage") == kinds(axes.Advantage)
    assert named("limit") == kinds(axes.Limit)
    assert named("surrogate") == set(SURROGATES)
    assert named("correction") == kinds(axes.Correction)
    assert named("ratio") == set(get_args(axes.RatioLevel))
    assert named("aggregation") == set(get_args(axes.Aggregation))
    assert named("kl") == set(get_args(axes.KL.model_fields["estimator"].annotation)) - {"none"}


def test_every_fate_is_met_so_that_conservation_says_something():
    met: set[str] = set()
    for name, member in MEMBERS.items():
        if member.kind in ("limit", "correction"):
            setting = objective_of(member)
            counted = fates(outcome(subject(name, setting), scene()).terms)
            met |= set(counted)
            bounded = setting.limit.kind not in ("none", "cispo", "squared_sequence", "kl_cov")
            assert counted["TRAINED"], name
            assert not bounded or len(counted) > 2, f"{name} never leaves a token out"
    assert met == {fate.name for fate in Fate}


def test_biased_targets_are_named():
    for name, text in TARGETS.items():
        assert only(f"advantage:{name}").target == text
    assert only("kl:k3").target == "in the loss: KL(reference || policy)" == f"in the loss: {DESCENDS['loss', 'k3']}"
    assert only("kl:k1").target == "in the reward: KL(policy || reference)"
    assert "E[A / |y|] - 0.04 KL(reference || policy)" in only("grpo").target
    assert "reward less 0.05 KL(policy || reference)" in only("rloo").target
    assert "1 - (1 - p)^(G - 1)" in " ".join(f.detail for f in only("advantage:max_rl").findings)


MIXED = {
    "exact KL and an entropy bonus": {"kind": "dapo", "kl": {"estimator": "full", "coef": 0.1}, "entropy": {"coef": 0.02}},
    "bucketed KL": {"kind": "grpo", "kl": {"estimator": "top_k", "coef": 0.1}},
    "rho_k3 and a mask": {"kind": "icepop", "kl": {"estimator": "rho_k3", "coef": 0.1}},
    "sentence ratio, truncated": {"kind": "lpo", "correction": "truncate"},
    "sequence ratio, masked per response": {"kind": "gspo", "correction": {"kind": "mask", "sequence_lower": 0.99, "weight": "one"}},
    "cispo per prompt": {"kind": "cispo", "aggregation": "prompt_mean", "correction": "binary_kl"},
    "dual clip on pass@k": {"kind": "passk", "limit": {"dual": 3.0}, "advantage": {"k": 2}},
    "a critic without a limit": {"kind": "ppo", "ratio": "none", "limit": "none"},
    "a teacher": {"kind": "reinforce", "advantage": "teacher"},
}


@pytest.mark.parametrize("name", MIXED)
def test_settings_that_nobody_has_named_keep_the_laws_too(name):
    certificate = certify_objective(name, "algorithm", Objective.load(MIXED[name]))
    assert certificate.passed, [f"{f.law}: {f.deviation}: {f.detail}" for f in certificate.findings if not f.passed]


def test_names_families_and_mistakes():
    assert [c.name for c in certify("aggregation")] == [name for name in members() if name.startswith("aggregation:")]
    assert [c.name for c in certify("limit:cispo")] == ["limit:cispo"]
    assert only("Dr. GRPO").name == "dr_grpo"
    with pytest.raises(ConfigError, match="did you mean 'limit:cispo'"):
        certify("limit:cipso")
    with pytest.raises(ConfigError, match="did you mean 'gspo'"):
        certify("gpso")
    with pytest.raises(ConfigError, match="known: kl:k1"):
        certify("kl:k9")
