"""Strict answer extraction: one form, stated once, or no answer at all.

A lenient parser is what a policy under reward learns to exploit: several markers hedge, a lost sign or a cut decimal turns a wrong
answer into a right one (spec/ladder-at-100m.md C10, spec/faults.md 57). Every function here returns None unless the text is unambiguous.

What counts as a number: ASCII digits with an optional sign (`-`, `+`, or U+2212, which means the same), thousands commas only in correct
groups, an optional decimal part, one `$` in front, one full stop behind. These never change the value. A `%` does (50% is 0.5), so it is
refused, as are exponents, fractions, digits of other scripts, units and words.
"""

from __future__ import annotations

import re

MAX_DIGITS = 4300
"""Longest number read, in characters. Python itself refuses to convert a longer one."""

_MARKER = re.compile(r"#{4,}")
_BOXED = re.compile(r"\\boxed(?![A-Za-z])")
_NUMBER = re.compile(r"([+\u2212-]?)(\$?)([+\u2212-]?)([0-9]{1,3}(?:,[0-9]{3})+|[0-9]+|(?=\.[0-9]))(\.[0-9]+)?\.?")
_LOOSE = re.compile(r"(?<![0-9.,])[+\u2212-]?\$?[0-9][0-9,]*(?:\.[0-9]+)?")
_SPACE = " \t\r"
"""A carriage return before the line feed belongs to the line end. Exotic line separators do not, and spoil the answer."""


def number(text: str) -> str | None:
    """The canonical decimal text of a string that is one number and nothing else, or None.

    Canonical: no plus, no commas, no `$`, no leading zeros, no negative zero; decimals as written.

    >>> number("$1,234."), number("+7"), number("-.50"), number("1,23"), number("5 apples")
    ('1234', '7', '-0.50', None, None)
    """
    match = _NUMBER.fullmatch(text.strip(_SPACE))
    if match is None or (match[1] and match[3]) or (match[3] and not match[2]):
        return None
    whole, decimals = match[4].replace(",", "").lstrip("0") or "0", match[5] or ""
    if len(match[0]) > MAX_DIGITS:
        return None
    negative = (match[1] or match[3]) not in ("", "+") and any(digit in "123456789" for digit in whole + decimals)
    return ("-" if negative else "") + whole + decimals


def marked_line(text: str) -> str | None:
    """What follows the only `####` of `text` up to the end of its line, stripped; None for no marker, two, a longer run of #, or nothing.

    >>> marked_line("2 + 3\\n#### 2 + 3\\n"), marked_line("#### 1 #### 2"), marked_line("##### 1")
    ('2 + 3', None, None)
    """
    markers = list(_MARKER.finditer(text))
    if len(markers) != 1 or len(markers[0].group()) != 4:
        return None
    return text[markers[0].end() :].split("\n", 1)[0].strip(_SPACE) or None


def hash_marker(text: str) -> str | None:
    """The number after the only `####` of `text`, in canonical form; it must fill the rest of its line.

    >>> hash_marker("3 + 4 = 7\\n#### 7"), hash_marker("#### 7 or 8"), hash_marker("########7")
    ('7', None, None)
    """
    line = marked_line(text)
    return None if line is None else number(line)


def boxed(text: str) -> str | None:
    r"""The content of the only `\boxed{...}` of `text`, braces balanced; a number is returned in canonical form, other content stripped.

    >>> boxed(r"so \boxed{\frac{1}{2}}"), boxed(r"\boxed{1,234}"), boxed(r"\boxed{1} \boxed{2}"), boxed(r"\boxed{1")
    ('\\frac{1}{2}', '1234', None, None)
    """
    starts = list(_BOXED.finditer(text))
    if len(starts) != 1 or not text.startswith("{", starts[0].end()):
        return None
    begin, depth, position = starts[0].end() + 1, 1, starts[0].end() + 1
    while position < len(text):
        if text[position] == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            content = text[begin:position].strip()
            return number(content.replace("\\$", "$")) or content or None
        position += 1
    return None


def last_number(text: str) -> str | None:
    """The last thing in `text` that looks like a number, in canonical form. Lenient: for models that were never taught an answer form.

    Any text that ends in the right digits scores, so it must not be a training reward.

    >>> last_number("16 - 9 = 7, so she earns $1,400 a day."), last_number("none")
    ('1400', None)
    """
    for found in reversed(_LOOSE.findall(text)):
        value = number(found.rstrip(","))
        if value is not None:
            return value
    return None
