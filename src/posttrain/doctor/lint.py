"""Rules before launch: what the resolved settings of a run already say about how it will end.

A rule is an entry of the catalog whose signs are settings. Settings come from anywhere: a key that is missing, or holds something else
than it should, silences the rules that read it and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.core.errors import PosttrainError
from posttrain.doctor.entries import Action, Entry, suspected
from posttrain.doctor.foreign_settings import translated
from posttrain.doctor.frame import Frame
from posttrain.doctor.settings import SECTIONS, settings_of, stage_kind
from posttrain.runs.reading import mapping, number, plain

ORDER = (Action.STOP, Action.PAUSE, Action.WARN, Action.NOTE)


@dataclass(frozen=True, slots=True)
class Advice:
    """One rule that a stage breaks.

    Example: Advice("F14", "rl", "a token band on sequence ratios", "objective.limit.high = 0.2", "objective.limit.high=4e-4", Action.WARN)
    """

    id: str
    stage: str
    name: str
    found: str
    """The settings that break it."""
    remedy: str
    action: Action

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        return f"{self.id} {self.name}: {self.found}; {self.remedy} (posttrain doctor explain {self.id})"


def stages_of(config: Mapping[str, Any]) -> list[str]:
    """The stages that a config will train, in order; none of a config that trains nothing."""
    wanted = ("base", "sft", "dpo", "grpo", "rl")
    return [stage for stage in wanted if isinstance(config.get(SECTIONS[stage]), Mapping) and not (stage == "base" and len(config) > 1)]


def lint(
    config: Mapping[str, Any], entries: Iterable[Entry], facts: Mapping[str, Any] | None = None, stages: Sequence[str] = ()
) -> list[Advice]:
    """The rules that a resolved config breaks, gravest first.

    Example: lint({"rl": {"siblings": 2}, "algorithm": "grpo"}, CATALOG.values())[0].id  ->  "C1"

    Args:
        config: nested settings of a run, or a flat config of TRL.
        facts: what a probe has found, e.g. {"probe.length_p99": 310}; rules that need them are silent without.
        stages: to look at; by default all that the config has a section for.
    """
    rules = [entry for entry in entries if entry.found_by == "settings" and entry.signs]
    found = []
    if not stages_of(config):
        config = translated(config) or config
    for stage in stages or stages_of(config):
        frame = Frame(stage, stage_kind(stage, (), config), _settings(config, stage), dict(facts or {}))
        frame.append(0, {})
        for entry in rules:
            if suspected(entry, frame)[0]:
                said = "; ".join(plain(sign.said(frame, 0), 200) for sign in entry.signs)
                found.append(Advice(entry.id, stage, entry.name, said, entry.fix, entry.action))
    return sorted(found, key=lambda advice: ORDER.index(advice.action))


def _settings(config: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """The settings of a stage; without its objective when that has a name nobody knows here, none when its numbers have no product."""
    try:
        return settings_of(config, stage)
    except PosttrainError:
        named = ("algorithm", "objective")
        return settings_of({key: value for key, value in config.items() if key not in named}, stage)
    except OverflowError:
        return {}


def probe_facts(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What rules read of a probe's verdict: posttrain probe --out FILE, or the launch gate of a run.

    Example: probe_facts({"figures": {"lengths": {"p50": 80, "p99": 310}, "statuses": {"truncated": 0.1}, "sampling": {"max_tokens": 320}}})
             # {"probe.length_p99": 310.0, "probe.truncated": 0.1, "probe.max_tokens": 320.0}
    """
    figures = mapping(verdict.get("figures"))
    read = {
        "probe.length_p99": mapping(figures.get("lengths")).get("p99"),
        "probe.truncated": mapping(figures.get("statuses")).get("truncated"),
        "probe.max_tokens": mapping(figures.get("sampling")).get("max_tokens"),
    }
    return {name: value for name, found in read.items() if (value := number(found)) is not None}
