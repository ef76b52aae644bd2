"""The laws for estimators that give one advantage per sibling of a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from posttrain.checks.advantage_truth import best_of_gradient, expected_gradient, plain, reward_gradient, success_weight
from posttrain.checks.findings import CLOSE, EXACT, Finding, Violation, absent, alignment, distance, failed, largest, measured
from posttrain.checks.subjects import cited
from posttrain.checks.tabular import softmax
from posttrain.core.seeds import numpy_rng
from posttrain.objectives.advantages import (
    TARGETS,
    Moments,
    channel_advantages,
    group_advantages,
    normalise,
    normalise_batch,
    subgroup_advantages,
)
from posttrain.objectives.axes import (
    Advantage,
    Batch,
    Channels,
    LeaveOneOut,
    MaxRL,
    Mean,
    MeanStd,
    MedianMAD,
    PassAtK,
    Reward,
)

Rewards = Sequence[float | None]
Call = Callable[[Rewards], list[float]]
GROUPS: tuple[Rewards, ...] = (
    [1.0, 0.0, 0.0],
    [0.3, 0.9, 0.1, 0.9],
    [0.0, 0.0, 1.0, 1.0],
    [0.1, 0.2, 0.7, 1.3],
    [1.0, 0.0, 0.0],
    [0.5, 0.5, 0.5],
)
SUCCESSES_V = (1.0, 0.0, 0.0, 1.0)
REWARDS_V = (0.3, 0.0, 1.1, 0.05)


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator under test. `setting` is None for a user's function, whose documented weight may be known."""

    name: str
    call: Call
    setting: Advantage | None = None
    weight: Callable[[float, int], float] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Group sizes to enumerate."""
        k = self.setting.k if isinstance(self.setting, PassAtK) else 1
        return tuple(size for size in (2, 3, 4) if size > k)


def estimator(name: str, setting: Advantage) -> Estimator:
    """A member of the axis that turns the rewards of a group into advantages."""

    def call(rewards: Rewards) -> list[float]:
        match setting:
            case MeanStd():
                return group_advantages(rewards, "mean_std", ddof=setting.ddof, eps=setting.eps)
            case MedianMAD():
                return group_advantages(rewards, "median_mad", eps=setting.eps)
            case PassAtK():
                return group_advantages(rewards, "pass_at_k", k=setting.k)
            case Batch():  # a step of one group; who was not scored trains no token
                given = [1e30 if reward is None else reward for reward in rewards]
                counts = [int(reward is not None) for reward in rewards]
                return [count and a for count, a in zip(counts, normalise_batch(given, counts, setting.eps), strict=True)]
            case Channels():
                return channel_advantages({"score": rewards}, {"score": 1.0}, ddof=setting.ddof)
            case Reward() | Mean() | LeaveOneOut() | MaxRL():
                return group_advantages(rewards, setting.kind)
            case _:
                raise ValueError(f"advantage={setting.kind} does not come from rewards of a group")

    return Estimator(name, call, setting)


def guarded_estimator(name: str, function: Callable[[Rewards], Sequence[float]], weight: Callable[[float, int], float] | None) -> Estimator:
    """A user's function as an estimator; Violation when it raises, edits its input, or does not give one number per sibling."""

    def call(rewards: Rewards) -> list[float]:
        given = list(rewards)
        with cited():
            found = [float(advantage) for advantage in function(given)]
        if given != list(rewards):
            raise Violation("changes its input rewards in place; work on a copy")
        if len(found) != len(rewards):
            raise Violation(f"returns {len(found)} advantages for {len(rewards)} siblings")
        return found

    return Estimator(name, call, None, weight)


def partition_law(tested: Estimator) -> list[Finding]:
    """Groups in any order, once or again, give the same advantages; moments of parts add up to those of the step."""
    first = [tested.call(list(group)) for group in GROUPS if _fits(tested, group)]
    again = [tested.call(list(group)) for group in reversed(GROUPS) if _fits(tested, group)]
    found = [(distance(a, b), f"group {i} after other groups") for i, (a, b) in enumerate(zip(first, reversed(again), strict=True))]
    deviation, detail = largest(found)
    said = "a group depends on no other group: any order and split" if deviation == 0 else detail
    findings = [measured("partition", deviation, said, EXACT)]
    if isinstance(tested.setting, Batch):
        values, counts = [0.3, 1.0, -0.5, 2.0, 0.0], [3, 1, 4, 2, 0]
        parts = [Moments.of(values[a:b], counts[a:b]) for a, b in ((3, 5), (0, 1), (1, 3), (5, 5))]
        merged = normalise(values, parts[0] + parts[1] + parts[2] + parts[3])
        gap = distance(merged, normalise_batch(values, counts))
        findings.append(measured("partition", gap, "moments of four ranks, one without rows, add up to those of the step"))
    return findings


