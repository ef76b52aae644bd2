"""Faults of real runs: each is one setting, or one part handed to the run, that makes it sick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from zlib import crc32

from tests.matrix.injection import Fault, by_run
from tests.matrix.live_bases import ANSWERS, LETTERS, LOOK, base, draw, held_out, prompt_of, quiet, samples_of, speech, task_of, untrained
from tests.matrix.live_parts import (
    Gated,
    Later,
    Lenient,
    Lettered,
    Noisy,
    Shelf,
    Stale,
    Strict,
    Turning,
    Worlds,
    easy_or_impossible,
    paid,
    right,
)
from tests.matrix.live_runs import Play, brisk, imitated, played, preferred, sick
from torch import nn

from posttrain.core.seeds import python_rng
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, Sample, Score, Tokens
from posttrain.engine.trainer import Optim
from posttrain.envs.rows import Preference
from posttrain.loops.preference import DPO
from posttrain.loops.sft import SFT, sft
from posttrain.recipes.single import preference_pair
from posttrain.rewards.graders import FunctionGrader
from posttrain.rollout.asynchronous.settings import Async
from posttrain.rollout.samples import Pair

TALK = Play(
    base="talker",
    sampling={"max_tokens": 96},
    rl={"steps": 36, "prompts": 4, "lr": 2e-3},
    pulse_every=3,
    pulsed=lambda: FunctionGrader(variety, "variety/1"),
)
RAMBLE = Play(base="rambler", sampling={"max_tokens": 48}, pulse_every=0)
EPISODES = Play(base="caller", sampling={"max_tokens": 64}, env_of=lambda: lambda task: Shelf(), turns=4)
TOOLS = Play(base="silent", sampling={"max_tokens": 64}, env_of=lambda: lambda task: Shelf(), turns=4, draw=lambda: offered, pulse_every=0)


def _run(id: str, what: str, make: Callable[[Path, int], Path], seconds: float) -> Fault:
    return Fault(id, "run", what, make, by_run, seconds)


def wanted(answer: str) -> Callable[[], Callable[[int, int], Sequence[Task]]]:
    """Tasks that all want one answer."""

    def drawn(n: int, seed: int) -> list[Task]:
        return [task_of(task.id, answer) for task in draw(n, seed)]

    return lambda: drawn


def alphabet(n: int, seed: int) -> list[Task]:
    """Tasks that want one of three letters of the alphabet."""
    rng = python_rng(seed, "matrix", "alphabet")
    return [task_of(prompt_of(rng), rng.choice("fgh")) for _ in range(n)]


def offered(n: int, seed: int) -> list[Task]:
    """Tasks whose prompt says how to call a tool."""
    return [Task(task.id, (Message("system", LOOK), *task.prompt), task.answer) for task in draw(n, seed)]


def foreign(n: int) -> list[Task]:
    """Held-out tasks of which training says nothing."""
    return [Task(task.id.upper(), (Message("user", task.id.upper()),), task.answer) for task in held_out(n)]


LATER = """CALLS = []


def later(calls):
    CALLS.append(0)
    return float("nan") if len(CALLS) > calls else -1.0


"""
"""For a loss of one's own: -1 for so many calls, then no number."""


def own_loss(expression: str) -> Callable[[Path, int], Path]:
    """A run with the user's own loss per token."""

    def make(folder: Path, seed: int) -> Path:
        file = folder / "mine.py"
        file.write_text(LATER + f"def loss(streams):\n    return {expression}\n", encoding="utf-8")
        return played(folder, seed, Play(objective={"surrogate": f"{file}:loss"}, rl={"steps": 10}))

    return make


@cache
def sure() -> nn.Module:
    """A model that ends its turns beyond doubt, trained on nothing else."""
    return sft(quiet(), base("knower"), endings(), brisk(1e-2, epochs=20)).eval()


def endings() -> list[Sample]:
    """Rows of which only the end token is trained, as a mask would have it that leaves out the answer."""
    found = []
    for row in samples_of("knower", 64, 0):
        at = len(row.tokens.ids) - 1
        prompt = Tokens(row.prompt.ids + row.tokens.ids[:at], row.prompt.owners + (Owner.TEMPLATE,) * at)
        found.append(Sample(prompt, Tokens(row.tokens.ids[at:], row.tokens.owners[at:]), row.group))
    return found


