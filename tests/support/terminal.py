"""Pseudo-terminals: a command on one, in a process of its own or in this one."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_CONTROLS = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


def run_in_terminal(arguments: list[str], until: str, seconds: float = 60) -> tuple[int, str]:
    """Run the command on a terminal; press Ctrl-C when a text appears. Return code and output."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-m", "nni_petridish", *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
    )
    os.close(follower)
    output, asked, end = "", False, time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([leader], [], [], 0.2)[0]:
            try:
                output += os.read(leader, 65536).decode(errors="replace")
            except OSError:  # the process has closed the terminal
                break
        if until in output and not asked:
            asked = True
            process.send_signal(signal.SIGINT)
    os.close(leader)
    return process.wait(10), _CONTROLS.sub("", output)


class Terminal:
    """A pseudo-terminal; Ctrl-C is pressed when a text appears on it."""

    def __init__(self, leader: int, until: str) -> None:
        self._leader, self._until = leader, until
        self._shown, self._end = "", threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        asked = False
        while not self._end.is_set():
            if select.select([self._leader], [], [], 0.05)[0]:
                self._shown += os.read(self._leader, 65536).decode(errors="replace")
            if self._until in self.text() and not asked:
                asked = True
                os.kill(os.getpid(), signal.SIGINT)

    def text(self) -> str:
        """Return the text so far, without control characters."""
        return _CONTROLS.sub("", self._shown)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Read what is left, and end."""
        time.sleep(0.2)
        self._end.set()
        self._thread.join()


@contextmanager
def on_terminal(
    monkeypatch: pytest.MonkeyPatch, until: str, columns: int = 120
) -> Iterator[Terminal]:
    """Make a terminal of the standard error and output; Ctrl-C comes when a text appears."""
    leader, follower = pty.openpty()
    terminal = Terminal(leader, until)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Shells ignore it for commands in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with os.fdopen(follower, "w") as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        patched.setattr(sys, "stdout", stream)
        terminal.start()
        try:
            yield terminal
        finally:
            stream.flush()
            terminal.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)
    os.close(leader)
