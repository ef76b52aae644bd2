"""A named algorithm in words and numbers: its axes, what sets it apart from GRPO, what it really optimises. Torch-free.

Nothing here knows an algorithm by name. Axes and differences are read off two `Objective`s, what a choice means is the first line of its
class's docstring, and the numbers come from the functions that training runs.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.objectives.advantages import TARGETS, geometry, success_weight
from posttrain.objectives.algorithms import ALGORITHMS, Algorithm, algorithm
from posttrain.objectives.axes import KL, EarlyExit, MeanStd, MedianMAD
from posttrain.objectives.objective import Objective, check_siblings, warnings
from posttrain.objectives.placements import DESCENDS
from posttrain.objectives.weight_report import weight_report

LENGTHS, PROMPTS = (40, 12, 9), ("first", "first", "second")
"""The responses of the weight table: tokens and prompt of each (spec/book-2 item 86)."""
SIBLINGS = 8
"""Group size of the numbers when the method names none."""

MEANINGS: dict[str, dict[str, str]] = {
    "ratio": {
        "none": "no ratio: the gradient of log pi as it stands",
        "token": "each token's probability against what it was",
        "sentence": "geometric mean of the token ratios of a sentence",
        "sequence": "geometric mean of the token ratios of the whole response",
    },
    "against": {
        "old": "the policy before the phase's first update",
        "behaviour": "what the sampler recorded: staleness and mismatch in one factor",
    },
    "aggregation": {
        "token_mean": "1 / tokens of the step: every token the same, a long response counts more",
        "seq_mean_token_mean": "1 / (responses x its length): every response counts once, a token of a long one less",
        "seq_mean_token_sum": "1 / responses: every token the same; the scale grows with length",
        "constant": "1 / a fixed number: every token the same, the scale does not depend on the step",
        "prompt_mean": "1 / (prompts x tokens of its prompt): every prompt counts once",
    },
    "subgroups": {
        "none": "all siblings of a prompt are compared",
        "length": "siblings are compared within the longer and the shorter half of their group",
    },
}
"""Axes whose members are plain names; the others are classes, which say themselves what they do."""
_NEEDS = {"outer": "cap"}
"""Settings that say nothing while the other one is unset."""


class Choice(NamedTuple):
    """One axis of an objective. Example: Choice("limit", "clip", "low 0.2, high 0.28", "PPO's pessimistic clip: ...")."""

    axis: str
    choice: str
    settings: str
    meaning: str

    @property
    def short(self) -> str:
        """Choice and settings: "clip (low 0.2, high 0.28)"."""
        return f"{self.choice} ({self.settings})" if self.settings else self.choice


def choices(objective: Objective) -> list[Choice]:
    """Every axis of `objective`, in the order of its fields."""
    found = []
    for axis in Objective.model_fields:
        value = getattr(objective, axis)
        if axis == "kind":
            continue
        if axis in MEANINGS:
            found.append(Choice(axis, value, "", MEANINGS[axis][value]))
        elif value is None or isinstance(value, str):  # surrogate: the name of a function
            found.append(Choice(axis, value or "none", "", "in place of ratio, limit and correction" if value else "not used"))
        elif isinstance(value, KL):
            found.append(Choice(axis, _kl(value), _kl_details(value), _descends(value)))
        elif hasattr(value, "kind"):
            found.append(Choice(axis, value.kind, _settings(value), _summary(value)))
        else:  # entropy, repetition: a coefficient that is mostly 0
            used = value.coef > 0 or getattr(value, "target", None) is not None
            found.append(Choice(axis, "on", _settings(value), _summary(value)) if used else Choice(axis, "off", "", "not used"))
    return found


def differences(base: Objective, other: Objective) -> list[str]:
    """What changes from `base` to `other`, one line per setting.

    Example: from GRPO to DAPO: "limit.high 0.2 -> 0.28", "aggregation token_mean instead of seq_mean_token_mean",
    "kl none instead of k3 in loss x 0.04", "overlong ramp (buffer 0.2, scale 1) instead of none".
    """
    lines = []
    for before, after in zip(choices(base), choices(other), strict=True):
        old, new = getattr(base, after.axis), getattr(other, after.axis)
        if before.choice != after.choice:
            lines.append(f"{after.axis} {after.short} instead of {before.choice}")
        elif before.settings != after.settings:
            changed = [name for name in type(new).model_fields if getattr(old, name) != getattr(new, name)]
            lines += [f"{after.axis}.{name} {_show(getattr(old, name))} -> {_show(getattr(new, name))}" for name in changed]
    return lines


def explain(name: str, size: int | None = None) -> list[str]:
    """The whole page of one algorithm, as lines of text.

    Args:
        name: in any spelling that `algorithm` understands.
        size: siblings per prompt in the numbers; None: as many as the method asks for, otherwise 8.

    Raises:
        ConfigError: unknown name, or a size that the advantage cannot work with.
    """
    entry = algorithm(name)
    objective = Objective.load({"kind": entry.name})
    drawn = objective.drawing.cuts + 1 if isinstance(objective.drawing, EarlyExit) else entry.loop.get("siblings", SIBLINGS)
    size = int(drawn) if size is None else size
    try:
        check_siblings(objective, size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return [
        f"{entry.title}  ({entry.name})",
        *_part("Made for", [entry.targets]),
        *_part("Axes", [f"{c.axis:12} {c.short:28}  {c.meaning}" for c in choices(objective)]),
        *_part("Difference from GRPO", _from_grpo(entry, objective)),
        *_part("Source of the defaults", [entry.source]),
        *_part("KL", [f"{_kl(objective.kl)}: {_descends(objective.kl)}"]),
        *_part(*_expected(objective, size)),
        *_part(f"Who decides, responses of {' / '.join(map(str, LENGTHS))} tokens", _weights(objective)),
        *_part("Not together with", list(entry.avoid)),
        *_part("Watch", warnings(objective)),
        *_part("Run", [command(entry)]),
    ]


def explain_all() -> list[str]:
    """One line per algorithm: its name and the failure it was made for."""
    return _table([(entry.name, entry.targets) for entry in ALGORITHMS.values()])


def compare(first: str, second: str) -> list[str]:
    """The axes on which two algorithms differ, side by side, and the failure each was made for."""
    entries = [algorithm(first), algorithm(second)]
    ours, theirs = (choices(Objective.load({"kind": entry.name})) for entry in entries)
    rows = [(a.axis, a.short, b.short) for a, b in zip(ours, theirs, strict=True) if a.short != b.short]
    mine, other = (_loop(entry) or "-" for entry in entries)
    if mine != other:
        rows.append(("loop", mine, other))
    if not rows:
        return [f"{entries[0].name} and {entries[1].name} are the same on every axis"]
    return [
        *_table([("", entries[0].name, entries[1].name), *rows]),
        *[line for entry in entries for line in ("", f"{entry.name} was made for", f"  {entry.targets}")],
    ]


def setting(key: str) -> str:
    """Dotted name, within the recipe, of a setting of the loop: tries -> rl.tries. The critic's stand beside the loop's."""
    return key if key.startswith("critic.") else f"rl.{key}"


def command(entry: Algorithm) -> str:
    """The command line that trains with it. The loop's settings are spelled out, since an objective does not carry them."""
    loop = dict(entry.loop)
    if "minibatches" in loop:
        loop.setdefault("prompts", 4 * loop["minibatches"])  # prompts have to divide into minibatches
    flags = [f"--set {setting(key)}={_show(value)}" for key, value in loop.items()]
    return " ".join(["posttrain train rl", f"--set objective={entry.name}", *flags])


