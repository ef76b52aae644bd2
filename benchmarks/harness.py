"""Measure this package against its peers: `make bench`, or `make bench ONLY=grpo`, or with ARGS=--quick for fewer repeats.

Every side is a process of its own that imports and sets up once. Then the sides take turns: one works while the others wait. A ratio is the
median over rounds of the ratio within a round, so that a machine that slows down slows both; its interval covers the median of such rounds
with at least 95% (ranks of the sorted rounds, no assumption about their distribution). Records go to latest.json beside this file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
LATEST = HERE / "latest.json"
BENCHMARKS = ("sampler", "sampler_smollm2", "rollouts", "grpo", "grpo_smollm2", "sft", "dpo", "startup", "growth", "logprob_kernel")
REPEATS, QUICK = 7, 3
CONFIDENCE = 0.95


class NotTheSameWork(RuntimeError):
    """Two sides of a comparison did not do the same work, so their times may not be compared."""


@dataclass(frozen=True)
class Side:
    """A process to measure: `function` of a benchmark, with threads per process. Example: Side("grpo", "trl", {"threads": 2}, 2)"""

    module: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 1


@dataclass(frozen=True)
class Measure:
    """One piece of work: seconds of the clock and of all processors, what was done, and the side's peak memory so far.

    Example: Measure(wall=1.5, cpu=1.49, facts={"tokens": 3072}, peak_mib=612.0)
    """

    wall: float
    cpu: float
    facts: Mapping[str, Any]
    peak_mib: float


@dataclass(frozen=True)
class Record:
    """One line of the table. `ratio` says how many times better ours is; it holds when it is at least `bar` (at most, where so marked)."""

    name: str
    ours: float
    peer: float | None
    unit: str
    ratio: float
    ratio_low: float
    ratio_high: float
    bar: float | None
    holds: bool | None
    n: int
    conditions: str
    machine: str
    peer_name: str = ""
    ours_range: tuple[float, float] | None = None
    peer_range: tuple[float, float] | None = None
    cpu_ratio: float | None = None
    """The same ratio in CPU seconds of all processes of a side: what is left of it when processors are shared with others."""
    at_most: bool = False
    quick: bool = False
    benchmark: str = ""
    series: tuple[float, ...] = ()


# --- arithmetic ---


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Ranks of the sorted values that enclose the median of their distribution with at least `confidence`; all of them when few.

    Example: of 7 values the smallest and the largest (coverage 98.4%), of 9 the second and the second last (96.1%).
    """
    ordered, n = sorted(values), len(values)
    skip, tail = 0, 0.5**n
    while skip + 1 < n / 2 and 2 * (tail + math.comb(n, skip + 1) * 0.5**n) <= 1 - confidence:
        skip += 1
        tail += math.comb(n, skip) * 0.5**n
    return ordered[skip], ordered[n - 1 - skip]


def slope_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float, float]:
    """Growth from the first to the last value along the line of medians (Theil-Sen), as a share of their median, with its interval.

    The interval comes from Kendall's statistic (Sen 1968). Example: of (1, 1.1, 1.2) the growth is 0.2 / 1.1 = 0.18.
    """
    n = len(values)
    slopes = sorted((values[j] - values[i]) / (j - i) for i in range(n) for j in range(i + 1, n))
    spread = statistics.NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, round((len(slopes) - spread) / 2))
    high = min(len(slopes) - 1, round((len(slopes) + spread) / 2))
    scale = (n - 1) / statistics.median(values)
    return statistics.median(slopes) * scale, slopes[low] * scale, slopes[high] * scale


def rates(measures: Sequence[Measure], of: str | None, clock: Literal["wall", "cpu"] = "wall") -> list[float]:
    """Units of `of` per second, or seconds when `of` is None."""
    seconds = [m.wall if clock == "wall" else m.cpu for m in measures]
    return seconds if of is None else [float(m.facts[of]) / s for m, s in zip(measures, seconds, strict=True)]


def gains(ours: Sequence[float], peer: Sequence[float], higher: bool) -> list[float]:
    """How many times better ours is, round by round."""
    return [a / b if higher else b / a for a, b in zip(ours, peer, strict=True)]


# --- processes ---


class Process:
    """A side that has been started and waits at its first boundary."""

    def __init__(self, side: Side):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": f"{side.threads}",
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": f"{HERE}",
        }
        command = [
            sys.executable,
            str(HERE / "sides.py"),
            side.module,
            side.function,
            json.dumps({**side.options, "threads": side.threads}),
        ]
        self._log = (HERE.parent / "build").joinpath(f"bench-{side.module}-{side.function}.log")
        self._log.parent.mkdir(exist_ok=True)
        started = time.perf_counter()
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True, encoding="utf-8"
            )
        self.first = self._read()
        self.started = time.perf_counter() - started
        """Seconds from the start of the process to its first boundary."""

    def turn(self) -> Measure:
        """Let it do one piece of work."""
        self._write("go")
        found = self._read()
        return Measure(found["wall"], found["cpu"], found["facts"], found["peak_mib"])

    def close(self) -> None:
        """No more turns; wait until it has ended."""
        if self._child.poll() is None:
            self._write("end")
            try:
                self._child.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def _write(self, word: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(word + "\n")
        self._child.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"a measured process ended early (exit code {self._child.wait()}):\n{tail}")
        return json.loads(line)


