"""Waiting for a disk: faults of storage are no failures of a growth.

Who meets a `StorageError` says so in one line, waits with growing pauses, and tries again, so that
a search goes on by itself once there is space. A request to stop ends the waiting, and so does a
disk that stays away for longer than the limit ``max_pause``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TypeVar

from nni_petridish.errors import Interrupted, StorageError

_log = logging.getLogger(__name__)

Result = TypeVar("Result")
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 60.0
STEP_SECONDS = 0.2
"""Time between two looks at a request to stop."""


class Outage:
    """The outages of a disk: what is said of them, and how long they may last.

    Parameters
    ----------
    max_pause
        Seconds of waiting after which an outage is not waited for any longer; None waits for ever.
    """

    def __init__(self, max_pause: float | None) -> None:
        self._max_pause = math.inf if max_pause is None else max_pause
        self._waited: float | None = None
        self._pause = FIRST_SECONDS

    def met(self, error: StorageError) -> float:
        """Note that the disk failed; return the seconds to wait before trying again.

        Raises
        ------
        StorageError
            If the outage has lasted too long.
        """
        if self._waited is None:
            _log.warning("%s The search waits for it.", error)
            self._waited, self._pause = 0.0, FIRST_SECONDS
        if self._waited >= self._max_pause:
            text = str(error).removesuffix(".")
            raise StorageError(f"{text}; it was waited for {self._waited:.0f} s.") from error
        pause = min(self._pause, self._max_pause - self._waited)
        self._pause = min(2 * self._pause, LONGEST_SECONDS)
        self._waited += pause
        return pause

    def over(self) -> None:
        """Note that the disk works."""
        if self._waited is not None:
            _log.warning("The disk is back; the search goes on.")
        self._waited = None


def outlast(
    action: Callable[[], Result],
    should_stop: Callable[[], bool],
    max_pause: float | None,
) -> Result:
    """Call a function again and again until no `StorageError` keeps it from its end.

    Raises
    ------
    Interrupted
        If it was asked to stop while the disk was away.
    StorageError
        If the disk was away for longer than ``max_pause`` seconds.
    """
    outage = Outage(max_pause)
    while True:
        try:
            result = action()
        except StorageError as error:
            wait(outage.met(error), should_stop)
            if should_stop():
                raise Interrupted(f"stopped while waiting for a disk: {error}") from None
        else:
            outage.over()
            return result


def wait(seconds: float, should_stop: Callable[[], bool]) -> None:
    """Sleep, but not for much longer than until a request to stop."""
    end = time.monotonic() + seconds
    while not should_stop() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, STEP_SECONDS))
