"""The laws for advantages per token: a critic's (GAE) and a teacher's."""

from __future__ import annotations

import math

import numpy as np

from posttrain.checks.findings import EXACT, Finding, absent, distance, largest, measured
from posttrain.checks.tabular import World, derivative, divergence, expectation, probabilities, score_sum, softmax, world
from posttrain.objectives.axes import Critic, Teacher
from posttrain.objectives.credit import gae, reward_to_go, teacher_advantage

REWARDS_N = np.array([0.5, 0.0, -1.0, 2.0])
VALUES_N = np.array([0.3, -0.2, 0.8, 1.1])
HOLES = ("1111", "0110101", "111010", "0011110")
"""Where the four decisions stand among tokens that are none."""
JUNK = (math.nan, math.inf, -math.inf, 1e30)


def _spread(stream_N: np.ndarray, holes: str, junk: float) -> np.ndarray:
    """Decisions at the ones, junk elsewhere."""
    places = np.array([slot == "1" for slot in holes])
    stream_T = np.full(len(holes), junk)
    stream_T[places] = stream_N[: places.sum()]
    return stream_T


def _trained(holes: str) -> np.ndarray:
    return np.array([slot == "1" for slot in holes])


# --- critic ----------------------------------------------------------------------------------------------------------------------------


def critic_laws(setting: Critic) -> list[Finding]:
    """All six for generalised advantage estimation."""

    def estimate(rewards: np.ndarray, values: np.ndarray, trained: np.ndarray) -> np.ndarray:
        return gae(rewards, values, trained, setting.gamma, setting.lam)[0]

    every = np.ones(4, dtype=bool)
    whole = estimate(REWARDS_N, VALUES_N, every)
    suffixes = [distance(estimate(REWARDS_N[n:], VALUES_N[n:], every[n:]), whole[n:]) for n in range(4)]
    leaks = []
    for holes in HOLES:
        n = int(_trained(holes).sum())
        alone = estimate(REWARDS_N[:n], VALUES_N[:n], every[:n])
        for junk in JUNK:
            paid = _spread(REWARDS_N, holes, math.nan)
            got = estimate(paid, _spread(VALUES_N, holes, junk), _trained(holes))
            leaks.append((distance(got, _spread(alone, holes, 0.0)), f"values {junk} at {holes}"))
    leak, where = largest(leaks)
    return [
        measured("partition", max(suffixes), "a response needs no other one, and a token only what follows it: suffixes alone"),
        measured("mask", leak, f"values of {JUNK} and no reward where untrained" if leak == 0 else where, EXACT),
        absent("permutation", "acts on one response at a time, whose tokens have an order"),
        *_critic_oracle(setting),
        _critic_conservation(setting),
        _critic_reduction(),
    ]


def _critic_oracle(setting: Critic) -> list[Finding]:
    """Unbiased for any critic at lam = 1, and for the true values at any lam."""
    on = world(3, 3, ends=True).on_policy()
    where = on.where
    paid_BT = where.read(on.draw(where.states, where.vocabulary, name="token reward"))
    guess_S = on.draw(where.states, name="critic")
    truth_SV = derivative(expectation(where, paid_BT.sum(-1)), on.logits_SV)
    findings = []
    if setting.lam == 1 and setting.gamma == 1:
        gap = distance(_critic_gradient(setting, on, paid_BT, guess_S), truth_SV)
        findings.append(measured("oracle", gap, "with any critic: the gradient of E[R]"))
    else:
        plain_BT = np.array(
            [_lambda_returns(setting, *row) for row in zip(paid_BT, guess_S[where.states_BT], where.lengths_B, strict=True)]
        )
        expected = score_sum(where, on.logits_SV, plain_BT * probabilities(where, on.logits_SV)[:, None])
        gap = distance(_critic_gradient(setting, on, paid_BT, guess_S), expected)
        findings.append(measured("oracle", gap, "with any critic: biased, as the sum of (gamma lam)^n delta in plain Python"))
    if setting.gamma == 1:
        gap = distance(_critic_gradient(setting, on, paid_BT, _true_values(on, paid_BT)), truth_SV)
        findings.append(measured("oracle", gap, f"with the true values, lam = {setting.lam:g}: the gradient of E[R]"))
    return findings


