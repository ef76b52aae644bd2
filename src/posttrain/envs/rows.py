"""Data rows as the nouns of training: demonstrations, preferences, tasks, plain texts. `kind` tells which of them a source holds.

Every refusal names file, line and field, so that the row can be found and fixed. What a source may be is said in `files.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.core.errors import DataError
from posttrain.core.tasks import ROLES, Demonstration, Message, Task
from posttrain.envs.files import Row, read_rows, source_name

__all__ = ["Kind", "Preference", "Row", "demonstrations", "kind", "preferences", "read_rows", "source_name", "task_rows", "texts"]

Kind = Literal["conversation", "prompt_completion", "preference", "task", "text"]


@dataclass(frozen=True, slots=True)
class Preference:
    """One prompt with a better and a worse completion.

    Example: Preference("row-3", (Message("user", "hi"),), chosen="hello", rejected="what")
    """

    id: str
    prompt: tuple[Message, ...]
    chosen: str
    rejected: str


def kind(source: str) -> Kind:
    """What the rows of `source` are, by the fields of its first row; DataError with the accepted fields when they fit nothing."""
    return _kind(next(read_rows(source)))


def demonstrations(source: str) -> list[Demonstration]:
    """Conversations to imitate: rows with `messages`, or with `prompt` and `completion` (texts or message lists).

    Every conversation must end in an assistant turn; an assistant turn without text teaches nothing and is refused.
    """
    found = []
    for identity, row in _identified(source):
        file, line, fields = row
        if "messages" in fields:
            messages = _messages(row, "messages")
            field = "messages"
        elif "prompt" in fields and "completion" in fields:
            messages = _turns(row, "prompt", "user") + _turns(row, "completion", "assistant")
            field = "completion"
        else:
            if "prompt" in fields:
                raise DataError(f"is missing; the row has {sorted(fields)}", file=file, line=line, field="completion")
            advice = "; plain text is read by `texts`" if "text" in fields else ""
            problem = f"has fields {sorted(fields)}; a demonstration needs messages, or prompt and completion{advice}"
            raise DataError(problem, file=file, line=line)
        if not any(message.role == "assistant" for message in messages):
            raise DataError("has no assistant turn; there is nothing to imitate", file=file, line=line, field=field)
        if messages[-1].role != "assistant":
            raise DataError(f"ends with a {messages[-1].role} turn; end it with an assistant turn", file=file, line=line, field=field)
        found.append(Demonstration(identity, messages))
    return found


def preferences(source: str) -> list[Preference]:
    """Pairs to compare: rows with `prompt`, `chosen`, `rejected`, each a text or a message list.

    Message lists may repeat the prompt before the completion, and may then stand without a `prompt` field.
    """
    found = []
    for identity, row in _identified(source):
        file, line, fields = row
        for field in ("chosen", "rejected"):
            if field not in fields:
                raise DataError(f"is missing; the row has {sorted(fields)}", file=file, line=line, field=field)
        prompt = _turns(row, "prompt", "user") if "prompt" in fields else _shared_prompt(row)
        if prompt[-1].role == "assistant":
            raise DataError("ends with an assistant turn; end it with what is to be answered", file=file, line=line, field="prompt")
        chosen, rejected = _completion(row, "chosen", prompt), _completion(row, "rejected", prompt)
        if chosen == rejected:
            raise DataError("equals chosen; a pair must differ, drop the row", file=file, line=line, field="rejected")
        found.append(Preference(identity, prompt, chosen, rejected))
    return found


def task_rows(source: str) -> list[Task]:
    """Tasks with known answers: rows with `prompt` or `question` (text or message list) and `answer` (text or number).

    The other fields become the task's `meta`.
    """
    found = []
    for identity, row in _identified(source):
        file, line, fields = row
        asked = next((field for field in ("prompt", "question") if field in fields), None)
        if asked is None:
            raise DataError(f"is missing; the row has {sorted(fields)}", file=file, line=line, field="prompt")
        prompt = _turns(row, asked, "user")
        if prompt[-1].role == "assistant":
            raise DataError("ends with an assistant turn; end it with what is to be answered", file=file, line=line, field=asked)
        answer = fields.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
            raise DataError(f"must be a text or a number, is {answer!r}", file=file, line=line, field="answer")
        meta = {key: value for key, value in fields.items() if key not in (asked, "answer", "id")}
        found.append(Task(identity, prompt, str(answer), meta))
    return found


def texts(source: str) -> list[str]:
    """Plain texts: rows with `text`."""
    return [_text(row, "text", row[2].get("text")) for row in read_rows(source)]


def _kind(row: Row) -> Kind:
    file, line, fields = row
    if "chosen" in fields and "rejected" in fields:
        return "preference"
    if "messages" in fields:
        return "conversation"
    if "prompt" in fields and "completion" in fields:
        return "prompt_completion"
    if ("prompt" in fields or "question" in fields) and "answer" in fields:
        return "task"
    if "text" in fields:
        return "text"
    accepted = "messages | prompt, completion | prompt, chosen, rejected | prompt or question, answer | text"
    raise DataError(f"has fields {sorted(fields)}; accepted are: {accepted}", file=file, line=line)


def _identified(source: str) -> Iterator[tuple[str, Row]]:
    """Rows with their ids: the row's own `id`, or source name and line. DataError for an id that two rows share."""
    name, seen = source_name(source), dict[str, int]()
    for row in read_rows(source):
        file, line, fields = row
        given = fields.get("id")
        if given is not None and (isinstance(given, bool) or not isinstance(given, str | int)):
            raise DataError(f"must be a text or an integer, is {given!r}", file=file, line=line, field="id")
        identity = f"{name}-{line}" if given is None else str(given)
        if identity in seen:
            raise DataError(f"'{identity}' is also the id of line {seen[identity]}; ids must differ", file=file, line=line, field="id")
        seen[identity] = line
        yield identity, row


