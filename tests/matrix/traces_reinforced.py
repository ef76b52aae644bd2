"""Generated faults of the policy, its data and its reward."""

from __future__ import annotations

from typing import Any

from tests.matrix.traces_healthy import after
from tests.matrix.traces_made import Rng, Trace, onset, reinforced
from tests.matrix.traces_policy import (
    by,
    collapse,
    drift,
    explodes,
    farms,
    grows,
    hacked,
    lurch,
    ratios,
    repeats,
    spikes,
    starve,
    stops_learning,
    towards,
    worse,
)
from tests.matrix.traces_world import Law, State


def _gone(at: int) -> tuple[Law, ...]:
    """The policy leaves the region in which it works."""
    return (stops_learning(at), by("skill", -0.9, at, at + 8))


def _once_cut(steps: set[int]) -> tuple[Law, ...]:
    """On single steps the prompts are so hard that every answer is cut."""

    def law(s: State, r: Rng) -> None:
        s.pool_length = 25.0 if s.step in steps else 1.0

    return (law,)


def _by_heart(r: Rng) -> tuple[Law, ...]:
    """A small set of tasks is learned by heart; held-out tasks gain nothing."""
    return (stops_learning(), by("pool_shift", 0.03, onset(r, 15, 40)))


def _lazy(at: int) -> tuple[Law, ...]:
    """The tools are given up while the score on familiar items stays."""
    return (towards("calls", 0.05, 40, at), towards("turns", 1.05, 40, at), stops_learning(at))


def _terse(at: int) -> tuple[Law, ...]:
    """A length penalty outweighs correctness: the answers shrink at once, and the score with them."""
    return (towards("length", 20.0, 12, at), stops_learning(at), by("skill", -0.06, at, at + 30))


TOOLS: dict[str, Any] = {"turns": 2.4, "calls": 1.4, "forced": 0.8}
FORM: dict[str, Any] = {"pays": {"form": 0.3}, "levels": {"form": 0.25}, "wobble": {"form": 0.2}}

