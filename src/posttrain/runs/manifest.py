"""The manifest of a run: everything outside the config that its numbers depend on, so that a run can be explained and repeated."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from posttrain import __version__
from posttrain.core.digest import digest

SCHEMA_VERSION = 1
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "datasets",
    "accelerate",
    "numpy",
    "scipy",
    "pydantic",
    "jinja2",
    "math-verify",
    "latex2sympy2-extended",
    "reasoning-gym",
    "gguf",
)
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE")
"""Environment variables that change speed, rounding or what can be downloaded. Nothing else of the environment is stored."""

_UNSET = object()
Difference = tuple[str, Any, Any]
"""Dotted name, value on one side, value on the other; a side without the name holds a marker that `shown` writes as "unset"."""


def build_manifest(
    *, config: Mapping[str, Any], command: Sequence[str], seeds: Mapping[str, Any], digests: Mapping[str, Any], parent: str | None = None
) -> dict[str, Any]:
    """The manifest record.

    `config` is the resolved config as plain JSON values, `digests` identify the inputs (data, model, chat template), `parent` names the
    run this one continues from. Fields that cannot be found out on this machine are None.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": _kind(config, command),
        "created": now(),
        "command": list(command),
        "parent": parent,
        "seeds": dict(seeds),
        "digests": dict(digests),
        "config_digest": digest(config),
        "posttrain": __version__,
        "code": code_state(Path(__file__).resolve().parent),
        "packages": {name: _package_version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {"model": _cpu_model(), "cores": os.cpu_count(), "memory_bytes": _memory_bytes()},
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }


def code_state(folder: Path) -> dict[str, Any]:
    """Revision of the git checkout that `folder` is tracked in: {"revision", "dirty", "diff_digest"}, each None outside a checkout.

    `diff_digest` identifies the uncommitted changes and is None when there are none.
    """
    unknown = {"revision": None, "dirty": None, "diff_digest": None}
    # An installed copy inside somebody else's checkout is ignored or untracked there: its revision would be the wrong one.
    if not _git(folder, "ls-files", "--", "."):
        return unknown
    revision, status, diff = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain"), _git(folder, "diff", "HEAD")
    if revision is None or status is None or diff is None:
        return unknown
    changes = hashlib.sha256(status + diff).hexdigest()[:16] if status else None
    return {"revision": revision.decode().strip(), "dirty": bool(status), "diff_digest": changes}


def shown(found: Sequence[Difference]) -> list[str]:
    """One line per difference, with both values.

    >>> shown(differences({"seed": 0, "sft": {"lr": 0.1}}, {"seed": 0, "sft": {"lr": 0.2, "epochs": 1}}))
    ['sft.epochs: unset -> 1', 'sft.lr: 0.1 -> 0.2']
    """
    return [f"{name}: {_shown(old)} -> {_shown(new)}" for name, old, new in found]


def value_or_none(value: Any) -> Any:
    """One side of a difference as JSON: None where the name is unset."""
    return None if value is _UNSET else value


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> list[Difference]:
    """(dotted name, value in `a`, value in `b`) of every difference, in name order. Lists are compared whole."""
    found: list[Difference] = []
    for key in sorted({*a, *b}):
        old, new = a.get(key, _UNSET), b.get(key, _UNSET)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differences(old, new, f"{prefix}{key}.")
        elif old is _UNSET or new is _UNSET or old != new:
            found.append((prefix + key, old, new))
    return found


def _shown(value: Any) -> str:
    return "unset" if value is _UNSET else repr(value)


def _kind(config: Mapping[str, Any], command: Sequence[str]) -> str | None:
    """What sort of run this is: the config says so, or else the subcommand it was started with."""
    named = config.get("recipe") or config.get("kind")
    if isinstance(named, str):
        return named
    return next((part for part in command[1:] if not part.startswith("-")), None)


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


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
