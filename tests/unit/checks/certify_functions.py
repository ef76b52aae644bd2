"""Functions as a user would write them: good ones, and ones with a known fault and the law that has to catch it."""

from __future__ import annotations

from dataclasses import dataclass

HEAD = "import math\nimport statistics\nimport torch\n"


@dataclass(frozen=True)
class Case:
    """A file's text, the laws that must fail (none for a good one), and text that must be in a failing detail."""

    name: str
    source: str
    laws: tuple[str, ...] = ()
    text: str = ""


def objective(returned: str, *before: str) -> str:
    """A loss with `rho`, `delta` and `a` at hand, 0 where untrained."""
    lines = (
        "delta = torch.where(streams.mask_BT, streams.logp_BT - streams.old_BT, 0.0)",
        "a = torch.where(streams.mask_BT, streams.advantage_BT, 0.0)",
        *before,
        "rho = delta.exp()",
        f"return {returned}",
    )
    return "def loss(streams):\n" + "".join(f"    {line}\n" for line in lines)


def advantage(returned: str) -> str:
    """An estimator with the scored rewards and their mean at hand."""
    lines = (
        "scored = [r for r in rewards if r is not None]",
        "mean = sum(scored) / max(len(scored), 1)",
        f"return {returned}",
    )
    return "def advantage(rewards):\n" + "".join(f"    {line}\n" for line in lines)


def term(returned: str, name: str = "term") -> str:
    """A KL term with `x` at hand, 0 where untrained."""
    return f"def {name}(logp, reference, mask):\n    x = torch.where(mask, logp - reference, 0.0)\n    return {returned}\n"


def total(returned: str) -> str:
    """An aggregation with `clean` values at hand, 0 where untrained."""
    return f"def total(values, mask, denominator):\n    clean = torch.where(mask, values, 0.0)\n    return {returned}\n"


MINIMUM = "-torch.minimum(rho * a, rho.clamp(0.8, 1.2) * a)"
CLIP = objective(MINIMUM)
CLIP_COEFFICIENT = """
def loss_coefficient(log_ratio, advantage):
    rho = math.exp(log_ratio)
    if (advantage > 0 and rho > 1.2) or (advantage < 0 and rho < 0.8):
        return 0.0
    return rho * advantage
"""
PLAIN_MEAN = "[0.0 if r is None else r - mean for r in rewards]"
MEAN_STD = advantage("[0.0 if r is None or len(set(scored)) == 1 else (r - mean) / statistics.pstdev(scored) for r in rewards]")
MEAN_STD_WEIGHT = """
def advantage_weight(p, size):
    total = 0.0
    for j in range(1, size):  # j of `size` succeed: a success counts (1 - q) / sqrt(q (1 - q)), a failure q / sqrt(q (1 - q))
        q = j / size
        above = math.comb(size - 1, j - 1) * p ** (j - 1) * (1 - p) ** (size - j)
        below = math.comb(size - 1, j) * p**j * (1 - p) ** (size - 1 - j)
        total += (above * (1 - q) + below * q) / math.sqrt(q * (1 - q))
    return total
"""
REVERSE = "_descends = 'KL(policy || reference)'\n"
K3 = "torch.expm1(-x) + x"
LOGP = "torch.where(streams.mask_BT, streams.logp_BT, 0.0)"

GOOD = (
    Case("reinforce", objective(f"-{LOGP} * a")),
    Case("clip with its coefficient", CLIP + CLIP_COEFFICIENT),
    Case(
        "clip and k3 to the reference",
        objective(f"{MINIMUM} + {K3}", "x = torch.where(streams.mask_BT, streams.logp_BT - streams.reference_BT, 0.0)"),
    ),
    Case("mean", advantage(PLAIN_MEAN)),
    Case("mean_std with its weight", MEAN_STD + MEAN_STD_WEIGHT),
    Case("k2", term("x * x / 2") + "term" + REVERSE),
    Case("k3, named", term(K3)),
    Case("sum over the denominator", total("clean.sum() / denominator")),
)

