"""One stage at a time, on the user's own model, data and reward: `sft`, `dpo`, `rl`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import nn
from transformers import PreTrainedTokenizerFast

from posttrain.core.config import Config
from posttrain.core.digest import digest, file_digest
from posttrain.core.errors import ConfigError
from posttrain.core.files import write_json
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive, python_rng
from posttrain.core.tasks import Demonstration, Message, Task, tasks_digest
from posttrain.core.trajectory import TRAINED_OWNERS, Sample, Tokens
from posttrain.core.verdicts import GateVerdict
from posttrain.engine.machine import Machine
from posttrain.envs import rows
from posttrain.envs.sources import source
from posttrain.envs.types import EnvOf, TaskSource, env_of
from posttrain.evals.handover import handover
from posttrain.evals.ladder_table import summarise
from posttrain.evals.record import EvalRecord
from posttrain.evals.suite import Suite, origin_of
from posttrain.loops import preference, rl
from posttrain.loops import sft as supervised
from posttrain.loops.guard import Guard
from posttrain.loops.preference import DPO
from posttrain.loops.rl_settings import RL, CriticSettings, World, check, check_asynchronous, check_episodes
from posttrain.loops.session import Session
from posttrain.loops.sft import SFT
from posttrain.models.identity import identity
from posttrain.models.loading import load, resolve
from posttrain.models.lora import LoRA, add_lora
from posttrain.objectives.objective import Objective
from posttrain.recipes.chat import model_of
from posttrain.recipes.contract import check_acceleration, proven_path
from posttrain.recipes.gates import keep_verdict, launch_gate, register_thresholds
from posttrain.recipes.guarding import pulse_of, spare
from posttrain.recipes.pipeline import SUMMARY, chat_renderer, check_space, execute, measure, note_weights, rung
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.graders import FunctionGrader, MathGrader
from posttrain.rewards.proof import prove
from posttrain.rewards.types import Grader
from posttrain.rollout.asynchronous.settings import Async
from posttrain.rollout.samples import Pair, supervised_sample, text_sample
from posttrain.runs.report import write_report

Reward = Callable[[Task, str], float | None]
"""A user's reward function: the task and the completion's text to a number, or None when it could not be judged."""
HELD_OUT_PERCENT = 10
"""Share of a user's own tasks that is kept for measuring, chosen by task id."""


class SingleRun(Config):
    """What every single-stage run needs: a model, a seed, something to measure on."""

    model: str
    """A folder, a run directory (its last rung) or RUN:RUNG, a .gguf file, a hub id, or 'smollm2'."""
    seed: int = Field(default=0, ge=0)
    processes: int | None = Field(default=1, ge=1)
    """Processes to use; None means one per core. A script that asks for more than one needs the `if __name__ == "__main__"` guard."""
    save_every: int = Field(default=50, ge=1)
    """Steps between checkpoints."""
    system: str | None = None
    lora: LoRA | None = None
    task: str | None = None
    """Name of a task source to train on (rl) and to measure on before and after, e.g. 'arithmetic'."""
    task_settings: dict[str, Any] = {}
    turns: int = Field(default=4, ge=1)
    """Most assistant turns of an episode, for tasks with tools to call."""
    held_out: int = Field(default=200, ge=2)
    """Most held-out items to measure on."""
    sampling: Sampling = Sampling(max_tokens=128)
    """How completions are drawn, in training and in measuring."""
    machine: Machine = Machine()
    guard: Guard = Guard()


class SFTRun(SingleRun):
    """Supervised fine-tuning on conversational (`messages`), prompt/completion or plain `text` rows."""

    data: str | None = None
    """JSONL or parquet path, or a hub id `name[@config][:split]`. Without it, demonstrations of `task`."""
    demonstrations: int = Field(default=2000, ge=1)
    """How many to draw from `task` when there is no data."""
    sft: SFT = SFT()


class DPORun(SingleRun):
    """Direct preference optimisation on rows with `prompt`, `chosen`, `rejected`."""

    data: str
    dpo: DPO = DPO()


