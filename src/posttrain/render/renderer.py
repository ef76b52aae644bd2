"""Messages -> token ids with an owner for each: the one place where a conversation becomes tokens.

The mask of a training row is derived from the owners. An assistant turn is trained on its content and on the token that closes it
(without which a model never learns to stop), and on nothing else: not on role markers, not on the line break after the closing token.
Sources: spec/ladder-at-100m.md H-1..H-4, C1, C2; spec/faults.md 40-50.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from posttrain.core.digest import digest
from posttrain.core.errors import DataError, RenderError
from posttrain.core.tasks import ROLES, Message, Role
from posttrain.core.trajectory import Owner, Tokens
from posttrain.render.codec import Codec, Position
from posttrain.render.layout import LAYOUTS, ChatTemplate, Layout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WRITERS: dict[Role, Owner] = {"system": Owner.SYSTEM, "user": Owner.USER, "tool": Owner.TOOL}
"""Who wrote a content; an assistant's depends on whether it is shown or trained."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout with its template text encoded. `pieces` are the ids of `layout.texts`; the other two have one entry per slot.

    Example: Plan(layout, pieces=((1, 4), (6, 5)), closing=(0,), positions=(Position.CONTROL,))
    """

    layout: Layout
    pieces: tuple[tuple[int, ...], ...]
    closing: tuple[int, ...]
    """How many tokens after the content close an assistant's turn; 0 for other roles."""
    positions: tuple[Position, ...]


