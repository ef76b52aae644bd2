"""What the loaded weights of a role really are, read off the tensors and not off a setting or a folder's name.

A directory called after one 4-bit format has held a run in another, and where a machine lacks a kernel, weights are held in bfloat16
without a word. Bytes per element do not lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ROLES = ("actor", "rollout", "reference", "teacher", "critic", "serving")
"""actor: trained. rollout: what samples. reference, teacher: score only. critic: trained values. serving: what is handed out."""
FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
EIGHT_BIT_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
MARKS = (
    ("bitsandbytes__nf4", "bitsandbytes nf4", 4),
    ("bitsandbytes__fp4", "bitsandbytes fp4", 4),
    ("SCB", "bitsandbytes int8", 8),
    ("qweight", "packed integers (GPTQ, AWQ)", 4),
    ("weight_packed", "packed 4-bit weights with scales", 4),
)
"""Last part of a tensor's name, the scheme it belongs to, bits per weight. The first that occurs names the scheme."""


class Stored(NamedTuple):
    """A tensor of a loaded model. Example: Stored("lm_head.weight", "float32", 38400, 153600)"""

    name: str
    dtype: str
    elements: int
    bytes: int


def detect(tensors: Iterable[Stored]) -> dict[str, Any]:
    """What a model's tensors are made of.

    `dtype` is that of most floating-point elements, `shares` the share of all elements per dtype, `quantisation` the scheme that was found
    ("none" for plain floats).

    >>> detect([Stored("a.weight", "float32", 300, 1200), Stored("b.weight", "bfloat16", 100, 200)])["shares"]
    {'float32': 0.75, 'bfloat16': 0.25}
    """
    held = list(tensors)
    elements: dict[str, int] = {}
    for tensor in held:
        name = tensor.dtype.removeprefix("torch.")
        elements[name] = elements.get(name, 0) + tensor.elements
    total = sum(elements.values())
    ordered = sorted(elements, key=lambda name: (-elements[name], name))
    floats = [name for name in ordered if name in FLOATS or name in EIGHT_BIT_FLOATS]
    return {
        "dtype": floats[0] if floats else ordered[0] if ordered else None,
        "shares": {name: round(elements[name] / total, 4) for name in ordered} if total else {},
        "quantisation": _scheme([tensor for tensor in held if tensor.elements], floats),
        "elements": total,
        "bytes": sum(tensor.bytes for tensor in held),
        "bytes_per_element": round(sum(tensor.bytes for tensor in held) / total, 3) if total else None,
    }


def mismatches(role: str, requested: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """One line per thing that was asked for (`dtype`, `quantisation`; absent: anything) and is not what was loaded.

    >>> mismatches("teacher", {"dtype": "bfloat16"}, detect([Stored("w", "float32", 10, 40)]))
    ['teacher: dtype bfloat16 was requested, float32 was loaded (4 bytes per element)']
    """
    size = found.get("bytes_per_element")
    held = f" ({size:g} bytes per element)" if isinstance(size, int | float) else ""
    return [
        f"{role}: {name} {requested[name]} was requested, {found.get(name)} was loaded{held}"
        for name in ("dtype", "quantisation")
        if requested.get(name) is not None and requested[name] != found.get(name)
    ]


def _scheme(tensors: Sequence[Stored], floats: Sequence[str]) -> str:
    endings = {tensor.name.rsplit(".", 1)[-1] for tensor in tensors}
    for mark, scheme, _ in MARKS:
        if mark in endings:
            return scheme
    if any(name in EIGHT_BIT_FLOATS for name in floats):
        return "float8 weights"
    # A table of integers (positions, masks) is one-dimensional bookkeeping; weights in integers are most of what is held.
    total = sum(tensor.elements for tensor in tensors)
    for name, scheme in (("int8", "int8 weights"), ("uint8", "packed uint8 weights"), ("int32", "packed int32 weights")):
        if sum(tensor.elements for tensor in tensors if tensor.dtype.removeprefix("torch.") == name) > total / 4:
            return scheme
    return "none"
