"""Each known bug, put into a copy of the source, must be noticed by the tests named for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
FAILED = 1
"""Exit status of pytest when a test failed; collection errors and wrong options have others."""


def copy_of_the_source(folder: Path) -> Path:
    target = folder / "src"
    shutil.copytree(ROOT / "src", target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def run_tests(source: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The tests against `source` instead of the repository's own."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-o",
        f"pythonpath={source}",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def plant(bug: Mutant, source: Path) -> None:
    path = source / "posttrain" / bug.file
    text = path.read_text(encoding="utf-8")
    for old, new in bug.changes:
        assert text.count(old) == 1, f"{bug.name}: {old!r} occurs {text.count(old)} times in {bug.file}; bring the mutant up to date"
        text = text.replace(old, new)
    compile(text, bug.file, "exec")
    path.write_text(text, encoding="utf-8")


def test_names_are_unique():
    assert len({bug.name for bug in MUTANTS}) == len(MUTANTS) >= 20


def test_every_bug_still_fits_the_source(tmp_path):
    for bug in MUTANTS:
        source = tmp_path / bug.name
        (source / "posttrain" / bug.file).parent.mkdir(parents=True)
        shutil.copy(ROOT / "src" / "posttrain" / bug.file, source / "posttrain" / bug.file)
        plant(bug, source)


@pytest.mark.slow
def test_the_unchanged_source_survives(tmp_path):
    tests = sorted({name for bug in MUTANTS for name in bug.tests})
    done = run_tests(copy_of_the_source(tmp_path), tuple(tests))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("bug", MUTANTS, ids=lambda bug: bug.name)
def test_bug_is_noticed(bug, tmp_path):
    source = copy_of_the_source(tmp_path)
    plant(bug, source)
    done = run_tests(source, bug.tests)
    assert done.returncode == FAILED, f"{bug.name} survived {', '.join(bug.tests)}:\n{done.stdout[-2000:]}{done.stderr[-500:]}"
