"""Rules on what a single file may do. Each takes one module and yields what breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from arch_source import Finding, Function, Module, functions

SEEDS = "posttrain.core.seeds"
NUMPY_STREAMS = frozenset({"numpy.random.Generator", "numpy.random.Philox", "numpy.random.PCG64", "numpy.random.SeedSequence"})
TORCH_DRAWS = frozenset(
    {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson")}
    | {f"torch.{name}_like" for name in ("rand", "randn", "randint")}
    | {f"torch.nn.init.{name}_" for name in ("normal", "uniform", "trunc_normal", "orthogonal", "sparse")}
    | {f"torch.nn.init.{name}_{kind}_" for name in ("xavier", "kaiming") for kind in ("normal", "uniform")}
    | {f"torch.nn.functional.{name}" for name in ("dropout", "gumbel_softmax")}
)
METHOD_DRAWS = frozenset(
    {"uniform_", "normal_", "bernoulli_", "exponential_", "random_", "cauchy_", "geometric_", "log_normal_", "bernoulli", "multinomial"}
)
TORCH_SEEDS = re.compile(r"torch\.(manual_seed|seed|set_rng_state|random\.(?!fork_rng).+|(cuda|mps|xpu)\.((manual_)?seed|set_rng_state).*)")
IO_NAMES = frozenset({"open", "print", "input", "exec", "eval"})
IO_MODULES = re.compile(
    r"(subprocess|socket|shutil|urllib|requests|httpx|tempfile)\..+"
    r"|os\.(listdir|scandir|walk|makedirs|mkdir|remove|unlink|rename|replace|system|open|stat)"
    r"|logging\.basicConfig"
)
IO_METHODS = frozenset(
    {"read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "unlink", "touch"}
    | {"iterdir", "glob", "rglob", "exists", "is_file", "is_dir"}
)
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:work|workspace|tmp|home|root|Users)/")
REASONED = re.compile(r"# noqa: BLE001 - \S")


def no_global(module: Module) -> Iterator[Finding]:
    """No `global` statement: state that changes lives in an object somebody owns."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Global):
            yield module.find(node.lineno, "no-global", f"global {', '.join(node.names)}; keep it in an object and pass that")


def no_global_rng(module: Module) -> Iterator[Finding]:
    """Random numbers come from streams derived in core/seeds.py; no generator of a library is seeded or drawn from.

    Inside `with torch.random.fork_rng():` torch's own is allowed: its state comes back at the end.
    """
    yield from _rng(module, module.tree, forked=False)


def no_import_time_io(module: Module) -> Iterator[Finding]:
    """Importing a file reads, writes and starts nothing."""
    for node in _run_at_import(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called = module.dotted(node.func) or ""
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if called in IO_NAMES or IO_MODULES.fullmatch(called) or method in IO_METHODS:
            yield module.find(node.lineno, "no-import-time-io", f"{ast.unparse(node.func)}(...) runs when the file is imported")


def no_decorator_registries(module: Module) -> Iterator[Finding]:
    """Registries are explicit dicts, not filled by decorators as files happen to be imported."""
    for node in ast.walk(module.tree):
        for decorator in getattr(node, "decorator_list", ()):
            name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if "register" in name.lower():
                yield module.find(decorator.lineno, "no-decorator-registry", f"@{name}; list the entries in one explicit dict")


def no_print(module: Module) -> Iterator[Finding]:
    """Output goes through the console or the CLI."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and module.dotted(node.func) in ("print", "pprint.pprint"):
            yield module.find(node.lineno, "no-print", "print(...); use runs.console, or typer.echo in the CLI")


def no_broad_except(module: Module) -> Iterator[Finding]:
    """A handler names what it expects, or says on its line why it takes everything."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(kind is None or module.dotted(kind) in ("Exception", "BaseException") for kind in caught)
        if broad and not REASONED.search(module.lines[node.lineno - 1]):
            yield module.find(node.lineno, "no-broad-except", "name the exceptions, or add '# noqa: BLE001 - <reason>'")


def no_machine_paths(module: Module) -> Iterator[Finding]:
    """No path of somebody's machine, in code or comment."""
    for number, line in enumerate(module.lines, start=1):
        if found := MACHINE_PATH.search(line):
            yield module.find(number, "no-machine-paths", f"'{found.group()}' exists on one machine only")


def docstrings(module: Module) -> Iterator[Finding]:
    """Every module and every public function and class says what it is."""
    if not ast.get_docstring(module.tree):
        yield module.find(1, "docstrings", "the module has no docstring")
    for node in module.tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            yield module.find(node.lineno, "docstrings", f"'{node.name}' has no docstring")


def file_length(module: Module) -> Iterator[Finding]:
    """Files of the package have at most 400 lines, test files 600."""
    limit = 600 if module.file.startswith("tests/") else 400
    if len(module.lines) > limit:
        yield module.find(limit + 1, "file-length", f"{len(module.lines)} lines, at most {limit}")


def function_length(module: Module) -> Iterator[Finding]:
    """Functions have at most 60 lines net of the docstring; in loops 100."""
    limit = 100 if module.package == "loops" else 60
    for function in functions(module):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        first = function.body[0]
        if ast.get_docstring(function, clean=False) is not None:
            length -= (first.end_lineno or first.lineno) - first.lineno + 1
        if length > limit:
            detail = f"'{function.name}' has {length} lines net of its docstring, at most {limit}"
            yield module.find(function.lineno, "function-length", detail)


def nesting(module: Module) -> Iterator[Finding]:
    """Compound statements are nested at most 4 deep within a function."""
    for function in functions(module):
        depth = max((_depth(statement) for statement in function.body), default=0)
        if depth > 4:
            yield module.find(function.lineno, "nesting", f"'{function.name}' is nested {depth} deep, at most 4")


def parameters(module: Module) -> Iterator[Finding]:
    """Functions take at most 8 parameters, self not counted: more means that a type is missing."""
    for function in functions(module):
        given = function.args
        names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg) if argument]
        count = len(names) - (names[:1] in (["self"], ["cls"]))
        if count > 8:
            yield module.find(function.lineno, "parameters", f"'{function.name}' takes {count} parameters, at most 8")


