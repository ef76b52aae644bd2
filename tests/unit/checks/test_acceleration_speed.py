"""Gates B and C: what passes, what fails, and what stays open; noise alone must not pass."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from posttrain.checks.gate_learning import Learned, learning_gate
from posttrain.checks.gate_speed import Arm, ratio_interval, speed_gate
from posttrain.checks.gates import Verdict
from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.core.seeds import numpy_rng
from posttrain.core.trajectory import RewardStatus, StopReason
from posttrain.evals.conditions import Conditions
from posttrain.evals.record import EvalRecord, ItemResult, Outcome


class Machine:
    """A clock that steps move by hand. Example: Machine().arm([2.0, 3.0]) takes 2, then 3 seconds."""

    def __init__(self) -> None:
        self.now, self.order = 0.0, []

    def arm(self, seconds, name: str = "") -> Arm:
        left = iter(seconds)

        def step(number: int) -> None:
            self.order.append((name, number))
            self.now += next(left)

        def reset() -> None:
            self.now += 100.0  # untimed

        return Arm(reset, step)

    @property
    def clocks(self):
        return {"wall": lambda: self.now, "cpu": lambda: self.now / 2}


def gate_of(reference, accelerated, **options):
    machine = Machine()
    result = speed_gate(machine.arm(reference, "r"), machine.arm(accelerated, "a"), clocks=machine.clocks, **options)
    return result, machine.order


def test_twice_as_fast_passes():
    """Ratios 0.5 but for a little noise; the first step of each warms up and does not count."""
    result, order = gate_of([50.0, 2.0, 2.02, 2.0, 1.98, 2.0], [70.0, 1.0, 1.0, 1.01, 1.0, 0.99])
    assert result.verdict is Verdict.PASSED
    assert result.measured["wall"]["ratio"] == pytest.approx(0.5, abs=0.005)
    assert result.measured["wall"]["high"] < 0.52
    assert result.measured["wall"]["reference_seconds"] == pytest.approx(2.0)
    assert result.measured["cpu"]["ratio"] == pytest.approx(0.5, abs=0.005)
    assert result.measured["pairs"] == 5
    assert order[:2] == [("r", 0), ("a", 0)]
    assert order[2:6] == [("r", 1), ("a", 1), ("a", 2), ("r", 2)]  # who goes first alternates; both do the same work


def test_slower_fails_and_equal_shows_nothing():
    slow, _ = gate_of([1.0] * 6, [1.0, 1.2, 1.21, 1.19, 1.2, 1.22])
    assert slow.verdict is Verdict.FAILED
    equal, _ = gate_of([1.0] * 6, [1.0, 1.02, 0.97, 1.01, 0.99, 1.0])
    assert equal.verdict is Verdict.NOT_SHOWN


def test_the_interval_by_hand():
    """Logs 0, 0, 0, 0, ln 2: mean ln 2 / 5 = 0.1386, sd 0.3100, se 0.1386, t(4) 2.776: [exp(-0.2463), exp(0.5236)]."""
    ratio, interval = ratio_interval([1.0, 1.0, 1.0, 1.0, 2.0])
    assert math.log(ratio) == pytest.approx(math.log(2) / 5)
    assert math.log(interval.low) == pytest.approx(-0.2463, abs=1e-3)
    assert math.log(interval.high) == pytest.approx(0.5236, abs=1e-3)


def test_noise_alone_hardly_ever_passes():
    """Two equal paths on a machine whose steps vary by 30 %: at most 2.5 % of the gates pass, so of 400 hardly more than 20."""
    rng = numpy_rng(0, "test", "noise")
    passes = 0
    for _ in range(400):
        times = rng.lognormal(0.0, 0.3, size=(2, 6)).tolist()
        passes += gate_of(*times)[0].verdict is Verdict.PASSED
    assert passes <= 20


def test_a_small_gain_is_shown_by_more_pairs():
    rng = numpy_rng(2, "test", "noise")
    reference, accelerated = (rng.lognormal(mean, 0.1, size=61).tolist() for mean in (0.0, math.log(0.9)))
    assert gate_of(reference, accelerated)[0].verdict is Verdict.NOT_SHOWN
    assert gate_of(reference, accelerated, pairs=60)[0].verdict is Verdict.PASSED


def test_the_clock_that_decides_is_the_one_named():
    machine = Machine()
    other = [0.0]
    clocks = {"wall": lambda: machine.now, "cpu": lambda: other[0]}

    def arm(wall: float, cpu: float, drift: float) -> Arm:
        def step(number: int) -> None:
            machine.now += wall * (1 + drift * number)
            other[0] += cpu * (1 - drift * number)

        return Arm(lambda: None, step)

    slow_wall, slow_cpu = arm(1.0, 1.0, 0.001), arm(1.2, 0.5, 0.002)
    assert speed_gate(slow_wall, slow_cpu, clock="cpu", clocks=clocks).verdict is Verdict.PASSED
    assert speed_gate(slow_wall, slow_cpu, clock="wall", clocks=clocks).verdict is Verdict.FAILED


def test_fewer_than_five_pairs_are_refused():
    with pytest.raises(EvidenceError, match="at least 5 pairs"):
        gate_of([1.0] * 9, [1.0] * 9, pairs=4)


def learned(right: list[bool], steps: int = 8) -> Learned:
    items = tuple(ItemResult(f"i{k}", (Outcome(float(value), RewardStatus.SCORED, StopReason.END, 3),)) for k, value in enumerate(right))
    conditions = Conditions(
        suite="toy",
        dataset="toy",
        split="held_out",
        split_digest="s",
        items_digest="d",
        n_items=len(right),
        samples_per_item=1,
        sampling=Sampling(temperature=0.0),
        thinking="none",
        extractor="x/1",
        verifier="g/1",
        template_digest="t",
        tokenizer_digest="k",
        seed=0,
        turns=1,
    )
    return Learned(EvalRecord(conditions, "x", "w", items), steps)


def runs(n: int, both: int, lost: int, gained: int) -> tuple[Learned, Learned]:
    """`both` items right in both, `lost` only without, `gained` only with the acceleration."""
    one = [k < both + lost for k in range(n)]
    other = [k < both or both + lost <= k < both + lost + gained for k in range(n)]
    return learned(one), learned(other)


@pytest.mark.parametrize(
    ("n", "both", "lost", "gained", "verdict"),
    [
        (400, 200, 12, 12, Verdict.PASSED),  # 0 +- 2.4 points
        (400, 200, 30, 26, Verdict.PASSED),  # -1 +- 3.7: the lower end is above -5
        (400, 200, 40, 30, Verdict.NOT_SHOWN),  # -2.5 +- 4.1
        (40, 20, 2, 2, Verdict.NOT_SHOWN),  # 0 +- 10.2: too few items
        (400, 200, 60, 5, Verdict.FAILED),  # -13.8 +- 3.7
        (400, 200, 0, 40, Verdict.PASSED),  # a gain is no loss
    ],
)
def test_non_inferiority(n, both, lost, gained, verdict):
    one, other = runs(n, both, lost, gained)
    result = learning_gate(lambda: one, lambda: other)
    assert result.verdict is verdict, result.summary
    assert result.measured["difference"] == pytest.approx((gained - lost) / n)
    assert result.measured["items"] == n


def test_the_margin_is_the_callers():
    one, other = runs(400, 200, 40, 30)
    assert learning_gate(lambda: one, lambda: other, margin=0.1).verdict is Verdict.PASSED


@pytest.mark.parametrize("value", [False, True])
def test_items_that_all_score_the_same_show_nothing(value):
    """400 items wrong in both runs have a narrow interval around 0, and say nothing about learning."""
    result = learning_gate(lambda: learned([value] * 400), lambda: learned([value] * 400))
    assert result.verdict is Verdict.NOT_SHOWN
    assert "measures nothing" in result.summary


def test_a_run_without_a_step_shows_nothing():
    one, other = runs(400, 200, 0, 0)
    result = learning_gate(lambda: replace(one, steps=0), lambda: other)
    assert result.verdict is Verdict.NOT_SHOWN
    assert "no optimizer step" in result.summary


def test_where_little_can_be_lost_nothing_is_shown():
    """The reference solves 4 of 230: a run that solved none would be no worse than -0.05."""
    one, other = runs(230, 2, 2, 8)
    result = learning_gate(lambda: one, lambda: other)
    assert result.verdict is Verdict.NOT_SHOWN
    assert "too little to lose" in result.summary