BAD = (
    # objectives
    Case(
        "a mean instead of a value per token", objective("-(rho * a)[streams.mask_BT].mean()"), ("partition", "oracle"), "returns shape ()"
    ),
    Case("one value per row", objective("-(rho * a).sum(-1)"), ("partition",), "one unreduced value per token"),
    Case("no tensor", objective("0.0"), ("partition",), "returns float"),
    Case(
        "masked after exp",
        "def loss(streams):\n    return -(streams.logp_BT - streams.old_BT).exp() * streams.advantage_BT * streams.mask_BT",
        ("mask",),
        "in untrained slots",
    ),
    Case(
        "masked after the product: right value, NaN gradient",
        "def loss(streams):\n    return -torch.where(streams.mask_BT, streams.logp_BT * streams.advantage_BT, 0.0)",
        ("mask",),
        "a gradient in untrained slots",
    ),
    Case("padding in a mean", objective("-rho * a + 0.0 * streams.advantage_BT.mean()"), ("mask",)),
    Case("sign flipped", objective(MINIMUM.removeprefix("-")), ("oracle",), "cosine -1"),
    Case("twice the gradient", objective(f"2 * {MINIMUM}"), ("oracle",), "length 2 of the policy gradient"),
    Case(
        "clipped on the wrong side",
        objective(MINIMUM.replace("minimum", "maximum")) + CLIP_COEFFICIENT,
        ("oracle",),
        "the companion's coefficient",
    ),
    Case("not clipped at all", objective("-rho * a") + CLIP_COEFFICIENT, ("oracle",), "the companion's coefficient"),
    Case(
        "advantage centred in the batch",
        objective(MINIMUM, "a = a - a[streams.mask_BT].mean()"),
        ("partition", "permutation"),
        "alone and among",
    ),
    Case("ratio without gradient", objective("-rho.detach() * a"), ("partition", "oracle", "conservation"), "has no gradient"),
    Case(
        "edits its input",
        objective(f"-{LOGP} * streams.advantage_BT", "streams.advantage_BT[~streams.mask_BT] = 0.0"),
        ("mask",),
        "changes its input advantage_BT in place",
    ),
    Case(
        "edits logp",
        objective("-streams.logp_BT * a", "streams.logp_BT[~streams.mask_BT] = 0.0"),
        ("oracle",),
        "changes its input logp_BT in place",
    ),
    Case("float32 out", objective(f"({MINIMUM}).float()"), ("oracle",), "torch.float32"),
    Case("float32 inside", objective(f"{MINIMUM}.float().double() * 1.0"), ("oracle",), "length 1 of"),
    Case(
        "raises", objective("rho", "raise KeyError('no such\\nstream', 3)"), ("partition", "mask", "oracle"), "raises KeyError: ('no such"
    ),
    Case("raises over lines", objective("rho", "raise ValueError('first\\n  second')"), ("mask",), "raises ValueError: first second"),
    Case("a term that is no policy gradient", objective(f"-rho * a + {LOGP}.exp()"), ("oracle",), "cosine"),
    Case(
        "divides by its own length",
        objective("-rho * a / streams.mask_BT.sum(-1, keepdim=True).clamp(min=1)"),
        ("oracle",),
        "sequences of up to 3 tokens",
    ),
    Case("silences negative advantages", objective("-rho * a.clamp(min=0.0)"), ("oracle", "conservation"), "without gradient"),
    # advantages
    Case("unscored counts as 0", advantage("[(r or 0.0) - sum(scored) / len(rewards) for r in rewards]"), ("mask",), "unscored sibling"),
    Case(
        "sample deviation where the population's is documented",
        MEAN_STD.replace("pstdev", "stdev") + MEAN_STD_WEIGHT,
        ("oracle",),
        "documented w(p)",
    ),
    Case("undocumented bias", MEAN_STD, ("oracle",), "document it as advantage_weight(p, size)"),
    Case(
        "first sibling as baseline",
        advantage("[0.0 if r is None else r - scored[0] for r in rewards]"),
        ("permutation",),
        "in the order",
    ),
    Case(
        "the mean of the group before",
        "seen = [0.0, 0.0]\n" + advantage("seen.append(mean) or " + PLAIN_MEAN.replace("mean", "seen[-2]")),
        ("partition",),
        "after other groups",
    ),
    Case("sorts its input", advantage("rewards.sort(key=lambda r: r or 0.0) or [0.0 for r in rewards]"), ("permutation",), "in place"),
    Case("drops the unscored", advantage("[r - mean for r in scored]"), ("mask",), "returns 3 advantages for 4 siblings"),
    Case("no signal", advantage("[0.0 for r in rewards]"), ("oracle",), "cosine 0.0000"),
    Case("unequal for equal rewards", advantage(PLAIN_MEAN + "[:1] + [0.0 for r in rewards[1:]]"), ("permutation", "conservation")),
    # KL estimators
    Case("k3 called k1", term(K3, "k1") + "k1" + REVERSE, ("oracle",), "it descends KL(reference || policy)"),
    Case("k1 as a loss", term("x", "k1"), ("oracle",), "expected gradient is zero"),
    Case("absolute difference", term("x.abs()"), ("oracle",), "no divergence"),
    Case("clamped k3", term(f"({K3}).clamp(max=0.05)"), ("oracle",), "no divergence"),
    Case("masked too late", f"def term(logp, reference, mask):\n    x = logp - reference\n    return ({K3}) * mask", ("mask",), "leaks"),
    Case("an offset", term("x * x / 2 + 1e-6"), ("conservation",), "where policy and reference agree"),
    Case("summed", term("(x * x / 2).sum()"), ("partition", "oracle"), "one value per token"),
    # aggregations
    Case("divides by its own mask", total("clean.sum() / mask.sum().clamp(min=1)"), ("partition", "oracle")),
    Case("mean of row means", total("(clean.sum(-1) / mask.sum(-1).clamp(min=1)).mean()"), ("partition",), "splits"),
    Case("sums padding", total("(values * mask).sum() / denominator"), ("mask",), "leaks"),
    Case("weighs by value", total("(clean.abs() * clean).sum() / denominator"), ("oracle",), "weights do not depend"),
    Case("stays a table", total("clean / denominator"), ("partition",), "a single number"),
    Case("forgets a column", total("clean[:, 1:].sum() / denominator"), ("conservation",), "all count"),
    Case("edits the mask", total("(clean * mask.logical_not_().logical_not()).sum() / denominator"), ("partition",), "input mask in place"),
)
