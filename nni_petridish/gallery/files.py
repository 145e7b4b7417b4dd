"""Atomic writing of files and folders: each is complete or absent.

Errors of the system become errors of one line here. Those of the disk are a `StorageError`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nni_petridish.errors import GalleryError, StorageError

_PREFIX = ".tmp-"
_SEAL = "checksum"
_ABANDONED_SECONDS = 3600.0

_SPACE = "free some space on its disk"
_RIGHTS = "allow this user to write there"
_FILES = "close some files, or raise the limit of open ones"
_LOCKS = "its file system must support locks"
_DISK = "check its disk"
_REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EROFS: "make its file system writable",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOLCK: _LOCKS,
    errno.ENOSYS: _LOCKS,
    errno.EOPNOTSUPP: _LOCKS,
    errno.EIO: _DISK,
    errno.ENOMEM: "free some memory",
    errno.ENODEV: _DISK,
    errno.ENXIO: _DISK,
    errno.ESTALE: _DISK,
    errno.ENOTCONN: _DISK,
    errno.ETIMEDOUT: _DISK,
    errno.EHOSTDOWN: _DISK,
    errno.EHOSTUNREACH: _DISK,
    errno.EREMOTEIO: _DISK,
}
"""Advice for each error that is the fault of a disk, not of a growth."""


def to_json(data: Any) -> bytes:
    """Return plain data as indented JSON; NaN and infinity, which JSON lacks, raise an error."""
    try:
        return (json.dumps(data, indent=2, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise GalleryError(f"Expected data that JSON can hold: {error}.") from error


def seal(document: Mapping[str, Any]) -> bytes:
    """Return plain data as JSON with a checksum of itself, for `unseal`."""
    return to_json({**document, _SEAL: _checksum(document)})


def unseal(document: Any, path: Path) -> dict[str, Any]:
    """Return what was sealed; a `GalleryError` names the file if it was changed since.

    Files of earlier versions have no seal and are taken as they are.
    """
    if not isinstance(document, dict):
        raise GalleryError(f"{path} is damaged: it is no mapping.")
    content = {name: value for name, value in document.items() if name != _SEAL}
    if _SEAL in document and document[_SEAL] != _checksum(content):
        raise GalleryError(f"{path} was changed since it was written: its checksum is wrong.")
    return content


def _checksum(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(document)).hexdigest()


@contextmanager
def in_one_line(action: str) -> Iterator[None]:
    """Turn an error of the system into one line: a `StorageError`, or another `GalleryError`.

    Parameters
    ----------
    action
        What fails, such as ``"write journal.jsonl"``.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise GalleryError(f"Cannot {action}: {reason}.") from error
        raise StorageError(f"Cannot {action}: {reason}; {remedy}.") from error


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file atomically: readers see either the old or the new content."""
    temporary = temporary_name(path)
    with in_one_line(f"write {path}"):
        try:
            _write_new(temporary, data)
            os.replace(temporary, path)
        finally:
            _discard(temporary)
        sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and those around it, unless it exists."""
    with in_one_line(f"make {path}"):
        path.mkdir(parents=True, exist_ok=True)


def refuse_link(path: Path) -> None:
    """Raise a `GalleryError` if a path is a link, which could lead out of the gallery."""
    if path.is_symlink():
        raise GalleryError(
            f"{path} is a link but must be a folder: to store a gallery elsewhere, link all of it."
        )


def touch_file(path: Path) -> None:
    """Make a file, or set its time; not through a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        os.utime(descriptor)
    finally:
        os.close(descriptor)


def write_folder(path: Path, files: Mapping[str, bytes]) -> bool:
    """Create a folder with all its files atomically.

    Returns
    -------
    bool
        False if the folder exists already; it is not changed.
    """
    temporary = temporary_name(path)
    with in_one_line(f"write {path}"):
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


def remove_leftovers(folder: Path) -> list[str]:
    """Remove the temporary files of processes of this machine that are gone; return their names."""
    return [path.name for path in _leftovers(folder) if _is_orphan(path) and _discard(path)]


class Sweep:
    """Remover of temporary files that dead writers left behind, on whatever machine.

    A writer of this machine is dead if its process is gone. Of another machine's files, those count
    as abandoned that have not changed for an hour of this process: clocks of two machines are never
    compared. A writer that was only slow finds its file gone and writes it again.

    Parameters
    ----------
    folders
        The folders to sweep.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = tuple(folders)
        self._seen: dict[Path, tuple[tuple[int, ...], float]] = {}

    def run(self) -> list[str]:
        """Remove what is abandoned by now, and return the names."""
        removed = [name for folder in self._folders for name in remove_leftovers(folder)]
        now, before = time.monotonic(), self._seen
        self._seen = {}
        for path in (path for folder in self._folders for path in _leftovers(folder)):
            look = _look(path)
            seen, since = before.get(path, (look, now))
            since = since if seen == look else now
            if now - since > _ABANDONED_SECONDS and _discard(path):
                removed.append(path.name)
            else:
                self._seen[path] = (look, since)
        return removed


def _leftovers(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"{_PREFIX}*") if path.name.count("-") >= 4)


def _look(path: Path) -> tuple[int, ...]:
    """Return what changes while a file, or a file in a folder, is being written."""
    try:
        parts = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
        states = [part.stat() for part in parts]
    except OSError:
        return ()
    return tuple(number for state in states for number in (state.st_size, state.st_mtime_ns))


def _discard(path: Path) -> bool:
    """Remove a temporary file or folder if the disk allows it; return whether it is gone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return not os.path.lexists(path)


def _write_new(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _is_orphan(path: Path) -> bool:
    """Return whether the process of this machine that made a temporary file is gone."""
    _, host, pid, _ = path.name.rsplit("-", 3)
    return host == host_name() and pid.isdigit() and not _is_alive(int(pid))


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
