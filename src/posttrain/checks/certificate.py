"""Certificates by name, and for a user's own function. The same code is the contract test of the suite."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter

from posttrain.checks import advantage_laws, aggregation_laws, credit_laws, kl_laws
from posttrain.checks.algorithm_oracle import group_law
from posttrain.checks.algorithm_oracle import target as algorithm_target
from posttrain.checks.findings import LAWS, Certificate, Finding, Violation, failed
from posttrain.checks.members import MEMBERS, Member
from posttrain.checks.objective_laws import conservation_law, mask_law, permutation_law
from posttrain.checks.objective_oracle import climbs, climbs_off_policy, oracle_law
from posttrain.checks.objective_partition import partition_law
from posttrain.checks.objective_reductions import reduction_law
from posttrain.checks.subjects import Subject, guarded, subject
from posttrain.checks.user_function import UserFunction, load
from posttrain.core.errors import ConfigError
from posttrain.objectives.algorithms import algorithm
from posttrain.objectives.axes import Advantage, Critic, Teacher
from posttrain.objectives.objective import Objective

Step = tuple[Sequence[str], Callable[[], Sequence[Finding]]]
"""The laws that a measurement belongs to, and the measurement."""


def members() -> list[str]:
    """Names of everything that can be certified."""
    return list(MEMBERS)


def certify(name: str) -> list[Certificate]:
    """The certificate of one member, or of all members of an axis ("limit") or of a family ("limit:clip").

    Raises:
        ConfigError: nothing has this name; the message names the nearest.
    """
    if name in MEMBERS:
        return [_certify(name, MEMBERS[name])]
    family = [member for member in MEMBERS if ":" in member and name in (member.partition(":")[0], member.partition(".")[0])]
    if family:
        return [_certify(member, MEMBERS[member]) for member in family]
    if ":" not in name and not any(name == member.partition(":")[0] for member in MEMBERS):
        known = algorithm(name).name
        return [_certify(known, MEMBERS[known])]
    near = difflib.get_close_matches(name, MEMBERS, n=1, cutoff=0.4)
    axis = name.partition(":")[0] + ":"
    there = ", ".join(member for member in MEMBERS if member.startswith(axis)) or ", ".join(MEMBERS)
    raise ConfigError(f"nothing to certify is called '{name}'; " + (f"did you mean '{near[0]}'? " if near else "") + f"known: {there}")


def certify_file(spec: str) -> Certificate:
    """The certificate of a user's function, "path.py:function"; see `user_function.FORMS` for what it may be.

    Raises:
        ConfigError: no such file or function, or none of the four forms. What the function itself gets wrong is a finding.
    """
    return certify_function(load(spec))


def certify_function(user: UserFunction) -> Certificate:
    """The certificate of a loaded function."""
    match user.kind:
        case "objective":
            tested = Subject(user.name, guarded(user.call), None, user.coefficient)
            return _collect(user.name, user.kind, _objective_steps(tested), "E[A] on-policy, if the oracle holds")
        case "advantage":
            estimator = advantage_laws.guarded_estimator(user.name, user.call, user.weight)
            promise = "w(p) grad p as documented" if user.weight else "E[R], up to one factor per group size"
            return _collect(user.name, user.kind, _advantage_steps(estimator), promise)
        case "kl":
            term = kl_laws.guarded_estimator(user.name, user.call, user.descends)
            return _collect(user.name, user.kind, _kl_steps(term), user.descends or "the divergence named by the oracle")
        case _:
            reducer = aggregation_laws.guarded_reducer(user.name, user.call)
            return _collect(user.name, user.kind, _aggregation_steps(reducer), "a weighted sum over the denominator")


def certify_objective(name: str, kind: str, setting: Objective) -> Certificate:
    """The certificate of any setting. Of kind "algorithm", advantages are part of what is measured, from the rewards of a group on."""
    steps = _objective_steps(subject(name, setting))
    if kind == "algorithm":
        steps.append((("oracle",), lambda: group_law(setting)))
        return _collect(name, kind, steps, algorithm_target(setting))
    return _collect(name, kind, steps, f"on-policy {climbs(setting)}; off-policy {climbs_off_policy(setting)}")


def objective_of(member: Member) -> Objective:
    """The setting of an algorithm, or REINFORCE with a token ratio and one axis changed."""
    base: dict[str, Any] = {"kind": "reinforce", "ratio": "token"}
    match member.kind:
        case "algorithm":
            return Objective.load(member.setting)
        case "ratio" | "surrogate":
            return Objective.load(base | dict(member.setting))
        case _:
            return Objective.load(base | {member.kind: dict(member.setting)})


def _certify(name: str, member: Member) -> Certificate:
    match member.kind:
        case "advantage":
            return _certify_advantage(name, TypeAdapter(Advantage).validate_python(dict(member.setting)))
        case "kl":
            estimator = member.setting["estimator"]
            exact = estimator in ("full", "top_k")
            steps = [(LAWS, lambda: kl_laws.exact_laws(estimator))] if exact else _kl_steps(kl_laws.estimator(estimator))
            return _collect(name, member.kind, steps, kl_laws.target(estimator))
        case "aggregation":
            how = member.setting["how"]
            steps = _aggregation_steps(aggregation_laws.reducer(how))
            return _collect(name, member.kind, steps, f"each token weighs {aggregation_laws.WEIGHTS[how]}")
    return certify_objective(name, member.kind, objective_of(member))


def _certify_advantage(name: str, setting: Advantage) -> Certificate:
    if isinstance(setting, Critic):
        unbiased = setting.lam == setting.gamma == 1
        target = "E[R], exactly, whatever the critic" if unbiased else "E[R] if the critic is right; otherwise biased towards it"
        return _collect(name, "advantage", [(LAWS, lambda: credit_laws.critic_laws(setting))], target)
    if isinstance(setting, Teacher):
        bounded = "" if setting.clip is None else ", biased where the log-ratio is bounded"
        target = f"-KL(policy || teacher) in every prefix visited{bounded}"
        return _collect(name, "advantage", [(LAWS, lambda: credit_laws.teacher_laws(setting))], target)
    return _collect(name, "advantage", _advantage_steps(advantage_laws.estimator(name, setting)), advantage_laws.target(setting))


def _objective_steps(tested: Subject) -> list[Step]:
    laws = (partition_law, mask_law, permutation_law, oracle_law, conservation_law, reduction_law)
    return [((law,), lambda measure=measure: measure(tested)) for law, measure in zip(LAWS, laws, strict=True)]


def _advantage_steps(tested: advantage_laws.Estimator) -> list[Step]:
    a = advantage_laws
    laws = (a.partition_law, a.mask_law, a.permutation_law, a.oracle_law, a.conservation_law, a.reduction_law)
    return [((law,), lambda measure=measure: measure(tested)) for law, measure in zip(LAWS, laws, strict=True)]


def _kl_steps(tested: kl_laws.Estimator) -> list[Step]:
    return [
        (LAWS[:3], lambda: kl_laws.streams_laws(tested)),
        (("oracle",), lambda: kl_laws.oracle_law(tested)),
        (("conservation",), lambda: [kl_laws.conservation_law(tested)]),
        (("reduction",), lambda: kl_laws.reduction_law(tested)),
    ]


def _aggregation_steps(tested: aggregation_laws.Reducer) -> list[Step]:
    return [(LAWS, lambda: aggregation_laws.laws(tested))]


def _collect(name: str, kind: str, steps: Sequence[Step], target: str) -> Certificate:
    """Measure, in order; what cannot be measured through the member's own fault has failed."""
    findings: list[Finding] = []
    for laws, measure in steps:
        try:
            findings += measure()
        except Violation as fault:
            findings += [failed(law, str(fault)) for law in laws]
    return Certificate(name, kind, tuple(sorted(findings, key=lambda finding: LAWS.index(finding.law))), target)
