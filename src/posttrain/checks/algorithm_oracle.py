"""The oracle law for a whole named algorithm: rewards to advantages to losses to the aggregated gradient, over every possible group."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from posttrain.checks.advantage_laws import estimator
from posttrain.checks.advantage_laws import target as advantage_target
from posttrain.checks.advantage_truth import reward_gradient, success_weight
from posttrain.checks.findings import Finding, distance, measured
from posttrain.checks.objective_oracle import climbs
from posttrain.checks.tabular import derivative, divergence_gradient, softmax, world
from posttrain.objectives.aggregate import aggregate
from posttrain.objectives.axes import Advantage, Channels, Critic, MeanStd, PassAtK, Teacher
from posttrain.objectives.kl import DESCENDS
from posttrain.objectives.objective import Objective
from posttrain.objectives.policy import policy_terms
from posttrain.objectives.streams import Streams

SUCCESSES_V = (1.0, 0.0, 0.0)


def group_law(setting: Objective) -> list[Finding]:
    """One-token answers with rewards 0 or 1, every group of siblings: the expected gradient is -w(p) grad p plus the KL term's.

    Nothing for advantages per token, which are certified as members of their own axis.
    """
    how = setting.advantage
    if isinstance(how, (Critic, Teacher)):
        return []
    size = how.k + 1 if isinstance(how, PassAtK) else 3
    on = world(len(SUCCESSES_V), 1).on_policy()
    p_V = softmax(on.logits_SV)[0]
    p = float(p_V @ np.array(SUCCESSES_V))
    truth_V = -_weight(how, size, p) * reward_gradient(SUCCESSES_V, on.logits_SV[0])
    if setting.kl.used and setting.kl.placement == "loss":
        named = DESCENDS["loss", setting.kl.estimator].partition(" of ")[0]
        truth_V = truth_V + setting.kl.coef * divergence_gradient(on.logits_SV, on.reference_SV, np.ones(1), named)[0]
    if setting.entropy.used:
        truth_V = truth_V + setting.entropy.coef * derivative(lambda z: (softmax(z) * np.log(softmax(z))).sum(), on.logits_SV[0])
    gap = distance(_expected_gradient(setting, size, on.logits_SV[0], on.reference_SV[0]), truth_V)
    return [measured("oracle", gap, f"groups of {size} scored 0 or 1, rewards to gradient: w(p) grad p of advantage={how.kind}")]


def _weight(how: Advantage, size: int, p: float) -> float:
    single = MeanStd(ddof=how.ddof) if isinstance(how, Channels) else how
    weight = success_weight(single, size, p)
    if weight is None:
        raise ValueError(f"advantage={how.kind} has no weight of grad p")
    return weight


def _expected_gradient(setting: Objective, size: int, logits_V: np.ndarray, reference_V: np.ndarray) -> np.ndarray:
    """All groups as one batch; the loss of each row weighs the probability of its group."""
    call, p_V = estimator(setting.kind, setting.advantage).call, softmax(logits_V)
    groups = list(product(range(len(p_V)), repeat=size))
    known = {successes: call(list(successes)) for successes in product((0.0, 1.0), repeat=size)}
    advantages = [known[tuple(SUCCESSES_V[answer] for answer in answers)] for answers in groups]
    chance_B = np.repeat([np.prod(p_V[list(answers)]) for answers in groups], size)
    token_B = torch.tensor(groups).flatten()
    logits = torch.tensor(logits_V, requires_grad=True)
    logp_BT = logits.log_softmax(-1)[token_B, None]
    reference = torch.tensor(np.log(softmax(reference_V)))
    streams = Streams(
        logp_BT=logp_BT,
        old_BT=logp_BT.detach(),
        behaviour_BT=logp_BT.detach(),
        advantage_BT=torch.tensor(advantages, dtype=torch.float64).view(-1, 1),
        mask_BT=torch.ones_like(logp_BT, dtype=torch.bool),
        reference_BT=reference[token_B, None],
        entropy_BT=-(logits.softmax(-1) * logits.log_softmax(-1)).sum().expand_as(logp_BT),
        divergence_BT=(logits.softmax(-1) * (logits.log_softmax(-1) - reference)).sum().expand_as(logp_BT),
        sentence_BT=torch.zeros_like(logp_BT, dtype=torch.long),
    )
    loss_BT = policy_terms(streams, setting).loss_BT * torch.tensor(chance_B)[:, None]
    per_group = 1.0 if setting.aggregation == "prompt_mean" else float(size)
    prompt_B = torch.full((len(token_B),), float(size), dtype=torch.float64)
    loss = aggregate(loss_BT, streams.mask_BT, setting.aggregation, per_group, prompt_B)
    return torch.autograd.grad(loss, logits)[0].numpy()


def target(setting: Objective) -> str:
    """What the algorithm climbs, in words: where its advantages point, how responses weigh, what holds it."""
    how = setting.advantage
    if isinstance(how, Critic):
        points = "E[R]" if how.lam == how.gamma == 1 else "E[R] if the critic is right, otherwise biased"
    elif isinstance(how, Teacher):
        points = "-KL(policy || teacher)"
    else:
        points = advantage_target(how)
    held = f"; reward less {setting.kl.coef:g} {DESCENDS['reward', 'k1']}" if setting.kl.used and setting.kl.placement == "reward" else ""
    return f"{climbs(setting)}; A of {how.kind}: {points}{held}"
