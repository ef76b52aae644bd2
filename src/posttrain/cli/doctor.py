"""`posttrain doctor`: what is wrong with a run, from its records alone. `posttrain doctor RUN` is short for `posttrain doctor run RUN`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from posttrain.doctor.entries import Entry
    from posttrain.doctor.evidence import Evidence

DEFAULT = "run"
LIVE_SECONDS = 600
"""A run that wrote its last line less than this ago and has not ended is taken for a live one."""


class DefaultGroup(TyperGroup):
    """A group whose first argument is a command, or else an argument of the command `run`.

    Example: `posttrain doctor runs/a` is `posttrain doctor run runs/a`; a run that is called like a command is written ./lookup.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click: the arguments of this group, before a command is chosen."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=DefaultGroup,
    no_args_is_help=True,
    subcommand_metavar="RUN | COMMAND [ARGS]...",
    help="Say what is wrong with a run, from its records alone: posttrain doctor RUN. Works on copies, live runs and other trainers' logs.",
)

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, live or copied, or another trainer's log.")]
Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
Map = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="THEIRS=OURS", help="Another trainer's name of a metric, e.g. rew=reward_mean; repeatable."),
]


@app.command(DEFAULT)
def run(
    path: RunPath,
    as_json: Json = False,
    brief: Annotated[bool, typer.Option("--brief", help="Figures of the likeliest suspect only.")] = False,
    renamed: Map = None,
) -> None:
    """Verdict, suspects with the figures for and against each, layers in the order to clear them, and the next cheapest check.

    Exit code 0: healthy, saturated, breakout loading, or inconclusive; 1: sick; 2: nothing could be read.
    """
    from posttrain.doctor.diagnose import diagnose
    from posttrain.doctor.text import diagnosis_json, diagnosis_lines

    found = diagnose(_read(path, renamed), _catalog(), live=_being_written(path))
    _show(diagnosis_json(found) if as_json else diagnosis_lines(found, brief=brief))
    if found.sick:
        raise typer.Exit(1)


@app.command()
def lookup(
    symptom: Annotated[list[str], typer.Argument(help='What you see, e.g. "my reward is flat".')],
    most: Annotated[int, typer.Option(min=1, max=50, help="Entries to show.")] = 5,
    as_json: Json = False,
) -> None:
    """Find failures by what is seen, with the first check and the first fix."""
    from posttrain.doctor.lookup import look_up, lookup_json, lookup_lines

    found = look_up(" ".join(symptom), _catalog(), most)
    _show(lookup_json(found) if as_json else lookup_lines(found))


@app.command()
def explain(name: Annotated[list[str], typer.Argument(metavar="ID...", help="Ids, or one name, of failures, e.g. F1 F2.")]) -> None:
    """One failure of the catalog, whole: signs with thresholds, cause, fix, what it is confused with."""
    from posttrain.doctor.lookup import entry_named
    from posttrain.doctor.text import entry_lines

    catalog = _catalog()
    if all(word.upper() in catalog for word in name):
        _show([line for word in name for line in (*entry_lines(catalog[word.upper()]), "")][:-1])
        return
    _show(entry_lines(entry_named(" ".join(name), catalog)))


@app.command()
def diff(first: RunPath, second: RunPath, as_json: Json = False, renamed: Map = None) -> None:
    """What two runs do differently: which metric parts first, suspects of one only, and what was set apart."""
    from posttrain.doctor.difference import compare_runs, difference_json, difference_lines

    found = compare_runs(_read(first, renamed), _read(second, renamed), _catalog())
    _show(difference_json(found) if as_json else difference_lines(found))


@app.command()
def replay(
    path: RunPath,
    reward: Annotated[str | None, typer.Option(help="Metric to watch for the fall; by default the reward.")] = None,
    as_json: Json = False,
    renamed: Map = None,
) -> None:
    """Which alarms would have been raised, when, and with what lead over the reward's fall and over the end."""
    from posttrain.doctor.replay import replay as again
    from posttrain.doctor.replay import replay_json, replay_lines

    found = again(_read(path, renamed), _catalog(), reward)
    _show(replay_json(found) if as_json else replay_lines(found))


@app.command()
def postmortem(
    path: RunPath,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File or folder to write to instead of the run directory.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that was edited by hand.")] = False,
    chain: Annotated[bool, typer.Option("--chain", help="Print the runs behind this one, what changed, and whether it helped.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --chain: print as JSON.")] = False,
    renamed: Map = None,
) -> None:
    """Write postmortem.md, filled from the records; or print the chain of runs that led here."""
    from posttrain.doctor.chain import chain_json, chain_lines, chain_of, parent_link
    from posttrain.doctor.postmortem import postmortem_of
    from posttrain.doctor.postmortem_file import postmortem_text, write_postmortem

    if chain:
        found = chain_of(path, _catalog())
        _show(chain_json(found) if as_json else chain_lines(found))
        return
    written = postmortem_of(_read(path, renamed), _catalog(), live=_being_written(path))
    text = postmortem_text(written, parent_link(path) if out is None else None)
    _show([str(write_postmortem(path, text, out, force=force))])


def _read(path: Path, renamed: list[str] | None) -> Evidence:
    from posttrain.core.errors import ConfigError
    from posttrain.doctor.reading import read_evidence

    names = {}
    for given in renamed or ():
        theirs, equals, ours = given.partition("=")
        if not (theirs and equals and ours):
            raise ConfigError(f"--map '{given}' is no pair of names; write THEIRS=OURS, e.g. --map rew=reward_mean")
        names[theirs] = ours
    return read_evidence(path, names=names)


def _being_written(path: Path) -> bool:
    """Whether a run wrote its last line a short while ago."""
    import time

    try:
        return time.time() - (path / "metrics.jsonl").stat().st_mtime < LIVE_SECONDS
    except OSError:
        return False


def _catalog() -> Mapping[str, Entry]:
    from posttrain.doctor.catalog import CATALOG

    return CATALOG


def _show(found: Sequence[str] | dict[str, Any]) -> None:
    typer.echo(json.dumps(found, indent=2) if isinstance(found, dict) else "\n".join(found))