def _fits(tested: Estimator, group: Sequence[float | None]) -> bool:
    k = tested.setting.k if isinstance(tested.setting, PassAtK) else 1
    return sum(reward is not None for reward in group) > k


def mask_law(tested: Estimator) -> list[Finding]:
    """A sibling that was never scored gets exactly 0 and changes nobody else's advantage, wherever it stands."""
    found = []
    for group in GROUPS:
        if not _fits(tested, group):
            continue
        alone = tested.call(list(group))
        for place in range(len(group) + 1):
            with_gap = tested.call([*group[:place], None, *group[place:]])
            others = with_gap[:place] + with_gap[place + 1 :]
            found.append((max(distance(others, alone), abs(with_gap[place])), f"{group} with an unscored sibling at place {place}"))
    deviation, detail = largest(found)
    return [measured("mask", deviation, "an unscored sibling at every place" if deviation == 0 else detail, EXACT)]


def permutation_law(tested: Estimator) -> list[Finding]:
    """Reordered siblings get reordered advantages; two groups of equal content stay two."""
    found = []
    for group in (*GROUPS, [0.4, None, 1.0, 0.0]):
        if not _fits(tested, group):
            continue
        straight = tested.call(list(group))
        for order in permutations(range(len(group))):
            moved = tested.call([group[i] for i in order])
            found.append((distance(moved, [straight[i] for i in order]), f"{group} in the order {order}"))
    if isinstance(tested.setting, (Mean, MeanStd, LeaveOneOut, MedianMAD, MaxRL)):
        pair: Rewards = [1.0, 0.0, 0.25, 1.0, 0.0, 0.25]
        split = subgroup_advantages(pair, ["a"] * 3 + ["b"] * 3, tested.setting.kind)
        once = group_advantages(pair[:3], tested.setting.kind)
        found.append((distance(split, once * 2), "two groups of equal content stay two"))
    deviation, detail = largest(found)
    return [measured("permutation", deviation, f"every order of the siblings; worst: {detail}", 1e-12)]


# --- oracle ----------------------------------------------------------------------------------------------------------------------------


