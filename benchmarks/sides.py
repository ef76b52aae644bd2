"""A measured process: it does one piece of work whenever the harness says so, and tells how long that took.

    python benchmarks/sides.py MODULE FUNCTION '{"option": 1}'      started by harness.py, never by hand

`FUNCTION(turns, options)` of a benchmark calls `turns.boundary(...)` between pieces of work. The first call ends what is not measured
(imports, set-up, the first step); each later one reports the piece since the last, and waits until it is this side's turn again.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO


class Turns:
    """The conversation with the harness. `silent` is for further processes of a side, which follow the first."""

    def __init__(self, answers: TextIO | None = None, silent: bool = False):
        self._answers, self._silent = answers, silent
        self._wall = self._cpu = 0.0
        self._first = True

    def boundary(self, later: Callable[[], Mapping[str, Any]] | None = None, **facts: Any) -> bool:
        """Report the piece of work that ends here, with what it did; wait for the next turn. False: no more turns come.

        `later` gives facts that take time to find out: it is called when the clock has stopped.
        """
        if self._silent:
            return True
        wall, cpu = time.perf_counter(), tree_seconds()
        if later is not None:
            facts |= later()
        found = {"wall": None if self._first else wall - self._wall, "cpu": None if self._first else cpu - self._cpu, "facts": facts}
        self._first = False
        self._say({**found, "peak_mib": peak_mib()})
        if sys.stdin.readline().strip() != "go":
            return False
        self._wall, self._cpu = time.perf_counter(), tree_seconds()
        return True

    def _say(self, message: dict[str, Any]) -> None:
        assert self._answers is not None
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def peak_mib() -> float:
    """Most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def tree_seconds() -> float:
    """CPU time of this process and its living descendants."""
    own = time.process_time()  # before the search, which takes time of its own
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(entry.name)] = int(fields[1])
        seconds[int(entry.name)] = (int(fields[11]) + int(fields[12])) / tick
    me = os.getpid()
    others = (pid for pid in seconds if pid != me and _descends(pid, me, parents))
    return own + sum(seconds[pid] for pid in others)


def _descends(pid: int, ancestor: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == ancestor:
            return True
    return False


def main() -> None:
    """Answers go through a copy of standard output; whatever a library prints goes to standard error."""
    module, function, options = sys.argv[1:4]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    turns = Turns(answers, silent="BENCH_FOLLOWS" in os.environ)
    getattr(importlib.import_module(module), function)(turns, json.loads(options))


if __name__ == "__main__":
    main()