POLICY: tuple[Trace, ...] = (
    reinforced(
        "F1", "entropy 0.42 to 0.03 in 30 steps, stubs of 4 tokens", lambda r: collapse(onset(r, 20, 50)), twins=("F2", "F13"), entropy=0.42
    ),
    reinforced(
        "F1", "one mode per task, answers stay whole", lambda r: collapse(onset(r, 20, 50), stubs=None), twins=("F2",), entropy=0.42
    ),
    reinforced("S1", "collapsed on entropy, spread and held-out score", lambda r: collapse(onset(r, 20, 50)), entropy=0.42),
    reinforced("F2", "prompts leave the band at both ends, entropy alive", lambda r: starve(onset(r, 30, 80)), twins=("F1", "S2", "S35")),
    reinforced(
        "F13",
        "collapse after a long healthy stretch at a constant rate",
        lambda r: collapse(onset(r, 80, 150), 10),
        steps=220,
        schedule="constant",
    ),  # fmt: skip
    reinforced("S2", "no task is in reach", twins=("S3", "S30", "F2", "F1"), pool_shift=-12.0, rate=0.0),
    reinforced("S3", "sparse but learning", shape="sparse but learning", steps=200, twins=("S2", "F2", "F1")),
    reinforced("S4", "the tasks are solved", shape="saturating", steps=220, twins=("F2", "F1", "S20"), rate=0.12),
    reinforced(
        "S5",
        "flat score, live groups, training reward moves",
        lambda r: (by("pool_shift", 0.02), stops_learning()),
        steps=70,
        twins=("S2", "S20", "F2", "S45"),
        skill=-3.6,
    ),  # fmt: skip
    reinforced("S6", "sharpens while reward rises", shape="productive sharpening", twins=("F1", "F13"), sharpen=0.05, entropy_end=0.04),
    reinforced("S7", "a constant bonus drives entropy to noise", lambda r: explodes(onset(r, 20, 60)), twins=("S11",)),
    reinforced(
        "S8",
        "entropy slides 0.188 to 0.070 over 250 steps, reward flat but fine",
        steps=300,
        entropy=0.188,
        entropy_end=0.05,
        sharpen=0.008,
        rate=0.002,
        twins=("F1",),
    ),  # fmt: skip
    reinforced("S9", "reward lost within steps", lambda r: _gone(onset(r, 60, 120)), twins=("S2",), skill=0.4),
    reinforced(
        "S10", "turns leap some 15 steps before the reward falls", lambda r: spikes(onset(r, 40, 80)), steps=120, **TOOLS, skill=0.2
    ),
    reinforced("S11", "one step far too large", lambda r: lurch(onset(r, 40, 100)), twins=("F5", "S7")),
    reinforced(
        "F3",
        "answers grow without pause, score flat",
        lambda r: (grows("length", 0.007, onset(r, 50, 100)), stops_learning()),
        steps=240,
        twins=("F4", "S43", "S24"),
        cap=9000.0,
    ),  # fmt: skip
    reinforced(
        "F4",
        "loops that the reward pays for",
        lambda r: repeats(onset(r, 40, 90)),
        steps=200,
        twins=("F3", "F1"),
        pays={"keywords": 0.5},
        levels={"keywords": 0.3},
        wobble={"keywords": 0.2},
    ),  # fmt: skip
    reinforced("F5", "ratios with fat tails, then not finite", lambda r: ratios(onset(r, 8, 30)), steps=90, twins=("F14",)),
    reinforced(
        "F6", "KL without bound, held-out score falls", lambda r: drift(onset(r, 60, 110)), steps=300, twins=("S11",), pulse_items=500
    ),
    reinforced("S110", "KL stays above what is usual", steps=200, kl_rate=0.07, leash=0.05, twins=("F6",), schedule="constant"),
    reinforced(
        "S111", "a rising share of answers off the form", lambda r: (towards("unparseable", 0.45, 80, onset(r, 50, 80)),), twins=("S30",)
    ),
    reinforced(
        "S60", "gets worse at all that is measured", lambda r: worse(onset(r, 60, 100)), steps=260, twins=("S20", "F12", "S51"), skill=0.5
    ),
    reinforced(
        "S101", "the clip never fires, four updates per phase", steps=80, clipped=0.0, ratio_tail=0.05, changed={"rl.minibatches": 4}
    ),
    reinforced("S102", "most tokens beyond the bound", lambda r: (towards("clipped", 0.85, 20),), twins=("F5",), rate=0.002),
    reinforced("S103", "no token eligible for the covariance rule", cov_eligible=0.0, changed={"objective.limit": {"kind": "clip_cov"}}),
    reinforced("S104", "the schedule ends before the run", lambda r: (after(onset(r, 80, 110), lambda s, _: setattr(s, "lr", 0.0)),)),
    reinforced("S105", "the engine samples at temperature 0", twins=("F1",), identical=1.0, rate=0.0),
    reinforced("S107", "a third of the answers cut, steadily", twins=("S42", "S43"), length=100.0, cap=118.0),
    reinforced("S112", "the rate is next to nothing", steps=200, rate=0.0, kl_rate=2e-7, twins=("S80",), changed={"rl.optim.lr": 1e-8}),
    reinforced(
        "P19",
        "nothing fits the budget, only KL is left",
        lambda r: (by("kl", 0.004, 10), towards("repetition", 0.8, 80, 10)),
        twins=("S2", "F2"),
        length=420.0,
        cap=40.0,
        rate=0.0,
    ),  # fmt: skip
    reinforced("P20", "the loss is exactly 0", lambda r: starve(onset(r, 20, 40), wide=900.0), twins=("F1",), steps=200),
)

