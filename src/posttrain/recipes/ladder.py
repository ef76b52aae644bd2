"""The ladder: one base model, taken up its rungs and measured on each.

    base -> SFT (format) -> on-policy pairs -> DPO (taste) -> GRPO (a checkable skill)

The order bears weight: SFT teaches the format that makes pairs comparable and answers parseable, which lifts the success rate out of the
zone where every group of siblings fails alike. Source: spec/ladder-at-100m.md section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import nn
from transformers import PreTrainedTokenizerFast

from posttrain.core.config import Config
from posttrain.core.digest import digest
from posttrain.core.errors import ConfigError
from posttrain.core.files import atomic_dir, read_json, write_json
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive, python_rng
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.local import LocalSampler
from posttrain.engine.machine import Machine
from posttrain.engine.trainer import Optim
from posttrain.envs.arithmetic import Arithmetic
from posttrain.envs.instruct import Instruct
from posttrain.envs.types import TaskSource
from posttrain.envs.word_problems import WordProblems
from posttrain.evals.handover import of_rung
from posttrain.evals.ladder_table import summarise
from posttrain.evals.record import EvalRecord
from posttrain.evals.suite import Suite, origin_of
from posttrain.loops import preference, rl
from posttrain.loops import sft as supervised
from posttrain.loops.guard import Guard
from posttrain.loops.preference import DPO
from posttrain.loops.rl_settings import RL, World, check
from posttrain.loops.session import Session
from posttrain.loops.sft import SFT
from posttrain.models.identity import identity
from posttrain.models.loading import load, resolve
from posttrain.models.lora import LoRA, add_lora
from posttrain.models.tokenizer import CHAT_TEMPLATE
from posttrain.objectives.objective import Objective
from posttrain.recipes.base import TinyBase, base_key, tiny_base
from posttrain.recipes.gates import enforce, keep_verdict, launch_gate, register_thresholds
from posttrain.recipes.guarding import pulse_of, spare
from posttrain.recipes.pipeline import SUMMARY, chat_renderer, check_space, counting, execute, keep, kept, measure, rung
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.proof import prove
from posttrain.rollout.collect import Collector, collect, describe
from posttrain.rollout.samples import Pair, Tie, mine_pairs, supervised_sample
from posttrain.runs.report import write_report

RUNGS = ("base", "sft", "dpo", "grpo")
EVAL_SEED = 1
"""Sampled evaluations draw the same noise on every rung and in every run."""
STAGES = ("base", "eval.base", "sft", "eval.sft", "mine", "dpo", "eval.dpo", "grpo", "eval.grpo")


class Rows(Config):
    """Demonstrations of the SFT rung, by source."""

    arithmetic: int = Field(default=8000, ge=1)
    word_problems: int = Field(default=0, ge=0)
    instruct: int = Field(default=8000, ge=0)
    wrong: float = Field(default=0.3, ge=0, lt=1)
    """Share of the arithmetic demonstrations that carry another problem's answer: format is taught, the skill is left to later rungs."""


class Mine(Config):
    """On-policy pairs: several completions per prompt, best against worst."""

    prompts: int = Field(default=2000, ge=1)
    completions: int = Field(default=4, ge=2)
    tie: Tie = "drawn"
    """Which of several equally scored completions is taken."""


class Measure(Config):
    """Held-out items per suite. The sampled suites draw at the training temperature."""

    arithmetic: int = Field(default=500, ge=2)
    harder: int = Field(default=200, ge=2)
    word_problems: int = Field(default=0, ge=0)
    retention: int = Field(default=100, ge=2)


