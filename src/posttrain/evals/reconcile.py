"""Two records of one model that disagree: which condition may be why, and whether noise alone would do.

Both numbers stay visible. A ranking that holds within each of the two is supported; the absolute number is unresolved, and belongs into no
headline, until both are measured in equal conditions and agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from posttrain.core.errors import EvidenceError
from posttrain.evals.compare import change_between
from posttrain.evals.conditions import Difference, differences
from posttrain.evals.record import EvalRecord
from posttrain.stats.two_sample import welch

Verdict = Literal["equal", "explained", "sampling noise", "unresolved"]
NOISE = 0.05
"""From this p-value on, drawing other samples or items would explain the difference."""
_NO_CAUSE = frozenset({"suite", "seed", "samples_per_item"})
"""They choose the noise or how much there is of it, and shift nothing."""
_ITEMS = ("dataset", "split", "split_digest", "items_digest", "n_items")
"""Together they are one cause: other items."""


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """What is known about two scores of one model.

    Example: Reconciliation("sft", "sft", score_a=0.308, score_b=0.231, differing=(Difference("verifier", "em/1", "em/2"),), shared=500,
        disagree=71, p_value=1e-4, test="...", p_shared=None, verdict="explained", reason="only verifier ...", absolute="unresolved")
    """

    label_a: str
    label_b: str
    score_a: float
    score_b: float
    differing: tuple[Difference, ...]
    """Every condition that differs, the weights included."""
    shared: int
    """Items that both scored."""
    disagree: int
    """Shared items with another mean."""
    p_value: float | None
    """Of no difference between the two scores; None where neither record varies over its items."""
    test: str
    p_shared: float | None
    """The same on the shared items alone; None when all items are shared, or fewer than two."""
    verdict: Verdict
    reason: str
    absolute: Literal["resolved", "unresolved"]
    """Whether the number itself may be quoted."""


def reconcile(a: EvalRecord, b: EvalRecord) -> Reconciliation:
    """Explain two records of one model. Raises EvidenceError for two models: their difference is what `compare` measures."""
    if a.model_digest != b.model_digest and a.label != b.label:
        raise EvidenceError(
            f"'{a.label}' ({a.model_digest}) and '{b.label}' ({b.model_digest}) are two models; reconcile records of one, or compare them"
        )
    differing = differences(a.conditions, b.conditions)
    if a.model_digest != b.model_digest:
        differing.insert(0, Difference("model_digest", a.model_digest, b.model_digest))
    means_a, means_b = a.item_means, b.item_means
    shared = [item_id for item_id in means_a if item_id in means_b]
    disagree = sum(abs(means_a[i] - means_b[i]) > 1e-9 for i in shared)
    p_value, test, p_shared = _tests(a, b, len(shared))
    verdict, reason = _verdict(a, b, [difference.name for difference in differing], disagree, p_value, p_shared)
    return Reconciliation(
        label_a=a.label,
        label_b=b.label,
        score_a=a.pass_at_1,
        score_b=b.pass_at_1,
        differing=tuple(differing),
        shared=len(shared),
        disagree=disagree,
        p_value=p_value,
        test=test,
        p_shared=p_shared,
        verdict=verdict,
        reason=reason,
        absolute="resolved" if verdict == "equal" else "unresolved",
    )


def _tests(a: EvalRecord, b: EvalRecord, shared: int) -> tuple[float | None, str, float | None]:
    """p of the two scores, how it was found, and p on the shared items where those are not all."""
    paired = change_between(a, b) if shared >= 2 else None
    if paired is not None and shared == len(a.item_means) == len(b.item_means):
        return paired.p_value, paired.method, None
    try:
        apart = welch(list(a.item_means.values()), list(b.item_means.values()))
    except EvidenceError:
        return None, "no test: neither record varies over its items", paired.p_value if paired else None
    return apart.p_value, apart.method, paired.p_value if paired else None


def _verdict(
    a: EvalRecord, b: EvalRecord, names: list[str], disagree: int, p_value: float | None, p_shared: float | None
) -> tuple[Verdict, str]:
    if not names:
        if {item.id: item.outcomes for item in a.items} == {item.id: item.outcomes for item in b.items}:
            return "equal", "equal conditions, and every outcome is the same"
        return (
            "unresolved",
            f"equal conditions, yet {max(1, disagree)} items differ: engine, hardware or code changed, and no record says which",
        )
    if p_value is None:
        return "unresolved", f"no test is possible, and {', '.join(names)} differ"
    same_elsewhere = p_shared is None or p_shared >= NOISE
    if p_value >= NOISE and same_elsewhere:
        return "sampling noise", f"p = {p_value:.3g}, although {', '.join(names)} {'differs' if len(names) == 1 else 'differ'}"
    items = [name for name in names if name in _ITEMS]
    if items and p_shared is not None and same_elsewhere:
        return "explained", f"other items ({', '.join(items)}): on those that both scored they agree (p = {p_shared:.3g})"
    return _blamed(names, items if p_shared is None else [], p_value if p_shared is None else p_shared)


def _blamed(names: list[str], items: list[str], p_value: float) -> tuple[Verdict, str]:
    """One cause explains; several, or none, leave it open. `items` are the differences that say that other items were asked."""
    tokenizer = {"template_digest"} if "tokenizer_digest" in names else set[str]()  # the template's digest covers the tokenizer
    causes = [name for name in names if name not in _NO_CAUSE and name not in _ITEMS and name not in tokenizer]
    causes += [f"other items ({', '.join(items)})"] if items else []
    if not causes:
        return "unresolved", f"beyond noise (p = {p_value:.3g}), and nothing that differs could be why: {', '.join(names)}"
    if len(causes) == 1:
        return "explained", f"{causes[0]} is the one thing that differs and could be why (p = {p_value:.3g} of noise alone)"
    return "unresolved", f"beyond noise (p = {p_value:.3g}); any of {', '.join(causes)} may be why: change one at a time"