class RLRun(SingleRun):
    """Reinforcement learning on a task source, on rows with a prompt and an answer, or on tasks handed over in Python."""

    data: str | None = None
    """Rows with `prompt` (or `question`) and `answer`; graded by value after '####'."""
    teacher: str | None = None
    """Model to learn from, for objectives with advantage=teacher: its log-probabilities replace the reward."""
    rl: RL = RL()
    objective: Objective = Objective()
    """Which policy gradient: a name (posttrain explain lists them), or any choice on its axes."""
    critic: CriticSettings = CriticSettings()
    asynchronous: Async | None = None
    """Draw rollouts while training, by workers with weights of their own; e.g. asynchronous.bound=2."""
    acceleration: str | None = None
    """A faster sampling path, e.g. int8, whose gates have passed on `model`: see posttrain contract."""


def train(
    settings: SFTRun | DPORun | RLRun,
    out: str | Path,
    *,
    resume: bool = False,
    tasks: Sequence[Task] = (),
    reward: Reward | None = None,
    accept_changed: Sequence[str] = (),
    expected_mount: str | None = None,
) -> dict[str, Any]:
    """Run one stage into the run directory `out`; returns its summary (scores before and after, when there is something to measure on).

    Args:
        tasks: your own tasks, instead of `settings.task` or `settings.data` (RL and measuring).
        reward: your own reward function, instead of the source's grader.
        accept_changed: inputs that may differ from those of the run that is resumed: data, held_out, model, tokenizer, template, teacher.
        expected_mount: mount point, device or file system type that `out` must lie on.
    """
    settings = settings.model_copy(update={"model": model_of(settings.model)})  # "the last rung" must not move before a resume
    resolve(settings.model)
    if isinstance(settings, RLRun):
        check(settings.rl, settings.objective, settings.sampling, teacher=settings.teacher is not None)
        check_asynchronous(settings.asynchronous, settings.rl, settings.objective)
        check_acceleration(settings.acceleration, settings.model, ahead=settings.asynchronous is not None)
    grader = FunctionGrader(reward, f"{getattr(reward, '__name__', 'reward')}/user") if reward else None
    practice = Practice.of(settings, tasks, grader)
    if isinstance(settings, RLRun):
        check_episodes(practice.env_of if practice else None, settings.objective)
    if isinstance(settings, SFTRun) and settings.data is None and (practice is None or practice.source is None):
        raise ConfigError("sft needs rows to imitate: set data=FILE, or task=NAME for demonstrations (posttrain recipes lists the names)")
    data = getattr(settings, "data", None)
    digests = identity(settings.model) | ({"data": _data_digest(data)} if data else {})
    if isinstance(settings, RLRun) and settings.teacher is not None:
        digests |= {"teacher": identity(settings.teacher).get("model", settings.teacher)}
    if practice:
        digests |= {"held_out": tasks_digest(practice.held_out)}
        practice.prove()
    name = type(settings).__name__.removesuffix("Run").lower()
    stages = (["eval.before"] if practice else []) + [name] + (["eval.after"] if practice else [])
    body = partial(_body, practice=practice, name=name)
    return execute(
        body,
        settings,
        out,
        resume=resume,
        stages=stages,
        digests=digests,
        accept_changed=accept_changed,
        expected_mount=expected_mount,
    )


