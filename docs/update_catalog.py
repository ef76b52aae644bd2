"""Write docs/catalog.md anew from the catalog: `python docs/update_catalog.py`, or `--check` to see whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from posttrain.doctor.catalog import CATALOG
from posttrain.doctor.page import catalog_page

PAGE = Path(__file__).parent / "catalog.md"


def main(arguments: list[str]) -> int:
    """Write the page; with --check only compare."""
    page = catalog_page(CATALOG.values())
    if arguments == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
            return 0
        sys.stderr.write(f"{PAGE.name} is out of date: python docs/update_catalog.py\n")
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
