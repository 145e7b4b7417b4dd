"""The cache folder in the user's home: measured costs, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the path of the cache folder, which may not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "nni-petridish"


def make_cache_folder() -> Path:
    """Create the cache folder if needed and return its path.

    Only the user has access to it, because compiled code in it is executed.
    """
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