class Ladder(Config):
    """Settings of the whole ladder; the defaults are the embedded preset."""

    preset: str = "tiny"
    seed: int = Field(default=0, ge=0)
    processes: int | None = Field(default=None, ge=1)
    """Processes to use; by default one per core, at most 4."""
    save_every: int = Field(default=50, ge=1)
    """Steps between checkpoints."""
    model: str = "tiny"
    """'tiny' trains the embedded base; otherwise a folder, a .gguf file or a hub id."""
    system: str | None = None
    """System prompt of every stage; None leaves it to the model's template."""
    base: TinyBase = TinyBase()
    lora: LoRA | None = None
    arithmetic: Arithmetic = Arithmetic(ops=("+",))
    word_problems: WordProblems = WordProblems()
    instruct: Instruct = Instruct()
    rows: Rows = Rows()
    sampling: Sampling = Sampling(max_tokens=16)
    """How completions are drawn in mining, training and the sampled evaluations."""
    sft: SFT = SFT(optim=Optim(lr=2e-3))
    mine: Mine = Mine()
    dpo: DPO = DPO(optim=Optim(lr=5e-5))
    grpo: RL = RL(steps=200, prompts=32, siblings=16)
    algorithm: str = "default"
    """Named objective of the last rung; posttrain explain lists them."""
    measure: Measure = Measure()
    machine: Machine = Machine()
    guard: Guard = Guard()


def ladder(
    settings: Ladder,
    out: str | Path,
    *,
    resume: bool = False,
    accept_changed: Sequence[str] = (),
    expected_mount: str | None = None,
) -> dict[str, Any]:
    """Climb the ladder into the run directory `out`; returns the content of its summary.json.

    `accept_changed` names inputs that may differ from those of the run that is resumed (model, tokenizer, template, or a suite),
    `expected_mount` the volume that `out` must lie on. Raises RunError when `out` holds something already (or, with resume=True, another
    run's settings or inputs).
    """
    check(settings.grpo, Objective.load({"kind": settings.algorithm}), settings.sampling, teacher=False)
    if settings.model != "tiny":
        resolve(settings.model)
    digests = {suite.name: suite.items_digest for suite in suites_of(settings)} | inputs_of(settings)
    return execute(
        climb,
        settings,
        out,
        resume=resume,
        stages=STAGES,
        digests=digests,
        accept_changed=accept_changed,
        expected_mount=expected_mount,
    )


def inputs_of(settings: Ladder) -> dict[str, str]:
    """Digests of the model everything starts from; the embedded base is made from settings and code, and so are its words."""
    if settings.model != "tiny":
        return identity(settings.model)
    return {"model": base_key(settings.base, settings.arithmetic), "template": digest(CHAT_TEMPLATE)}


def climb(session: Session, settings: Ladder) -> dict[str, Any]:
    """All rungs, in order."""
    skills = skills_of(settings)
    prove_graders([*skills, settings.instruct])
    model, tokenizer = base_of(session, settings)
    check_space(session, model, tokenizer, rungs=len(RUNGS), lora=settings.lora)
    renderer = chat_renderer(session, tokenizer, settings.system)
    records: dict[str, dict[str, EvalRecord]] = {}

    def judge(current: dict[str, EvalRecord]) -> None:
        name = current["arithmetic"].label
        records[name] = current
        if name != "base" and settings.guard.gates != "off":  # the base has learnt no form yet, and nothing that could be forgotten
            keep_verdict(session, f"eval.{name}", of_rung(records, name, against="sft"))

    def measured(name: str, rung_model: nn.Module) -> None:
        register_thresholds(session)
        records[name] = measure(session, name, rung_model, renderer, suites_of(settings), seed=EVAL_SEED, judge=judge)
        if name != RUNGS[-1]:  # behind the last rung nothing is built on it: posttrain promote judges the whole run
            enforce(session, f"handover.{name}", settings.guard.gates)

    def learner(of: nn.Module) -> nn.Module:
        return of if settings.lora is None else add_lora(of, settings.lora, settings.seed)

    measured("base", model)
    rows = demonstrations(settings, renderer)
    model = rung(
        session,
        "sft",
        tokenizer,
        supervised.equation(len(rows), settings.sft),
        lambda: supervised.sft(session, learner(model), rows, settings.sft),
    )
    measured("sft", model)
    pairs = mined(session, settings, model, renderer, skills)
    model = rung(
        session,
        "dpo",
        tokenizer,
        preference.equation(len(pairs), settings.dpo),
        lambda: preference.dpo(session, learner(model), pairs, settings.dpo),
    )
    measured("dpo", model)
    objective = Objective.load({"kind": settings.algorithm})
    unseen = spare(settings.arithmetic, settings.measure.arithmetic, settings.guard)
    pulse = pulse_of(settings.guard, unseen, skills[0].grader, settings.sampling)
    world = World(lambda n, seed: draw(skills, n, seed), skills[0].grader, renderer, settings.sampling, pulse=pulse)
    launch_gate(session, "grpo", model, world, settings.grpo.siblings, settings.guard.gates)
    model = rung(
        session,
        "grpo",
        tokenizer,
        rl.equation(settings.grpo, objective, session.ranks.size),
        lambda: rl.rl(session, learner(model), world, settings.grpo, objective, name="grpo"),
    )
    measured("grpo", model)
    return conclude(session, settings, records)


