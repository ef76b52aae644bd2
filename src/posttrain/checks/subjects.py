"""An objective under test, the streams that it is tested on, and how it is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from posttrain.checks.coefficients import Row
from posttrain.checks.findings import Violation
from posttrain.core.seeds import numpy_rng
from posttrain.objectives.aggregate import aggregate
from posttrain.objectives.axes import Aggregation
from posttrain.objectives.objective import Objective
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.streams import Fate, Streams, Terms

Coefficient = Callable[[float, float], float]
"""Documented d surrogate / d logp of a user's objective, from log-ratio and advantage of the token."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An objective under test. `setting` is None for a user's function, of which only the loss is known."""

    name: str
    terms: Callable[[Streams], Terms]
    setting: Objective | None = None
    coefficient: Coefficient | None = None

    @property
    def aggregation(self) -> Aggregation:
        """How its values become a number; a user's function is summed."""
        return self.setting.aggregation if self.setting else "seq_mean_token_sum"


def subject(name: str, setting: Objective) -> Subject:
    """`policy_terms` under a setting."""
    return Subject(name, lambda streams: policy_terms(streams, setting), setting)


class Outcome(NamedTuple):
    """An answer and the gradients of its sum over the mask, by stream; zeros where the objective does not read one."""

    terms: Terms
    gradients: dict[str, Tensor]


DIFFERENTIABLE = ("logp_BT", "entropy_BT", "divergence_BT")


def outcome(tested: Subject, streams: Streams) -> Outcome:
    """Call an objective on fresh leaves and differentiate the sum of its trained slots."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in tensors(streams) if name in DIFFERENTIABLE}
    terms = tested.terms(replace(streams, **leaves))
    return Outcome(terms, _differentiate(torch.where(streams.mask_BT, terms.loss_BT, 0.0).sum(), leaves))


def aggregated_gradient(tested: Subject, streams: Streams, denominator: float = 1.0) -> np.ndarray:
    """Gradient of the aggregated loss by logp. The prompt of each row has 7 trained tokens."""
    leaf = streams.logp_BT.detach().clone().requires_grad_()
    terms = tested.terms(replace(streams, logp_BT=leaf))
    prompt_B = torch.full((len(leaf),), 7.0, dtype=torch.float64)
    loss = aggregate(terms.loss_BT, streams.mask_BT, tested.aggregation, denominator, prompt_B)
    return _differentiate(loss, {"logp_BT": leaf})["logp_BT"].numpy()


def _differentiate(loss: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    if not loss.requires_grad:  # nothing that the loss is made of depends on the policy
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found, strict=True)}


def tensors(streams: Streams) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every stream that is there, the mask included."""
    for field in fields(streams):
        value = getattr(streams, field.name)
        if value is not None:
            yield field.name, value


def guarded(function: Callable[[Streams], Tensor]) -> Callable[[Streams], Terms]:
    """A user's loss function as an objective; Violation when it raises, reduces, or edits its inputs."""

    def call(streams: Streams) -> Terms:
        # a leaf refuses to be edited; a copy shows that somebody tried
        given = replace(streams, **{name: value * 1 if value.requires_grad else value.clone() for name, value in tensors(streams)})
        before = {name: value.detach().clone() for name, value in tensors(given)}
        with cited():
            loss_BT = function(given)
        check_shape(loss_BT, streams.mask_BT.shape, "one unreduced value per token")
        check_untouched(before, dict(tensors(given)))
        if loss_BT.dtype != streams.logp_BT.dtype:
            raise Violation(f"returns {loss_BT.dtype} for {streams.logp_BT.dtype}; keep the precision that comes in")
        return Terms(loss_BT, streams.mask_BT.long(), {})

    return call


@contextmanager
def cited() -> Iterator[None]:
    """Turns whatever a user's function raises into a Violation of one line that holds the exception's own text."""
    try:
        yield
    except Violation:
        raise
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        raise Violation(f"raises {type(error).__name__}: {' '.join(str(error).split())}") from error


def check_shape(found: object, shape: tuple[int, ...], wanted: str) -> None:
    """Violation unless `found` is a tensor of this shape."""
    if not isinstance(found, Tensor):
        raise Violation(f"returns {type(found).__name__}; return a tensor with {wanted}")
    if tuple(found.shape) != tuple(shape):
        raise Violation(f"returns shape {tuple(found.shape)} for {tuple(shape)}; return {wanted}")


