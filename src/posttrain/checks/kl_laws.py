"""The laws for KL estimators: those of one sampled token, and the sums over the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from posttrain.checks.findings import CLOSE, EXACT, Finding, absent, alignment, distance, failed, largest, measured
from posttrain.checks.objective_oracle import DENOMINATOR, Case, climbed, compare_documented, found_expectation
from posttrain.checks.objective_reductions import RETURNED, STEPS, return_to_reference
from posttrain.checks.subjects import GARBAGE, check_shape, check_untouched, cited, subject
from posttrain.checks.tabular import World, derivative, divergence, divergence_gradient, softmax, world
from posttrain.objectives.axes import KL
from posttrain.objectives.kl import DESCENDS, full_kl, kl_loss, kl_value, top_k_kl
from posttrain.objectives.objective import Objective

REVERSE, FORWARD = "KL(policy || reference)", "KL(reference || policy)"
Term = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logp_BT, reference_BT, mask_BT) -> per-token term with gradient."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """A sampled-token estimator under test; `estimator` is None for a user's function."""

    name: str
    term: Term
    estimator: str | None = None
    promised: str | None = None
    """The divergence that its author says the term descends."""


def estimator(name: str) -> Estimator:
    """k1, k2, k3 or rho_k3. k1 has no gradient as a loss, so its value stands in for the term."""
    if name == "k1":
        return Estimator(name, lambda logp, reference, mask: kl_value(logp, reference, mask, "k1", torch.float64), name)
    return Estimator(name, lambda logp, reference, mask: kl_loss(logp, reference, mask, name, dtype=torch.float64), name)  # type: ignore[arg-type]


