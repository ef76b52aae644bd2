"""Looking a symptom up by words."""

from __future__ import annotations

import pytest
from doctor_traces import LOW, entry

from posttrain.core.errors import ConfigError
from posttrain.doctor.lookup import entry_named, look_up, lookup_json, lookup_lines
from posttrain.doctor.signals import Level

ENTRIES = (
    entry("F1", LOW, name="entropy collapse", symptom="siblings become the same text", cause="a symmetric clip sharpens the policy"),
    entry("F2", name="unanimous groups", symptom="reward is flat and every group agrees", cause="the prompts are too hard"),
    entry(
        "F3",
        Level("length_p50", ">", 9),
        name="length bias",
        symptom="answers grow longer while the score is flat",
        cause="the aggregation",
    ),
    entry(
        "F8", name="memory leak", symptom="resident memory climbs until the kernel ends the process", cause="a cache that is never freed"
    ),
    entry("F9", name="parser", symptom="right answers count as wrong", cause="the extractor misses the form"),
    entry("S1", name="entropy collapse, all signs", symptom="entropy collapse", cause="as F1", same_as="F1"),
)
CATALOG = {one.id: one for one in ENTRIES}


def ids(text: str) -> list[str]:
    return [match.entry.id for match in look_up(text, CATALOG).matches]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("my reward is flat", "F2"),
        ("the reward is stuck", "F2"),
        ("my return has plateaued", "F2"),
        ("responses keep getting longer", "F3"),
        ("oom after some hours", "F8"),
        ("it runs out of memory", "F8"),
        ("RAM grows", "F8"),
        ("boxed answers are not extracted", "F9"),
        ("entropy", "F1"),
        ("length_p50", "F3"),
        ("F8", "F8"),
    ],
)
def test_words_and_their_synonyms_find_the_entry(text, first):
    assert ids(text)[0] == first


def test_a_failure_is_listed_once_under_the_name_it_is_reported_by():
    assert ids("entropy collapse").count("F1") == 1
    assert "S1" not in ids("entropy collapse")


def test_all_words_of_the_question_beat_one_repeated():
    """Both have `memory`; F10 has it six times and F8 once, together with `kernel`, which F11 to F13 make a common word."""
    many = entry("F10", name="memory", symptom="memory memory memory", cause="memory", fix="memory")
    others = [entry(f"F1{n}", name="kernel", symptom="kernel kernel", cause="kernel") for n in (1, 2, 3)]
    both = entry(
        "F8", name="x", symptom="a long text about other things and memory and one kernel in it, with a good many words", cause="y"
    )
    found = look_up("memory kernel", {one.id: one for one in (many, both, *others)})
    assert found.matches[0].entry.id == "F8"


def test_a_misspelt_word_is_taken_for_the_nearest():
    found = look_up("entroppy", CATALOG)
    assert found.unknown == {"entroppy": ("entropy",)}
    assert found.matches[0].entry.id == "F1"
    assert lookup_lines(found)[0] == "no entry knows 'entroppy'; taken for 'entropy'"


def test_nothing_fits_gives_a_hint():
    lines = lookup_lines(look_up("qqqq zzzz", CATALOG))
    assert lines[:2] == ["no entry knows 'qqqq'", "no entry knows 'zzzz'"]
    assert lines[-1].startswith("nothing fits; try words such as reward")


@pytest.mark.parametrize("text", ["", "  ", "the is my", "!!!"])
def test_a_question_without_a_word_is_refused(text):
    with pytest.raises(ConfigError, match="names no symptom; say what you see"):
        look_up(text, CATALOG)


def test_matches_print_check_and_fix():
    lines = lookup_lines(look_up("memory leak", CATALOG, most=1))
    assert lines[0].startswith("F8 memory leak")
    assert "    check    the check of F8" in lines
    assert "    fix      the fix of F8" in lines
    assert lines[-1] == "all of one: posttrain doctor explain F8"
    assert lookup_json(look_up("memory leak", CATALOG, most=1))["matches"][0]["id"] == "F8"


def test_entries_are_named_by_id_or_name_in_any_case():
    assert entry_named("f2", CATALOG).id == "F2"
    assert entry_named("Memory  Leak", CATALOG).id == "F8"


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(ConfigError, match=r"no entry 'F22'; did you mean F2 \(unanimous groups\)"):
        entry_named("F22", CATALOG)
    with pytest.raises(ConfigError, match="look for it by words"):
        entry_named("xxxxxxxxxxxx", CATALOG)


def test_a_terminal_is_safe_from_the_question():
    assert all(line.isprintable() for line in lookup_lines(look_up("\x1b[2Jentropy\x07", CATALOG)))
