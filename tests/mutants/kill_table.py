"""Plant every known bug in turn and print which test notices it: python tests/mutants/kill_table.py [--jobs N] [NAME ...]

The exit status is 1 when a bug survives or no longer fits the source.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutant_list import MUTANTS
from planting import FAILED, Mutant, copy_of_the_source, plant, run_tests

SURVIVED = "SURVIVED"


class Kill(NamedTuple):
    """One line of the table."""

    bug: Mutant
    by: str
    """The test that failed first, or why there is none."""
    seconds: float
    noticed: bool


def noticed_by(report: str) -> str:
    """The test that failed, from pytest's summary; without its folder."""
    found = re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+\.py::\w+(?:\[.*?\](?= - |$))?)", report, re.MULTILINE)
    return found[1] if found else "?"


def kill(bug: Mutant) -> Kill:
    """Plant one bug and run the tests that must notice it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="posttrain-mutant-") as folder:
        source = copy_of_the_source(Path(folder))
        try:
            plant(bug, source)
        except AssertionError as error:
            return Kill(bug, str(error), 0.0, noticed=False)
        done = run_tests(source, bug.tests)
    noticed = done.returncode == FAILED
    by = noticed_by(done.stdout) if noticed else SURVIVED if done.returncode == 0 else f"pytest ended with {done.returncode}"
    return Kill(bug, by, time.monotonic() - started, noticed)


def table(kills: Iterable[Kill]) -> Iterable[str]:
    """Lines of the table, each as soon as its bug is done."""
    name, file = (max(len(getattr(bug, field)) for bug in MUTANTS) for field in ("name", "file"))
    yield f"{'mutant':{name}}  {'file':{file}}  {'seconds':>7}  killed by"
    for one in kills:
        yield f"{one.bug.name:{name}}  {one.bug.file:{file}}  {one.seconds:7.1f}  {one.by}"


def main() -> int:
    """Print the table and a last line that counts; 1 when any bug was not noticed."""
    parser = argparse.ArgumentParser(description="Plant every known bug and print which test notices it.")
    parser.add_argument("names", nargs="*", help="mutants to plant; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    given = parser.parse_args()
    unknown = set(given.names) - {bug.name for bug in MUTANTS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [bug for bug in MUTANTS if not given.names or bug.name in given.names]
    missed = []
    with ThreadPoolExecutor(given.jobs) as pool:
        kills = pool.map(kill, chosen)

        def counted() -> Iterable[Kill]:
            for one in kills:
                if not one.noticed:
                    missed.append(one.bug.name)
                yield one

        for line in table(counted()):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    summary = f"{len(chosen) - len(missed)} of {len(chosen)} noticed"
    sys.stdout.write(summary + (f"; not noticed: {', '.join(missed)}" if missed else "") + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
