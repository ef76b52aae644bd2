"""What a tokenizer's chat template does that can spoil training, found by trying; and the tags that exported Hugging Face tools need.

Sources: spec/faults.md 41, 42, 47; spec/ladder-at-100m.md C12, X16.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from posttrain.core.errors import PosttrainError, RenderError
from posttrain.core.tasks import Message
from posttrain.core.trajectory import TRAINED_OWNERS
from posttrain.render.layout import ChatTemplate
from posttrain.render.renderer import ChatRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HfMask = Literal["unknown", "zero", "all", "equal", "different"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CHAT: tuple[Message, ...] = (
    Message("user", "What is 2 + 3?"),
    Message("assistant", "It is 5."),
    Message("user", "And twice that?"),
    Message("assistant", "It is 10."),
    Message("user", "Thanks."),
    Message("assistant", "You are welcome."),
)
_THOUGHT = "<think>\nLet me add.\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class TemplateAudit:
    """Findings about one tokenizer and its chat template; `problems` says in words what is worth knowing, nothing if all is well.

    Example: TemplateAudit(True, False, "zero", True, True, None, (2,), ("the template has no {% generation %} tags: ...",))
    """

    has_template: bool
    generation_tags: bool
    hf_mask: HfMask
    """The mask of `apply_chat_template(return_assistant_tokens_mask=True)`, compared with ours on a conversation of three turns."""
    ids_match: bool
    """Our ids are those of `apply_chat_template` on that conversation."""
    prefix_preserved: bool
    """Every prompt with its answer is a prefix of the whole: neither the template's text nor earlier thinking is rewritten later."""
    default_system: str | None
    """System prompt that the template writes by itself when the conversation has none."""
    stop_ids: tuple[int, ...]
    problems: tuple[str, ...]


def audit(tokenizer: PreTrainedTokenizerFast) -> TemplateAudit:
    """Try the tokenizer's chat template on probe conversations. Never raises for a bad template: that is a finding."""
    if not tokenizer.chat_template:
        problem = "the tokenizer has no chat template: set tokenizer.chat_template or use the instruction-tuned model's tokenizer"
        return TemplateAudit(False, False, "unknown", False, False, None, (), (problem,))
    problems: list[str] = []
    try:
        template = ChatTemplate(tokenizer)
        tags = _GENERATION.search(template.original) is not None
        default = _default_system(template)
        renderer = ChatRenderer(tokenizer)
        prefix = _prefix_problems(renderer)
        hf_mask, ids_match = _compare(tokenizer, renderer)
    except PosttrainError as error:
        tags = _GENERATION.search(str(tokenizer.chat_template)) is not None
        return TemplateAudit(True, tags, "unknown", False, False, None, (), (str(error),))
    if not tags:
        problems.append("the template has no {% generation %} tags: ours are not needed, but assistant-only loss elsewhere trains nothing")
    elif hf_mask != "equal":
        problems.append(f"Hugging Face's assistant mask is not ours (content and closing token) but: {hf_mask}")
    if not ids_match:
        problems.append("our ids differ from apply_chat_template's on a plain conversation: content and template text merge into one token")
    if default is not None:
        problems.append(f"without a system turn the template writes its own system prompt: {default[:60]!r}")
    if template.reads_clock:
        problems.append("the template prints today's date: here it is pinned, a server prints the real one")
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id == tokenizer.eos_token_id:
        problems.append("pad is the same token as eos: harmless here (padding goes by length), but tools that mask by id never train eos")
    stops = tuple(sorted(renderer.stop_ids))
    return TemplateAudit(True, tags, hf_mask, ids_match, not prefix, default, stops, tuple(problems + prefix))


def _prefix_problems(renderer: ChatRenderer) -> list[str]:
    """Whether each prompt and its answer start the whole conversation, with plain answers and with answers that think first."""
    template = renderer.template
    thinking = tuple(Message(turn.role, _THOUGHT + turn.content) if turn.role == "assistant" else turn for turn in _CHAT)
    problems = []
    for chat, what in ((_CHAT, "earlier turns"), (thinking, "<think> blocks of earlier answers")):
        roles, contents = [turn.role for turn in chat], [turn.content for turn in chat]
        whole = template.render(roles, contents, False)
        for turn in range(1, len(chat), 2):
            prompt = template.render(roles[:turn], contents[:turn], True)
            if not whole.startswith(prompt + contents[turn]):
                problems.append(f"the template rewrites {what}: prompt and answer {turn // 2 + 1} are not a prefix of the conversation")
                break
    try:
        renderer.split(_CHAT)
    except RenderError as error:
        problems.append(str(error))
    return problems


def _default_system(template: ChatTemplate) -> str | None:
    """Text in the place of a system message that nobody wrote."""
    try:
        opening, between, *_ = template.layout(("system", "user"), True).texts
    except RenderError:  # a template without system turns has no default for them
        return None
    alone = template.layout(("user",), True).texts[0]
    written = len(alone) - len(opening) - len(between)
    if written > 0 and alone.startswith(opening) and alone.endswith(between):
        return alone[len(opening) : len(opening) + written]
    return None


