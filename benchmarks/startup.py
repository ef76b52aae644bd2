"""From the start of a process to the end of its first optimizer step: a GRPO step of the tiny model, in fresh processes, by turns."""

from __future__ import annotations

from harness import Bench, Process, Side


def run(bench: Bench) -> None:
    """Seconds from the start of the interpreter to the first boundary."""
    options = {"mixed": False, "processes": 1, "steps": 1}
    sides = {"ours": Side("grpo", "ours", options), "TRL": Side("grpo", "trl", options)}
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(1 + bench.repeats):  # the first round reads libraries from the disk
        for name in list(sides)[:: -1 if number % 2 else 1]:
            process = Process(sides[name])
            process.close()
            if number:
                found[name].append(process.started)
    bench.add(
        "process start to first optimizer step", found["ours"], found["TRL"], unit="s", higher=False, bar=2.0, peer_name="TRL",
        conditions="GRPO, 1.4M parameters, 16 x 8, 24 new tokens, files in the page cache",
    )  # fmt: skip