class Practice:
    """Tasks to train on and disjoint ones to measure on, with their grader."""

    def __init__(
        self,
        draw: Callable[[int, int], Sequence[Task]],
        held_out: Sequence[Task],
        grader: Grader,
        of: TaskSource | None,
        worlds: EnvOf | None = None,
        spare: Sequence[Task] = (),
    ):
        self.draw, self.held_out, self.grader, self.source = draw, tuple(held_out), grader, of
        self.env_of = worlds
        self.spare = tuple(spare)
        """Held-out tasks that are not measured on: for pulses while training."""

    @classmethod
    def of(cls, settings: SingleRun, tasks: Sequence[Task], grader: Grader | None) -> Practice | None:
        """From the user's tasks, data rows or a named source; None when none is given."""
        data = settings.data if isinstance(settings, RLRun) else None
        if settings.task is not None:
            chosen = source(settings.task, **settings.task_settings)
            return cls(
                partial(_draw_source, chosen),
                _as_many(chosen, settings.held_out),
                grader or chosen.grader,
                None if grader else chosen,
                env_of(chosen),
                spare(chosen, settings.held_out, settings.guard),
            )
        if tasks or data:
            everything = list(tasks) or rows.task_rows(str(data))
            train_tasks, held_out = split(everything)
            measured, left = held_out[: settings.held_out], held_out[settings.held_out :]
            return cls(partial(_draw_list, train_tasks), measured, grader or MathGrader(), None, spare=left)
        if isinstance(settings, RLRun):
            raise ConfigError("rl needs tasks: set task=NAME (posttrain recipes lists them), data=FILE, or pass tasks=[...] in Python")
        return None

    def demonstrations(self, n: int, seed: int) -> list[Demonstration]:
        """`n` training tasks, solved."""
        assert self.source is not None
        return [self.source.demonstration(task) for task in self.source.tasks("train", n, derive(seed, "demonstrations"))]

    def prove(self) -> None:
        """A source's grader shows that it tells right from wrong; a user's own function is taken as it is."""
        if self.source is not None:
            prove(self.grader, list(self.draw(20, 0)), gold=self.source.gold, wrong=self.source.wrong)


def split(tasks: Sequence[Task]) -> tuple[list[Task], list[Task]]:
    """(train, held out): a task's side depends on its id alone, so adding rows never moves one across."""
    held_out = [task for task in tasks if int(digest(task.id), 16) % 100 < HELD_OUT_PERCENT]
    train_tasks = [task for task in tasks if int(digest(task.id), 16) % 100 >= HELD_OUT_PERCENT]
    if len(held_out) < 2 or not train_tasks:
        raise ConfigError(
            f"{len(tasks)} tasks leave {len(held_out)} to measure on and {len(train_tasks)} to train on; give at least about 30"
        )
    return train_tasks, held_out


def _as_many(chosen: TaskSource, most: int) -> list[Task]:
    """Up to `most` held-out tasks: small sources hold fewer."""
    while most > 2:
        try:
            return chosen.tasks("held_out", most, 0)
        except ConfigError:
            most //= 2
    return chosen.tasks("held_out", most, 0)


def _draw_source(chosen: TaskSource, n: int, seed: int) -> Sequence[Task]:
    return chosen.tasks("train", n, seed)


def _draw_list(tasks: Sequence[Task], n: int, seed: int) -> Sequence[Task]:
    rng = python_rng(seed, "tasks")
    return rng.sample(tasks, n) if n <= len(tasks) else rng.choices(tasks, k=n)