def base_of(session: Session, settings: Ladder) -> tuple[nn.Module, PreTrainedTokenizerFast]:
    """The model that everything starts from, kept in the run like every rung."""
    if session.finished("base") is not None:
        return load(str(kept(session, "base")))
    with session.timed("base"):
        if settings.model == "tiny":
            model, tokenizer = tiny_base(session, settings.base, settings.arithmetic)
        else:
            model, tokenizer = load(settings.model)
        keep(session, "base", model, tokenizer)
    return model, tokenizer


def skills_of(settings: Ladder) -> list[TaskSource]:
    """The sources that pairs and GRPO train on. Both answer after '####' and share a grader."""
    return [settings.arithmetic, settings.word_problems] if settings.rows.word_problems else [settings.arithmetic]


def draw(skills: Sequence[TaskSource], n: int, seed: int) -> list[Task]:
    """`n` training tasks, each from a source chosen at random."""
    choices = python_rng(seed, "source").choices(range(len(skills)), k=n)
    drawn = {index: iter(skills[index].tasks("train", choices.count(index), seed)) for index in sorted(set(choices))}
    return [next(drawn[index]) for index in choices]


def prove_graders(sources: Sequence[TaskSource]) -> None:
    """No run starts on a grader that has not shown that gold scores 1 and wrong or empty answers 0."""
    for source in sources:
        prove(source.grader, source.tasks("train", 20, 0) + source.tasks("held_out", 2, 0), gold=source.gold, wrong=source.wrong)


def suites_of(settings: Ladder) -> list[Suite]:
    """The measurements taken on every rung. Truncation is reported and alarmed, never a reason to lose the run."""
    sampled, greedy = settings.sampling, settings.sampling.model_copy(update={"temperature": 0.0})
    arithmetic, words, chat, n = settings.arithmetic, settings.word_problems, settings.instruct, settings.measure
    suites = [
        _suite("arithmetic", arithmetic, "held_out", n.arithmetic, sampled),
        _suite("arithmetic_greedy", arithmetic, "held_out", n.arithmetic, greedy),
        _suite("harder", arithmetic, "harder", n.harder, sampled),
        _suite("retention", chat, "held_out", n.retention, greedy),
    ]
    if n.word_problems:
        suites.append(_suite("word_problems", words, "held_out", n.word_problems, sampled))
    return suites


def _suite(name: str, of: TaskSource, split: str, n: int, sampling: Sampling) -> Suite:
    return Suite(name, tuple(of.tasks(split, n, 0)), of.grader, sampling, 1, allow_truncation=True, origin=origin_of(of, split))


