"""What every recipe is made of: a session over a run directory, rungs that are trained once and kept, measurements between them."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerFast

from posttrain.core.config import Config
from posttrain.core.errors import ConfigError, Halted, Interrupted, PosttrainError
from posttrain.core.files import atomic_dir, read_json
from posttrain.core.storage import EXPECTED_MOUNT, Room, bytes_below, check_place
from posttrain.engine.export import adapter_bytes, export_bytes, training_bytes
from posttrain.engine.local import LocalSampler
from posttrain.engine.processes import Ranks, launch
from posttrain.engine.runtime import choose
from posttrain.engine.weights import weights_digest
from posttrain.evals.record import EvalRecord
from posttrain.evals.runner import check_truncation, openings_for, records_from
from posttrain.evals.suite import Suite
from posttrain.loops.session import Session
from posttrain.models.loading import load, save, stored
from posttrain.models.lora import LoRA, merged
from posttrain.recipes.guarding import advice_of, leave_postmortem, watch_of
from posttrain.render.audit import audit
from posttrain.render.renderer import ChatRenderer
from posttrain.rollout.episodes import play
from posttrain.runs.console import Console
from posttrain.runs.detected import Stored, detect, mismatches
from posttrain.runs.hardware import kernels
from posttrain.runs.interrupt import StopSignal, resume_hint
from posttrain.runs.lineage import NEUTRAL, find_parent
from posttrain.runs.manifest import CONFIG, MANIFEST, PATCH, differences
from posttrain.runs.run import Run

FREE = NEUTRAL
"""Settings that may change when a run is resumed: they leave what is computed alone, up to the order of additions."""
ONE_VARIABLE = "POSTTRAIN_ONE_VARIABLE"
"""Environment variable; when it is 1, a run may differ in one setting or input from the run it starts from, or it is refused."""
FLOATS: Mapping[str, Any] = {"dtype": "float32", "quantisation": "none"}
"""What every model is loaded as unless a recipe asks for something else; machine.precision is that of the arithmetic."""
SUMMARY, REPORT = "summary.json", "report.html"
Body = Callable[[Session, Any], dict[str, Any]]
"""A recipe: what it does with a session and its settings, and the summary it ends with and leaves in the run."""


def execute(
    body: Body,
    settings: Config,
    out: str | Path,
    *,
    resume: bool,
    stages: Sequence[str],
    digests: Mapping[str, str],
    accept_changed: Sequence[str] = (),
    expected_mount: str | None = None,
) -> dict[str, Any]:
    """Create or reopen the run at `out`, then run `body(session, settings)` on as many processes as the machine suggests.

    `settings` must have `seed` and `processes`; a number of processes that the user left open is fixed at creation and kept on resuming,
    because another number adds the same floats in another order. `accept_changed` names inputs (keys of `digests`) that may differ from
    those the run was started with; `expected_mount` (or $POSTTRAIN_EXPECTED_MOUNT) the volume that `out` must lie on. A run that is
    finished is left as it is, and its summary returned. A run that starts from another one records what it changes;
    $POSTTRAIN_ONE_VARIABLE=1 refuses more than one change.
    """
    if accept_changed and not resume:
        raise ConfigError(f"nothing can have changed ({', '.join(accept_changed)}) in a run that begins; accept changes when resuming one")
    out = Path(out)
    command = [_program(Path(sys.argv[0])), *sys.argv[1:]]
    processes = settings.processes  # type: ignore[attr-defined]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes = int(os.environ["WORLD_SIZE"])
        if os.environ["RANK"] != "0":
            return launch(_in_session, processes, body, settings, str(out), command)
    doubt = check_place(out, expected_mount or os.environ.get(EXPECTED_MOUNT))
    if resume:
        processes = processes or Run.open(out).config().get("processes")
        settings = settings.model_copy(update={"processes": processes})
        run = Run.resume(out, config=settings, ignore=FREE, digests=digests, accept=accept_changed, command=command)
        if (finished := _finished(run)) is not None and "TORCHELASTIC_RUN_ID" not in os.environ:
            if "record_digest" in run.manifest and "produced" not in run.manifest:  # it was killed after its last record
                run.finish()
            Console().line(f"{out} is finished already: nothing to do")
            return finished
    else:
        processes = choose(processes).processes
        settings = settings.model_copy(update={"processes": processes})
        seeds = {"seed": settings.seed}  # type: ignore[attr-defined]
        parent, alone = find_parent(settings.model_dump(mode="json"), command), os.environ.get(ONE_VARIABLE) == "1"
        run = Run.create(
            out, config=settings, command=command, seeds=seeds, digests=digests, parent=parent, stages=stages, one_variable=alone
        )
        run.notes += [doubt] if doubt else []  # said once, when there is still time to choose another place
        run.notes += advice_of(settings, settings.guard)  # type: ignore[attr-defined]
    run.close()
    try:
        return launch(_in_session, choose(processes).processes, body, settings, str(out), command, run.notes)
    except PosttrainError as error:
        if isinstance(error, Halted):
            leave_postmortem(out)
        if not resume:
            _discard_unused(out)
        raise


def _program(entry: Path) -> str:
    """The name a person would type: `python -m posttrain.cli.main` is `posttrain`."""
    return "posttrain" if entry.parts[-2:] == ("cli", "main.py") else entry.name


def _discard_unused(out: Path) -> None:
    """Take a new run away that failed before it recorded anything: the corrected command may then use the same directory."""
    if {entry.name for entry in out.iterdir()} <= {MANIFEST, CONFIG, PATCH}:
        shutil.rmtree(out)


def _finished(run: Run) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do; None of any other."""
    whole = run.complete and (run.path / SUMMARY).is_file() and (run.path / REPORT).is_file()
    return read_json(run.path / SUMMARY) if whole else None


