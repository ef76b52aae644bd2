"""Rules before launch: what the resolved settings of a run already say about how it will end. Entries of the catalog whose signs are settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.doctor.entries import Action, Entry, suspected
from posttrain.doctor.frame import Frame
from posttrain.doctor.settings import SECTIONS, settings_of, stage_kind

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

    Args:
        facts: what a probe has found, e.g. {"probe.length_p95": 310}; rules that need them are silent without.
        stages: to look at; by default all that the config has a section for.
    """
    rules = [entry for entry in entries if entry.found_by == "settings" and entry.signs]
    found = []
    for stage in stages or stages_of(config):
        settings = settings_of(config, stage)
        frame = Frame(stage, stage_kind(stage, (), config), settings, dict(facts or {}))
        frame.append(0, {})
        for entry in rules:
            if suspected(entry, frame)[0]:
                said = "; ".join(sign.said(frame, 0) for sign in entry.signs)
                found.append(Advice(entry.id, stage, entry.name, said, entry.fix, entry.action))
    return sorted(found, key=lambda advice: ORDER.index(advice.action))
