"""Sentence boundaries on token ids, for objectives with one ratio per sentence."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerFast

ENDS = (".", "!", "?", "\n", "。", "！", "？")


def sentence_ends(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids whose text ends a sentence: punctuation or a line break last, trailing spaces aside. "3.14" inside a token is none."""
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    return frozenset(i for i, text in enumerate(texts) if text.rstrip(" ").endswith(ENDS))


def sentence_index(ids: Sequence[int], ends: frozenset[int]) -> tuple[int, ...]:
    """Index of the sentence that each token belongs to; the ending token closes its sentence.

    Example: with 9 as the full stop, (4, 9, 5, 9, 2) gives (0, 0, 1, 1, 2).
    """
    index, current = [], 0
    for token in ids:
        index.append(current)
        current += token in ends
    return tuple(index)
