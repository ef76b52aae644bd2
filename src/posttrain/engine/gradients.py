"""Gradients of a step, as a list of tensors: summed over processes, measured, scaled. No copy is made where one process works alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from posttrain.engine.processes import Ranks

BUCKET = 2**23
"""Numbers in one message between processes: 32 MiB in float32. A larger tensor travels alone, without being copied."""


def sum_over(ranks: Ranks, gradients: Sequence[Tensor]) -> None:
    """Sum each gradient over all processes, in place; every process must pass tensors of the same shapes in the same order."""
    if ranks.size == 1:
        return
    for bucket in buckets(gradients, BUCKET):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            ranks.sum_(bucket[0])
            continue
        flat = ranks.sum_(torch.cat([gradient.flatten() for gradient in bucket]))
        parts = flat.split([gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def buckets(gradients: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Neighbours of one type and device together, up to `size` numbers. Example: of 3, 4, 9 and 1 numbers with size 8: (3, 4), (9), (1)."""
    bucket: list[Tensor] = []
    used = 0
    for gradient in gradients:
        alike = not bucket or (gradient.dtype == bucket[0].dtype and gradient.device == bucket[0].device)
        if bucket and (used + gradient.numel() > size or not alike):
            yield bucket
            bucket, used = [], 0
        bucket.append(gradient)
        used += gradient.numel()
    if bucket:
        yield bucket


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all of them as one number on their device. Example: of (3) and (0, 4): 5."""
    return torch.nn.utils.get_total_norm(gradients)


def scale(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply each by `factor`, in place."""
    torch._foreach_mul_(list(gradients), factor)  # pyright: ignore[reportPrivateImportUsage]
