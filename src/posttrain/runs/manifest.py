"""The manifest of a run: everything outside the config that its numbers depend on, so that a run can be explained and repeated."""

from __future__ import annotations

import hashlib
import platform
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from posttrain import __version__
from posttrain.core.digest import digest, file_digest
from posttrain.runs.hardware import cpu, environment, gpus, installed, packages
from posttrain.runs.method import method_of

SCHEMA_VERSION = 2
"""1 had no id, method, installed packages or stored diff, and named its parent by a path alone. Both are read."""
READABLE = (1, 2)
MANIFEST, CONFIG = "manifest.json", "config.yaml"
PATCH = "code.diff"
"""File of a run with the uncommitted changes of the code that it was started from."""
MOST_PATCH = 1 << 20
"""Bytes of uncommitted changes that are kept; the digest is of all of them."""
MOST_UNTRACKED = 200
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
    "vllm",
    "ray",
    "bitsandbytes",
)
SURROUNDINGS = ("code", "packages", "installed", "python", "platform", "cpu", "gpus", "environment")
"""Sections that say where a run was computed rather than what: a resumed run compares them and records what has changed."""

_UNSET = object()
Difference = tuple[str, Any, Any]
"""Dotted name, value on one side, value on the other; a side without the name holds a marker that `shown` writes as "unset"."""


class Code(NamedTuple):
    """The checkout that the code came from, and its uncommitted changes as a patch.

    Example: Code({"revision": "29fc22...", "dirty": True, "diff_digest": "8c1f...", ...}, b"diff --git ...")
    """

    state: dict[str, Any]
    patch: bytes


def build_manifest(
    *,
    config: Mapping[str, Any],
    command: Sequence[str],
    seeds: Mapping[str, Any],
    digests: Mapping[str, Any],
    parent: Mapping[str, Any] | None = None,
    code: Code | None = None,
) -> dict[str, Any]:
    """The manifest record.

    `config` is the resolved config as plain JSON values, `digests` identify the inputs (data, model, chat template), `parent` describes the
    run this one starts from (lineage.py). Fields that cannot be found out on this machine are None. The id is drawn from the operating
    system: no stream of the training seed knows of it.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "id": secrets.token_hex(4),
        "kind": _kind(config, command),
        "created": now(),
        "command": list(command),
        "script": script(),
        "parent": None if parent is None else dict(parent),
        "seeds": dict(seeds),
        "digests": dict(digests),
        "config_digest": digest(config),
        "method": method_of(config),
        "posttrain": __version__,
        **surroundings(code),
    }


def surroundings(code: Code | None = None) -> dict[str, Any]:
    """Code, packages and machine as they are now: the sections named by SURROUNDINGS."""
    return {
        "code": (code or code_state(package_folder())).state,
        "packages": packages(PACKAGES),
        "installed": {"digest": digest(installed()), "versions": dict(installed())},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu(),
        "gpus": [dict(gpu) for gpu in gpus()],
        "environment": environment(),
    }


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with the digest of all the rest of it, so that an edit by hand shows."""
    rest = {name: value for name, value in manifest.items() if name != "record_digest"}
    return {**rest, "record_digest": digest(rest)}


def identity_digest(manifest: Mapping[str, Any]) -> str:
    """What a run is to those that start from it: the same before and after it is resumed or finished."""
    return digest({name: manifest.get(name) for name in ("id", "created", "config_digest", "digests", "seeds")})


def run_id(manifest: Mapping[str, Any]) -> str:
    """The short id of a run; one of schema 1, which has none, gets the beginning of its digest."""
    found = manifest.get("id")
    return found if isinstance(found, str) and found.isalnum() and len(found) <= 16 else identity_digest(manifest)[:8]


def package_folder() -> Path:
    """Where this package's code lies."""
    return Path(__file__).resolve().parents[1]


def script() -> dict[str, str] | None:
    """The user's script that started this process, with the digest of its text; None when the command line did."""
    started = Path(sys.argv[0]) if sys.argv else Path()
    ours = started.suffix != ".py" or not started.is_file() or started.resolve().is_relative_to(package_folder())
    return None if ours else {"name": started.name, "digest": file_digest(started)}


def code_state(folder: Path) -> Code:
    """Revision of the git checkout that `folder` is tracked in, and what is not committed; every field None outside a checkout.

    `diff_digest` identifies the uncommitted changes and is None when there are none; `diff_file` is where a run keeps them (the first
    MOST_PATCH bytes, with `diff_file_digest`), and `untracked` the digests of new files below `folder`, which no diff shows.
    """
    fields = ("revision", "dirty", "diff_digest", "diff_file", "diff_file_digest", "diff_bytes", "untracked")
    unknown: dict[str, Any] = dict.fromkeys(fields)
    # An installed copy inside somebody else's checkout is ignored or untracked there: its revision would be the wrong one.
    if not _git(folder, "ls-files", "--", "."):
        return Code(unknown, b"")
    revision, status = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    if revision is None or status is None or diff is None:
        return Code(unknown, b"")
    new = _untracked(folder)
    kept = diff[:MOST_PATCH]
    state = {
        "revision": revision.decode().strip(),
        "dirty": bool(status or new),
        "diff_digest": _digest16(status + diff + repr(sorted(new.items())).encode()) if status or new else None,
        "diff_file": PATCH if kept else None,
        "diff_file_digest": _digest16(kept) if kept else None,
        "diff_bytes": len(diff),
        "untracked": new,
    }
    return Code(state, kept)


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


def _untracked(folder: Path) -> dict[str, str]:
    """Digest of every new file below `folder` that git does not ignore."""
    listed = _git(folder, "ls-files", "--others", "--exclude-standard", "-z") or b""
    names = [name.decode("utf-8", "replace") for name in listed.split(b"\0") if name][:MOST_UNTRACKED]
    return {name: file_digest(folder / name) for name in names if (folder / name).is_file()}


def _digest16(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
