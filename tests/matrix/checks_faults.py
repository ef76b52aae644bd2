"""Faults that a check finds before a run, or that are refused: a sick part is handed to preflight, probe, delivery or certify, and what
they answer is what is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from tests.matrix.injection import Fault, Named
from tests.matrix.live import wanted
from tests.matrix.live_bases import CORPUS, base, draw, samples_of, speech
from tests.matrix.live_parts import Strict, easy_or_impossible, local, paid
from tests.matrix.live_runs import Play, played
from torch import Tensor

from posttrain.checks import preflight_step as stepping
from posttrain.checks import preflight_sync as seam
from posttrain.checks import preflight_text as words
from posttrain.checks.certificate import certify_file
from posttrain.checks.probe import probe_of
from posttrain.checks.probe_gate import probe_gate
from posttrain.core.errors import PosttrainError
from posttrain.core.sampling import Sampling
from posttrain.core.storage import Room
from posttrain.core.tasks import Task
from posttrain.core.trajectory import Owner, Score, Tokens
from posttrain.core.verdicts import Check
from posttrain.engine.copy_sampler import CopySampler
from posttrain.engine.delivery import Delivery, Limits
from posttrain.engine.processes import Ranks
from posttrain.engine.trainer import LocalTrainer, Optim
from posttrain.loops.sft import imitation
from posttrain.models.loading import load, save
from posttrain.models.lora import LoRA, add_lora
from posttrain.models.tokenizer import CHAT_TEMPLATE, build_tokenizer
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.graders import ExactTextGrader
from posttrain.rewards.proof import prove
from posttrain.rewards.types import Grader
from posttrain.rollout.collect import Collector, collect
from posttrain.rollout.pack import Packing, pack

Answer = Callable[[Path, int], Sequence[Check]]


def asked(id: str, what: str, ask: Answer, seconds: float = 0.3) -> Fault:
    """A fault whose answer is checks: those that do not pass name it by their ids in the catalog."""

    def make(folder: Path, seed: int) -> Path:
        found = [{"name": check.name, "passed": check.passed, "ids": list(check.catalog)} for check in ask(folder, seed)]
        (folder / "answer.json").write_text(json.dumps(found), encoding="utf-8")
        return folder

    return Fault(id, "check", what, make, by_checks, seconds)


def by_checks(path: Path) -> Named:
    """The ids of the checks that failed; of those that only want a look, as notes."""
    found = json.loads((path / "answer.json").read_text(encoding="utf-8"))
    ids = tuple(dict.fromkeys(id for check in found if check["passed"] is False for id in check["ids"]))
    notes = tuple(dict.fromkeys(id for check in found if check["passed"] is None for id in check["ids"]))
    return Named(ids, ids[0] if ids else None, notes=notes)


def refused(id: str, what: str, attempt: Callable[[Path, int], object], words: str, seconds: float = 0.3) -> Fault:
    """A fault that cannot begin: one line says what is wrong, in these words, and what to do."""

    def ask(folder: Path, seed: int) -> list[Check]:
        try:
            attempt(folder, seed)
        except PosttrainError as error:
            return [Check("refusal", words not in str(error), None, None, str(error), "", (id,))]
        return []

    return asked(id, what, ask, seconds)


def uncertified(id: str, what: str, source: str, law: str) -> Fault:
    """A user's function that breaks the law which the catalog gives as its check."""

    def ask(folder: Path, seed: int) -> list[Check]:
        file = folder / "mine.py"
        file.write_text("import torch\n" + source, encoding="utf-8")
        name = source.partition("def ")[2].partition("(")[0]
        broken = [finding.law for finding in certify_file(f"{file}:{name}").findings if not finding.passed]
        return [Check("certify", law not in broken, None, None, ", ".join(broken), "", (id,))]

    return asked(id, what, ask, 0.3)


# --- preflight -------------------------------------------------------------------------------------------------------------------------


