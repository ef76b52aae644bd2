"""Everything that can be known before a run of hours, in seconds: words, masks, one real step, saving, and the seam to the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import nn
from transformers import PreTrainedTokenizerFast

from posttrain.checks import preflight_step as stepping
from posttrain.checks import preflight_sync as seam
from posttrain.checks import preflight_text as words
from posttrain.core.config import Config
from posttrain.core.errors import GraderError
from posttrain.core.files import write_json
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.storage import Room
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Sample, Tokens
from posttrain.core.verdicts import Check, GateVerdict
from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.delivery import Limits
from posttrain.engine.export import export_bytes, training_bytes
from posttrain.engine.local import LocalSampler
from posttrain.engine.machine import Machine
from posttrain.engine.processes import Ranks
from posttrain.engine.scoring import shares_prompts
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.envs.sources import source
from posttrain.envs.types import TaskSource
from posttrain.loops.sft import imitation
from posttrain.models.loading import load, save
from posttrain.models.lora import LoRA, add_lora
from posttrain.recipes.chat import model_of
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.proof import prove
from posttrain.rollout.pack import Packing, pack
from posttrain.rollout.samples import supervised_sample

TASKS = 8
"""Tasks of a source that are rendered, graded and trained on."""
HALF = Limits(agree=0.05, noise=0.005)
"""When two log-probabilities are the same where one side computes in bfloat16."""


class PreflightRun(Config):
    """What is going to be run. Nothing is kept: the step is taken on a copy."""

    model: str
    """A folder, a run directory (its last rung) or RUN:RUNG, a .gguf file, a hub id, or 'smollm2'."""
    task: str | None = None
    """Task source, whose conversations, answers and grader are tried too."""
    task_settings: dict[str, Any] = {}
    system: str | None = None
    lora: LoRA | None = None
    sampling: Sampling = Sampling(max_tokens=16)
    optim: Optim = Optim(lr=1e-4, schedule="constant", warmup=0.0)
    machine: Machine = Machine()
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True)
class Subject:
    """What a preflight is about, loaded."""

    settings: PreflightRun
    model: nn.Module
    """With adapters, when there are any; changed by the step."""
    tokenizer: PreTrainedTokenizerFast
    renderer: ChatRenderer
    source: TaskSource | None
    tasks: tuple[Task, ...]
    limits: Limits


def preflight(settings: PreflightRun, out: str | Path = ".", record: str | Path | None = None) -> GateVerdict:
    """Try everything; `out` is where the run would be written, `record` a file for the verdict (JSON).

    Example: preflight(PreflightRun(model="smollm2", task="arithmetic", lora=LoRA())).passed
    """
    subject = prepare(settings)
    rows = words.rendered_rows(subject.renderer, _shown(subject))
    samples = [supervised_sample(row.tokens, str(place)) for place, row in enumerate(rows)]
    samples.append(cut(samples[0]))
    batches = pack(samples, Packing(), share_prompts=shares_prompts(subject.model))
    checks = [
        stepping.dtype_check(subject.model),
        words.tokenizer_check(subject.tokenizer, subject.renderer, _embeddings(subject.model)),
        words.mask_check(rows, subject.renderer),
        words.packing_check(samples, batches),
        *grader_checks(subject),
        room(subject, out),
        *moving_checks(subject, samples),
    ]
    kept, tokenizer = stepping.reload_check(subject.model, subject.tokenizer, rows[0].tokens.ids, save, load)
    saved = ChatRenderer(tokenizer, system=settings.system)
    checks += [kept, words.template_check(subject.tokenizer, subject.renderer, saved)]
    figures = {"template": subject.renderer.digest, "rendered_template": words.rendered_digest(subject.renderer)}
    found = GateVerdict("preflight", settings.model, tuple(checks), figures)
    if record is not None:
        write_json(record, found.as_record())
    return found


def prepare(settings: PreflightRun) -> Subject:
    """Load the model, put adapters on it, and draw the tasks."""
    model, tokenizer = load(model_of(settings.model))
    renderer = ChatRenderer(tokenizer, system=settings.system)
    chosen = source(settings.task, **settings.task_settings) if settings.task else None
    tasks = tuple(chosen.tasks("train", TASKS, derive(settings.seed, "preflight"))) if chosen else ()
    learner = model if settings.lora is None else add_lora(model, settings.lora, settings.seed)
    limits = Limits() if settings.machine.precision == "float32" else HALF
    return Subject(settings, learner, tokenizer, renderer, chosen, tasks, limits)


def _shown(subject: Subject) -> list[Any]:
    return [subject.source.demonstration(task) for task in subject.tasks] if subject.source else []


def cut(sample: Sample) -> Sample:
    """The row as the token budget would cut it: without the token that closes the turn."""
    tokens = sample.tokens
    return Sample(sample.prompt, Tokens(tokens.ids[:-1], tokens.owners[:-1]), "cut")


def _embeddings(model: nn.Module) -> int:
    return model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]


def grader_checks(subject: Subject) -> list[Check]:
    """The grader tells right from wrong, and understands the gold answer as the model would write it."""
    found = subject.source
    if found is None:
        return []
    remedy = "repair the grader, or name the form of the answer in the prompt"
    try:
        report = prove(found.grader, list(subject.tasks), gold=found.gold, wrong=found.wrong)
        proof = Check(
            "grader", True, report.checks, None, f"{report.grader}: {report.checks} scores as they should be", remedy, ("S35", "P21")
        )
    except GraderError as error:
        proof = Check("grader", False, None, None, str(error), remedy, ("S35", "P21", "P33"))
    return [proof, words.answer_check(subject.tasks, found.gold, found.grader, subject.renderer)]


def room(subject: Subject, out: str | Path) -> Check:
    """The checkpoints and the finished model of one stage."""
    machine, whole = subject.settings.machine, export_bytes(subject.model, subject.tokenizer)
    one = training_bytes(subject.model, machine.optimizer) + whole * machine.export
    return stepping.room_check(out, Room(one, machine.save_total_limit + 1, whole))


def moving_checks(subject: Subject, samples: Sequence[Sample]) -> list[Check]:
    """One real step, and the samplers before and after it: one that reads the trainer's weights, one that is sent them."""
    settings, model, renderer, limits = subject.settings, subject.model, subject.renderer, subject.limits
    trainer = LocalTrainer(model, settings.optim, 2, Ranks(), settings.sampling, machine=settings.machine)
    prompts = [renderer.prompt(task.prompt) for task in subject.tasks] or [renderer.prompt(chat[:-1]) for chat in words.PLAIN]
    stops, control = renderer.stop_ids, renderer.special_ids
    live = LocalSampler(model, stops, control)
    courier = seam.Courier(model, CopySampler(model, stops, control), _canary(samples[0]), Limits())
    seed = derive(settings.seed, "preflight", "draw") >> 8  # room for one number per prompt
    with trainer.reading():
        before = seam.side(live, model, prompts, settings.sampling, seed)
    courier.send(0)
    found = stepping.take_steps(model, lambda: trainer.step(*_imitated(model, samples)))
    live.version = trainer.version
    with trainer.reading():
        moved = seam.gap_of(before.said, seam.scored(model, prompts, before.completions, settings.sampling))
        after = seam.side(live, model, prompts, settings.sampling, seed)
    courier.send(1)
    return [
        stepping.loss_check(found),
        stepping.gradient_check(found),
        stepping.moved_check(found),
        seam.agreement_check(before, limits),
        seam.sync_check(before, after, moved, limits),
        courier.check,
    ]


def _imitated(model: nn.Module, samples: Sequence[Sample]) -> tuple[Any, Any]:
    """The rows and the loss of a supervised step."""
    batches = pack(samples, Packing(), share_prompts=shares_prompts(model))
    return batches, imitation(sum(sample.tokens.trained for sample in samples))


def _canary(sample: Sample) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return sample.prompt.ids, sample.tokens.ids
