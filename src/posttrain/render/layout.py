"""What a chat template writes around the messages: found by rendering it with place-holders, never by parsing its output.

The template is rendered once per sequence of roles with each content replaced by a unique place-holder; the text between the
place-holders is the template's own. The same template is then rendered with the real contents and must give the same string, so that a
template which drops, repeats or rewrites content is refused instead of producing a wrong mask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from posttrain.core.errors import RenderError
from posttrain.core.tasks import Message, Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PINNED_DATE = date(2024, 7, 26)
"""Printed by templates that ask for today's date: a prompt that changes from day to day cannot be repeated."""
LAYOUTS = 4096
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_PROBE = "\n \n"
_LEFT: dict[str, str | None] = {"\n \n": "", " \n": "\n", "": None}
_RIGHT: dict[str, str | None] = {"\n \n": "", "\n ": "\n", "": None}


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one message's content goes. `left` and `right` are what the template strips off it, as arguments of `str.strip`.

    Example: Slot(message=0, left=None, right=None) for a template that prints `message.content | trim`; "" strips nothing.
    """

    message: int
    left: str | None
    right: str | None

    def trim(self, content: str) -> str:
        return content.lstrip(self.left).rstrip(self.right)


@dataclass(frozen=True, slots=True)
class Layout:
    """The template's text around the contents of one sequence of roles: n slots between n + 1 texts.

    Example: Layout(texts=("<|bos|><|user|>", "<|end|><|assistant|>"), slots=(Slot(0, "", ""),))
    """

    texts: tuple[str, ...]
    slots: tuple[Slot, ...]


class ChatTemplate:
    """The chat template of a tokenizer. Raises RenderError if there is none."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        chosen = tokenizer.chat_template
        if isinstance(chosen, dict):
            chosen = chosen.get("default")
        if not chosen:
            raise RenderError(
                "the tokenizer has no chat template; set tokenizer.chat_template or use the instruction-tuned model's tokenizer"
            )
        self.original: str = chosen
        self.source = _CLOCK.sub(lambda call: repr(PINNED_DATE.strftime(call[2])), chosen)
        if "strftime_now(" in self.source:
            raise RenderError("the chat template prints today's date in a computed format; write a fixed date into the template")
        self._tokenizer = tokenizer
        self._mark = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in self.source)
        self._place = re.compile(f"{self._mark}(\\d+){self._mark}")
        self.layout = lru_cache(maxsize=LAYOUTS)(self._layout)
        """`layout(roles, cue)`: cached, see `_layout`."""

    @property
    def reads_clock(self) -> bool:
        return self.source != self.original

    def render(self, roles: Sequence[str], contents: Sequence[str], cue: bool) -> str:
        """The template's text for these messages; `cue` asks for the generation prompt. Raises RenderError if it refuses."""
        chat = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            text = self._tokenizer.apply_chat_template(chat, chat_template=self.source, tokenize=False, add_generation_prompt=cue)
        except TemplateError as error:
            raise RenderError(f"the chat template refuses the roles {', '.join(roles)}: {error}; change the data or the template") from None
        assert isinstance(text, str)
        return text

    def _layout(self, roles: tuple[Role, ...], cue: bool) -> Layout:
        """Layout of a sequence of roles. Raises RenderError if a content is dropped, repeated, or its white space changed oddly."""
        texts, order = self._pieces(roles, cue, "", "")
        for index, role in enumerate(roles):
            if order.count(index) != 1:
                raise RenderError(
                    f"the chat template prints message {index} ({role}) {order.count(index)} times, not once; use a template that keeps it"
                )
        led, _ = self._pieces(roles, cue, _PROBE, "")
        trailed, _ = self._pieces(roles, cue, "", _PROBE)
        slots = []
        for place, index in enumerate(order):
            left = led[place][len(texts[place]) :]
            right = trailed[place + 1][: len(trailed[place + 1]) - len(texts[place + 1])]
            if left not in _LEFT or right not in _RIGHT:
                raise RenderError(f"the chat template changes white space inside message {index} ({roles[index]}); use one that does not")
            slots.append(Slot(index, _LEFT[left], _RIGHT[right]))
        return Layout(tuple(texts), tuple(slots))

    def _pieces(self, roles: tuple[Role, ...], cue: bool, before: str, after: str) -> tuple[list[str], list[int]]:
        """Texts between the place-holders, and the message index of each place-holder in order of appearance."""
        contents = [f"{before}{self._mark}{index}{self._mark}{after}" for index in range(len(roles))]
        parts = self._place.split(self.render(roles, contents, cue))
        return parts[::2], [int(index) for index in parts[1::2]]

    def fill(self, layout: Layout, messages: Sequence[Message], cue: bool) -> list[str]:
        """The content of each slot as the template prints it. Raises RenderError if the real rendering is not layout plus contents."""
        roles = [message.role for message in messages]
        contents = [slot.trim(messages[slot.message].content) for slot in layout.slots]
        if self.render(roles, [message.content for message in messages], cue) != _join(layout.texts, contents):
            raise RenderError(self._rewritten(layout, messages, cue))
        return contents

    def _rewritten(self, layout: Layout, messages: Sequence[Message], cue: bool) -> str:
        """Which message the template rewrites: each is tried alone, the others being neutral."""
        roles = [message.role for message in messages]
        for place, slot in enumerate(layout.slots):
            message = messages[slot.message]
            alone = ["x"] * len(messages)
            alone[slot.message] = message.content
            expected = ["x"] * len(messages)
            expected[place] = slot.trim(message.content)
            if self.render(roles, alone, cue) != _join(layout.texts, expected):
                what = "thinking blocks" if "think>" in message.content else f"content {message.content[:40]!r}"
                return (
                    f"the chat template rewrites or drops {what} of message {slot.message} ({message.role}), so its tokens would not be "
                    "those of the data; take that text out of the data or use a template that prints content as it is"
                )
        return "the chat template prints these messages differently when they come together; use a template that prints content as it is"


def _join(texts: Sequence[str], contents: Sequence[str]) -> str:
    return texts[0] + "".join(content + text for content, text in zip(contents, texts[1:], strict=True))
