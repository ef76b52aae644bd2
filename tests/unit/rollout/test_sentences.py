"""Sentence boundaries on token ids."""

from __future__ import annotations

from posttrain.rollout.sentences import sentence_ends, sentence_index


def test_the_ending_token_closes_its_sentence():
    assert sentence_index((4, 9, 5, 9, 2), frozenset({9})) == (0, 0, 1, 1, 2)
    assert sentence_index((9, 9, 4), frozenset({9})) == (0, 1, 2)
    assert sentence_index((4, 5), frozenset({9})) == (0, 0)
    assert sentence_index((), frozenset({9})) == ()


def test_ends_of_a_byte_vocabulary(toy):
    # one token per byte: full stop, exclamation mark, question mark and line break, nothing else
    ends = sentence_ends(toy.tokenizer)
    assert {toy.tokenizer.decode([i]) for i in ends} == {".", "!", "?", "\n"}
    ids = toy.tokenizer.encode("a.b!c", add_special_tokens=False)
    assert sentence_index(ids, ends) == (0, 0, 1, 1, 2)


class Pieces:
    """A tokenizer of whole pieces."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def __len__(self) -> int:
        return len(self.pieces)

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return [self.pieces[row[0]] for row in rows]


def test_what_a_piece_ends_with_decides():
    pieces = ("end.", "3.14", ".5", "?! ", "\n\n", "。", "word", "", " ")
    found = sentence_ends(Pieces(*pieces))  # pyright: ignore[reportArgumentType]
    assert {pieces[i] for i in found} == {"end.", "?! ", "\n\n", "。"}
