"""Locks that are released when their process ends.

They are POSIX record locks. They work between processes, and between machines on NFS with a lock
service. The kernel releases them whenever and however the process ends, and a forked child does not
inherit them. On NFS the locks of a machine that vanished are held until the server's lease expires
(about 90 seconds).
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from nni_petridish.errors import GalleryError, StorageError
from nni_petridish.gallery.files import host_name, in_one_line


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock file ``path`` in this context; wait until it is free. Does not nest."""
    # Record locks do not exclude threads of one process, and closing any descriptor of the file
    # releases them, so only one thread at a time may hold one.
    with _one_thread:
        descriptor = _open_lock(path)
        try:
            _lock(descriptor, path, wait=True)
            yield
        finally:
            os.close(descriptor)


class ExclusiveLock:
    """A long-lived lock; acquiring it while it is held raises an error that names the holder.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, ExclusiveLock(Path(folder) / "lock", "Here"):
    ...     ExclusiveLock(Path(folder) / "lock", "Here").acquire()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    nni_petridish.errors.GalleryError: Here: process ... on ... is at work already.
    """

    # Record locks do not exclude within one process, so held paths are listed here, with the
    # process id: a forked child inherits this table but not the locks.
    _held: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, path: Path, what: str) -> None:
        self._path = path
        self._key = os.path.realpath(path)
        self._what = what
        self._descriptor: int | None = None

    def acquire(self) -> ExclusiveLock:
        """Acquire the lock, or raise a GalleryError at once."""
        with _one_thread:
            if self.is_held_here(self._path):
                raise self._taken(f"process {os.getpid()} on {host_name()}")
            descriptor = _open_lock(self._path)
            try:
                if not _lock(descriptor, self._path, wait=False):
                    owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                    raise self._taken(owner or "another process")
                with suppress(OSError):  # a full disk keeps the name of an earlier holder
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, f"process {os.getpid()} on {host_name()}\n".encode(), 0)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            self._held[self._key] = os.getpid()
        return self

    def release(self) -> None:
        """Release the lock if it is held."""
        with _one_thread:
            if self._descriptor is None:
                return
            os.close(self._descriptor)
            self._descriptor = None
            if self._held.get(self._key) == os.getpid():
                del self._held[self._key]

    @classmethod
    def is_held_here(cls, path: Path) -> bool:
        """Return whether this process holds the lock of a file."""
        return cls._held.get(os.path.realpath(path)) == os.getpid()

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


def is_locked(path: Path) -> bool:
    """Return whether a process, this one or another, holds the `ExclusiveLock` of a file."""
    with _one_thread:
        if ExclusiveLock.is_held_here(path):
            return True
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _lock(descriptor, path, wait=False)
        except StorageError:  # no locks: whether it is held cannot be told
            return False
        finally:
            os.close(descriptor)


_one_thread = threading.Lock()


def _new_thread_lock() -> None:
    global _one_thread
    _one_thread = threading.Lock()


# A child forked while another thread holds the lock would wait for that thread forever.
os.register_at_fork(after_in_child=_new_thread_lock)


def _open_lock(path: Path) -> int:
    with in_one_line(f"open {path}"):
        # The holder writes its name into the file: a link could lead out of the gallery.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(path, flags, 0o666)


def _lock(descriptor: int, path: Path, wait: bool) -> bool:
    with in_one_line(f"lock {path}"):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except (BlockingIOError, PermissionError):
            return False
    return True
