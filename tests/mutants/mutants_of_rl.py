"""Known bugs in the reinforcement-learning loop: rows and their credit, the optimizer steps of a phase, what surrounds them."""

from __future__ import annotations

from planting import Mutant, mutant

CREDIT = "tests/unit/rollout/test_credit_rows.py"
STEP = "tests/unit/loops/test_policy_step.py"
LAW = "tests/properties/test_partition_law.py"

RL_MUTANTS: tuple[Mutant, ...] = (
    # --- rows and credit ---------------------------------------------------------------------------------------------------------------
    mutant("pivot-kept", "rollout/credit.py", "elif index == middle:", "elif index is middle is None:", CREDIT),
    mutant(
        "cut-off-rollouts-kept",
        "rollout/credit.py",
        "None if drop and rollout.trajectory.truncated else rollout.score.value",
        "rollout.score.value",
        CREDIT,
    ),
    mutant(
        "kl-of-the-response-paid",
        "rollout/credit.py",
        "rows[i].reward - (coef * float(",
        "rows[i].reward + (coef * float(",
        CREDIT,
    ),
    mutant(
        "forced-tokens-credited",
        "rollout/credit.py",
        "found[i] = np.where(rows[i].trained_T, value, 0.0)",
        "found[i] = np.full(len(rows[i].trained_T), value)",
        CREDIT,
    ),
    mutant("spread-of-the-batch-per-rank", "rollout/credit.py", "total = sum(gather(moments), Moments())", "total = moments", CREDIT, LAW),
    mutant(
        "groups-by-place-of-birth",
        "rollout/credit.py",
        'rows.append(_row(rollout, f"{place}", objective, budget, sentence_of))',
        "rows.append(_row(rollout, group.task.id, objective, budget, sentence_of))",
        CREDIT,
    ),
    mutant(
        "repetition-rewarded",
        "rollout/credit.py",
        "values_T + np.array(repetition_penalty",
        "values_T - np.array(repetition_penalty",
        CREDIT,
    ),
    mutant("channel-weights-ignored", "rollout/credit.py", "how.weights.get(name, 1.0)", "1.0", CREDIT),
    mutant(
        "penalty-makes-a-signal",
        "rollout/credit.py",
        "        if not carries_signal(group, objective):\n",
        "        if not carries_signal(group, objective) and not isinstance(objective.overlong, Ramp):\n",
        CREDIT,
    ),
    mutant(
        "sentence-begins-with-the-full-stop",
        "rollout/sentences.py",
        "        index.append(current)\n        current += token in ends\n",
        "        current += token in ends\n        index.append(current)\n",
        "tests/unit/rollout/test_sentences.py",
    ),
    mutant(
        "prompt-tokens-of-the-micro-batch",
        "rollout/pack.py",
        "[totals[samples[i].group] for i in order]",
        "[_prompt_tokens([samples[j] for j in order])[samples[i].group] for i in order]",
        f"{STEP}::test_prompt_tokens_count_siblings_that_lie_elsewhere",
        f"{LAW}::test_policy_gradient",
    ),
    # --- the optimizer steps of a phase ------------------------------------------------------------------------------------------------
    mutant(
        "denominator-of-one-rank",
        "loops/policy_step.py",
        "lengths = [row.sample.tokens.trained for row in chosen.rows]",
        "lengths = [row.sample.tokens.trained for row in chosen.rows][trainer.ranks.rank :: trainer.ranks.size]",
        f"{LAW}::test_a_whole_phase",
    ),
    mutant(
        "constant-without-the-budget",
        "loops/policy_step.py",
        "constant = float(len(lengths) * trainer.sampling.max_tokens)",
        "constant = float(len(lengths))",
        f"{STEP}::test_dr_grpo_divides_by_rows_times_budget",
    ),
    mutant(
        "policy-and-reference-swapped",
        "loops/policy_step.py",
        "batch.old_BT.double() - batch.reference_BT.double()",
        "batch.reference_BT.double() - batch.old_BT.double()",
        f"{STEP}::test_kl_in_the_reward_is_the_log_ratio_of_policy_and_reference",
    ),
    mutant(
        "student-and-teacher-swapped",
        "loops/policy_step.py",
        "batch.teacher_BT.double() - batch.old_BT.double()",
        "batch.old_BT.double() - batch.teacher_BT.double()",
        f"{STEP}::test_a_teacher_pays_the_difference_of_log_probabilities",
    ),
    mutant(
        "gate-of-the-rank",
        "loops/policy_step.py",
        "tokens = sorted(entry for part in trainer.ranks.gather(mine) for entry in part)",
        "tokens = sorted([entry for part in trainer.ranks.gather(mine) for entry in part if part == mine])",
        f"{STEP}::test_the_gate_does_not_depend_on_packing_or_ranks",
    ),
    mutant(
        "gate-by-place-in-the-pack",
        "loops/policy_step.py",
        "(batch.row_B[b], t, float(scores.logp_BT[b, t])",
        "(b, t, float(scores.logp_BT[b, t])",
        STEP,
    ),
    mutant(
        "clipped-tokens-offered-to-the-gate",
        "loops/policy_step.py",
        "left_out = int(fate_BT[b, t]) != Fate.TRAINED",
        "left_out = int(fate_BT[b, t]) == Fate.UNTRAINED",
        STEP,
    ),
    mutant("same-gate-at-every-update", "loops/policy_step.py", "derive(plan.seed, epoch, place)", "plan.seed", STEP),
    mutant(
        "policy-trained-while-the-critic-warms-up",
        "loops/policy_step.py",
        "            if plan.train_policy:\n",
        "            if parts:\n",
        STEP,
    ),
    mutant(
        "reference-top-ids-unscored",
        "loops/policy_step.py",
        "entropy_gradient=objective.entropy.used, at_NK=at_NK)",
        "entropy_gradient=objective.entropy.used)",
        STEP,
    ),
    mutant(
        "entropy-never-with-gradient",
        "loops/policy_step.py",
        "entropy_gradient=objective.entropy.used, at_NK=at_NK)",
        "at_NK=at_NK)",
        STEP,
    ),
    mutant(
        "returns-are-advantages",
        "loops/policy_step.py",
        "replace(filled, returns_BT=_padded([returns[i] for i in batch.sample_B], batch))",
        "replace(filled, returns_BT=filled.advantage_BT)",
        STEP,
    ),
    mutant(
        "critic-without-clip",
        "loops/policy_step.py",
        "critic_loss(part.tokens, plan.value_clip)",
        "critic_loss(part.tokens, None)",
        "tests/unit/loops/test_rl_ppo.py",
    ),
    mutant(
        "values-scaled-like-logits",
        "engine/values.py",
        "critic.value(hidden_states(critic.trunk, there))",
        "critic.value(hidden_states(critic.trunk, there)) / 0.7",
        "tests/unit/engine/test_values.py",
    ),
    # --- the loop and its alarms -------------------------------------------------------------------------------------------------------
    mutant(
        "steered-numbers-never-used",
        "loops/rl.py",
        'now = current(objective, stage.state.get("steered", {}))',
        "now = current(objective, {})",
        "tests/unit/loops/test_rl_loop.py::test_steered_numbers_reach_the_update_and_are_recorded",
    ),
    mutant(
        "critic-not-restored",
        "loops/session.py",
        "checkpoint.restore(self.trainer, self.others)",
        "checkpoint.restore(self.trainer, {})",
        "tests/unit/loops/test_session.py",
    ),
    mutant(
        "effective-size-as-a-mean",
        "core/metrics.py",
        "return self.total**2 / (self.n * self.squares)",
        "return self.total**2 / self.squares",
        "tests/unit/core/test_core_values.py",
    ),
)