def _rng(module: Module, parent: ast.AST, forked: bool) -> Iterator[Finding]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Call) and (problem := _draw(module, node, forked)):
            yield module.find(node.lineno, "no-global-rng", problem)
        inside = isinstance(node, ast.With) and any(_forks(module, item.context_expr) for item in node.items)
        yield from _rng(module, node, forked or inside)


def _forks(module: Module, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and module.dotted(node.func) == "torch.random.fork_rng"


def _draw(module: Module, node: ast.Call, forked: bool) -> str | None:
    called = module.dotted(node.func) or ""
    shown = ast.unparse(node.func)
    if called.startswith("random."):
        return None if module.name == SEEDS and called == "random.Random" else f"{shown}(...); use core.seeds.python_rng"
    if called.startswith("numpy.random."):
        return None if module.name == SEEDS and called in NUMPY_STREAMS else f"{shown}(...); use core.seeds.numpy_rng"
    if called.endswith(".set_seed"):
        return f"{shown}(...) seeds every global generator"
    if forked:
        return None
    if TORCH_SEEDS.fullmatch(called):
        return f"{shown}(...) touches torch's global generator"
    method = node.func.attr if isinstance(node.func, ast.Attribute) and not called else ""
    if re.search("rng|generator", shown.rpartition(".")[0], re.IGNORECASE):
        method = ""  # numpy generators have methods of the same names, and carry their own state
    if (called in TORCH_DRAWS or method in METHOD_DRAWS) and not _has_generator(node):
        return f"{shown}(...) draws from torch's global generator; pass generator="
    return None


def _has_generator(node: ast.Call) -> bool:
    return any(word.arg == "generator" and ast.unparse(word.value) != "None" for word in node.keywords)


def _run_at_import(parent: ast.AST) -> Iterator[ast.AST]:
    """Nodes that are executed by an import: not the bodies of functions, nor what only a script or a type checker runs."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.If) and re.search("__name__|TYPE_CHECKING", ast.unparse(node.test)):
            continue
        if isinstance(node, Function):
            evaluated: list[ast.AST] = [*node.decorator_list, *node.args.defaults, *(value for value in node.args.kw_defaults if value)]
        elif isinstance(node, ast.Lambda):
            evaluated = []
        else:
            yield node
            yield from _run_at_import(node)
            continue
        for expression in evaluated:
            yield expression
            yield from _run_at_import(expression)


BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def _depth(node: ast.AST) -> int:
    """Levels of compound statements at and below a statement; `elif` is no level of its own, a nested function counts for itself."""
    if isinstance(node, Function | ast.ClassDef | ast.Lambda):
        return 0
    if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
        return max(_depth(node.orelse[0]), 1 + max(_depth(child) for child in node.body))
    inner = max((_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return inner + isinstance(node, BLOCKS)


RULES = (
    no_global,
    no_global_rng,
    no_import_time_io,
    no_decorator_registries,
    no_print,
    no_broad_except,
    no_machine_paths,
    docstrings,
    file_length,
    function_length,
    nesting,
    parameters,
)
