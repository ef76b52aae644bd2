"""The in-process trainer: one optimizer step from any split of its work into micro-batches and ranks.

A policy and a critic are trained by the same class; what they differ in is what their loss is told about a batch, the scorer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.metrics import Max, Mean, Metric, Sum, merge
from posttrain.core.sampling import Sampling
from posttrain.engine.activation import computing, slow_precision
from posttrain.engine.batch import Batch
from posttrain.engine.gradients import norm_of, scale, sum_over
from posttrain.engine.machine import Machine
from posttrain.engine.memory import peak_mib
from posttrain.engine.nonfinite import Diverged, Place, Trace, broken, first_bad, in_order, rows_of
from posttrain.engine.optimizers import make_optimizer
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import score

if TYPE_CHECKING:
    from posttrain.engine.sharding import Shards

Scorer = Callable[[Any, Batch], Any]
"""What a model says about a batch, with gradient. Example: `values` of engine/values.py for a critic."""

LossFunction = Callable[[Batch, Any], tuple[Tensor, dict[str, Metric]]]
"""Scalar loss of one micro-batch from the batch and what the scorer returned, already divided by the denominator of the whole step, with
metrics that carry their reduction. It is called again for the same batch when a step fails, to find out where."""

DEFAULT = Machine()


class Optim(Config):
    """AdamW and its schedule. The learning rate must suit the model's size: 1e-6 teaches a small model nothing, 5e-4 without warm-up
    breaks it."""

    lr: float = Field(default=5e-5, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup: float = Field(default=0.1, ge=0, lt=1)
    """Share of the run's steps over which the rate rises to `lr`."""
    end: float = Field(default=0.0, ge=0, le=1)
    """Rate of the last step, as a share of `lr`; the constant schedule ignores it."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""

    def rate(self, step: int, total: int) -> float:
        """Learning rate of `step` in 0..total-1: rises over the first warmup * total steps, reaches end * lr exactly at the last.

        A single step after the warm-up keeps `lr`: it is first and last at once.

        Example: lr 1, linear, warmup 0.2, 10 steps: 0.5, 1.0 (warm-up over), 1.0, then down in equal parts to 0.0 at step 9.
        """
        rise = int(self.warmup * total)
        if step < rise:
            return self.lr * (step + 1) / rise
        if self.schedule == "constant" or total - rise < 2:
            return self.lr
        progress = (step - rise) / (total - 1 - rise)
        shape = 1 - progress if self.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.lr * (self.end + (1 - self.end) * shape)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A trainer's state, complete, whatever it is divided over.

    Example: weights {"model.norm.weight": ...}, the state dict of an optimizer of the kind "adamw", version 40.
    """

    weights: Mapping[str, Tensor]
    """The trainable parameters. Of one process that is not sharded these are the parameters themselves, not copies."""
    optimizer: Mapping[str, Any]
    kind: str
    version: int

    def save(self, folder: Path) -> None:
        """Into an existing folder."""
        save_file({name: tensor.contiguous() for name, tensor in self.weights.items()}, folder / "trainable.safetensors")
        torch.save({"optimizer": self.optimizer, "kind": self.kind, "version": self.version}, folder / "optimizer.pt")


