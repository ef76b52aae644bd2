"""Finding a failure by words: "my reward is flat" to the entries of the catalog, ranked by BM25 over their texts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from posttrain.core.errors import ConfigError
from posttrain.doctor.entries import Entry
from posttrain.doctor.text import plain_json, printable

_SYNONYMS = (
    ("flat", "stuck", "plateau", "stagnate", "stagnant", "constant", "stall", "unchanged", "frozen", "nowhere"),
    ("collapse", "degenerate", "die", "dying", "dead"),
    ("explode", "blow", "diverge", "spike", "unstable", "surge", "jump"),
    ("reward", "return", "score"),
    ("rise", "climb", "grow", "increase", "up", "improve", "creep"),
    ("fall", "drop", "decline", "decrease", "down", "worse", "degrade", "regress", "sink"),
    ("heldout", "eval", "evaluation", "validation", "test", "val", "benchmark"),
    ("parse", "parser", "extract", "extractor", "extraction", "format", "unparseable", "unparsed", "boxed"),
    ("truncate", "truncated", "truncation", "cut", "cap", "budget", "overlong"),
    ("length", "long", "longer", "verbose", "verbosity", "token"),
    ("memory", "oom", "leak", "ram", "vram", "rss"),
    ("gpu", "cuda", "accelerator", "device"),
    ("nan", "inf", "infinite", "infinity", "nonfinite"),
    ("slow", "throughput", "speed", "latency", "idle", "hang"),
    ("repeat", "repetition", "repetitive", "loop", "duplicate", "identical"),
    ("verifier", "grader", "judge", "checker"),
    ("hack", "game", "gaming", "exploit", "cheat"),
    ("mismatch", "differ", "disagree", "discrepancy"),
    ("zero", "0", "none", "nothing"),
    ("sample", "sampler", "rollout", "generation", "inference"),
    ("stale", "staleness", "lag", "late", "behind", "async"),
    ("lr", "learningrate", "rate"),
    ("gradient", "grad"),
    ("unanimous", "agree", "variance"),
    ("crash", "abort", "kill"),
    ("noise", "noisy", "random", "seed", "luck"),
)
"""Words that people use for the same thing; the first of each stands for all."""
_STOP = frozenset(
    (
        "a after all always an and are as at be been before but by do does ever every for from get goes going has have i if in is it "
        "its just keep me my never no not of often on only or our out so some still suddenly than that the then there they this to too "
        "very was were what when where which while why will with you your"
    ).split()
)
_FIELDS = (("name", 3), ("symptom", 3), ("cause", 1), ("onset", 1))
"""Fields that are searched, and how much their words count: what is seen before why. A fix names things that are not wrong."""
_PHRASES = {"held-out": "heldout", "held out": "heldout", "out of memory": "oom", "learning rate": "lr", "time out": "timeout"}
_K1, _B = 1.2, 0.6
MOST = 5


@dataclass(frozen=True, slots=True)
class Match:
    """An entry that fits, and the words of the question that it holds.

    Example: Match(F3, 7.2, ("reward", "flat"))
    """

    entry: Entry
    score: float
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Looked:
    """What a look-up found, and the words that no entry knows with the nearest that some do.

    Example: Looked((Match(...),), {"rewrad": ("reward",)})
    """

    matches: tuple[Match, ...]
    unknown: Mapping[str, tuple[str, ...]]


def look_up(symptom: str, catalog: Mapping[str, Entry], most: int = MOST) -> Looked:
    """The entries that fit a symptom best. Raises ConfigError for a symptom without a word."""
    raw = [word for word in re.findall(r"[a-z0-9]+", _joined(symptom[:1000])) if word not in _STOP]
    if not raw:
        raise ConfigError(f"'{symptom[:80]}' names no symptom; say what you see, e.g. posttrain doctor lookup \"reward is flat\"")
    counts = {id: Counter(_document(entry)) for id, entry in catalog.items()}
    known = {word for count in counts.values() for word in count}
    spelled = {word for entry in catalog.values() for word in _plain_words(entry)} | {word for group in _SYNONYMS for word in group}
    terms, unknown = {}, {}
    for word in dict.fromkeys(raw):
        near = (word,) if _term(word) in known else tuple(get_close_matches(word, sorted(spelled), n=2, cutoff=0.82))
        near = tuple(other for other in near if _term(other) in known)
        if near != (word,):
            unknown[word] = near
        terms |= {_term(other): (other, 1.0 if other == word else 0.6) for other in near[:1]}
    scored = [_match(entry, counts[id], terms, counts) for id, entry in catalog.items()]
    ranked = sorted((match for match in scored if match.score > 0), key=lambda match: (-match.score, match.entry.id))
    best = _by_one_name(ranked, catalog)
    return Looked(tuple(best[:most]), unknown)


def lookup_lines(found: Looked) -> list[str]:
    """The matches with what to check first and the first fix."""
    lines = []
    for word, near in found.unknown.items():
        lines.append(f"no entry knows '{word}'" + (f"; taken for '{near[0]}'" if near else ""))
    if not found.matches:
        return printable([*lines, "nothing fits; try words such as reward, entropy, length, held-out, loss, memory, or name a metric"])
    for match in found.matches:
        entry = match.entry
        lines += [f"{entry.id} {entry.name}  ({entry.verdict.value}; {', '.join(match.words)})", f"    symptom  {entry.symptom}"]
        lines += [f"    check    {entry.check}", f"    fix      {entry.fix}"]
        if entry.confused:
            lines.append(f"    not to be confused with {', '.join(entry.confused)}")
    return printable([*lines, f"all of one: posttrain doctor explain {found.matches[0].entry.id}"])


def lookup_json(found: Looked) -> dict[str, Any]:
    """The same as plain JSON values."""
    return plain_json(
        {
            "schema": 1,
            "matches": [
                {
                    "id": m.entry.id,
                    "name": m.entry.name,
                    "score": round(m.score, 3),
                    "words": list(m.words),
                    "check": m.entry.check,
                    "fix": m.entry.fix,
                }
                for m in found.matches
            ],
            "unknown": {word: list(near) for word, near in found.unknown.items()},
        }
    )


def entry_named(name: str, catalog: Mapping[str, Entry]) -> Entry:
    """The entry with an id or a name, whatever its case; ConfigError with the nearest otherwise."""
    by_name = {id.lower(): entry for id, entry in catalog.items()} | {entry.name.lower(): entry for entry in catalog.values()}
    wanted = " ".join(name.lower().split())
    if wanted in by_name:
        return by_name[wanted]
    near = get_close_matches(wanted, by_name, n=3, cutoff=0.4)
    near = [f"{by_name[key].id} ({by_name[key].name})" for key in near]
    say = f"did you mean {', '.join(dict.fromkeys(near))}?" if near else "look for it by words: posttrain doctor lookup SYMPTOM"
    raise ConfigError(f"the catalog has no entry '{name[:80]}'; {say}")


def _match(entry: Entry, count: Counter[str], terms: Mapping[str, tuple[str, float]], counts: Mapping[str, Counter[str]]) -> Match:
    """BM25, and the share of the question's words that an entry holds: one that has them all goes before one that repeats a single one."""
    n, total = len(counts), sum(count.values())
    mean = sum(sum(other.values()) for other in counts.values()) / n
    score, words = 0.0, []
    for term, (word, weight) in terms.items():
        if not count[term]:
            continue
        holding = sum(1 for other in counts.values() if other[term])
        rarity = math.log(1 + (n - holding + 0.5) / (holding + 0.5))
        often = count[term] * (_K1 + 1) / (count[term] + _K1 * (1 - _B + _B * total / mean))
        score += weight * rarity * often
        words.append(word)
    return Match(entry, score * len(words) / max(1, len(terms)), tuple(words))