def rows() -> list[words.Row]:
    """Conversations as the renderer writes them."""
    return words.rendered_rows(speech()[1])


def retemplated(old: str, new: str) -> ChatRenderer:
    """A renderer whose template writes one piece differently."""
    other = build_tokenizer(CORPUS, 300)
    other.chat_template = CHAT_TEMPLATE.replace(old, new)
    return ChatRenderer(other)


def other_template(folder: Path, seed: int) -> list[Check]:
    """The evaluation's template has a space before the end of a turn."""
    tokenizer, renderer = speech()
    return [words.template_check(tokenizer, renderer, retemplated("message['content'] + '<|end|>'", "message['content'] + ' <|end|>'"))]


def rewritten_history(folder: Path, seed: int) -> list[Check]:
    """A cue that the conversation does not continue."""
    renderer = retemplated("{{ '<|assistant|>' }}{% else %}", "{{ '<|assistant|>' }}{{ 'Well: ' }}{% else %}")
    return [words.template_check(renderer.tokenizer, renderer, renderer)]


def other_tokenizer(folder: Path, seed: int) -> list[Check]:
    """The tokenizer of a larger vocabulary than the model has rows for."""
    tokenizer, renderer = speech()
    return [words.tokenizer_check(tokenizer, renderer, len(tokenizer) - 20)]


def tools_trained(folder: Path, seed: int) -> list[Check]:
    """A mask that takes what tools wrote for the assistant's."""

    def given(tokens: Tokens) -> Tokens:
        return Tokens(tokens.ids, tuple(Owner.DEMONSTRATED if owner is Owner.TOOL else owner for owner in tokens.owners))

    sick = [words.Row(row.messages, given(row.tokens)) for row in rows()]
    return [words.mask_check(sick, speech()[1])]


def padding_trained(folder: Path, seed: int) -> list[Check]:
    """A batch in which a target is read from a padding slot."""
    samples = samples_of("guesser", 3, seed)
    batches = pack(samples, Packing())
    for batch in batches:
        batch.document_RW[batch.document_RW == 0] = -1
    return [words.packing_check(samples, batches)]


def lost_answers(folder: Path, seed: int) -> list[Check]:
    """A grader that wants a number after '####' where tasks have letters."""
    return [words.answer_check(draw(8, seed), lambda task: task.answer, Strict(), speech()[1])]


def dead_adapter(folder: Path, seed: int) -> list[Check]:
    """An adapter that is in the model and has no effect."""
    model = add_lora(copy.deepcopy(base("guesser")), LoRA(rank=4, alpha=8), seed)
    model.base_model.model.model.layers[1].mlp.up_proj.scaling["default"] = 0.0  # type: ignore[union-attr, index]
    samples = samples_of("guesser", 8, seed)
    trainer = LocalTrainer(model, Optim(lr=1e-3, warmup=0.0, schedule="constant"), 2, Ranks())
    found = stepping.take_steps(model, lambda: trainer.step(pack(samples, Packing()), imitation(sum(s.tokens.trained for s in samples))))
    return [stepping.loss_check(found), stepping.gradient_check(found), stepping.moved_check(found)]


def half_precision(folder: Path, seed: int) -> list[Check]:
    """A model in bfloat16 where float32 was asked for."""
    return [stepping.dtype_check(copy.deepcopy(base("guesser")).bfloat16())]


def full_disk(folder: Path, seed: int) -> list[Check]:
    """Ten checkpoints of a megabyte, and a thousand bytes left."""
    return [stepping.room_check(folder, Room(10**6, 10), free=1000)]


def bad_saving(folder: Path, seed: int) -> list[Check]:
    """Saving that loses what the last layer learnt."""

    def lossy(model: torch.nn.Module, tokenizer: object, path: Path) -> None:
        kept = copy.deepcopy(model)
        with torch.no_grad():
            next(reversed(list(kept.parameters()))).add_(0.1)
        save(kept, tokenizer, path)  # type: ignore[arg-type]

    model = copy.deepcopy(base("guesser"))
    return [stepping.reload_check(model, speech()[0], samples_of("guesser", 1, seed)[0].prompt.ids, lossy, load)[0]]