class ChatRenderer:
    """Renders conversations with a tokenizer's own chat template.

    `system` is put in front of conversations that have no system turn. `max_prompt_tokens` refuses longer prompts: cutting one loses
    either the question or the generation cue. Raises RenderError if the tokenizer has no chat template, or one that never closes a turn.

    Example, with the template of posttrain.models.tokenizer:
        ChatRenderer(tokenizer).prompt([Message("user", "hi")]).ids == (1, 4, 80, 81, 6, 5)
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, system: str | None = None, max_prompt_tokens: int | None = None):
        self.system = system
        self.max_prompt_tokens = max_prompt_tokens
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer)
        self._codec = Codec(tokenizer)
        self._plan = lru_cache(maxsize=LAYOUTS)(self._make_plan)
        eos, pad = _token_id(tokenizer, "eos_token_id"), _token_id(tokenizer, "pad_token_id")
        self.control_ids: frozenset[int] = frozenset(self._codec.control)
        """Every added or special token: what no content can produce."""
        self.stop_ids: frozenset[int] = self._closing_ids() | {index for index in (eos,) if index is not None}
        """Tokens that close an assistant's turn, and the tokenizer's eos."""
        written = {index for piece in self._plan(("user",), True).pieces for index in piece}
        self.special_ids: frozenset[int] = self.stop_ids | frozenset(tokenizer.all_special_ids) | (self.control_ids & written)
        """What only the harness may write: special tokens and turn marks. Other added tokens (thinking marks) are words of the policy."""
        self.pad_id: int = pad if pad is not None else eos if eos is not None else 0
        """Fills rows. It may equal eos: padding is known by its position, not by its id."""
        self.digest: str = digest([self.template.source, self._codec.digest, tokenizer.special_tokens_map, system])
        """Identity of template, tokenizer and system prompt: equal digests give equal ids."""
        self._answers_at = self._after_cue()

    def prompt(self, messages: Sequence[Message]) -> Tokens:
        """The conversation so far and the cue that makes the assistant speak. Nothing in it is trained: earlier assistant turns are FORCED.

        Raises DataError if the last message is the assistant's own or the prompt is longer than `max_prompt_tokens`.
        """
        chat = self._chat(messages)
        if chat[-1].role == "assistant":
            raise DataError("a prompt must end with a user, tool or system message, but its last message is the assistant's; remove it")
        tokens = self._assemble(chat, cue=True, assistant=Owner.FORCED)
        if self.max_prompt_tokens is not None and len(tokens) > self.max_prompt_tokens:
            raise DataError(
                f"the prompt has {len(tokens)} tokens, more than max_prompt_tokens={self.max_prompt_tokens}; raise it or drop the row"
            )
        return tokens

    def conversation(self, messages: Sequence[Message]) -> Tokens:
        """A finished conversation to imitate: every assistant turn, its closing token included, is DEMONSTRATED.

        Raises DataError if there is no assistant turn, or if no token or every token would be trained.
        """
        chat = self._chat(messages)
        if all(message.role != "assistant" for message in chat):
            raise DataError(f"the conversation has {len(messages)} messages but no assistant turn, so nothing to train; drop the row")
        tokens = self._assemble(chat, cue=False, assistant=Owner.DEMONSTRATED)
        if not 0 < tokens.trained < len(tokens):
            raise DataError(
                f"{tokens.trained} of the conversation's {len(tokens)} tokens would be trained; it needs a prompt and an answer"
            )
        return tokens

    def split(self, messages: Sequence[Message]) -> tuple[Tokens, Tokens]:
        """Prompt and response of a row whose last message is the assistant's.

        The ids of the two together are those of `conversation(messages)`, the response starts with the first token of the last content,
        and only its tokens are trained (earlier assistant turns belong to the prompt and are FORCED). Raises DataError if the last message
        is not the assistant's, RenderError if the template writes the conversation differently from the prompt that led to it.
        """
        if not messages or messages[-1].role != "assistant":
            raise DataError("a prompt/response row must end with an assistant message; add the response or drop the row")
        prompt, whole = self.prompt(messages[:-1]), self.conversation(messages)
        roles = tuple(message.role for message in self._chat(messages))
        asked, answered = self._plan(roles[:-1], True).layout, self._plan(roles, False).layout
        starts = asked.texts == answered.texts[:-1] and asked.slots == answered.slots[:-1]
        if not starts or whole.ids[: len(prompt)] != prompt.ids:
            raise RenderError(
                f"the chat template does not preserve the prompt: before the answer it writes {answered.texts[-2][-60:]!r} in a finished "
                f"conversation but {asked.texts[-1][-60:]!r} as the generation cue; use a template that writes the same"
            )
        return prompt, Tokens(whole.ids[len(prompt) :], whole.owners[len(prompt) :])

    def reply(self, before: Sequence[Message], messages: Sequence[Message]) -> Tokens:
        """What the harness writes after an assistant's turn that has just closed: the template's text behind the closing token, `messages`,
        and the cue for the next turn. Nothing in it is trained.

        `before` ends with that assistant turn. Its own tokens stay as they were sampled: nothing before the new ones is rendered again, so
        only the roles in it matter. Raises RenderError if the template writes the turns before differently once others follow.
        """
        chat = self._chat(before)
        roles = tuple(message.role for message in chat)
        if roles[-1] != "assistant" or not messages:
            raise DataError("a reply needs messages, and an assistant's turn before them")
        place = len(roles)
        asked, plan = self._plan(roles[:-1], True), self._plan((*roles, *(message.role for message in messages)), True)
        if asked.layout.texts != plan.layout.texts[:place] or [slot.message for slot in plan.layout.slots[:place]] != list(range(place)):
            raise RenderError(
                "the chat template writes earlier turns differently once a reply follows, so sampled tokens would not keep their context; "
                "use a template that only appends"
            )
        filled: list[Message] = [*(Message(message.role, "x") for message in chat), *messages]
        contents = self.template.fill(plan.layout, filled, True)
        ids, owners = (
            list(plan.pieces[place][plan.closing[place - 1] :]),
            [Owner.TEMPLATE] * (len(plan.pieces[place]) - plan.closing[place - 1]),
        )
        for at in range(place, len(filled)):
            written = self._codec.encode_content(contents[at], plan.positions[at])
            ids += [*written, *plan.pieces[at + 1]]
            owners += [WRITERS.get(filled[plan.layout.slots[at].message].role, Owner.FORCED)] * len(written)
            owners += [Owner.TEMPLATE] * len(plan.pieces[at + 1])
        return Tokens(tuple(ids), tuple(owners))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion, control tokens left out. Bytes that are not UTF-8 become U+FFFD: text is only a view."""
        return self._codec.decode(ids, self._answers_at, self.special_ids)

    def _chat(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages with the default system prompt, if they have none of their own."""
        if not messages:
            raise DataError("the conversation has no messages; drop the row")
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                raise DataError(f"message {index} has role {message.role!r}; roles are {', '.join(ROLES)}")
            if not isinstance(message.content, str):
                raise DataError(f"message {index} ({message.role}) has content of type {type(message.content).__name__}; it must be text")
        if self.system is None or any(message.role == "system" for message in messages):
            return tuple(messages)
        return (Message("system", self.system), *messages)

    def _assemble(self, chat: Sequence[Message], *, cue: bool, assistant: Owner) -> Tokens:
        plan = self._plan(tuple(message.role for message in chat), cue)
        contents = self.template.fill(plan.layout, chat, cue)
        ids = list(plan.pieces[0])
        owners = [Owner.TEMPLATE] * len(ids)
        rows = zip(plan.layout.slots, contents, plan.pieces[1:], plan.closing, plan.positions, strict=True)
        for slot, content, piece, closing, position in rows:
            written = self._codec.encode_content(content, position)
            ids += written
            ids += piece
            owners += [WRITERS.get(chat[slot.message].role, assistant)] * len(written)
            owners += [assistant] * closing + [Owner.TEMPLATE] * (len(piece) - closing)
        return Tokens(tuple(ids), tuple(owners))

    def _make_plan(self, roles: tuple[Role, ...], cue: bool) -> Plan:
        layout = self.template.layout(roles, cue)
        pieces = tuple(
            self._codec.encode_template(text, Position.INSIDE if place else Position.START) for place, text in enumerate(layout.texts)
        )
        closing = tuple(
            self._closing(piece, text) if roles[slot.message] == "assistant" else 0
            for slot, piece, text in zip(layout.slots, pieces[1:], layout.texts[1:], strict=True)
        )
        positions = tuple(self._position_after(piece, place) for place, piece in enumerate(pieces[:-1]))
        return Plan(layout, pieces, closing, positions)

    def _closing(self, piece: tuple[int, ...], text: str) -> int:
        """Length of the turn's end in the template text after an assistant's content: white space, if any, and a control token."""
        first = next((place for place, index in enumerate(piece) if index in self._codec.control), None)
        if first is not None and not self._codec.decode(piece[:first], Position.INSIDE, self.control_ids).strip():
            return first + 1
        raise RenderError(
            f"the chat template closes an assistant's turn with {text[:40]!r}, which has no control token at its start, so a model could "
            "not learn to stop; use a template that ends turns with a special token"
        )

    def _position_after(self, piece: tuple[int, ...], place: int) -> Position:
        if piece:
            return Position.CONTROL if piece[-1] in self._codec.control else Position.INSIDE
        return Position.INSIDE if place else Position.START

    def _closing_ids(self) -> frozenset[int]:
        """Tokens that end a turn, both of the last turn and of one that is followed by another."""
        found: set[int] = set()
        turns = (Message("user", "x"), Message("assistant", "x"), Message("user", "x"))
        for chat in (self._chat(turns[:2]), self._chat(turns)):
            plan = self._plan(tuple(message.role for message in chat), False)
            found |= {piece[count - 1] for piece, count in zip(plan.pieces[1:], plan.closing, strict=True) if count}
        return frozenset(found)

    def _after_cue(self) -> Position:
        """Where a completion starts: right after the generation cue."""
        roles = tuple(message.role for message in self._chat([Message("user", "x")]))
        return self._position_after(self._plan(roles, True).pieces[-1], 1)


def _token_id(tokenizer: PreTrainedTokenizerFast, name: str) -> int | None:
    index = getattr(tokenizer, name)
    return index if isinstance(index, int) else None
