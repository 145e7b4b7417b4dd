"""The pace of work: durations in words, and the time that the rest takes."""

from __future__ import annotations

import time
from collections.abc import Callable

_LEAST_SHARE = 0.02
"""Part of the work after which the time left is estimated."""


def duration(seconds: float) -> str:
    """Return a duration in the unit that fits.

    >>> duration(42), duration(125), duration(5000)
    ('42 s', '2:05 min', '1:23 h')
    """
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


class Pace:
    """The pace of work since it was first looked at.

    Parameters
    ----------
    clock
        Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._first: float | None = None

    def begin(self, done: float) -> None:
        """Note how much was done at the beginning; later calls change nothing."""
        if self._first is None:
            self._first = done

    def passed(self) -> float:
        """Return the seconds since the beginning."""
        return self._clock() - self._began

    def seconds_left(self, done: float, total: float) -> float | None:
        """Return the time that the rest takes; None at the beginning and at the end.

        Parameters
        ----------
        done, total
            Units of work that are done, and of all work.
        """
        here = 0.0 if self._first is None else done - self._first
        if here <= 0 or here < _LEAST_SHARE * total or done >= total:
            return None
        return (total - done) * self.passed() / here
