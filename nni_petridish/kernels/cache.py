"""The folder in a user's home for what can be made again: measured costs, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder; it may not be there yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "nni-petridish"


def make_cache_folder() -> Path:
    """Return the folder, made for this user alone: programs in it are run."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
