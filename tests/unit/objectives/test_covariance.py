"""Which tokens the covariance rules select: statistic, count, bounds, draw, and what the rule can never reach."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.seeds import numpy_rng
from posttrain.objectives.advantages import group_advantages
from posttrain.objectives.axes import ClipCov, KLCov
from posttrain.objectives.covariance import Selection, covariances, select

NONE = np.zeros(0, dtype=bool)


def unclipped(n: int) -> np.ndarray:
    return np.zeros(n, dtype=bool)


def test_covariance_by_hand():
    # advantages 1 -1 1 -1, mean 0; log-probabilities -1 -1 -3 -3, mean -2: 1 x 1, -1 x 1, 1 x -1, -1 x -1
    found = covariances(np.array([-1.0, -1.0, -3.0, -3.0]), np.array([1.0, -1.0, 1.0, -1.0]))
    assert found.tolist() == [1.0, -1.0, -1.0, 1.0]
    # their mean is the covariance: advantages 0 and 2, log-probabilities 0 and -4: (-1 x 2 + 1 x -2) / 2
    assert covariances(np.array([0.0, -4.0]), np.array([0.0, 2.0])).mean() == -2.0
    assert covariances(np.zeros(0), np.zeros(0)).tolist() == []


def test_float32_streams_are_summed_in_float64():
    logp, advantage = np.full(3, -0.1, dtype=np.float32), np.array([0.1, 0.2, 0.3], dtype=np.float32)
    assert covariances(logp, advantage).dtype == np.float64


N = 100
LOGP = np.concatenate([np.full(50, -0.5), np.full(50, -4.5)])
ADVANTAGE = np.tile([1.0, -1.0], 50)
# means -2.5 and 0: covariances +2 -2 (likely tokens) and -2 +2 (rare ones): 25 confident rewarded and 25 rare punished have 2


def test_clip_cov_draws_only_among_the_eligible():
    found = select(LOGP, ADVANTAGE, unclipped(N), ClipCov(fraction=0.1, lower=1.0, upper=5.0), seed=3)
    cov = covariances(LOGP, ADVANTAGE)
    assert (found.eligible, found.tokens, len(found.chosen)) == (50, 100, 10)
    assert all(cov[i] == 2.0 for i in found.chosen)
    assert len(set(found.chosen)) == 10
    assert list(found.chosen) == sorted(found.chosen)


@pytest.mark.parametrize(("lower", "upper", "eligible"), [(1.9, 2.1, 50), (2.0, 5.0, 0), (1.0, 2.0, 0), (-5.0, -1.0, 50), (-5.0, 5.0, 100)])
def test_both_bounds_are_exclusive(lower, upper, eligible):
    assert select(LOGP, ADVANTAGE, unclipped(N), ClipCov(fraction=1.0, lower=lower, upper=upper), 0).eligible == eligible


@pytest.mark.parametrize(
    ("fraction", "count"),
    # max(int(fraction x 100), 1), and never more than there are eligible
    [(0.0002, 1), (0.01, 1), (0.019, 1), (0.02, 2), (0.5, 50), (0.9, 50)],
)
def test_count_is_a_floor_of_the_whole_step_and_at_least_one(fraction, count):
    found = select(LOGP, ADVANTAGE, unclipped(N), ClipCov(fraction=fraction), 0)
    assert len(found.chosen) == min(max(int(fraction * N), 1), found.eligible) == count


def test_clipped_tokens_are_never_selected():
    clipped = unclipped(N)
    clipped[: N // 2] = True  # all confident ones
    found = select(LOGP, ADVANTAGE, clipped, ClipCov(fraction=1.0), 0)
    assert found.eligible == 25
    assert not clipped[list(found.chosen)].any()


def test_a_clipped_token_still_counts_in_the_statistic():
    # leaving it out of the means would change every covariance: one far token with advantage 9
    logp, advantage = np.append(LOGP, -0.5), np.append(ADVANTAGE, 9.0)
    clipped = np.append(unclipped(N), True)
    found = select(logp, advantage, clipped, ClipCov(fraction=1.0, lower=-100, upper=100), 0)
    assert (found.tokens, found.eligible) == (N + 1, N)
    assert covariances(logp, advantage)[0] != covariances(LOGP, ADVANTAGE)[0]


def test_the_draw_is_uniform_and_seeded():
    limit = ClipCov(fraction=0.05)
    assert select(LOGP, ADVANTAGE, unclipped(N), limit, 7) == select(LOGP, ADVANTAGE, unclipped(N), limit, 7)
    drawn = [select(LOGP, ADVANTAGE, unclipped(N), limit, seed).chosen for seed in range(400)]
    assert len(set(drawn)) > 390
    counts = np.bincount([i for chosen in drawn for i in chosen], minlength=N)
    eligible = np.flatnonzero(covariances(LOGP, ADVANTAGE) == 2.0)
    assert counts.sum() == counts[eligible].sum() == 2000
    # 40 expected each, standard deviation 6: 400 draws of 5 among 50
    assert counts[eligible].min() > 15
    assert counts[eligible].max() < 70


def test_nothing_to_choose_is_inert():
    calm = select(np.full(9, -0.1), np.ones(9), unclipped(9), ClipCov(), 0)
    assert (calm.chosen, calm.eligible) == ((), 0)
    assert select(np.zeros(0), np.zeros(0), NONE, ClipCov(), 0) == Selection((), 0, 0, 0)
    assert select(np.zeros(0), np.zeros(0), NONE, KLCov(), 0) == Selection((), 0, 0, 0)


def test_kl_cov_takes_the_highest():
    # covariances: advantages 3 1 -1 -3 (mean 0), log-probabilities -1 -2 -3 -4 (mean -2.5): 4.5, 0.5, 0.5, 4.5
    logp, advantage = np.array([-1.0, -2.0, -3.0, -4.0]), np.array([3.0, 1.0, -1.0, -3.0])
    assert select(logp, advantage, unclipped(4), KLCov(fraction=0.5), 0).chosen == (0, 3)
    # equal covariances: the first of them; and the seed decides nothing
    assert {select(logp, advantage, unclipped(4), KLCov(fraction=0.75), seed).chosen for seed in range(9)} == {(0, 1, 3)}
    # the clip takes no token from it
    assert select(logp, advantage, ~unclipped(4), KLCov(fraction=0.5), 0).chosen == (0, 3)


def test_kl_cov_holds_no_token_that_does_not_sharpen():
    # covariances -1 -1: nothing positive, nothing held back
    found = select(np.array([-1.0, -3.0]), np.array([-1.0, 1.0]), unclipped(2), KLCov(fraction=1.0), 0)
    assert (found.chosen, found.eligible) == ((), 0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.tuples(st.floats(-8, 0), st.floats(-3, 3), st.booleans()), min_size=1, max_size=60),
    fraction=st.floats(0.001, 1.0),
    lower=st.floats(-2, 2),
    seed=st.integers(0, 99),
)
def test_whatever_is_selected_is_eligible_unclipped_and_counted(tokens, fraction, lower, seed):
    logp, advantage, clipped = (np.array([token[i] for token in tokens]) for i in range(3))
    limit = ClipCov(fraction=fraction, lower=lower, upper=lower + 2.0)
    found = select(logp, advantage, clipped, limit, seed)
    cov = covariances(logp, advantage)
    for i in found.chosen:
        assert limit.lower < cov[i] < limit.upper
        assert not clipped[i]
    assert found.eligible == sum(limit.lower < c < limit.upper and not out for c, out in zip(cov, clipped, strict=True))
    assert len(found.chosen) == min(max(int(fraction * len(tokens)), 1), found.eligible)
    top = select(logp, advantage, clipped, KLCov(fraction=fraction), seed)
    rest = [i for i in range(len(tokens)) if i not in top.chosen]
    assert all(cov[i] > 0 for i in top.chosen)
    if top.chosen:
        assert min(cov[list(top.chosen)]) >= max((cov[i] for i in rest), default=-math.inf)


def test_a_selection_per_micro_batch_would_be_another_one():
    # four parts of 25 tokens with fraction 0.02: one token each by the floor, four in all, where the step has int(2.0)
    limit = ClipCov(fraction=0.02)
    whole = select(LOGP, ADVANTAGE, unclipped(N), limit, 0)
    parts = [select(LOGP[i : i + 25], ADVANTAGE[i : i + 25], unclipped(25), limit, 0) for i in range(0, N, 25)]
    assert len(whole.chosen) == 2
    # and within a part of equally likely tokens nothing varies: no covariance at all
    assert sum(part.eligible for part in parts) == 0


def test_metrics_are_shares_of_the_step():
    found = select(LOGP, ADVANTAGE, unclipped(N), ClipCov(fraction=1.0), 0)
    assert {name: metric.read() for name, metric in found.metrics().items()} == {
        "cov_eligible": 0.5,
        "cov_selected": 0.5,
        "cov_positive": 0.5,  # 25 confident rewarded of 50 chosen; the rest are rare and punished
        "cov_chosen": 50,
    }
    assert Selection((), 0, 10, 0).metrics()["cov_positive"].read() is None
    # a rewarded token that is rare is in no such quadrant, even where the bounds let it in
    assert select(LOGP, ADVANTAGE, unclipped(N), ClipCov(fraction=1.0, lower=-5.0, upper=-1.0), 0).positive == 0


def ceiling(entropy: float, advantages: list[float]) -> float:
    """Largest covariance of a confident, rewarded token: log-probabilities end at 0, so their distance from the mean is at most the
    mean negative log-likelihood, which on-policy is about the entropy."""
    return max(advantages) * entropy


@pytest.mark.parametrize(
    ("entropy", "how", "expected"),
    # one success among 8: A = (1 - 1/8) / std = sqrt(7) = 2.6458, or 7/8 without the std
    [(0.188, "mean_std", 0.497), (0.64, "mean_std", 1.693), (0.73, "mean_std", 1.931), (0.73, "mean", 0.639)],
)
def test_ceiling_of_the_positive_quadrant(entropy, how, expected):
    assert ceiling(entropy, group_advantages([1.0] + [0.0] * 7, how)) == pytest.approx(expected, abs=2e-3)


def simulated(entropy: float, how: str, prompts: int = 400, length: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a policy with this mean negative log-likelihood: groups of 8 with one success, exponential surprises."""
    rng = numpy_rng(5, "cov", how)
    logp = -rng.exponential(entropy, size=prompts * 8 * length)
    advantage = np.repeat(np.tile(group_advantages([1.0] + [0.0] * 7, how), prompts), length)  # pyright: ignore[reportArgumentType]
    return logp, advantage


@pytest.mark.parametrize(("entropy", "how"), [(0.188, "mean_std"), (0.07, "mean_std"), (0.73, "mean")])
def test_no_confident_rewarded_token_reaches_the_default_bound_at_low_entropy(entropy, how):
    logp, advantage = simulated(entropy, how)
    cov = covariances(logp, advantage)
    positive = (advantage > advantage.mean()) & (logp > logp.mean())
    assert positive.sum() > 1000
    assert cov[positive].max() < 1.0
    found = select(logp, advantage, unclipped(len(logp)), ClipCov(fraction=1.0), 0)
    assert found.positive == 0
    # the telemetry says so: the share is 0, not unknown, whenever anything was chosen
    assert found.metrics()["cov_positive"].read() == (0.0 if found.chosen else None)


def test_at_higher_entropy_it_does():
    logp, advantage = simulated(0.73, "mean_std")
    found = select(logp, advantage, unclipped(len(logp)), ClipCov(fraction=1.0), 0)
    assert found.positive > 0
    assert 0 < (found.metrics()["cov_positive"].read() or 0) < 1
