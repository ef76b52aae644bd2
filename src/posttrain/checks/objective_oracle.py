"""The oracle law for policy objectives: expected value and gradient against an enumeration of all sequences.

    product code, autograd      sum_y mu(y) aggregate(loss(y))                           differentiated by the logits
    truth, plain numbers        sum_y mu(y) sum_t weight_t (-c_t + KL slope) (onehot - p)     with c_t from coefficients.py

mu is the sampler's policy. Before the first update with a sampler that agrees, a second truth applies that knows nothing of coefficients:
the derivative of the expected reward itself, and of the divergence that the KL term is said to descend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from posttrain.checks.coefficients import EXACT_KL, FORMULAS, Effect, Row, effects, token_weight
from posttrain.checks.findings import Finding, absent, alignment, distance, failed, largest, measured
from posttrain.checks.objective_metrics import metrics_law
from posttrain.checks.subjects import Subject, cited, outcome, rows_of, scene, subject
from posttrain.checks.tabular import (
    World,
    derivative,
    divergence,
    divergence_gradient,
    expectation,
    probabilities,
    score_sum,
    softmax,
    world,
)
from posttrain.objectives.aggregate import aggregate
from posttrain.objectives.axes import KL, Decoupled, Entropy, NoCorrection, NoLimit
from posttrain.objectives.kl import DESCENDS
from posttrain.objectives.objective import Objective
from posttrain.objectives.streams import Streams

DENOMINATOR = 3.0
PROMPT_TOKENS = (5.0, 7.0)
"""Trained tokens of the two prompts that rows belong to in turn."""
VACUOUS = 1e-4
"""A truth whose gradient is smaller than this proves nothing."""
SHAPES = ((4, 1, False), (3, 2, False), (3, 3, True))
"""Vocabulary, length, and whether token 0 ends a sequence."""
SPREADS = {"updates of ordinary size": 0.5, "updates of the size of a sequence band": 3e-4}


@dataclass(frozen=True, slots=True)
class Case:
    """All sequences of a world as rows, with their advantages and gates."""

    on: World
    advantage_BT: np.ndarray
    gate_BT: np.ndarray | None

    @property
    def drawn_B(self) -> np.ndarray:
        """Probability of each sequence under the sampler."""
        return probabilities(self.on.where, self.on.behaviour_SV)

    @property
    def prompt_tokens_B(self) -> np.ndarray:
        """Trained tokens of each row's whole prompt."""
        return np.resize(PROMPT_TOKENS, len(self.on.where.tokens_BT))

    def streams(self, logits: Tensor) -> Streams:
        """One row per sequence, with gradient by the logits."""
        where, mask = self.on.where, torch.tensor(self.on.where.mask_BT)
        states, tokens = torch.tensor(where.states_BT), torch.tensor(where.tokens_BT)
        logp_SV = logits.log_softmax(-1)
        reference_SV = torch.tensor(np.log(softmax(self.on.reference_SV)))
        p_SV = logp_SV.exp()

        def fixed(table_SV: np.ndarray) -> Tensor:
            return torch.tensor(where.read(np.log(softmax(table_SV))))

        return Streams(
            logp_BT=torch.where(mask, logp_SV[states, tokens], torch.nan),
            old_BT=fixed(self.on.old_SV),
            behaviour_BT=fixed(self.on.behaviour_SV),
            advantage_BT=torch.tensor(self.advantage_BT),
            mask_BT=mask,
            reference_BT=fixed(self.on.reference_SV),
            entropy_BT=-(p_SV * logp_SV).sum(-1)[states],
            sentence_BT=torch.arange(mask.shape[1]).expand(mask.shape) // 2,
            gate_BT=None if self.gate_BT is None else torch.tensor(self.gate_BT),
            divergence_BT=(p_SV * (logp_SV - reference_SV)).sum(-1)[states],
        )


def sequence_case(on: World) -> Case:
    """Before the first update: one advantage per sequence, nothing gated."""
    where = on.where
    reward_B = on.draw(len(where.tokens_BT), name="reward")
    return Case(on.on_policy(), np.where(where.mask_BT, reward_B[:, None], 0.0), None)


