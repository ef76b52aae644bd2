"""Budgets of seeds and items against the formula worked by hand."""

import math

import pytest

from posttrain.core.errors import EvidenceError
from posttrain.stats.power import (
    SigmaEstimate,
    items_needed,
    min_detectable_effect,
    min_detectable_gap,
    p_mixed,
    seeds_needed,
    single_seed_bound,
)

SIGMA = SigmaEstimate("seed_to_seed", 0.05, 4)


def test_seeds_for_five_four_three_and_two_points():
    # (1.959964 + .841621)^2 * 2 * .0025 = .0392444; over delta^2: 15.70, 24.53, 43.60, 98.11
    assert [seeds_needed(delta, SIGMA) for delta in (0.05, 0.04, 0.03, 0.02)] == [16, 25, 44, 99]
    assert seeds_needed(-0.03, SIGMA) == 44


def test_a_smaller_sigma_is_a_lever():
    # sigma .085 and .029 at 4.5 points: .0392444 * (.085/.05)^2 / .002025 = 56.0 and 6.52
    assert seeds_needed(0.045, SigmaEstimate("seed_to_seed", 0.085, 4)) in (56, 57)
    assert seeds_needed(0.045, SigmaEstimate("seed_to_seed", 0.029, 4)) == 7


def test_level_and_power_cost_seeds():
    # (2.575829 + 1.281552)^2 * .005 / .0025 = 29.76
    assert seeds_needed(0.05, SIGMA, level=0.99, power=0.9) == 30
    assert seeds_needed(10.0, SIGMA) == 2  # one seed shows no spread, however large the effect


def test_detectable_effect_is_the_inverse():
    assert min_detectable_effect(16, SIGMA) == pytest.approx(2.801585 * 0.05 * math.sqrt(2 / 16), abs=1e-6)
    for seeds in (2, 3, 16, 44, 99):
        assert seeds_needed(min_detectable_effect(seeds, SIGMA), SIGMA) == seeds


@pytest.mark.parametrize("kind", ["checkpoint_to_checkpoint", "eval_sampling", "within_eval"])
def test_other_sigmas_are_refused_with_the_reason(kind):
    other = SigmaEstimate(kind, 0.05, 10)
    with pytest.raises(EvidenceError, match=f"a {kind} sigma cannot size a seed budget: .+; use SigmaEstimate.from_runs"):
        seeds_needed(0.05, other)
    with pytest.raises(EvidenceError, match=kind):
        min_detectable_effect(16, other)


def test_sigma_from_runs():
    # .50 .54 .58: sd .04
    assert SigmaEstimate.from_runs([0.50, 0.54, 0.58]) == SigmaEstimate("seed_to_seed", 0.04, 3)
    with pytest.raises(EvidenceError, match="from 1 run"):
        SigmaEstimate.from_runs([0.5])
    with pytest.raises(EvidenceError, match="copies with one seed"):
        SigmaEstimate.from_runs([0.5, 0.5, 0.5])
    with pytest.raises(EvidenceError, match="sigma of 0"):
        SigmaEstimate("seed_to_seed", 0.0, 3)
    with pytest.raises(EvidenceError, match="from 1 run"):
        SigmaEstimate("seed_to_seed", 0.1, 1)
    with pytest.raises(EvidenceError, match="'guess' is unknown"):
        SigmaEstimate("guess", 0.1, 3)  # pyright: ignore[reportArgumentType]


def test_how_little_four_runs_say_about_sigma():
    # chi-square(3) quantiles .2158 and 9.3484: sqrt(3/9.3484) = .5665, sqrt(3/.2158) = 3.7286
    interval = SigmaEstimate("seed_to_seed", 1.0, 4).interval()
    assert (interval.low, interval.high) == (pytest.approx(0.5665, abs=1e-4), pytest.approx(3.7286, abs=1e-3))
    assert interval.method == "chi-square"


