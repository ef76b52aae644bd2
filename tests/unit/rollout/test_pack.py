"""Packing: every trained token exactly once, padded tails, shared prompts, whole groups; and shards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.errors import DataError
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.rollout.pack import Packing, pack, shard

S = Owner.SAMPLED


def test_the_documented_example(toy):
    # a prompt of 3 with continuations (7, 2) and (8, 2): their last tokens are predicted, never read
    (batch,) = pack([toy.row((4, 5, 6), (7, 2)), toy.row((4, 5, 6), (8, 2))], Packing())
    assert batch.ids_RW.tolist() == [[4, 5, 6, 7, 8]]
    assert batch.document_RW.tolist() == [[0, 0, 0, 0, 0]]
    assert batch.branch_RW.tolist() == [[0, 0, 0, 1, 2]]
    assert batch.position_RW.tolist() == [[0, 1, 2, 3, 3]]
    assert batch.source_N.tolist() == [2, 3, 2, 4]
    assert batch.target_N.tolist() == [7, 2, 8, 2]
    assert batch.slot_BT.tolist() == [[0, 1], [2, 3]]
    assert batch.sample_B == (0, 1)


def test_the_attention_of_two_documents_and_a_padding_slot(toy):
    # widths 4 (prompt 2, branches of one each) and 2, padded to 7 by a longer second row
    rows = [
        toy.row((4, 5), (7, 2), "a"),
        toy.row((4, 5), (8, 2), "a"),
        toy.row((6,), (9, 2), "b"),
        toy.row((1,), (9, 9, 9, 9, 9, 9, 2), "c"),
    ]
    (batch,) = pack(rows, Packing(row_tokens=7))
    assert batch.ids_RW[1].tolist() == [4, 5, 7, 8, 6, 9, 0]
    assert batch.document_RW[1].tolist() == [0, 0, 0, 0, 1, 1, -1]
    assert batch.attention_R1WW()[1, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


def test_streams_follow_their_rows(toy):
    rows = [
        toy.row((1,), (7, 2), "a", advantage=0.5, logps=(-0.1, -0.2)),
        toy.row((1,), (8, 9, 2), "b", advantage=-0.5, logps=(-1.0, -2.0, -3.0)),
    ]
    (batch,) = pack(rows, Packing())
    place = batch.sample_B.index(1)
    assert batch.advantage_BT[place].tolist() == [-0.5, -0.5, -0.5]
    assert batch.behaviour_BT[place].tolist() == [-1.0, -2.0, -3.0]
    assert batch.advantage_BT[1 - place].tolist() == [0.5, 0.5, 0.0]
    torch.testing.assert_close(batch.behaviour_BT[1 - place], torch.tensor([-0.1, -0.2, 0.0]))


ANSWERS = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.tuples(st.integers(10, 59), st.booleans()), min_size=1, max_size=20)), min_size=1, max_size=14
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(answers=ANSWERS, row_tokens=st.integers(1, 40), micro=st.integers(1, 100), share=st.booleans(), whole=st.booleans())
def test_conservation(answers, row_tokens, micro, share, whole):
    rows = []
    for group, tokens in answers:
        owners = tuple(Owner.SAMPLED if trained else Owner.TOOL for _, trained in tokens)
        prompt = Tokens((1, 2 + group), (Owner.USER, Owner.USER))
        rows.append(Sample(prompt, Tokens(tuple(token for token, _ in tokens), owners), f"{group}"))
    batches = pack(rows, Packing(row_tokens=row_tokens, micro_tokens=micro), share_prompts=share, whole_groups=whole)
    seen = [index for batch in batches for index in batch.sample_B]
    assert sorted(seen) == list(range(len(rows)))
    for batch in batches:
        # trained ids are exactly the sampled ids, in order, each predicted from the slot before it
        for row, index in enumerate(batch.sample_B):
            sample = rows[index]
            slots = batch.slot_BT[row, : len(sample.tokens)]
            wanted = [owner is Owner.SAMPLED for owner in sample.tokens.owners]
            assert (slots >= 0).tolist() == wanted
            assert (batch.slot_BT[row, len(sample.tokens) :] == -1).all()
            history = [sample.prompt.ids[-1], *sample.tokens.ids[:-1]]
            for k, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    source = batch.source_N[slot]
                    assert batch.target_N[slot] == sample.tokens.ids[k]
                    assert batch.ids_RW.flatten()[source] == history[k]
                    assert batch.position_RW.flatten()[source] == len(sample.prompt) - 1 + k
        assert len(batch.target_N) == sum(rows[index].tokens.trained for index in batch.sample_B)
        read = sum(len(rows[i].tokens) - 1 for i in batch.sample_B)
        prompts = int(((batch.branch_RW == 0) & (batch.document_RW >= 0)).sum())
        padding = int((batch.document_RW < 0).sum())
        assert read + prompts + padding == batch.ids_RW.numel()
    if whole:
        for batch in batches:
            inside = {rows[i].group for i in batch.sample_B}
            assert not any(rows[i].group in inside for other in batches if other is not batch for i in other.sample_B)


def test_a_row_longer_than_the_width_is_not_cut(toy):
    (batch,) = pack([toy.row((1, 2), tuple(range(10, 40)))], Packing(row_tokens=8))
    assert batch.ids_RW.shape == (1, 31)  # 2 + 30 - 1
    assert len(batch.target_N) == 30


def test_ragged_tail_is_padded(toy):
    # five documents of 6, width 16: two per row, and the last row is padded to 12
    rows = [toy.row((1,), (9, 9, 9, 9, 9, 2), f"{i}") for i in range(5)]
    (batch,) = pack(rows, Packing(row_tokens=16))
    assert batch.ids_RW.shape == (3, 12)
    assert int((batch.document_RW < 0).sum()) == 6
    assert len(batch.target_N) == 30


def test_one_prompt_however_many_siblings(toy):
    # 4 siblings of 3 tokens after a prompt of 10: 10 + 4 x 2 = 18 slots, not 48
    rows = [toy.row(tuple(range(10, 20)), (20 + i, 21, 2)) for i in range(4)]
    (shared,) = pack(rows, Packing())
    (apart,) = pack(rows, Packing(), share_prompts=False)
    assert shared.ids_RW.numel() == 18
    assert apart.ids_RW.numel() == 48


def test_micro_batches_respect_the_token_budget(toy):
    rows = [toy.row((1,), (9, 9, 9, 2), f"{i}") for i in range(10)]
    batches = pack(rows, Packing(row_tokens=4, micro_tokens=12))
    assert [batch.ids_RW.shape for batch in batches] == [(3, 4), (3, 4), (3, 4), (1, 4)]


def test_one_group_with_two_prompts_is_refused(toy):
    with pytest.raises(ValueError, match="two different prompts"):
        pack([toy.row((1,), (2,)), toy.row((3,), (2,))], Packing())


def test_nothing_to_pack():
    assert pack([], Packing()) == []


def test_shards_partition_whole_groups_and_balance_tokens(toy):
    # costs 1 + 10, 1 + 6, 1 + 3, 1 + 2: largest first, each to the lightest: {11}, {7, 4}, then 3 to the first
    rows = [toy.row((1,), (9,) * n, name) for name, n in (("a", 10), ("b", 6), ("c", 3), ("d", 2))]
    parts = [[row.group for row in shard(rows, rank, 2)] for rank in range(2)]
    assert parts == [["a", "d"], ["b", "c"]]
    siblings = [toy.row((1,), (9, 2), "x"), toy.row((1,), (8, 2), "y"), toy.row((1,), (7, 2), "x")]
    whole = [[row.tokens.ids for row in shard(siblings, rank, 2)] for rank in range(2)]
    assert whole == [[(9, 2), (7, 2)], [(8, 2)]]


def test_a_rank_may_get_nothing(toy):
    assert shard([toy.row((1,), (2,))], 1, 3) == []


def test_candidates_stand_by_the_place_of_their_token(toy):
    # the longer second row is packed first: targets 9, 9, 2, then 7 (the forced 8 is untrained), 2
    rows = [
        replace(toy.row((4, 5), (7, 8, 2), "a", owners=[S, Owner.FORCED, S]), candidates=((7, 11), (), (2,))),
        replace(toy.row((6, 6, 6), (9, 9, 2), "b"), candidates=((9,), (3, 9, 10), ())),
    ]
    (batch,) = pack(rows, Packing(row_tokens=5))
    assert batch.target_N.tolist() == [9, 9, 2, 7, 2]
    assert batch.candidate_M2 is not None
    assert batch.candidate_M2.tolist() == [[0, 9], [1, 3], [1, 9], [1, 10], [3, 7], [3, 11], [4, 2]]
    mixed = [rows[0], toy.row((6, 6, 6), (9, 9, 2), "b")]
    (batch,) = pack(mixed, Packing(row_tokens=5))
    assert batch.candidate_M2 is not None
    assert batch.candidate_M2.tolist() == [[3, 7], [3, 11], [4, 2]]
    (batch,) = pack(mixed[1:], Packing())
    assert batch.candidate_M2 is None


def test_candidates_that_lack_the_drawn_token_are_a_wrong_record(toy):
    row = toy.row((4, 5), (7, 2))
    with pytest.raises(DataError, match=r"drew token 2 from candidates that lack it, \[3, 4\]"):
        pack([replace(row, candidates=((7,), (3, 4)))], Packing())
    with pytest.raises(DataError, match="group 'g': 1 candidate sets for 2 tokens"):
        pack([replace(row, candidates=((7,),))], Packing())
