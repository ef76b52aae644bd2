"""What decides a comparison, written down before it runs: metric, direction, budget, arms, seeds, and the smallest effect that matters.

Choosing the metric after the race is picking the winner. A registration is one JSON file that is never written again and that carries its
own digest; a comparison that names it either follows it, or is exploratory and says in which field it differs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.core.digest import digest
from posttrain.core.errors import ConfigError, RunError, StorageError
from posttrain.core.files import encode_line
from posttrain.runs.ledger import parse, read_bytes, short
from posttrain.runs.manifest import now
from posttrain.stats.power import SigmaEstimate, min_detectable_effect, seeds_needed

SCHEMA = 1
MOST = 10**9


@dataclass(frozen=True, slots=True)
class Prereg:
    """A comparison as it was announced.

    Example: Prereg("2026-01-01T00:00:00+00:00", "pass@1", True, "arithmetic", {"steps": 100}, ("gspo", "cispo"), seeds=3, min_effect=0.02)
    """

    at: str
    metric: str
    higher: bool
    """Whether more is better."""
    suite: str
    """Evaluation suite of the metric; empty for a metric of the training log."""
    budget: Mapping[str, float]
    """What every arm may spend: steps, rollouts, tokens or seconds."""
    arms: tuple[str, ...]
    seeds: int
    """Runs per arm, each with a seed of its own."""
    min_effect: float
    """The smallest difference that would matter, in units of the metric."""
    sigma: float | None = None
    """Standard deviation from seed to seed of earlier runs, and from how many."""
    sigma_runs: int | None = None

    def __post_init__(self) -> None:
        if not self.metric or len(self.arms) < 2 or len(set(self.arms)) < len(self.arms):
            raise ConfigError(
                f"a comparison needs a metric and two or more different arms, got '{self.metric}' and {', '.join(self.arms) or 'none'}"
            )
        if not self.budget or not all(math.isfinite(value) and value > 0 for value in self.budget.values()):
            raise ConfigError("a comparison needs a budget above 0, such as steps=100")
        if not 1 <= self.seeds < MOST or not (math.isfinite(self.min_effect) and self.min_effect > 0) or (self.sigma_runs or 0) >= MOST:
            raise ConfigError(f"seeds {self.seeds} and min-effect {self.min_effect} must both be above 0")
        if (self.sigma is None) != (self.sigma_runs is None):
            raise ConfigError("sigma comes with the number of runs that it was estimated from; give both or neither")

    @property
    def digest(self) -> str:
        """Identity of everything that was registered, the time included."""
        return digest(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """The registration without its digest."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"schema": SCHEMA, **plain, "budget": dict(self.budget), "arms": list(self.arms)}


@dataclass(frozen=True, slots=True)
class Conduct:
    """A comparison as it was carried out.

    Example: Conduct("pass@1", "arithmetic", {"gspo": {"steps": 100}}, {"gspo": (0, 1, 2)}, started="2026-01-02T00:00:00+00:00")
    """

    metric: str
    suite: str
    spent: Mapping[str, Mapping[str, float]]
    """Arm to what its runs spent at most, by kind of budget."""
    seeds: Mapping[str, Sequence[int | None]]
    started: str
    """When the first run began."""


def register(path: str | Path, prereg: Prereg) -> Prereg:
    """Write a registration to a new file that nobody may write to; RunError when the file exists."""
    path = Path(path)
    line = encode_line({**prereg.to_json(), "digest": prereg.digest})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    except FileExistsError:
        raise RunError(f"{path} exists; what was registered stays, register the new comparison under another name") from None
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}; make the place writable and try again") from None
    try:
        os.write(handle, line)
        os.fsync(handle)
    finally:
        os.close(handle)
    return prereg


def read_prereg(path: str | Path) -> Prereg:
    """The registration in a file; RunError when it is malformed or no longer what was registered."""
    path = Path(path)
    value = parse(read_bytes(path), str(path))
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise RunError(f"{path}: not a registration of schema {SCHEMA}; write one with posttrain prereg new")
    given = {name: value.get(name) for name in (f.name for f in fields(Prereg))}
    budget, arms = given["budget"], given["arms"]
    texts = all(isinstance(given[name], str) for name in ("at", "metric", "suite")) and isinstance(given["higher"], bool)
    numbers = _numbers(given["min_effect"]) and _counts(given["seeds"]) and isinstance(budget, dict) and _numbers(*budget.values())
    sigma = given["sigma"] is None or _numbers(given["sigma"])
    if not (texts and numbers and sigma and isinstance(arms, list) and all(isinstance(arm, str) for arm in arms)):
        raise RunError(f"{path}: a field of the registration has the wrong type; restore the file from a copy")
    if not (given["sigma_runs"] is None or _counts(given["sigma_runs"])) or _time(given["at"]) is None:
        raise RunError(f"{path}: 'sigma_runs' or 'at' is not what it should be; restore the file from a copy")
    try:
        made = Prereg(**{**given, "arms": tuple(arms)})
    except ConfigError as error:
        raise RunError(f"{path}: {error}") from None
    if value.get("digest") != made.digest:
        raise RunError(f"{path}: changed after it was registered: digest {made.digest}, registered {short(repr(value.get('digest')))}")
    return made