def demonstrations(settings: Ladder, renderer: ChatRenderer) -> list[Sample]:
    """SFT rows: the arithmetic format, the chat skills, in the model's own template."""
    rows = settings.rows
    sources: list[tuple[TaskSource, int]] = [(settings.arithmetic, rows.arithmetic), (settings.instruct, rows.instruct)]
    if rows.word_problems:
        sources.append((settings.word_problems, rows.word_problems))
    samples = []
    for source, n in sources:
        for index, task in enumerate(source.tasks("train", n, derive(settings.seed, "rows", source.name)) if n else []):
            shown = task if source is not settings.arithmetic else misled(task, rows.wrong, settings, index)
            tokens = renderer.conversation(source.demonstration(shown).messages)
            samples.append(supervised_sample(tokens, f"{source.name}-{index}"))
    return samples


def misled(task: Task, share: float, settings: Ladder, index: int) -> Task:
    """The task, or with probability `share` the task with the answer of another one."""
    rng = python_rng(settings.seed, "rows", "wrong", index)
    if rng.random() >= share:
        return task
    return replace(task, answer=settings.arithmetic.tasks("train", 1, rng.getrandbits(48))[0].answer)


def mined(session: Session, settings: Ladder, model: nn.Module, renderer: ChatRenderer, skills: Sequence[TaskSource]) -> list[Pair]:
    """Pairs from the SFT policy's own completions, drawn once and kept as token ids."""
    store = kept(session, "mine") / "pairs.json"
    if session.finished("mine") is not None:
        return [_pair(record) for record in read_json(store)]
    session.rewind()
    with session.timed("mine") as info:
        sampler = LocalSampler(model, renderer.stop_ids, renderer.special_ids)
        collector = Collector(sampler, renderer, skills[0].grader, settings.sampling, settings.mine.completions, session.ranks)
        tasks = draw(skills, settings.mine.prompts, derive(settings.seed, "mine", "tasks"))
        total = len(session.ranks.share(tasks)) * settings.mine.completions
        with counting(session, "mine pairs", total, "completion") as progress:
            groups = collect(collector, tasks, derive(settings.seed, "mine"), progress)
        found = mine_pairs(groups, settings.mine.tie)
        counts = {"prompts": len(groups), "pairs": len(found.pairs), "tied": found.tied, "incomplete": found.incomplete}
        session.run.metric("mine", 0, counts)
        for group in groups[:8]:
            for rollout in group.rollouts:
                session.run.rollout("mine", describe(group, rollout))
        info |= counts
        if session.ranks.first:
            with atomic_dir(store.parent) as folder:
                write_json(folder / "pairs.json", [_record(pair) for pair in found.pairs])
    session.console.line(f"mine: {len(groups)} prompts = {len(found.pairs)} pairs + {found.tied} tied + {found.incomplete} incomplete")
    if not found.pairs:
        raise ConfigError(
            "mine: no prompt had both a better and a worse complete answer; raise mine.prompts, mine.completions or rows.arithmetic"
        )
    return list(found.pairs)


def _record(pair: Pair) -> dict[str, Any]:
    prompt = {"prompt": list(pair.prompt.ids), "owners": [int(owner) for owner in pair.prompt.owners]}
    return {"id": pair.id, **prompt, "chosen": list(pair.chosen.ids), "rejected": list(pair.rejected.ids)}


def _pair(record: dict[str, Any]) -> Pair:
    prompt = Tokens(tuple(record["prompt"]), tuple(Owner(owner) for owner in record["owners"]))
    chosen, rejected = (Tokens(tuple(record[key]), (Owner.SAMPLED,) * len(record[key])) for key in ("chosen", "rejected"))
    return Pair(record["id"], prompt, chosen, rejected)


def conclude(session: Session, settings: Ladder, records: dict[str, dict[str, EvalRecord]]) -> dict[str, Any]:
    """summary.json and report.html."""
    summary = summarise(records, RUNGS, settings.preset, settings.seed, session.seconds)
    if session.ranks.first:
        folder = session.run.path
        write_json(folder / SUMMARY, summary)
        write_report(folder)
    return summary