def _from_grpo(entry: Algorithm, objective: Objective) -> list[str]:
    lines = differences(Objective.load({"kind": "grpo"}), objective)
    loop = _loop(entry)
    return [*lines, *([f"loop: {loop}"] if loop and entry.name != "grpo" else [])] or ["none: this is GRPO"]


def _loop(entry: Algorithm) -> str:
    return ", ".join(f"{key} {_show(value)}" for key, value in entry.loop.items())


def _kl(kl: KL) -> str:
    if not kl.used:
        return "none"
    steered = "" if kl.target is None else f", steered to {kl.target:g} nats"
    return f"{kl.estimator} in {kl.placement} x {kl.coef:g}{steered}"


def _descends(kl: KL) -> str:
    return f"descends {DESCENDS[kl.placement, kl.estimator]}" if kl.used else "nothing pulls back to a reference"


def _kl_details(kl: KL) -> str:
    details = [f"k {kl.k}"] if kl.estimator == "top_k" else []
    return ", ".join([*details, *(["dtype float64"] if kl.used and kl.dtype == "float64" else [])])


def _expected(objective: Objective, size: int) -> tuple[str, list[str]]:
    """Heading and lines: what the group's advantages climb in expectation, and what the estimator makes of 0/1 rewards."""
    advantage = objective.advantage
    if advantage.kind not in TARGETS:  # no closed rule within a group
        return "Advantage", [_summary(advantage)]
    how: Any = advantage.kind
    settings = {"ddof": getattr(advantage, "ddof", 0), "k": getattr(advantage, "k", 1)}
    if isinstance(advantage, MeanStd | MedianMAD):
        settings["eps"] = advantage.eps
    rows = geometry(size, how, **settings)
    shown = [rows[n] for n in sorted({1, size // 4, size // 2, size - 1}) if 0 < n < size]
    chances = (0.1, 0.5, 0.9)
    slopes = [f"{success_weight(how, size, p, **settings):.3g} at p = {p:g}" for p in chances]
    return f"What the expected gradient climbs, {size} siblings", [
        TARGETS[how],
        *_table(
            [
                (f"successes of {size}", *(str(row.successes) for row in shown)),
                ("largest |A|", *(f"{row.max_abs:.3f}" for row in shown)),
                ("sum of A^2", *(f"{row.sum_squares:.3f}" for row in shown)),
            ]
        ),
        f"weight of grad p: {', '.join(slopes)}",
    ]


def _weights(objective: Objective) -> list[str]:
    report = weight_report(LENGTHS, [1.0] * len(LENGTHS), PROMPTS, objective.aggregation)
    note = ["the first two of one prompt, the third of another"] if objective.aggregation == "prompt_mean" else []
    return [
        *_table(
            [
                ("share of the update", *(f"{share:.1%}" for share in report.shares)),
                ("one token, against the longest's", *(f"{weight / report.token[0]:.2f}" for weight in report.token)),
            ]
        ),
        *note,
    ]


def _summary(value: Config) -> str:
    """The first line of a member's docstring: what the choice means."""
    return (inspect.getdoc(type(value)) or "").partition("\n")[0].rstrip(".")


def _settings(value: Config) -> str:
    """The settings of a member that have a value: "low 0.2, high 0.28"."""
    shown = []
    for name in type(value).model_fields:
        given = getattr(value, name)
        unset = given is None or given == {} or getattr(value, _NEEDS.get(name, name)) is None
        if name != "kind" and not unset:
            shown.append(f"{name} {_show(given)}")
    return ", ".join(shown)


def _show(value: Any) -> str:
    if isinstance(value, Config):
        return f"[{_settings(value)}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}".replace("e-0", "e-")
    if isinstance(value, str) and (value != value.strip() or not value.isprintable()):
        return repr(value)
    return "none" if value is None else str(value)


def _part(title: str, lines: list[str]) -> list[str]:
    """A blank line, a heading, and its lines; nothing when there are none."""
    return ["", title, *(f"  {line}" for line in lines)] if lines else []


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns aligned by spaces; the last one is left as long as it is."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows]