def _compare(tokenizer: PreTrainedTokenizerFast, renderer: ChatRenderer) -> tuple[HfMask, bool]:
    """Hugging Face's mask and ids against ours on the probe conversation."""
    ours = renderer.conversation(_CHAT)
    chat = [{"role": turn.role, "content": turn.content} for turn in _CHAT]
    try:
        theirs = tokenizer.apply_chat_template(
            chat, chat_template=renderer.template.source, return_dict=True, return_assistant_tokens_mask=True
        )
    except TemplateError as error:
        raise RenderError(f"the chat template fails when asked for assistant masks: {error}") from None
    mask = [bool(value) for value in theirs["assistant_masks"]]  # pyright: ignore[reportCallIssue, reportArgumentType]
    same_ids = list(ours.ids) == list(theirs["input_ids"])  # pyright: ignore[reportCallIssue, reportArgumentType]
    if not any(mask):
        return "zero", same_ids
    if all(mask):
        return "all", same_ids
    equal = same_ids and mask == [owner in TRAINED_OWNERS for owner in ours.owners]
    return ("equal" if equal else "different"), same_ids


_LITERAL = r"(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
_TERM = rf"(?:{_LITERAL}|\w+(?:\[{_LITERAL}\]|\.\w+)*)"
_PRINTED = re.compile(
    rf"\{{\{{(?P<open>-?)\s*(?P<head>(?:{_TERM}\s*\+\s*)*?)"
    r"(?P<content>(?P<name>\w+)(?:\[['\"]content['\"]\]|\.content)(?:\s*\|\s*trim|\.strip\(\))?)"
    rf"\s*\+\s*(?P<end>{_TERM})(?P<tail>(?:\s*\+\s*{_TERM})*)\s*(?P<close>-?)\}}\}}"
)
"""A `{{ header + message['content'] + end + rest }}` expression of the ChatML family."""
_END = re.compile(r"<[^<>\s]+>")
_UNKNOWN = "; posttrain's own masks do not need the tags, only exported Hugging Face tools do"
_NAMES: dict[str, Any] = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>", "unk_token": "<|unk|>"}


def patch_generation(template: str) -> str:
    """The template with {% generation %} tags around each assistant content and the token that closes it.

    Knows templates that print a turn as `header + message['content'] + end`. The result is proved on probe conversations: the same
    text as before, and spans of exactly content and closing token. A template that has such tags already comes back unchanged. Raises
    RenderError for any other template.
    """
    patched = template
    if not _GENERATION.search(template):
        if "tool_calls" in template or not _PRINTED.search(template):
            raise RenderError(f"the template does not print turns as header + message['content'] + end token{_UNKNOWN}")
        patched = _PRINTED.sub(_tagged, template)
    for chat in _probes():
        before, _ = _spans(template, chat)
        after, spans = _spans(patched, chat)
        if before != after or not _exact(after, spans, chat):
            raise RenderError(f"{{% generation %}} tags would change or miss assistant text of this template{_UNKNOWN}")
    return patched


def _tagged(found: re.Match[str]) -> str:
    """One printing expression cut in three, the middle one tagged where the role is the assistant's."""
    head = re.sub(r"\s*\+\s*$", "", found["head"]) or "''"
    end, tail = found["end"], re.sub(r"^\s*\+\s*", "", found["tail"])
    if end[0] in "'\"" and (token := _END.match(end[1:])):  # the token may share its literal with the line break after it
        rest = end[0] + end[1 + token.end() :]
        end = end[0] + token[0] + end[0]
        tail = " + ".join(part for part in (rest if len(rest) > 2 else "", tail) if part)
    turn = f"{{{{ {found['content']} + {end} }}}}"
    return (
        f"{{{{{found['open']} {head} }}}}"
        f"{{% if {found['name']}['role'] == 'assistant' %}}{{% generation %}}{turn}{{% endgeneration %}}{{% else %}}{turn}{{% endif %}}"
        f"{{{{ {tail or repr('')} {found['close']}}}}}"
    )


def _probes() -> Sequence[Sequence[Message]]:
    """Conversations with unique, repeated, empty and padded answers, with and without a system turn."""
    system = Message("system", "Be brief.")
    return (
        _CHAT[:2],
        _CHAT,
        (system, *_CHAT),
        (*_CHAT[:2], *_CHAT[:2]),
        (_CHAT[0], Message("assistant", "")),
        (system, _CHAT[0], Message("assistant", " \n padded \n"), *_CHAT[2:4]),
    )


def _spans(template: str, chat: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
    """The rendered text and the character spans that Hugging Face would train."""
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [{"role": turn.role, "content": turn.content} for turn in chat]
    tagged = _GENERATION.search(template) is not None
    try:
        texts, spans = render_jinja_template(conversations=[turns], chat_template=template, return_assistant_tokens_mask=tagged, **_NAMES)
    except TemplateError as error:
        raise RenderError(f"the template fails on a probe conversation ({error}){_UNKNOWN}") from None
    found = [(int(start), int(end)) for start, end in spans[0]] if tagged else []
    return texts[0], found


def _exact(text: str, spans: Sequence[tuple[int, int]], chat: Sequence[Message]) -> bool:
    """Whether the spans are the assistant contents, white space at the ends aside if the template trims, each with a token after it."""
    contents = [turn.content for turn in chat if turn.role == "assistant"]
    if len(spans) != len(contents):
        return False
    for (start, end), content in zip(spans, contents, strict=True):
        tagged = text[start:end]
        printed = content if tagged.startswith(content) else content.strip()
        if not tagged.startswith(printed) or not _END.fullmatch(tagged[len(printed) :]):
            return False
    return True
