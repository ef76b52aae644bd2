"""Off-target tasks before and after: each verdict, Holm over all of them, and modes that disagree in sign."""

import pytest
from eval_records import values

from posttrain.core.errors import EvidenceError
from posttrain.core.sampling import Sampling
from posttrain.evals.retention import retention_report

GREEDY = Sampling(temperature=0.0, max_tokens=9)


def pair(gained: int, lost: int, n: int = 400, task: str = "chat", **changed):
    """Before and after on `n` items."""
    stated = {"dataset": task, "suite": f"{task}.mode"} | changed
    before = [[0]] * gained + [[1]] * (n - gained)
    after = [[1]] * gained + [[0]] * lost + [[1]] * (n - gained - lost)
    return values(before, "before", **stated), values(after, "after", **stated)


@pytest.mark.parametrize(
    ("gained", "lost", "n", "verdict"),
    [
        (0, 0, 400, "kept"),
        (10, 11, 400, "kept"),  # -.0025 +- .022: a loss of 5 points is excluded
        (0, 40, 400, "lost"),
        (40, 0, 400, "gained"),
        (3, 5, 40, "unclear"),  # -.05 +- .14
        (0, 0, 8, "unclear"),  # nothing moved, but 8 items exclude little
    ],
)
def test_verdicts(gained, lost, n, verdict):
    report = retention_report([pair(gained, lost, n)])
    assert [one.verdict for one in report.kept] == [verdict]
    assert len(report.lost) == (verdict == "lost")


def test_the_margin_decides_what_is_kept():
    assert retention_report([pair(10, 11)], margin=0.01).kept[0].verdict == "unclear"
    with pytest.raises(EvidenceError, match="margin of 0 "):
        retention_report([pair(1, 1)], margin=0)


def test_one_of_many_suites_moves_by_chance():
    # 9 lost, 1 gained: p = 2 * 11 / 1024 = .0215; among four it is .086
    alone = retention_report([pair(1, 9)])
    assert alone.kept[0].verdict == "lost"
    among = retention_report([pair(1, 9), *(pair(3, 3, task=f"other{i}") for i in range(3))])
    assert among.kept[0].row.adjusted == pytest.approx(4 * 22 / 1024)
    assert among.kept[0].verdict == "kept"  # -.02 +- .016


def test_the_same_weights_keep_everything():
    a, _ = pair(1, 1)
    assert retention_report([(a, a)]).kept[0].verdict == "kept"


def test_modes_that_disagree_in_sign_are_named():
    greedy = pair(40, 0, suite="chat.greedy", sampling=GREEDY)
    sampled = pair(0, 40, suite="chat.sampled")
    other = pair(0, 40, task="sums", suite="sums.sampled")
    report = retention_report([greedy, sampled, other])
    (flip,) = report.flips
    assert (flip.dataset, flip.mode_a, flip.mode_b, flip.resolved) == ("chat", "greedy", "sampled", True)
    assert (flip.delta_a, flip.delta_b) == (pytest.approx(0.1), pytest.approx(-0.1))
    weak = retention_report([pair(2, 1, suite="chat.greedy", sampling=GREEDY), pair(1, 2, suite="chat.sampled")])
    assert [one.resolved for one in weak.flips] == [False]


def test_thinking_is_a_mode_of_its_own():
    report = retention_report([pair(40, 0, suite="chat.on", thinking="on"), pair(0, 40, suite="chat.off", thinking="off")])
    assert [(one.mode_a, one.mode_b) for one in report.flips] == [("sampled, thinking on", "sampled, thinking off")]