def new_prereg(metric: str, higher: bool, budget: str, arms: str, effect: str, *, seeds: int, suite: str = "") -> Prereg:
    """A registration from the texts of the command line, as of now.

    `budget` reads "steps=100,tokens=5e6", `arms` "a,b,c", `effect` "0.02" or, with the spread between the seeds of earlier runs and their
    number, "0.02:0.05:4". Raises ConfigError.
    """
    spent: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in budget.split(","))):
        name, equals, text = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"budget '{short(part)}' is not KEY=NUMBER, such as steps=100")
        spent[name.strip()] = _typed(text, "budget")
    named = tuple(name for arm in arms.split(",") if (name := arm.strip()))
    least, *spread = effect.split(":")
    if len(spread) not in (0, 2):
        raise ConfigError(f"min-effect '{short(effect)}' is not EFFECT or EFFECT:SIGMA:RUNS, such as 0.02 or 0.02:0.05:4")
    sigma, runs = (_typed(spread[0], "sigma"), int(_typed(spread[1], "the number of runs"))) if spread else (None, None)
    made = Prereg(now(), metric.strip(), higher, suite.strip(), spent, named, seeds, _typed(least, "min-effect"), sigma, runs)
    power_line(made)  # refuses a sigma that cannot plan anything, before it is written for good
    return made


def differing(prereg: Prereg, conduct: Conduct) -> list[str]:
    """Every field in which a comparison departs from its registration, with both values; [] when it follows it."""
    found = []
    if (conduct.metric, conduct.suite) != (prereg.metric, prereg.suite):
        found.append(f"metric: {_of(prereg.metric, prereg.suite)} registered, {_of(conduct.metric, conduct.suite)} used")
    if missing := [arm for arm in prereg.arms if arm not in conduct.seeds]:
        found.append(f"arms: {', '.join(missing)} registered, not run")
    if added := [arm for arm in conduct.seeds if arm not in prereg.arms]:
        found.append(f"arms: {', '.join(added)} run, not registered")
    for arm, seeds in conduct.seeds.items():
        if len(set(seeds)) != prereg.seeds:
            found.append(f"seeds of {arm}: {prereg.seeds} registered, {len(set(seeds))} run")
    for arm, spent in conduct.spent.items():
        for name, allowed in prereg.budget.items():
            if name not in spent:
                found.append(f"budget {name} of {arm}: {allowed:g} registered, not recorded")
            elif abs(spent[name] - allowed) > 1e-9 * allowed:
                found.append(f"budget {name} of {arm}: {allowed:g} registered, {spent[name]:g} spent")
    registered, started = _time(prereg.at), _time(conduct.started)
    if registered is None or started is None or started < registered:
        found.append(f"time: registered {prereg.at}, the first run began {short(conduct.started) or 'at an unknown time'}")
    return found


def power_line(prereg: Prereg) -> str:
    """Whether the budget can see the effect, or what is missing to say so."""
    if prereg.sigma is None or prereg.sigma_runs is None:
        return "whether the budget can see the effect is unknown: give --sigma, the spread between seeds of earlier runs, and --sigma-runs"
    sigma = SigmaEstimate("seed_to_seed", prereg.sigma, prereg.sigma_runs)
    needed, seen = seeds_needed(prereg.min_effect, sigma), min_detectable_effect(prereg.seeds, sigma)
    verdict = "can" if prereg.seeds >= needed else "cannot"
    return (
        f"{prereg.seeds} seed(s) per arm {verdict} see an effect of {prereg.min_effect:g} (80 % power, 95 %): it takes {needed}; "
        f"{prereg.seeds} see {seen:.3g}, with sigma {prereg.sigma:g} from {prereg.sigma_runs} runs"
    )


def prereg_lines(prereg: Prereg) -> list[str]:
    """A registration for the terminal."""
    spent = ", ".join(f"{name} {value:g}" for name, value in prereg.budget.items())
    better = "higher" if prereg.higher else "lower"
    return [
        f"registered {prereg.at}  digest {prereg.digest}",
        f"decided by {_of(prereg.metric, prereg.suite)}, {better} is better; the smallest effect that matters is {prereg.min_effect:g}",
        f"arms {', '.join(prereg.arms)}; {prereg.seeds} seed(s) each; budget {spent}",
        power_line(prereg),
    ]


def _of(metric: str, suite: str) -> str:
    return short(f"{metric} on {suite}" if suite else metric)


def _time(text: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return None
    return found if found.tzinfo is not None else None


def _typed(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{what} '{short(text)}' is not a number")
    return value


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 for value in values)


def _counts(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < MOST
