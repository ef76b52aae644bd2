"""Known bugs of statistics, alarms and diagnosis."""

from __future__ import annotations

from planting import mutant

EVIDENCE_MUTANTS = (
    mutant(
        "exact-interval-off-by-one",
        "stats/intervals.py",
        "n - successes + 1, tail",
        "n - successes, tail",
        "tests/unit/stats/test_intervals.py",
    ),
    mutant(
        "bootstrap-without-bias",
        "stats/bootstrap.py",
        "self.bias + u / shrink",
        "u / shrink",
        "tests/unit/stats/test_bootstrap.py",
    ),
    mutant(
        "bootstrap-acceleration-sign",
        "stats/bootstrap.py",
        "shrink = 1 - self.acceleration * u",
        "shrink = 1 + self.acceleration * u",
        "tests/unit/stats/test_bootstrap.py",
    ),
    mutant(
        "paired-change-turned-round",
        "stats/paired.py",
        "finite_values(b_means) - finite_values(a_means)",
        "finite_values(a_means) - finite_values(b_means)",
        "tests/unit/stats/test_paired.py",
    ),
    mutant(
        "welch-pooled-freedom",
        "stats/two_sample.py",
        "(n_a - 1) + v_b**2 / (n_b - 1)",
        "n_a + v_b**2 / n_b",
        "tests/unit/stats/test_two_sample.py",
    ),
    mutant(
        "holm-not-monotone",
        "stats/multiple.py",
        "largest = max(largest, min(",
        "largest = max(0.0, min(",
        "tests/unit/stats/test_multiple.py",
    ),
    mutant(
        "holm-as-bonferroni",
        "stats/multiple.py",
        "len(p_values) - rank",
        "len(p_values)",
        "tests/unit/stats/test_multiple.py",
    ),
    mutant(
        "pass-hat-with-replacement",
        "stats/passk.py",
        "max(0, c - i) / (n - i)",
        "c / n",
        "tests/unit/stats/test_passk.py",
    ),
    mutant(
        "any-sigma-sizes-seeds",
        "stats/power.py",
        'sigma.kind != "seed_to_seed"',
        'sigma.kind == "within_eval"',
        "tests/unit/stats/test_power.py",
    ),
    mutant(
        "grade-without-interval",
        "stats/grade.py",
        "p_value < 0.05 and 0.0 not in interval",
        "p_value < 0.05",
        "tests/unit/stats/test_grade.py",
    ),
    mutant(
        "lag-turned-round",
        "stats/lag.py",
        "second[max(0, k) : n - max(0, -k)]",
        "second[max(0, -k) : n - max(0, k)]",
        "tests/unit/stats/test_lag.py",
    ),
    mutant(
        "against-ignored",
        "doctor/entries.py",
        "        found &= ~sign.holds(frame, start)\n",
        "        pass\n",
        "tests/unit/doctor/test_catalog.py",
    ),
    mutant(
        "alarm-at-every-row",
        "doctor/alarms.py",
        "if row - self._last.get(entry.id, -QUIET - 1) > QUIET:",
        "if row >= 0:",
        "tests/unit/doctor/test_alarms.py",
    ),
    mutant(
        "pause-goes-on",
        "loops/session.py",
        'if alarm.action in ("pause", "stop") and self._halt is None:',
        'if alarm.action == "stop" and self._halt is None:',
        "tests/unit/doctor/test_alarms.py",
    ),
    mutant(
        "resumed-watch-forgets",
        "loops/session.py",
        "self._watch_from(self.session.run.metrics(self.name))",
        "self._watch_from([])",
        "tests/unit/doctor/test_alarms.py",
    ),
    mutant(
        "unparseable-counts-as-wrong",
        "rollout/health.py",
        '        return "unanimous_unparseable"',
        '        return "all_wrong"',
        "tests/unit/rollout/test_health.py",
    ),
    mutant(
        "grader-failures-survive",
        "loops/rl_records.py",
        "rollout.score.status is not RewardStatus.ERROR and not",
        "not",
        "tests/unit/loops/test_rl_loop.py",
    ),
)
