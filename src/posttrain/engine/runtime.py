"""What this machine offers and what is chosen from it, before torch is imported. Torch-free.

On a CPU: one thread per process, a process per core, passive waiting, float32. Idle OpenMP threads that spin make every small operation
wait for a scheduler slice as soon as another process wants the core (20 to 40 times slower); bfloat16 without hardware support is 8 to
15 times slower.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

MOST_PROCESSES = 4
"""More ranks than this gain little at the sizes a CPU trains."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Processes, threads each, waiting policy and precision of a run. Example: Runtime(processes=2, threads=1, cores=2)."""

    processes: int
    threads: int
    cores: int
    waiting: str = "PASSIVE"
    precision: str = "float32"

    def describe(self) -> str:
        """One line for the console and the manifest."""
        where = f"{self.processes} process(es) x {self.threads} thread on {self.cores} core(s)"
        return f"{where}, {self.waiting.lower()} waiting, {self.precision}"


def choose(processes: int | None = None) -> Runtime:
    """Pick processes and threads for this machine; `processes` overrides the number of processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Runtime(processes or min(cores, MOST_PROCESSES), 1, cores)


def prepare_environment() -> None:
    """Set the variables that OpenMP reads when torch is first imported, unless the user has set them."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
