"""Several processes running the same loop, each on its share of the work: one per core on a CPU, or those torchrun started.

Every rank holds the whole model and sees the same plan; only the forward and backward work is divided, and gradients are summed. Rank 0
alone writes and talks to the user. Numbers are the same for the same number of ranks; another number of ranks changes the order of float
additions.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from posttrain.core.errors import PosttrainError
from posttrain.engine.runtime import prepare_environment

T = TypeVar("T")


class WorkerLost(PosttrainError):
    """Another process of this run is gone (killed, out of memory)."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the run's processes."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every size-th item, beginning with the rank-th."""
        return list(items[self.rank :: self.size])

    def interleave(self, mine: Sequence[T]) -> list[T]:
        """Undo `share`: everybody's items in the original order, on every rank."""
        parts = self.gather(list(mine))
        longest = max(len(part) for part in parts)
        return [part[i] for i in range(longest) for part in parts if i < len(part)]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def first_says(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        return self.gather(value)[0]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


def launch(body: Callable[..., T], size: int, *args: Any) -> T:
    """Run `body(ranks, *args)` on `size` processes and return what rank 0, this process, returns.

    `body` and `args` must be picklable when size > 1 (a module-level function; a script needs the `if __name__ == "__main__"` guard).
    Under torchrun the processes exist already and `size` is ignored.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _join_torchrun()
        try:
            return body(Ranks(dist.get_rank(), dist.get_world_size()), *args)
        finally:
            dist.destroy_process_group()
    if size == 1:
        return body(Ranks(), *args)
    with tempfile.TemporaryDirectory(prefix="posttrain-") as folder:
        meeting = os.path.join(folder, "meeting")
        prepare_environment()  # the workers read it when they import torch
        torch.set_num_threads(1)
        context = multiprocessing.get_context("spawn")
        workers = [context.Process(target=_worker, args=(body, rank, size, meeting, args), daemon=True) for rank in range(1, size)]
        for worker in workers:
            worker.start()
        try:
            _join(meeting, 0, size)
            return body(Ranks(0, size), *args)
        except RuntimeError as error:
            for worker in workers:
                worker.join(timeout=5)
            lost = [(rank, worker.exitcode) for rank, worker in enumerate(workers, start=1) if worker.exitcode not in (None, 0)]
            if not lost:
                raise
            rank, code = lost[0]
            last = Path(f"{meeting}.{rank}")
            words = f": {last.read_text(encoding='utf-8')}" if last.is_file() else ""
            raise WorkerLost(f"worker process {rank} ended with exit code {code}{words}; repeat the command with --resume") from error
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for worker in workers:
                worker.join(timeout=5)
                if worker.is_alive():
                    worker.terminate()


def _join_torchrun() -> None:
    """One GPU per process where there are any; what lies in main memory still travels over gloo."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


def _join(meeting: str, rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=FileStore(meeting, size), rank=rank, world_size=size)


def _worker(body: Callable[..., Any], rank: int, size: int, meeting: str, args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides when to stop
    torch.set_num_threads(1)
    _join(meeting, rank, size)
    try:
        body(Ranks(rank, size), *args)
    except PosttrainError as error:
        # most user errors meet every rank and rank 0 reports them; what only this one met is left for it to read
        Path(f"{meeting}.{rank}").write_text(str(error), encoding="utf-8")
        sys.exit(error.exit_code)
    except RuntimeError as error:
        if "Connection closed" in str(error) or "Connection reset" in str(error):
            os._exit(3)  # rank 0 is gone; it has reported, or was killed
        raise
