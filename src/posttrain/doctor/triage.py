"""What a stage as a whole is, from its own curves: healthy, saturated, breakout loading, dead, collapsed, hacked, drifting, or unknown.

A flat reward looks the same in five of them. What tells them apart is how the groups split, where the level lies, and the held-out items:

    no group ever mixed, all wrong from the start              dead
    sparse, but the mixed groups or the held-out score move    breakout loading
    level near the ceiling, most groups all right              saturated
    groups unanimous away from the ceiling                     collapsed
    reward rises, held-out score falls                         hacked
    reward flat, held-out score rises                          healthy: the reward lags
    reward flat, groups vary, entropy alive                    breakout loading: wait

The rules are asked in a fixed order and the first that holds answers, so that two can never contradict each other. A rule whose metrics
were not recorded does not guess: it names what would tell.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from posttrain.doctor.changes import Fall, Trend, first_fall, scores_trend, trend
from posttrain.doctor.entries import Verdict
from posttrain.doctor.frame import Frame
from posttrain.doctor.windows import shown

FEWEST = 10
"""Rows below which a stage has no verdict of its own."""
SICK = frozenset(
    {Verdict.COLLAPSED, Verdict.DEAD, Verdict.HACKED, Verdict.DRIFTING, Verdict.BROKEN_SEAM, Verdict.INFRASTRUCTURE},
)
UNMEASURED = Trend("unknown")
UNANIMOUS, CEILING, VARYING, ALIVE = 0.8, 0.9, 0.2, 0.25
"""Share of unanimous groups that is most; reward near its ceiling; share of mixed groups that is enough; entropy relative to the start."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one stage is, why, and what would tell when it cannot be told.

    Example: Reading("grpo", Verdict.SATURATED, ("reward_mean 0.97 ...", "all_right 0.88 ..."))
    """

    stage: str
    verdict: Verdict | None
    why: tuple[str, ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that the rules ask for; None and unknown trends where nothing was recorded."""

    frame: Frame
    reward: Trend
    recent: Trend
    heldout: Trend
    fall: Fall | None
    level: float | None
    """Mean reward over the recent rows."""
    highest: float | None
    zero: float | None
    zero_first: float | None
    mixed: float | None
    mixed_ever: float | None
    """Mean share of mixed groups over the whole stage."""
    all_right: float | None
    nothing: float | None
    """Share of groups that are all wrong or without any answer."""
    mixed_reward: Trend
    entropy: float | None
    """Entropy of the recent rows relative to the first ones."""


def read_stage(frame: Frame, around: Trend = UNMEASURED) -> Reading:
    """The reading of one stage. `around` is how the score of its evaluations moved from before to after it (scores.py)."""
    if len(frame) < FEWEST:
        return Reading(frame.stage, None, (f"{len(frame)} {'row' if len(frame) == 1 else 'rows'}; fewer than {FEWEST} have no verdict",))
    if frame.kind == "rl":
        return _read_rl(frame, around)
    return _read_loss(frame, around)


