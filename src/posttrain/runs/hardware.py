"""What a run was computed with: machine, compute kernels, installed packages. Facts about this process, found without importing torch."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from posttrain.core.digest import digest

VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "MKL_NUM_THREADS",
    "MKL_CBWR",
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTHONHASHSEED",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
    "WORLD_SIZE",
)
"""Environment variables that change speed, rounding or what can be downloaded. Nothing else of the environment is stored."""


def environment() -> dict[str, str | None]:
    """The environment variables that matter; None where one is not set."""
    return {name: os.environ.get(name) for name in VARIABLES}


def cpu() -> dict[str, Any]:
    """Model, cores, cores this process may use, and memory; None for what cannot be found out."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": _cpu_model(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "usable": usable,
        "memory_bytes": _memory_bytes(),
    }


@lru_cache(maxsize=1)
def gpus() -> tuple[Mapping[str, str], ...]:
    """Name, memory and driver of every NVIDIA GPU, asked of the driver's own tool: asking torch would claim the device."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=10, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return tuple(dict(zip(("name", "memory", "driver"), row, strict=False)) for row in rows if len(row) == 3)


@lru_cache(maxsize=1)
def installed() -> Mapping[str, str]:
    """Version of every installed distribution by its normalised name; of one installed from a repository, with the commit."""
    found = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] if distribution.metadata else None
        if isinstance(name, str) and name:
            found.setdefault(name.lower().replace("_", "-"), f"{distribution.version}{_commit(distribution)}")
    return dict(sorted(found.items()))


def packages(names: tuple[str, ...]) -> dict[str, str | None]:
    """Versions of the named distributions, None for one that is not installed."""
    return {name: installed().get(name) for name in names}


def kernels() -> dict[str, Any]:
    """Threads, instruction set and libraries that torch computes with in this process; {} while torch is not loaded.

    Example: {"torch": "2.9.0", "threads": 1, "interop": 2, "capability": "AVX2", "mkl": True, "onednn": True, "build": "5f3a..."}
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    facts = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkl": torch.backends.mkl.is_available(),
        "onednn": torch.backends.mkldnn.is_available(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "build": digest(torch.__config__.show()),
    }
    return facts


def _commit(distribution: metadata.Distribution) -> str:
    """What follows the version of a distribution that did not come from an index, e.g. "@4f1c2a9"."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        return f"@{origin['vcs_info']['commit_id'][:12]}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or None


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
