"""The coordinator of one search on one gallery, which every front asks for growths.

A growth is handed out only after its line is on the disk, and the search changes only by events
that are read back from the journal. Replaying the journal therefore gives the same state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from nni_petridish.errors import GalleryError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.recovery import recover
from nni_petridish.search.events import Event
from nni_petridish.search.records import Done, Growth, Wait
from nni_petridish.search.search import Chooser, Search
from nni_petridish.search.settings import SearchSettings

FREE_FAILURES = 2
"""Failures in a row without a pause: both attempts of one growth."""
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 5.0
"""Seconds between a failure and the next growth if several failed in a row."""


class Coordinator:
    """Hands out the growths of a gallery; safe to call from several threads.

    It holds the gallery's lock until it is closed. A gallery with an earlier part of the search is
    continued: finished models are known at once, and `resume` releases the growths whose workers
    are gone.

    Parameters
    ----------
    gallery
        The gallery of models and journal.
    settings
        Settings of the search.
    chooser
        Chooses λ and I_max of each growth; the settings' numbers are taken if it is None.
    clock
        Returns seconds, for ``max_seconds``; time before an interruption counts too.

    Attributes
    ----------
    search
        The state of the search, for reading; call `sync` first for the latest.
    """

    def __init__(
        self,
        gallery: Gallery,
        settings: SearchSettings,
        chooser: Chooser | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gallery = gallery
        self.search = Search(settings, chooser, commit=self._write_and_apply)
        self._journal = type(gallery.journal)(gallery.journal.path)
        self._mutex = threading.RLock()
        self._clock = clock
        self._unwritten: Event | None = None
        self._failed = (0, 0.0)
        self._claim = gallery.lock_coordinator()
        try:
            recover(gallery)
            self.sync()
            for id in self.search.refused():  # the settings may be right now
                self.release(id)
            for id in (*self.search.dropped(), *self.search.rejected()):
                gallery.remove_work(id)
        except BaseException:
            self._claim.release()
            raise
        self._started = clock() - self.search.elapsed

    @property
    def elapsed(self) -> float:
        """Seconds this search has been running, over all its interruptions."""
        return self._clock() - self._started

    def sync(self) -> list[str]:
        """Apply what is new in the journal; return the ids of the models that are new in it."""
        with self._mutex:
            events = self._journal.read_new()
            for event in events:
                self.search.apply(event)
            return [event["id"] for event in events if event["event"] == "model"]

    def ask(self) -> Growth | Wait | Done:
        """Hand out the next growth, if there is one; after failures in a row, after a pause.

        Raises
        ------
        StorageError
            If the disk is full or gone; ask again.
        """
        with self._mutex:
            self.sync()
            self.gallery.sweep()
            if self._unwritten is not None:
                # Nobody was told of this growth, whose line may be on the disk or not.
                growth = Growth.from_dict(self._unwritten["growth"])
                self._write_and_apply(self._unwritten)
                return growth
            if (left := self._pause_left()) > 0:
                return Wait(f"the last growths failed; the next one starts in {left:.0f} s")
            return self.search.ask(self.elapsed)

    def retry_failed(self) -> list[str]:
        """Try the growths again that were given up; return their ids."""
        with self._mutex:
            self.sync()
            return [id for id in self.search.dropped() if self.search.retry(id)]

    def fail(self, id: str, reason: str, attempt: int | None = None) -> bool:
        """Record that a growth failed, unless its model has arrived; see `Search.fail`."""
        with self._mutex:
            self.sync()
            return self.search.fail(id, reason, attempt)

    def release(self, id: str) -> bool:
        """Release a running growth whose worker is gone, so that it is handed out again."""
        with self._mutex:
            self.sync()
            return self.search.release(id)

    def quarantine(self, id: str, reason: str) -> bool:
        """Take a damaged model out of gallery and search."""
        with self._mutex:
            moved = self.gallery.quarantine(id, reason)
            self.sync()
            return moved

    def resume(self) -> list[str]:
        """Release every running growth; return the ids of those.

        For a start after an interruption, when no worker of the earlier run is left.
        """
        with self._mutex:
            self.sync()
            return [growth.id for growth in self.search.running() if self.release(growth.id)]

    def close(self) -> None:
        """Release the gallery's lock."""
        self._claim.release()

    def _write_and_apply(self, event: Event) -> None:
        if event["event"] == "ask":
            self._unwritten = event
        self.gallery.journal.append(event)
        self.sync()
        self._unwritten = None

    def _pause_left(self) -> float:
        """Return the seconds to wait before the next growth, which grow with every failure."""
        failures, now = self.search.failed_attempts(), time.monotonic()
        if failures != self._failed[0]:
            self._failed = (failures, now)
        further = failures - FREE_FAILURES
        pause = min(FIRST_PAUSE * 2.0 ** (further - 1), LONGEST_PAUSE) if further > 0 else 0.0
        return self._failed[1] + pause - now

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def refuse_unless_resuming(folder: Path, search: Search, resume: bool) -> None:
    """Raise if a gallery holds models of an earlier run and the user did not ask to resume."""
    models = len(search.models())
    if models and not resume:
        raise GalleryError(
            f"{folder} holds {models} models of this search already:"
            " add --resume to go on with it, or choose another gallery."
        )
