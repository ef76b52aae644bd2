"""Preflight of words: what a healthy tokenizer passes, and one sick one per check that fails."""

import copy
from dataclasses import replace

import pytest
import torch

from posttrain.checks import preflight_text as words
from posttrain.core.tasks import Message, Task
from posttrain.core.trajectory import Owner, Sample, Tokens
from posttrain.engine.batch import Batch
from posttrain.models.tokenizer import CHAT_TEMPLATE, build_tokenizer
from posttrain.render.renderer import ChatRenderer
from posttrain.rewards.graders import HashMarkerGrader
from posttrain.rollout.pack import Packing, pack
from posttrain.rollout.samples import supervised_sample


def owned(tokens: Tokens, old: Owner, new: Owner) -> Tokens:
    """The same ids with tokens of one owner given to another."""
    return Tokens(tokens.ids, tuple(new if owner is old else owner for owner in tokens.owners))


@pytest.fixture
def rows(toy) -> list[words.Row]:
    return words.rendered_rows(toy.renderer)


def test_probe_rows_hold_a_system_and_a_tool_turn(toy, rows):
    assert [row.messages[0].role for row in rows] == ["user", "user", "system", "user"]
    assert any(message.role == "tool" for message in rows[-1].messages)


def test_a_template_without_tool_turns_has_fewer_rows():
    tokenizer = build_tokenizer([], 265)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['role'] == 'tool'", "false")
    assert len(words.rendered_rows(ChatRenderer(tokenizer))) == 3


def test_spans_are_runs_of_neighbours():
    tokens = Tokens((1, 2, 3, 4, 5), (Owner.USER, Owner.SAMPLED, Owner.SAMPLED, Owner.TOOL, Owner.SAMPLED))
    assert words.spans(tokens, lambda owner: owner is Owner.SAMPLED) == [(2, 3), (5,)]
    assert words.spans(tokens, lambda owner: owner is Owner.SYSTEM) == []


def test_a_healthy_template_passes(toy):
    found = words.template_check(toy.tokenizer, toy.renderer, ChatRenderer(toy.tokenizer))
    assert found.passed is True
    assert toy.renderer.digest in found.detail


def test_a_template_that_another_path_writes_differently_fails(toy):
    other = build_tokenizer([], 265)
    other.chat_template = CHAT_TEMPLATE.replace("message['content'] + '<|end|>'", "message['content'] + ' <|end|>'")
    found = words.template_check(toy.tokenizer, toy.renderer, ChatRenderer(other))
    assert found.passed is False
    assert found.catalog == ("F12", "P25")
    assert "other ids" in found.detail


def test_another_system_prompt_is_another_path(toy):
    assert words.template_check(toy.tokenizer, toy.renderer, ChatRenderer(toy.tokenizer, system="Be kind.")).passed is False


def test_a_cue_that_the_conversation_does_not_continue_fails(toy):
    tokenizer = build_tokenizer([], 265)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ '<|assistant|>' }}{% else %}", "{{ '<|assistant|>' }}{{ 'Well: ' }}{% else %}")
    renderer = ChatRenderer(tokenizer)
    found = words.template_check(tokenizer, renderer, ChatRenderer(tokenizer))
    assert found.passed is False
    assert "does not preserve the prompt" in found.detail


def test_a_template_that_drops_earlier_thinking_asks_for_a_look():
    tokenizer = build_tokenizer([], 265)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "{{ message['content'] + '<|end|>' }}{% endgeneration %}",
        "{{ (message['content'] if loop.last else message['content'].split('</think>')[-1]) + '<|end|>' }}{% endgeneration %}",
    )
    renderer = ChatRenderer(tokenizer)
    found = words.template_check(tokenizer, renderer, ChatRenderer(tokenizer))
    assert found.passed is None
    assert "rewrites" in found.detail


def test_a_tokenizer_without_template_fails(toy):
    bare = build_tokenizer([], 265)
    bare.chat_template = None
    assert words.template_check(bare, toy.renderer, toy.renderer).passed is False


def test_the_rendered_digest_follows_the_template(toy):
    tokenizer = build_tokenizer([], 265)
    assert words.rendered_digest(ChatRenderer(tokenizer)) == words.rendered_digest(toy.renderer)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("'<|bos|>'", "'<|bos|> '")
    assert words.rendered_digest(ChatRenderer(tokenizer)) != words.rendered_digest(toy.renderer)


def test_special_tokens_are_looked_at(toy):
    found = words.tokenizer_check(toy.tokenizer, toy.renderer, 265)
    assert (found.passed, found.value, found.bound) == (True, 265, 265)
    small = words.tokenizer_check(toy.tokenizer, toy.renderer, 264)
    assert small.passed is False
    assert "265 ids and the model 264 embeddings" in small.detail


def test_two_bos_tokens_are_found():
    tokenizer = build_tokenizer([], 265)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("{{ '<|bos|>' }}", "{{ '<|bos|><|bos|>' }}")
    found = words.tokenizer_check(tokenizer, ChatRenderer(tokenizer), 265)
    assert found.passed is False
    assert "two bos" in found.detail


def test_pad_that_is_eos_is_mentioned_and_harmless():
    tokenizer = build_tokenizer([], 265)
    tokenizer.pad_token = tokenizer.eos_token
    found = words.tokenizer_check(tokenizer, ChatRenderer(tokenizer), 265)
    assert found.passed is True
    assert "pad is eos" in found.detail