def token_case(on: World) -> Case:
    """After updates, with a sampler that disagrees: advantages differ within a sequence, some tokens are gated."""
    size = on.where.mask_BT.shape
    gate_BT = (on.draw(*size, name="gate") > 0.5) & on.where.mask_BT
    return Case(on, np.where(on.where.mask_BT, 1.5 * on.draw(*size, name="advantage"), 0.0), gate_BT)


class Expected(NamedTuple):
    """Expectation of the aggregated loss, and its gradient by the logits."""

    value: float
    gradient_SV: np.ndarray


def found_expectation(tested: Subject, case: Case) -> Expected:
    """What the code under test gives, by autograd; each sequence weighs its probability under the sampler."""
    logits = torch.tensor(case.on.logits_SV, dtype=torch.float64, requires_grad=True)
    streams = case.streams(logits)
    loss_BT = torch.where(streams.mask_BT, tested.terms(streams).loss_BT, 0.0) * torch.tensor(case.drawn_B)[:, None]
    loss = aggregate(loss_BT, streams.mask_BT, tested.aggregation, DENOMINATOR, torch.tensor(case.prompt_tokens_B))
    gradient = torch.autograd.grad(loss, logits, allow_unused=True)[0] if loss.requires_grad else None
    return Expected(loss.item(), np.zeros(case.on.logits_SV.shape) if gradient is None else gradient.numpy())


def token_weights(case: Case, setting: Objective | None) -> np.ndarray:
    """Probability of the sequence times the weight that the aggregation gives to each of its tokens, [B, T]."""
    how = setting.aggregation if setting else "seq_mean_token_sum"
    where = case.on.where
    weight_B = [token_weight(how, int(n), m) for n, m in zip(where.lengths_B, case.prompt_tokens_B, strict=True)]
    return np.where(where.mask_BT, (case.drawn_B * weight_B)[:, None], 0.0) / DENOMINATOR


