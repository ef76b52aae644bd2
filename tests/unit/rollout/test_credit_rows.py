"""From groups to credited rows: who is trained and who is left out under which name, and the advantage of every token by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.trajectory import Group, Owner, StopReason
from posttrain.objectives.advantages import Moments
from posttrain.objectives.objective import Objective
from posttrain.rollout.credit import Chosen, PolicyRow, RowStreams, assign, carries_signal, policy_rows

END, CUT = StopReason.END, StopReason.LENGTH
S, F = Owner.SAMPLED, Owner.FORCED
NO_KL = {"estimator": "none"}


def objective(advantage: object = "mean", **axes: object) -> Objective:
    """An objective without a KL term unless one is given."""
    return Objective.load({"advantage": advantage, "kl": NO_KL, **axes})


def alone(moments: Moments) -> list[Moments]:
    """What a run of one process gathers."""
    return [moments]


def chosen(groups: Sequence[Group], how: Objective, budget: int = 10) -> Chosen:
    return policy_rows(list(enumerate(groups)), how, budget)


def credit(rows: Sequence[PolicyRow], how: Objective, streams: Sequence[RowStreams] = (), gather=alone) -> list[list[float]]:
    """Advantages as plain lists."""
    found, _ = assign(rows, streams or [RowStreams()] * len(rows), how, gather)
    return [values.tolist() for values in found]


# --- which groups and rollouts take part -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "relative", "single"),
    # relative: siblings are the baseline, so rewards must differ; single: one scored completion is enough
    [
        ([1.0, 0.0], True, True),
        ([1.0, 1.0], False, True),
        ([0.0, 0.0], False, True),
        ([1.0, None], False, True),
        ([None, None], False, False),
    ],
)
def test_what_carries_signal_depends_on_the_baseline(toy, rewards, relative, single):
    group = toy.group(rewards)
    for how in ("mean", "mean_std", "leave_one_out", "median_mad", "max_rl", {"kind": "batch", "within": "group"}):
        assert carries_signal(group, objective(how)) is relative, how
    for how in ("none", "critic", "batch"):
        assert carries_signal(group, objective(how)) is single, how
    assert carries_signal(group, objective("teacher"))  # a teacher judges every completion


def test_over_long_filtering_is_part_of_the_question(toy):
    # right and cut off, wrong and complete: without the cut one nothing is left to compare
    group = toy.group([1.0, 0.0], stops=[CUT, END])
    assert carries_signal(group, objective())
    assert not carries_signal(group, objective(overlong="drop"))
    assert carries_signal(group, objective("critic", overlong="drop"))


def test_a_penalty_makes_no_signal_where_the_reward_sees_none(toy):
    # one of two right answers is so long that the ramp takes all of it: still no preference
    group = toy.group([1.0, 1.0], ids=[(20, 2), (20,) * 10])
    how = objective(overlong={"kind": "ramp", "buffer": 0.2})
    assert not carries_signal(group, how)
    assert chosen([group], how).rows == ()


def test_rows_carry_the_sampled_ids_and_logps(toy):
    right, wrong = chosen([toy.group([1.0, 0.0], ids=[(20, 21, 2), (22, 2)])], objective()).rows
    assert right.sample.tokens.ids == (20, 21, 2)
    assert right.sample.logps == (-1.0, -1.0, -1.0)
    assert right.sample.prompt.ids == (1, 5, 9)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert {right.sample.group, wrong.sample.group} == {"0"}


def test_rows_carry_what_the_cut_left(toy):
    group = toy.group([1.0, 0.0], ids=[(20, 2), (22, 2)])
    first, second = group.rollouts
    recorded = replace(first, trajectory=replace(first.trajectory, candidates=((20, 21), (2,))))
    right, wrong = chosen([replace(group, rollouts=(recorded, second))], objective()).rows
    assert (right.sample.candidates, wrong.sample.candidates) == (((20, 21), (2,)), ())


def test_a_task_drawn_twice_is_two_groups(toy):
    rows = chosen([toy.group([1.0, 0.0], task="a"), toy.group([0.0, 1.0], task="a")], objective()).rows
    assert [row.sample.group for row in rows] == ["0", "0", "1", "1"]


def test_unscored_sibling_leaves_and_zero_is_kept(toy):
    found = chosen([toy.group([1.0, None, 0.0])], objective())
    assert [row.sample.tokens.ids[0] for row in found.rows] == [20, 22]
    assert found.left == {"unscored": 1, "overlong": 0, "pivot": 0, "no_signal": 0, "too_few": 0}
    assert [values[0] for values in credit(found.rows, objective())] == [0.5, -0.5]


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 0.9, 1.0])
def test_equal_rewards_train_nothing(toy, value):
    found = chosen([toy.group([value] * 8)], objective("mean_std"))
    assert (found.rows, found.left["no_signal"]) == ((), 8)


def test_the_pivot_of_an_odd_group_leaves(toy):
    # sorted 0 0 1 1 1: the median is 1, first met at index 1
    found = chosen([toy.group([0.0, 1.0, 0.0, 1.0, 1.0])], objective("median_mad"))
    assert [row.sample.tokens.ids[0] for row in found.rows] == [20, 22, 23, 24]
    assert found.left["pivot"] == 1
    even = chosen([toy.group([0.0, 1.0, 0.0, 1.0])], objective("median_mad"))
    assert (len(even.rows), even.left["pivot"]) == (4, 0)
    assert chosen([toy.group([0.0, 1.0, 0.0, 1.0, 1.0])], objective("mean")).left["pivot"] == 0


def test_a_group_too_small_for_the_best_of_k_leaves(toy):
    # k = 2 compares with two others: three scored siblings are needed
    how = objective({"kind": "pass_at_k", "k": 2})
    assert chosen([toy.group([1.0, 0.0, None])], how).left["too_few"] == 3
    assert len(chosen([toy.group([1.0, 0.0, 0.0])], how).rows) == 3


def test_every_rollout_is_accounted_for(toy):
    groups = [
        toy.group([1.0, 0.0, None, 0.0], stops=[END, END, END, CUT]),  # one unscored, one cut off
        toy.group([1.0, 1.0]),  # no signal
        toy.group([1.0, 0.0, 0.0], stops=[CUT, END, END]),  # without the cut one 0 and 0 are left: no signal
        toy.group([0.0, 1.0, 1.0]),  # the second is the pivot
    ]
    found = chosen(groups, objective("median_mad", overlong="drop"))
    assert found.left == {"unscored": 1, "overlong": 1, "pivot": 1, "no_signal": 5, "too_few": 0}
    assert len(found.rows) + sum(found.left.values()) == 12


def test_the_ramp_is_added_to_the_reward(toy):
    # budget 10, buffer 0.4 of it = 4, so the ramp starts at 6: 6 tokens 0, 8 tokens -1/2, 10 tokens -1; times scale 0.5
    group = toy.group([1.0, 0.0, 1.0], ids=[(20,) * 6, (20,) * 8, (20,) * 10])
    how = objective(overlong={"kind": "ramp", "buffer": 0.4, "scale": 0.5})
    assert [row.reward for row in chosen([group], how).rows] == [1.0, -0.25, 0.5]
    assert [row.reward for row in chosen([group], objective()).rows] == [1.0, 0.0, 1.0]


def test_sentences_are_written_only_when_asked_for(toy):
    keyed = [(0, toy.group([1.0, 0.0], ids=[(20, 2), (22, 23, 2)]))]
    assert [row.sample.sentences for row in policy_rows(keyed, objective(), 10).rows] == [(), ()]
    rows = policy_rows(keyed, objective(), 10, lambda ids: tuple(range(len(ids)))).rows
    assert [row.sample.sentences for row in rows] == [(0, 1), (0, 1, 2)]


# --- credit among siblings ---------------------------------------------------------------------------------------------------------------


def test_ddof_and_eps_are_passed_on(toy):
    # [1, 0]: population std 0.5, sample std 0.7071; with eps 0.5 the advantage is 0.5 / (0.5 + 0.5)
    rows = chosen([toy.group([1.0, 0.0])], objective()).rows
    by = [{"ddof": 0}, {"ddof": 1}, {"eps": 0.5}]
    found = [credit(rows, objective({"kind": "mean_std", **one}))[0][0] for one in by]
    assert found == pytest.approx([1.0, 0.707107, 0.5], abs=1e-5)


def test_leave_one_out_compares_with_the_others(toy):
    # 1 - (0 + 0) / 2 = 1; 0 - (1 + 0) / 2 = -0.5
    rows = chosen([toy.group([1.0, 0.0, 0.0])], objective()).rows
    assert credit(rows, objective("leave_one_out")) == [[1.0, 1.0], [-0.5, -0.5], [-0.5, -0.5]]


def test_eps_of_the_median_and_k_of_the_best_are_passed_on(toy):
    # rewards 0 1 3 9: median 2, distances 2 1 1 7, MAD 1.5; eps 0.5 makes the first -2 / 2
    rows = chosen([toy.group([0.0, 1.0, 3.0, 9.0])], objective("median_mad")).rows
    assert credit(rows, objective({"kind": "median_mad", "eps": 0.5}))[0][0] == pytest.approx(-1.0)
    # k = 2 of rewards 1 0 0: the 1 makes every pair's best 1, without it 0: 2 (1 - 0); a 0 beside 1 or 0: 2 (1/2 - 1)
    rows = chosen([toy.group([1.0, 0.0, 0.0])], objective()).rows
    found = credit(rows, objective({"kind": "pass_at_k", "k": 2}))
    assert [values[0] for values in found] == pytest.approx([2.0, -1.0, -1.0])


def test_groups_are_compared_within_themselves(toy):
    rows = chosen([toy.group([1.0, 0.0]), toy.group([5.0, 1.0])], objective()).rows
    assert [values[0] for values in credit(rows, objective())] == [0.5, -0.5, 2.0, -2.0]
    mixed = [rows[0], rows[2], rows[1], rows[3]]  # in whatever order the rows come
    assert [values[0] for values in credit(mixed, objective())] == [0.5, 2.0, -0.5, -2.0]


def test_a_forced_token_gets_no_credit(toy):
    group = toy.group([1.0, 0.0], ids=[(20, 99, 2), (21, 2)], owners=[(S, F, S), (S, S)])
    rows = chosen([group], objective()).rows
    assert credit(rows, objective()) == [[0.5, 0.0, 0.5], [-0.5, -0.5]]
    assert rows[0].trained_T == [True, False, True]


def test_longer_and_shorter_half_are_compared_apart(toy):
    # lengths 2 2 4 4, median 3: the short ones have rewards 1 0, the long ones 1 1
    ids = [(20, 2), (21, 2), (22, 22, 22, 2), (23, 23, 23, 2)]
    rows = chosen([toy.group([1.0, 0.0, 1.0, 1.0], ids=ids)], objective()).rows
    assert [values[0] for values in credit(rows, objective(subgroups="length"))] == [0.5, -0.5, 0.0, 0.0]
    # together: mean 0.75
    assert [values[0] for values in credit(rows, objective())] == [0.25, -0.75, 0.25, 0.25]


def test_repetition_costs_the_token_that_closes_it(toy):
    # (20, 21) comes back at the fourth token
    rows = chosen([toy.group([1.0, 0.0], ids=[(20, 21, 20, 21, 2), (22, 2)])], objective()).rows
    assert credit(rows, objective(repetition={"coef": 0.2, "n": 2})) == [[0.5, 0.5, 0.5, pytest.approx(0.3), 0.5], [-0.5, -0.5]]
    # a repeat that the harness forced costs nothing
    forced = chosen([toy.group([1.0, 0.0], ids=[(20, 21, 20, 21), (22, 2)], owners=[(S, S, S, F), (S, S)])], objective()).rows
    assert credit(forced, objective(repetition={"coef": 0.2, "n": 2}))[0] == [0.5, 0.5, 0.5, 0.0]


# --- channels ----------------------------------------------------------------------------------------------------------------------------


def channelled(toy, parts):
    return chosen([toy.group([sum(part.values()) for part in parts], parts=parts)], objective()).rows


def test_correlated_channels_cancel(toy):
    # success (1, 0) has z-scores +1 -1, cost (-0.05, 0) has -1 +1: 0 although the sum of rewards is 0.95 against 0
    rows = channelled(toy, [{"correct": 1.0, "cost": -0.05}, {"correct": 0.0, "cost": 0.0}])
    assert credit(rows, objective("channels"))[0] == pytest.approx([0.0, 0.0], abs=1e-4)
    # the cost weighs a tenth: 1 - 0.1
    weighed = objective({"kind": "channels", "weights": {"cost": 0.1}})
    assert [values[0] for values in credit(rows, weighed)] == pytest.approx([0.9, -0.9], abs=1e-4)
    # ddof 1 divides by sqrt(0.5) instead of 0.5
    sample = objective({"kind": "channels", "weights": {"cost": 0.0}, "ddof": 1})
    assert credit(rows, sample)[0][0] == pytest.approx(0.707107, abs=1e-5)


def test_a_completion_without_channels_scored_zero_on_each(toy):
    # correct (1, 0, -): as 1 0 0 with mean 1/3 and std 0.4714: 1.4142, -0.7071, -0.7071
    rows = chosen([toy.group([1.0, 0.0, 0.0], parts=[{"correct": 1.0}, {"correct": 0.0}, {}])], objective()).rows
    assert [values[0] for values in credit(rows, objective("channels"))] == pytest.approx([1.4142, -0.7071, -0.7071], abs=1e-4)


def test_channels_without_a_reward_that_has_any(toy):
    rows = chosen([toy.group([1.0, 0.0])], objective()).rows
    with pytest.raises(ConfigError, match=r"needs a reward with named channels; return \{channel: value\} .*, or use mean_std"):
        credit(rows, objective("channels"))


# --- KL in the reward --------------------------------------------------------------------------------------------------------------------

IN_REWARD = {"estimator": "k1", "placement": "reward", "coef": 0.1}
FORCED_PAIR = {"ids": [(20, 99, 2), (21, 2)], "owners": [(S, F, S), (S, S)]}
KL = [np.array([0.5, np.nan, 0.25]), np.array([-0.2, 0.1])]
"""The forced token's entry is never read."""


