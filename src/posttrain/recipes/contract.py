"""Run the gates of an acceleration on a model: real prompts, real training steps, held-out items; record what was found."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field
from torch import nn

from posttrain.checks.acceleration import Acceleration, Setup, acceleration, key_of, plain, require
from posttrain.checks.acceptance import sweep
from posttrain.checks.gate_distribution import THRESHOLD, Paths, distribution_gate, model_scorer, traced
from posttrain.checks.gate_identity import identity_gate, sibling_requests
from posttrain.checks.gate_learning import MARGIN, Learned, learning_gate
from posttrain.checks.gate_speed import LEAST_PAIRS, Arm, Clock, speed_gate
from posttrain.checks.gates import Gate, GateResult, Key, Store
from posttrain.core.cache import cache_dir
from posttrain.core.config import Config
from posttrain.core.errors import ConfigError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import derive
from posttrain.core.trajectory import Group, RewardStatus, Score
from posttrain.engine.draft import check_draft, first_layers
from posttrain.engine.local import LocalSampler
from posttrain.engine.machine import Packing
from posttrain.engine.processes import Ranks
from posttrain.engine.speculative import SpeculativeSampler
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.engine.types import Sampler
from posttrain.engine.weights import weights_digest
from posttrain.envs.sources import source
from posttrain.evals.runner import evaluate
from posttrain.evals.suite import Suite
from posttrain.loops.policy_step import Actors, learn, policy_scorer
from posttrain.loops.rl import plan_of
from posttrain.loops.rl_settings import DEFAULT_CRITIC, RL, World
from posttrain.models.loading import load
from posttrain.objectives.objective import Objective
from posttrain.recipes.chat import model_of
from posttrain.render.renderer import ChatRenderer
from posttrain.rollout.collect import Collector, collect

STORE = "contracts"
"""Kind of cache folder that holds the records, unless another place is named."""


class ContractRun(Config):
    """What is measured, and on how much. The defaults fit a tiny model and two minutes; a decision about a real run needs more of each."""

    model: str
    """A folder, a run directory (its last rung) or RUN:RUNG, a .gguf file, a hub id, or 'smollm2'."""
    acceleration: str
    gates: str = ""
    """Letters of the gates to run, e.g. "AB"; empty for all that its class requires."""
    task: str = "arithmetic"
    """Where prompts, rewards and held-out items come from."""
    task_settings: dict[str, Any] = {}
    draft: str | None = None
    """Model that proposes in speculative decoding; without it the first `draft_layers` layers of the model itself do."""
    draft_layers: int | None = Field(default=None, ge=1)
    """A quarter of the layers, unless given."""
    ahead: int = Field(default=4, ge=1)
    """Proposals per pass."""
    sampling: Sampling = Sampling(max_tokens=24)
    """As in the training run to come."""
    prompts: int = Field(default=100, ge=2)
    """Of gate A and gate I; 100 to 500 are usual."""
    siblings: int = Field(default=4, ge=1)
    """Completions per prompt in gate I."""
    threshold: float = Field(default=THRESHOLD, gt=0)
    """Gate A: largest mean forward KL, nats per token."""
    pairs: int = Field(default=LEAST_PAIRS, ge=LEAST_PAIRS)
    """Gate B: pairs of steps."""
    clock: Clock = "wall"
    """Gate B: which clock decides."""
    rl: RL = RL(steps=10, prompts=8, siblings=8, optim=Optim(lr=1e-4, schedule="constant", warmup=0.1))
    """The step that gate B times and gate C repeats `rl.steps` times."""
    items: int = Field(default=400, ge=2)
    """Gate C: held-out items, answered greedily."""
    margin: float = Field(default=MARGIN, gt=0, lt=1)
    """Gate C: largest loss that counts as none."""
    seed: int = Field(default=0, ge=0)


class Bench:
    """A loaded model with everything that the gates ask of it."""

    def __init__(self, settings: ContractRun):
        self.settings = settings
        self.member = acceleration(settings.acceleration)
        self.gates = wanted_gates(settings.gates, self.member)
        self.source = source(settings.task, **settings.task_settings)
        self.held_out = tuple(self.source.tasks("held_out", settings.items, 0)) if Gate.LEARNING in self.gates else ()
        model, tokenizer = load(model_of(settings.model))
        self.model = model
        self.renderer = ChatRenderer(tokenizer)
        self.world = World(lambda n, seed: self.source.tasks("train", n, seed), self.source.grader, self.renderer, settings.sampling)
        self.draft: nn.Module | None = None
        if self.member.needs and settings.draft is not None:
            self.draft, drafted = load(model_of(settings.draft))
            check_draft(model, self.draft, tokenizer.get_vocab(), drafted.get_vocab())
        self.key: Key = key_of(self.member, self.setup(model))
        """Where its measurements belong."""

    def setup(self, model: nn.Module) -> Setup:
        """The parts of a path over `model`; a draft of its first layers follows its weights."""
        draft = self.draft
        if self.member.needs and draft is None:
            draft = first_layers(model, self.settings.draft_layers or default_layers(model))
        return Setup(model, self.renderer.stop_ids, self.renderer.special_ids, draft, self.settings.ahead)

    def prompts(self) -> list[tuple[int, ...]]:
        """Rendered prompts of training tasks."""
        tasks = self.world.draw(self.settings.prompts, derive(self.settings.seed, "contract", "prompts"))
        return [self.renderer.prompt(task.prompt).ids for task in tasks]

    def sides(self) -> dict[str, Callable[[Setup], Sampler]]:
        """Reference and accelerated path."""
        return {"reference": self.member.reference, "accelerated": self.member.build}


def default_layers(model: nn.Module) -> int:
    """A quarter of the model's layers, at least one."""
    return max(1, model.config.get_text_config().num_hidden_layers // 4)  # type: ignore[union-attr, operator]


def wanted_gates(letters: str, member: Acceleration) -> tuple[Gate, ...]:
    """The gates named by `letters`, in that order; those of the member's class when there are none."""
    known = {gate.value: gate for gate in Gate}
    for letter in letters:
        if letter not in known:
            raise ConfigError(f"unknown gate '{letter}' in gates='{letters}'; known: {', '.join(known)}")
    if Gate.DISTRIBUTION.value in letters and member.view is None:
        raise ConfigError(
            f"gate A compares two models' logits, and {member.name} computes with the model itself; its gates are " + _names(member)
        )
    return tuple(known[letter] for letter in dict.fromkeys(letters)) or member.gates


def _names(member: Acceleration) -> str:
    return ", ".join(gate.value for gate in member.gates)


def default_store() -> Store:
    """The user's records."""
    return Store(cache_dir(STORE))


def contract(settings: ContractRun, store: Store | None = None) -> list[GateResult]:
    """Run the gates on a model and store what they find; see `measure` for the results one by one.

    Example: [result.verdict for result in contract(ContractRun(model="smollm2", acceleration="int8", gates="A"))]
    """
    return list(measure(Bench(settings), store or default_store()))


def measure(bench: Bench, store: Store) -> Iterator[GateResult]:
    """Run the gates one by one; each result is stored before it is yielded."""
    conditions = bench.settings.model_dump(mode="json")
    for gate in bench.gates:
        result = RUNNERS[gate](bench)
        store.save(bench.key, result, conditions)
        yield result


def _distribution(bench: Bench) -> GateResult:
    setup, settings, member = bench.setup(bench.model), bench.settings, bench.member
    assert member.view is not None
    sampler = member.build(setup)
    trace = traced(sampler) if isinstance(sampler, LocalSampler) else None
    paths = Paths(member.reference(setup), sampler, model_scorer(setup.model), model_scorer(member.view(setup)), trace)
    return distribution_gate(paths, bench.prompts(), settings.sampling, settings.seed, threshold=settings.threshold)


def _identity(bench: Bench) -> GateResult:
    setup, settings, member = bench.setup(bench.model), bench.settings, bench.member
    prompts = bench.prompts()
    requests = sibling_requests(prompts, settings.siblings, settings.sampling, settings.seed)
    accelerated = member.build(setup)
    result = identity_gate(member.reference(setup), accelerated, model_scorer(setup.model), requests, member.same, settings.seed)
    if not isinstance(accelerated, SpeculativeSampler):
        return result

    def fresh() -> SpeculativeSampler:
        return SpeculativeSampler(setup.model, accelerated.draft, setup.stop_ids, setup.control_ids, ahead=setup.ahead)

    rows = sweep(fresh, lambda: plain(setup), prompts, settings.sampling, settings.seed)
    return replace(result, measured={**result.measured, "acceptance": [row.as_record() for row in rows]})


def _speed(bench: Bench) -> GateResult:
    arms = [_arm(Learner(bench, build)) for build in bench.sides().values()]
    return speed_gate(arms[0], arms[1], bench.settings.pairs, bench.settings.clock)


def _learning(bench: Bench) -> GateResult:
    runs = [Learner(bench, build).run for build in bench.sides().values()]
    return learning_gate(runs[0], runs[1], bench.settings.margin)


RUNNERS: dict[Gate, Callable[[Bench], GateResult]] = {
    Gate.DISTRIBUTION: _distribution,
    Gate.SPEED: _speed,
    Gate.LEARNING: _learning,
    Gate.IDENTITY: _identity,
}


class Learner:
    """The RL step as the loop takes it, with one path as its sampler."""

    def __init__(self, bench: Bench, build: Callable[[Setup], Sampler]):
        self.bench, self.settings = bench, bench.settings
        self.objective = Objective()
        self.policy = copy.deepcopy(bench.model)
        self.start = {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}
        self.sampler = build(bench.setup(self.policy))
        self.plan = plan_of(self.settings.rl, self.objective, DEFAULT_CRITIC, bench.world, Packing())
        self.reset()

    def reset(self) -> None:
        """Starting weights and a new optimizer."""
        self.policy.load_state_dict(self.start)
        rl, sampling = self.settings.rl, self.settings.sampling
        scorer = policy_scorer(self.objective, sampling)
        self.trainer = LocalTrainer(self.policy, rl.optim, rl.steps * rl.updates, Ranks(), sampling, scorer)
        self.actors = Actors(self.trainer, reference=self.bench.model if self.objective.kl.used else None)

    def step(self, number: int, grade: Callable[[Group], Group] = lambda group: group) -> None:
        """Sample, judge, update."""
        world, rl = self.bench.world, self.settings.rl
        self.sampler.version = self.trainer.version
        collector = Collector(self.sampler, world.renderer, world.grader, world.sampling, rl.siblings, Ranks())
        seed = derive(self.settings.seed, "contract", "step", number)
        groups = collect(collector, world.draw(rl.prompts, seed), seed)
        learn(self.actors, [grade(group) for group in groups], replace(self.plan, seed=seed))

    def run(self) -> Learned:
        """A short run from the starting weights, then the held-out items, answered greedily through the reference path."""
        self.reset()
        for number in range(self.settings.rl.steps):
            self.step(number)
        bench, settings = self.bench, self.settings
        greedy = settings.sampling.model_copy(update={"temperature": 0.0})
        suite = Suite(bench.source.name, bench.held_out, bench.world.grader, greedy, 1, allow_truncation=True)
        sampler = plain(bench.setup(self.policy))
        model = weights_digest(self.policy)
        record = evaluate(sampler, bench.renderer, [suite], seed=settings.seed, label="contract", model_digest=model)[suite.name]
        return Learned(record, self.trainer.version)


def _arm(learner: Learner) -> Arm:
    return Arm(learner.reset, lambda number: learner.step(number, mixed))


def mixed(group: Group) -> Group:
    """The group with rewards 0, 1, 0, 1, ...: gate B times a step in which every group trains, whatever the model can do."""
    paid = [replace(rollout, score=Score(float(i % 2), RewardStatus.SCORED)) for i, rollout in enumerate(group.rollouts)]
    return Group(group.task, tuple(paid))


def recorded(settings: ContractRun, store: Store | None = None) -> dict[Gate, dict[str, Any] | None]:
    """What is on record for the path of these settings, by gate that its class requires."""
    bench, where = Bench(settings), store or default_store()
    return {gate: where.read(bench.key, gate) for gate in bench.member.gates}


def listing(model: str | None, names: Sequence[str], store: Store | None = None, **settings: Any) -> dict[str, dict[Gate, str]]:
    """Verdict by acceleration and required gate on `model`; "-" where nothing is recorded, or no model is given."""
    found: dict[str, dict[Gate, str]] = {}
    for name in names:
        if model is None:
            found[name] = dict.fromkeys(acceleration(name).gates, "-")
            continue
        chosen = ContractRun.load({"model": model, "acceleration": name, **settings})
        records = recorded(chosen.model_copy(update={"gates": acceleration(name).gates[0].value}), store)
        found[name] = {gate: str(record["verdict"]) if record else "-" for gate, record in records.items()}
    return found


def check_acceleration(name: str | None, model: str, *, ahead: bool) -> None:
    """Refuse a run with an acceleration that is not proven on the model it starts from, before anything is computed.

    Args:
        ahead: whether workers draw rollouts with weights of their own; they do not take an acceleration.
    """
    if name is None:
        return
    acceleration(name)
    if ahead:
        raise ConfigError(f"acceleration={name} is taken by the sampler in this process, and asynchronous workers have their own; use one")
    proven_path(name, model, ChatRenderer(load(model)[1]))


def proven_path(name: str, model: str, renderer: ChatRenderer, store: Store | None = None) -> Callable[[nn.Module], Sampler]:
    """What makes the accelerated sampler over a model in training, after `require` on the weights that the run starts from.

    A path that needs a draft takes the first layers of the model; another draft is for a program of one's own, through `Setup`.
    """

    def setup(of: nn.Module) -> Setup:
        draft = first_layers(of, default_layers(of)) if acceleration(name).needs else None
        return Setup(of, renderer.stop_ids, renderer.special_ids, draft)

    member = require(name, setup(load(model)[0]), store or default_store(), label=model)
    return lambda of: member.build(setup(of))
