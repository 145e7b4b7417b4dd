"""Atomic writing of files and folders: each is complete or absent."""

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
    """Return plain data as indented JSON; NaN and infinity, which JSON lacks, raise an error."""
    try:
        return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise GalleryError(f"Expected data that JSON can hold: {error}.") from error


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file atomically: readers see either the old or the new content."""
    temporary = temporary_name(path)
    try:
        _write_new(temporary, data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, bytes]) -> bool:
    """Create a folder with all its files atomically.

    Returns
    -------
    bool
        False if the folder exists already; it is not changed.
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
    """Flush renames inside a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Return a temporary name next to ``path``, which contains the host and the process id."""
    tag = f"{path.name}-{host_name()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.parent / f"{_PREFIX}{tag}"


def remove_leftovers(folder: Path, max_age: float) -> list[str]:
    """Remove the temporary files of dead writers from a folder, and return their names.

    A writer is dead if its process on this machine is gone, or, for a writer on another machine,
    after ``max_age`` seconds.
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
    """Return the name of this machine, reduced to letters, digits, dots and underscores."""
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
