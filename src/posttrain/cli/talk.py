"""The chat prompt."""

from __future__ import annotations

import sys

import typer

from posttrain.core.errors import PosttrainError
from posttrain.recipes.chat import Chat


def talk(chat: Chat) -> None:
    """Read turns from standard input until an empty line, Ctrl-D or Ctrl-C. Only answers go to standard output when it is a pipe."""
    watched = sys.stdin.isatty()
    if watched:
        typer.secho("empty line or Ctrl-D ends, /new starts over", dim=True, err=True)
    while True:
        try:
            line = input("> " if watched else "").strip()
            if not line:
                return
            if line == "/new":
                chat.forget()
                continue
            typer.echo(chat.say(line))
        except (EOFError, KeyboardInterrupt):
            typer.echo("", err=True)
            return
        except PosttrainError as error:
            if not watched:
                raise
            typer.secho(f"error: {error}", fg="red", err=True)