def coins(n: int, seed: int) -> list[Task]:
    """Tasks whose answer nobody can know."""
    rng = python_rng(seed, "matrix", "coins")
    return [task_of(prompt_of(rng), rng.choice("wxyz")) for _ in range(n)]


def starts(task: Task, text: str) -> float:
    """Pays for one first letter."""
    return float(text[:1] == "m")


def loops(task: Task, text: str) -> float:
    """Pays for one letter, up to sixty times."""
    return min(1.0, text.count("m") / 60)


def favour(task: Task, text: str) -> float:
    """Pays for one letter, at the share that it has of the text."""
    return text.count("m") / max(1, len(text))


def chance(text: str) -> float:
    """Right for half of all texts, and nobody can learn for which."""
    return float(crc32(text.encode()) % 2)


def variety(task: Task, text: str) -> float:
    """What is wanted of a talker: that all letters are in use, and none is most of the text."""
    return float(all(0.1 < text.count(letter) / max(1, len(text)) < 0.5 for letter in LETTERS))


def fails_often(task: Task, text: str) -> float:
    """Times out on some answers."""
    if text in "xz":
        raise TimeoutError("the sandbox did not answer")
    return right(task, text)


def poisoned() -> Callable[[Task, str], Score]:
    """Rewards a thousand times too large for one step: 64 judgements of step 26."""
    fine = FunctionGrader(right, "right/1")
    return Later(fine, Later(FunctionGrader(lambda task, text: 1e4 * right(task, text), "right/1"), fine, 64), 26 * 64)


def pairs_of(n: int, seed: int, flip: float = 0.0, rejected: str = "") -> list[Pair]:
    """The right letter against another one; a share of the pairs is turned around."""
    _, renderer = speech()
    rng, found = python_rng(seed, "matrix", "pairs"), []
    for index in range(n):
        prompt = prompt_of(rng)
        good, bad = ANSWERS[prompt[0]], rejected or rng.choice([letter for letter in "wxyz" if letter != ANSWERS[prompt[0]]])
        if rng.random() < flip:
            good, bad = bad, good
        found.append(preference_pair(Preference(str(index), (Message("user", prompt),), good, bad), renderer))
    return found


