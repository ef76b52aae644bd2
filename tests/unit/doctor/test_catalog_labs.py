"""What labs and users of other trainers report is in the catalog, whole, and says truly what finds it."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command

from posttrain.checks.certificate import certify, members
from posttrain.cli.main import app
from posttrain.doctor.catalog import CATALOG, labs, launch, users
from posttrain.doctor.entries import Entry, Status
from posttrain.doctor.page import PREFIXES

LOST = (2, 4, 6, 7, 9, 11, 14, 15, 18, 28)
"""Pitfalls of whose row only the number survives."""
REPORTED = (
    *(2, 3, 4, 5, 6, 7, 8, 9, 10, 11),
    *(13, 15, 16, 17, 18, 19, 21, 22, 24),
    *(25, 26, 27, 28, 29),
    *(30, 31, 32, 33, 34, 35, 36, 37, 38),
    *(40, 41, 42, 43, 44, 45, 47, 48, 49, 50, 52, 53, 54),
    *(55, 56, 57, 59, 60),
    *(61, 62, 63, 64, 65, 66, 67, 68),
    *(69, 70),
    *(72, 73, 74, 75),
    *(76, 77, 78, 79, 80, 81, 82),
)
"""Numbers of the kinds that users report, A to J of spec/faults.md; gaps are intended there."""
WANTED = (
    *(f"F{n}" for n in range(1, 22)),
    *(f"P{n}" for n in range(1, 38) if n not in LOST),
    *(f"L{n}" for n in range(1, 31)),
    *(f"U{n}" for n in REPORTED),
    *(f"C{n}" for n in range(1, 40)),
)
MINE = (*labs.ENTRIES, *users.ENTRIES, *launch.ENTRIES)
LIVING = [entry for entry in CATALOG.values() if not entry.same_as]


def test_every_number_is_there_and_no_other():
    assert set(WANTED) <= set(CATALOG)
    assert {id for id in CATALOG if id[0] in "FPLUC"} == set(WANTED)
    assert len([id for id in CATALOG if id[0] == "S"]) > 60


def test_ids_are_a_letter_of_the_page_and_a_number():
    assert all(re.fullmatch(rf"[{''.join(PREFIXES)}][1-9]\d*", id) and CATALOG[id].id == id for id in CATALOG)
    assert len({entry.name for entry in CATALOG.values()}) == len(CATALOG)


@pytest.mark.parametrize("entry", CATALOG.values(), ids=lambda entry: entry.id)
def test_references_resolve(entry: Entry):
    assert set(entry.confused) <= set(CATALOG) - {entry.id}
    if entry.same_as:
        assert entry.same_as in CATALOG
        assert entry.same_as != entry.id
        if entry in MINE:  # told as the other is
            assert (entry.layer, entry.verdict) == (CATALOG[entry.same_as].layer, CATALOG[entry.same_as].verdict)


@pytest.mark.parametrize("entry", LIVING, ids=lambda entry: entry.id)
def test_an_entry_has_all_its_texts(entry: Entry):
    for text in (entry.name, entry.symptom, entry.onset, entry.cause, entry.fix, entry.check, entry.source):
        assert len(text) >= 4
        assert text == " ".join(text.split())


@pytest.mark.parametrize("entry", [*labs.ENTRIES, *users.ENTRIES], ids=lambda entry: entry.id)
def test_what_is_another_name_has_no_signs_of_its_own(entry: Entry):
    assert not (entry.same_as and entry.signs)
    assert entry.status is Status.EXTERNAL


@pytest.mark.parametrize("entry", users.ENTRIES, ids=lambda entry: entry.id)
def test_users_reports_name_where_they_were_made(entry: Entry):
    assert all(re.fullmatch(r"[A-Za-z][\w-]* (#\d+|[0-9a-f]{8})", source) for source in entry.source.split(", "))


@pytest.mark.parametrize("entry", MINE, ids=lambda entry: entry.id)
def test_a_check_is_a_command_that_exists(entry: Entry):
    """Every `posttrain ...` in a check or a fix names a command, and every name to certify is one."""
    commands = get_command(app).commands  # type: ignore[attr-defined]
    names = set(members())
    for text in (entry.check, entry.fix):
        for command, argument in re.findall(r"posttrain ([a-z]+)(?: ([\w.+]+(?::[\w.+]+)?))?", text):
            assert command in commands, text
            if command == "certify" and argument not in ("", "without", "NAME", "FILE.py:FUNCTION"):
                assert argument in names, text
            if command in ("runs", "claims"):
                assert argument in commands[command].commands, text


@pytest.mark.parametrize(
    "entry", [e for e in MINE if e.found_by in ("certify", "preflight", "delivery", "probe")], ids=lambda entry: entry.id
)
def test_what_a_check_finds_says_which_part_of_it(entry: Entry):
    word = {"certify": "posttrain certify", "preflight": "posttrain preflight", "delivery": "proof of", "probe": "posttrain probe"}
    assert word[entry.found_by] in entry.check or (entry.found_by == "delivery" and "delivery" in entry.check)


def test_laws_and_checks_that_are_named_exist():
    laws = {finding.law for finding in certify("grpo")[0].findings}
    named = {"partition", "mask", "permutation", "oracle", "conservation", "reduction"}
    assert named == laws
    parts = {"template", "tokenizer", "mask", "packing", "agreement", "sync", "delivery", "grader", "gradients"}
    for entry in users.ENTRIES:
        kind, _, said = entry.check.partition(": ")
        if said and kind.startswith("posttrain certify"):
            assert named & set(re.findall(r"[a-z]+", said)), entry.id
        if said and kind.startswith("posttrain preflight"):
            assert parts & set(re.findall(r"[a-z]+", said)), entry.id