def _text(row: Row, field: str, value: Any) -> str:
    file, line, fields = row
    if field not in fields:
        raise DataError(f"is missing; the row has {sorted(fields)}", file=file, line=line, field=field)
    if not isinstance(value, str) or not value.strip():
        shown = "empty" if isinstance(value, str) else f"{type(value).__name__}, not text"
        raise DataError(f"is {shown}", file=file, line=line, field=field)
    return value


def _turns(row: Row, field: str, role: Literal["user", "assistant"]) -> tuple[Message, ...]:
    """A field that is a message list, or a text said by `role`."""
    value = row[2].get(field)
    return _messages(row, field) if isinstance(value, list) else (Message(role, _text(row, field, value)),)


def _messages(row: Row, field: str) -> tuple[Message, ...]:
    file, line, fields = row
    value = fields.get(field)
    if not isinstance(value, list) or not value:
        shown = "empty" if value == [] else f"{type(value).__name__}, not a list"
        raise DataError(f"is {shown}; give a list of {{role, content}}", file=file, line=line, field=field)
    return tuple(_message(row, f"{field}[{index}]", entry) for index, entry in enumerate(value))


def _message(row: Row, where: str, entry: Any) -> Message:
    file, line, _ = row
    if not isinstance(entry, dict) or "role" not in entry or "content" not in entry:
        raise DataError("must be an object with role and content", file=file, line=line, field=where)
    role, content = entry["role"], entry["content"]
    if role not in ROLES:
        raise DataError(f"is {role!r}; use one of {', '.join(ROLES)}", file=file, line=line, field=f"{where}.role")
    if entry.get("tool_calls"):
        problem = "is not supported: a message is a role and a text; write the call into content"
        raise DataError(problem, file=file, line=line, field=f"{where}.tool_calls")
    if not isinstance(content, str):
        raise DataError(f"is {type(content).__name__}, not text", file=file, line=line, field=f"{where}.content")
    if role == "assistant" and not content.strip():
        raise DataError("is empty: an assistant turn without text teaches nothing", file=file, line=line, field=f"{where}.content")
    return Message(role, content)


def _shared_prompt(row: Row) -> tuple[Message, ...]:
    file, line, fields = row
    if not isinstance(fields["chosen"], list) or not isinstance(fields["rejected"], list):
        raise DataError(f"is missing; the row has {sorted(fields)}", file=file, line=line, field="prompt")
    prompt = _messages(row, "chosen")[:-1]
    if not prompt or prompt != _messages(row, "rejected")[:-1]:
        raise DataError("is missing, and chosen and rejected differ before their last turn", file=file, line=line, field="prompt")
    return prompt


def _completion(row: Row, field: str, prompt: tuple[Message, ...]) -> str:
    file, line, fields = row
    if not isinstance(fields[field], list):
        return _text(row, field, fields[field])
    messages = _messages(row, field)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if len(messages) != 1 or messages[0].role != "assistant":
        raise DataError("must be one assistant turn, alone or after exactly the prompt", file=file, line=line, field=field)
    return messages[0].content
