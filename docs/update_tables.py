"""Write the generated parts of docs/algorithms.md anew: `python docs/update_tables.py`, or `--check` to say which are out of date.

A generated part stands between `<!-- generated: NAME -->` and `<!-- end -->`. Its text comes from the settings and functions that training
runs, so that the page cannot say anything else: tables by running them, code by reading the source.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import get_args

import torch

from posttrain.objectives.advantages import TARGETS, geometry, success_weight
from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.axes import Aggregation, BinaryKL, Decoupled, Mask, NoCorrection, Truncate
from posttrain.objectives.explain import LENGTHS, MEANINGS, PROMPTS, choices
from posttrain.objectives.objective import Objective
from posttrain.objectives.placements import DESCENDS, REFUSED
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.streams import Fate, Streams
from posttrain.objectives.weight_report import weight_report

PAGE = Path(__file__).parent / "algorithms.md"
BLOCK = re.compile(r"(?P<head><!-- generated: (?P<name>[^\n]+?) -->\n)(?P<body>.*?)(?P<tail><!-- end -->)", re.DOTALL)
RATIOS = (1.3, 0.7, 1.0, 2.5)
"""Four tokens, each of probability 0.2 before."""


def updated(text: str) -> str:
    """The page with every generated part as it has to be."""
    return BLOCK.sub(lambda found: found["head"] + body(found["name"]) + found["tail"], text)


def stale(text: str) -> list[str]:
    """Names of the parts that are out of date."""
    return [found["name"] for found in BLOCK.finditer(text) if found["body"] != body(found["name"])]


@cache
def body(name: str) -> str:
    """One generated part: a table of TABLES, or "code MODULE.FUNCTION" with a function's source without its docstring."""
    kind, _, what = name.partition(" ")
    if kind == "code":
        return f"```python\n{code(*what.split('.'))}\n```\n"
    if name not in TABLES:
        raise ValueError(f"no generated part is called '{name}'; there are {', '.join(TABLES)} and 'code MODULE.FUNCTION'")
    return TABLES[name]() + "\n"


