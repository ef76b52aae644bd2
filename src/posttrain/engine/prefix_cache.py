"""Keys and values of token prefixes that were computed before, so that the next turn of a conversation reads only what is new.

A radix tree: a node holds a run of tokens, and hangs on its parent at the absolute position where the two part. What the tree holds is
right for one set of weights; its owner empties it when they change.

Completions are remembered by their tokens alone until a prompt has been seen that continues one: where every prompt is new, as in
single-turn training, copying their keys and values would be wasted time and memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from torch import Tensor


class Node:
    """A run of tokens at positions start, start + 1, ... and their keys and values [layers, 2, kv heads, tokens, head dim], if kept."""

    __slots__ = ("children", "ids", "kv", "parent", "start")

    def __init__(self, parent: Node | None, start: int, ids: tuple[int, ...], kv: Tensor | None):
        self.parent, self.start, self.ids, self.kv = parent, start, ids, kv
        self.children: dict[tuple[int, int], Node] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def bytes(self) -> int:
        return 8 * len(self.ids) if self.kv is None else self.kv.numel() * self.kv.element_size()


class Match:
    """The longest known prefix of a sequence: `length` tokens, the last of them in `node`."""

    __slots__ = ("length", "node")

    def __init__(self, node: Node | None = None, length: int = 0):
        self.node, self.length = node, length

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """(position of its first token, keys and values) of each run, last run first; together they cover the prefix once."""
        node, end = self.node, self.length
        while node is not None:
            assert node.kv is not None
            yield node.start, node.kv[..., : end - node.start, :]
            node, end = node.parent, node.start


class PrefixCache:
    """At most `max_bytes` of prefixes; the least recently used leave first.

    Example: after add((1, 5, 9, 7), ...) the sequence (1, 5, 9, 8) matches 3 tokens, and adding it stores one token that hangs on the
    first node at position 3.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes, self.bytes = max_bytes, 0
        self.continued = False
        """Whether a prompt has been seen that continues a completion. It outlives `clear`."""
        self._roots: dict[int, Node] = {}
        self._recent: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent)

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._recent.clear()
        self.bytes = 0

    def match(self, ids: Sequence[int]) -> Match:
        """The longest prefix of `ids` that is held, which may be all of it."""
        node, found = self._roots.get(ids[0]) if ids else None, Match()
        while node is not None:
            length = node.start
            for mine, theirs in zip(ids[node.start :], node.ids, strict=False):
                if mine != theirs:
                    break
                length += 1
            if node.kv is None:
                self.continued |= length == node.end < len(ids)
                break
            found = Match(node, length)
            node = node.children.get((length, ids[length])) if length < len(ids) else None
        self._touch(found.node)
        return found

    def add(self, ids: Sequence[int], known: Match, kv: Tensor) -> Match:
        """Hold `ids`, whose keys and values from position known.length on are `kv`; returns a match that covers all of `ids`.

        The result stays usable when the cache drops it: a match owns what it points at. The tensor is kept as it is; a view keeps the
        whole of what it is a view of.
        """
        best = self.match(ids)  # what was added since `known` was looked up may reach further
        if best.length < known.length:
            best = known
        if best.length == len(ids):
            return best
        node = Node(best.node, best.length, tuple(ids[best.length :]), kv[..., best.length - known.length :, :])
        self._hold(node)
        return Match(node, len(ids))

    def add_ids(self, ids: Sequence[int]) -> None:
        """Hold the tokens of a completion and its prompt, without keys and values."""
        best = self.match(ids)
        if best.length < len(ids):
            self._hold(Node(best.node, best.length, tuple(ids[best.length :]), None))

    def _hold(self, node: Node) -> None:
        if node.bytes > self.max_bytes or not (node.parent is None or node.parent in self._recent):
            return
        if node.parent is None:
            replaced, self._roots[node.ids[0]] = self._roots.get(node.ids[0]), node
        else:
            key = (node.start, node.ids[0])
            replaced, node.parent.children[key] = node.parent.children.get(key), node
        if replaced is not None:  # it had no keys and values, and so no children
            self.bytes -= replaced.bytes
            del self._recent[replaced]
        self._recent[node] = None
        self.bytes += node.bytes
        self._touch(node)
        self._shrink()

    def _touch(self, node: Node | None) -> None:
        """Deepest first, so that no node is ever older than what hangs on it: the oldest node is always a leaf."""
        while node is not None:
            if node in self._recent:
                self._recent.move_to_end(node)
            node = node.parent

    def _shrink(self) -> None:
        while self.bytes > self.max_bytes:
            node, _ = self._recent.popitem(last=False)
            self.bytes -= node.bytes
            if node.parent is None:
                del self._roots[node.ids[0]]
            else:
                del node.parent.children[(node.start, node.ids[0])]
