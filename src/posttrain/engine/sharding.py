"""A model divided over processes (FSDP2): each holds its part of every block, and of what is around the blocks, and borrows the rest.

    fully_shard(block 0) ... fully_shard(block n), then fully_shard(root): embedding, final norm, head, whatever is left

A block's weights are complete only while it computes; gradients come back as sums over processes, each process keeping its part. The
library wants its outermost module to be called, but what is scored here are parts of a model (its trunk, the weight of its head). So the
outermost one is a shell around the model, and what it is called with is the work to do inside.

Every process must run the blocks equally often: each pass is a message to all. `FILLER` is what a process without work passes on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves

from posttrain.engine.activation import blocks
from posttrain.engine.batch import Batch
from posttrain.engine.memory import return_freed
from posttrain.engine.processes import Ranks

T = TypeVar("T")

FILLER = Batch(
    ids_RW=torch.tensor([[0, 0]]),
    position_RW=torch.tensor([[0, 1]]),
    document_RW=torch.tensor([[0, 0]]),
    branch_RW=torch.tensor([[0, 0]]),
    source_N=torch.tensor([0]),
    target_N=torch.tensor([0]),
    slot_BT=torch.tensor([[0]]),
    advantage_BT=torch.zeros(1, 1),
    behaviour_BT=torch.zeros(1, 1),
    sample_B=(0,),
    prompt_tokens_B=torch.tensor([1]),
)
"""One token that no loss counts."""


class _Shell(nn.Module):
    """Runs work on the model with everything outside the blocks complete."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[nn.Module], Any]) -> Any:
        return work(self.model)


class Shards:
    """`model`, changed in place so that each of `ranks` holds its part.

    All methods but `local` are messages to all processes: every one must call them, in the same order.
    """

    def __init__(self, model: nn.Module, ranks: Ranks):
        self.model, self.ranks = model, ranks
        self._outline = outline(model)
        device = next(model.parameters()).device.type
        if device == "cpu":
            return_freed()
        mesh = init_device_mesh(device, (ranks.size,))
        shell = _Shell(model)
        for module in (*blocks(model), shell):
            fully_shard(module, mesh=mesh)
        self._shell: Any = shell
        self._parts: list[Any] = [module for module in shell.modules() if isinstance(module, FSDPModule)]
        for part in self._parts:
            # A loss carries the denominator of the whole step already: gradients add up, they are not averaged.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        self._shell.set_reduce_scatter_unused_params(True)
        self.run(lambda _: None)  # the first to run becomes the outermost
        self._shell.reshard()

    def run(self, work: Callable[[nn.Module], T]) -> T:
        """`work(model)`, in which the blocks may be run once each, with or without gradient."""
        return self._shell(work)

    def score(self, scorer: Callable[[Any, Batch], Any], batch: Batch | None) -> Any:
        """What `scorer` says about a micro-batch, or about `FILLER` when this process has none."""
        return self.run(lambda model: scorer(model, FILLER if batch is None else batch))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it the model is complete on every process, for any number of passes without gradient; nobody waits for anybody."""
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in self._parts:
                part.set_reshard_after_forward(part is not self._shell, recurse=False)
                part.reshard()

    def full(self) -> dict[str, Tensor]:
        """Every tensor of the model's state dict, complete, one at a time gathered; a tied weight is one tensor under its names."""
        found: dict[int, Tensor] = {}
        named: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in found:
                found[id(tensor)] = complete(tensor.detach())
            named[name] = found[id(tensor)]
        return named

    def plain(self) -> nn.Module:
        """An ordinary copy of the model, complete."""
        return filled(self._outline, self.full())

    def held(self, parameters: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """This process's part of each parameter, sharing its memory: what an optimizer updates, with the arithmetic of an undivided one."""
        return {name: nn.Parameter(self.local(p.detach())) for name, p in parameters.items()}

    def gathered(self, parameters: Mapping[str, Tensor], state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Parameters, and the state dict of an optimizer of what is held of them, complete: on the first process, which writes them. The
        others take part and keep nothing."""
        ordered = list(parameters.values())

        def kept(tensor: Tensor) -> Tensor:
            whole = complete(tensor)
            return whole if self.ranks.first else whole.new_empty(0)

        weights = {name: kept(p.detach()) for name, p in parameters.items()}
        return weights, _changed(state, lambda value, place: kept(part_of(ordered[place], value)))

    def divided(
        self, parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The inverse: weights divided like their parameters, and the state of what is held of them."""
        ordered = list(parameters.values())
        mine = {name: divided_like(weights[name], p) for name, p in parameters.items()}
        return mine, _changed(state, lambda value, place: self.local(divided_like(value, ordered[place])))

    @staticmethod
    def local(tensor: Tensor) -> Tensor:
        """The part of a tensor that this process holds; it shares its memory."""
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    @staticmethod
    def anchor(said: Any) -> Tensor:
        """0, connected to everything that was said with gradient, so that a backward pass runs through all blocks."""
        leaves = [leaf for leaf in tree_leaves(said) if isinstance(leaf, Tensor) and leaf.requires_grad]
        return torch.stack([leaf.nan_to_num().sum() * 0.0 for leaf in leaves]).sum()


def complete(tensor: Tensor) -> Tensor:
    """The whole of a divided tensor; a message to all. One that is not divided is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divided_like(whole: Tensor, like: Tensor) -> Tensor:
    """`whole`, divided as `like` is, when they have the same shape; no message is needed, since every process has all of it."""
    if not isinstance(like, DTensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def part_of(like: Tensor, held: Tensor) -> Tensor:
    """`held` as this process's part of a tensor divided as `like` is; a number that belongs to the whole parameter stays as it is."""
    if not isinstance(like, DTensor) or held.ndim == 0:
        return held
    return DTensor.from_local(held, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def outline(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters take no memory."""
    empty = {id(p): nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, dict(empty))


def filled(empty: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of an `outline` with these tensors, by name in the state dict, as its parameters."""
    given = {
        id(p): nn.Parameter(tensors[name].detach(), requires_grad=p.requires_grad)
        for name, p in reversed(list(empty.named_parameters(remove_duplicate=False)))
    }
    return copy.deepcopy(empty, dict(given))


def _changed(state: Mapping[str, Any], change: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """An optimizer's state dict with change(value, place of its parameter) in place of every tensor."""
    entries = {
        place: {name: change(value, place) if isinstance(value, Tensor) else value for name, value in entry.items()}
        for place, entry in state["state"].items()
    }
    return {**state, "state": entries}