def figures_of(frame: Frame, around: Trend = UNMEASURED) -> Figures:
    """What the rules of a policy-gradient stage look at."""
    reward = values(frame, "reward_mean")
    zero, mixed = values(frame, "zero_variance"), values(frame, "mixed")
    mixed = mixed if len(mixed) else 1 - zero
    zero = zero if len(zero) else 1 - mixed
    entropy = values(frame, "entropy")
    wrong, unparsed = recent(values(frame, "all_wrong")), recent(values(frame, "unanimous_unparseable"))
    start = first(entropy)
    return Figures(
        frame=frame,
        reward=trend(reward),
        recent=trend(reward[-max(FEWEST, len(reward) // 3) :]),
        heldout=heldout_trend(frame, around),
        fall=_unrecovered(first_fall(reward), recent(reward)),
        level=recent(reward),
        highest=float(reward.max()) if len(reward) else None,
        zero=recent(zero),
        zero_first=first(zero),
        mixed=recent(mixed),
        mixed_ever=float(mixed.mean()) if len(mixed) else None,
        all_right=recent(values(frame, "all_right")),
        nothing=None if wrong is None else wrong + (unparsed or 0.0),
        mixed_reward=trend(values(frame, "reward_mixed")),
        entropy=(recent(entropy) or 0.0) / start if start else None,
    )


def _unrecovered(fall: Fall | None, level: float | None) -> Fall | None:
    """A fall that the stage did not come back from; a dip is none."""
    if fall is None or level is None:
        return None
    return None if fall.peak - level <= max(0.05 * abs(fall.peak), 0.3 * (fall.peak - fall.after)) else fall


def heldout_trend(frame: Frame, around: Trend = UNMEASURED) -> Trend:
    """Direction of the held-out score: measured during the stage, or else before and after it."""
    scores, items = values(frame, "heldout_mean"), values(frame, "heldout_n")
    found = scores_trend(scores, float(np.median(items)) if len(items) else None)
    return found if found.known else around


def values(frame: Frame, metric: str) -> np.ndarray:
    """The known values of a metric; empty when it was not recorded."""
    column = frame.columns.get(metric)
    return np.empty(0) if column is None else column.values


def recent(y: np.ndarray) -> float | None:
    """Mean of the last tenth of the values (5 to 50 of them)."""
    return float(y[-min(50, max(5, len(y) // 10)) :].mean()) if len(y) else None


def first(y: np.ndarray) -> float | None:
    """Mean of the first tenth of the values (5 to 50 of them)."""
    return float(y[: min(50, max(5, len(y) // 10))].mean()) if len(y) else None


def moved(name: str, found: Trend) -> str:
    """A trend in words. Example: moved("reward_mean", Trend("rises", 0.4, 0.6, 90)) -> "reward_mean rises: 0.4 -> 0.6"."""
    return f"{name} {found.direction}: {shown(found.first)} -> {shown(found.last)}" if found.known else f"{name}: too few values"


def _read_rl(frame: Frame, around: Trend) -> Reading:
    f = figures_of(frame, around)
    if f.level is None:
        return Reading(frame.stage, None, ("the reward was not recorded",), ("reward_mean",))
    for rule in _RULES:
        found = rule(f)
        if found is not None:
            return found
    unknown = tuple(name for name, value in (("zero_variance", f.zero), ("entropy", f.entropy)) if value is None)
    unknown += () if f.heldout.known else ("heldout_mean",)
    return Reading(frame.stage, None, (moved("reward_mean", f.reward), *_split(f), "nothing else moves"), unknown)


def _said(f: Figures, verdict: Verdict, *why: str) -> Reading:
    unknown = () if f.heldout.known else ("heldout_mean",)
    return Reading(f.frame.stage, verdict, tuple(line for line in why if line), unknown)


def _dead(f: Figures) -> Reading | None:
    """Never a mixed group and every answer wrong: nothing can be learned, and nothing was."""
    if f.mixed_ever is None or f.mixed_ever > 0.02 or f.reward.direction == "rises" or f.heldout.direction == "rises":
        return None
    wrong = f.nothing >= 0.95 if f.nothing is not None else f.highest is not None and f.highest <= 0
    if not wrong:
        return None
    why = [f"groups with differing rewards: {f.mixed_ever:.1%} over the whole stage", *_split(f)]
    for metric, cause in (("truncated", "cut by the token budget"), ("unparseable", "without an answer in the required form")):
        share = recent(values(f.frame, metric))
        if share is not None and share > 0.5:
            why.append(f"{metric} {share:.0%}: the answers are {cause}, so whether they are wrong is not known; look there first")
    return _said(f, Verdict.DEAD, *why)


def _hacked(f: Figures) -> Reading | None:
    if f.heldout.direction != "falls" or f.reward.direction != "rises" or f.recent.direction == "falls":
        return None
    return _said(f, Verdict.HACKED, moved("reward_mean", f.reward), moved("held-out score", f.heldout))


def _saturated(f: Figures) -> Reading | None:
    if f.fall is not None or f.heldout.direction == "falls" or f.recent.direction == "falls":
        return None
    pinned = f.all_right >= 0.5 if f.all_right is not None else f.highest is not None and f.highest <= 1
    if not pinned or f.level is None or f.level < CEILING * max(1.0, f.highest or 0.0):
        return None
    return _said(f, Verdict.SATURATED, f"reward_mean {shown(f.level)} near its ceiling", *_split(f), _heldout(f))


def _collapsed(f: Figures) -> Reading | None:
    """Unanimous groups where there is still room, or a reward that went down with the entropy."""
    if f.fall is not None and f.entropy is not None and f.entropy < ALIVE and f.heldout.direction != "rises":
        return _said(f, Verdict.COLLAPSED, _fallen_words(f), f"entropy at {f.entropy:.0%} of its start", *_split(f))
    if f.zero is None or f.zero < UNANIMOUS or f.reward.direction == "rises" or f.heldout.direction == "rises":
        return None
    grew = f.zero_first is not None and f.zero - f.zero_first >= VARYING
    if not grew and f.zero < 0.95:
        return None
    if f.mixed_reward.direction == "rises":
        return None
    return _said(f, Verdict.COLLAPSED, *_split(f), moved("reward_mean", f.reward), _heldout(f))


def _fallen(f: Figures) -> Reading | None:
    if f.heldout.direction == "rises":
        return None
    if f.fall is not None:
        lost = f.fall.peak - (f.level or 0.0)
        start = f.reward.first if f.reward.known else 0.0
        deep = lost > 0.5 * abs(f.fall.peak - min(0.0, start))
        return _said(f, Verdict.COLLAPSED if deep else Verdict.DRIFTING, _fallen_words(f), *_split(f), _heldout(f))
    if f.heldout.direction == "falls":
        return _said(f, Verdict.DRIFTING, moved("held-out score", f.heldout), moved("reward_mean", f.reward))
    return None


def _rising(f: Figures) -> Reading | None:
    if f.reward.direction != "rises":
        return None
    sparse = f.zero is not None and f.zero >= UNANIMOUS and (f.level or 0.0) < 0.5
    verdict = Verdict.BREAKOUT_LOADING if sparse else Verdict.HEALTHY
    return _said(f, verdict, moved("reward_mean", f.reward), *_split(f), _heldout(f))


def _lag(f: Figures) -> Reading | None:
    if f.heldout.direction != "rises":
        return None
    if f.fall is not None or f.reward.direction == "falls":
        odd = "they disagree: see whether both are graded alike, and on like tasks"
        return Reading(f.frame.stage, None, (moved("held-out score", f.heldout), f"{moved('reward_mean', f.reward)}: {odd}"))
    return _said(f, Verdict.HEALTHY, moved("held-out score", f.heldout), f"{moved('reward_mean', f.reward)}: it lags, keep going")


def _breakout(f: Figures) -> Reading | None:
    """Flat, but alive: the groups vary and the entropy has not gone, or the mixed groups alone move."""
    if f.mixed_reward.direction == "rises":
        return _said(f, Verdict.BREAKOUT_LOADING, moved("reward_mixed", f.mixed_reward), moved("reward_mean", f.reward), *_split(f))
    if f.mixed is None or f.mixed < VARYING or f.entropy is None or f.entropy < ALIVE or f.reward.direction == "falls":
        return None
    patience = "flat with varying groups is lag: wait longer than the measured lag, or tens of steps, before judging"
    return _said(
        f, Verdict.BREAKOUT_LOADING, moved("reward_mean", f.reward), *_split(f), f"entropy at {f.entropy:.0%} of its start", patience
    )


_RULES: tuple[Callable[[Figures], Reading | None], ...] = (
    _dead,
    _hacked,
    _saturated,
    _collapsed,
    _fallen,
    _rising,
    _lag,
    _breakout,
)


def _split(f: Figures) -> list[str]:
    """How the groups of the recent rows split."""
    names = ("mixed", "zero_variance", "all_right", "all_wrong", "unanimous_partial", "unanimous_unparseable")
    known = [(name, recent(values(f.frame, name))) for name in names]
    parts = [f"{name} {share:.0%}" for name, share in known if share is not None]
    return ["groups of late: " + ", ".join(parts)] if parts else []


def _heldout(f: Figures) -> str:
    if not f.heldout.known:
        return "the held-out score was measured too seldom to tell whether the gain is real"
    return moved("held-out score", f.heldout)


def _fallen_words(f: Figures) -> str:
    if f.fall is None:
        return moved("reward_mean", f.reward)
    steps = f.frame.steps
    rows = f.frame.columns["reward_mean"].positions
    at, top = steps[int(rows[f.fall.position])], steps[int(rows[f.fall.peak_position])]
    return f"reward_mean fell from {shown(f.fall.peak)} (step {top}) at step {at}, {shown(f.level or 0.0)} of late"


_LOSSES = {"sft": "loss", "preference": "loss", "distill": "reverse_kl", "other": "loss"}


def _read_loss(frame: Frame, around: Trend) -> Reading:
    """Stages that descend a loss: it goes down, or it does not."""
    metric = _LOSSES.get(frame.kind, "loss")
    metric = metric if metric in frame.columns else "loss"
    y = values(frame, metric)
    if not len(y):
        return Reading(frame.stage, None, ("the loss was not recorded",), (metric,))
    found, heldout = trend(y), heldout_trend(frame, around)
    why = (moved(metric, found), *((moved("held-out score", heldout),) if heldout.known else ()))
    if found.direction == "rises":
        return Reading(frame.stage, Verdict.DRIFTING, why)
    if found.direction == "falls" or heldout.direction == "rises":
        return Reading(frame.stage, Verdict.HEALTHY, why)
    return Reading(frame.stage, None, why, () if heldout.known else ("heldout_mean",))
