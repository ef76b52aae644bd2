"""Faults that show in the records of a run: evaluation records, gates, alarms of the program, damaged files. Written with the package's own
classes, so that they are what a run leaves; the damage is done afterwards, byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.matrix.injection import Fault, Named, by_doctor
from tests.matrix.traces_healthy import healthy
from tests.matrix.traces_made import Rng, generator
from tests.matrix.traces_other import supervised
from tests.matrix.traces_world import Row, run_rows
from tests.matrix.traces_write import Kind, begin, write, write_rows

from posttrain.core.files import write_json
from posttrain.core.sampling import Sampling
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.core.verdicts import GateVerdict
from posttrain.evals.conditions import Conditions
from posttrain.evals.handover import handover
from posttrain.evals.record import EvalRecord, ItemResult, Outcome
from posttrain.runs.diff import explain
from posttrain.runs.run import Run

CONDITIONS = Conditions(
    suite="arithmetic",
    dataset="arithmetic",
    split="held_out",
    split_digest="5a1b2c3d4e5f6071",
    items_digest="0f1e2d3c4b5a6978",
    n_items=500,
    samples_per_item=1,
    sampling=Sampling(max_tokens=128),
    thinking="none",
    extractor="hash/1",
    verifier="hash-marker/1",
    template_digest="ec68f53c76c08f49",
    tokenizer_digest="9c4be0caa06b7ec2",
    seed=0,
    turns=1,
)


@dataclass(frozen=True, slots=True)
class Skill:
    """What a model does on a suite. Example: Skill(0.45, unparsed=0.02)"""

    right: float
    """Chance of a right answer, for an item like the others."""
    unparsed: float = 0.01
    cut: float = 0.0
    solved: float = 1.0
    """Share of the items that it can solve at all; the others are never right."""


def measured(r: Rng, label: str, skill: Skill, **conditions: Any) -> EvalRecord:
    """A record of one model on one suite, sample by sample."""
    given = replace(CONDITIONS, **conditions)
    items = []
    for place in range(given.n_items):
        can = place < skill.solved * given.n_items
        items.append(ItemResult(f"item-{place}", tuple(_outcome(r, skill, can, given) for _ in range(given.samples_per_item))))
    return EvalRecord(given, label, f"{label:0<16}"[:16], tuple(items))


def _outcome(r: Rng, skill: Skill, can: bool, given: Conditions) -> Outcome:
    kind = r.random()
    if kind < skill.cut:
        return Outcome(0.0, RewardStatus.TRUNCATED, StopReason.LENGTH, given.sampling.max_tokens)
    if kind < skill.cut + skill.unparsed:
        return Outcome(0.0, RewardStatus.UNPARSEABLE, StopReason.END, int(r.integers(5, 60)))
    return Outcome(float(can and r.random() < skill.right), RewardStatus.SCORED, StopReason.END, int(r.integers(5, 60)))


Records = Mapping[str, Mapping[str, EvalRecord]]
"""Label of a measurement to suite to record."""


def a_run(
    path: Path, r: Rng, records: Records, kind: Kind = "rl", rows: Sequence[Row] = (), then: Callable[[Run], None] | None = None
) -> Path:
    """A sound run of one stage, measured before and after it; `then` does what is left to be done."""
    stage = "sft" if kind == "sft" else "rl"
    stages = (
        *(f"eval.{label}" for label in records if label == "before"),
        stage,
        *(f"eval.{label}" for label in records if label != "before"),
    )
    lines = list(rows) or (supervised(100, r) if kind == "sft" else _sound(r))
    run = begin(path / "run", kind, {} if kind == "sft" else {"rl.steps": len(lines)}, stages)
    for name in stages:
        label = name.removeprefix("eval.")
        if name == stage:
            write_rows(run, stage, lines)
        else:
            for suite, record in records[label].items():
                run.save_eval(f"{label}.{suite}", record.to_json())
        run.finish_stage(name, {"seconds": 1.0})
    if then is not None:
        then(run)
    run.finish()
    run.close()
    return path / "run"


def _sound(r: Rng) -> list[Row]:
    s, laws = healthy("fast learner", r)
    s.steps = 60
    return run_rows(s, laws, r)


def _pair(r: Rng, before: Skill, after: Skill, suite: str = "arithmetic", **conditions: Any) -> Records:
    given = {"suite": suite, **conditions}
    return {"before": {suite: measured(r, "before", before, **given)}, "after": {suite: measured(r, "after", after, **given)}}


def champion(path: Path, seed: int) -> Path:
    """A peak on 36 items."""
    r = generator("S54", seed)
    return a_run(path, r, _pair(r, Skill(0.45), Skill(0.66), n_items=36))


def flips(path: Path, seed: int) -> Path:
    """16.7 points better greedily, 23.6 points worse when sampled, on the same items."""
    r = generator("S55", seed)
    greedy = {"suite": "greedy", "sampling": Sampling(temperature=0.0, max_tokens=128)}
    sampled = _pair(r, Skill(0.458), Skill(0.222))
    decided = _pair(r, Skill(0.1), Skill(0.267), **greedy)
    return a_run(path, r, {label: {**sampled[label], **decided[label]} for label in sampled})


def differently(path: Path, seed: int) -> Path:
    """The base measured by another script: another budget, or another version of the extractor."""
    r = generator("S56", seed)
    other = ({"sampling": Sampling(max_tokens=64)}, {"extractor": "last-number/1"}, {"verifier": "hash-marker/2"})[seed % 3]
    records = {
        "before": {"arithmetic": measured(r, "before", Skill(0.4), **other)},
        "after": {"arithmetic": measured(r, "after", Skill(0.6))},
    }
    return a_run(path, r, records)


def _gated(run: Run, stage: str, verdict: GateVerdict) -> None:
    """What a failed hand-over leaves: the verdict, and an alarm for every check that failed."""
    write_json(run.path / "gates" / f"{verdict.gate}.json", verdict.as_record())
    for check in verdict.failures:
        run.alarm(stage, 0, check.name, check.sentence, {"gate": verdict.gate, "value": check.value, "bound": check.bound})


def forgets(path: Path, seed: int) -> Path:
    """What was not trained fell from 0.458 to 0.222; the hand-over says so."""
    r = generator("S57", seed)
    skill, kept = _pair(r, Skill(0.3), Skill(0.6)), _pair(r, Skill(0.458), Skill(0.222), "retention", items_digest="77aa77aa77aa77aa")
    records = {label: {**skill[label], **kept[label]} for label in skill}
    checks = handover(records["after"]["arithmetic"], records["after"]["retention"], records["before"]["retention"])
    verdict = GateVerdict("handover.rl", "rl, measured", checks, {"items": 500})
    return a_run(path, r, records, then=lambda run: _gated(run, "eval.rl", verdict))


def formless(path: Path, seed: int) -> Path:
    """Imitation after which two of five answers are in the required form."""
    r = generator("S58", seed)
    records = _pair(r, Skill(0.0, unparsed=0.95), Skill(0.6, unparsed=0.6))
    verdict = GateVerdict("handover.sft", "sft, measured", handover(records["after"]["arithmetic"]), {"items": 500})
    return a_run(path, r, records, "sft", then=lambda run: _gated(run, "eval.sft", verdict))


def sharpened(path: Path, seed: int) -> Path:
    """Before, all items can be found now and then; after, half of them always and the others never."""
    r = generator("S59", seed)
    return a_run(path, r, _pair(r, Skill(0.35), Skill(0.97, solved=0.55), n_items=200, samples_per_item=8))


def mirage(path: Path, seed: int) -> Path:
    """Imitates at 95 %, generates at 25 %; told from the evaluation after the stage."""
    r = generator("S50", seed)
    rows = supervised(140, r, start=2.0, floor=0.06, speed=6.0)
    for row in rows:
        for name in [name for name in row if name.startswith("heldout_")]:
            del row[name]
    return a_run(path, r, _pair(r, Skill(0.05), Skill(0.25)), "sft", rows)


def templates(path: Path, seed: int) -> Path:
    """In training nearly all answers parse; the evaluation renders another template, and a third of them do."""
    r = generator("F12", seed)
    before = measured(r, "before", Skill(0.4))
    after = measured(r, "after", Skill(0.5, unparsed=0.65), template_digest="0d0d0d0d0d0d0d0d")
    return a_run(path, r, {"before": {"arithmetic": before}, "after": {"arithmetic": after}})


def amputated(path: Path, seed: int) -> Path:
    """Thinking fills the budget: a quarter of the held-out answers is cut."""
    r = generator("S53", seed)
    return a_run(path, r, _pair(r, Skill(0.5, cut=0.22), Skill(0.55, cut=0.3)))


def alarmed(name: str, detail: str, path: Path, seed: int) -> Path:
    """A run in which something outside of the loop raised an alarm."""
    r = generator(name, seed)
    at = int(r.integers(20, 58))
    return a_run(path, r, _pair(r, Skill(0.4), Skill(0.55)), then=lambda run: run.alarm("rl", at, name, detail, {"step": at}))


def silent(path: Path, seed: int) -> Path:
    """Killed from outside: the lines end, and nothing says why."""
    r = generator("S91", seed)
    rows = _sound(r)[: int(r.integers(20, 50))]
    return write(path / "run", "rl", rows, {"rl.steps": 60}, ended=False)


def _half(data: bytes, r: Rng) -> bytes:
    """The copy ended in the middle of a line."""
    return data[: -int(r.integers(20, 200))]


def _foreign(data: bytes, r: Rng) -> bytes:
    """Lines of another program between ours."""
    lines = data.splitlines(keepends=True)
    for at in sorted(r.choice(len(lines), 3, replace=False)):
        lines.insert(int(at), b"[rank0]: Traceback (most recent call last):\n")
    return b"".join(lines)


def _zeros(data: bytes, r: Rng) -> bytes:
    """A block that the file system never wrote."""
    at = int(r.integers(len(data) // 3, len(data) // 2))
    return data[:at] + bytes(512) + data[at + 512 :]


def damaged(path: Path, seed: int) -> Path:
    """A log that was half written, mixed with another program's output, or partly lost."""
    r = generator("S90", seed)
    run = a_run(path, r, _pair(r, Skill(0.4), Skill(0.55)))
    file = run / "metrics.jsonl"
    file.write_bytes((_half, _foreign, _zeros)[seed % 3](file.read_bytes(), r))
    return run


