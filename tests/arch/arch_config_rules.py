"""Rules on config classes: how many settings one class has, and how many can be reached from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache

from arch_source import Finding, Module

OWN_FIELDS = 25
REACHABLE_FIELDS = 120


def config_fields(modules: Sequence[Module]) -> Iterator[Finding]:
    """A config class has at most 25 fields of its own."""
    for name, (module, node) in _config_classes(modules).items():
        count = len(_fields(node))
        if count > OWN_FIELDS:
            yield module.find(node.lineno, "config-fields", f"'{name}' has {count} fields, at most {OWN_FIELDS}")


def reachable_fields(modules: Sequence[Module]) -> Iterator[Finding]:
    """From one config class at most 120 settings can be reached; of a union the largest member counts."""
    classes = _config_classes(modules)

    @cache
    def reachable(name: str) -> int:
        own = _fields(classes[name][1])
        return len(own) + sum(max((reachable(used) for used in _named(field) & classes.keys() - {name}), default=0) for field in own)

    for name, (module, node) in classes.items():
        if reachable(name) > REACHABLE_FIELDS:
            detail = f"{reachable(name)} settings can be reached from '{name}', at most {REACHABLE_FIELDS}"
            yield module.find(node.lineno, "reachable-fields", detail)


def _config_classes(modules: Sequence[Module]) -> dict[str, tuple[Module, ast.ClassDef]]:
    """Direct and indirect subclasses of core.config.Config, by name."""
    everything = [(module, node) for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    known = {"Config"}
    found: dict[str, tuple[Module, ast.ClassDef]] = {}
    while new := {node.name: (module, node) for module, node in everything if node.name not in known and _bases(node) & known}:
        found |= new
        known |= new.keys()
    return found


def _bases(node: ast.ClassDef) -> set[str]:
    return {ast.unparse(base).rpartition(".")[2] for base in node.bases}


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    annotated = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    return [item for item in annotated if not ast.unparse(item.target).startswith("_") and "ClassVar" not in ast.unparse(item.annotation)]


def _named(field: ast.AnnAssign) -> set[str]:
    """Class names in an annotation; a quoted one is read too."""
    names = {node.id for node in ast.walk(field.annotation) if isinstance(node, ast.Name)}
    return names | {node.value for node in ast.walk(field.annotation) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


RULES = (config_fields, reachable_fields)
