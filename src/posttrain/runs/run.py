"""The run directory: the only output of a run, and all that is needed to continue, explain or check it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from posttrain.core.config import Config
from posttrain.core.digest import file_digest
from posttrain.core.errors import RunError
from posttrain.core.files import (
    JsonlWriter,
    atomic_dir,
    encode_line,
    is_leftover,
    read_jsonl,
    tidy,
    write_atomic,
    write_json,
)
from posttrain.runs.lineage import Parent, check_one_variable, descend, drifted
from posttrain.runs.manifest import (
    CONFIG,
    MANIFEST,
    PATCH,
    READABLE,
    Difference,
    build_manifest,
    code_state,
    differences,
    now,
    package_folder,
    sealed,
    shown,
    surroundings,
    value_or_none,
)
from posttrain.runs.reading import files, load_mapping, plain
from posttrain.runs.recorder import ALARMS, METRICS, NO_SECONDS, SCHEMA, RunFiles, SilentRun, rollout_name, schedule_name

NOTED = ("kernels", "detected")
PRODUCED = ("summary.json", "*.jsonl", "rollouts/*.jsonl", "evals/*.json", "stages/*.json")
"""Records with a digest in the manifest of a finished run. Models have theirs in the record of their stage; the report is a view."""
_RESERVED = frozenset({"schema", "stage", "step", "seconds"})


class Run(RunFiles):
    """One run directory. Use `Run.create`, `Run.resume` or `Run.open`; other processes of the same run use `Run.silent`.

    Example: run = Run.create("runs/a", config=config, command=["posttrain", "ladder"], seeds={"seed": 0})
             run.metric("sft", 1, {"loss": 2.5}, {"step": 0.3})
             # metrics.jsonl: {"schema": 1, "stage": "sft", "step": 1, "loss": 2.5, "seconds": {"step": 0.3}}
    """

    def __init__(self, path: Path, *, writable: bool):
        super().__init__(path)
        self.manifest: dict[str, Any] = _read_manifest(path / MANIFEST)
        self._writable = writable
        self._writers: dict[str, JsonlWriter] = {}
        self.notes: list[str] = []
        """What a person should know about how this process took the run up, one line each."""

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        config: Config,
        command: Sequence[str],
        seeds: Mapping[str, Any],
        digests: Mapping[str, Any] | None = None,
        parent: Parent | None = None,
        stages: Sequence[str] = (),
        one_variable: bool = False,
    ) -> Self:
        """Start a run in a new or empty directory.

        `digests` identify the inputs, `parent` is the run this one starts from (lineage.find_parent), `stages` are the stages that make it
        complete. With `one_variable`, more than one changed setting or input relative to `parent` is a ConfigError that names them. Raises
        RunError when the directory holds something, StorageError when it cannot be written.
        """
        path = Path(path).resolve()
        if path.exists() and (not path.is_dir() or any(not is_leftover(entry.name) for entry in path.iterdir())):
            remedy = "continue it with --resume or choose another --out" if (path / MANIFEST).exists() else "choose another --out"
            raise RunError(f"{path} exists and is not empty; {remedy}")
        settings = config.model_dump(mode="json")
        code = code_state(package_folder())
        manifest = build_manifest(config=settings, command=command, seeds=seeds, digests=digests or {}, code=code)
        if parent is not None:
            manifest["parent"] = descend(parent, settings, digests or {}, stages, manifest)
        if one_variable:
            check_one_variable(manifest["parent"])
        with atomic_dir(path) as folder:
            write_json(folder / MANIFEST, sealed({**manifest, "stages": list(stages)}))
            if code.patch:
                write_atomic(folder / PATCH, code.patch)
            write_atomic(folder / CONFIG, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        return cls(path, writable=True)

    @classmethod
    def resume(
        cls,
        path: str | Path,
        *,
        config: Config,
        ignore: Sequence[str] = (),
        digests: Mapping[str, Any] | None = None,
        accept: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> Self:
        """Continue a run with the settings and inputs it was started with.

        `ignore` lists dotted keys (with everything below them) that may differ, `accept` names inputs that may (keys of `digests`). What
        does differ is entered in the manifest's history, said in `notes`, and holds from then on. Raises RunError naming what differs.
        """
        path = Path(path).resolve()
        run = cls.open(path)
        ignored = tuple(f"{name}." for name in ignore)
        settings = differences(run.config(), config.model_dump(mode="json"))
        refused = [found for found in settings if not f"{found[0]}.".startswith(ignored)]
        if refused:
            raise RunError(
                f"{path} was started with other settings: {_some(shown(refused))}; resume with the same ones or choose another --out"
            )
        inputs = differences(run.manifest["digests"], run.manifest["digests"] if digests is None else digests)
        if unknown := sorted(set(accept) - {*run.manifest["digests"], *(digests or {})}):
            known = ", ".join(sorted({*run.manifest["digests"], *(digests or {})})) or "none"
            raise RunError(f"'{unknown[0]}' is no input of {path}, so it cannot be accepted as changed; its inputs are: {known}")
        if refused := [found for found in inputs if found[0] not in accept]:
            names = ",".join(found[0] for found in inputs)
            raise RunError(
                f"{path} was started with other inputs: {_some(shown(refused))}; restore them or choose another --out, "
                f"or go on with what is there now: posttrain resume {path} --accept-changed {names}"
            )
        for folder in [path, *sorted(entry for entry in path.rglob("*") if entry.is_dir() and not is_leftover(entry.name))]:
            tidy(folder)
        run._writable = True
        run._remember(settings, inputs, command)
        return run

    def _remember(self, settings: Sequence[Difference], inputs: Sequence[Difference], command: Sequence[str]) -> None:
        """Keep a permitted change for good: one more entry of the manifest's history. With a `command`, a new process has taken the run
        up: what differs in its code, packages and machine is kept as well."""
        here = surroundings() if command and not self.complete else {}
        drift = drifted({**self.manifest, **self.manifest.get("surroundings", {})}, here) if here else []
        if not (settings or inputs or drift):
            return
        entry = {
            "at": now(),
            "command": list(command),
            "settings": _pairs(settings),
            "inputs": _pairs(inputs),
            "drift": _pairs(drift),
        }
        digests = {**self.manifest["digests"], **{name: new for name, (_, new) in entry["inputs"].items()}}
        self.manifest = {
            **self.manifest,
            **({"surroundings": here} if drift else {}),
            "digests": {name: value for name, value in digests.items() if value is not None},
            "history": [*self.manifest.get("history", ()), entry],
        }
        self._write_manifest()
        self.notes += [f"goes on with another {name}: {old} -> {new}, as was asked for" for name, (old, new) in entry["inputs"].items()]
        for name, (old, new) in entry["settings"].items():
            digits = "; sums of floats run in another order, so last digits may differ from an uninterrupted run"
            self.notes.append(f"goes on with {name} = {new} instead of {old}{digits if name == 'processes' else ''}")

        if drift:
            self.notes.append(f"goes on with other code, packages or machine: {_some(shown(drift))}")

    def note(self, section: str, facts: Mapping[str, Any]) -> None:
        """Enter what was found out while running into the manifest: `kernels` or `detected`. A fact that changes is kept in the history.

        Example: run.note("detected", {"actor": {"dtype": "float32", "quantisation": "none"}})
        """
        if section not in NOTED:
            raise ValueError(f"'{section}' is no section for facts found while running; those are {', '.join(NOTED)}")
        self._check_writable()
        old = self.manifest.get(section, {})
        drift = [item for item in differences({section: old}, {section: {**old, **facts}}) if item[0].split(".")[1] in old]
        if {**old, **facts} == old:
            return
        if drift:
            entry = {"at": now(), "command": [], "settings": {}, "inputs": {}, "drift": _pairs(drift)}
            self.manifest = {**self.manifest, "history": [*self.manifest.get("history", ()), entry]}
        self.manifest = {**self.manifest, section: {**old, **facts}}
        self._write_manifest()

    def finish(self) -> None:
        """Enter the digest of every record that the run produced into the manifest; `verify` compares them. Call it when all is written."""
        self.position()
        records = files(self.path, *PRODUCED)
        self.manifest = {**self.manifest, "produced": {file.relative_to(self.path).as_posix(): file_digest(file) for file in records}}
        self._write_manifest()

    def _write_manifest(self) -> None:
        self.manifest = sealed(self.manifest)
        write_json(self.path / MANIFEST, self.manifest)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read a run without changing anything in it. Raises RunError when `path` is not a run."""
        path = Path(path).resolve()
        if not (path / MANIFEST).is_file():
            raise RunError(f"{path} is not a run (it has no {MANIFEST}); give the directory that was --out")
        return cls(path, writable=False)

    @staticmethod
    def silent(path: str | Path | None = None) -> SilentRun:
        """A recorder with the same methods that writes nothing; with `path` it can read the run."""
        return SilentRun(path)

    def config(self) -> dict[str, Any]:
        """The resolved config in force: as the run was started, with the changes that its history permits."""
        config = self.first_config()
        for entry in self.manifest.get("history", ()):
            for name, (_, new) in entry["settings"].items():
                *parents, leaf = name.split(".")
                place = config
                for parent in parents:
                    place = place.setdefault(parent, {})
                place[leaf] = new
        return config

    def first_config(self) -> dict[str, Any]:
        """The resolved config as the run was started, which is what config.yaml holds and the manifest's digest is of."""
        try:
            return yaml.safe_load((self.path / CONFIG).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise RunError(f"{self.path / CONFIG}: not readable ({str(error).splitlines()[0]})") from None

    @property
    def complete(self) -> bool:
        """Whether every stage that the run declared is finished."""
        stages = self.manifest.get("stages") or ()
        return bool(stages) and all(self.finished(stage) is not None for stage in stages)

    def metric(
        self,
        stage: str,
        step: int,
        values: Mapping[str, float | int | str | None],
        seconds: Mapping[str, float | None] = NO_SECONDS,
    ) -> None:
        """Append one line to metrics.jsonl; `values` in name order.

        Everything the clock decides belongs in `seconds`, so that equal runs write equal bytes elsewhere. A non-finite value becomes
        null and an alarm. Raises ValueError for a value named like a field of the line.
        """
        if taken := sorted(_RESERVED & values.keys()):
            raise ValueError(f"'{taken[0]}' is a field of every metrics line; choose another name for the value")
        floats = {name: float(value) for name, value in sorted(values.items()) if isinstance(value, float)}
        broken = {name: repr(value) for name, value in floats.items() if not math.isfinite(value)}
        line = {name: None if name in broken else values[name] for name in sorted(values)}
        took = {name: value if value is not None and math.isfinite(value) else None for name, value in seconds.items()}
        self._append(METRICS, {"schema": SCHEMA, "stage": stage, "step": step, **line, "seconds": took})
        if broken:
            detail = ", ".join(f"{name} = {value}" for name, value in broken.items())
            self.alarm(stage, step, "non_finite", f"not a finite number: {detail}", broken)

    def rollout(self, stage: str, record: Mapping[str, Any]) -> None:
        """Append one scored completion. Raises ValueError naming the key of a non-finite number."""
        self._append(rollout_name(stage), {"schema": SCHEMA, **record})

    def schedule(self, stage: str, line: Mapping[str, Any]) -> None:
        """Append one line to the stage's schedule."""
        self._append(schedule_name(stage), {"schema": SCHEMA, **line})

    def alarm(self, stage: str, step: int, name: str, detail: str, evidence: Mapping[str, Any]) -> None:
        """Append to alarms.jsonl. Non-finite numbers in `evidence` are written by name ("nan", "inf")."""
        shown = {key: _named(value) for key, value in evidence.items()}
        self._append(ALARMS, {"schema": SCHEMA, "stage": stage, "step": step, "name": name, "detail": detail, "evidence": shown})

    def position(self) -> dict[str, int]:
        """Byte offset of every JSON-lines file, forced to disk first: {"metrics.jsonl": 812, "rollouts/grpo.jsonl": 20144}."""
        writers = {name: self._writer(name) for name in self._line_files()}
        for writer in writers.values():
            writer.sync()
        return {name: writer.offset for name, writer in writers.items()}

    def rewind(self, position: Mapping[str, int]) -> None:
        """Cut every JSON-lines file back to `position`; a file that is not in it goes back to empty.

        Raises RunError when a file is shorter than `position` says: then lines are missing that the checkpoint relies on.
        """
        for name in sorted({*self._line_files(), *position}):
            self._writer(name).truncate(position.get(name, 0))

    def finish_stage(self, stage: str, info: Mapping[str, Any]) -> None:
        """Mark a stage complete. `info["digests"]` maps paths within the run to file digests that `verify` checks."""
        self._check_writable()
        write_json(self.stage_file(stage), {"schema": SCHEMA, "stage": stage, **info})

    def save_eval(self, name: str, record: Mapping[str, Any]) -> None:
        """Store an evaluation under its name, replacing an earlier one."""
        self._check_writable()
        write_json(self.eval_file(name), {"schema": SCHEMA, **record})

    def close(self) -> None:
        """Release the open files; the run can still be used."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        self._writer(name).append(record)

    def _writer(self, name: str) -> JsonlWriter:
        self._check_writable()
        if name not in self._writers:
            self._writers[name] = JsonlWriter(self.path / name)
        return self._writers[name]

    def _line_files(self) -> list[str]:
        found = [*self.path.glob("*.jsonl"), *self.path.glob("rollouts/*.jsonl")]
        return sorted(path.relative_to(self.path).as_posix() for path in found)

    def _check_writable(self) -> None:
        if not self._writable:
            raise RunError(f"{self.path} was opened for reading only; use Run.create or Run.resume to write")


def deterministic_bytes(path: str | Path) -> bytes:
    """A JSON-lines file without what the clock decides: every line without its "seconds". Equal runs give equal bytes."""
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in read_jsonl(path)]
    return b"".join(encode_line(line) for line in lines)


def _read_manifest(path: Path) -> dict[str, Any]:
    found, problem = load_mapping(path)
    if problem is not None:
        raise RunError(f"{path}: {problem}; posttrain runs verify {path.parent} says what else is damaged")
    if found.get("schema_version", 1) not in READABLE:
        version = plain(found["schema_version"], 20)
        raise RunError(
            f"{path} has schema {version}, and this version reads {', '.join(map(str, READABLE))}; use the version that wrote it"
        )
    return found


def _pairs(found: Sequence[Difference]) -> dict[str, list[Any]]:
    return {name: [value_or_none(old), value_or_none(new)] for name, old, new in found}


def _named(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if isinstance(value, Mapping):
        return {key: _named(item) for key, item in value.items()}
    return [_named(item) for item in value] if isinstance(value, list | tuple) else value


def _some(lines: Sequence[str]) -> str:
    more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
    return ", ".join(lines[:3]) + more
