"""An evaluation that is under way: the outcomes of finished items, in a file beside the record that will hold them all.

    sums.json.partial.jsonl     {"conditions": {...}, "model_digest": "...", "label": "..."}
                                {"start": 0, "items": [{"id": "sums-0", "outcomes": [[1.0, "scored", "end", 7]]}, ...]}
                                {"start": 256, "items": [...]}

One line per batch, appended when the whole batch is judged: a killed process leaves whole batches and perhaps half a line, which is
ignored. Grader errors are outcomes like any other, so that a resumed evaluation counts them all (spec/faults.md 68).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.core.errors import ConfigError, EvidenceError
from posttrain.core.files import JsonlWriter, read_jsonl, remove, write_json
from posttrain.evals.conditions import Conditions, differences
from posttrain.evals.record import EvalRecord, ItemResult, item_from_json, item_to_json
from posttrain.evals.shelf import read_record


def parts_of(target: Path) -> Path:
    """Where the finished items of a record lie until it is complete."""
    return target.with_name(f"{target.name}.partial.jsonl")


def require_free(target: Path) -> None:
    """Refuse to write over a record or over the beginning of one."""
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another file, so that no record is lost")
    if (parts := parts_of(target)).exists():
        raise ConfigError(f"{parts} holds an unfinished evaluation; add --resume to go on with it, or delete the file")


class Partial:
    """The unfinished record of one model under one suite.

    Args:
        target: file of the finished record.
        resume: go on with what is there; without it, anything there is refused.

    Example: Partial("sums.json", conditions, "sft", "dd73...", resume=True).done  ->  [ItemResult("sums-0", ...), ...]
    """

    def __init__(self, target: str | Path, conditions: Conditions, label: str, model_digest: str, *, resume: bool):
        self.target = Path(target)
        self.path = parts_of(self.target)
        self._conditions, self._label, self._model = conditions, label, model_digest
        if not resume:
            require_free(self.target)
        self.finished: EvalRecord | None = self._finished()
        """The record, when an earlier process completed it."""
        lines = [] if self.finished else read_jsonl(self.path)
        self.done: list[ItemResult] = self._done(lines)
        """Items that earlier processes finished, in the order of the suite."""
        if self.finished:
            return
        self._count = len(self.done)
        self._writer = JsonlWriter(self.path)
        if not lines:
            self._writer.append({"conditions": conditions.to_json(), "label": label, "model_digest": model_digest})

    def append(self, items: Sequence[ItemResult]) -> None:
        """Keep one more batch."""
        self._writer.append({"start": self._count, "items": [item_to_json(item) for item in items]})
        self._writer.sync()
        self._count += len(items)

    def complete(self, record: EvalRecord) -> None:
        """Write the record and forget the parts."""
        self._writer.close()
        write_json(self.target, record.to_json())
        remove(self.path)

    def _finished(self) -> EvalRecord | None:
        if not self.target.exists():
            return None
        record = read_record(self.target)
        self._require_mine(self.target, record.conditions, record.label, record.model_digest)
        remove(self.path)
        return record

    def _done(self, lines: Sequence[Any]) -> list[ItemResult]:
        if not lines:
            return []
        done: list[ItemResult] = []
        try:
            head = lines[0]
            self._require_mine(self.path, Conditions.from_json(head["conditions"]), head["label"], head["model_digest"])
            for line in lines[1:]:
                if line["start"] != len(done):
                    raise ValueError(f"items from {line['start']} follow {len(done)} items")
                done += [item_from_json(item) for item in line["items"]]
        except (KeyError, TypeError, ValueError, EvidenceError) as error:
            raise EvidenceError(f"{self.path} cannot be resumed ({type(error).__name__}: {error}); delete it and start anew") from None
        return done

    def _require_mine(self, where: Path, conditions: Conditions, label: str, model_digest: str) -> None:
        """What lies there is of this model in these conditions."""
        found = [str(difference) for difference in differences(conditions, self._conditions)]
        pairs: Mapping[str, tuple[str, str]] = {"label": (label, self._label), "model_digest": (model_digest, self._model)}
        found += [f"{name} is {a!r} against {b!r}" for name, (a, b) in pairs.items() if a != b]
        if found:
            raise ConfigError(f"{where} belongs to another evaluation: {'; '.join(found)}; repeat that one or choose another file")