def _critic_gradient(setting: Critic, on: World, paid_BT: np.ndarray, values_S: np.ndarray) -> np.ndarray:
    """E[sum_t A_t grad log pi_t] over all sequences."""
    where = on.where
    weight_BT = np.zeros(paid_BT.shape)
    for b, chance in enumerate(probabilities(where, on.logits_SV)):
        weight_BT[b] = chance * gae(paid_BT[b], values_S[where.states_BT[b]], where.mask_BT[b], setting.gamma, setting.lam)[0]
    return score_sum(where, on.logits_SV, weight_BT)


def _true_values(on: World, paid_BT: np.ndarray) -> np.ndarray:
    """Expected reward from each prefix on."""
    where, chance_B = on.where, probabilities(on.where, on.logits_SV)
    ahead_BT = np.cumsum(paid_BT[:, ::-1], axis=-1)[:, ::-1]
    return where.visits(chance_B[:, None] * ahead_BT) / where.visits(np.broadcast_to(chance_B[:, None], paid_BT.shape))


def _lambda_returns(setting: Critic, rewards: np.ndarray, values: np.ndarray, length: int) -> list[float]:
    """A_t = sum_n (gamma lam)^n (r + gamma V' - V) at t + n, as a double loop."""
    ahead = [*values[:length], 0.0]
    delta = [rewards[t] + setting.gamma * ahead[t + 1] - ahead[t] for t in range(length)]
    found = [sum((setting.gamma * setting.lam) ** n * delta[t + n] for n in range(length - t)) for t in range(length)]
    return found + [0.0] * (len(rewards) - length)


def _critic_conservation(setting: Critic) -> Finding:
    """Returns are advantage plus value; at gamma = lam = 1 the first one is all that was paid, also at tokens of the environment."""
    found = []
    for holes in HOLES[1:]:
        trained_T = _trained(holes)
        paid_T = np.where(trained_T, 0.25, -0.5)
        values_T = _spread(VALUES_N, holes, math.nan)
        advantage_T, returns_T = gae(paid_T, values_T, trained_T, setting.gamma, setting.lam)
        found.append(distance(returns_T[trained_T], advantage_T[trained_T] + values_T[trained_T]))
        found.append(float(np.abs(advantage_T[~trained_T]).max() + np.abs(returns_T[~trained_T]).max()))
        first = int(np.argmax(trained_T))
        total = gae(paid_T, values_T, trained_T, 1.0, 1.0)[1]
        found.append(distance(total[first], paid_T[first:].sum()))
    return measured("conservation", max(found), "return = advantage + value; all that is paid from the first decision on is in its return")


def _critic_reduction() -> Finding:
    every = np.ones(4, dtype=bool)
    ahead_N = np.cumsum(REWARDS_N[::-1])[::-1]
    step_N = REWARDS_N + np.append(VALUES_N[1:], 0.0) - VALUES_N
    found = [
        (distance(gae(REWARDS_N, VALUES_N, every, 1.0, 1.0)[0], ahead_N - VALUES_N), "lam = gamma = 1: return minus value"),
        (distance(gae(REWARDS_N, VALUES_N, every, 1.0, 0.0)[0], step_N), "lam = 0: one-step difference"),
        (distance(gae(REWARDS_N, 0 * VALUES_N, every, 0.9, 1.0)[0], reward_to_go(REWARDS_N, every, 0.9)), "no critic: reward to go"),
    ]
    deviation, _ = largest(found)
    return measured("reduction", deviation, "; ".join(text for _, text in found))


# --- teacher ---------------------------------------------------------------------------------------------------------------------------