def policies() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Logits and probabilities of three policies over four answers: as drawn, nearly solved, nearly hopeless."""
    logits_V = numpy_rng(0, "certificate", "answers").normal(size=4)
    for push in (0.0, 2.0, -2.0):
        moved_V = logits_V + push * np.array(SUCCESSES_V)
        yield moved_V, softmax(moved_V)


def oracle_law(tested: Estimator) -> list[Finding]:
    """Against w(p) grad p for rewards of 0 and 1; against the documented target, or an independent estimator, for real ones."""
    if tested.setting is None:
        return _user_law(tested)
    if isinstance(tested.setting, Channels):
        return [_two_channels(tested.setting)]
    binary, real, cosines = [], [], []
    for logits_V, p_V in policies():
        slope_V = reward_gradient(SUCCESSES_V, logits_V)
        p = float(p_V @ np.array(SUCCESSES_V))
        for size in tested.sizes:
            where = f"G = {size}, p = {p:.2f}"
            weight = success_weight(tested.setting, size, p)
            binary.append((distance(expected_gradient(tested.call, SUCCESSES_V, p_V, size), (weight or 0.0) * slope_V), where))
            got_V = expected_gradient(tested.call, REWARDS_V, p_V, size)
            real.append((distance(got_V, _real_truth(tested.setting, logits_V, p_V, size)), where))
            cosines.append(alignment(got_V, reward_gradient(REWARDS_V, logits_V))[0])
    name = _weight_name(tested.setting)
    away = f"cosine with grad E[R] down to {min(cosines):.4f}"
    return [
        measured("oracle", largest(binary)[0], f"rewards 0 or 1: {name} grad p; worst: {largest(binary)[1]}"),
        measured("oracle", largest(real)[0], f"real rewards: {_real_name(tested.setting)}; {away}"),
    ]


def _real_truth(setting: Advantage, logits_V: np.ndarray, p_V: np.ndarray, size: int) -> np.ndarray:
    """What real rewards are documented to climb; without a closed form, the enumeration of the plain estimator."""
    match setting:
        case Reward() | LeaveOneOut():
            return reward_gradient(REWARDS_V, logits_V)
        case Mean():
            return (size - 1) / size * reward_gradient(REWARDS_V, logits_V)
        case PassAtK():
            return best_of_gradient(REWARDS_V, logits_V, setting.k)
        case _:
            return expected_gradient(plain(setting), REWARDS_V, p_V, size)


def _two_channels(setting: Channels) -> Finding:
    """Channels are normalised apart, so the sum climbs w(p) grad p of each with its weight."""
    weights = {"task": 1.0, "form": 0.5}
    pairs = {0: (1.0, 0.0), 1: (0.0, 0.0), 2: (0.0, 1.0), 3: (1.0, 1.0)}
    found = []
    for logits_V, p_V in policies():
        truth_V = np.zeros(len(p_V))
        for channel, name in enumerate(weights):
            rewards_V = [pairs[answer][channel] for answer in pairs]
            weight = success_weight(MeanStd(ddof=setting.ddof), 3, float(p_V @ np.array(rewards_V))) or 0.0
            truth_V += weights[name] * weight * reward_gradient(rewards_V, logits_V)

        def call(answers: Sequence[float]) -> list[float]:
            given: dict[str, Rewards] = {name: [pairs[int(a)][channel] for a in answers] for channel, name in enumerate(weights)}
            return channel_advantages(given, weights, ddof=setting.ddof)

        found.append(distance(expected_gradient(call, (0, 1, 2, 3), p_V, 3), truth_V))
    return measured("oracle", max(found), "two channels of 0 and 1: the sum over channels of weight * w(p) grad p, w that of mean_std")


def _user_law(tested: Estimator) -> list[Finding]:
    """Unbiased up to one factor per group size, or biased as its companion documents for rewards of 0 and 1."""
    found, worst, scales = [], (1.0, ""), {}
    for logits_V, p_V in policies():
        for size in tested.sizes:
            where = f"G = {size}, p = {p_V @ np.array(SUCCESSES_V):.2f}"
            got_V, truth_V = expected_gradient(tested.call, REWARDS_V, p_V, size), reward_gradient(REWARDS_V, logits_V)
            cosine, scale = alignment(got_V, truth_V)
            worst = min(worst, (cosine, where))
            first = scales.setdefault(size, scale)
            if tested.weight is None:
                found.append((distance(got_V, first * truth_V) if scale else math.inf, f"{where}: cosine {cosine:.4f}, length {scale:.4f}"))
                continue
            with cited():
                weight = float(tested.weight(float(p_V @ np.array(SUCCESSES_V)), size))
            found.append(
                (distance(expected_gradient(tested.call, SUCCESSES_V, p_V, size), weight * reward_gradient(SUCCESSES_V, logits_V)), where)
            )
    deviation, detail = largest(found)
    if tested.weight is None:
        remedy = "" if deviation <= CLOSE else f"; if the bias is meant, document it as {tested.name}_weight(p, size)"
        return [measured("oracle", deviation, f"real rewards: parallel to grad E[R], one factor per group size; {detail}{remedy}")]
    note = f"real rewards: cosine with grad E[R] down to {worst[0]:.4f} ({worst[1]}), not promised"
    return [measured("oracle", deviation, f"rewards 0 or 1: the documented w(p) grad p; worst: {detail}"), absent("oracle", note)]


def _weight_name(setting: Advantage) -> str:
    names = {
        "none": "1",
        "leave_one_out": "1",
        "mean": "(G - 1) / G",
        "max_rl": "(1 - (1 - p)^(G - 1)) / p",
        "pass_at_k": "k (1 - p)^(k - 1)",
    }
    return names.get(setting.kind, "w(p), a binomial sum,")


def _real_name(setting: Advantage) -> str:
    names = {"none": "grad E[R]", "leave_one_out": "grad E[R]", "mean": "(G - 1) / G grad E[R]", "pass_at_k": "grad E[best of k]"}
    return names.get(setting.kind, "biased, as the definition in plain Python")


def target(setting: Advantage) -> str:
    """What the expected gradient climbs, in words."""
    own = {
        "batch": "no objective in general; with equal lengths that of mean_std over the step",
        "channels": "no objective in general; for 0/1 channels the weighted sum of what mean_std climbs in each",
    }
    return own.get(setting.kind) or TARGETS[setting.kind]  # type: ignore[index]


# --- conservation and reduction --------------------------------------------------------------------------------------------------------


def conservation_law(tested: Estimator) -> list[Finding]:
    """One finite number per sibling, the same for the same reward; where promised: zero sums, nothing from equal rewards, order kept."""
    found = []
    centred = isinstance(tested.setting, (Mean, MeanStd, LeaveOneOut, MaxRL, Batch, Channels))
    silent = tested.setting is not None and not isinstance(tested.setting, Reward)
    for group in (group for group in GROUPS if _fits(tested, group)):
        got = tested.call(list(group))
        pairs = sorted(zip([0.0 if r is None else r for r in group], got, strict=True))
        unlike = max((abs(a - b) for (r, a), (s, b) in zip(pairs, pairs[1:], strict=False) if r == s), default=0.0)
        found.append((unlike if np.isfinite(got).all() else math.inf, f"{group}: equal rewards, equal advantages"))
        if tested.setting is not None:
            falls = max((a - b for (r, a), (s, b) in zip(pairs, pairs[1:], strict=False) if r < s), default=0.0)
            found.append((max(falls, 0.0), f"{group}: a higher reward, no lower advantage"))
        if centred:
            found.append((abs(math.fsum(got)) / 10, f"{group}: the advantages sum to 0"))
        if silent and len(set(group)) == 1:
            found.append((math.inf if any(got) else 0.0, f"{group}: equal rewards give exactly 0"))
    deviation, detail = largest(found)
    return [measured("conservation", deviation, detail, 1e-12)]


def reduction_law(tested: Estimator) -> list[Finding]:
    """Where one estimator is another."""
    if tested.setting is None:
        return [absent("reduction", "no limit at which a user's function becomes another one is known")]
    found = [(distance(left, right), text) for text, left, right in _reductions(tested, tested.setting)]
    if not found:
        return [failed("reduction", "no reduction is listed for this estimator")]
    deviation, detail = largest(found)
    texts = "; ".join(dict.fromkeys(text for _, text in found))
    return [measured("reduction", deviation, texts if deviation <= CLOSE else detail)]


def _reductions(tested: Estimator, setting: Advantage) -> Iterator[tuple[str, list[float], list[float]]]:
    group: Rewards = [0.3, 0.9, 0.1, 0.9]
    pair: Rewards = [1.0, 0.0]
    n = len(group)
    mean = group_advantages(group, "mean")
    match setting:
        case Reward():
            yield "a group of one: its reward", tested.call([0.7]), [0.7]
        case Mean():
            yield "(G - 1) / G of leave_one_out", tested.call(group), [(n - 1) / n * a for a in group_advantages(group, "leave_one_out")]
        case LeaveOneOut():
            yield "G / (G - 1) of mean", tested.call(group), [n / (n - 1) * a for a in mean]
        case PassAtK():
            best = group_advantages(group, "pass_at_k", k=1)
            yield "k = 1: leave_one_out", best, group_advantages(group, "leave_one_out")
        case MeanStd():
            spread = float(np.std(np.array(group, dtype=float), ddof=setting.ddof)) + setting.eps
            yield "mean over the spread", tested.call(group), [a / spread for a in mean]
            other = group_advantages(group, "mean_std", ddof=1 - setting.ddof, eps=0.0)
            factor = math.sqrt(n / (n - 1)) ** (1 if setting.ddof == 0 else -1)
            same = group_advantages(group, "mean_std", ddof=setting.ddof, eps=0.0)
            yield "ddof 0 is sqrt(G / (G - 1)) of ddof 1", same, [factor * a for a in other]
        case MedianMAD():
            yield "pairs: mean_std", tested.call(pair), group_advantages(pair, "mean_std", eps=setting.eps)
        case MaxRL():
            yield "pairs of 0 and 1: leave_one_out", tested.call(pair), group_advantages(pair, "leave_one_out")
            yield "divided by the mean: mean", tested.call(group), [a / float(np.mean(np.array(group, dtype=float))) for a in mean]
        case Batch():
            yield "one group of equal lengths: mean_std", tested.call(group), group_advantages(group, "mean_std", eps=setting.eps)
        case Channels():
            yield "one channel: mean_std", tested.call(group), group_advantages(group, "mean_std", ddof=setting.ddof)
            trap = channel_advantages({"f1": [1.0, 0.0], "cost": [-0.05, 0.0]}, {"f1": 1.0, "cost": 1.0}, ddof=setting.ddof, eps=0.0)
            yield "the trap: opposite channels cancel exactly", trap, [0.0, 0.0]