def test_kl_in_the_reward_of_rloo_is_charged_to_the_response(toy):
    # 1 - 0.1 x 0.75 = 0.925 against 0 - 0.1 x (-0.1) = 0.01: each minus the other
    rows = chosen([toy.group([1.0, 0.0], **FORCED_PAIR)], objective()).rows
    how = Objective.load({"kind": "rloo", "kl": {"coef": 0.1}})
    found = credit(rows, how, [RowStreams(kl_T=kl) for kl in KL])
    assert found == [pytest.approx([0.915, 0.0, 0.915]), pytest.approx([-0.915, -0.915])]


def test_kl_in_the_reward_of_ppo_is_paid_per_token(toy):
    # rewards (-0.05, 1 - 0.025): to go 0.925, 0.975; values 0.3, 0.4; a forced slot holds junk
    rows = chosen([toy.group([1.0, 0.0], **FORCED_PAIR)], objective("critic")).rows
    how = Objective.load({"kind": "ppo", "kl": {"coef": 0.1}})
    values = [np.array([0.3, np.inf, 0.4]), np.array([0.5, 0.0])]
    streams = [RowStreams(kl_T=kl, values_T=value) for kl, value in zip(KL, values, strict=True)]
    found, returns = assign(rows, streams, how, alone)
    assert found[0].tolist() == pytest.approx([0.625, 0.0, 0.575])
    assert returns[0].tolist() == pytest.approx([0.925, 0.0, 0.975])
    # rewards (0.02, -0.01): to go 0.01, -0.01
    assert found[1].tolist() == pytest.approx([-0.49, -0.01])
    assert returns[1].tolist() == pytest.approx([0.01, -0.01])