def _data_digest(data: str) -> str:
    """Of a file its bytes, of a hub data set its rows: its name would stay the same when they change."""
    if Path(data).is_file():
        return file_digest(data)
    hasher = hashlib.sha256()
    for _, _, fields in rows.read_rows(data):
        hasher.update(json.dumps(fields, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()[:16]


def _body(session: Session, settings: Any, practice: Practice | None, name: str) -> dict[str, Any]:
    model, tokenizer = load(settings.model)
    critic = name == "rl" and settings.objective.needs_critic
    check_space(session, model, tokenizer, rungs=1, lora=settings.lora, critic=critic)
    talks = practice or name != "sft" or rows.kind(str(settings.data)) != "text"
    renderer = chat_renderer(session, tokenizer, settings.system) if talks else None
    records = {}

    def judge(current: dict[str, EvalRecord]) -> None:
        label = current["held_out"].label
        if label == "after" and settings.guard.gates != "off":  # what it starts from is whatever the user brought
            keep_verdict(session, f"eval.{label}", GateVerdict(f"handover.{name}", f"{name}, measured", handover(current["held_out"])))

    def measured(label: str, of: nn.Module) -> None:
        if practice and renderer:
            turns = settings.turns if practice.env_of else 1
            origin = origin_of(practice.source, "held_out") if practice.source else None
            suite = Suite("held_out", practice.held_out, practice.grader, settings.sampling, 1, True, practice.env_of, turns, origin)
            register_thresholds(session)
            records[label] = measure(session, label, of, renderer, [suite], seed=settings.seed, judge=judge)

    measured("before", model)
    learner = model if settings.lora is None else add_lora(model, settings.lora, settings.seed)
    equation, run_stage = _STAGES[name](session, settings, learner, tokenizer, renderer, practice)
    trained = rung(session, name, tokenizer, equation, run_stage)
    measured("after", trained)
    summary = summarise(records, list(records), name, settings.seed, session.seconds)
    if session.ranks.first:
        folder = session.run.path
        write_json(folder / SUMMARY, summary)
        write_report(folder)
    return summary


Prepared = tuple[str, Callable[[], nn.Module]]
"""A stage's batch equation, and the call that runs it."""


def _sft(
    session: Session,
    settings: SFTRun,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    renderer: ChatRenderer | None,
    practice: Practice | None,
) -> Prepared:
    if settings.data is None:
        assert practice is not None
        assert renderer is not None
        samples = [
            supervised_sample(renderer.conversation(shown.messages), f"{index}:{shown.id}")
            for index, shown in enumerate(practice.demonstrations(settings.demonstrations, settings.seed))
        ]
    else:
        samples = supervised_rows(settings.data, tokenizer, renderer)
    return supervised.equation(len(samples), settings.sft), lambda: supervised.sft(session, model, samples, settings.sft)


def _dpo(session: Session, settings: DPORun, model: nn.Module, _tok: PreTrainedTokenizerFast, renderer: ChatRenderer, _: Any) -> Prepared:
    pairs = [preference_pair(row, renderer) for row in rows.preferences(settings.data)]
    return preference.equation(len(pairs), settings.dpo), lambda: preference.dpo(session, model, pairs, settings.dpo)


def _rl(
    session: Session, settings: RLRun, model: nn.Module, _tok: PreTrainedTokenizerFast, renderer: ChatRenderer, practice: Practice
) -> Prepared:
    teacher = load(settings.teacher)[0] if settings.teacher else None
    if teacher is not None:
        note_weights(session, {"teacher": teacher})
    turns = settings.turns if practice.env_of else 1
    faster = proven_path(settings.acceleration, settings.model, renderer) if settings.acceleration else None
    pulse = pulse_of(settings.guard, practice.spare, practice.grader, settings.sampling, practice.env_of, turns)
    world = World(practice.draw, practice.grader, renderer, settings.sampling, teacher, practice.env_of, turns, faster, pulse)
    if not settings.objective.needs_teacher:  # a teacher's word is a signal whatever the rewards are
        launch_gate(session, "rl", model, world, settings.rl.siblings, settings.guard.gates)
    ahead = settings.asynchronous
    equation = rl.equation(settings.rl, settings.objective, session.ranks.size, ahead)
    return equation, lambda: rl.rl(session, model, world, settings.rl, settings.objective, settings.critic, asynchronous=ahead)


_STAGES: dict[str, Callable[..., Prepared]] = {"sft": _sft, "dpo": _dpo, "rl": _rl}


def supervised_rows(data: str, tokenizer: PreTrainedTokenizerFast, renderer: ChatRenderer | None) -> list[Sample]:
    """Rows of any supervised kind as samples."""
    match rows.kind(data):
        case "text":
            return [text_sample(tokenizer, text, f"text-{index}") for index, text in enumerate(rows.texts(data))]
        case "conversation" | "prompt_completion":
            chat = renderer or ChatRenderer(tokenizer)
            return [supervised_sample(chat.conversation(row.messages), row.id) for row in rows.demonstrations(data)]
        case other:
            raise ConfigError(f"'{data}' holds {other} rows; sft needs messages, prompt/completion or text rows")


def preference_pair(row: rows.Preference, renderer: ChatRenderer) -> Pair:
    """A preference of a data set in the model's template; both responses end with the closing token."""
    prompt, chosen = renderer.split((*row.prompt, Message("assistant", row.chosen)))
    _, rejected = renderer.split((*row.prompt, Message("assistant", row.rejected)))
    return Pair(row.id, prompt, _trained_part(chosen), _trained_part(rejected))


def _trained_part(tokens: Tokens) -> Tokens:
    """Up to the last trained token: what the template adds after the turn is no part of the response."""
    end = max(index for index, owner in enumerate(tokens.owners) if owner in TRAINED_OWNERS) + 1
    return Tokens(tokens.ids[:end], tokens.owners[:end])