def _by_one_name(ranked: Iterable[Match], catalog: Mapping[str, Entry]) -> list[Match]:
    """Each failure once, under the name it is reported by, at the place of its best name."""
    found: dict[str, Match] = {}
    for match in ranked:
        entry = catalog.get(match.entry.same_as or "", match.entry)
        found.setdefault(entry.id, Match(entry, match.score, match.words))
    return list(found.values())


def _document(entry: Entry) -> list[str]:
    """The terms of an entry, as often as their field counts."""
    found = [_term(word) for name, weight in _FIELDS for word in _words(getattr(entry, name)) for _ in range(weight)]
    metrics = {metric for sign in entry.signs for metric in sign.metrics}
    found += [_term(word) for metric in metrics for word in _words(metric) for _ in range(2)]
    return [*found, *(entry.id.lower() for _ in range(3)), *(_term(word) for word in _words(entry.verdict.value))]


def _plain_words(entry: Entry) -> Iterable[str]:
    for name, _ in _FIELDS:
        yield from _words(getattr(entry, name))


def _joined(text: str) -> str:
    """Lower case, with phrases that mean one thing as one word."""
    text = text.lower()
    for phrase, word in _PHRASES.items():
        text = text.replace(phrase, word)
    return text


def _words(text: str) -> list[str]:
    found = re.findall(r"[a-z0-9]+", _joined(text))
    return [word for word in found if word not in _STOP]


def _term(word: str) -> str:
    """What a word counts as: its stem, or the one that stands for its synonyms."""
    return _STANDS.get(word) or _STANDS.get(stem := _stem(word)) or stem


def _stem(word: str) -> str:
    """A word without the commonest endings. Example: _stem("collapses") == _stem("collapsing") -> "collaps"."""
    for end in ("ings", "ing", "edly", "ed", "es", "s", "ly"):
        if word.endswith(end) and len(word) - len(end) >= 3 and not (end == "s" and word.endswith("ss")):
            word = word[: -len(end)]
            break
    return word[:-1] if word.endswith("e") and len(word) > 3 else word


_STANDS = {form: _stem(group[0]) for group in _SYNONYMS for word in group for form in (word, _stem(word))}
