"""The trial's side: ask the server for a warm process, and wait for it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from nni_petridish.nni_adapter.warm.link import (
    ACCEPTED,
    Request,
    address,
    is_own_user,
    is_possible,
    send_request,
)

_PATIENCE = 30.0
"""Seconds in which a server has imported what it forks."""
_KILLED = 128 + signal.SIGKILL
_HANDED_ON = (signal.SIGTERM, signal.SIGINT)


def run_warm() -> int | None:
    """Carry out this trial in a process of the server.

    Returns
    -------
    int or None
        Its exit code; None if there is no server that takes it, so that nothing has happened.
    """
    # Held back until they can be handed on: the other process may be at work already.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
    try:
        connection = _connect()
        if connection is None:
            return None
        for number in _HANDED_ON:
            signal.signal(number, _hand_on_to(connection))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
    with connection:
        connection.settimeout(None)
        try:
            code = connection.recv(1)
        except OSError:
            code = b""
    return code[0] if code else _KILLED


def _connect() -> socket.socket | None:
    """Return the connection to a process that carries the trial out."""
    path = _find() if is_possible() else None
    if path is None or not path.exists():
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_PATIENCE)
        connection.connect(str(path))
        if is_own_user(connection):
            send_request(connection, Request.of_this_process())
            if connection.recv(1) == ACCEPTED:
                return connection
    except OSError:
        pass  # no server, or one that is busy
    connection.close()
    return None


def _find() -> Path | None:
    """Return the socket of the experiment: its folder is named by its id and has the trial's."""
    own, experiment = os.environ.get("NNI_SYS_DIR"), os.environ.get("NNI_EXP_ID")
    if not own or not experiment:
        return None
    return next((address(f) for f in Path(own).parents if f.name == experiment), None)


def _hand_on_to(connection: socket.socket) -> Callable[[int, FrameType | None], None]:
    def hand_on(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # if it has ended, its exit code is about to be read
            connection.sendall(bytes([number]))

    return hand_on
