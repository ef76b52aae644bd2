"""The chat prompt."""

from __future__ import annotations

import typer

from posttrain.recipes.chat import Chat


def talk(chat: Chat) -> None:
    """Read turns from standard input until an empty line, Ctrl-D or Ctrl-C."""
    typer.secho("empty line or Ctrl-D ends, /new starts over", dim=True, err=True)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo("", err=True)
            return
        if not line:
            return
        if line == "/new":
            chat.forget()
            continue
        typer.echo(chat.say(line))
