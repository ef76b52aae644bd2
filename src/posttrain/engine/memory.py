"""How much memory a process has taken at most so far, and how it gives memory back."""

from __future__ import annotations

import ctypes
import resource
import sys
from pathlib import Path

import torch

MIB = 2**20
_M_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""


def peak_mib(device: torch.device) -> float:
    """Most memory in MiB that this process has held at any moment: resident on a CPU, allocated by torch on an accelerator.

    It never falls: a step that shows a higher figure than the one before it is where the peak was.
    """
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / MIB, 1)
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB, 1)


def resident_mib() -> float | None:
    """Memory in MiB that this process holds now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return round(pages * resource.getpagesize() / MIB, 1)


def return_freed() -> None:
    """Let this process return every freed tensor of 1 MiB or more to the system at once, from now on.

    By default glibc keeps up to 32 MiB pieces for later and what is left between them adds up: of a model divided over two processes, whose
    blocks come and go all the time, nothing was saved that way. Costs fresh pages for every large tensor. Does nothing with another libc.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, MIB)
