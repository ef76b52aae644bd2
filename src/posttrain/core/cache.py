"""Where things that can be made again are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(kind: str) -> Path:
    """The folder for cached artefacts of one kind: $POSTTRAIN_CACHE, else the user's cache folder."""
    root = os.environ.get("POSTTRAIN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "posttrain"
    return Path(root) / kind
