"""Put a known bug into a copy of the source and run tests against the copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FAILED = 1
"""Exit status of pytest when a test failed; collection errors and wrong options have others."""


@dataclass(frozen=True)
class Mutant:
    """A bug: in `file` every `(old, new)` of `changes` is replaced; each `old` must occur exactly once."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]


def mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    """A bug of one change, with the tests that must notice."""
    return Mutant(name, file, ((old, new),), tests)


def copy_of_the_source(folder: Path) -> Path:
    """The package below `folder`, to be changed."""
    target = folder / "src"
    shutil.copytree(ROOT / "src", target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def plant(bug: Mutant, source: Path) -> None:
    """Change the copy; AssertionError when the bug no longer fits the text."""
    path = source / "posttrain" / bug.file
    text = path.read_text(encoding="utf-8")
    for old, new in bug.changes:
        assert text.count(old) == 1, f"{bug.name}: {old!r} occurs {text.count(old)} times in {bug.file}; bring the mutant up to date"
        text = text.replace(old, new)
    compile(text, bug.file, "exec")
    path.write_text(text, encoding="utf-8")


def run_tests(source: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The tests against `source` instead of the repository's own, up to the first failure."""
    options = ["-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", f"pythonpath={source}"]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
