"""Write the marked numbers of README.md and docs/ from evidence/claims.jsonl, and docs/claims.md whole: `python docs/update_claims.py`.

With --check nothing is written; what a hand changed is named, and the exit status is 1. A number is marked <!-- claim:ID -->0.96
<!-- /claim -->, the table of a collected run <!-- claims-table:NAME --> to <!-- /claims-table -->, on lines of their own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from posttrain.core.errors import PosttrainError
from posttrain.runs.claims import Claims
from posttrain.runs.claims_check import check
from posttrain.runs.claims_collect import table
from posttrain.runs.claims_text import claims_page, fill, read_text

ROOT = Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(<!-- claims-table:(?P<name>[\w.-]+) -->\n).*?(<!-- /claims-table -->)", re.DOTALL)


def pages(root: Path) -> list[Path]:
    """The pages whose numbers may be marked."""
    return [root / "README.md", *sorted(page for page in (root / "docs").glob("*.md") if page.name != "claims.md")]


def updated(text: str, claims: Claims, name: str) -> str:
    """A page with every marked number and table as the ledger has it."""
    return fill(TABLE.sub(lambda found: found[1] + table(claims, found["name"]) + found[3], text), claims, name)


def outdated(root: Path, claims: Claims) -> dict[Path, str]:
    """Pages that are not as the ledger has them, with what they should be."""
    wanted = {page: updated(read_text(page), claims, page.name) for page in pages(root) if page.is_file()}
    wanted[root / "docs" / "claims.md"] = claims_page(claims)
    return {page: text for page, text in wanted.items() if not page.is_file() or read_text(page) != text}


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Write the pages, or with --check name those out of date; the exit status is 1 when there are some or a claim is broken."""
    try:
        claims = Claims.read(root / "evidence" / "claims.jsonl")
        broken = [verdict for verdict in check(claims) if verdict.outcome == "broken"]
        old = outdated(root, claims)
    except PosttrainError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{verdict.id}: {verdict.detail}\n" for verdict in broken))
    for page, text in old.items():
        if "--check" in arguments:
            sys.stdout.write(f"{page.name} is out of date; run python docs/update_claims.py\n")
        elif not broken:
            page.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{page.name}: written\n")
    return int(bool(broken) or ("--check" in arguments and bool(old)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
