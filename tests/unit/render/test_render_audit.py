"""The audit of chat templates, and the patch that adds {% generation %} tags."""

from __future__ import annotations

import pytest
from render_templates import CHATML, EOT, HEADERS, IM_END, THINKING, byte_tokenizer

from posttrain.core.errors import RenderError
from posttrain.core.tasks import Message
from posttrain.core.trajectory import Owner
from posttrain.models.tokenizer import CHAT_TEMPLATE, build_tokenizer
from posttrain.render import audit as audit_module
from posttrain.render.audit import audit, patch_generation
from posttrain.render.renderer import ChatRenderer

BARE = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def test_own_tokenizer_has_no_problems():
    found = audit(build_tokenizer([], 265))
    assert found.has_template
    assert found.generation_tags
    assert (found.hf_mask, found.ids_match, found.prefix_preserved) == ("equal", True, True)
    assert found.default_system is None
    assert found.stop_ids == (2, 6)
    assert found.problems == ()


def test_missing_template_is_a_finding():
    found = audit(byte_tokenizer(None))
    assert not found.has_template
    assert "no chat template" in found.problems[0]


def test_template_without_tags_has_a_mask_of_zeros():
    found = audit(byte_tokenizer(CHATML))
    assert (found.generation_tags, found.hf_mask, found.ids_match) == (False, "zero", True)
    assert found.stop_ids == (IM_END,)
    assert any("no {% generation %} tags" in line for line in found.problems)


def test_default_system_prompt_is_found():
    assert audit(byte_tokenizer(CHATML)).default_system == "Be good."
    assert audit(byte_tokenizer(HEADERS)).default_system is None
    assert audit(byte_tokenizer(THINKING)).default_system is None


def test_pad_equal_to_eos_is_reported():
    assert any("pad is the same token as eos" in line for line in audit(byte_tokenizer(CHATML)).problems)


def test_rewritten_thinking_is_found():
    found = audit(byte_tokenizer(THINKING))
    assert not found.prefix_preserved
    assert any("<think> blocks of earlier answers" in line for line in found.problems)
    assert audit(byte_tokenizer(CHATML)).prefix_preserved


def test_text_between_cue_and_answer_is_found():
    template = CHATML.replace("message['content']", "('<think>\n' if message['role'] == 'assistant' else '') + message['content']")
    found = audit(byte_tokenizer(template))
    assert not found.prefix_preserved
    assert any("does not preserve the prompt" in line for line in found.problems)


def test_tags_around_everything_give_a_mask_of_ones():
    template = "{% generation %}" + CHATML + "{% endgeneration %}"
    found = audit(byte_tokenizer(template))
    assert (found.generation_tags, found.hf_mask) == (True, "all")
    assert any("but: all" in line for line in found.problems)


def test_tags_that_miss_the_closing_token_are_different():
    end = "{{ message['content'] + '<|end|>' }}{% endgeneration %}"
    tokenizer = build_tokenizer([], 265)
    tokenizer.chat_template = CHAT_TEMPLATE.replace(end, "{{ message['content'] }}{% endgeneration %}{{ '<|end|>' }}")
    assert audit(tokenizer).hf_mask == "different"


def test_unclosed_turns_are_a_finding():
    found = audit(byte_tokenizer("{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"))
    assert found.hf_mask == "unknown"
    assert "could not learn to stop" in found.problems[0]


def test_clock_is_reported():
    template = CHATML.replace("Be good.", "Today is ' + strftime_now('%d %b %Y') + '.")
    assert any("today's date" in line for line in audit(byte_tokenizer(template)).problems)


@pytest.mark.parametrize(
    ("template", "stops"),
    [
        (CHATML, (IM_END,)),
        (HEADERS, (EOT, IM_END)),
        (CHATML.replace("'<|im_end|>' + '\n'", "'<|im_end|>\n'"), (IM_END,)),
        (CHATML.replace("message['content'] + '<|im_end|>' + '\n'", 'message.content + eos_token + "\\n"'), (IM_END,)),
        (CHATML.replace("{{'<|im_start|>' + message", "{{- '<|im_start|>' + message"), (IM_END,)),
    ],
)
def test_patched_template_gives_our_mask(template, stops):
    patched = patch_generation(template)
    found = audit(byte_tokenizer(patched))
    assert found.generation_tags
    assert found.hf_mask == "equal"
    assert found.stop_ids == tuple(sorted(stops))
    chat = [Message("user", "hi"), Message("assistant", " a\n"), Message("user", ""), Message("assistant", "")]
    before, after = ChatRenderer(byte_tokenizer(template)), ChatRenderer(byte_tokenizer(patched))
    assert before.conversation(chat) == after.conversation(chat)


def test_patched_mask_written_out():
    tokenizer = byte_tokenizer(patch_generation(CHATML))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}]
    rendered = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert rendered["assistant_masks"][-5:] == [0, 1, 1, 1, 0]  # line break of the header, a, b, <|im_end|>, line break
    assert sum(rendered["assistant_masks"]) == 3
    owners = ChatRenderer(tokenizer).conversation([Message("user", "hi"), Message("assistant", "ab")]).owners
    assert rendered["assistant_masks"] == [int(owner is Owner.DEMONSTRATED) for owner in owners]


def test_own_template_is_patched_and_left_alone_once_tagged():
    assert patch_generation(CHAT_TEMPLATE) == CHAT_TEMPLATE
    tokenizer = build_tokenizer([], 265)
    tokenizer.chat_template = patch_generation(BARE)
    assert audit(tokenizer).hf_mask == "equal"


@pytest.mark.parametrize(
    "template",
    [
        THINKING,  # content goes through a variable
        CHATML + "{% if message.tool_calls %}{% endif %}",
        CHATML.replace(" + '<|im_end|>'", " + '.'"),  # no token closes the turn
        "{% generation %}" + CHATML + "{% endgeneration %}",  # tags in the wrong place
    ],
)
def test_other_templates_are_refused(template):
    with pytest.raises(RenderError, match="own masks do not need the tags"):
        patch_generation(template)


def test_a_patch_that_changes_the_text_is_refused(monkeypatch):
    cut = audit_module._tagged
    monkeypatch.setattr(audit_module, "_tagged", lambda found: "{{ '.' }}" + cut(found))
    with pytest.raises(RenderError, match="would change or miss"):
        patch_generation(CHATML)