def code(module: str, function: str) -> str:
    """Source of a function of posttrain.objectives, without docstring."""
    source = inspect.getsource(importlib.import_module(f"posttrain.objectives.{module}"))
    (node,) = (n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == function)
    lines = source.splitlines()
    first = node.body[1] if ast.get_docstring(node) is not None else node.body[0]
    return textwrap.dedent("\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[first.lineno - 1 : node.end_lineno]))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars within a cell are escaped."""
    head, *body = ([cell.replace("|", "\\|") for cell in row] for row in (heads, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(heads), *body))


def number(value: float, digits: int = 4) -> str:
    """Up to `digits` decimals, without a signed zero."""
    return f"{round(value, digits) + 0.0:.{digits}f}".rstrip("0").rstrip(".")


# --- tables ----------------------------------------------------------------------------------------------------------------------------


def methods() -> str:
    """What each algorithm is for and where its settings come from."""
    return table(("name", "title", "made for", "source"), ((e.name, e.title, e.targets, e.source) for e in ALGORITHMS.values()))


def axes() -> str:
    """Algorithms x axes; the last column holds whatever is off by default."""
    rows = []
    plain = {choice.axis: choice.short for choice in choices(Objective.load({"kind": "grpo"}))}
    for entry in ALGORITHMS.values():
        of = {choice.axis: choice for choice in choices(Objective.load({"kind": entry.name}))}
        ratio = of["ratio"].choice + (" vs behaviour" if of["against"].choice == "behaviour" else "")
        advantage, *others = (of[axis].short for axis in ("advantage", "limit", "correction", "aggregation", "kl"))
        shown = ("advantage", "ratio", "against", "limit", "correction", "aggregation", "kl")
        extra = [f"{axis} {choice.short}" for axis, choice in of.items() if axis not in shown and choice.short != plain[axis]]
        extra += [f"{key} {value:g}" for key, value in entry.loop.items()]
        rows.append((entry.name, advantage, ratio, *others, ", ".join(extra) or "-"))
    return table(("name", "advantage", "ratio", "limit", "correction", "aggregation", "KL", "further"), rows)


def weights() -> str:
    """Who decides, per aggregation."""
    rows = []
    for how in get_args(Aggregation):
        report = weight_report(LENGTHS, [1.0] * len(LENGTHS), PROMPTS, how)
        two = weight_report((3, 7), (1.0, 1.0), ("p", "p"), how, constant=20.0)
        shares = ", ".join(f"{share:.1%}" for share in report.shares)
        token = ", ".join(f"{weight / report.token[0]:.2f}" for weight in report.token)
        rows.append((how, MEANINGS["aggregation"][how], shares, token, ", ".join(f"1/{1 / weight:.3g}" for weight in two.token)))
    heads = ("aggregation", "weight of a token", "shares of 40, 12, 9 tokens", "one token, against the longest's", "a token of 3, of 7")
    return table(heads, rows)


def gradients() -> str:
    """d loss / d log pi of four tokens, for both signs of the advantage; algorithms with the same row share it."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name in ALGORITHMS:
        objective = Objective.load({"kind": name, "kl": {"estimator": "none"}})
        row = tuple(number(value) for sign in (1.0, -1.0) for value in gradient(objective, sign, moved=True)[0])
        names.setdefault(row, []).append(name)
    heads = ["algorithms", *(f"A = {sign}1, ratio {ratio:g}" for sign in "+-" for ratio in RATIOS)]
    return table(heads, ((", ".join(found), *row) for row, found in names.items()))


def corrections() -> str:
    """Weight of four tokens on which trainer and sampler disagree."""
    members = (
        NoCorrection(), Truncate(), Truncate(level="sequence"), Mask(), Mask(lower=0.5, upper=2.0),
        Mask(lower=0.5, upper=2.0, sequence_lower=0.996, sequence_upper=1.001, weight="one"), Decoupled(), BinaryKL(),
    )  # fmt: skip
    rows = []
    for member in members:
        objective = Objective.load({"kind": "dr_grpo", "correction": member.model_dump()})
        shown = next(choice.short for choice in choices(objective) if choice.axis == "correction")
        slopes, fates = gradient(objective, 1.0, moved=False)
        left_out = sorted({Fate(fate).name.lower() for fate in fates if fate > Fate.TRAINED})
        rows.append((shown, *(number(-slope) for slope in slopes), ", ".join(left_out) or "-"))
    return table(("correction", *(f"kappa {kappa:g}" for kappa in RATIOS), "fate of what is left out"), rows)


def gradient(objective: Objective, advantage: float, moved: bool) -> tuple[list[float], list[int]]:
    """Gradient and fate of four tokens of one response. The policy has moved by RATIOS, or the sampler is off by them."""
    old = torch.full((1, len(RATIOS)), 0.2, dtype=torch.float64).log()
    shift = torch.tensor([RATIOS], dtype=torch.float64).log()
    logp = (old + shift if moved else old.clone()).requires_grad_()
    streams = Streams(
        logp_BT=logp,
        old_BT=old,
        behaviour_BT=old if moved else old - shift,
        advantage_BT=torch.full_like(old, advantage),
        mask_BT=torch.ones_like(old, dtype=torch.bool),
        sentence_BT=torch.zeros_like(old, dtype=torch.long),
    )
    terms = policy_terms(streams, objective)
    (slope,) = torch.autograd.grad(terms.loss_BT.sum(), logp)
    return slope[0].tolist(), terms.fate_BT[0].tolist()


def placements() -> str:
    """What every estimator does in either place."""
    estimators = dict.fromkeys(estimator for _, estimator in (*DESCENDS, *REFUSED))

    def cell(placement: str, estimator: str) -> str:
        found = DESCENDS.get((placement, estimator))
        return f"descends {found}" if found else f"refused: {REFUSED[placement, estimator]}"

    return table(("estimator", "in the loss", "in the reward"), ((e, cell("loss", e), cell("reward", e)) for e in estimators))


def advantages() -> str:
    """What each group estimator climbs, and what it makes of 0/1 rewards of 8 siblings."""
    rows = []
    for how, target in TARGETS.items():
        k = 4 if how == "pass_at_k" else 1
        found = geometry(8, how, k=k)
        shown = [found[successes] for successes in (1, 4, 7)]
        slopes = ", ".join(number(success_weight(how, 8, p, k=k), 2) for p in (0.1, 0.5, 0.9))
        rows.append(
            (
                how,
                target,
                ", ".join(number(row.max_abs, 2) for row in shown),
                ", ".join(number(row.sum_squares, 2) for row in shown),
                slopes,
            )
        )
    heads = ("advantage", "the expected gradient climbs", "largest |A|: 1, 4, 7 of 8", "sum of A^2", "weight of grad p: p = .1, .5, .9")
    return table(heads, rows)


TABLES: dict[str, Callable[[], str]] = {
    "methods": methods,
    "axes": axes,
    "weights": weights,
    "gradients": gradients,
    "corrections": corrections,
    "placements": placements,
    "advantages": advantages,
}


def main(arguments: Sequence[str], page: Path = PAGE) -> int:
    """Write the page, or with --check report what is out of date; the exit status is 1 when something is."""
    text = page.read_text(encoding="utf-8")
    old = stale(text)
    if "--check" in arguments:
        sys.stdout.write("".join(f"{page.name}: '{name}' is out of date; run python docs/update_tables.py\n" for name in old))
        return int(bool(old))
    page.write_text(updated(text), encoding="utf-8")
    sys.stdout.write(f"{page.name}: {len(old)} part(s) changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