def teacher_laws(setting: Teacher) -> list[Finding]:
    """All six for on-policy distillation."""
    teacher_N, student_N = np.log([0.9, 0.001, 0.3, 0.2]), np.log([0.5, 0.4, 0.3, 0.6])
    every = np.ones(4, dtype=bool)

    def estimate(teacher: np.ndarray, student: np.ndarray, trained: np.ndarray) -> np.ndarray:
        return teacher_advantage(teacher, student, trained, setting.clip)

    whole = estimate(teacher_N, student_N, every)
    pieces = np.concatenate([estimate(teacher_N[a:b], student_N[a:b], every[a:b]) for a, b in ((0, 1), (1, 1), (1, 4))])
    leaks = []
    for holes in HOLES:
        for junk in JUNK:
            n = int(_trained(holes).sum())
            got = estimate(_spread(teacher_N, holes, junk), _spread(student_N, holes, -junk), _trained(holes))
            leaks.append((distance(got, _spread(whole[:n], holes, 0.0)), f"{junk} at {holes}"))
    leak, where = largest(leaks)
    order = [2, 0, 3, 1]
    moved = estimate(teacher_N[order], student_N[order], every)
    return [
        measured("partition", distance(pieces, whole), "tokens in pieces", EXACT),
        measured("mask", leak, f"{JUNK} where untrained, in both streams" if leak == 0 else where, EXACT),
        measured("permutation", distance(moved, whole[order]), "tokens reordered", EXACT),
        _teacher_oracle(setting),
        _teacher_conservation(setting, whole),
        _teacher_reduction(setting, teacher_N, student_N),
    ]


def _teacher_oracle(setting: Teacher) -> Finding:
    """E[sum_t A_t grad log pi_t] = - grad KL(student || teacher) in each prefix, prefixes keeping their weight."""
    on = world(3, 3, ends=True).on_policy()
    where, p_SV, q_SV = on.where, softmax(on.logits_SV), softmax(on.reference_SV)
    chance_BT = np.where(where.mask_BT, probabilities(where, on.logits_SV)[:, None], 0.0)
    student_BT, teacher_BT = where.read(np.log(p_SV)), where.read(np.log(q_SV))
    rows = zip(teacher_BT, student_BT, where.mask_BT, strict=True)
    advantage_BT = np.array([teacher_advantage(teacher, student, mask, setting.clip) for teacher, student, mask in rows])
    got_SV = score_sum(where, on.logits_SV, chance_BT * advantage_BT)
    visits_S = where.visits(chance_BT)
    if setting.clip is None:
        truth_SV = -derivative(lambda logits: (visits_S * divergence(softmax(logits), q_SV)).sum(), on.logits_SV)
        return measured("oracle", distance(got_SV, truth_SV), "minus the gradient of KL(student || teacher) in every prefix visited")
    bounded_SV = np.vectorize(lambda x: min(max(x, -setting.clip), setting.clip))(np.log(q_SV) - np.log(p_SV))  # type: ignore[operator]
    held_SV = visits_S[:, None] * p_SV * (bounded_SV - (p_SV * bounded_SV).sum(-1, keepdims=True))
    return measured("oracle", distance(got_SV, held_SV), "biased: sum of p (x - mean x) with x the bounded log-ratio")


def _teacher_conservation(setting: Teacher, whole: np.ndarray) -> Finding:
    """Finite and within the bound; a token outside the teacher's support gets the bound itself."""
    if setting.clip is None:
        return measured("conservation", 0.0 if np.isfinite(whole).all() else math.inf, "one finite number per trained token", EXACT)
    outside = teacher_advantage([-math.inf], [-1.0], [True], setting.clip)
    beyond = max(float(np.abs(whole).max()) - setting.clip, 0.0)
    return measured(
        "conservation", max(distance(outside, [-setting.clip]), beyond), "within the bound, which an impossible token gets", EXACT
    )


def _teacher_reduction(setting: Teacher, teacher_N: np.ndarray, student_N: np.ndarray) -> Finding:
    every = np.ones(4, dtype=bool)
    same = teacher_advantage(student_N, student_N, every, setting.clip)
    wide = teacher_advantage(teacher_N, student_N, every, 1e12)
    found = [
        (distance(same, np.zeros(4)), "teacher = student: exactly 0"),
        (distance(wide, teacher_advantage(teacher_N, student_N, every, None)), "a huge bound: none"),
    ]
    return measured("reduction", largest(found)[0], "; ".join(text for _, text in found), EXACT)
