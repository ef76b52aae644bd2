"""Demonstrations, texts and pairs as rows to train."""

from __future__ import annotations

import pytest

from posttrain.core.errors import DataError
from posttrain.core.tasks import Message
from posttrain.core.trajectory import Owner, StopReason, Tokens
from posttrain.rollout.samples import mine_pairs, supervised_sample, text_sample

CHAT = (Message("user", "hi"), Message("assistant", "ab"))


def test_a_demonstration_trains_the_closing_token_and_nothing_after(toy):
    # <|bos|> <|user|> h i <|end|> <|assistant|> | a b <|end|> | <|eos|>
    row = supervised_sample(toy.renderer.conversation(CHAT), "r")
    assert row.prompt.ids == (1, 4, 80, 81, 6, 5)
    assert row.tokens.ids == (73, 74, 6)
    assert row.tokens.trained == 3


def test_turns_between_answers_are_read_but_not_trained(toy):
    row = supervised_sample(toy.renderer.conversation((*CHAT, *CHAT)), "r")
    # a b <end> <user> h i <end> <assistant> a b <end>
    assert row.tokens.ids == (73, 74, 6, 4, 80, 81, 6, 5, 73, 74, 6)
    assert [owner is Owner.DEMONSTRATED for owner in row.tokens.owners] == [True] * 3 + [False] * 5 + [True] * 3


def test_a_first_token_that_is_trained_becomes_the_prompt():
    tokens = Tokens((7, 8), (Owner.DEMONSTRATED, Owner.DEMONSTRATED))
    row = supervised_sample(tokens, "r")
    assert (row.prompt.ids, row.tokens.ids) == ((7,), (8,))


def test_a_row_without_an_answer_is_refused():
    with pytest.raises(DataError, match="row 'r' has no assistant token"):
        supervised_sample(Tokens((7,), (Owner.USER,)), "r")


def test_text_rows_begin_with_bos_end_with_eos_and_cannot_forge_control(toy):
    row = text_sample(toy.tokenizer, "a<|end|>", "t")
    assert row.prompt.ids == (1,)
    assert row.tokens.ids[0] == 73
    assert row.tokens.ids[-1] == 2
    assert 6 not in row.tokens.ids
    assert row.tokens.trained == len(row.tokens) == 1 + len("<|end|>") + 1


END, CUT, ODD = StopReason.END, StopReason.LENGTH, StopReason.CONTROL


def test_best_against_worst(toy):
    mined = mine_pairs([toy.group([0.0, 1.0, 0.5])])
    (pair,) = mined.pairs
    assert (pair.chosen.ids, pair.rejected.ids) == ((21, 2), (20, 2))
    assert pair.id == "0:t"
    chosen, rejected = pair.samples()
    assert (chosen.tokens.ids, rejected.tokens.ids) == ((21, 2), (20, 2))
    assert chosen.group == rejected.group


@pytest.mark.parametrize("cut", [CUT, ODD])
def test_truncated_is_neither_chosen_nor_rejected(toy, cut):
    mined = mine_pairs([toy.group([1.0, 0.0, 0.5, 0.0], stops=[cut, cut, END, END])])
    (pair,) = mined.pairs
    assert (pair.chosen.ids, pair.rejected.ids) == ((22, 2), (23, 2))
    alone = mine_pairs([toy.group([1.0, 0.0], stops=[END, cut])])
    assert (alone.pairs, alone.incomplete) == ((), 1)


def test_unscored_is_neither(toy):
    mined = mine_pairs([toy.group([1.0, None]), toy.group([None, 1.0, 0.0])])
    assert mined.incomplete == 1
    assert [pair.chosen.ids for pair in mined.pairs] == [(21, 2)]


TIED = [(20, 20, 2), (21, 2), (22, 2), (23, 23, 2)]


def test_equals_are_taken_in_the_order_drawn(toy):
    # both right answers are equal, and so are both wrong ones: the first of each, whatever their lengths
    (pair,) = mine_pairs([toy.group([1.0, 1.0, 0.0, 0.0], ids=TIED)]).pairs
    assert (pair.chosen.ids, pair.rejected.ids) == ((20, 20, 2), (22, 2))


def test_length_decides_among_equals_when_asked_to(toy):
    # the shorter right answer is chosen, the longer wrong one rejected; of two as long the first drawn
    (pair,) = mine_pairs([toy.group([1.0, 1.0, 0.0, 0.0], ids=TIED)], tie="shorter").pairs
    assert (pair.chosen.ids, pair.rejected.ids) == ((21, 2), (23, 23, 2))
    (same,) = mine_pairs([toy.group([0.0, 1.0, 0.0, 1.0])], tie="shorter").pairs
    assert (same.chosen.ids, same.rejected.ids) == ((21, 2), (20, 2))


@pytest.mark.parametrize("tie", ["drawn", "shorter"])
def test_length_makes_no_preference(toy, tie):
    mined = mine_pairs([toy.group([1.0, 1.0], ids=[(20, 2), (21, 21, 21, 2)])], tie)
    assert (mined.pairs, mined.tied) == ((), 1)


def test_every_group_is_accounted_for(toy):
    groups = [toy.group([1.0, 0.0]), toy.group([1.0, 1.0]), toy.group([1.0, None]), toy.group([0.0, 1.0])]
    mined = mine_pairs(groups)
    assert (len(mined.pairs), mined.tied, mined.incomplete) == (2, 1, 1)
    assert len({pair.id for pair in mined.pairs}) == 2  # one task drawn twice is two pairs
