"""Pin the toy curves anew: python tests/golden/update.py "why the numbers had to change"."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from golden_curves import curves

PINNED = Path(__file__).with_name("curves.json")


def main() -> None:
    """Write the curves with the reason for the change; refuse without one."""
    reason = " ".join(sys.argv[1:]).strip()
    if len(reason.split()) < 3:
        sys.exit("say in at least three words why the pinned numbers change")
    record = {"reason": reason, "curves": {name: [round(value, 6) for value in values] for name, values in curves().items()}}
    PINNED.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