@dataclass
class Bench:
    """What a benchmark's `run` is given: repeats, and somewhere to put its records."""

    repeats: int
    quick: bool
    machine: str
    benchmark: str = ""
    records: list[Record] = field(default_factory=list)

    def rounds(
        self, sides: Mapping[str, Side], *, warmup: int = 1, repeats: int | None = None, started: dict[str, Mapping[str, Any]] | None = None
    ) -> dict[str, list[Measure]]:
        """Start all sides, then let them take turns in an order that reverses every round. `started` gets facts of step 0."""
        processes: dict[str, Process] = {}
        found: dict[str, list[Measure]] = {name: [] for name in sides}
        try:
            for name, side in sides.items():
                processes[name] = Process(side)
                if started is not None:
                    started[name] = processes[name].first["facts"]
            for number in range(warmup + (repeats or self.repeats)):
                for name in list(sides)[:: -1 if number % 2 else 1]:
                    measure = processes[name].turn()
                    if number >= warmup:
                        found[name].append(measure)
        finally:
            for process in processes.values():
                process.close()
        return found

    def compare(
        self,
        name: str,
        ours: Sequence[Measure],
        peer: Sequence[Measure],
        *,
        bar: float | None,
        conditions: str,
        per: str | None = None,
        peer_name: str = "TRL",
    ) -> Record:
        """Seconds per piece of work, or units of the fact `per` per second."""
        higher, cpu = per is not None, gains(rates(ours, per, "cpu"), rates(peer, per, "cpu"), per is not None)
        a, b = rates(ours, per), rates(peer, per)
        return self.add(
            name, a, b, unit="s" if per is None else f"{per}/s", higher=higher, bar=bar, conditions=conditions, peer_name=peer_name,
            cpu_ratio=statistics.median(cpu),
        )  # fmt: skip

    def memory(self, name: str, ours: Sequence[Measure], peer: Sequence[Measure], *, conditions: str, peer_name: str = "TRL") -> Record:
        """Peak memory of the two processes, which imported and computed nothing else."""
        found = [[measures[-1].peak_mib] for measures in (ours, peer)]
        return self.add(name, *found, unit="MiB", higher=False, bar=1.0, conditions=conditions, peer_name=peer_name)

    def add(
        self, name: str, ours: Sequence[float], peer: Sequence[float], *, unit: str, higher: bool, bar: float | None, **more: Any
    ) -> Record:
        """A record of paired values."""
        ratios = gains(ours, peer, higher)
        low, high = median_interval(ratios)
        ratio = statistics.median(ratios)
        return self.put(
            Record(
                name,
                statistics.median(ours),
                statistics.median(peer),
                unit,
                ratio,
                low,
                high,
                bar,
                None if bar is None else ratio >= bar,
                len(ratios),
                machine=self.machine,
                ours_range=(min(ours), max(ours)),
                peer_range=(min(peer), max(peer)),
                **more,
            )  # fmt: skip
        )

    def put(self, record: Record) -> Record:
        """Keep a record and show it."""
        marked = Record(**{**asdict(record), "quick": self.quick, "benchmark": self.benchmark})
        self.records.append(marked)
        show(shown(marked))
        return marked


def same(what: str, ours: float, peer: float, tolerance: float = 0.0) -> None:
    """Fail unless both sides report the same, up to an absolute tolerance."""
    if not abs(ours - peer) <= tolerance:
        raise NotTheSameWork(f"{what}: ours {ours}, the peer {peer}; they must agree to {tolerance}")


# --- output ---


def shown(record: Record) -> str:
    """A record as one line."""
    verdict = {None: "", True: "holds", False: "DOES NOT HOLD"}[record.holds]
    bar = "" if record.bar is None else f"bar {'at most' if record.at_most else 'at least'} {record.bar:g}"
    peer = "" if record.peer is None else f" {record.peer_name} {record.peer:.4g}"
    cpu = "" if record.cpu_ratio is None else f" (CPU {record.cpu_ratio:.2f})"
    interval = f"[{record.ratio_low:.3g}, {record.ratio_high:.3g}]"
    return f"  {record.name:58} ours {record.ours:.4g}{peer} {record.unit:9} ratio {record.ratio:.3g} {interval}{cpu} {bar} {verdict}"


def show(text: str) -> None:
    """A line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def machine_line() -> str:
    """Processor, cores, versions, and how busy the machine is now."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    wide = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "no AVX2"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    names = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    load = os.getloadavg()[0]
    return f"{models[0] if models else 'unknown processor'} ({wide}), {cores} core(s), {names}, load {load:.1f} at the start"


def write(records: Sequence[Record], path: Path = LATEST) -> None:
    """Replace the records of the benchmarks that ran; the others stay."""
    ran = {record.benchmark for record in records}
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    kept = [record for record in earlier if record["benchmark"] not in ran]
    order = {name: place for place, name in enumerate(BENCHMARKS)}
    rows = sorted([*kept, *(asdict(record) for record in records)], key=lambda row: order.get(row["benchmark"], len(order)))
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the exit status is 1 when something does not hold or could not be measured."""
    parser = argparse.ArgumentParser(description="Benchmarks against peers.")
    parser.add_argument("--only", nargs="*", choices=BENCHMARKS, default=[], help="which to run; all by default")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} repeats instead of {REPEATS}; marked so in the records")
    parser.add_argument("--repeats", type=int, help="another number of repeats")
    parser.add_argument("--out", type=Path, default=LATEST)
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(HERE))
    machine, failed = machine_line(), []
    show(machine)
    for name in options.only or BENCHMARKS:
        bench = Bench(options.repeats or (QUICK if options.quick else REPEATS), options.quick, machine, name)
        started = time.monotonic()
        show(f"{name}:")
        run: Callable[[Bench], None] = importlib.import_module(name).run
        try:
            run(bench)
        except RuntimeError as error:
            failed.append(name)
            show(f"  FAILED: {error}")
        write(bench.records, options.out)
        failed += [record.name for record in bench.records if record.holds is False]
        show(f"  ({time.monotonic() - started:.0f} s)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
