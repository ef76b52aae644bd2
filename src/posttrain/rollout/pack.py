"""Samples to batches: siblings share one copy of their prompt, short documents share a row, nothing is dropped.

Rows are filled first-fit in order of decreasing length; the tail is padded. Every trained token of every sample is in exactly one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch

from posttrain.core.errors import DataError
from posttrain.core.trajectory import TRAINED_OWNERS, Sample
from posttrain.engine.batch import Batch
from posttrain.engine.machine import Packing


@dataclass(slots=True)
class _Document:
    """One prompt and the samples that continue it."""

    members: list[int]
    size: int


@dataclass(slots=True)
class _Row:
    documents: list[_Document] = field(default_factory=list)
    used: int = 0


def pack(samples: Sequence[Sample], packing: Packing, *, share_prompts: bool = True, whole_groups: bool = False) -> list[Batch]:
    """Pack samples into micro-batches.

    Args:
        samples: rows to train; those with equal `group` must have equal prompts, and share them.
        share_prompts: False gives every sample a row of its own (for architectures without custom masks).
        whole_groups: keep a group's samples in one batch, as losses over pairs need.
    """
    documents = list(_documents(samples, packing, share_prompts, whole_groups))
    rows = _fill(documents, packing.row_tokens) if share_prompts else [_Row([d], d.size) for d in _by_size(documents)]
    if whole_groups and not share_prompts:
        rows.sort(key=lambda row: samples[row.documents[0].members[0]].group)
    totals = _prompt_tokens(samples)
    batches, block, width = [], [], 0
    for row in rows:
        joint = max(width, row.used)
        same_group = bool(block) and samples[block[-1].documents[0].members[0]].group == samples[row.documents[0].members[0]].group
        if block and joint * (len(block) + 1) > packing.micro_tokens and not (whole_groups and not share_prompts and same_group):
            batches.append(_batch(samples, block, width, totals))
            block, joint = [], row.used
        block.append(row)
        width = joint
    if block:
        batches.append(_batch(samples, block, width, totals))
    return batches


def _documents(samples: Sequence[Sample], packing: Packing, share: bool, whole: bool) -> Iterator[_Document]:
    groups: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group if share else f"{index}", []).append(index)
    for members in groups.values():
        prompt = len(samples[members[0]].prompt)
        document = _Document([], prompt)
        for index in members:
            if samples[index].prompt.ids != samples[members[0]].prompt.ids:
                raise ValueError(f"group '{samples[index].group}' holds two different prompts")
            size = len(samples[index].tokens) - 1  # the last token is predicted, never read
            if document.members and not whole and document.size + size > packing.row_tokens:
                yield document
                document = _Document([], prompt)
            document.members.append(index)
            document.size += size
        yield document


def _by_size(documents: Sequence[_Document]) -> list[_Document]:
    return sorted(documents, key=lambda document: (-document.size, document.members[0]))


def _fill(documents: Sequence[_Document], width: int) -> list[_Row]:
    rows: list[_Row] = []
    open_rows: list[_Row] = []
    for document in _by_size(documents):
        row = next((row for row in open_rows if row.used + document.size <= width), None)
        if row is None:
            row = _Row()
            rows.append(row)
            open_rows.append(row)
        row.documents.append(document)
        row.used += document.size
        open_rows = [row for row in open_rows if row.used < width][-64:]  # a bounded search keeps packing linear
    return sorted(rows, key=lambda row: -row.used)


def _batch(samples: Sequence[Sample], rows: Sequence[_Row], width: int, totals: Mapping[str, int]) -> Batch:
    shape = (len(rows), width)
    ids, position, document, branch = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    document.fill(-1)
    sources: list[int] = []
    targets: list[int] = []
    slots: list[Sequence[int]] = []
    order: list[int] = []
    for r, row in enumerate(rows):
        at = 0
        for d, doc in enumerate(row.documents):
            prompt = samples[doc.members[0]].prompt.ids
            end = at + doc.size
            document[r, at:end] = d
            ids[r, at : at + len(prompt)] = prompt
            position[r, at : at + len(prompt)] = np.arange(len(prompt))
            cue = r * width + at + len(prompt) - 1
            at += len(prompt)
            for b, index in enumerate(doc.members, start=1):
                read = samples[index].tokens.ids[:-1]
                ids[r, at : at + len(read)] = read
                position[r, at : at + len(read)] = np.arange(len(prompt), len(prompt) + len(read))
                branch[r, at : at + len(read)] = b
                slots.append(_targets(samples[index], cue, r * width + at, sources, targets))
                order.append(index)
                at += len(read)
    longest = max(len(slot) for slot in slots)
    slot_BT = torch.tensor([[*slot, *[-1] * (longest - len(slot))] for slot in slots])
    advantages = _stream([samples[i].advantages for i in order], longest)
    behaviour = _stream([samples[i].logps for i in order], longest)
    source, target = torch.tensor(sources, dtype=torch.long), torch.tensor(targets, dtype=torch.long)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(position),
        torch.from_numpy(document),
        torch.from_numpy(branch),
        source,
        target,
        slot_BT,
        advantages,
        behaviour,
        tuple(order),
        prompt_tokens_B=torch.tensor([totals[samples[i].group] for i in order], dtype=torch.float32),
        candidate_M2=_candidates([samples[i] for i in order], target),
        sentence_BT=_stream([samples[i].sentences for i in order], longest).long() if samples[order[0]].sentences else None,
    )


def _prompt_tokens(samples: Sequence[Sample]) -> dict[str, int]:
    """Trained tokens per group."""
    totals: dict[str, int] = {}
    for sample in samples:
        totals[sample.group] = totals.get(sample.group, 0) + sample.tokens.trained
    return totals


def _targets(sample: Sample, cue: int, start: int, sources: list[int], targets: list[int]) -> Sequence[int]:
    """Record where each trained token of a sample is predicted from; returns its slots."""
    if sum(sample.tokens.owners.count(owner) for owner in TRAINED_OWNERS) == len(sample.tokens):
        first = len(targets)
        sources += [cue, *range(start, start + len(sample.tokens) - 1)]
        targets += sample.tokens.ids
        return range(first, len(targets))
    slots = []
    for k, (token, owner) in enumerate(zip(sample.tokens.ids, sample.tokens.owners, strict=True)):
        if owner not in TRAINED_OWNERS:
            slots.append(-1)
            continue
        slots.append(len(targets))
        sources.append(cue if k == 0 else start + k - 1)
        targets.append(token)
    return slots


def _candidates(samples: Sequence[Sample], target_N: torch.Tensor) -> torch.Tensor | None:
    """What the sampler's cut left at each trained token, in the order of `target_N`: pairs (place, id). None when nothing was recorded."""
    if not any(sample.candidates for sample in samples):
        return None
    kept: list[Sequence[int]] = []
    for sample in samples:
        if sample.candidates and len(sample.candidates) != len(sample.tokens):
            raise DataError(
                f"group '{sample.group}': {len(sample.candidates)} candidate sets for {len(sample.tokens)} tokens; record one each"
            )
        sets = sample.candidates or ((),) * len(sample.tokens)
        kept += [ids for ids, owner in zip(sets, sample.tokens.owners, strict=True) if owner in TRAINED_OWNERS]
    sizes = np.array([len(ids) for ids in kept], dtype=np.int64)
    place_M = np.repeat(np.arange(len(kept)), sizes)
    id_M = np.fromiter(chain.from_iterable(kept), np.int64, count=int(sizes.sum()))
    own_N = np.bincount(place_M, id_M == target_N.numpy()[place_M], minlength=len(kept)) > 0
    if not own_N[sizes > 0].all():
        wrong = int(np.flatnonzero((sizes > 0) & ~own_N)[0])
        raise DataError(
            f"the sampler drew token {int(target_N[wrong])} from candidates that lack it, {list(kept[wrong])[:8]}; its record is wrong"
        )
    return torch.from_numpy(np.stack([place_M, id_M], axis=1))


def _stream(values: Sequence[Sequence[float]], width: int) -> torch.Tensor:
    return torch.tensor([list(row) + [0.0] * (width - len(row)) for row in values], dtype=torch.float32)


def shard(samples: Sequence[Sample], rank: int, size: int) -> list[Sample]:
    """The part of a step's samples that one rank computes: whole groups, balanced by tokens, the same on every machine."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    cost = {key: len(members[0].prompt) + sum(len(m.tokens) for m in members) for key, members in groups.items()}
    load = [0] * size
    mine: list[Sample] = []
    for key in sorted(groups, key=lambda key: (-cost[key], key)):
        target = load.index(min(load))
        load[target] += cost[key]
        if target == rank:
            mine += groups[key]
    return mine
