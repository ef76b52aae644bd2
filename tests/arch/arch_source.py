"""Source files as syntax trees, and the few questions that the architecture rules ask of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SRC = REPOSITORY / "src"
TESTS = REPOSITORY / "tests"

ORDER = (
    "core stats sandbox objectives rewards render envs models engine rollout runs evals internals checks loops plan doctor recipes web cli"
).split()
"""Packages in dependency order: each may import from those before it."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Finding:
    """A broken rule. Reads "src/posttrain/core/x.py:12: no-global: ..."."""

    file: str
    line: int
    rule: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.detail}"


@dataclass(frozen=True)
class Import:
    """One imported name; `target` is dotted and as deep as can be told, e.g. posttrain.core.errors or torch.nn."""

    target: str
    line: int
    lazy: bool
    """Inside a function, so that importing the file does not run it."""


@dataclass(frozen=True)
class Module:
    """A parsed file of the package. `name` is dotted: posttrain.core.errors; a package's own file has the package's name."""

    file: str
    name: str
    is_package: bool
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def package(self) -> str:
        """The part under posttrain that the file belongs to; "" for files directly in it."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 or (len(parts) == 2 and self.is_package) else ""

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Local name -> dotted name of what was imported under it, wherever in the file."""
        names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
            elif isinstance(node, ast.ImportFrom):
                base = self._from(node)
                names |= {alias.asname or alias.name: f"{base}.{alias.name}" for alias in node.names}
        return names

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of the file, those inside functions and `import_module("...")` calls included."""
        return list(self._imports(self.tree, lazy=False))

    def dotted(self, node: ast.AST) -> str | None:
        """`np.random.rand` -> "numpy.random.rand" and `print` -> "print"; None for what hangs on a local value."""
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or (path and node.id not in self.aliases):
            return None
        return ".".join([self.aliases.get(node.id, node.id), *path])

    def find(self, line: int, rule: str, detail: str) -> Finding:
        return Finding(self.file, line, rule, detail)

    def _from(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _imports(self, parent: ast.AST, lazy: bool) -> Iterator[Import]:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.Import):
                yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (Import(f"{self._from(node)}.{alias.name}", node.lineno, lazy) for alias in node.names)
            elif isinstance(node, ast.Call) and (target := self._dynamic(node)):
                yield Import(target, node.lineno, lazy)
            yield from self._imports(node, lazy or isinstance(node, Function | ast.Lambda))

    def _dynamic(self, node: ast.Call) -> str | None:
        called = self.dotted(node.func)
        if called not in ("importlib.import_module", "__import__") or not node.args:
            return None
        first = node.args[0]
        return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def snippet(file: str, text: str) -> Module:
    """A module from text, as if it stood at src/posttrain/<file>."""
    path = Path("posttrain") / file
    is_package = path.name == "__init__.py"
    parts = path.parent.parts if is_package else path.with_suffix("").parts
    return Module(f"src/{path.as_posix()}", ".".join(parts), is_package, text)


def load() -> list[Module]:
    """All modules of the package."""
    root = SRC / "posttrain"
    return [snippet(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))]


def load_tests() -> list[Module]:
    """All files of the test suite."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        inside = path.relative_to(REPOSITORY)
        found.append(Module(inside.as_posix(), ".".join(inside.with_suffix("").parts), False, path.read_text(encoding="utf-8")))
    return found


def functions(module: Module) -> Iterator[Function]:
    """Every function and method, nested ones included."""
    return (node for node in ast.walk(module.tree) if isinstance(node, Function))


def report(findings: Sequence[Finding]) -> str:
    """One line per finding."""
    return "\n".join(str(finding) for finding in findings)
