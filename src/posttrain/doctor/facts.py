"""What the records of a run say beyond its metrics, under stable names: entries of the catalog refer to them (catalog/facts.py).

A fact that the records do not tell is absent, so that nothing is held against a run for what it did not write down.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.doctor.evidence import Evidence
from posttrain.doctor.frame import Frame
from posttrain.doctor.settings import flat
from posttrain.runs.reading import mapping, number, strings

Record = Mapping[str, Any]
_RATES = ("pass_at_1", "parse_rate", "truncation_rate", "error_rate", "mean_tokens")
_LAST = 10
"""Last values of a metric that a fact of training is the mean of."""
_MOST = 1000
"""Facts of one manifest."""
_PLANNED = re.compile(r"= (\d{1,9}) optimizer steps|, (\d{1,9}) steps\b")
"""Where the batch equation of a finished stage says how many steps were planned."""
_EXPLAINED = frozenset({"no_signal"})
"""Events after which a stage may end before its last step."""


def facts_of(evidence: Evidence, stage: str | None = None) -> dict[str, Any]:
    """Facts of the run and, with `stage`, of that stage.

    Example: facts_of(evidence, "grpo")["eval.after.parse_rate"], facts_of(evidence)["eval.sft.arithmetic.pass_at_1"]  # 0.98, 0.3
    """
    return run_facts(evidence) | ({} if stage is None else stage_facts(evidence, stage))


def run_facts(evidence: Evidence) -> dict[str, Any]:
    """What holds for the run as a whole."""
    return {
        **_manifest(evidence.manifest),
        **_run(evidence),
        **_every_eval(evidence.evals),
        **_comparable(_by_label(evidence.evals)),
        **_gates(evidence.gates),
    }


def stage_facts(evidence: Evidence, stage: str) -> dict[str, Any]:
    """How one stage went, and what was measured next before and after it."""
    frame = evidence.frames.get(stage)
    training = {} if frame is None else _training(evidence, frame)
    return {**_course(evidence, stage, frame), **_around(evidence, stage, _by_label(evidence.evals)), **training}


# --- the run ---------------------------------------------------------------------------------------------------------------------------


def _manifest(manifest: Record) -> dict[str, Any]:
    """manifest.packages.torch, manifest.code.dirty, manifest.seeds.seed and so on; the long lists are left out."""
    kept = {
        name: value
        for name, value in manifest.items()
        if name not in ("installed", "history", "produced", "command", "stages", "names", "look_alikes")
    }
    found = {name: value for name, value in flat(kept, "manifest", _MOST).items() if value is not None}
    if isinstance(history := manifest.get("history"), list):
        found["resumed"] = len(history)
    return found


def _run(evidence: Evidence) -> dict[str, Any]:
    found: dict[str, Any] = {"source": evidence.source, "problems": len(evidence.problems), "alarms": len(evidence.alarms)}
    declared = strings(evidence.manifest.get("stages"))
    missing = [stage for stage in declared if stage not in evidence.finished]
    if declared:
        found |= {"finished": not missing, "stages_missing": len(missing)}
    elif evidence.finished:
        found["finished"] = all(stage in evidence.finished for stage in evidence.frames)
    if missing:
        found["next_stage"] = missing[0]
    return found


def _every_eval(evals: Mapping[str, Record]) -> dict[str, Any]:
    """Rates, items and decoding of every evaluation under eval.LABEL.SUITE."""
    found: dict[str, Any] = {}
    for name, record in evals.items():
        summary, conditions = mapping(record.get("summary")), mapping(record.get("conditions"))
        sampling = mapping(conditions.get("sampling"))
        said = {rate: number(summary.get(rate)) for rate in _RATES}
        said |= {"n": number(conditions.get("n_items")), "samples": number(conditions.get("samples_per_item"))}
        said |= {"max_tokens": number(sampling.get("max_tokens")), "mode": _mode(sampling)}
        found |= {f"eval.{name}.{key}": value for key, value in said.items() if value is not None}
    return found


def _by_label(evals: Mapping[str, Record]) -> dict[str, dict[str, Record]]:
    """Label to suite to record: an evaluation is called LABEL.SUITE."""
    found: dict[str, dict[str, Record]] = {}
    for name, record in evals.items():
        label, _, suite = name.partition(".")
        found.setdefault(label, {})[suite or "items"] = record
    return found


def _comparable(by_label: Mapping[str, Mapping[str, Record]]) -> dict[str, Any]:
    """Whether every suite was measured on the same items each time, with one template, and how many decoding modes there are."""
    conditions: dict[str, list[Record]] = {}
    for suites in by_label.values():
        for suite, record in suites.items():
            conditions.setdefault(suite, []).append(mapping(record.get("conditions")))
    every = [one for found in conditions.values() for one in found]
    if not every:
        return {}
    templates = {one["template_digest"] for one in every if isinstance(one.get("template_digest"), str)}
    return {
        "eval.same_items": all(one.get("items_digest") == found[0].get("items_digest") for found in conditions.values() for one in found),
        "eval.same_conditions": all(one == found[0] for found in conditions.values() for one in found),
        "eval.template_differs": len(templates) > 1,
        "eval.modes": len({mode for one in every if (mode := _mode(mapping(one.get("sampling"))))}),
    }


def _mode(sampling: Record) -> str | None:
    temperature = number(sampling.get("temperature"))
    return None if temperature is None else "greedy" if temperature == 0 else "sampled"


def _gates(gates: Mapping[str, Record]) -> dict[str, Any]:
    """gate.NAME is the verdict, gate.NAME.CHECK what a check measured."""
    found: dict[str, Any] = {}
    for name, record in gates.items():
        if isinstance(verdict := record.get("verdict"), str):
            found[f"gate.{name}"] = verdict
        checks = record.get("checks")
        said = [(mapping(check).get("name"), mapping(check).get("value")) for check in (checks if isinstance(checks, list) else ())]
        for title, value in [*said, *mapping(record.get("figures")).items()]:
            if isinstance(title, str) and isinstance(value, int | float | str):
                found[f"gate.{name}.{title}"] = value
    return found


# --- a stage ---------------------------------------------------------------------------------------------------------------------------


def _course(evidence: Evidence, stage: str, frame: Frame | None) -> dict[str, Any]:
    """How far the stage got and how it was left."""
    known = bool(evidence.finished) or evidence.source == "posttrain"
    closed = stage in evidence.finished
    found: dict[str, Any] = {"stage.finished": closed} if known else {}
    stopped = [alarm for alarm in evidence.alarms if alarm.get("stage") == stage and _ends(alarm)]
    if known:
        found["interrupted"] = bool(stopped)
        found["ended_silently"] = not closed and not stopped
    if frame is None or not frame.steps:
        return found
    planned = _planned(frame, mapping(evidence.finished.get(stage)))
    if planned:
        done = (frame.steps[-1] + 1) / planned
        found["steps.done"] = done
        if closed:
            found["ended.early"] = done < 1 and not stopped and not _EXPLAINED & frame.events.keys()
    found["log.missing_steps"] = missing_steps(frame.steps)
    return found


def _ends(alarm: Record) -> bool:
    action = mapping(alarm.get("evidence")).get("action")
    return action in ("stop", "pause") or alarm.get("name") in ("interrupted", "stopped")


def _planned(frame: Frame, record: Record) -> int | None:
    """Steps the stage was to take: as its settings say, or the batch equation that it left."""
    if (steps := number(frame.settings.get("steps"))) and steps >= 1:
        return int(steps)
    if match := _PLANNED.search(str(record.get("batch_equation", ""))[:2000]):
        return int(match[1] or match[2])
    return None


def missing_steps(steps: Sequence[int]) -> int:
    """Steps absent between the first and the last. A log of every tenth step lacks none of the others.

    Example: missing_steps([0, 1, 2, 5])  # 2
    """
    strides = [after - before for before, after in zip(steps, steps[1:], strict=False)]
    if not strides:
        return 0
    usual = max(1, Counter(strides).most_common(1)[0][0])
    return sum(max(0, stride // usual - 1) for stride in strides)


def _around(evidence: Evidence, stage: str, by_label: Mapping[str, Mapping[str, Record]]) -> dict[str, Any]:
    """The evaluations next before and after the stage, on the suite that says most. The embedded base has learnt no form yet."""
    if stage == "base":
        return {}
    before, after = _neighbours(evidence, stage, by_label)
    suite = _primary(by_label.get(before or "", {}), by_label.get(after or "", {}))
    found: dict[str, Any] = {}
    pair: list[Record | None] = []
    for word, label in (("before", before), ("after", after)):
        record = by_label.get(label or "", {}).get(suite or "")
        pair.append(record)
        if record is None:
            continue
        summary = mapping(record.get("summary"))
        said = {"score": "pass_at_1", "parse_rate": "parse_rate", "truncated": "truncation_rate", "errors": "error_rate"}
        found |= {f"eval.{word}.{name}": number(summary.get(rate)) for name, rate in said.items()}
        found[f"eval.{word}.n"] = number(mapping(record.get("conditions")).get("n_items"))
    if pair[0] is not None and pair[1] is not None:
        found["eval.decoding_disagrees"] = _disagree(by_label[before or ""], by_label[after or ""])
        found["eval.pass_at_k_falls"] = _breadth_falls(pair[0], pair[1])
    found |= _newest(by_label.get(after or "", {}), suite)
    return {name: value for name, value in found.items() if value is not None}


def _newest(suites: Mapping[str, Record], main: str | None) -> dict[str, float | None]:
    """What was measured after the stage: worst rates and fewest items over the suites whose items are of the main one's kind, and
    the score on the main suite. Items of another split, such as harder ones, are not what training was for."""
    found: dict[str, float | None] = {}
    wanted = _split(suites.get(main or "", {}))
    suites = {name: record for name, record in suites.items() if _split(record) == wanted}
    for name, choose in (("parse_rate", min), ("truncation_rate", max), ("error_rate", max)):
        known = [value for record in suites.values() if (value := number(mapping(record.get("summary")).get(name))) is not None]
        found[f"eval.{name}"] = choose(known, default=None)
    items = [value for record in suites.values() if (value := number(mapping(record.get("conditions")).get("n_items"))) is not None]
    score = mapping(suites.get(main or "", {}).get("summary")).get("pass_at_1")
    return {**found, "eval.n": min(items, default=None), "eval.pass_at_1": number(score)}


def _split(record: Record) -> str:
    return str(mapping(record.get("conditions")).get("split"))


def _neighbours(evidence: Evidence, stage: str, labels: Mapping[str, Any]) -> tuple[str | None, str | None]:
    declared = strings(evidence.manifest.get("stages"))
    if stage not in declared:
        return ("before" if "before" in labels else None), ("after" if "after" in labels else stage if stage in labels else None)
    place = declared.index(stage)
    before = [name.removeprefix("eval.") for name in declared[:place] if name.startswith("eval.")]
    after = [name.removeprefix("eval.") for name in declared[place:] if name.startswith("eval.")]
    return next((label for label in reversed(before) if label in labels), None), after[0] if after and after[0] in labels else None


def _primary(before: Mapping[str, Record], after: Mapping[str, Record]) -> str | None:
    """Of the suites measured (twice, if any was) the one that trained behaviour shows on: most items, sampled before greedy."""
    both = [suite for suite in after if suite in before] or list(after) or list(before)
    held = after or before

    def weight(suite: str) -> tuple[float, bool]:
        conditions = mapping(held[suite].get("conditions"))
        return number(conditions.get("n_items")) or 0.0, _mode(mapping(conditions.get("sampling"))) == "sampled"

    return max(sorted(both), key=weight, default=None)


def _disagree(before: Mapping[str, Record], after: Mapping[str, Record]) -> bool | None:
    """Whether the score moved up on some items in one decoding mode and down in another, both by more than two standard errors."""
    moves: dict[str, set[bool]] = {}
    modes: dict[str, set[str | None]] = {}
    for suite in before.keys() & after.keys():
        conditions = mapping(after[suite].get("conditions"))
        change, items = _moved(before[suite], after[suite]), conditions.get("items_digest")
        if change is None or not isinstance(items, str):
            continue
        modes.setdefault(items, set()).add(_mode(mapping(conditions.get("sampling"))))
        if change:
            moves.setdefault(items, set()).add(change > 0)
    compared = [items for items, seen in modes.items() if len(seen) > 1]
    return any(len(moves.get(items, ())) > 1 for items in compared) if compared else None


def _moved(before: Record, after: Record) -> int | None:
    """1 up, -1 down, 0 within two standard errors of independent samples; None when it cannot be told."""
    first, last = (number(mapping(record.get("summary")).get("pass_at_1")) for record in (before, after))
    n = number(mapping(after.get("conditions")).get("n_items"))
    if first is None or last is None or not n or n < 1 or not (0 <= first <= 1 and 0 <= last <= 1):
        return None
    error = math.sqrt((first * (1 - first) + last * (1 - last)) / n)
    return 0 if abs(last - first) <= 2 * error else 1 if last > first else -1


def _breadth_falls(before: Record, after: Record) -> bool | None:
    """Whether pass@1 rose while the share of items solved by any of several samples fell; None with one sample per item."""
    first, last = _solved(before), _solved(after)
    return None if first is None or last is None else last[0] > first[0] and last[1] < first[1]


def _solved(record: Record) -> tuple[float, float] | None:
    """Mean value over items, and the share of items with a sample of value 1."""
    means, some = [], 0
    items = record.get("items")
    for item in items if isinstance(items, list) else ():
        outcomes = mapping(item).get("outcomes")
        values = [number(_value(outcome)) for outcome in outcomes] if isinstance(outcomes, list) else []
        known = [value for value in values if value is not None]
        if len(known) < 2:
            return None
        means.append(sum(known) / len(known))
        some += max(known) >= 1
    return (sum(means) / len(means), some / len(means)) if means else None


def _value(outcome: Any) -> Any:
    """The value of one sample: outcomes are lists that begin with it, or objects."""
    return outcome[0] if isinstance(outcome, list) and outcome else mapping(outcome).get("value")


def _training(evidence: Evidence, frame: Frame) -> dict[str, Any]:
    """Means over the last steps of the stage, and how well the last supervised stage up to it imitates."""
    found: dict[str, Any] = {}
    for fact, metric in {"train.parse_rate": "parsed", "train.truncated": "truncated", "train.errors": "errors"}.items():
        if (column := frame.columns.get(metric)) is not None and column.size:
            found[fact] = float(column.values[-_LAST:].mean())
    for earlier in evidence.frames.values():
        column = earlier.columns.get("token_accuracy")
        if column is not None and column.size and earlier.kind == "sft":
            found["train.token_accuracy"] = float(column.values[-_LAST:].mean())
        if earlier is frame:
            break
    return found
