"""A small world in which a policy is trained by reinforcement learning: what is recorded follows from its state by drawing.

    state (skill, entropy, length, form, drift ...)  --draw groups-->  one metrics line  --signal-->  next state

The state moves by laws: those of a healthy shape, then those of a fault, which change the dynamics from a step on. No law writes a metric:
groups are drawn sibling by sibling, held-out scores item by item, so that shares are counts and carry their noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

Row = dict[str, float]


@dataclass(slots=True)
class State:
    """What a policy and its training are at a step. Laws change it; `observe` draws from it."""

    steps: int
    step: int = 0
    prompts: int = 24
    siblings: int = 8
    tries: float = 1.0
    """Dynamic sampling: at most this many times the prompts are drawn to fill a step with mixed groups."""
    skill: float = -0.6
    """Log-odds of success on a task of mean difficulty."""
    rate: float = 0.02
    """Gain of skill per step at full signal."""
    ceiling: float = 2.0
    spread: float = 1.3
    """Standard deviation of difficulty among tasks, in log-odds."""
    pool_spread: float | None = None
    """The same among the training prompts, where those are other than the held-out ones."""
    pool_shift: float = 0.0
    """Log-odds by which the training prompts are easier, or learned by heart."""
    certainty: float = 1.0
    """Multiplies log-odds: a policy that always gives one answer per task is surely right or surely wrong."""
    unlike: float = -0.1
    """Log-odds by which held-out tasks are harder."""
    entropy: float = 0.55
    entropy_end: float = 0.28
    sharpen: float = 0.012
    entropy_noise: float = 0.025
    length: float = 90.0
    """Median sampled tokens."""
    length_drift: float = 0.0
    """Relative growth per step."""
    length_sd: float = 0.35
    pool_length: float = 1.0
    """Training answers are this many times as long as held-out ones."""
    cap: float = 640.0
    length_limit: float = 1e9
    unparseable: float = 0.03
    control: float = 0.0
    errors: float = 0.0
    identical: float = 0.0
    """Chance that the sampler gives a sibling the first one's text, whatever the policy's entropy."""
    repetition: float = 0.02
    kl: float = 0.0
    kl_rate: float = 0.0012
    leash: float = 0.015
    """Share of the KL that the term pulls back per step."""
    gradient: float = 0.9
    lr: float = 1e-4
    schedule: str = "cosine"
    ratio_tail: float = 0.02
    """Log of the largest ratio, about."""
    clipped: float = 0.004
    mismatch: float = 2e-6
    lag: float = 0.0
    frozen: bool = False
    """Nothing that is updated changes what is sampled."""
    overlong_drop: bool = False
    trained_forced: bool = False
    trained_padding: bool = False
    forced: float = 0.0
    """Tool tokens per sampled token."""
    turns: float = 0.0
    calls: float = 0.0
    repeated_calls: float = 0.03
    malformed_calls: float = 0.02
    turn_capped: float = 0.02
    constant: float | None = None
    """Reward that the grader gives whatever it is shown."""
    pays: dict[str, float] = field(default_factory=dict)
    """Weights of reward channels besides correctness, by name."""
    gated: bool = False
    levels: dict[str, float] = field(default_factory=dict)
    """Mean of each such channel, 0 to 1."""
    wobble: dict[str, float] = field(default_factory=dict)
    """Spread of each such channel between siblings."""
    sample_s: float = 6.0
    train_s: float = 4.0
    checkpoint_s: float = 3.0
    save_every: int = 25
    rss: float = 3000.0
    peak: float = 3600.0
    highest: float = 0.0
    """Most memory taken so far: it follows the longest step."""
    gpu_util: float | None = None
    cov_eligible: float | None = None
    pulse_every: int = 10
    pulse_items: int = 200
    heldout_unparsed: float = 0.03
    heldout_extra: float = 0.0
    """Held-out tokens beyond those in training, in shares."""
    heldout_cap: float = 1e9
    heldout_loss: float = 0.0
    """Log-odds lost on held-out tasks while training goes on as before."""
    grader_lenient: float = 0.0
    """Log-odds that training answers gain without being right for an independent judge."""
    signal: float = 0.5
    """Share of mixed groups of the last step."""
    wander: float = 0.0
    grad_factor: float = 1.0
    starved: float = 0.0
    nan: tuple[str, ...] = ()


Law = Callable[[State, np.random.Generator], None]
"""What happens between two steps."""


def sigmoid(x: np.ndarray | float) -> np.ndarray:
    """The logistic function, safe for large arguments."""
    return 1.0 / (1.0 + np.exp(-np.clip(x, -40, 40)))


def learn(s: State, r: np.random.Generator) -> None:
    """One healthy update: skill follows signal, entropy shrinks towards where it ends, KL grows and is pulled back."""
    progress = s.step / max(1, s.steps)
    warm = min(1.0, (s.step + 1) / max(1.0, 0.05 * s.steps))
    s.lr = 1e-4 * warm * (0.5 * (1 + np.cos(np.pi * progress)) if s.schedule == "cosine" else 1.0)
    if s.frozen:
        return
    push = s.signal * s.lr / 1e-4
    s.wander = 0.9 * s.wander + 0.04 * r.standard_normal()
    s.skill += s.rate * push * max(0.0, 1 - s.skill / s.ceiling if s.skill > 0 else 1.0)
    s.entropy += s.sharpen * (s.entropy_end - s.entropy) + s.entropy_noise * s.entropy * 0.3 * r.standard_normal()
    s.entropy = max(s.entropy, 1e-3)
    s.kl = max(0.0, s.kl + s.kl_rate * push * (1 + 0.3 * r.standard_normal()) - s.leash * s.kl)
    s.length = float(np.clip(s.length * (1 + s.length_drift), 1.0, s.length_limit))


def run_rows(state: State, laws: Sequence[Law], rng: np.random.Generator) -> list[Row]:
    """The metrics lines of a run: at every step the laws, then what is observed."""
    rows = []
    for step in range(state.steps):
        state.step = step
        learn(state, rng)
        for law in laws:
            law(state, rng)
        rows.append(observe(state, rng))
    return rows


def observe(s: State, r: np.random.Generator) -> Row:
    """One line: groups are drawn until enough of them are mixed or the tries are spent."""
    groups = _groups(s, r, s.prompts)
    if s.tries > 1:
        more = _groups(s, r, int(s.prompts * s.tries))
        needed = np.flatnonzero(np.cumsum(more.mixed) >= s.prompts)
        groups = more.first(max(s.prompts, int(needed[0]) + 1 if len(needed) else len(more.mixed)))
    row = _shares(s, groups)
    s.signal = row["mixed"]
    row |= _update(s, row, r) | _behaviour(s, row, r) | _clocks(s, row, r)
    if s.step % s.pulse_every == 0:
        row |= _pulse(s, r)
    return row | {name: float("nan") for name in s.nan}


@dataclass(slots=True)
class Groups:
    """What the siblings of some groups did and were paid: one row per group."""

    lengths: np.ndarray
    reward: np.ndarray
    correct: np.ndarray
    cut: np.ndarray
    broken: np.ndarray
    failed: np.ndarray
    control: np.ndarray
    duplicate: np.ndarray
    parts: dict[str, np.ndarray]

    @property
    def mixed(self) -> np.ndarray:
        """Groups whose scored rewards differ."""
        high = np.where(self.failed, -np.inf, self.reward).max(axis=1)
        low = np.where(self.failed, np.inf, self.reward).min(axis=1)
        return high - low > 1e-9

    def first(self, n: int) -> Groups:
        """The first n groups."""
        arrays = {field.name: getattr(self, field.name)[:n] for field in fields(self) if field.name != "parts"}
        return Groups(**arrays, parts={name: values[:n] for name, values in self.parts.items()})


def _groups(s: State, r: np.random.Generator, many: int) -> Groups:
    """Siblings of some tasks; one that coincides with the first of its group did what that one did."""
    shape = (many, s.siblings)
    coincide = max(float(np.exp(-s.entropy * s.length)), s.identical)  # two samples of so many tokens
    source = np.where(r.random(shape) < coincide, 0, np.arange(s.siblings))

    def shared(values: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, source, axis=1)

    lengths = shared(np.maximum(1, s.length * s.pool_length * np.exp(s.length_sd * r.standard_normal(shape))))
    pool = s.spread if s.pool_spread is None else s.pool_spread
    odds = s.certainty * (s.skill + s.wander + s.grader_lenient + s.pool_shift + pool * r.standard_normal((many, 1)))
    broken, right = shared(r.random(shape) < s.unparseable), shared(r.random(shape) < sigmoid(odds))
    cut, control, failed = lengths > s.cap, r.random(shape) < s.control, r.random(shape) < s.errors
    correct = (right & ~cut & ~broken & ~control).astype(float)
    spreads = {name: s.wobble.get(name, 0.0) * 2 * np.sqrt(level * (1 - level)) for name, level in s.levels.items()}
    parts = {name: shared(np.clip(level + spreads[name] * r.standard_normal(shape), 0, 1)) for name, level in s.levels.items()}
    extra = sum((s.pays[name] * parts[name] for name in s.pays), np.zeros(shape))
    reward = correct * (1 + extra) if s.gated else correct + extra
    if s.constant is not None:
        reward = np.full(shape, s.constant)
    duplicate = (source == 0) & (np.arange(s.siblings) > 0)
    return Groups(np.minimum(lengths, s.cap), reward, correct, cut, broken & ~cut & ~failed, failed, control, duplicate, parts)


def _kinds(g: Groups) -> Row:
    """Shares of the kinds of groups; every group is of one."""
    mixed, blind = g.mixed, g.broken.all(axis=1)
    low = np.where(g.failed, np.inf, g.reward).min(axis=1)
    high = np.where(g.failed, -np.inf, g.reward).max(axis=1)
    agree = ~mixed & ~blind
    right, wrong = agree & (low >= 1) & np.isfinite(low), agree & (high <= 0) & np.isfinite(high)
    found = {"mixed": mixed, "unanimous_unparseable": ~mixed & blind, "all_right": right, "all_wrong": wrong}
    shares = {name: float(which.mean()) for name, which in found.items()}
    return shares | {"unanimous_partial": max(0.0, 1 - sum(shares.values())), "zero_variance": 1 - shares["mixed"]}


def _shares(s: State, g: Groups) -> Row:
    scored = ~g.failed
    reward, row = g.reward[scored], _kinds(g)
    row |= {"reward_mean": float(reward.mean()) if len(reward) else 0.0, "reward_std": float(reward.std()) if len(reward) else 0.0}
    mixed = g.mixed
    if (scored & mixed[:, None]).any():
        row["reward_mixed"] = float(g.reward[scored & mixed[:, None]].mean())
    what = {"truncated": g.cut, "unparseable": g.broken, "errors": g.failed, "control": g.control, "duplicates": g.duplicate}
    row |= {name: float(values.mean()) for name, values in what.items()}
    row["parsed"] = max(0.0, 1 - row["truncated"] - row["unparseable"] - row["errors"])
    lengths = g.lengths
    row |= {"length": float(lengths.mean()), "length_p50": float(np.median(lengths)), "length_p95": float(np.percentile(lengths, 95))}
    if g.correct[scored].any():
        row["tokens_per_correct"] = float(lengths.sum() / g.correct[scored].sum())
    if s.pays and len(reward):
        row |= _channels(s, g, reward, scored)
    kept = np.flatnonzero(mixed)[: s.prompts] if s.tries > 1 else np.arange(len(lengths))
    usable = (scored & ~(g.cut & s.overlong_drop)).sum(axis=1)
    row |= {"groups_generated": len(lengths), "groups_kept": len(kept), "tries_per_kept": len(lengths) / max(1, len(kept))}
    row |= {"rollouts_generated": lengths.size, "rollouts_kept": len(kept) * s.siblings}
    row |= {"survivors_median": float(np.median(usable)), "survivors_min": float(usable.min())}
    row |= {"dropped": float(1 - usable.sum() / lengths.size), "left_unscored": int(g.failed[kept].sum())}
    sampled = float(lengths[kept].sum())
    extra = s.forced * sampled if s.trained_forced else 0.02 * sampled if s.trained_padding else 0.0
    return row | {"tokens_sampled": sampled, "tokens_forced": s.forced * sampled, "tokens": sampled + extra}


def _channels(s: State, g: Groups, reward: np.ndarray, scored: np.ndarray) -> Row:
    parts = {"correct": g.correct[scored]} | {name: weight * g.parts[name][scored] for name, weight in s.pays.items()}
    total = float(reward.var())
    row = {"reward_primary": float(parts["correct"].mean())}
    for name, values in parts.items():
        scale = 1.0 if name == "correct" else s.pays[name]
        row |= {f"channel_{name}_mean": float(values.mean()) / scale, f"channel_{name}_std": float(values.std()) / scale}
        if total > 0:
            row[f"channel_{name}_share"] = float(np.mean((values - values.mean()) * (reward - reward.mean()))) / total
    return row


def _update(s: State, row: Row, r: np.random.Generator) -> Row:
    kept, live = row["groups_kept"], row["mixed"]
    grad = s.grad_factor * s.gradient * np.sqrt(live) * np.exp(0.15 * r.standard_normal())
    moved = s.step > 0
    ratio = float(np.exp(s.ratio_tail * np.exp(0.3 * r.standard_normal())))
    mismatch = s.mismatch * np.exp(0.2 * r.standard_normal())
    found = {
        "loss": 0.0 if live == 0 else float(0.01 * r.standard_normal() * np.sqrt(live)),
        "grad_norm": float(grad) if kept else 0.0,
        "entropy": float(s.entropy * np.exp(s.entropy_noise * r.standard_normal())),
        "kl": float(s.kl * np.exp(0.08 * r.standard_normal())) if moved else 0.0,
        "lr": float(s.lr),
        "ratio_max": ratio,
        "ratio_mean": 1.0,
        "clip_fraction": float(min(1.0, s.clipped * np.exp(0.4 * r.standard_normal()))) if s.clipped else 0.0,
        "mismatch_mean": float(mismatch / 12),
        "mismatch_max": float(mismatch),
        "ess_mismatch": float(1 / (1 + (mismatch / 6) ** 2)),
        "ess_staleness": float(1 / (1 + s.lag / 12)),
        "version_lag": s.lag,
        "repetition": float(min(1.0, max(0.0, s.repetition * np.exp(0.15 * r.standard_normal())))),
        "advantage_abs": float(0.85 * live),
        "fate_mismatched": float(min(1.0, s.starved * np.exp(0.1 * r.standard_normal()))),
        "fate_rejected": 0.0,
        "optimizer_step": s.step + 1,
    }
    return found | ({} if s.cov_eligible is None else {"cov_eligible": float(r.poisson(s.cov_eligible))})


def _behaviour(s: State, row: Row, r: np.random.Generator) -> Row:
    if not s.turns:
        return {}
    n = row["rollouts_generated"]

    def share(p: float) -> float:
        return float(r.binomial(int(n), min(1.0, max(0.0, p))) / n)

    return {
        "turns": float(1 + r.poisson(max(0.0, s.turns - 1) * n) / n),
        "calls": float(r.poisson(s.calls * n) / n),
        "repeated_calls": share(s.repeated_calls),
        "malformed_calls": share(s.malformed_calls),
        "turn_capped": share(s.turn_capped),
    }


def _clocks(s: State, row: Row, r: np.random.Generator) -> Row:
    """Times follow the tokens that were drawn and trained; what a fault adds multiplies them."""
    work = row["rollouts_generated"] * row["length"] / (s.prompts * s.siblings * 90.0)
    noise = np.exp(0.06 * r.standard_normal(2))
    found = {"seconds.sample": s.sample_s * work * noise[0], "seconds.train": s.train_s * max(0.1, row["tokens"] / 17000) * noise[1]}
    s.highest = max(s.highest, s.peak * (0.75 + 0.25 * work))
    found |= {"seconds.rss_mib": s.rss + 8 * abs(r.standard_normal()), "seconds.peak_mib": s.highest}
    if s.step % s.save_every == s.save_every - 1:
        found["seconds.checkpoint"] = s.checkpoint_s * noise[0]
    if s.gpu_util is not None:
        found["gpu_util"] = float(np.clip(s.gpu_util * noise[1], 0, 1))
    return {name: float(value) for name, value in found.items()}


def _pulse(s: State, r: np.random.Generator) -> Row:
    """Fixed held-out items, one sample each."""
    n = s.pulse_items
    lengths = s.length * (1 + s.heldout_extra) * np.exp(s.length_sd * r.standard_normal(n))
    cut = lengths > min(s.cap, s.heldout_cap)
    broken = r.random(n) < max(s.heldout_unparsed, s.unparseable)
    odds = s.certainty * (s.skill + s.unlike - s.heldout_loss + s.spread * r.standard_normal(n))
    right = (r.random(n) < sigmoid(odds)) & ~cut & ~broken
    return {
        "heldout_n": float(n),
        "heldout_mean": float(right.mean()),
        "heldout_truncated": float(cut.mean()),
        "heldout_parse_rate": float(1 - (cut | broken).mean()),
        "heldout_length": float(np.minimum(lengths, s.cap).mean()),
    }