def test_items_unpaired():
    # 2.801585^2 * 2 * .25 / .0025 = 1569.8 and / .0004 = 9811.1
    assert items_needed(0.05) == 1570
    assert items_needed(0.02) == 9812
    assert items_needed(0.05, rate=0.9) == math.ceil(2.801585**2 * 2 * 0.09 / 0.0025)


def test_items_paired_need_the_discordance():
    # d .2, gap .05: (1.959964 sqrt(.2) + .841621 sqrt(.1975))^2 / .0025 = (.876523 + .374024)^2 / .0025 = 625.5,
    # and 2 / .05 = 40 for the exact test
    assert items_needed(0.05, discordance=0.2) == 666
    assert items_needed(-0.05, discordance=0.2) == 666
    assert items_needed(0.05, discordance=0.1) < items_needed(0.05, discordance=0.2) < items_needed(0.05)
    with pytest.raises(EvidenceError, match="discordance between 0.05 and 1"):
        items_needed(0.05, discordance=0.02)


@pytest.mark.parametrize("discordance", [None, 0.1, 0.3])
def test_detectable_gap_is_the_inverse(discordance):
    for n in (200, 500, 1319):
        assert items_needed(min_detectable_gap(n, discordance) + 1e-9, discordance) == n
    with pytest.raises(EvidenceError, match="see no gap"):
        min_detectable_gap(1)


def test_too_few_discordant_items_see_nothing():
    with pytest.raises(EvidenceError, match="30 items of which 10% differ see no gap at all"):
        min_detectable_gap(30, discordance=0.1)


def test_mixed_groups():
    # p .5 G 2: 1 - 1/4 - 1/4; p .05 G 8: 1 - .05^8 - .95^8 = 1 - .663420
    assert p_mixed(0.5, 2) == 0.5
    assert p_mixed(0.05, 8) == pytest.approx(0.336580, abs=1e-6)
    assert p_mixed(0.0, 8) == p_mixed(1.0, 8) == p_mixed(0.3, 1) == 0.0
    with pytest.raises(EvidenceError, match="group of 0"):
        p_mixed(0.5, 0)
    with pytest.raises(EvidenceError, match="success rate 2"):
        p_mixed(2, 4)


def test_single_seed_bound_is_the_larger_part():
    prompts = [0.5 + 0.082 * (-1) ** i for i in range(64)]  # sd .082: half-width 1.96 * .082 / 8 = .0201
    tight = single_seed_bound(prompts, [0.500, 0.508, 0.516])
    assert tight.prompt_half_width == pytest.approx(0.0201, abs=0.001)
    assert (tight.bound, tight.setting_spread) == (tight.prompt_half_width, pytest.approx(0.016))
    loose = single_seed_bound(prompts, [0.50, 0.58])
    assert loose.bound == pytest.approx(0.08)
    assert (loose.prompts, loose.settings) == (64, 2)


def test_single_seeds_carry_no_training_claim():
    for kind in ("training_delta", "stability"):
        with pytest.raises(EvidenceError, match=f"'{kind}' cannot rest on one seed: .*more seeds"):
            single_seed_bound([0.1 * i for i in range(20)], [0.5, 0.51], kind)
    with pytest.raises(EvidenceError, match="1 setting"):
        single_seed_bound([0.1 * i for i in range(20)], [0.5])


def test_plans_that_mean_nothing_are_refused():
    with pytest.raises(EvidenceError, match="effect of 0"):
        seeds_needed(0, SIGMA)
    with pytest.raises(EvidenceError, match="effect of nan"):
        items_needed(math.nan)
    with pytest.raises(EvidenceError, match="power 80"):
        seeds_needed(0.1, SIGMA, power=80)
    with pytest.raises(EvidenceError, match="level 95"):
        seeds_needed(0.1, SIGMA, level=95)
    with pytest.raises(EvidenceError, match="0 seeds"):
        min_detectable_effect(0, SIGMA)
