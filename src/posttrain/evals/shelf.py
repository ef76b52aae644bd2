"""Evaluation records on the disk: one file, a folder of them, a run, or one model of a run.

sums.json        one record
evals/           every record of the folder, perhaps of several models
runs/ladder      the records of a run, which lie in its evals/
runs/ladder:sft  those of the model that is called sft there
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.core.errors import EvidenceError, RunError
from posttrain.core.files import is_leftover, read_json
from posttrain.evals.record import EvalRecord

MAX_BYTES = 1 << 28
"""A record of a million samples has about 100 MB; a larger file is something else."""


def read_record(path: str | Path) -> EvalRecord:
    """The record in a file; one line names the file and what is wrong with it."""
    path = Path(path)
    if path.is_dir():
        raise EvidenceError(f"{path} is a folder; name one record in it")
    try:
        if path.is_file() and (size := path.stat().st_size) > MAX_BYTES:
            raise EvidenceError(f"it has {size >> 20} MB, too large for an evaluation record; name another file")
        return EvalRecord.from_json(read_json(path))
    except RecursionError:
        raise EvidenceError(f"{path}: nested too deeply to be an evaluation record; evaluate again") from None
    except RunError as error:
        raise EvidenceError(one_line(str(error))) from None
    except EvidenceError as error:
        raise EvidenceError(one_line(f"{path}: {error}")) from None


def read_records(where: str | Path) -> list[EvalRecord]:
    """The records that `where` names, by file name; never empty. See the module for what it may name."""
    path, label = _split(str(where))
    if path.is_file():
        records = [read_record(path)]
    else:
        folder = path / "evals" if (path / "evals").is_dir() else path
        if not folder.is_dir():
            raise EvidenceError(f"{where}: no such file or folder; records are written by posttrain eval --out, and by runs into evals/")
        files = sorted(file for file in folder.glob("*.json") if file.is_file() and not is_leftover(file.name))
        if not files:
            raise EvidenceError(f"{folder}: no evaluation record (*.json) in it; write some with posttrain eval MODEL --out {folder}")
        records = [read_record(file) for file in files]
    if label:
        labels = labels_of(records)
        records = [record for record in records if record.label == label]
        if not records:
            raise EvidenceError(f"{path} has no evaluation of '{label}'; it has {', '.join(labels)}")
    twice = [key for key, count in Counter((record.label, record.conditions.suite) for record in records).items() if count > 1]
    if twice:
        raise EvidenceError(f"{where}: two records of '{twice[0][0]}' on '{twice[0][1]}'; keep one per model and suite in a folder")
    return records


def labels_of(records: Sequence[EvalRecord]) -> list[str]:
    """Which models were measured, in order of appearance."""
    return list(dict.fromkeys(record.label for record in records))


def tell_apart(places: Sequence[tuple[str, Sequence[EvalRecord]]]) -> list[list[EvalRecord]]:
    """The records of several places; models of two places that share a name but not their weights are called by their place as well.

    Example: "grpo" of runs/a and "grpo" of runs/b become "runs/a:grpo" and "runs/b:grpo".
    """
    weights: dict[str, set[str]] = {}
    for record in (record for _, records in places for record in records):
        weights.setdefault(record.label, set()).add(record.model_digest)

    def named(where: str, record: EvalRecord) -> EvalRecord:
        if len(weights[record.label]) == 1:
            return record
        return replace(record, label=where if where.endswith(f":{record.label}") else f"{where}:{record.label}")

    return [[named(where, record) for record in records] for where, records in places]


def pair_up(a: Sequence[EvalRecord], b: Sequence[EvalRecord]) -> list[tuple[EvalRecord, EvalRecord]]:
    """Records of the same suite: of one model with one model, or, where both sides hold several, of models with the same name.

    A suite that one side lacks has no pair. Raises EvidenceError when one side holds several models, and when nothing pairs.
    """
    labels = [labels_of(side) for side in (a, b)]
    several = [len(names) > 1 for names in labels]
    if several[0] != several[1]:
        names = labels[0 if several[0] else 1]
        raise EvidenceError(f"one side holds {len(names)} models ({', '.join(names)}); choose one of them, as PATH:{names[0]}")

    def key(record: EvalRecord) -> tuple[str, str]:
        return (record.label if all(several) else "", record.conditions.suite)

    theirs = {key(record): record for record in b}
    pairs = [(record, theirs[key(record)]) for record in a if key(record) in theirs]
    if not pairs:
        suites = [", ".join(dict.fromkeys(record.conditions.suite for record in side)) for side in (a, b)]
        raise EvidenceError(f"no suite was measured on both sides: {suites[0]} against {suites[1]}; measure both on the same")
    return pairs


def one_line(text: str) -> str:
    """A message without the line ends that a foreign file may have put into it."""
    return " ".join(text.split())


def _split(where: str) -> tuple[Path, str]:
    """Path and model name; a path that exists is one, whatever colons it has."""
    head, colon, label = where.rpartition(":")
    if colon and head and not Path(where).exists():
        return Path(head), label
    return Path(where), ""