def documented(tested: Subject, case: Case) -> Expected:
    """Truth from the documented coefficient of each token."""
    on, where = case.on, case.on.where
    tables = [where.read(np.log(softmax(table))) for table in (on.logits_SV, on.old_SV, on.behaviour_SV, on.reference_SV)]
    gate_BT = np.zeros_like(where.mask_BT) if case.gate_BT is None else case.gate_BT
    value_BT, slope_BT = np.zeros(where.mask_BT.shape), np.zeros(where.mask_BT.shape)
    for b, length in enumerate(where.lengths_B):
        logp, old, behaviour, reference, advantage = (table[b, :length].tolist() for table in (*tables, case.advantage_BT))
        row = Row(logp, old, behaviour, reference, advantage, [t // 2 for t in range(length)], gate_BT[b, :length].tolist())
        for t, effect in enumerate(_effects(tested, row)):
            value_BT[b, t], slope_BT[b, t] = effect
    weight_BT = token_weights(case, tested.setting)
    rest = _over_the_vocabulary(tested.setting, case, weight_BT)
    gradient_SV = score_sum(where, on.logits_SV, weight_BT * slope_BT)
    return Expected(float((weight_BT * value_BT).sum()) + rest.value, gradient_SV + rest.gradient_SV)


def _effects(tested: Subject, row: Row) -> list[Effect]:
    if tested.setting is not None:
        return effects(row, tested.setting)
    if tested.coefficient is None:
        raise ValueError("an off-policy truth needs the documented coefficient")
    with cited():
        pairs = zip(row.logp, row.old, row.advantage, strict=True)
        return [Effect(math.nan, -float(tested.coefficient(logp - old, advantage))) for logp, old, advantage in pairs]


def _over_the_vocabulary(setting: Objective | None, case: Case, weight_BT: np.ndarray) -> Expected:
    """Terms that are no matter of the sampled token, in each prefix times how often the sampler comes there: entropy bonus, exact KL."""
    exact = setting is not None and _kl_in_loss(setting) and setting.kl.estimator in EXACT_KL
    if setting is None or not (setting.entropy.used or exact):
        return Expected(0.0, np.zeros(case.on.logits_SV.shape))
    visits_S, q_SV = case.on.where.visits(weight_BT), softmax(case.on.reference_SV)

    def added(logits_SV: np.ndarray) -> complex:
        p_SV = softmax(logits_SV)
        each_S = setting.entropy.coef * (p_SV * np.log(p_SV)).sum(-1)
        if exact:
            each_S = each_S + setting.kl.coef * divergence(p_SV, q_SV)
        return (visits_S * each_S).sum()

    return Expected(float(np.real(added(case.on.logits_SV))), derivative(added, case.on.logits_SV))


def _kl_in_loss(setting: Objective) -> bool:
    return setting.kl.used and setting.kl.placement == "loss"


def climbed(setting: Objective | None, case: Case) -> np.ndarray:
    """On-policy gradient that knows no coefficients: minus that of the expected reward, and that of the divergence in the loss.

    Each sequence's reward is its advantage times the weight of its tokens. Prefixes keep their weight in the divergence, which is what
    a loss per token does; that needs sequences which all weigh alike.
    """
    weight_BT = token_weights(case, setting)
    weight_B = weight_BT[:, 0] / case.drawn_B
    gradient_SV = -derivative(expectation(case.on.where, weight_B * case.advantage_BT[:, 0]), case.on.logits_SV)
    gradient_SV += _over_the_vocabulary(setting, case, weight_BT).gradient_SV
    if setting and _kl_in_loss(setting) and setting.kl.estimator not in EXACT_KL:
        direction = DESCENDS["loss", setting.kl.estimator]
        visits_S = case.on.where.visits(weight_BT)
        gradient_SV += setting.kl.coef * divergence_gradient(case.on.logits_SV, case.on.reference_SV, visits_S, direction)
    return gradient_SV


def oracle_law(tested: Subject) -> list[Finding]:
    """On-policy against the derivative of what is climbed; off-policy against the documented coefficients."""
    if tested.setting is None:
        return _user_law(tested)
    on_policy = [_compare_climbed(tested)]
    if _whole_ratio(tested.setting):
        on_policy.append(_compare_one_token(tested))
    return [*on_policy, compare_documented(tested), _compare_tokens(tested, tested.setting), metrics_law(tested, tested.setting)]


def _compare_climbed(tested: Subject) -> Finding:
    setting = tested.setting
    found, size = [], 0.0
    for vocabulary, length, ends in SHAPES:
        case = sequence_case(world(vocabulary, length, ends=ends))
        weights_B = token_weights(case, setting)[:, 0] / case.drawn_B
        uneven = setting is not None and np.ptp(weights_B) > 0
        measuring = subject(tested.name, setting.model_copy(update={"kl": KL(), "entropy": Entropy()})) if setting and uneven else tested
        truth_SV = climbed(measuring.setting, case)
        size = max(size, float(np.linalg.norm(truth_SV)))
        where = f"{len(case.drawn_B)} sequences of up to {length} tokens"
        found.append((distance(found_expectation(measuring, case).gradient_SV, truth_SV), where))
    deviation, detail = largest(found)
    what = f"on-policy: the gradient of {climbs(setting)}; worst: {detail}"
    return measured("oracle", deviation, what) if size > VACUOUS else failed("oracle", "the on-policy truth is zero and proves nothing")


def compare_documented(tested: Subject) -> Finding:
    """After updates, with a sampler that disagrees, on every shape of world: value and gradient from the coefficients of the tokens."""
    found, size = [], 0.0
    for vocabulary, length, ends in SHAPES:
        for spread_name, spread in SPREADS.items():
            on = world(vocabulary, length, ends=ends, spread=spread)
            if tested.setting is None:  # its coefficient knows one ratio and no reference
                on = replace(on, behaviour_SV=on.old_SV, reference_SV=on.logits_SV)
            for case in (token_case(on), replace(sequence_case(on), on=on)):
                got, truth = found_expectation(tested, case), documented(tested, case)
                size = max(size, float(np.linalg.norm(truth.gradient_SV)))
                where = f"{len(case.drawn_B)} sequences of up to {length} tokens, {spread_name}"
                value = 0.0 if math.isnan(truth.value) else distance(got.value, truth.value)
                found.append((max(value, distance(got.gradient_SV, truth.gradient_SV)), where))
    deviation, detail = largest(found)
    what = f"off-policy: {climbs_off_policy(tested.setting)}; worst: {detail}"
    return measured("oracle", deviation, what) if size > VACUOUS else failed("oracle", "the off-policy truth is zero and proves nothing")


def _compare_tokens(tested: Subject, setting: Objective) -> Finding:
    """Token by token on the scene, which has ratios on both sides of every bound and rows with holes."""
    streams = scene()
    met = outcome(tested, streams)
    slope_BT = np.zeros(streams.mask_BT.shape)
    for b, row in enumerate(rows_of(streams)):
        slope_BT[b, streams.mask_BT[b].numpy()] = [effect.slope for effect in effects(row, setting)]
    gap = distance(met.gradients["logp_BT"], slope_BT)
    return measured("oracle", gap, f"{int(streams.mask_BT.sum())} tokens on both sides of every bound, each against its own coefficient")


def _whole_ratio(setting: Objective) -> bool:
    """Whether a token weighs pi / behaviour, whole, and nothing else acts."""
    if setting.surrogate or setting.limit != NoLimit() or setting.ratio != "token" or setting.kl.used or setting.entropy.used:
        return False
    whole = setting.against == "behaviour" and setting.correction == NoCorrection()
    return whole or (setting.against == "old" and setting.correction == Decoupled())


def _compare_one_token(tested: Subject) -> Finding:
    """Importance sampling is exact where a response is one token: samples of another policy give the gradient of this one's reward."""
    on = world(5, 1)
    case = replace(sequence_case(on), on=on)
    weight_B = token_weights(case, tested.setting)[:, 0] / case.drawn_B
    truth_SV = -derivative(expectation(on.where, weight_B * case.advantage_BT[:, 0]), on.logits_SV)
    deviation = distance(found_expectation(tested, case).gradient_SV, truth_SV)
    return measured("oracle", deviation, "off-policy, one-token responses: the gradient of E[A] under the policy, exactly")


def _user_law(tested: Subject) -> list[Finding]:
    """On-policy with the reference at the policy, so that any sound KL term is silent; off-policy if a coefficient is documented."""
    found = []
    for vocabulary, length, ends in SHAPES:
        case = sequence_case(world(vocabulary, length, ends=ends))
        case = replace(case, on=replace(case.on, reference_SV=case.on.logits_SV))
        truth_SV, got_SV = climbed(None, case), found_expectation(tested, case).gradient_SV
        cosine, scale = alignment(got_SV, truth_SV)
        where = f"cosine {cosine:.6f}, length {scale:.6g} of the policy gradient, {len(case.drawn_B)} sequences of up to {length} tokens"
        found.append((distance(got_SV, truth_SV), where))
    deviation, detail = largest(found)
    result = [measured("oracle", deviation, f"on-policy: the gradient of {climbs(None)}; {detail}")]
    if tested.coefficient is None:
        return [*result, absent("oracle", f"off-policy not checked: define {tested.name}_coefficient(log_ratio, advantage)")]
    return [*result, compare_documented(tested)]


def climbs(setting: Objective | None) -> str:
    """What the on-policy expected gradient climbs, in words."""
    if setting is None:
        return "E[A]"
    reward = {
        "seq_mean_token_mean": "E[A / |y|]",
        "prompt_mean": "E[A / tokens of the prompt]",
    }.get(setting.aggregation, "E[A]")
    kl = setting.kl
    held = f" - {kl.coef:g} {DESCENDS['loss', kl.estimator]}" if _kl_in_loss(setting) else ""
    paid = f" + {setting.entropy.coef:g} H" if setting.entropy.used else ""
    return f"{reward}{held}{paid}"


def climbs_off_policy(setting: Objective | None) -> str:
    """The expected gradient after updates, in words."""
    if setting is None or setting.surrogate:
        return "sum of (the companion's coefficient) grad log pi"
    factor = "" if setting.correction == NoCorrection() else f", times the weight of correction={setting.correction.kind}"
    return f"sum of ({FORMULAS[setting.limit.kind]}) grad log pi{factor}"