def frameworks(path: Path, seed: int) -> Path:
    """One recipe under two defaults of averaging: two runs, side by side."""
    r = generator("P30", seed)
    aggregation = ("seq_mean_token_mean", "constant")[seed % 2]
    rows = _sound(r)
    write(path / "a", "rl", rows, {"rl.steps": 60})
    write(path / "b", "rl", rows, {"rl.steps": 60, "objective.aggregation": aggregation})
    return path


def by_difference(path: Path) -> Named:
    """P30 when `posttrain runs diff` says that the two runs average otherwise, and says it first."""
    reasons = [reason.name for reason in explain(path / "a", path / "b").reasons]
    ids = ("P30",) if reasons and "aggregation" in reasons[0] else ()
    return Named(ids, ids[0] if ids else None)


MADE: tuple[tuple[str, str, Callable[[Path, int], Path]], ...] = (
    ("S50", "token accuracy of 95 %, pass@1 of 25 %", mirage),
    ("S53", "a quarter of the held-out answers cut", amputated),
    ("S54", "a champion of 36 items", champion),
    ("S55", "better greedily, worse sampled", flips),
    ("S56", "before and after under other conditions", differently),
    ("S57", "retention 0.458 to 0.222", forgets),
    ("S58", "two of five answers in form after imitation", formless),
    ("S59", "pass@1 up, pass@8 down", sharpened),
    ("F12", "the evaluation renders another template", templates),
    ("S90", "half a line, foreign lines, or a lost block", damaged),
    ("S91", "the lines end and nothing says why", silent),
    (
        "P3",
        "an alarm that a worker was killed",
        partial(alarmed, "worker_lost", "worker 3 was ended at 61 GiB of host memory"),
    ),
    (
        "S95",
        "an alarm that drafts are not accepted",
        partial(alarmed, "acceptance", "0.0005 of the drafts accepted, 0.283 before"),
    ),
    ("F11", "an alarm that the disk is full", partial(alarmed, "disk_full", "no space left on device while saving step 40")),
)
FAULTS: tuple[Fault, ...] = (
    *(Fault(id, "records", what, make=make, name=by_doctor, seconds=0.5) for id, what, make in MADE),
    Fault("P30", "records", "one recipe under two defaults of averaging", make=frameworks, name=by_difference, seconds=0.5),
)


def sound(path: Path, seed: int) -> Path:
    """A run with records of every kind and nothing wrong with them."""
    r = generator("sound", seed)
    both = _pair(r, Skill(0.4), Skill(0.58))
    kept = _pair(r, Skill(0.45), Skill(0.45), "retention", items_digest="77aa77aa77aa77aa")
    return a_run(path, r, {label: {**both[label], **kept[label]} for label in both})


HEALTHY: tuple[Fault, ...] = (Fault("healthy", "records", "a run with sound records", make=sound, name=by_doctor, seconds=0.5),)