class LocalTrainer:
    """Owns the weights while they change. `version` counts optimizer steps taken; `peak_mib` is the most memory that any process has taken.

    With machine.sharding "fsdp2" and several ranks, `model` holds only this rank's part: use it inside `reading`, and take `plain` when
    training is over. `step`, `reading`, `snapshot`, `save`, `restore`, `full_weights` and `plain` are then messages to all: every rank
    calls them, in the same order (`together` says whether it is so).

    Args:
        model: changed in place, in evaluation mode throughout: dropout would make a policy disagree with itself between two passes.
        total: optimizer steps of the whole run, for the schedule; must be at least 1.
        sampling: the distribution to score tokens under; the default scorer's only setting.
        scorer: what a loss function gets to see of a batch; by default the log-probabilities and entropies of a policy.
        machine: precision, memory and sharding; the defaults change nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Optim,
        total: int,
        ranks: Ranks,
        sampling: Sampling | None = None,
        scorer: Scorer | None = None,
        machine: Machine = DEFAULT,
    ):
        if total < 1:
            raise ConfigError("this run would take 0 optimizer steps; give it more data, more epochs or smaller batches")
        if machine.sharding == "fsdp2" and machine.optimizer != "adamw":
            raise ConfigError(
                f"machine.optimizer={machine.optimizer} cannot be divided with machine.sharding=fsdp2; use machine.optimizer=adamw, "
                "whose state fsdp2 divides over the processes"
            )
        self.model, self.optim, self.total, self.ranks, self.machine = model.eval(), optim, total, ranks, machine
        self.sampling = sampling or Sampling()
        self.scorer: Scorer = scorer or (lambda model, batch: score(model, batch, self.sampling))
        self.version = 0
        self.device = next(model.parameters()).device
        self.peak_mib = peak_mib(self.device)
        self._shards = _divide(model, ranks) if machine.sharding == "fsdp2" else None
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._held = self._shards.held(self.parameters) if self._shards else self.parameters
        self.optimizer = make_optimizer(
            machine.optimizer, list(self._held.values()), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )

    @property
    def together(self) -> bool:
        """Whether all ranks must take part in reading and saving."""
        return self._shards is not None

    @property
    def warning(self) -> str | None:
        """What a user should know about the machine before the run, in one line."""
        return slow_precision(self.machine, self.device)

    def step(self, batches: Sequence[Batch], loss_function: LossFunction) -> dict[str, Metric]:
        """One optimizer step over this rank's micro-batches; gradients and metrics are those of all ranks together.

        Raises Diverged, with the step not taken, when the loss or the gradient norm is not finite.
        """
        self._forget()
        todo = self._rounds(batches)
        with computing(self.model, self.machine):
            parts = [self._pass(batch, loss_function) for batch in todo]
        gathered = self.ranks.gather((parts, peak_mib(self.device)))
        self.peak_mib = max(peak for _, peak in gathered)
        merged = merge(part for of_rank, _ in gathered for part in of_rank)
        loss, norm = merged["loss"].read(), self._reduce_gradients()
        if loss is None or not math.isfinite(loss) or not math.isfinite(norm):
            losses = [[float(part["loss"].read() or 0.0) for part in of_rank] for of_rank, _ in gathered]
            raise self._diverged(todo, loss_function, losses, norm)
        rate = self.optim.rate(self.version, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._forget()
        self.version += 1
        return merged | {"loss": Mean(loss, 1.0), "grad_norm": Max(norm), "lr": Max(rate)}

    @contextmanager
    def reading(self) -> Iterator[nn.Module]:
        """The model as a step computes with it, for any number of passes without gradient: in the same precision, and complete.

        Old log-probabilities that were computed in another way than the new ones make a ratio that is not 1 before the first update.
        """
        with torch.no_grad(), computing(self.model, self.machine), self._shards.whole() if self._shards else nullcontext():
            yield self.model

    def full_weights(self) -> dict[str, Tensor]:
        """Every tensor of the model's state dict, complete, by name, to send to a sampler or to export. Where nothing is divided these are
        the model's own, not copies; where it is, call it outside of `reading`."""
        if self._shards:
            return self._shards.full()
        return {name: tensor.detach() for name, tensor in self.model.state_dict(keep_vars=True).items()}

    def plain(self) -> nn.Module:
        """An ordinary model with the weights as they are now: the model itself, or a complete copy where it is divided."""
        return self._shards.plain().eval() if self._shards else self.model

    def _rounds(self, batches: Sequence[Batch]) -> list[Batch | None]:
        """This rank's micro-batches. Where blocks are divided all ranks run them equally often, and None is a pass that counts nothing."""
        if self._shards is None:
            return list(batches)
        mine = [batch for batch in batches if len(batch.target_N)]
        return [*mine, *[None] * (max(1, *self.ranks.gather(len(mine))) - len(mine))]

    def _pass(self, batch: Batch | None, loss_function: LossFunction) -> dict[str, Metric]:
        """Forward and backward of one micro-batch; its metrics, loss included."""
        if self._shards is None:
            assert batch is not None
            loss, metrics = loss_function(batch, self.scorer(self.model, batch))
        else:
            loss, metrics = _divided_pass(self._shards, self.scorer, batch, loss_function)
        if loss.requires_grad:
            loss.backward()
        return metrics | {"loss": Sum(loss.item())}

    def _forget(self) -> None:
        """Drop all gradients."""
        for p in (*self.parameters.values(), *self._held.values()):
            p.grad = None

    def _gradients(self) -> dict[str, Tensor]:
        """What this rank holds of each gradient, handed to the optimizer; zeros where a parameter had no part, so that momentum goes on and
        ranks agree on what they send."""
        found: dict[str, Tensor] = {}
        for name, p in self.parameters.items():
            held = self._held[name]
            if self._shards is not None and p.grad is not None:
                held.grad = self._shards.local(p.grad)
            if held.grad is None:
                held.grad = torch.zeros_like(held)
            found[name] = held.grad
        return found

    def _reduce_gradients(self) -> float:
        """Sum gradients over ranks, clip to the norm bound, return the norm before clipping."""
        gradients = list(self._gradients().values())
        if self._shards is None:
            sum_over(self.ranks, gradients)
            norm = norm_of(gradients).item()
        else:  # summed already, each rank holding a part
            norm = self.ranks.sum_(norm_of(gradients).double().square()).sqrt().item()
        if norm > self.optim.clip:
            scale(gradients, self.optim.clip / norm)
        return norm

    def _diverged(
        self, todo: Sequence[Batch | None], loss_function: LossFunction, losses: Sequence[Sequence[float]], norm: float
    ) -> Diverged:
        """What to raise after a failed step: the gradients are still there, and the micro-batches can be computed again."""
        names = in_order(self.parameters, self.ranks.gather(broken(self._gradients())))
        by_loss = [first_bad(of_rank) for of_rank in losses]
        what: Literal["loss", "gradient"] = "gradient" if all(bad is None for bad in by_loss) else "loss"
        bad = by_loss[self.ranks.rank] if what == "loss" else self._replay(todo, loss_function)
        self._forget()
        mine = None if bad is None else Place(self.ranks.rank, bad, len(todo), rows_of(todo[bad]))
        found = sorted((p for p in self.ranks.gather(mine) if p is not None), key=lambda p: p.micro_batch)
        place = found[0] if found else None
        if place is not None and what == "gradient" and self._shards is not None:
            place = replace(place, process=None, rows=tuple(row for p in found for row in p.rows))
        total = sum(sum(of_rank) for of_rank in losses)
        return Diverged.at(Trace(self.version, what, total, norm, names, len(self.parameters), place), self.optim.lr)

    def _replay(self, todo: Sequence[Batch | None], loss_function: LossFunction) -> int | None:
        """Index of the first micro-batch whose gradient alone is not finite. Where blocks are divided all ranks find it together."""
        found = None
        with computing(self.model, self.machine):
            for index, batch in enumerate(todo):
                self._forget()
                self._pass(batch, loss_function)
                bad = bool(broken(self._gradients()))
                if self._shards is not None:
                    bad = any(self.ranks.gather(bad))
                if bad:
                    found = index
                    break
        return found

    def snapshot(self) -> Snapshot:
        """All that `restore` needs, the same for any division of it. Of a divided model it is empty on all ranks but the first."""
        weights = {name: p.detach() for name, p in self.parameters.items()}
        state = self.optimizer.state_dict()
        if self._shards:
            weights, state = self._shards.gathered(self.parameters, state)
        return Snapshot(weights, state, self.machine.optimizer, self.version)

    def save(self, folder: Path) -> None:
        """Trainable weights and optimizer state into an existing folder. A divided model: all ranks call it and the first writes."""
        state = self.snapshot()
        if self.ranks.first or not self.together:
            state.save(folder)

    def restore(self, folder: Path) -> None:
        """The inverse of `save`, on any number of ranks, sharded or not. Raises ConfigError when the checkpoint is of another kind."""
        stored = load_file(folder / "trainable.safetensors")
        if stored.keys() != self.parameters.keys():
            raise ConfigError(f"checkpoint '{folder}' holds other parameters than this model; resume with the settings it was made with")
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        if state.get("kind", "adamw") != self.machine.optimizer:
            raise ConfigError(
                f"checkpoint '{folder}' was made with machine.optimizer={state.get('kind', 'adamw')}, not {self.machine.optimizer}; "
                "resume with the optimizer it was made with"
            )
        if self._shards:
            stored, state["optimizer"] = self._shards.divided(self.parameters, stored, state["optimizer"])
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(stored[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]


def _divide(model: nn.Module, ranks: Ranks) -> Shards | None:
    """None when there is nobody to divide with."""
    if ranks.size == 1:
        return None
    from posttrain.engine.sharding import Shards  # not everybody's import

    return Shards(model, ranks)


def _divided_pass(shards: Shards, scorer: Scorer, batch: Batch | None, loss_function: LossFunction) -> tuple[Tensor, dict[str, Metric]]:
    """Loss and metrics of one micro-batch, or a loss of 0 for a rank without one; its backward pass runs through all blocks."""
    said = shards.score(scorer, batch)
    loss, metrics = (shards.anchor(said), {}) if batch is None else loss_function(batch, said)
    return (loss if loss.requires_grad else loss + shards.anchor(said)), metrics
