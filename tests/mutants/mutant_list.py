"""Known bugs, each as a change of the source text, with the tests that must notice."""

from __future__ import annotations

from mutants_of_delivery import DELIVERY_MUTANTS
from mutants_of_evidence import EVIDENCE_MUTANTS
from mutants_of_objectives import OBJECTIVE_MUTANTS
from mutants_of_resume import RESUME_MUTANTS
from mutants_of_rl import RL_MUTANTS
from planting import Mutant, mutant

OBJECTIVES = "tests/unit/objectives"
LOOPS = "tests/unit/loops"
ENGINE = "tests/unit/engine"
ROLLOUT = "tests/unit/rollout"


MUTANTS = (
    mutant(
        "mean-per-micro-batch",
        "objectives/aggregate.py",
        ".sum() / denominator",
        ".sum() / mask_BT.sum().clamp(min=1)",
        "tests/properties/test_partition_law.py::test_imitation",
    ),
    mutant(
        "mask-multiplied",
        "objectives/aggregate.py",
        "torch.where(mask_BT, values_BT, 0.0)",
        "(values_BT * mask_BT)",
        "tests/properties/test_mask_law.py",
    ),
    mutant(
        "mean-along-the-wrong-axis",
        "objectives/aggregate.py",
        "mask_BT.sum(-1, keepdim=True)",
        "mask_BT.sum(0, keepdim=True)",
        f"{OBJECTIVES}/test_aggregate.py",
    ),
    mutant(
        "clip-on-the-wrong-side",
        "objectives/limits.py",
        "torch.minimum(free_BT, bounded_BT)",
        "torch.maximum(free_BT, bounded_BT)",
        f"{OBJECTIVES}/test_limits.py",
    ),
    mutant(
        "clip-removed",
        "objectives/limits.py",
        "ratio_BT.clamp(1.0 - limit.low, 1.0 + limit.high) * advantage_BT",
        "ratio_BT * advantage_BT",
        f"{OBJECTIVES}/test_limits.py",
    ),
    mutant(
        "ratio-swapped",
        "objectives/ratios.py",
        "torch.where(mask_BT, logp_BT - base_BT.detach(), 0.0)",
        "torch.where(mask_BT, base_BT.detach() - logp_BT, 0.0)",
        f"{OBJECTIVES}/test_ratios.py",
    ),
    mutant(
        "mask-after-exp",
        "objectives/ratios.py",
        "torch.where(mask_BT, logp_BT - base_BT.detach(), 0.0)",
        "(logp_BT - base_BT.detach())",
        f"{OBJECTIVES}/test_ratios.py",
    ),
    mutant("k3-sign", "objectives/kl.py", "torch.expm1(-x_BT) + x_BT", "torch.expm1(x_BT) - x_BT", f"{OBJECTIVES}/test_kl.py"),
    mutant("k1-for-k2", "objectives/kl.py", "x_BT.square() / 2", "x_BT", f"{OBJECTIVES}/test_kl.py"),
    mutant("ddof", "objectives/advantages.py", ".std(ddof=ddof)", ".std(ddof=1)", f"{OBJECTIVES}/test_advantages.py"),
    mutant(
        "no-guard-for-equal-rewards",
        "objectives/advantages.py",
        "n < 2 or values[scored].max() == values[scored].min()",
        "n < 2",
        f"{OBJECTIVES}/test_advantages.py",
    ),
    mutant(
        "unscored-is-zero",
        "objectives/advantages.py",
        "[reward is not None for reward in rewards_G]",
        "[True for _ in rewards_G]",
        f"{OBJECTIVES}/test_advantages.py",
    ),
    mutant(
        "top-p-drops-the-crossing-token",
        "objectives/logprobs.py",
        "drop_NV[:, 1:] |= mass_NV[:, :-1] >= sampling.top_p",
        "drop_NV |= mass_NV >= sampling.top_p",
        f"{OBJECTIVES}/test_logprobs.py",
    ),
    mutant(
        "logprob-of-the-most-likely",
        "objectives/logprobs.py",
        "return ids_N, logp_NV.gather(-1, ids_N[:, None]).squeeze(-1)",
        "return ids_N, logp_NV.max(-1).values",
        f"{OBJECTIVES}/test_logprobs.py",
    ),
    mutant(
        "temperature-missing-in-score",
        "engine/scoring.py",
        "how = Replay(sampling, ",
        "how = Replay(Sampling(), ",
        f"{ENGINE}/test_scoring.py",
    ),
    mutant(
        "siblings-see-each-other",
        "engine/batch.py",
        "visible = (branch[:, None, :] == 0) | (branch[:, :, None] == branch[:, None, :])",
        "visible = torch.ones_like(same)",
        f"{ENGINE}/test_scoring.py",
    ),
    mutant(
        "documents-see-each-other",
        "engine/batch.py",
        "same = (document[:, :, None] == document[:, None, :]) & (document[:, :, None] >= 0)",
        "same = (document[:, :, None] >= 0) & (document[:, None, :] >= 0)",
        f"{ENGINE}/test_scoring.py",
    ),
    mutant(
        "first-token-off-by-one",
        "rollout/pack.py",
        "cue = r * width + at + len(prompt) - 1",
        "cue = r * width + at + max(0, len(prompt) - 2)",
        f"{ENGINE}/test_scoring.py",
    ),
    Mutant(
        "last-token-is-read",
        "rollout/pack.py",
        (
            ("read = samples[index].tokens.ids[:-1]", "read = samples[index].tokens.ids"),
            ("len(samples[index].tokens) - 1", "len(samples[index].tokens)"),
        ),
        (f"{ROLLOUT}/test_pack.py",),
    ),
    mutant(
        "group-without-signal-trained",
        "rollout/dynamic.py",
        "[group for group in groups if carries_signal(group)]",
        "groups",
        f"{ROLLOUT}/test_collect.py",
    ),
    mutant("truncated-mined", "rollout/samples.py", "r.trajectory.stop is StopReason.END and ", "", f"{ROLLOUT}/test_samples.py"),
    mutant(
        "closing-token-not-trained",
        "render/renderer.py",
        "[assistant] * closing + [Owner.TEMPLATE] * (len(piece) - closing)",
        "[Owner.TEMPLATE] * len(piece)",
        f"{ROLLOUT}/test_samples.py",
    ),
    mutant(
        "one-stream-for-all-requests",
        "engine/local.py",
        "uniforms(request.seed, before + room)",
        "uniforms(requests[0].seed, before + room)",
        f"{ENGINE}/test_local_sampler.py",
    ),
    mutant(
        "one-budget-for-all-requests",
        "engine/local.py",
        ">= self.room_N[live])",
        ">= self.room_N.max())",
        f"{ENGINE}/test_local_sampler.py",
    ),
    mutant(
        "optimizer-state-not-restored",
        "engine/trainer.py",
        'self.optimizer.load_state_dict(state["optimizer"])',
        "del state['optimizer']",
        f"{ENGINE}/test_trainer.py",
    ),
    mutant("schedule-off-by-one", "engine/trainer.py", "(total - 1 - rise)", "(total - rise)", f"{ENGINE}/test_trainer.py"),
    mutant("gradient-not-clipped", "engine/trainer.py", "if norm > self.optim.clip:", "if norm < 0:", f"{ENGINE}/test_trainer.py"),
    mutant("broken-gradient-applied", "engine/trainer.py", " or not math.isfinite(norm):", ":", f"{ENGINE}/test_trainer.py"),
    mutant("newest-checkpoint-only", "engine/checkpoint.py", "[:-keep]", "[:-1]", f"{ENGINE}/test_checkpoint.py"),
    mutant(
        "chosen-and-rejected-swapped",
        "loops/preference.py",
        "dpo_loss(logp_B[chosen], logp_B[rejected], ref_B[chosen], ref_B[rejected], beta)",
        "dpo_loss(logp_B[rejected], logp_B[chosen], ref_B[rejected], ref_B[chosen], beta)",
        f"{LOOPS}/test_dpo_loop.py",
    ),
    mutant(
        "reference-by-position",
        "loops/preference.py",
        "[reference[content_key(rows[i])] for i in batch.sample_B]",
        "list(reference.values())[: len(batch.sample_B)]",
        f"{LOOPS}/test_dpo_loop.py",
    ),
    mutant("input-model-trained", "loops/sft.py", "trained = copy.deepcopy(model)", "trained = model", f"{LOOPS}/test_sft_loop.py"),
    mutant("same-order-every-epoch", "loops/sft.py", '"order", epoch)', '"order", 0)', f"{LOOPS}/test_sft_loop.py"),
    mutant(
        "old-policy-is-the-current-one",
        "loops/policy_step.py",
        "if plan.updates > 1 or",
        "if plan.updates < 0 or",
        f"{LOOPS}/test_rl_loop.py::test_later_updates_of_a_phase_keep_the_old_policy",
    ),
    mutant(
        "kl-without-gradient",
        "objectives/policy.py",
        "kl_loss(clean.logp_BT, clean.reference_BT",
        "kl_loss(clean.logp_BT.detach(), clean.reference_BT",
        f"{LOOPS}/test_rl_loop.py::test_kl_alone_has_a_gradient_and_returns_to_the_reference",
    ),
    mutant(
        "loop-state-not-restored", "loops/session.py", "self.state = dict(checkpoint.state)", "self.state = {}", f"{LOOPS}/test_resume.py"
    ),
    mutant(
        "records-not-rewound",
        "loops/session.py",
        "self.session.run.rewind(checkpoint.position)",
        "self.session.run.position()",
        f"{LOOPS}/test_resume.py",
    ),
    *DELIVERY_MUTANTS,
    *OBJECTIVE_MUTANTS,
    *RESUME_MUTANTS,
    *EVIDENCE_MUTANTS,
    *RL_MUTANTS,
)
