"""Reinforcement learning with verifiable rewards: sample completions, judge, assign credit, take a bounded step.

    prompts -> completions -> verifier -> advantages -> policy gradient -> next policy samples

Which policy gradient is an `Objective`: a named algorithm, or any choice on its axes. Where siblings are the baseline, groups whose rewards
are all equal carry no signal and take no part: they leave before the update, and a step without signal takes no optimizer step at all, so
neither momentum nor the KL term moves weights on their account. Rows of one group are computed with one copy of their prompt.
Sources: spec/ladder-at-100m.md 1.4, B1-B15; spec/faults.md 11-16, 30-38; spec/recipes-of-the-labs.md 1.4.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

from torch import nn

from posttrain.core.errors import ConfigError
from posttrain.core.seeds import derive
from posttrain.engine.machine import Packing
from posttrain.engine.trainer import LocalTrainer
from posttrain.engine.values import values
from posttrain.loops.policy_step import Actors, Plan, learn, policy_scorer
from posttrain.loops.rl_records import give_up, pulse, report, survival
from posttrain.loops.rl_settings import DEFAULT_CRITIC, RL, CriticSettings, World, check, check_asynchronous, check_episodes, surrogate_of
from posttrain.loops.rollout_source import rollout_source
from posttrain.loops.session import Session, Stage, Stopwatch
from posttrain.models.critic import Critic
from posttrain.objectives.objective import Objective, warnings
from posttrain.objectives.placements import DESCENDS
from posttrain.objectives.steering import advance, current
from posttrain.rollout.asynchronous.settings import Async
from posttrain.rollout.sentences import sentence_ends, sentence_index


def equation(settings: RL, objective: Objective, ranks: int, asynchronous: Async | None = None) -> str:
    """The batch arithmetic in words, with the objective's axes and the divergence that its KL term really descends."""
    drawn = "" if asynchronous is None else "; " + asynchronous.describe(settings.updates, settings.prompts)
    kl = objective.kl
    held = "no KL term"
    if kl.used:
        held = f"KL {kl.estimator} in the {kl.placement} x {kl.coef:g}, descends {DESCENDS[kl.placement, kl.estimator]}, in {kl.dtype}"
    ratio = objective.ratio if objective.against == "old" else f"{objective.ratio} against behaviour"
    return (
        f"{settings.prompts} prompts x {settings.siblings} completions = {settings.prompts * settings.siblings} rollouts per step "
        f"(up to {settings.tries:g}x with dynamic sampling), {settings.minibatches} minibatch(es) x {settings.epochs} epoch(s) = "
        f"{settings.updates} optimizer step(s) each, {settings.steps} steps, {ranks} process(es); "
        f"{objective.kind}: advantage {objective.advantage.kind}, ratio {ratio}, limit {objective.limit.kind}, "
        f"correction {objective.correction.kind}, {objective.aggregation}; {held}{drawn}"
    )


def rl(
    session: Session,
    model: nn.Module,
    world: World,
    settings: RL,
    objective: Objective,
    critic: CriticSettings = DEFAULT_CRITIC,
    name: str = "rl",
    asynchronous: Async | None = None,
) -> nn.Module:
    """Train a copy of `model` and return it; `model` stays as it was and is the KL reference."""
    check(settings, objective, world.sampling, teacher=world.teacher is not None)
    check_episodes(world.env_of, objective)
    for warning in warnings(objective) + check_asynchronous(asynchronous, settings, objective):
        session.console.warn(f"{name}: {warning}")
    actors = cast_of(session, model, world, settings, objective, critic)
    trainer = actors.policy
    stage = Stage(session, name, trainer, settings.steps, {"critic": actors.critic} if actors.critic else {})
    plan = plan_of(settings, objective, critic, world, session.machine.packing)
    waits = critic.warmup if objective.needs_critic else 0
    with rollout_source(stage, world, settings, objective, asynchronous) as source:
        for step in stage.steps():
            watch = Stopwatch()
            with watch("pulse"):
                held_out = pulse(stage, step, trainer, world)
            now = current(objective, stage.state.get("steered", {}))
            with watch("sample"):
                filled = source.fill(step, now)
            version = trainer.version
            with watch("train"):
                seed = derive(session.seed, name, step)
                metrics, left = learn(actors, filled.kept, replace(plan, objective=now, train_policy=step >= waits, seed=seed))
            figures = {**source.settle(filled, left, now), **survival(filled, now, version, settings.epochs), **held_out}
            report(stage, step, filled, metrics, left, watch, settings, figures)
            measured = {key: metrics[key].read() for key in ("entropy", "kl") if key in metrics}
            stage.state["steered"] = advance(objective, stage.state.get("steered", {}), measured.get("entropy"), measured.get("kl"))
            if stage.state["silent"] >= settings.patience:
                give_up(stage, step, filled, settings)
                break
    return trainer.plain()


def cast_of(
    session: Session, model: nn.Module, world: World, settings: RL, objective: Objective, critic_settings: CriticSettings
) -> Actors:
    """The policy in training and those that the objective compares it with."""
    policy = copy.deepcopy(model)
    scorer = policy_scorer(objective, world.sampling)
    waits = critic_settings.warmup if objective.needs_critic else 0
    if waits >= settings.steps:
        raise ConfigError(
            f"the critic warms up for {waits} of {settings.steps} steps, and the policy would never train; lower critic.warmup"
        )
    trainer = LocalTrainer(
        policy, settings.optim, (settings.steps - waits) * settings.updates, session.ranks, world.sampling, scorer, session.machine
    )
    critic = None
    if objective.needs_critic:
        critic = LocalTrainer(
            Critic.of(model),
            critic_settings.optim,
            settings.steps * settings.updates,
            session.ranks,
            world.sampling,
            values,
            session.machine,
        )
    return Actors(trainer, critic, model if objective.kl.used else None, world.teacher if objective.needs_teacher else None)


def plan_of(settings: RL, objective: Objective, critic: CriticSettings, world: World, packing: Packing) -> Plan:
    """What stays the same from phase to phase."""
    sentence_of = None
    if objective.ratio == "sentence":
        sentence_of = partial(sentence_index, ends=sentence_ends(world.renderer.tokenizer))
    return Plan(objective, settings.minibatches, settings.epochs, packing, critic.clip, sentence_of, surrogate=surrogate_of(objective))