OF_REWARD = (
    _run("F4", "a reward that pays for every m", sick(TALK, grader=paid(loops)), 10.0),
    _run(
        "S20",
        "a reward that pays one letter's share of the text, where variety is wanted",
        sick(TALK, grader=paid(favour), rl={"steps": 60}),
        14.0,
    ),
    _run(
        "P13",
        "form and correctness are added, and nothing is ever right",
        sick(Play(base="former"), grader=paid(lambda t, s: {"correct": float(s == "q"), "format": float(s[:1] == "#")})),
        1.9,
    ),
    _run(
        "P22",
        "three points for a letter that has nothing to do with the answer",
        sick(Play(), grader=paid(lambda t, s: {"correct": right(t, s), "style": 3.0 * (s == "w")}), rl={"steps": 16}),
        0.9,
    ),
    _run(
        "S23",
        "a reward gated on answers that are never right",
        sick(Play(base="former"), draw=wanted("q"), grader=Gated, rl={"steps": 12}),
        0.4,
    ),
    _run(
        "S24",
        "every letter is paid for, whether or not it helps",
        sick(RAMBLE, grader=paid(lambda t, s: {"correct": chance(s), "effort": 0.05 * len(s)})),
        7.0,
    ),
    _run(
        "S25",
        "calls that cost nothing, on tasks that they cannot help with",
        sick(EPISODES, base="spammer", draw=lambda: coins, pulse_every=0, rl={"steps": 24, "lr": 2e-4}),
        6.0,
    ),
    _run("S26", "tools that are offered, and a model that answers from memory", sick(TOOLS, base="silent", rl={"steps": 14}), 0.7),
    _run("S27", "one turn where the answer takes two", sick(EPISODES, turns=1, rl={"steps": 8}), 0.6),
    _run("S28", "a model that was taught broken calls", sick(EPISODES, base="fumbler", rl={"steps": 8}), 1.3),
    _run(
        "S10", "a tool that gives out at step 16, so that episodes go on", sick(EPISODES, env_of=lambda: Worlds(17 * 64 + 5 * 48, 4)), 9.0
    ),
    _run("S30", "a grader that wants '####' from a model that was never taught it", sick(Play(), grader=Strict, rl={"steps": 8}), 0.3),
    _run("S31", "a grader that raises on some answers", sick(Play(), grader=paid(fails_often), rl={"steps": 8}), 0.4),
    _run("S35", "a grader that gives everybody 0.3", sick(Play(), grader=paid(lambda t, s: 0.3), rl={"steps": 12}), 0.3),
)
OF_DATA = (
    _run("S2", "tasks whose answer is never said", sick(Play(), draw=wanted("q"), rl={"steps": 12}), 0.3),
    _run("S3", "answers that one rollout in 26 finds", sick(Play(base="alphabet"), draw=lambda: alphabet, rl={"steps": 24}), 1.3),
    _run("S4", "on and on after the tasks are solved", sick(Play(), rl={"steps": 70, "lr": 2e-3, "schedule": "cosine"}), 2.8),
    _run("S40", "tasks that the model solves from the start", sick(Play(base="knower"), rl={"steps": 8}), 0.3),
    _run(
        "S41",
        "half of the tasks are easy and half impossible",
        sick(Play(base="half"), draw=lambda: easy_or_impossible(), rl={"steps": 12}),
        0.4,
    ),
    _run(
        "F2",
        "after 12 steps the tasks are easy ones and impossible ones",
        sick(Play(base="half"), draw=lambda: Turning(easy_or_impossible(), 12), rl={"steps": 40, "prompts": 4, "siblings": 4, "lr": 1e-4}),
        0.8,
    ),
    _run(
        "S44",
        "cut answers are dropped from their groups",
        sick(RAMBLE, grader=paid(starts), objective={"overlong": "drop"}, sampling={"max_tokens": 8}, rl={"steps": 12, "lr": 3e-4}),
        0.8,
    ),
    _run(
        "S45",
        "training tasks and held-out tasks have nothing in common",
        sick(Play(), pulse_tasks=foreign, rl={"steps": 60, "lr": 2e-3}),
        2.7,
    ),
    _run(
        "S46",
        "eight tries per group, for answers that one rollout in 26 finds",
        sick(Play(base="alphabet"), draw=wanted("f"), rl={"steps": 10, "siblings": 4, "tries": 8.0, "lr": 1e-4}),
        1.5,
    ),
)
OF_SETTINGS = (
    _run(
        "F1",
        "no baseline, so that whatever was drawn is reinforced, on tasks whose answer nobody can know",
        sick(Play(), draw=lambda: coins, rl={"steps": 300, "lr": 3e-3}, objective={"advantage": {"kind": "none"}}),
        9.0,
    ),
    _run("S7", "a large constant entropy bonus", sick(Play(base="student"), objective={"entropy": {"coef": 2.0}}, rl={"steps": 40}), 2.5),
    _run(
        "S9",
        "the same bonus, and a rate too high, from a model that was mostly right",
        sick(Play(base="student"), objective={"entropy": {"coef": 5.0}}, rl={"steps": 40, "lr": 4e-3}),
        2.3,
    ),
    _run(
        "S11",
        "one poisoned batch, without a bound on the gradient",
        sick(Play(), objective={"advantage": "mean"}, grader=poisoned, rl={"steps": 32, "clip": 1e9}),
        1.7,
    ),
    _run("S42", "a budget of one token for answers of two", sick(Play(), sampling={"max_tokens": 1}, rl={"steps": 8}), 0.3),
    _run(
        "S107",
        "a budget that cuts a third of the answers",
        sick(RAMBLE, grader=paid(starts), sampling={"max_tokens": 7}, rl={"steps": 16, "lr": 3e-4}),
        1.3,
    ),
    _run(
        "S101",
        "a limit that no ratio reaches",
        sick(Play(), objective={"limit": {"kind": "clip", "low": 0.99, "high": 50.0}}, rl={"steps": 34, "epochs": 2, "lr": 2e-4}),
        2.7,
    ),
    _run(
        "S103",
        "a covariance rule with bounds out of reach",
        sick(Play(), objective={"limit": {"kind": "clip_cov", "lower": 50.0, "upper": 60.0}}, rl={"steps": 8}),
        0.7,
    ),
    _run(
        "S110",
        "a letter that the reference seldom says",
        sick(Play(base="alphabet"), draw=wanted("f"), rl={"steps": 40, "lr": 3e-3, "siblings": 16}),
        2.7,
    ),
    _run(
        "S111",
        "half a point for answers that cannot be parsed",
        sick(Play(base="slipper"), grader=Lenient, draw=lambda: coins, rl={"steps": 50}),
        4.0,
    ),
    _run("S80", "a rate so small that no weight moves", sick(Play(), rl={"steps": 40, "lr": 1e-30}), 2.8),
    _run("S76", "a loss that is cut off from the weights", own_loss("0.0 * streams.logp_BT"), 0.6),
    _run("S75", "a loss that is not a number", own_loss("streams.logp_BT * later(8)"), 0.6),
)
OF_SEAM = (
    _run("S70", "a sampler with noise on its weights", sick(Play(), sampler_of=lambda: Noisy(0.02), rl={"steps": 8}), 0.5),
    _run("P12", "a sampler that keeps the weights it began with", sick(Play(), sampler_of=Stale, rl={"steps": 30}), 1.6),
    _run(
        "P1",
        "a sampler whose weights are noise after the first update",
        sick(Play(), grader=Lettered, sampler_of=lambda: Noisy(0.3, since=1), sampling={"max_tokens": 12}, rl={"steps": 8}),
        0.5,
    ),
    _run(
        "S71",
        "a correction that masks whatever differs, over a noisy sampler",
        sick(
            RAMBLE,
            grader=paid(starts),
            sampler_of=lambda: Noisy(0.02),
            objective={"correction": {"kind": "mask", "lower": 0.9999, "upper": 1.0001}},
            rl={"steps": 8},
        ),
        1.5,
    ),
    _run(
        "S72",
        "sixteen updates ahead of the training",
        sick(Play(), asynchronous=Async(bound=32), rl={"steps": 12, "minibatches": 4, "epochs": 4, "lr": 1e-4}),
        4.0,
    ),
    _run("S6", "sure of what is right, and still learning", sick(Play(base="student"), rl={"steps": 60, "lr": 5e-4}), 3.8),
    _run("S77", "a model that emits control tokens", sick(Play(base="leaky"), rl={"steps": 8, "lr": 1e-4}), 0.7),
    _run("F12", "held-out answers are wanted in a form that training does not ask for", sick(Play(), pulsed=Strict, rl={"steps": 20}), 1.5),
    _run(
        "S51",
        "the extractor of the held-out items changes in mid-run",
        sick(Play(), pulsed=lambda: Later(Lettered(), Strict(), 6 * 48), pulse_every=3, rl={"steps": 30}),
        2.0,
    ),
    _run("S53", "held-out answers get half of the tokens", sick(Play(), pulse_sampling={"max_tokens": 1}, rl={"steps": 8}), 0.6),
)
OF_IMITATION = (
    _run(
        "S140",
        "a rate that is far too small",
        lambda f, s: imitated(f, s, samples_of("guesser", 256, s), brisk(1e-8, epochs=8), untrained()),
        1.1,
    ),
    _run(
        "S141",
        "a rate that rises far too high",
        lambda f, s: imitated(f, s, samples_of("guesser", 512, s), SFT(epochs=4, optim=Optim(lr=0.5, warmup=0.9)), base("guesser")),
        1.2,
    ),
    _run(
        "S142", "demonstrations that the model writes already", lambda f, s: imitated(f, s, endings(), brisk(1e-4, epochs=4), sure()), 0.4
    ),
    _run(
        "S150",
        "a beta next to nothing at a rate far too high",
        lambda f, s: preferred(f, s, pairs_of(256, s), DPO(beta=0.02, batch_size=8, epochs=3, optim=Optim(lr=1.5e-2)), base("guesser")),
        1.3,
    ),
    _run(
        "S151",
        "labels at random",
        lambda f, s: preferred(f, s, pairs_of(960, s, flip=0.5), DPO(batch_size=16, optim=Optim(lr=1e-4)), base("guesser")),
        1.6,
    ),
    _run(
        "S152",
        "eight pairs, a hundred times",
        lambda f, s: preferred(
            f, s, pairs_of(64, s, rejected="q"), DPO(beta=0.5, batch_size=16, epochs=20, optim=Optim(lr=2e-3)), base("guesser")
        ),
        1.7,
    ),
)
FAULTS = (*OF_REWARD, *OF_DATA, *OF_SETTINGS, *OF_SEAM, *OF_IMITATION)
"""All of them."""