def check_untouched(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Violation when an input differs from its copy, NaN being equal to NaN."""
    for name, old in before.items():
        if not torch.equal(torch.nan_to_num(old.double(), nan=7e77), torch.nan_to_num(after[name].detach().double(), nan=7e77)):
            raise Violation(f"changes its input {name} in place; work on a copy")


# --- streams to test on ----------------------------------------------------------------------------------------------------------------

_MASK = ("111111", "110110", "001111", "010000", "000000", "101010", "111111", "111000")
"""Rows with holes (tool output), a late start, one token, and none at all."""
_LOG_RATIOS = tuple(math.log(x) for x in (1.0, 1.1, 0.9, 1.24, 1.3, 0.75, 0.7, 2.5, 0.3, 6.0, 0.98))
_ADVANTAGES = (1.0, -1.0, 0.5, -0.25, 2.0, -3.0, 0.0)
_STILL = (1, 3)
"""Rows whose sampler agrees with the trainer; row 3 has also not moved, so that bounds made for sequences keep something."""


def scene() -> Streams:
    """Eight rows of six tokens with ratios on both sides of every bound, both signs of advantage and every kind of mask; float64."""
    draw = numpy_rng(0, "certificate", "scene")
    size = (len(_MASK), len(_MASK[0]))
    mask_BT = torch.tensor([[slot == "1" for slot in row] for row in _MASK])
    logp_BT = draw.uniform(-4.0, -2.0, size)
    moved_BT = draw.choice(_LOG_RATIOS, size)
    mismatch_BT = draw.choice([math.log(x) for x in (1.0, 1.05, 0.95, 6.0, 0.4, 2.1, 0.7, 1.002)], size)
    moved_BT[3], mismatch_BT[list(_STILL)] = 0.0, 0.0

    def stream(values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Streams(
        logp_BT=stream(logp_BT),
        old_BT=stream(logp_BT - moved_BT),
        behaviour_BT=stream(logp_BT - moved_BT - mismatch_BT),
        advantage_BT=stream(draw.choice(_ADVANTAGES, size)),
        mask_BT=mask_BT,
        reference_BT=stream(logp_BT + draw.normal(size=size)),
        entropy_BT=stream(draw.uniform(0.1, 2.0, size)),
        sentence_BT=torch.arange(size[1]).expand(size) // 2,
        gate_BT=torch.tensor(draw.uniform(size=size) < 0.3),
        divergence_BT=stream(draw.uniform(0.0, 1.0, size)),
    )


def select_rows(streams: Streams, rows: list[int]) -> Streams:
    """The given rows, in the given order; a row may be named twice."""
    return replace(streams, **{name: value[rows] for name, value in tensors(streams)})


def rows_of(streams: Streams) -> list[Row]:
    """The trained tokens of every row, as plain numbers."""
    names = ("logp_BT", "old_BT", "behaviour_BT", "reference_BT", "advantage_BT", "sentence_BT", "gate_BT")
    tables = [getattr(streams, name) for name in names]
    return [Row(*(table[b, mask_T].tolist() for table in tables)) for b, mask_T in enumerate(streams.mask_BT)]


GARBAGE: dict[str, tuple[float, ...]] = {
    "NaN": (math.nan,),
    "+inf": (math.inf,),
    "-inf": (-math.inf,),
    "1e30": (1e30,),
    "a mixture": (math.nan, 88.0, -math.inf, -1e30, math.inf, 0.0, 1e30, -3.0),
}
"""What is written into untrained slots."""


def soiled(streams: Streams, what: str) -> Streams:
    """The same with garbage in every untrained slot of every stream."""
    junk = torch.tensor(np.resize(GARBAGE[what], streams.mask_BT.shape), dtype=torch.float64)
    changed: dict[str, Tensor] = {}
    for name, value in tensors(streams):
        if name == "mask_BT":
            continue
        if value.is_floating_point():
            changed[name] = torch.where(streams.mask_BT, value, junk)
        else:
            changed[name] = torch.where(streams.mask_BT, value, ~value if value.dtype == torch.bool else value * 0 - 1_000_003)
    return replace(streams, **changed)


def on_policy(streams: Streams) -> Streams:
    """Before any update, with a sampler that agrees, and nothing gated."""
    now_BT = streams.logp_BT.detach()
    return replace(streams, old_BT=now_BT, behaviour_BT=now_BT, gate_BT=None)


def fates(terms: Terms) -> dict[str, int]:
    """How many slots met each fate, those that none met left out."""
    counted = {fate.name: int((terms.fate_BT == fate).sum()) for fate in Fate}
    return {name: count for name, count in counted.items() if count}