def guarded_estimator(name: str, function: Term, promised: str | None) -> Estimator:
    """A user's function as an estimator; Violation when it raises, reduces, or edits its inputs."""

    def term(logp: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        given = {"logp": logp * 1, "reference": reference.clone(), "mask": mask.clone()}
        before = {key: value.detach().clone() for key, value in given.items()}
        with cited():
            found = function(given["logp"], given["reference"], given["mask"])
        check_shape(found, mask.shape, "one value per token")
        check_untouched(before, given)
        return found

    return Estimator(name, term, None, promised)


def _evaluate(tested: Estimator, logp: Tensor, reference: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Value and gradient of the trained sum."""
    leaf = logp.detach().clone().requires_grad_()
    value = tested.term(leaf, reference, mask)
    total = torch.where(mask, value, 0.0).sum()
    gradient = torch.autograd.grad(total, leaf, allow_unused=True)[0] if total.requires_grad else None
    return value.detach(), torch.zeros_like(leaf) if gradient is None else gradient


def streams_laws(tested: Estimator) -> list[Finding]:
    """Partition, mask and permutation on four rows."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    logp = torch.linspace(-3.0, -0.2, 16, dtype=torch.float64).view(4, 4)
    reference = torch.linspace(-0.4, -2.7, 16, dtype=torch.float64).view(4, 4) + 0.3 * (logp > -1.0)
    value, gradient = _evaluate(tested, logp, reference, mask)
    parts = [_evaluate(tested, logp[rows], reference[rows], mask[rows]) for rows in ([0], [1, 2], [3])]
    split = max(distance(torch.cat([v for v, _ in parts])[mask], value[mask]), distance(torch.cat([g for _, g in parts]), gradient))
    leaks = []
    for what, numbers in GARBAGE.items():
        junk = torch.tensor(np.resize(numbers, (4, 4)))
        pair = (torch.where(mask, logp, junk), torch.where(mask, reference, junk.flip(0)))
        got, slope = _evaluate(tested, *pair, mask)
        leaks.append((max(distance(got[mask], value[mask]), distance(slope, torch.where(mask, gradient, 0.0))), what))
    leak, what = largest(leaks)
    order = [3, 1, 0, 2]
    moved, turned = _evaluate(tested, logp[order], reference[order], mask[order])
    reordered = max(distance(moved[mask[order]], value[order][mask[order]]), distance(turned, gradient[order]))
    return [
        measured("partition", split, "rows in parts"),
        measured("mask", leak, f"{len(GARBAGE)} kinds of garbage where untrained" if leak == 0 else f"{what} leaks", EXACT),
        measured("permutation", reordered, "rows reordered", 1e-12),
    ]


def _worlds() -> list[World]:
    return [world(3, 1), world(5, 1), world(4, 2)]


def _expected(tested: Estimator, on: World) -> tuple[np.ndarray, np.ndarray]:
    """Sum over the vocabulary of p * term for each prefix, and the gradient of their sum with the tokens' probabilities held."""
    logits = torch.tensor(on.logits_SV, requires_grad=True)
    logp_SV = logits.log_softmax(-1)
    reference_SV = torch.tensor(np.log(softmax(on.reference_SV)))
    weighted_SV = logp_SV.detach().exp() * tested.term(logp_SV, reference_SV, torch.ones_like(logp_SV, dtype=torch.bool))
    total = weighted_SV.sum()
    gradient = torch.autograd.grad(total, logits, allow_unused=True)[0] if total.requires_grad else None
    return weighted_SV.detach().sum(-1).numpy(), np.zeros(on.logits_SV.shape) if gradient is None else gradient.numpy()


def _truths(on: World) -> dict[str, np.ndarray]:
    """Gradient of both divergences, summed over prefixes."""
    ones_S = np.ones(on.where.states)
    return {name: divergence_gradient(on.logits_SV, on.reference_SV, ones_S, name) for name in (REVERSE, FORWARD)}


def oracle_law(tested: Estimator) -> list[Finding]:
    """Value and gradient against the enumeration of the vocabulary, in the loss, in the reward, and through a whole objective."""
    if tested.estimator is None:
        return [_user_oracle(tested)]
    if tested.estimator == "k1":
        return _k1_oracle(tested)
    named = DESCENDS["loss", tested.estimator]
    values, slopes, products = [], [], []
    for on in _worlds():
        got, slope_SV = _expected(tested, on)
        values.append(distance(got, _value_truth(tested.estimator, on)))
        slopes.append(distance(slope_SV, _truths(on)[named]))
        products.append(_in_the_reward(tested, on))
    findings = [
        measured("oracle", max(values), f"value: {'sum of p x^2 / 2, not a divergence' if tested.estimator == 'k2' else REVERSE}"),
        measured("oracle", max(slopes), f"in the loss: the gradient of {named}"),
        measured("oracle", max(products), f"in the reward: refused, since it would climb {_REWARD[tested.estimator]}"),
        *in_the_objective(tested.estimator),
    ]
    return [*findings, *_off_policy()] if tested.estimator == "rho_k3" else findings


_REWARD = {"k2": f"{REVERSE} less E[k2]", "k3": f"{FORWARD} less {REVERSE}", "rho_k3": f"{FORWARD} less {REVERSE}"}


def _value_truth(name: str, on: World) -> np.ndarray:
    p_SV, q_SV = softmax(on.logits_SV), softmax(on.reference_SV)
    return (p_SV * (np.log(p_SV) - np.log(q_SV)) ** 2 / 2).sum(-1) if name == "k2" else divergence(p_SV, q_SV)


def _in_the_reward(tested: Estimator, on: World) -> float:
    """E[k grad log pi] against what REFUSED says of it."""
    got_SV = _score_product(tested, on)
    truths = _truths(on)
    if tested.estimator != "k2":
        return distance(got_SV, truths[REVERSE] - truths[FORWARD])
    q_SV = softmax(on.reference_SV)
    whole = derivative(lambda z: (softmax(z) * (np.log(softmax(z)) - np.log(q_SV)) ** 2 / 2).sum(), on.logits_SV)
    return distance(got_SV, whole - truths[REVERSE])


def _score_product(tested: Estimator, on: World) -> np.ndarray:
    """E[k grad log pi] = sum_v p_v k_v (onehot(v) - p) in each prefix."""
    p_SV = softmax(on.logits_SV)
    pair = (torch.tensor(np.log(p_SV)), torch.tensor(np.log(softmax(on.reference_SV))))
    term_SV = tested.term(*pair, torch.ones(p_SV.shape, dtype=torch.bool)).detach().numpy()
    return p_SV * (term_SV - (p_SV * term_SV).sum(-1, keepdims=True))


def _k1_oracle(tested: Estimator) -> list[Finding]:
    """In the reward it is the divergence; in the loss it is nothing, and refused."""
    value = max(distance(_expected(tested, on)[0], _value_truth("k1", on)) for on in _worlds())
    reward = max(distance(_score_product(tested, on), _truths(on)[REVERSE]) for on in _worlds())
    nothing = Estimator("x", lambda logp, reference, mask: torch.where(mask, logp - reference, 0.0))
    silent = max(distance(_expected(nothing, on)[1], 0.0 * on.logits_SV) for on in _worlds())
    one = torch.ones(1, 1, dtype=torch.float64)
    try:
        kl_loss(one, one, one > 0, "k1")
    except ValueError:
        refused = measured("oracle", silent, "in the loss: refused, its expected gradient is 0")
    else:
        refused = failed("oracle", "k1 is accepted in the loss, where its expected gradient is 0")
    return [
        measured("oracle", value, f"value: {REVERSE}"),
        measured("oracle", reward, f"in the reward: minus the gradient of {DESCENDS['reward', 'k1']}"),
        refused,
    ]


def _off_policy() -> list[Finding]:
    """rho_k3 with the ratio to the sampler: the divergence and its gradient from another policy's tokens."""
    found = []
    for on in _worlds():
        logits = torch.tensor(on.logits_SV, requires_grad=True)
        logp_SV, mu_SV = logits.log_softmax(-1), softmax(on.behaviour_SV)
        reference_SV = torch.tensor(np.log(softmax(on.reference_SV)))
        ratio_SV = (logp_SV - torch.tensor(np.log(mu_SV))).exp()
        whole = torch.ones(mu_SV.shape, dtype=torch.bool)
        total_S = (torch.tensor(mu_SV) * kl_loss(logp_SV, reference_SV, whole, "rho_k3", ratio_SV, dtype=torch.float64)).sum(-1)
        gradient = torch.autograd.grad(total_S.sum(), logits)[0].numpy()
        found += [distance(total_S.detach(), _value_truth("rho_k3", on)), distance(gradient, _truths(on)[REVERSE])]
    on = replace(world(4, 1), behaviour_SV=world(4, 1).old_SV)
    setting = Objective.load({"kind": "reinforce", "kl": KL(estimator="rho_k3", coef=DENOMINATOR)})
    gradient_SV = found_expectation(subject("rho_k3", setting), silent_case(on)).gradient_SV
    return [
        measured("oracle", max(found), f"another policy's tokens, ratio given: value and gradient of {REVERSE}"),
        measured("oracle", distance(gradient_SV, _truths(on)[REVERSE]), f"in a whole objective, the old policy's tokens: {REVERSE}"),
    ]


def in_the_objective(name: str) -> list[Finding]:
    """The same through policy_terms: with advantage 0 on-policy, the gradient of the divergence; off-policy, the documented slope."""
    setting = Objective.load({"kind": "reinforce", "kl": KL(estimator=name, coef=0.3)})  # type: ignore[arg-type]
    case = silent_case(world(3, 2).on_policy())
    gap = distance(found_expectation(subject(name, setting), case).gradient_SV, climbed(setting, case))
    named = DESCENDS["loss", name].partition(" of ")[0]
    documented = compare_documented(subject(name, setting))
    return [
        measured("oracle", gap, f"in a whole objective, advantage 0, on-policy: coef times the gradient of {named}"),
        replace(documented, detail="in a whole objective, off-policy: the documented slope of every token and prefix"),
    ]


def silent_case(on: World) -> Case:
    """Advantage 0 everywhere, so that only the KL term acts."""
    return Case(on, np.zeros(on.where.mask_BT.shape), None)


def _user_oracle(tested: Estimator) -> Finding:
    """A user's term has to descend a divergence, and the promised one if one is promised."""
    gaps: dict[str, list[float]] = {REVERSE: [], FORWARD: []}
    values, seen = [], ""
    for on in _worlds():
        got, slope_SV = _expected(tested, on)
        values.append(distance(got, _value_truth("k1", on)))
        truths = _truths(on)
        for name, truth_SV in truths.items():
            gaps[name].append(distance(slope_SV, truth_SV))
        seen = "; ".join("against {}: cosine {:.4f}, length {:.4g}".format(name, *alignment(slope_SV, t)) for name, t in truths.items())
        if not np.abs(slope_SV).max() > CLOSE:
            return failed("oracle", "its expected gradient is zero: as a loss it holds nothing; subtract it from the reward, or use k2")
    nearest = min(gaps, key=lambda name: max(gaps[name]))
    wanted = tested.promised or nearest
    value = "estimates KL(policy || reference)" if max(values) <= CLOSE else "is no unbiased estimate of KL(policy || reference)"
    if max(gaps[wanted]) <= CLOSE:
        return measured("oracle", max(gaps[wanted]), f"descends {wanted}; its value {value}")
    instead = f"it descends {nearest}" if max(gaps[nearest]) <= CLOSE else f"it descends no divergence ({seen})"
    return measured("oracle", max(gaps[wanted]), f"does not descend {wanted}: {instead}")


def conservation_law(tested: Estimator) -> Finding:
    """Nothing where policy and reference agree; k2 and k3 are never negative, k1 changes sign with its arguments."""
    a = torch.linspace(-4.0, -0.1, 24, dtype=torch.float64).view(4, 6)
    b = a.flip(0, 1)
    mask = torch.ones_like(a, dtype=torch.bool)
    agree = float(tested.term(a, a, mask).detach().abs().max())
    if tested.estimator is None:
        return measured("conservation", agree, "0 where policy and reference agree", EXACT)
    there, back = tested.term(a, b, mask).detach(), tested.term(b, a, mask).detach()
    if tested.estimator == "k1":
        return measured("conservation", max(agree, distance(there, -back)), "0 where both agree; the sign turns with the arguments", EXACT)
    below = max(float(-there.min()), 0.0)
    return measured("conservation", max(agree, below), "0 where both agree, never negative", EXACT)


def reduction_law(tested: Estimator) -> list[Finding]:
    """Alone, it brings the policy back to the reference; rho_k3 is made of k2 and k3."""
    if tested.estimator is None:
        return [absent("reduction", "no limit at which a user's function becomes another one is known")]
    if tested.estimator == "k1":
        return [measured("reduction", _return_by_reward(tested), f"KL in nats left after {STEPS} steps with reward -k1 alone", RETURNED)]
    setting = Objective.load({"kind": "reinforce", "kl": KL(estimator=tested.estimator, coef=1.0)})  # type: ignore[arg-type]
    findings = [measured("reduction", return_to_reference(setting), f"KL in nats left after {STEPS} steps of the term alone", RETURNED)]
    if tested.estimator == "rho_k3":
        a = torch.linspace(-3.0, -0.1, 6, dtype=torch.float64).view(2, 3)
        mask = torch.ones_like(a, dtype=torch.bool)
        slope = _evaluate(tested, a, a.flip(0, 1), mask)[1]
        value = _evaluate(tested, a, a.flip(0, 1), mask)[0]
        k2, k3 = (_evaluate(estimator(name), a, a.flip(0, 1), mask) for name in ("k2", "k3"))
        findings.append(
            measured("reduction", max(distance(slope, k2[1]), distance(value, k3[0])), "ratio 1: the value of k3, the gradient of k2")
        )
    return findings


def _return_by_reward(tested: Estimator) -> float:
    """KL left after ascending E[-k1]."""
    on = world(4, 1)
    for _ in range(STEPS):
        on = replace(on, logits_SV=on.logits_SV - 2.0 * _score_product(tested, on))
    return float(np.abs(divergence(softmax(on.logits_SV), softmax(on.reference_SV))).max())


# --- sums over the vocabulary ----------------------------------------------------------------------------------------------------------


def exact_laws(name: str) -> list[Finding]:
    """All six for `full` and `top_k`, which compare whole distributions."""
    on = world(5, 2)
    p_NV, q_NV = np.log(softmax(on.logits_SV)), np.log(softmax(on.reference_SV))
    keep = {"full": p_NV.shape[1], "top_k": 2}[name]
    call = _exact(name)
    policy, reference = torch.tensor(p_NV[:, :keep]), torch.tensor(q_NV[:, :keep])
    value = call(policy, reference)
    split = torch.cat([call(policy[a:b], reference[a:b]) for a, b in ((0, 1), (1, 1), (1, 6))])
    rows, tokens = [3, 1, 5, 0, 2, 4], list(reversed(range(keep)))
    moved = max(distance(call(policy[rows], reference[rows]), value[rows]), distance(call(policy[:, tokens], reference[:, tokens]), value))
    below = max(float(-value.min()), float((value - torch.tensor(divergence(np.exp(p_NV), np.exp(q_NV)))).max()) - 1e-15, 0.0)
    agree = float(call(policy, policy).abs().max())
    findings = [
        measured("partition", distance(split, value), "rows in parts, one of them empty"),
        absent("mask", "takes the distributions of trained tokens only"),
        measured("permutation", moved, "rows, and tokens of the vocabulary, reordered", 1e-12),
        *_exact_oracle(name, on, keep),
        measured("conservation", max(below, agree), "0 where both agree, never negative, never above the full divergence", 1e-15),
    ]
    if name == "full":
        setting = Objective.load({"kind": "reinforce", "kl": KL(estimator="full", coef=1.0)})
        left = return_to_reference(setting)
        return [
            *findings,
            *in_the_objective("full"),
            measured("reduction", left, f"KL in nats left after {STEPS} steps of it alone", RETURNED),
        ]
    whole = torch.tensor(p_NV), torch.tensor(q_NV)
    return [*findings, measured("reduction", distance(top_k_kl(*whole), full_kl(*whole)), "k = V: full", 1e-12)]


def _exact(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return full_kl if name == "full" else top_k_kl


def _exact_oracle(name: str, on: World, keep: int) -> list[Finding]:
    """Value and gradient against numpy and the complex step; `top_k` against the divergence of its buckets."""

    def bucketed(table: np.ndarray) -> np.ndarray:
        if keep == table.shape[-1]:
            return table
        return np.concatenate([table[:, :keep], table[:, keep:].sum(-1, keepdims=True)], axis=-1)

    q_NV = bucketed(softmax(on.reference_SV))
    logits = torch.tensor(on.logits_SV, requires_grad=True)
    reference = torch.tensor(np.log(softmax(on.reference_SV)))[:, :keep]
    value = _exact(name)(logits.log_softmax(-1)[:, :keep], reference)
    gradient = torch.autograd.grad(value.sum(), logits)[0].numpy()
    truth = derivative(lambda z: divergence(bucketed(softmax(z)), q_NV).sum(), on.logits_SV)
    gap = max(distance(value.detach(), divergence(bucketed(softmax(on.logits_SV)), q_NV)), distance(gradient, truth))
    findings = [measured("oracle", gap, f"value and gradient of {DESCENDS['loss', name]}")]
    if name == "full":
        forward = full_kl(logits.log_softmax(-1), reference, "forward")
        turned = torch.autograd.grad(forward.sum(), logits)[0].numpy()
        gap = max(distance(forward.detach(), divergence(q_NV, softmax(on.logits_SV))), distance(turned, _truths(on)[FORWARD]))
        findings.append(measured("oracle", gap, f"direction forward: value and gradient of {FORWARD}"))
        findings.append(measured("oracle", _impossible_tokens(), "probability 0 counts as the limit says: nothing, or infinity", EXACT))
    return findings


def _impossible_tokens() -> float:
    """p = (1/2, 1/2, 0) against q = (1/2, 1/4, 1/4): ln 2 / 2; the other way round infinity."""
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    q = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64).log()
    gap = abs(float(full_kl(p, q)) - 0.5 * math.log(2))
    return 0.0 if gap < 1e-15 and float(full_kl(q, p)) == math.inf else max(gap, 1.0)


def target(name: str) -> str:
    """What each allowed place of the estimator descends."""
    places = [f"in the {place}: {DESCENDS[place, name]}" for place in ("loss", "reward") if (place, name) in DESCENDS]
    return "; ".join(places)