def test_gamma_and_lambda_reach_the_estimate(toy):
    # reward 1 at the end, values 0.4 0.6: delta_2 = 0.4, delta_1 = 0.5 x 0.6 - 0.4 = -0.1; A_1 = -0.1 + 0.5 x 0.5 x 0.4 = 0
    rows = chosen([toy.group([1.0])], objective("critic")).rows
    how = objective({"kind": "critic", "gamma": 0.5, "lam": 0.5})
    found, returns = assign(rows, [RowStreams(values_T=np.array([0.4, 0.6]))], how, alone)
    assert found[0].tolist() == pytest.approx([0.0, 0.4])
    assert returns[0].tolist() == pytest.approx([0.4, 1.0])


def test_kl_in_the_reward_of_reinforce_plus_plus_by_hand(toy):
    # to go: row 0: 1 - 0.05 - 0.025 = 0.925, then 0.975; row 1: 0.02 - 0.01 = 0.01, then -0.01
    # mean 1.9 / 4 = 0.475; deviations 0.45 0.5 -0.465 -0.485: squares 0.2025 0.25 0.216225 0.235225, sum 0.90395, std sqrt(0.2259875)
    rows = chosen([toy.group([1.0, 0.0], **FORCED_PAIR)], objective("batch")).rows
    how = Objective.load({"kind": "reinforce++", "kl": {"coef": 0.1}})
    found = credit(rows, how, [RowStreams(kl_T=kl) for kl in KL])
    std = 0.2259875**0.5
    assert found[0] == pytest.approx([0.45 / std, 0.0, 0.5 / std], abs=1e-6)
    assert found[1] == pytest.approx([-0.465 / std, -0.485 / std], abs=1e-6)


