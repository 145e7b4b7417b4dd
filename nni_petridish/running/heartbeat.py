"""Heartbeats of long-running processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Heartbeat:
    """A thread that beats every few seconds for as long as its process lives.

    Parameters
    ----------
    beat
        Gives one sign of life; returns whether to go on.
    seconds
        Time between two beats.
    at_once
        Whether the first beat comes at the start rather than after the first wait.
    """

    def __init__(self, beat: Callable[[], bool], seconds: float, at_once: bool = True) -> None:
        self._beat, self._seconds, self._at_once = beat, seconds, at_once
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def _run(self) -> None:
        if self._at_once and not self._beat():
            return
        while not self._end.wait(self._seconds):
            if not self._beat():
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
