"""Files that are either complete or not there."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nni_petridish.errors import GalleryError

_PREFIX = ".tmp-"


def to_json(data: Any) -> bytes:
    """Write plain data as readable JSON; NaN and infinity are refused, as JSON has neither."""
    try:
        return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise GalleryError(f"Expected data that JSON can hold: {error}.") from error


def write_file(path: Path, data: bytes) -> None:
    """Replace a file in one step: whoever reads it sees the old content or all of the new one."""
    temporary = temporary_name(path)
    try:
        _write_new(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, bytes]) -> bool:
    """Make a folder with all its files in one step.

    Returns
    -------
    bool
        False if there was such a folder already; it is left alone.
    """
    temporary = temporary_name(path)
    try:
        temporary.mkdir()
        for name, data in files.items():
            _write_new(temporary / name, data)
        sync_folder(temporary)
        try:
            os.rename(temporary, path)
        except OSError:
            if path.is_dir():
                return False
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Name something unfinished beside ``path``, telling which process is at work on it."""
    tag = f"{path.name}-{host_name()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.parent / f"{_PREFIX}{tag}"


def remove_leftovers(folder: Path, max_age: float) -> list[str]:
    """Remove what dead writers left unfinished in a folder.

    A writer is dead when its process on this machine is gone; of another machine's writer that is
    assumed after ``max_age`` seconds.
    """
    removed = []
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        if _is_abandoned(path, max_age):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def _write_new(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _is_abandoned(path: Path, max_age: float) -> bool:
    try:
        old = time.time() - path.stat().st_mtime > max_age
        _, host, pid, _ = path.name.rsplit("-", 3)
    except (FileNotFoundError, ValueError):
        return False
    return old or (host == host_name() and pid.isdigit() and not _is_alive(int(pid)))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def host_name() -> str:
    """Return the name of this machine in letters, digits, dots and underscores."""
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