def test_reinforce_alone_is_the_reward_of_the_response(toy):
    rows = chosen([toy.group([1.0, 0.25], **FORCED_PAIR)], objective("none")).rows
    assert credit(rows, objective("none")) == [[1.0, 0.0, 1.0], [0.25, 0.25]]


def test_normalisation_after_the_mean_of_the_group(toy):
    # group means 0.5 and 3: what is left is 0.5 -0.5 2 -2 with two tokens each; mean 0, mean square (0.25 + 4) / 2 = 2.125
    rows = chosen([toy.group([1.0, 0.0]), toy.group([5.0, 1.0])], objective()).rows
    found = credit(rows, objective({"kind": "batch", "within": "group"}))
    assert [values[0] for values in found] == pytest.approx([x / 2.125**0.5 for x in (0.5, -0.5, 2.0, -2.0)], abs=1e-6)
    # without it: rewards 1 0 5 1 have mean 1.75 and mean square 27 / 4, variance 6.75 - 3.0625 = 3.6875
    plain = credit(rows, objective("batch"))
    assert [values[0] for values in plain] == pytest.approx([x / 3.6875**0.5 for x in (-0.75, -1.75, 3.25, -0.75)], abs=1e-6)


# --- normalisation over ranks ------------------------------------------------------------------------------------------------------------


