"""Equality of mathematical answers: exact for numbers, math-verify for the rest, bounded in time from any thread.

math-verify guards itself with SIGALRM, which raises outside the main thread and cannot interrupt one huge integer power in any thread
(spec/faults.md 55). Its timeouts are therefore off here, and two bounds replace them: `tractable` refuses what could grow without limit
before anything is parsed, and the comparison runs in a daemon thread that is given up after a deadline.
"""

from __future__ import annotations

import re
import threading
from fractions import Fraction
from math import prod

from posttrain.rewards.extract import number

MAX_CHARACTERS = 120
DEADLINE_SECONDS = 5.0

_COMMANDS = frozenset({"frac", "dfrac", "tfrac", "sqrt", "pi", "cdot", "times", "left", "right"})
_ALLOWED = re.compile(r"[0-9A-Za-z+\-*/().,=\\{}\[\]^_%$ |]*")
_EXPONENT = re.compile(r"\^\s*(?:\{\s*-?([0-9]{1,3}|[A-Za-z])\s*\}|([0-9A-Za-z]))")
_FAILURES = (ValueError, TypeError, ArithmeticError, AttributeError, NotImplementedError, RecursionError)


def tractable(answer: str) -> bool:
    r"""Whether comparing `answer` is sure to be cheap: short, known commands only, no factorials, powers whose result stays small.

    >>> tractable(r"\frac{1}{2}"), tractable("9^{9^{9}}"), tractable("99999999!")
    (True, False, False)
    """
    if len(answer) > MAX_CHARACTERS or "**" in answer or not _ALLOWED.fullmatch(answer):
        return False
    if not set(re.findall(r"\\([A-Za-z]+)", answer)) <= _COMMANDS:
        return False
    if re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", " ", answer)):
        return False  # a bare word would be read as a function name or as a product of letters
    exponents = _EXPONENT.findall(answer)
    if len(exponents) != answer.count("^"):
        return False
    powers = [int(text) for pair in exponents for text in pair if text.isdigit()]
    return prod(max(power, 1) for power in powers) * len(answer) <= 50_000


def equal_numbers(left: str, right: str) -> bool:
    """Exact equality of two canonical numbers (see `extract.number`): 12.0 is 12, 12.5 is not."""
    return Fraction(left) == Fraction(right)


def equivalent(gold: str, answer: str) -> bool | None:
    """Whether `answer` denotes `gold`; None when `answer` cannot be read.

    Raises TimeoutError past the deadline, and ValueError when `gold` itself cannot be read or the comparison fails; neither means a wrong
    answer.
    """
    gold_number, answer_number = number(gold), number(answer)
    if gold_number is not None and answer_number is not None:
        return equal_numbers(gold_number, answer_number)
    if gold.strip() == answer.strip():
        return True
    if not tractable(gold):
        raise ValueError(f"gold answer {gold[:80]!r} is too complex to compare symbolically; write it as a number or in simpler form")
    return _compare_bounded(gold, answer) if tractable(answer) else None


def _compare_bounded(gold: str, answer: str) -> bool | None:
    outcome: list[tuple[bool | None, Exception | None]] = []

    def work() -> None:
        try:
            outcome.append((_compare(gold, answer), None))
        except _FAILURES as error:
            outcome.append((None, error))

    worker = threading.Thread(target=work, name="math-verify", daemon=True)
    worker.start()
    worker.join(DEADLINE_SECONDS)
    if not outcome:
        raise TimeoutError(f"comparing {answer[:60]!r} with {gold[:60]!r} took over {DEADLINE_SECONDS:g} s")
    same, failure = outcome[0]
    if failure is not None:
        raise ValueError(f"comparing {answer[:60]!r} with {gold[:60]!r} failed: {failure}") from failure
    return same


def _compare(gold: str, answer: str) -> bool | None:
    from math_verify import LatexExtractionConfig, parse, verify

    target = [LatexExtractionConfig()]
    gold_parsed = parse(f"${gold.strip('$ ')}$", target, parsing_timeout=None)  # type: ignore[arg-type]
    if not gold_parsed:
        raise ValueError(f"gold answer {gold[:80]!r} is not an expression")
    answer_parsed = parse(f"${answer.strip('$ ')}$", target, parsing_timeout=None)  # type: ignore[arg-type]
    if not answer_parsed:
        return None
    return bool(verify(gold_parsed, answer_parsed, timeout_seconds=None, raise_on_error=True))
