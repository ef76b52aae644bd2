"""Where the keys and values of living rows are kept while they are decoded.

Rows that continue the same prompt form a group: the prompt's keys and values are stored once and read once per step for all of them. What
a row wrote itself lies in its own place of the group's block:

    prompt  [layers, 2, groups, kv heads, prompt width, head dim]
    own     [layers, 2, groups, kv heads, places, columns, head dim]

All rows write the same column at the same step, whenever they entered: columns count steps of the clock, not positions (a key carries its
position in its rotation). A row that entered later does not see the columns before its first. Columns are added a few at a time, because
every step reads all that the rows wrote: with room for later columns in between, that reading takes twice as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

GROWTH = 16
"""Columns are added by as many, or a quarter of what there is."""
SMALL_PRODUCT = 400
"""torch multiplies stacks of matrices smaller than this (rows x inner x columns) with a slow plain loop; the window is kept wider."""


@dataclass(slots=True)
class Row:
    """A living row and where it lies. Of a row that has yet to enter, columns are counted from the clock at its entry.

    Example: a row that enters with 2 tokens of its own is Row(prompt, first=-2).
    """

    prompt: tuple[int, ...]
    first: int
    """Column of the first token of its own."""
    group: int = -1
    place: int = -1


def places_per_group(counts: Sequence[int]) -> int:
    """How many places to give each group of siblings, when prompts have `counts` of them: few empty places, few repeated prompts.

    >>> places_per_group([8, 8, 8, 7]), places_per_group([1, 1, 1, 8]), places_per_group([3])
    (8, 1, 3)
    """
    return min(sorted(set(counts)), key=lambda size: (sum(ceil(n / size) * (size + 1) for n in counts), -size))


class Table:
    """Keys and values of the living rows, in order of `rows`."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, query_heads: int, like: Tensor):
        self.layers, self.kv_heads, self.head_dim, self.repeat = layers, kv_heads, head_dim, query_heads // kv_heads
        self.rows: list[Row] = []
        self.size = 1
        """Places per group."""
        self.prompt = like.new_zeros(layers, 2, 0, kv_heads, 0, head_dim)
        self.own = like.new_zeros(layers, 2, 0, kv_heads, 1, 0, head_dim)
        self.window = ceil(SMALL_PRODUCT / (self.repeat * head_dim))
        """Fewest columns to attend to."""
        self.clock = 0
        self._settle([])

    @property
    def places(self) -> int:
        """Places there are, taken or not."""
        return self.own.shape[2] * self.size

    def rebuild(self, keep: Sequence[int], entering: Sequence[Row], prompts: dict[tuple[int, ...], Tensor], own: Sequence[Tensor]) -> None:
        """Move the rows `keep` together and let new ones in beside them, siblings into one group.

        Args:
            keep: indices into `rows`.
            entering: new rows.
            prompts: keys and values [layers, 2, kv heads, tokens, head dim] of each entering row's prompt.
            own: the same of what each entering row brings in its own columns.
        """
        old, before, size = [self.rows[i] for i in keep], self.clock, self.size
        self.clock = self._next_clock(old, entering)
        rows = [Row(row.prompt, row.first - before + self.clock) for row in old]
        rows += [Row(row.prompt, row.first + self.clock) for row in entering]
        members: dict[tuple[int, ...], list[int]] = {}
        for index, row in enumerate(rows):
            members.setdefault(row.prompt, []).append(index)
        self.size = places_per_group([len(m) for m in members.values()]) if rows else 1
        groups = [m[i : i + self.size] for m in members.values() for i in range(0, len(m), self.size)]
        for group, inside in enumerate(groups):
            for place, index in enumerate(inside):
                rows[index].group, rows[index].place = group, place
        self._move_prompts([rows[inside[0]] for inside in groups], [old[i[0]].group if i[0] < len(old) else -1 for i in groups], prompts)
        self._move_own(rows, old, size, before)
        for row, kv in zip(rows[len(old) :], own, strict=True):
            if row.first < self.clock:
                self.own[:, :, row.group, :, row.place, row.first : self.clock] = kv
        self._settle(rows)

    def _next_clock(self, old: Sequence[Row], entering: Sequence[Row]) -> int:
        """The clock after a rebuild: as before, unless most columns are no longer needed, or an entering row needs more."""
        used = max([self.clock - row.first for row in old] + [-row.first for row in entering], default=0)
        return self.clock if used <= self.clock <= 2 * used else used

    def _move_prompts(self, heads_of_groups: Sequence[Row], sources: Sequence[int], prompts: dict[tuple[int, ...], Tensor]) -> None:
        """Every group's prompt, from the old group numbered in `sources`, or if that is -1 from `prompts`."""
        source, width = self.prompt, max((len(row.prompt) for row in heads_of_groups), default=0)
        index = torch.tensor([max(0, group) for group in sources], dtype=torch.long, device=source.device)
        if -1 not in sources:
            self.prompt = source.index_select(2, index)[..., :width, :]
            return
        self.prompt = source.new_zeros(self.layers, 2, len(sources), self.kv_heads, width, self.head_dim)
        if any(group >= 0 for group in sources):
            joint = min(width, source.shape[4])
            self.prompt[..., :joint, :] = source[..., :joint, :].index_select(2, index)
        for group, (row, was) in enumerate(zip(heads_of_groups, sources, strict=True)):
            if was < 0:
                self.prompt[:, :, group, :, : len(row.prompt)] = prompts[row.prompt]

    def _move_own(self, rows: Sequence[Row], old: Sequence[Row], size: int, before: int) -> None:
        """The columns of the rows that stay; `size` and `before` are places per group and clock of the old block."""
        groups, columns = 1 + max((row.group for row in rows), default=-1), self.clock + max(GROWTH, self.window)
        shape = (self.layers, 2, groups, self.kv_heads, self.size)
        heads = torch.arange(self.kv_heads)
        source = torch.zeros(groups, self.kv_heads, self.size, dtype=torch.long)  # empty places come from anywhere
        for row, was in zip(rows, old, strict=False):
            source[row.group, :, row.place] = (was.group * self.kv_heads + heads) * size + was.place
        block = self.own.flatten(2, 4)
        self.own = self.own.new_zeros(*shape, 0 if old and before == self.clock else columns, self.head_dim)
        if not old:
            return
        moved = block.index_select(2, source.flatten().to(block.device)).view(*shape, -1, self.head_dim)
        if before == self.clock:
            self.own = moved
        else:
            low = min(row.first for row in old)
            self.own[..., low - before + self.clock : self.clock, :] = moved[..., low:before, :]

    def keep(self, rows: Sequence[int]) -> None:
        """Only these rows live on; the places of the others stay empty until the next rebuild."""
        self._index([self.rows[i] for i in rows])

    def _settle(self, rows: list[Row]) -> None:
        """Everything that stays the same until the next rebuild."""
        groups, width = self.prompt.shape[2], self.prompt.shape[4]
        self.prompt_keys = [
            layer[0].flatten(0, 1).transpose(1, 2).contiguous() for layer in self.prompt
        ]  # this way round products are fast
        self.prompt_values = [layer[1].flatten(0, 1) for layer in self.prompt]
        self.prompt_mask = None
        if any(len(row.prompt) != width for row in rows):
            hidden = torch.full((groups, 1, 1, width), -torch.inf)
            for row in rows:
                hidden[row.group, 0, 0, : len(row.prompt)] = 0.0
            self.prompt_mask = hidden.expand(-1, self.kv_heads, -1, -1).reshape(groups * self.kv_heads, 1, width).to(self.prompt)
        firsts = [row.first for row in rows] or [0]
        self.first, self.last = min(firsts), max(firsts)
        """Columns before `first` matter to no row; from `last` on they matter to all."""
        self._own_views()
        for row in rows:
            self.own_mask[row.group, :, row.place, :, row.first : self.clock] = 0.0
        self._index(rows)

    def _own_views(self) -> None:
        self.own_keys = [layer[0].flatten(0, 2).transpose(1, 2) for layer in self.own]
        self.own_values = [layer[1].flatten(0, 2) for layer in self.own]
        groups, columns = self.own.shape[2], self.own.shape[5]
        self.own_mask = self.own.new_full((groups, self.kv_heads, self.size, 1, columns), -torch.inf)

    def _grow(self) -> None:
        """Add columns; nothing reads them before they are written."""
        columns = self.own.shape[5]
        own, mask = self.own, self.own_mask
        self.own = own.new_empty(*own.shape[:5], columns + max(GROWTH, columns // 4), self.head_dim)
        self.own[..., :columns, :] = own
        self._own_views()
        self.own_mask[..., :columns] = mask

    def _index(self, rows: list[Row]) -> None:
        self.rows = rows
        flat = [row.group * self.size + row.place for row in rows]
        self.whole = flat == list(range(self.places))
        """Whether every place is taken, in order: then nothing has to be gathered."""
        self.place_R = torch.tensor(flat, dtype=torch.long, device=self.own.device)
        self.row_Q = self.place_R.new_zeros(self.places)
        self.row_Q[self.place_R] = torch.arange(len(rows), device=self.own.device)
        positions = [len(row.prompt) + self.clock - row.first for row in rows]
        self.position_R = torch.tensor(positions, dtype=torch.long, device=self.own.device)

    def open_column(self) -> None:
        """A step begins: every row will write and see the column at the clock."""
        if self.clock == self.own.shape[5]:
            self._grow()
        self.own_mask[..., self.clock] = 0.0

    def tick(self) -> None:
        """The step is over: every row has one token more."""
        self.clock += 1
        self.position_R += 1

    def attend(self, layer: int, qkv_RD: Tensor, scaling: float) -> Tensor:
        """Store this step's keys and values, attend with its queries; [rows, query heads x head dim]."""
        qkv_QD = qkv_RD if self.whole else qkv_RD.index_select(0, self.row_Q)
        groups, size, heads, repeat, dim = self.own.shape[2], self.size, self.kv_heads, self.repeat, self.head_dim
        split = heads * repeat * dim
        self.own[layer, :, :, :, :, self.clock] = qkv_QD[:, split:].view(groups, size, 2, heads, dim).permute(2, 0, 3, 1, 4)
        q = qkv_QD[:, :split].view(groups, size, heads, repeat, dim).transpose(1, 2).contiguous()
        by_group, by_row = q.view(groups * heads, size * repeat, dim), q.view(groups * heads * size, repeat, dim)
        high = max(self.clock + 1, self.window)
        low = min(self.first, high - self.window)
        shared = _scores(by_group, self.prompt_keys[layer], self.prompt_mask, scaling)
        mask = None if low >= self.last and high == self.clock + 1 else self.own_mask.flatten(0, 2)[:, :, low:high]
        mine = _scores(by_row, self.own_keys[layer][:, :, low:high], mask, scaling)
        width = shared.shape[-1]
        scores = torch.cat((shared.view(-1, width), mine.view(-1, high - low)), dim=1)
        weight = scores.softmax(-1) if scores.dtype in (torch.float32, torch.float64) else scores.float().softmax(-1).to(scores.dtype)
        of_prompt, of_own = weight[:, :width].view(groups * heads, -1, width), weight[:, width:].view(-1, repeat, high - low)
        mixed = torch.bmm(of_prompt, self.prompt_values[layer]).view(-1, repeat, dim)
        mixed += torch.bmm(of_own, self.own_values[layer][:, low:high])
        mixed_QD = mixed.view(groups, heads, size, repeat * dim).transpose(1, 2).reshape(groups * size, split)
        return mixed_QD if self.whole else mixed_QD.index_select(0, self.place_R)

    def own_of(self, index: int) -> Tensor:
        """A copy of what row `index` wrote: [layers, 2, kv heads, its own tokens, head dim]."""
        row = self.rows[index]
        return self.own[:, :, row.group, :, row.place, row.first : self.clock].clone()


def _scores(q: Tensor, keys: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    if mask is None:
        return torch.baddbmm(q.new_empty(1, 1, 1), q, keys, beta=0, alpha=scaling)
    return torch.baddbmm(mask, q, keys, alpha=scaling)
