"""Known bugs between trainer and sampler: weights that do not arrive, proofs that prove nothing, candidates that are not replayed."""

from __future__ import annotations

from planting import mutant

ENGINE = "tests/unit/engine"
OBJECTIVES = "tests/unit/objectives"
ROLLOUT = "tests/unit/rollout"
DELIVERY, FAULTS, WEIGHTS = f"{ENGINE}/test_delivery.py", f"{ENGINE}/test_delivery_faults.py", f"{ENGINE}/test_weights.py"
COPY, CANDIDATES, SCORED = f"{ENGINE}/test_copy_sampler.py", f"{OBJECTIVES}/test_candidates.py", f"{ENGINE}/test_scoring_candidates.py"
SENDER, RECEIVER, IDENTITY = "engine/delivery.py", "engine/copy_sampler.py", "engine/weights.py"

DELIVERY_MUTANTS = (
    mutant(
        "one-tensor-is-not-sent", SENDER, "if self._past.held.get(name) != found)", 'if self._past.held.get(name, "") > found)', DELIVERY
    ),
    mutant("digests-not-compared", SENDER, "self._compare(expected, found, past.held, version)", "pass", FAULTS),
    mutant("missing-digests-prove", SENDER, "if self.canary is None and absent:", "if False:", FAULTS),
    mutant("canary-compared-with-itself", SENDER, "list(receiver.logps(*self.canary))", "model_logps(self.model, *self.canary)", FAULTS),
    mutant("canary-may-stand-still", SENDER, "if not theirs > self.limits.noise:", "if False:", FAULTS),
    mutant("small-moves-are-forgotten", SENDER, "            return since\n", "            return said\n", FAULTS),
    mutant("canary-may-move-alone", SENDER, "            if unchanged:\n", "            if False:\n", FAULTS),
    mutant(
        "nan-agrees",
        SENDER,
        'if not gap <= self.limits.agree:\n            raise NotDelivered(\n                f"version {version} did not arrive',
        'if gap > self.limits.agree:\n            raise NotDelivered(\n                f"version {version} did not arrive',
        FAULTS,
    ),
    mutant("generation-not-proven", SENDER, "drawn_gap = self._draw(version)\n", "drawn_gap = 0.0\n", FAULTS),
    mutant("stamp-not-checked", SENDER, "check_versions([completion], version)", "pass", FAULTS),
    mutant("version-not-checked", SENDER, "if receiver.version != version:", "if False:", FAULTS),
    mutant(
        "failure-counts-as-delivered", SENDER, "past, self._past, self.last = self._past, _Past({}), None", "past = self._past", DELIVERY
    ),
    mutant(
        "drawing-before-delivery",
        SENDER,
        "        if self.last is None:\n            raise",
        "        if False:\n            raise",
        DELIVERY,
    ),
    mutant("newer-versions-pass", SENDER, "or max(by) > expected:", "or False:", DELIVERY),
    mutant("dropout-in-the-canary", SENDER, "        module.training = False\n", "        pass\n", DELIVERY),
    mutant(
        "digest-of-names-only",
        IDENTITY,
        'hasher = hashlib.sha256(f"{tuple(tensor.shape)}{tensor.dtype}".encode())\n    hasher.update(_bytes(tensor))',
        'hasher = hashlib.sha256(f"{tuple(tensor.shape)}{tensor.dtype}".encode())',
        WEIGHTS,
    ),
    mutant("adapter-not-folded", IDENTITY, "            total += module.get_delta_weight(a)", "            total += 0", WEIGHTS),
    mutant("adapter-scale-missing", IDENTITY, "module.lora_B[a].weight * module.scaling[a]", "module.lora_B[a].weight * 1.0", WEIGHTS),
    mutant("untold-trainables", IDENTITY, "if parameter.requires_grad and name not in delivered:", "if False:", WEIGHTS),
    mutant("digest-of-other-memory", IDENTITY, "if known() is watched and before == state:", "if before == state:", WEIGHTS),
    mutant("digest-not-computed-again", IDENTITY, "if known() is watched and before == state:", "if known() is watched:", WEIGHTS, COPY),
    mutant(
        "adapters-added-twice",
        RECEIVER,
        "self._parameters[name].copy_(fold(base,",
        "self._parameters[name].copy_(fold(self._parameters[name],",
        COPY,
    ),
    mutant(
        "adapters-held-not-applied", RECEIVER, "self._parameters[name].copy_(fold(", "torch.zeros_like(base).copy_(fold(", COPY, DELIVERY
    ),
    mutant("old-adapters-stay", RECEIVER, "self._base, self._adapters = {}, {}  # a whole", "pass  # a whole", COPY),
    mutant("half-a-delivery", RECEIVER, "self.version = NOTHING  # half", "pass  # half", COPY),
    mutant("weights-change-while-drawing", RECEIVER, "with self._lock, torch.no_grad():", "with torch.no_grad():", COPY),
    mutant("candidates-not-replayed", "engine/scoring.py", "Replay(sampling, batch.candidate_M2)", "Replay(sampling, None)", SCORED),
    mutant(
        "gradient-outside-the-set", "objectives/kernel.py", "x_NC.masked_fill_(cut.excludes(x_NC, start), -torch.inf)", "pass", CANDIDATES
    ),
    mutant(
        "candidates-of-another-slice",
        "objectives/kernel.py",
        "candidate_M2.new_tensor([part.start, 0])",
        "candidate_M2.new_tensor([0, 0])",
        CANDIDATES,
    ),
    mutant(
        "candidates-shift",
        "rollout/pack.py",
        "np.repeat(np.arange(len(kept)), sizes)",
        "np.repeat(np.arange(len(kept))[::-1], sizes)",
        f"{ROLLOUT}/test_pack.py",
    ),
    mutant("candidates-lost", "rollout/credit.py", "        candidates=trajectory.candidates,\n", "", f"{ROLLOUT}/test_credit_rows.py"),
    mutant(
        "min-p-of-the-rest",
        "objectives/logprobs.py",
        "sorted_NV[:, :1] + math.log(sampling.min_p)",
        "sampling.min_p",
        f"{OBJECTIVES}/test_logprobs.py",
    ),
)