REWARD: tuple[Trace, ...] = (
    reinforced("P13", "form to 1, correctness at 0", lambda r: farms("form", 5, 40), **FORM, skill=-12.0, twins=("P22", "S24", "S20")),
    reinforced("P21", "no reward for some rollouts", errors=0.012, twins=("S31",)),
    reinforced(
        "P22", "style varies more than being right", pays={"style": 2.0}, levels={"style": 0.5}, wobble={"style": 0.35}, twins=("P13",)
    ),
    reinforced(
        "S20",
        "reward holds while an independent score falls",
        lambda r: hacked(onset(r, 60, 110)),
        steps=320,
        pulse_items=500,
        skill=-0.2,
        rate=0.004,
        twins=("F12", "F6", "S53", "S60"),
    ),  # fmt: skip
    reinforced(
        "S23",
        "a gate that never opens",
        gated=True,
        pays={"steps": 0.4},
        levels={"steps": 0.5},
        wobble={"steps": 0.2},
        skill=-12.0,
        rate=0.0,
        twins=("P13",),
    ),  # fmt: skip
    reinforced(
        "S24",
        "commands go up, 5 % solved throughout",
        lambda r: farms("commands", onset(r, 10, 40)),
        skill=-3.5,
        spread=1.0,
        pays={"commands": 0.6},
        levels={"commands": 0.2},
        wobble={"commands": 0.2},
        twins=("P13", "S20"),
    ),  # fmt: skip
    reinforced(
        "S25",
        "more calls, many repeated, no better score",
        lambda r: (towards("calls", 4.5, 90, 30), towards("repeated_calls", 0.55, 90, 30), stops_learning()),
        steps=200,
        twins=("S26",),
        turns=6.0,
        calls=1.2,
        forced=0.8,
    ),  # fmt: skip
    reinforced("S26", "the tools are given up late", lambda r: _lazy(onset(r, 110, 150)), steps=260, **TOOLS, twins=("S28", "S25")),
    reinforced("S27", "episodes end at the most turns", **TOOLS, turn_capped=0.55, skill=-1.4, rate=0.004, twins=("S10",)),
    reinforced("S28", "calls that cannot be parsed", lambda r: (towards("malformed_calls", 0.45, 60, 20),), **TOOLS, twins=("S26",)),
    reinforced("S30", "no answer in the required form", unparseable=0.97, rate=0.0, twins=("S2", "S42", "F2")),
    reinforced("S31", "the grader raises, more and more", lambda r: (towards("errors", 0.25, 60, onset(r, 20, 60)),), twins=("S30",)),
    reinforced("S35", "a constant reward", constant=0.5, rate=0.0, twins=("S2", "F1", "F2")),
    reinforced("S36", "shortest answer best paid", lambda r: _terse(onset(r, 20, 70)), skill=0.3, twins=("F1",)),
    reinforced("S40", "solved before anything was trained", skill=5.5, ceiling=8.0, unparseable=0.004, twins=("S35", "F2")),
    reinforced("S41", "easy and impossible prompts with little between", pool_spread=45.0, unparseable=0.003, twins=("S2", "F1")),
    reinforced("S42", "every answer is cut", length=300.0, cap=60.0, rate=0.0, twins=("S2", "S43", "F2")),
    reinforced(
        "S43",
        "answers four times as long within 30 steps, into the budget",
        lambda r: (grows("length", 0.045, onset(r, 50, 120), 400.0), stops_learning()),
        steps=200,
        cap=330.0,
        twins=("F4", "F3"),
    ),  # fmt: skip
    reinforced(
        "S44",
        "six of eight rollouts masked",
        lambda r: (grows("length", 0.012, onset(r, 20, 50), 240.0),),
        overlong_drop=True,
        cap=200.0,
        changed={"objective.overlong": {"kind": "drop"}},
    ),  # fmt: skip
    reinforced("S45", "the training set is learned by heart", _by_heart, steps=260, skill=-0.6, twins=("S20",)),
    reinforced(
        "S46", "eight groups drawn per group kept", pool_spread=30.0, unparseable=0.003, tries=12.0, rate=0.005, changed={"rl.tries": 12.0}
    ),
    reinforced("F12", "another template in the evaluation", heldout_unparsed=0.6, rate=0.03, twins=("S53", "S20", "S51", "S30")),
    reinforced(
        "S51",
        "the evaluation changes in mid-run",
        lambda r: (after(onset(r, 70, 110), lambda s, _: setattr(s, "heldout_unparsed", 0.7)),),
        twins=("F12", "S60"),
    ),  # fmt: skip
    reinforced(
        "S52", "single steps with every answer cut", lambda r: _once_cut({onset(r, 20, 60), onset(r, 70, 120)}), twins=("S42", "S2")
    ),
    reinforced("S53", "held-out answers are cut", heldout_extra=1.0, heldout_cap=150.0, twins=("F12", "S20")),
)
