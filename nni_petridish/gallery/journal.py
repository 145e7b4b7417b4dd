"""An append-only journal for several readers and writers: one event per line, as JSON.

Every line ends with a checksum of itself. A writer that dies in the middle of a line leaves a torn
line, which readers ignore and the next writer terminates. Readers skip a damaged line with a
warning.

Writers hold a lock file next to the journal, so that appending is safe on NFS too, where
``O_APPEND`` alone is not.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import zlib
from pathlib import Path

from nni_petridish._support.reading import open_regular, parse_json
from nni_petridish.errors import GalleryError
from nni_petridish.gallery.files import in_one_line, sync_folder
from nni_petridish.gallery.locks import file_lock
from nni_petridish.search.events import Event

_log = logging.getLogger(__name__)
# A link in the place of the journal would lead out of the gallery.
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CHECKSUM = re.compile(rb',"crc":"([0-9a-f]{8})"}$')


class Journal:
    """A journal in one file; each object remembers how far it has read.

    Parameters
    ----------
    path
        The path of the file, which the first `append` creates.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Journal(Path(folder) / "journal.jsonl")
    ...     journal.append({"event": "ask", "id": "g00000"})
    ...     journal.read_new(), journal.read_new()
    ([{'event': 'ask', 'id': 'g00000'}], [])
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._lock = self.path.with_suffix(".lock")
        self._offset = 0
        self._line = 0

    def append(self, event: Event) -> None:
        """Append one event and sync it to the disk."""
        line = encode(event) + b"\n"
        with file_lock(self._lock):
            self._write(line)

    def repair(self) -> None:
        """Terminate a torn last line, so that the next event starts a new one."""
        with file_lock(self._lock):
            if self.path.exists():
                self._write(b"")

    def read_new(self) -> list[Event]:
        """Return the events added since the last call, without an incomplete last line."""
        lines = self._complete_lines()
        events = [decode(line) for line in lines]
        if None in events:
            # On NFS a page of a growing file may be stale; taking the lock refreshes it.
            lines = self._complete_lines(locked=True)
            events = [decode(line) for line in lines]
        for number, event in enumerate(events, self._line + 1):
            if event is None:
                _log.warning("%s: line %d is damaged and was skipped.", self.path, number)
        self._line += len(lines)
        self._offset += sum(len(line) + 1 for line in lines)
        return [event for event in events if event is not None]

    def read_all(self) -> list[Event]:
        """Return all events, without changing the position of this reader."""
        return Journal(self.path).read_new()

    def _write(self, data: bytes) -> None:
        is_new = not self.path.exists()
        with in_one_line(f"write {self.path}"):
            descriptor = os.open(self.path, _FLAGS, 0o666)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    _write_whole(descriptor, b"\n")
                _write_whole(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                sync_folder(self.path.parent)

    def _complete_lines(self, locked: bool = False) -> list[bytes]:
        if locked and os.access(self.path.parent, os.W_OK):
            with file_lock(self._lock):
                return self._complete_lines()
        with in_one_line(f"read {self.path}"):
            try:
                with open_regular(self.path) as file:
                    size = os.fstat(file.fileno()).st_size
                    file.seek(self._offset)
                    data = file.read()
            except FileNotFoundError:
                return []
        if size < self._offset:
            raise GalleryError(f"{self.path} has become shorter; it must only ever grow.")
        return data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write in a single call, so that a torn line can only be truncated; remove a torn line."""
    written = os.write(descriptor, data) if data else 0
    if written != len(data):
        # Readers do not take a line without its end, so none has read further than this.
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def encode(event: Event) -> bytes:
    """Return an event as one line of JSON with its checksum as the last key.

    >>> encode({"event": "release", "id": "g00001"})
    b'{"event":"release","id":"g00001","crc":"e225a6ec"}'
    """
    try:
        body = json.dumps(event, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise GalleryError(f"Expected an event that JSON can hold: {error}.") from error
    return body[:-1] + f',"crc":"{zlib.crc32(body):08x}"}}'.encode()


def decode(line: bytes) -> Event | None:
    """Return the event of a line written by `encode`; None if the line is damaged."""
    found = _CHECKSUM.search(line)
    if found is None:
        return None
    body = line[: found.start()] + b"}"
    if int(found[1], 16) != zlib.crc32(body):
        return None
    try:
        event = parse_json(body)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