def _in_session(ranks: Ranks, body: Body, settings: Any, out: str, command: Sequence[str], notes: Sequence[str] = ()) -> dict[str, Any]:
    run = Run.resume(out, config=settings) if ranks.first else Run.silent(out)
    console = Console() if ranks.first else Console.quiet()
    with StopSignal() as stop, closing(run) if isinstance(run, Run) else nullcontext():
        session = Session(ranks, run, console, stop, settings.seed, settings.save_every, command, machine=settings.machine)
        session.guard, session.watcher = settings.guard, watch_of(settings, settings.guard) if ranks.first else None
        console.line(choose(ranks.size).describe())
        for note in notes:
            console.warn(note)
        run.note("kernels", kernels())
        whole = ranks.first and not run.metrics()  # what was finished earlier read its settings then
        result = body(session, settings)
        if whole and (unread := _without_effect(settings)):
            console.warn(f"these settings had no effect on this run: {', '.join(unread)}")
        if isinstance(run, Run):
            run.finish()
        return result


def _without_effect(settings: Config) -> list[str]:
    """Settings that differ from their defaults and that nothing read."""
    unread = tuple(f"{name}." for name in settings.unread())
    given = settings.model_dump(mode="json")
    required = {name: given[name] for name, field in type(settings).model_fields.items() if field.is_required()}
    required |= {name: {"kind": value["kind"]} for name, value in given.items() if isinstance(value, dict) and "kind" in value}
    changed = differences(type(settings).load(required).model_dump(mode="json"), given)
    return [name for name, _, _ in changed if f"{name}.".startswith(unread)]


def chat_renderer(session: Session, tokenizer: PreTrainedTokenizerFast, system: str | None) -> ChatRenderer:
    """The renderer of a run; what its chat template does that a user should know is shown once, before anything is trained."""
    for problem in audit(tokenizer).problems:
        session.console.line(f"chat template: {problem}")
    return ChatRenderer(tokenizer, system=system)


def rung(session: Session, name: str, tokenizer: PreTrainedTokenizerFast, equation: str, train: Callable[[], nn.Module]) -> nn.Module:
    """The model of one rung: trained now and kept in Hugging Face format, or loaded when an earlier process finished it."""
    session.tokenizer = tokenizer  # goes with the exports of this rung's checkpoints
    if session.finished(name) is not None:
        session.console.line(f"{name}: done already")
        return load(str(kept(session, name)))[0]
    session.console.line(f"{name}: {equation}")
    with session.timed(name) as info:
        info["batch_equation"] = equation
        model = merged(train())
        note_weights(session, {"actor": model}, stage=name)
        keep(session, name, model, tokenizer)
    return model


