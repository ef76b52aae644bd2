"""Preflight of one real step: every trainable tensor gets a gradient and moves, and what is saved computes the same when loaded again.

A step whose loss falls may still leave half of its tensors alone: an adapter that is not in the path, a block that is detached, an update
that is smaller than the spacing of the weights' type. So each tensor is asked by name. Adapters start with B = 0, which makes the gradient
of A exactly zero in the first step; they are given a second. Sources: spec/faults.md 34, 52; F5, F11, F14, P1, P12, P17 of the catalog.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.errors import StorageError
from posttrain.core.metrics import Metric
from posttrain.core.storage import Room, check_room
from posttrain.core.verdicts import Check
from posttrain.engine.nonfinite import Diverged
from posttrain.models.lora import is_lora, merged

SHOWN = 3
"""Tensors that a detail names; it counts all."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a few steps did to a model.

    Example: Stepped((2.31,), (0.8,), {"lm_head.weight": 0.4}, {"lm_head.weight": 1e-4})
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    """Of the gradient, before clipping."""
    gradients: Mapping[str, float]
    """Largest norm of each trainable tensor's gradient over the steps."""
    moved: Mapping[str, float]
    """Largest change of each trainable tensor."""
    broken: str | None = None
    """Why a step could not be taken."""


def take_steps(model: nn.Module, step: Callable[[], Mapping[str, Metric]]) -> Stepped:
    """Take one step with `step` (two with adapters) and look at every trainable tensor of `model`."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trainable.items()}
    losses, norms, broken = [], [], None
    with recorded_gradients(trainable) as gradients:
        for _ in range(2 if is_lora(model) else 1):
            try:
                metrics = step()
            except Diverged as error:
                broken = str(error)
                break
            losses.append(_number(metrics, "loss"))
            norms.append(_number(metrics, "grad_norm"))
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in trainable.items()}
    return Stepped(tuple(losses), tuple(norms), gradients, moved, broken)


@contextmanager
def recorded_gradients(parameters: Mapping[str, Tensor]) -> Iterator[dict[str, float]]:
    """Norm of the gradient of each parameter, the largest that a backward pass left; 0 for one that none reached."""
    found = dict.fromkeys(parameters, 0.0)

    def hook(name: str) -> Callable[[Tensor], None]:
        def look(p: Tensor) -> None:
            assert p.grad is not None
            found[name] = max(found[name], float(p.grad.norm()))

        return look

    handles = [p.register_post_accumulate_grad_hook(hook(name)) for name, p in parameters.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def loss_check(found: Stepped) -> Check:
    """Loss and gradient norm are finite."""
    finite = found.broken is None and all(math.isfinite(value) for value in (*found.losses, *found.norms)) and bool(found.losses)
    shown = ", ".join(f"loss {loss:.4g}, gradient norm {norm:.3g}" for loss, norm in zip(found.losses, found.norms, strict=True))
    detail = shown if found.broken is None else found.broken
    remedy = "look at the data of this step, lower the learning rate, and compare precision=float32"
    return Check("loss", finite, found.losses[0] if finite else None, None, detail or "no step was taken", remedy, ("S75", "F5", "F14"))


def gradient_check(found: Stepped) -> Check:
    """Every trainable tensor got a gradient, adapters included."""
    dead = [name for name, norm in found.gradients.items() if not norm > 0]
    detail = f"{len(found.gradients) - len(dead)} of {len(found.gradients)} trainable tensors got a gradient" + _named(dead)
    passed = bool(found.gradients) and not dead
    remedy = "a tensor without gradient is not in the path that is trained: check target modules, frozen blocks and detach()"
    return Check("gradients", passed, len(dead), 0, detail, remedy, ("S76", "P12"))


def moved_check(found: Stepped) -> Check:
    """Every tensor with a gradient has other values after the step."""
    still = [name for name, norm in found.gradients.items() if norm > 0 and found.moved[name] == 0.0]
    moved = [change for change in found.moved.values() if change > 0]
    detail = f"{len(moved)} of {len(found.moved)} trainable tensors moved" + _named(still)
    remedy = "train in float32: in 16 bits an update smaller than the spacing of the weights is lost"
    return Check("moved", not still and bool(moved), len(still), 0, detail, remedy, ("P12", "P17"))


def dtype_check(model: nn.Module, wanted: torch.dtype = torch.float32) -> Check:
    """What lies in memory is what was asked for: types of the weights, and the footprint of a model that says it is quantised."""
    kinds = Counter[torch.dtype]()
    size = 0
    odd, narrow = [], []
    for name, p in model.named_parameters():
        kinds[p.dtype] += p.numel()
        size += p.numel() * p.element_size()
        if p.is_floating_point() and p.dtype != wanted:
            odd.append(name)
        if p.requires_grad and p.dtype != torch.float32:
            narrow.append(name)
    shown = ", ".join(f"{count / 1e6:.3g}M {str(kind).removeprefix('torch.')}" for kind, count in kinds.most_common())
    detail = f"{size / 1e6:.4g} MB resident: {shown}"
    config: Any = model.config
    said = getattr(config, "quantization_config", None)
    problem = None
    if said is not None and all(kind.is_floating_point and kind.itemsize >= 2 for kind in kinds):
        problem = "; the config says that the model is quantised, and every weight lies here in 16 bits or more"
    elif narrow:
        problem = f"; {len(narrow)} trainable tensors are not float32" + _named(narrow)
    elif odd:
        problem = f"; {len(odd)} tensors are not {str(wanted).removeprefix('torch.')}" + _named(odd)
    return Check("dtype", problem is None, size, None, detail + (problem or ""), "load the model in the precision that was meant", ("P17",))


Save = Callable[[nn.Module, Any, Path], None]
Load = Callable[[str, torch.dtype], tuple[nn.Module, Any]]


def reload_check(model: nn.Module, tokenizer: Any, canary: Sequence[int], save: Save, load: Load) -> tuple[Check, Any]:
    """The finished model, saved and loaded again, gives the same logits to the last bit; also returns the tokenizer that came back."""
    whole = merged(copy.deepcopy(model))
    dtype = next(whole.parameters()).dtype
    with tempfile.TemporaryDirectory() as folder:
        save(whole, tokenizer, Path(folder))
        again, words = load(folder, dtype)
    gap = float((_logits(whole, canary) - _logits(again, canary)).abs().max())
    remedy = "compare the tensors of the saved folder with those of the model: tied weights, adapters and buffers are what gets lost"
    detail = f"logits after saving and loading differ by {gap:.2g} at most"
    return Check("reload", gap == 0.0, gap if math.isfinite(gap) else None, 0.0, detail, remedy, ("P1",)), words


def _logits(model: nn.Module, ids: Sequence[int]) -> Tensor:
    device = next(model.parameters()).device
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits.double().cpu()


def room_check(out: str | Path, room: Room, free: int | None = None) -> Check:
    """What a run would write fits on the disk."""
    remedy = "free space, lower machine.save_total_limit, or choose another --out"
    try:
        tight = check_room(out, room, free)
    except StorageError as error:
        return Check("disk", False, room.needed, free, str(error), "", ("F11",))
    return Check("disk", None if tight else True, room.needed, free, tight or f"{room} fits", remedy, ("F11",))


def _number(metrics: Mapping[str, Metric], name: str) -> float:
    value = metrics[name].read() if name in metrics else None
    return math.nan if value is None else float(value)


def _named(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"; not {', '.join(names[:SHOWN])}{more}"
