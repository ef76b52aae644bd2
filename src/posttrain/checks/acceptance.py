"""How speculative decoding fares by temperature and batch size: two figures about the draft, and one about time.

A draft agrees with its model more often at one temperature than at another, so its acceptance is a number per temperature. It does not
depend on the batch size, since a completion does not; what a pass of the model costs does, which is why time is measured per batch size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.engine.draft import Acceptance, acceptance_alarm
from posttrain.engine.speculative import SpeculativeSampler
from posttrain.engine.types import Request, Sampler

TEMPERATURES = (0.0, 0.5, 1.0)
BATCHES = (1, 8)
REQUESTS = 16
"""Completions per temperature; a batch size says how many of them are asked for at a time."""


@dataclass(frozen=True, slots=True)
class Fared:
    """One temperature at one batch size.

    Example: Fared(1.0, 8, Acceptance(...), time_ratio=1.3): the draft costs more time than it saves.
    """

    temperature: float
    batch: int
    acceptance: Acceptance
    time_ratio: float
    """CPU time of this process with the draft over without, median of alternating repeats."""

    def as_record(self) -> dict[str, Any]:
        """As JSON values."""
        return {"temperature": self.temperature, "batch": self.batch, "time_ratio": self.time_ratio, **self.acceptance.as_record()}


def sweep(
    build: Callable[[], SpeculativeSampler],
    plain: Callable[[], Sampler],
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    seed: int,
    repeats: int = 3,
    batches: Sequence[int] = BATCHES,
) -> list[Fared]:
    """Every temperature of TEMPERATURES at every batch size, on the same requests, with `sampling`'s cuts and length."""
    found = []
    for temperature in TEMPERATURES:
        for batch in batches:
            at = sampling.model_copy(update={"temperature": temperature})
            asked = [Request(prompts[i % len(prompts)], at, derive(seed, "contract", "acceptance", i)) for i in range(REQUESTS)]
            calls = [asked[start : start + batch] for start in range(0, REQUESTS, batch)]
            ratios, count = [], Acceptance()
            for _ in range(repeats):
                sampler = build()
                ratios.append(_seconds(sampler, calls) / _seconds(plain(), calls))
                count = sampler.acceptance.get(temperature, Acceptance())
            found.append(Fared(temperature, batch, count, statistics.median(ratios)))
    return found


def _seconds(sampler: Sampler, calls: Sequence[Sequence[Request]]) -> float:
    started = time.process_time()
    for requests in calls:
        sampler.generate(requests)
    return max(time.process_time() - started, 1e-9)


def baseline_of(record: dict[str, Any] | None, temperature: float) -> float:
    """The acceptance rate that a stored record of gate I holds for a temperature, at its largest batch.

    Raises EvidenceError when there is none: without a baseline a fall cannot be seen.
    """
    rows = [row for row in (record or {}).get("measured", {}).get("acceptance", []) if row["temperature"] == temperature]
    rates = [row["rate"] for row in sorted(rows, key=lambda row: row["batch"]) if row["rate"] is not None]
    if not rates:
        raise EvidenceError(
            f"no acceptance rate at temperature {temperature:g} is recorded for this draft; run: posttrain contract speculative MODEL"
        )
    return rates[-1]


def watch(sampler: SpeculativeSampler, record: dict[str, Any] | None) -> list[str]:
    """Alarms of a sampler in use: temperatures at which acceptance has fallen below half of the recorded baseline."""
    found = [acceptance_alarm(count, baseline_of(record, temperature)) for temperature, count in sampler.acceptance.items()]
    return [alarm for alarm in found if alarm]