class Meeting:
    """Two ranks in one process: the first pass notes what each would send, the second answers with both."""

    def __init__(self) -> None:
        self.sent: list[Moments] = []

    def note(self, moments: Moments) -> list[Moments]:
        self.sent.append(moments)
        return [moments]

    def answer(self, moments: Moments) -> list[Moments]:
        assert moments in self.sent
        return self.sent


@pytest.mark.parametrize("how", ["batch", {"kind": "batch", "within": "group"}, {"kind": "critic", "whiten": True}], ids=str)
def test_two_ranks_normalise_like_one(toy, how):
    # long rows on one rank, short ones on the other: means and spreads of the ranks differ
    groups = [toy.group([1.0, 0.0], ids=[(20,) * 7, (21,) * 5]), toy.group([6.0, 1.0], ids=[(22,), (23, 2)])]
    rows = chosen(groups, objective(how)).rows
    streams = [RowStreams(values_T=np.linspace(0.1, 0.9, len(row.sample.tokens))) for row in rows]
    whole = credit(rows, objective(how), streams)
    meeting = Meeting()
    for part in (slice(0, 2), slice(2, 4)):
        credit(rows[part], objective(how), streams[part], meeting.note)
    assert meeting.sent[0].mean != pytest.approx(meeting.sent[1].mean)
    apart = [values for part in (slice(0, 2), slice(2, 4)) for values in credit(rows[part], objective(how), streams[part], meeting.answer)]
    assert apart == [pytest.approx(values, abs=1e-12) for values in whole]
    flat = np.concatenate(whole)
    assert flat.mean() == pytest.approx(0.0, abs=1e-9)
    assert flat.std() == pytest.approx(1.0, abs=1e-6)


def test_a_rank_without_rows_still_answers():
    meeting = Meeting()
    assert assign([], [], objective("batch"), meeting.note) == ([], [])
    assert meeting.sent == [Moments()]


# --- teacher, streams that are missing ------------------------------------------------------------------------------


def test_a_teacher_needs_no_score(toy):
    how = objective({"kind": "teacher", "clip": 2.0})
    found = chosen([toy.group([None, 0.0], **FORCED_PAIR)], how)
    assert (len(found.rows), sum(found.left.values())) == (2, 0)
    lead = [RowStreams(teacher_T=np.array([-5.0, np.nan, 0.5])), RowStreams(teacher_T=np.array([3.0, 0.0]))]
    assert credit(found.rows, how, lead) == [[-2.0, 0.0, 0.5], [2.0, 0.0]]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"advantage": "teacher"}, "a teacher"),
        ({"advantage": "critic"}, "a critic"),
        ({"advantage": "leave_one_out", "kl": IN_REWARD}, "a reference"),
        ({"advantage": "critic", "kl": IN_REWARD}, "a reference"),
        ({"advantage": "batch", "kl": IN_REWARD}, "a reference"),
    ],
)
def test_a_stream_that_was_not_scored_is_named(toy, how, what):
    rows = chosen([toy.group([1.0, 0.0])], objective()).rows
    with pytest.raises(ValueError, match=f"this objective needs {what}, and the loop scored none"):
        credit(rows, Objective.load({"kl": NO_KL, **how}))


def test_only_a_critic_gives_returns(toy):
    rows = chosen([toy.group([1.0, 0.0])], objective()).rows
    assert assign(rows, [RowStreams()] * 2, objective(), alone)[1] == []
    returns = assign(rows, [RowStreams(values_T=np.zeros(2))] * 2, objective("critic"), alone)[1]
    assert [values.tolist() for values in returns] == [[1.0, 1.0], [0.0, 0.0]]
