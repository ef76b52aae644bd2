"""Text <-> ids of one tokenizer, with content kept apart from control tokens.

A Hugging Face tokenizer splits the literal text `<|im_end|>` out of a user's message and turns it into the real control token;
`add_special_tokens=False` does not stop that. Here content is encoded by a copy of the tokenizer that has no added tokens at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from posttrain.core.digest import digest
from posttrain.core.errors import DataError, RenderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CACHED_CHARACTERS = 4096
"""Longer contents are rarely repeated and would fill the cache."""
CACHED_CONTENTS = 16384


class Position(Enum):
    """Where a text stands. Tokenizers that put a space before the first word do so at different places."""

    START = "start"
    """At the very beginning of the sequence."""
    CONTROL = "control"
    """Right after a control token."""
    INSIDE = "inside"
    """After ordinary text: no space may be added."""


class Codec:
    """Encodes template text (control tokens allowed) and content (control tokens impossible).

    Raises RenderError for a tokenizer without a `tokenizers` backend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise RenderError(f"{type(tokenizer).__name__} is not a fast tokenizer; load it with AutoTokenizer and use_fast=True")
        # truncation and padding are leftovers of earlier calls by other code and would cut or fill what is encoded here
        spec = {**json.loads(backend.to_str()), "post_processor": None, "truncation": None, "padding": None}
        added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
        self.control: dict[int, str] = {**dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)), **added}
        """Id and text of every token that content may not produce."""
        self.digest = digest(spec)
        longest_first = sorted(added.values(), key=len, reverse=True)
        self._control_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._template = Tokenizer.from_str(json.dumps(spec))
        self._plain = _plain_tokenizers({**spec, "added_tokens": []})
        self._prefixing = self._plain[Position.INSIDE] is not self._plain[Position.START]
        self._cached = lru_cache(maxsize=CACHED_CONTENTS)(self._encode_content)

    def encode_template(self, text: str, position: Position) -> tuple[int, ...]:
        """Ids of text that the chat template wrote; control tokens are recognised, bos and eos are not added."""
        if position is Position.START or not self._prefixing:
            return tuple(self._template.encode(text, add_special_tokens=False).ids)
        found = self._control_text.search(text)
        cut = found.start() if found else len(text)
        head = self._plain[Position.INSIDE].encode(text[:cut], add_special_tokens=False).ids if cut else []
        tail = self._template.encode(text[cut:], add_special_tokens=False).ids if found else []
        return (*head, *tail)

    def encode_content(self, text: str, position: Position) -> tuple[int, ...]:
        """Ids of text that a person, a tool or the model wrote: never a control token.

        Raises RenderError if the vocabulary itself would give one, DataError for text that is not Unicode.
        """
        return self._cached(text, position) if len(text) <= CACHED_CHARACTERS else self._encode_content(text, position)

    def _encode_content(self, text: str, position: Position) -> tuple[int, ...]:
        try:
            ids = tuple(self._plain[position].encode(text, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError):
            raise DataError(f"text {text[:40]!r} holds half of a surrogate pair and is not Unicode; repair or drop the row") from None
        forged = [self.control[index] for index in ids if index in self.control]
        if forged:
            raise RenderError(f"text {text[:40]!r} would become the control token {forged[0]!r}; remove that text from the data")
        return ids

    def decode(self, ids: Sequence[int], position: Position, hidden: frozenset[int]) -> str:
        """Text of `ids` that stand at `position`: those in `hidden` left out, other added tokens (thinking marks) as written."""
        shown = [index for index in ids if index not in hidden]
        texts = []
        for added, run in groupby(shown, key=self.control.__contains__):
            part = list(run)
            texts.append("".join(self.control[i] for i in part) if added else self._plain[position].decode(part, skip_special_tokens=False))
            position = Position.CONTROL if added else position
        return "".join(texts)


def _plain_tokenizers(spec: dict[str, Any]) -> dict[Position, Tokenizer]:
    """One tokenizer without added tokens per position; positions that behave alike share one."""
    start = Tokenizer.from_str(json.dumps(spec))
    tokenizers = {Position.START: start}
    for position, change in ((Position.CONTROL, _only_first), (Position.INSIDE, _without_prefix)):
        front = {part: _walk(spec[part], change) for part in ("normalizer", "pre_tokenizer")}
        if all(front[part] == spec[part] for part in front):
            tokenizers[position] = start
        else:
            changed = {**spec, **front, "decoder": _walk(spec["decoder"], change)}
            tokenizers[position] = Tokenizer.from_str(json.dumps(changed))
    return tokenizers


def _walk(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if isinstance(node, dict):
        return change({key: _walk(value, change) for key, value in node.items()})
    if isinstance(node, list):
        return [_walk(item, change) for item in node]
    return node


def _only_first(node: dict[str, Any]) -> dict[str, Any]:
    """`first` means the start of the sequence: after a control token nothing is prepended."""
    return {**node, "prepend_scheme": "never"} if node.get("prepend_scheme") == "first" else node


def _without_prefix(node: dict[str, Any]) -> dict[str, Any]:
    kind = node.get("type")
    if kind == "Metaspace":
        return {**node, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**node, "add_prefix_space": False}
    if kind == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    if kind == "Strip" and node.get("start"):  # the decoder's counterpart of Prepend
        return {**node, "start": 0}
    return node