def unjust(grader: Grader) -> Answer:
    """A grader that has to tell right from wrong, and does not."""

    def ask(folder: Path, seed: int) -> list[Check]:
        try:
            prove(grader, draw(8, seed), gold=lambda task: task.answer, wrong=lambda task: "q")
        except PosttrainError as error:
            return [Check("grader", False, None, None, str(error), "", ("S35", "P21", "P33"))]
        return []

    return ask


# --- delivery --------------------------------------------------------------------------------------------------------------------------


class Faulty(CopySampler):
    """Takes the first delivery as it is, and spoils the later ones."""

    spoil: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] = staticmethod(lambda weights: {})

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See Receiver."""
        first = self.version == -1
        super().receive(dict(weights) if first else type(self).spoil(dict(weights)), version)


class Swapping(Faulty):
    """Puts every tensor where the next one of its shape belongs."""

    @staticmethod
    def _turned(weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
        found = dict(weights)
        for name in weights:
            alike = [other for other in weights if other != name and weights[other].shape == weights[name].shape]
            found[name] = weights[alike[0]] if alike else weights[name]
        return found

    spoil = _turned


def courier(receiver: type[Faulty]) -> Answer:
    """Two deliveries, with a step between them."""

    def ask(folder: Path, seed: int) -> list[Check]:
        model, (_, renderer) = copy.deepcopy(base("guesser")), speech()
        row = samples_of("guesser", 1, seed)[0]
        sent = seam.Courier(model, receiver(model, renderer.stop_ids, renderer.special_ids), (row.prompt.ids, row.tokens.ids), Limits())
        sent.send(0)
        moved(model, seed)
        sent.send(1)
        return [sent.check]

    return ask


def moved(model: torch.nn.Module, seed: int) -> None:
    """Every weight moves, as after a step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)


def undelivered(folder: Path, seed: int) -> object:
    """Draw before anything was delivered, as a resumed run might."""
    _, renderer = speech()
    model = base("guesser")
    delivery = Delivery(model, CopySampler(model, renderer.stop_ids, renderer.special_ids))
    return delivery.generate([])


# --- probe -----------------------------------------------------------------------------------------------------------------------------


def probed(
    kind: str,
    tasks: Callable[[int, int], Sequence[Task]] = draw,
    grader: Callable[[], Grader] = ExactTextGrader,
    **sampling: float,
) -> Answer:
    """A probe of 48 prompts x 8 with a real model."""

    def ask(folder: Path, seed: int) -> Sequence[Check]:
        told = Sampling.load({"max_tokens": 4, **sampling})
        collector = Collector(local(base(kind)), speech()[1], grader(), told, 8, Ranks())
        return probe_gate(probe_of(collect(collector, tasks(48, seed), seed), told), kind).checks

    return ask


def raises(task: Task, text: str) -> Score:
    """A grader without its sandbox."""
    raise TimeoutError("the sandbox did not answer")


OBJECTIVE = """def loss(streams):
    delta = torch.where(streams.mask_BT, streams.logp_BT - streams.old_BT, 0.0)
    a = torch.where(streams.mask_BT, streams.advantage_BT, 0.0)
    {before}
    rho = delta.exp()
    return {returned}
"""
LATE = "def loss(streams):\n    return -(streams.logp_BT - streams.old_BT).exp() * streams.advantage_BT * streams.mask_BT\n"
NAN = "def loss(streams):\n    return -torch.where(streams.mask_BT, streams.logp_BT * streams.advantage_BT, 0.0)\n"
TERM = "def term(logp, reference, mask):\n    x = torch.where(mask, logp - reference, 0.0)\n    return {}\n"
TOTAL = "def total(values, mask, denominator):\n    clean = torch.where(mask, values, 0.0)\n    return {}\n"
CENTRED = OBJECTIVE.format(before="a = a - a.mean(0, keepdim=True)", returned="-rho * a")
WHITENED = OBJECTIVE.format(before="a = a - a[streams.mask_BT].mean()", returned="-rho * a")
FUSED = OBJECTIVE.format(before="", returned="-(rho * a).sum(-1)")
HALVED = OBJECTIVE.format(before="", returned="-2 * rho * a")

