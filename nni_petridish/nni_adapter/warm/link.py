"""The connection of a trial and the server: its address, its messages, who may use it.

A trial sends its standard streams and a `Request`. The server answers `ACCEPTED` or closes the
connection. Then bytes to the forked process are numbers of signals, and the one byte back is its
exit code. Either side takes the end of the connection for the end of the other one.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import nni_petridish.errors

SWITCH = "NNI_PETRIDISH_WARM"
"""Environment variable: with 0 every trial imports for itself."""
FILE = "petridish.sock"
ACCEPTED = b"+"
STREAMS = (0, 1, 2)
MOST_BYTES = 1 << 22
"""The largest request; Linux allows a process two megabytes of environment."""
_LONGEST_PATH = 107
"""Bytes of the path of a socket."""
_LENGTH = struct.Struct("!I")
_OWN_PREFIXES = ("NNI_", "CUDA_VISIBLE_")
_OWN_NAMES = frozenset({"MULTI_PHASE", "REUSE_MODE", "SDK_PROCESS", "PWD", "OLDPWD", "SHLVL", "_"})
_SAME_FOR_ALL = "NNI_PETRIDISH_"


@dataclass(frozen=True)
class Request:
    """All in which a trial's process differs from the server's.

    Parameters
    ----------
    setting
        The interpreter, the packages and the environment, see `own_setting`. They must be the
        server's own, or what the server has imported is not what the trial would import.
    environment, folder, mask, path
        Environment variables, current folder, umask and module search path of the trial.
    """

    setting: list[str]
    environment: dict[str, str]
    folder: str
    mask: int
    path: list[str]

    @classmethod
    def of_this_process(cls) -> Request:
        """Return the request of this process."""
        mask = os.umask(0o077)
        os.umask(mask)
        return cls(own_setting(), dict(os.environ), os.getcwd(), mask, list(sys.path))


def is_possible() -> bool:
    """Return whether trials can be warm here: forking after an import of torch is safe on Linux."""
    return sys.platform.startswith("linux") and os.environ.get(SWITCH) != "0"


def address(experiment: Path) -> Path | None:
    """Return the socket of an experiment's folder; None if its path is too long for a socket."""
    path = experiment / FILE
    return path if len(os.fsencode(path)) <= _LONGEST_PATH else None


def own_setting() -> list[str]:
    """Return what a process of the server and a trial's own process must have in common."""
    return [
        sys.executable,
        str(Path(nni_petridish.errors.__file__).resolve()),
        *sys.path[1:],  # the first one is the folder or script that was started
        *sorted(f"{name}={value}" for name, value in shared_environment(os.environ).items()),
    ]


def shared_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what NNI and shells set for every process.

    >>> shared_environment({"NNI_EXP_ID": "a", "OMP_NUM_THREADS": "1", "PWD": "/", "A": ""})
    {'OMP_NUM_THREADS': '1', 'A': ''}
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_SAME_FOR_ALL)
        or (name not in _OWN_NAMES and not name.startswith(_OWN_PREFIXES))
    }


def is_own_user(peer: socket.socket) -> bool:
    """Return whether the process at the other end belongs to this process's user."""
    found = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", found)
    return bool(user == os.getuid())


def send_request(connection: socket.socket, request: Request) -> None:
    """Send a request and the standard streams of this process."""
    text = json.dumps(asdict(request)).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(text))], list(STREAMS))
    connection.sendall(text)


def receive_request(connection: socket.socket) -> tuple[Request, list[int]]:
    """Return the request of a trial and its standard streams.

    Raises
    ------
    OSError
        If the trial does not send in time.
    ValueError
        If it sends something else.
    """
    head, streams, _, _ = socket.recv_fds(connection, _LENGTH.size, len(STREAMS))
    try:
        if len(head) != _LENGTH.size or len(streams) != len(STREAMS):
            raise ValueError("no request")
        (length,) = _LENGTH.unpack(head)
        if length > MOST_BYTES:
            raise ValueError(f"a request of {length} bytes")
        with connection.makefile("rb") as file:
            text = file.read(length)
        return Request(**json.loads(text)), streams
    except (TypeError, ValueError, OSError) as error:
        for stream in streams:
            os.close(stream)
        raise error if isinstance(error, OSError) else ValueError(str(error)) from error
