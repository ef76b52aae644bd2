"""Each known bug, put into a copy of the source, must be noticed by the tests named for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kill_table import noticed_by
from mutant_list import MUTANTS
from planting import FAILED, ROOT, copy_of_the_source, plant, run_tests


def test_names_are_unique():
    assert len({bug.name for bug in MUTANTS}) == len(MUTANTS) >= 62


def test_every_bug_still_fits_the_source(tmp_path):
    for bug in MUTANTS:
        source = tmp_path / bug.name
        (source / "posttrain" / bug.file).parent.mkdir(parents=True)
        shutil.copy(ROOT / "src" / "posttrain" / bug.file, source / "posttrain" / bug.file)
        plant(bug, source)


def test_named_tests_exist():
    for bug in MUTANTS:
        for name in bug.tests:
            path, _, test = name.partition("::")
            assert Path(ROOT / path).exists(), f"{bug.name} names {path}"
            assert not test or f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), f"{bug.name} names {name}"


def test_the_failing_test_is_read_from_the_report():
    report = "F\n=== short test summary info ===\nFAILED tests/unit/a/test_a.py::test_b[x - y] - assert 1 == 2\n1 failed in 0.1s\n"
    assert noticed_by(report) == "test_a.py::test_b[x - y]"
    assert noticed_by("ERROR tests/test_c.py::test_d - ValueError: no\n") == "test_c.py::test_d"
    assert noticed_by("3 passed in 0.1s\n") == "?"


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