FAULTS = (
    asked("F12", "the evaluation renders another template", other_template),
    asked("P25", "a template whose prompt is no prefix of the conversation", rewritten_history),
    asked("S79", "a tokenizer with more ids than the model has rows", other_tokenizer),
    asked("F10", "a mask that trains what tools wrote", tools_trained),
    asked("P5", "a batch that reads a target from padding", padding_trained),
    asked("P33", "a grader that does not read the answers' form", lost_answers),
    asked("S76", "an adapter without effect", dead_adapter, 0.6),
    asked("P17", "weights of another precision than was asked for", half_precision),
    asked("F11", "checkpoints that do not fit on the disk", full_disk),
    asked("S35", "a grader that gives 1 to everything", unjust(paid(lambda t, s: 1.0)())),
    asked("P21", "a grader that returns nothing", unjust(paid(lambda t, s: None)())),
    asked("P12", "a receiver that takes the first delivery only", courier(Faulty), 0.5),
    asked("P1", "a receiver that puts tensors in each other's place", courier(Swapping), 0.5),
    asked("P1", "saving that changes the weights", bad_saving),
    refused("U64", "drawing before the first delivery", undelivered, "before weights were delivered"),
    asked("S2", "tasks out of reach", probed("guesser", wanted("q")()), 0.5),
    asked("S40", "tasks that are solved", probed("knower"), 0.5),
    asked("S41", "easy tasks and impossible ones", probed("knower", easy_or_impossible()), 0.5),
    asked("S31", "a grader that raises", probed("guesser", grader=paid(raises)), 0.5),
    asked("S30", "a parser that loses the answers", probed("guesser", grader=Strict), 0.5),
    asked("S42", "a budget of one token", probed("guesser", max_tokens=1), 0.5),
    asked("S105", "samples at temperature 0", probed("guesser", temperature=0.0), 0.5),
    refused(
        "S105", "training at temperature 0", lambda f, s: played(f, s, Play(sampling={"temperature": 0.0})), "needs a temperature above 0"
    ),
    refused("S106", "groups of one", lambda f, s: played(f, s, Play(rl={"siblings": 1})), "compares siblings"),
    refused(
        "F14",
        "a band for sequences on ratios of tokens",
        lambda f, s: played(f, s, Play(objective={"limit": {"kind": "clip", "low": 3e-4, "high": 4e-4}}, rl={"epochs": 4})),
        "is made for a sequence ratio",
    ),
    uncertified("U2", "a denominator that counts masked slots", TOTAL.format("clean.sum() / mask.numel()"), "partition"),
    uncertified("U3", "a mean of row means", TOTAL.format("(clean.sum(-1) / mask.sum(-1).clamp(min=1)).mean()"), "partition"),
    uncertified("U17", "a mean along the wrong axis", CENTRED, "permutation"),
    uncertified("U19", "the mask comes after exp", LATE, "mask"),
    uncertified("U22", "advantages whitened over a micro-batch", WHITENED, "partition"),
    uncertified("U24", "an estimator of twice the length", HALVED, "oracle"),
    uncertified("U26", "a KL term that is detached", TERM.format("(torch.expm1(-x) + x).detach()"), "oracle"),
    uncertified("U27", "NaN times zero", NAN, "mask"),
    uncertified("U28", "a clamp that lets go when KL is large", TERM.format("(torch.expm1(-x) + x).clamp(max=0.05)"), "oracle"),
    uncertified("S78", "a kernel that takes the loss for a sum over tokens", FUSED, "partition"),
)
"""All of them."""
