"""Bodies of `posttrain explain` and `posttrain recommend`. They need no torch and answer at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer

from posttrain.core.errors import ConfigError
from posttrain.objectives.algorithms import ALGORITHMS
from posttrain.objectives.explain import compare, explain, explain_all
from posttrain.objectives.recommend import SYMPTOMS, Answers, Recommendation, recommend


@dataclass(frozen=True, slots=True)
class Question:
    """One question: a field of Answers, its flag, and what can be answered. Without choices the answer is a number."""

    field: str
    flag: str
    text: str
    choices: Mapping[str, str]
    many: bool = False


QUESTIONS = (
    Question("model", "--model", "What is trained?", {"dense": "a dense model", "moe": "a mixture of experts"}),
    Question(
        "signal",
        "--signal",
        "What judges an answer?",
        {"verifier": "a program or a reward model scores it", "preferences": "nothing but pairs of a better and a worse one"},
    ),
    Question(
        "success",
        "--success",
        "How often is the model right before training?",
        {"sometimes": "20 to 80 % of the time", "never": "about 0 %", "often": "more than 80 %"},
    ),
    Question("siblings", "--siblings", "How many completions per prompt can you afford?", {}),
    Question(
        "responses",
        "--responses",
        "How long are the responses?",
        {"short": "short", "long": "long, or of very uneven length", "subtraces": "one rollout is trained as several pieces"},
    ),
    Question("memory", "--memory", "Is there room for a second network, the critic?", {"enough": "yes", "tight": "no"}),
    Question("symptoms", "--symptom", "What do you see?", {**SYMPTOMS}, many=True),
)


def show_explanation(name: str | None = None, siblings: int | None = None) -> None:
    """One line per algorithm, or the page of one.

    Raises:
        ConfigError: an unknown name, or a group size that its advantage cannot work with.
    """
    if name is None:
        lines = [*explain_all(), "", "one in full: posttrain explain NAME; two side by side: posttrain explain --compare A B"]
    else:
        lines = explain(name, siblings)
    typer.echo("\n".join(lines))


def show_comparison(one: str, other: str) -> None:
    """Two algorithms side by side. Raises ConfigError for an unknown name."""
    typer.echo("\n".join(compare(one, other)))


def show_recommendation(given: Mapping[str, Any]) -> None:
    """Recommend from the answers given as flags, keyed by field of Answers; asks at a terminal when there are none.

    Raises:
        ConfigError: no flags and no terminal, after the questions were printed; or an answer that is none of the choices.
    """
    if not given:
        if not sys.stdin.isatty():
            typer.echo("\n".join(flag_lines()))
            raise ConfigError("recommend needs answers: give at least one flag, e.g. posttrain recommend --model dense --symptom none")
        given = ask()
    answers = Answers.load(given)
    typer.echo("\n".join(recommendation_lines(answers, recommend(answers))))


def ask() -> dict[str, Any]:
    """Put every question; an empty answer takes the default."""
    defaults = Answers()
    given: dict[str, Any] = {}
    for question in QUESTIONS:
        typer.echo(f"\n{question.text}")
        for number, (value, text) in enumerate(question.choices.items(), start=1):
            typer.echo(f"  {number}  {text}{f' ({value})' if question.many else ''}")
        if question.many:
            given[question.field] = typer.prompt("numbers, with commas; 0 for nothing of this", default="0", value_proc=_picker(question))
        elif question.choices:
            given[question.field] = typer.prompt("number", default="1", value_proc=_picker(question))[0]
        else:
            given[question.field] = typer.prompt("number", default=getattr(defaults, question.field), type=int)
    typer.echo("")
    return given


def flag_lines() -> list[str]:
    """The questions with their flags, for a shell without a terminal."""
    lines = []
    for question in QUESTIONS:
        what = " (repeat it, or say none)" if question.many else ""
        lines.append(
            f"{question.flag} {'|'.join(question.choices) if question.choices and not question.many else 'X'}  {question.text}{what}"
        )
        if question.choices:
            width = max(len(value) for value in question.choices)
            lines += [f"    {value.ljust(width)}  {text}" for value, text in question.choices.items()]
    return lines


def recommendation_lines(answers: Answers, found: Recommendation) -> list[str]:
    """The answer as text: the method, why, what to check, how to run it, and what else there was."""
    entry = ALGORITHMS.get(found.algorithm)
    assumed = ", ".join(f"{question.field} {_answer(getattr(answers, question.field))}" for question in QUESTIONS)
    more = [f"  more:   posttrain explain {entry.name}"] if entry else []
    return [
        f"{entry.title if entry else found.algorithm.upper()}  ({found.algorithm})",
        *(f"  why:    {reason}" for reason in found.reasons),
        f"  first:  {found.check}",
        f"  run:    {found.command}",
        *more,
        *([""] + ["not chosen"] + [f"  {other.name}: {other.why}" for other in found.not_chosen] if found.not_chosen else []),
        "",
        f"answers: {assumed}",
    ]


def _answer(value: Any) -> str:
    return str(value) if not isinstance(value, tuple) else "+".join(value) or "none"


def _picker(question: Question) -> Callable[[str], list[str]]:
    """Turn "2" or "1, 4" into values; anything else is asked again."""
    names = list(question.choices)

    def pick(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        known = {str(number): [name] for number, name in enumerate(names, start=1)} | {name: [name] for name in names}
        known |= {"0": [], "none": []} if question.many else {}
        wrong = [word for word in words if word not in known]
        if wrong or not words or (len(words) > 1 and not question.many):
            raise typer.BadParameter(f"'{text}' is none of {'0' if question.many else '1'} to {len(names)}")
        return [name for word in words for name in known[word]]

    return pick
