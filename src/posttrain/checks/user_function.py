"""A user's own function, loaded from "path.py:function". What it is follows from the names of its parameters."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.core.digest import digest
from posttrain.core.errors import ConfigError

FORMS: dict[tuple[str, ...], str] = {
    ("streams",): "objective",
    ("rewards",): "advantage",
    ("logp", "reference", "mask"): "kl",
    ("values", "mask", "denominator"): "aggregation",
}
"""Names of the required parameters, and what a function with them is."""
COMPANIONS = ("coefficient", "weight", "descends")
EXPLAINED = (
    "(streams) an objective that returns one loss per token; (rewards) advantages of a group; "
    "(logp, reference, mask) a KL term per token; (values, mask, denominator) an aggregation"
)


@dataclass(frozen=True, slots=True)
class UserFunction:
    """The function, what it is, and what its file documents about it.

    Companions stand in the same file, for a function called NAME: NAME_coefficient(log_ratio, advantage), d surrogate / d logp of an
    objective off-policy; NAME_weight(p, size), the weight of grad p of a biased advantage; NAME_descends, "KL(policy || reference)" or
    "KL(reference || policy)", the divergence that a KL term is meant to descend.
    """

    name: str
    kind: str
    call: Callable[..., Any]
    coefficient: Callable[[float, float], float] | None = None
    weight: Callable[[float, int], float] | None = None
    descends: str | None = None


def load(spec: str) -> UserFunction:
    """Load "path.py:function"; ConfigError names what is missing and what there is."""
    path, name = split(spec)
    if not path.is_file():
        beside = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise ConfigError(f"no file {path}; Python files in {path.parent}: {', '.join(beside[:12]) or 'none'}")
    module = _execute(path)
    there = [key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    offered = ", ".join(key for key in there if not key.startswith("_")) or "none"
    if name not in there:
        missing = f"no function '{name}' in {path}" if name else f"which function of {path}? Write {path}:NAME"
        raise ConfigError(f"{missing}; functions there: {offered}")
    function = getattr(module, name)
    documented = {companion: getattr(module, f"{name}_{companion}", None) for companion in COMPANIONS}
    return UserFunction(name, _kind(name, function), function, **documented)


def split(spec: str) -> tuple[Path, str]:
    """Path and function name. Example: "losses/mine.py:loss" -> (losses/mine.py, "loss")."""
    path, _, name = spec.rpartition(":") if not spec.endswith(".py") else (spec, "", "")
    return Path(path), name


def names_a_file(spec: str) -> bool:
    """Whether a name given on the command line means a user's file."""
    return spec.endswith(".py") or ".py:" in spec


def _kind(name: str, function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    required = tuple(p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    if required not in FORMS:
        raise ConfigError(f"{name}({', '.join(required)}) has no form that can be certified; the four forms are {EXPLAINED}")
    return FORMS[required]


def _execute(path: Path) -> ModuleType:
    """Run the file as a module of its own; its folder can be imported from while it runs."""
    spec = importlib.util.spec_from_file_location(f"posttrain_user_{digest(str(path.resolve()))}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    with _importable(module, path.parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # noqa: BLE001 - a user's file may raise anything
            raise ConfigError(f"{path} cannot be imported: {type(error).__name__}: {' '.join(str(error).split())}") from error
    return module


@contextmanager
def _importable(module: ModuleType, folder: Path) -> Iterator[None]:
    """The module under its name and its folder on the path, for as long as the file runs."""
    path = list(sys.path)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path[:] = path
        sys.modules.pop(module.__name__, None)
