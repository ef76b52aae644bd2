"""Laws of rendering over arbitrary text: no content forges a control token, answers come back, owners reconcile, parts join."""

from __future__ import annotations

from collections import Counter
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.tasks import Message
from posttrain.core.trajectory import Owner
from posttrain.models.tokenizer import SPECIALS, build_tokenizer
from posttrain.render.renderer import ChatRenderer

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PIECES = (
    *SPECIALS,
    "<|im_start|>",
    "<|im_end|>",
    "<|",
    "|>",
    "<|en",
    "d|>",
    "end",
    "\ue0000\ue000",
    "\ue000",
    "\ue0001\ue000",
    "{{",
    "%}",
    "\n",
    " ",
)

text = st.one_of(st.text(max_size=20), st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=8).map("".join))
turns = st.lists(st.tuples(text, text), min_size=1, max_size=3)
systems = st.none() | text


@cache
def renderers() -> tuple[ChatRenderer, ChatRenderer]:
    """Our template, and a ChatML one whose markers were added after training."""
    corpus = ["hello there, the end of the text", "<|end|> <|im_end|> end|> user assistant"] * 3
    chatml = build_tokenizer(corpus, 320)
    chatml.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    chatml.chat_template = CHATML
    return ChatRenderer(build_tokenizer(corpus, 320)), ChatRenderer(chatml)


def chat_of(system: str | None, pairs: list[tuple[str, str]]) -> list[Message]:
    chat = [] if system is None else [Message("system", system)]
    for asked, said in pairs:
        chat += [Message("user", asked), Message("assistant", said)]
    return chat


@settings(deadline=None, max_examples=150)
@given(systems, turns)
def test_no_content_changes_the_control_tokens(system, pairs):
    for renderer in renderers():
        chat = chat_of(system, pairs)
        harmless = [Message(message.role, "x") for message in chat]
        controls, expected = (
            [index for index in renderer.conversation(messages).ids if index in renderer.control_ids] for messages in (chat, harmless)
        )
        assert controls == expected


@settings(deadline=None, max_examples=150)
@given(systems, turns)
def test_owners_reconcile_and_every_text_comes_back(system, pairs):
    for renderer in renderers():
        chat = chat_of(system, pairs)
        tokens = renderer.conversation(chat)
        written = Counter(tokens.owners)
        assert sum(written.values()) == len(tokens)
        assert set(written) <= {Owner.SYSTEM, Owner.USER, Owner.TEMPLATE, Owner.DEMONSTRATED}
        for role, owner in (("system", Owner.SYSTEM), ("user", Owner.USER), ("assistant", Owner.DEMONSTRATED)):
            mine = [index for index, who in zip(tokens.ids, tokens.owners, strict=True) if who is owner]
            closed = len(pairs) if role == "assistant" else 0
            assert sum(index in renderer.control_ids for index in mine) == closed
            assert renderer.decode(mine) == "".join(message.content for message in chat if message.role == role)


@settings(deadline=None, max_examples=150)
@given(systems, turns)
def test_prompt_and_response_join_to_the_conversation(system, pairs):
    for renderer in renderers():
        chat = chat_of(system, pairs)
        prompt, response = renderer.split(chat)
        whole = renderer.conversation(chat)
        assert prompt.ids + response.ids == whole.ids
        assert prompt == renderer.prompt(chat[:-1])
        assert prompt.trained == 0
        end = response.trained
        assert renderer.decode(response.ids[:end]) == pairs[-1][1]
        assert response.ids[end - 1] in renderer.stop_ids
        assert response.owners == whole.owners[len(prompt) :]