def check_space(
    session: Session, model: nn.Module, tokenizer: PreTrainedTokenizerFast, *, rungs: int, lora: LoRA | None, critic: bool = False
) -> None:
    """Refuse, before anything is computed, a run whose checkpoints and finished models (`rungs` of them) do not fit on the disk."""
    note_weights(session, {"actor": model})
    whole, machine = export_bytes(model, tokenizer), session.machine
    trained = training_bytes(model, machine.optimizer) if lora is None else adapter_bytes(model, lora, machine.optimizer)
    one = trained * (2 if critic else 1) + whole * machine.export
    present = bytes_below(session.run.path) if session.ranks.first else 0
    session.check_room(session.run.path, Room(one, machine.save_total_limit + 1, whole * rungs, present=present))


def note_weights(
    session: Session, roles: Mapping[str, nn.Module | None], requested: Mapping[str, Any] = FLOATS, *, stage: str | None = None
) -> None:
    """Record what the weights of each role (detected.ROLES) really are, however they were asked for; a difference is said.

    Within a `stage` it is also an alarm of the run. Call it there only while the stage is being timed: what is recorded between two
    stages is forgotten when the next one begins.
    """
    if not session.ranks.first:
        return
    found = {role: detect(Stored(*tensor) for tensor in stored(model)) for role, model in roles.items() if model is not None}
    session.run.note("detected", found)
    for role, facts in found.items():
        for detail in mismatches(role, requested, facts):
            session.console.warn(detail)
            if stage is not None:
                evidence = {"role": role, "requested": dict(requested), "detected": facts}
                session.run.alarm(stage, 0, "precision_mismatch", detail, evidence)


def kept(session: Session, name: str) -> Path:
    """Where a finished rung's model lies."""
    return session.run.checkpoint_root(name) / "final"


def keep(session: Session, name: str, model: nn.Module, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save a rung's model and tokenizer."""
    if session.ranks.first:
        with atomic_dir(kept(session, name)) as folder:
            save(model, tokenizer, folder)


@contextmanager
def counting(session: Session, title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A progress bar fed by a sampler's `progress` callback. A stop takes effect there at once: there is no step to finish or save."""
    with session.console.stage(title, total=total, unit=unit) as bar:

        def progress(n: int) -> None:
            bar.advance(n)
            if session.stop.requested:
                raise Interrupted(f"{title} stopped; it starts over when the run is resumed; {resume_hint(session.command)}")

        yield progress


def measure(
    session: Session,
    label: str,
    model: nn.Module,
    renderer: ChatRenderer,
    suites: Sequence[Suite],
    *,
    seed: int,
    judge: Callable[[dict[str, EvalRecord]], None] | None = None,
) -> dict[str, EvalRecord]:
    """Evaluate one rung on every suite, in the same conditions for every rung; records and example rollouts go to the run.

    Ranks share the requests. Done once: a resumed run reads the stored records, and what `judge` wrote about them when they were new.
    """
    stage = f"eval.{label}"
    if session.finished(stage) is not None:
        return {suite.name: EvalRecord.from_json(_stored(session, f"{label}.{suite.name}")) for suite in suites}
    session.rewind()
    started = time.monotonic()
    with session.timed(stage):
        sampler = LocalSampler(model, renderer.stop_ids, renderer.special_ids)
        mine = session.ranks.share(openings_for(suites, renderer, seed))
        with counting(session, f"evaluate {label}", len(mine), "episode") as progress:
            trajectories = session.ranks.interleave(play(sampler, renderer, mine, progress))
        records = records_from(
            suites,
            trajectories,
            renderer,
            seed=seed,
            label=label,
            on_example=lambda example: session.run.rollout(stage, example),
            model_digest=weights_digest(model),
        )
        for name, record in records.items():
            session.run.save_eval(f"{label}.{name}", record.to_json())
        if judge:
            judge(records)
    shown = ", ".join(f"{name} {record.pass_at_1:.1%}" for name, record in records.items())
    session.console.line(f"{label}: {shown}  ({time.monotonic() - started:.0f} s)")
    check_truncation(suites, records)
    return records


def _stored(session: Session, name: str) -> dict[str, Any]:
    record = session.run.eval(name)
    if record is None:
        raise FileNotFoundError(f"evaluation '{name}' is marked done but its file is missing; restore evals/ or start a new run")
    return record