def test_a_user_who_can_write_control_tokens_is_found(toy):
    class Forgeable:
        stop_ids, control_ids = toy.renderer.stop_ids, toy.renderer.control_ids
        prompt = toy.renderer.prompt

        def conversation(self, messages):
            return Tokens((1, 4, 2, 6), (Owner.TEMPLATE, Owner.TEMPLATE, Owner.USER, Owner.TEMPLATE))

    found = words.tokenizer_check(toy.tokenizer, Forgeable(), 265)
    assert found.passed is False
    assert "control tokens" in found.detail


def test_a_healthy_mask_is_what_the_assistant_said(toy, rows):
    found = words.mask_check(rows, toy.renderer)
    assert found.passed is True
    # by letters, each with its end: "It is 5." 8; the same and "It is 10." 9; "Yes." 4; "I ask the calculator." 21 and "It is 391." 10
    assert found.value == 9 + (9 + 10) + 5 + (22 + 11)


@pytest.mark.parametrize("writer", [Owner.TOOL, Owner.USER, Owner.SYSTEM])
def test_trained_tokens_of_others_are_found(toy, rows, writer):
    sick = [replace(row, tokens=owned(row.tokens, writer, Owner.DEMONSTRATED)) for row in rows]
    found = words.mask_check(sick, toy.renderer)
    assert found.passed is False
    assert found.catalog == ("F10", "P5", "P23")


def test_tool_text_owned_by_the_user_is_found(toy, rows):
    sick = [replace(row, tokens=owned(row.tokens, Owner.TOOL, Owner.USER)) for row in rows]
    found = words.mask_check(sick, toy.renderer)
    assert found.passed is False
    assert "tool text ['17 * 23 = 391'] is owned as []" in found.detail


def test_a_closing_token_that_is_not_trained_is_found(toy, rows):
    tokens = rows[0].tokens
    owners = list(tokens.owners)
    last = max(place for place, owner in enumerate(owners) if owner is Owner.DEMONSTRATED)
    owners[last] = Owner.TEMPLATE
    found = words.mask_check([replace(rows[0], tokens=Tokens(tokens.ids, tuple(owners)))], toy.renderer)
    assert found.passed is False
    assert "closes no turn" in found.detail


def test_an_assistant_turn_that_is_not_trained_is_found(toy, rows):
    # only the last turn of two is trained
    tokens, owners = rows[1].tokens, list(rows[1].tokens.owners)
    first = owners.index(Owner.DEMONSTRATED)
    while owners[first] is Owner.DEMONSTRATED:
        owners[first] = Owner.FORCED
        first += 1
    assert words.mask_check([replace(rows[1], tokens=Tokens(tokens.ids, tuple(owners)))], toy.renderer).passed is False


@pytest.fixture
def packed(rows) -> tuple[list[Sample], list[Batch]]:
    samples = [supervised_sample(row.tokens, str(place)) for place, row in enumerate(rows)]
    tokens = samples[0].tokens
    samples.append(Sample(samples[0].prompt, Tokens(tokens.ids[:-1], tokens.owners[:-1]), "cut"))
    return samples, pack(samples, Packing(row_tokens=64))


def test_packing_keeps_every_trained_token_also_of_a_row_without_eos(packed):
    samples, batches = packed
    found = words.packing_check(samples, batches)
    assert found.passed is True
    assert found.value == found.bound == 66 + 8  # the rows of the test above, and "It is 5." cut before its end


def test_a_row_that_loses_its_last_token_is_found(packed):
    samples, batches = packed
    batch = batches[0]
    slots = batch.slot_BT.clone()
    row = slots[0]
    row[int((row >= 0).nonzero().max())] = -1
    found = words.packing_check(samples, [replace(batch, slot_BT=slots), *batches[1:]])
    assert found.passed is False
    assert found.catalog == ("P5",)


def test_padding_that_is_trained_is_found(packed):
    samples, batches = packed
    batch = next(batch for batch in batches if bool((batch.document_RW < 0).any()))
    source = batch.source_N.clone()
    source[0] = int((batch.document_RW.flatten() < 0).nonzero()[0])
    found = words.packing_check(samples, [replace(batch, source_N=source), *(other for other in batches if other is not batch)])
    assert found.passed is False
    assert "padding slot" in found.detail


def test_other_targets_and_missing_rows_are_found(packed):
    samples, batches = packed
    swapped = replace(batches[0], target_N=torch.roll(batches[0].target_N, 1))
    assert "not its own" in words.packing_check(samples, [swapped, *batches[1:]]).detail
    missing = words.packing_check([*samples, samples[0]], batches)
    assert missing.passed is False
    assert "in no batch" in missing.detail


def task(answer: str = "5") -> Task:
    return Task("sum", (Message("user", "2 + 3? Answer after '####'."),), answer)


def test_gold_that_is_rendered_and_decoded_scores(toy):
    assert words.answer_check([task()], lambda task: f"#### {task.answer}", HashMarkerGrader(), toy.renderer).passed is True


def test_gold_in_another_form_than_the_grader_reads_is_found(toy):
    found = words.answer_check([task(), task()], lambda task: f"The answer is {task.answer}", HashMarkerGrader(), toy.renderer)
    assert (found.passed, found.value) == (False, 2)
    assert "unparseable" in found.detail


def test_a_check_changes_nothing(toy, rows):
    before = copy.deepcopy(rows)
    words.mask_check(rows, toy.renderer)
    assert rows == before
