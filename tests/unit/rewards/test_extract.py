"""Answer extraction: the fuzz table, and what must hold for any text."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.rewards.extract import MAX_DIGITS, boxed, hash_marker, last_number, marked_line, number

HASH_TABLE = [
    ("#### 7", "7"),
    ("####7", "7"),
    ("12 - 5 = 7\n#### 7\n", "7"),
    ("12 - 5 = 7 #### 7", "7"),
    ("#### 7\nSo the answer is seven.", "7"),
    ("#### 7\r\nmore", "7"),
    ("#### 7 \t", "7"),
    ("## Working\n#### 7", "7"),
    ("#### +7", "7"),
    ("#### -7", "-7"),
    ("#### \u22127", "-7"),
    ("#### -0", "0"),
    ("#### 007", "7"),
    ("#### 1,234", "1234"),
    ("#### 1,234,567.5", "1234567.5"),
    ("#### 12.5", "12.5"),
    ("#### .5", "0.5"),
    ("#### -.50", "-0.50"),
    ("#### 7.", "7"),
    ("#### $18", "18"),
    ("#### -$18", "-18"),
    ("#### $-18.", "-18"),
    ("#### " + "1" * MAX_DIGITS, "1" * MAX_DIGITS),
    # two markers hedge, whichever of them is right
    ("####7 #### 8", None),
    ("#### 7\n#### 7", None),
    ("########7", None),
    ("######## 7\n#### 8", None),
    ("##### 7", None),
    ("### 7", None),
    ("7", None),
    ("", None),
    ("####", None),
    ("####\n7", None),
    # the line must be one number
    ("#### 7 or 8", None),
    ("#### 7 apples", None),
    ("#### 7 8", None),
    ("#### x = 7", None),
    ("#### 7\u2028garbage", None),
    ("#### 1,23", None),
    ("#### 12,34", None),
    ("#### 1234,567", None),
    ("#### ,123", None),
    ("#### 1.2.3", None),
    ("#### 7..", None),
    ("#### --7", None),
    ("#### -$-7", None),
    ("#### - 7", None),
    ("#### \u20137", None),
    ("#### 50%", None),
    ("#### 1e3", None),
    ("#### 1/2", None),
    ("#### 0x1F", None),
    ("#### 1_000", None),
    ("#### inf", None),
    ("#### nan", None),
    ("#### \uff17", None),
    ("#### \u0667", None),
    ("#### \u00b2", None),
    ("#### " + "1" * (MAX_DIGITS + 1), None),
    ("#### " + "0" * 5000 + "7", None),
]


@pytest.mark.parametrize(("text", "expected"), HASH_TABLE, ids=[repr(text)[:30] for text, _ in HASH_TABLE])
def test_hash_marker_table(text: str, expected: str | None) -> None:
    assert hash_marker(text) == expected


BOXED_TABLE = [
    (r"\boxed{7}", "7"),
    (r"so \boxed{ 1,234 } it is", "1234"),
    (r"\boxed{\$18}", "18"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{a{b{c}}}", "a{b{c}}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{1} or \boxed{2}", None),
    (r"\boxed{1}\boxed{1}", None),
    (r"\boxed{\boxed{1}}", None),
    (r"\boxed{1", None),
    (r"\boxed{\frac{1}{2}", None),
    (r"\boxed{1\}", None),
    (r"\boxed{}", None),
    (r"\boxed{  }", None),
    (r"\boxed 7", None),
    (r"\boxedin{7}", None),
    ("7", None),
]


@pytest.mark.parametrize(("text", "expected"), BOXED_TABLE)
def test_boxed_table(text: str, expected: str | None) -> None:
    assert boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16 - 9 = 7, so she earns $1,400 a day.", "1400"),
        ("16-9=7", "7"),
        ("It is -3.", "-3"),
        ("about 12.50 in all", "12.50"),
        ("1 or 2", "2"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number_is_lenient(text: str, expected: str | None) -> None:
    assert last_number(text) == expected


def test_marked_line_keeps_text_that_is_not_a_number() -> None:
    assert marked_line("think\n#### (3 + 5) * 2 \nrest") == "(3 + 5) * 2"


@given(st.text(alphabet="#0123456789+-\u2212$.,% \n\rab\\{}\uff17", max_size=40))
def test_any_text_gives_a_readable_number_or_none(text: str) -> None:
    for found in (hash_marker(text), last_number(text)):
        assert found is None or number(found) == found
        assert found is None or isinstance(Fraction(found), Fraction)
    boxed(text)


@given(st.integers(), st.sampled_from(["#### {}", "#### {:,}", "work 1 + 1\n#### {}.\n", "#### {:,}\nmore"]))
def test_every_integer_survives(value: int, form: str) -> None:
    assert hash_marker(form.format(value)) == str(value)


@given(st.integers(-999, 999), st.integers(-999, 999))
def test_a_second_marker_is_always_refused(first: int, second: int) -> None:
    assert hash_marker(f"#### {first}\n#### {second}") is None
