"""Files that are either complete or not there, and locks that die with their process.

Locks are POSIX record locks: they work between processes, and between machines on NFS where the
lock service runs; the kernel drops them when their process ends, however it ends, and a forked
child does not inherit them. On NFS the locks of a machine that vanished last until the server's
lease runs out (about a minute and a half).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
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
    tag = f"{path.name}-{_host()}-{os.getpid()}-{secrets.token_hex(4)}"
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


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` for a moment; waits until it is free. Does not nest."""
    # Record locks do not exclude threads of one process, and closing any descriptor of the file
    # drops them: one thread at a time.
    with _one_thread:
        descriptor = _open_lock(path)
        try:
            _lock(descriptor, path, wait=True)
            yield
        finally:
            os.close(descriptor)


class ExclusiveLock:
    """A lock held for long; a second holder gets an error that names the first.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, ExclusiveLock(Path(folder) / "lock", "Here"):
    ...     ExclusiveLock(Path(folder) / "lock", "Here").acquire()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    nni_petridish.errors.GalleryError: Here: process ... on ... is at work already.
    """

    # Within one process a record lock excludes nobody: paths held, and by which process, for a
    # forked child inherits this table but not the locks.
    _held: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._key = os.path.realpath(path)
        self._what = what
        self._descriptor: int | None = None

    def acquire(self) -> ExclusiveLock:
        """Take the lock or raise a GalleryError at once."""
        with _one_thread:
            if self._held.get(self._key) == os.getpid():
                raise self._taken(f"process {os.getpid()} on {_host()}")
            descriptor = _open_lock(self._path)
            try:
                if not _lock(descriptor, self._path, wait=False):
                    owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                    raise self._taken(owner or "another process")
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"process {os.getpid()} on {_host()}\n".encode(), 0)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            self._held[self._key] = os.getpid()
        return self

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        with _one_thread:
            if self._descriptor is None:
                return
            os.close(self._descriptor)
            self._descriptor = None
            if self._held.get(self._key) == os.getpid():
                del self._held[self._key]

    def _taken(self, owner: str) -> GalleryError:
        return GalleryError(f"{self._what}: {owner} is at work already.")

    def __enter__(self) -> ExclusiveLock:
        return self if self._descriptor is not None else self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


_one_thread = threading.Lock()


def _new_thread_lock() -> None:
    global _one_thread
    _one_thread = threading.Lock()


# A child forked while another thread held the lock would wait for that thread for ever.
os.register_at_fork(after_in_child=_new_thread_lock)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise GalleryError(f"Cannot open {path}: {error.strerror}.") from error


def _lock(descriptor: int, path: Path, wait: bool) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise GalleryError(
            f"Cannot lock {path}: {error.strerror}; its file system must support locks."
        ) from error
    return True


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
    return old or (host == _host() and pid.isdigit() and not _is_alive(int(pid)))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
