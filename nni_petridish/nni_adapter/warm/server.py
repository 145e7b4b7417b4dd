"""The server: imports once, and forks a process for each trial that asks.

``python -m nni_petridish.nni_adapter.warm.server SOCKET`` is started by the tuner, and ends with
it: when its standard input is closed. Trials that run then are not disturbed. Until the first trial
asks it imports nothing, so that it costs next to nothing where trials run on other machines.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

from nni_petridish.nni_adapter.warm.link import (
    ACCEPTED,
    Request,
    address,
    is_own_user,
    is_possible,
    own_setting,
    receive_request,
)
from nni_petridish.running.process import let_waiting_threads_sleep

_log = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Seconds in which a trial that has connected sends its request."""
_FAILED = 1
_UNHEARD = ".bind"  # as long as the suffix of the socket, whose path may be as long as possible
NEEDED = (
    "torch",
    "torch._dynamo",  # the first optimizer of a process imports it
    "torchvision",
    "safetensors.torch",
    # Of NNI. It reads the trial's environment when it is imported, so it is not imported here.
    "pandas",
    "scipy.stats",
    "nni_petridish.gallery.gallery",
    "nni_petridish.running.config",
    "nni_petridish.running.growth",
    "nni_petridish.running.worker",
)


class Server:
    """A server that runs as long as this object, or this process, lives.

    Parameters
    ----------
    experiment
        The folder of NNI's experiment, which trials on this machine know.
    """

    def __init__(self, experiment: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        path = address(experiment)
        if path is None or not is_possible():
            return
        command = [sys.executable, "-m", "nni_petridish.nni_adapter.warm.server", str(path)]
        with suppress(OSError):  # trials then import for themselves
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )

    def close(self) -> None:
        """End the server; trials that run are not disturbed."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


def serve(
    path: Path, lifeline: int, run: Callable[[], int], modules: Sequence[str] = NEEDED
) -> None:
    """Fork a process for each trial that asks, until the lifeline ends.

    Parameters
    ----------
    path
        The socket. It takes the place of one that an earlier server has left.
    lifeline
        A file descriptor that the starter of this process holds the other end of.
    run
        Carries out a trial, in a process of its own, and returns the exit code.
    modules
        Names of the modules that are imported when the first trial asks.
    """
    setting = own_setting()  # imports may set environment variables
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
        selectors.DefaultSelector() as ready,
    ):
        own = path.with_suffix(_UNHEARD)
        own.unlink(missing_ok=True)
        mask = os.umask(0o177)
        listener.bind(str(own))
        os.umask(mask)
        listener.listen()
        own.rename(path)  # who finds it is heard
        ready.register(listener, selectors.EVENT_READ)
        ready.register(lifeline, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked processes
        prepare = cache(lambda: _import_all(modules))
        while lifeline not in {key.fileobj for key, _ in ready.select()}:
            with suppress(OSError), listener.accept()[0] as connection:
                connection.settimeout(_PATIENCE)
                request, streams = _receive(connection)
                try:
                    if request is None or request.setting != setting:
                        continue
                    prepare()
                    if _has_one_thread() and os.fork() == 0:
                        _become(request, streams, [listener.fileno(), lifeline], connection, run)
                finally:
                    for stream in streams:
                        os.close(stream)
    path.unlink(missing_ok=True)


def _receive(connection: socket.socket) -> tuple[Request | None, list[int]]:
    """Return the request at the other end, if it may ask, and its standard streams."""
    if not is_own_user(connection):
        return None, []
    try:
        return receive_request(connection)
    except (OSError, ValueError) as error:
        _log.warning("a trial asked for no process: %s", error)
        return None, []


def _import_all(modules: Sequence[str]) -> None:
    let_waiting_threads_sleep()  # OpenMP reads that when it is loaded
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's, which starts its threads when it is loaded
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # collections of the forked processes leave these pages shared


def _has_one_thread() -> bool:
    """Return whether this process can be forked: a lock that a thread holds would stay locked."""
    return len(os.listdir("/proc/self/task")) == 1


def _become(
    request: Request,
    streams: list[int],
    own: list[int],
    connection: socket.socket,
    run: Callable[[], int],
) -> NoReturn:
    """Be the process of a trial, and end with it."""
    code = _FAILED
    try:
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for stream, descriptor in enumerate(streams):
            os.dup2(descriptor, stream)
        for descriptor in (*streams, *own):
            if descriptor > 2:
                os.close(descriptor)
        os.environ.clear()
        os.environ.update(request.environment)
        os.umask(request.mask)
        os.chdir(request.folder)
        sys.path[:] = request.path
        random.seed()
        connection.settimeout(None)
        threading.Thread(target=_obey, args=(connection,), daemon=True).start()
        connection.sendall(ACCEPTED)
        code = run()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else _FAILED
    except BaseException:
        _log.exception("the trial failed")
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
            connection.sendall(bytes([code]))
        os._exit(code)


def _obey(connection: socket.socket) -> None:
    """Pass on the signals of the trial that NNI started, and do not outlive it."""
    while True:
        try:
            number = connection.recv(1)
        except OSError:
            number = b""
        os.kill(os.getpid(), number[0] if number else signal.SIGKILL)


def main() -> None:
    """Serve the trials of an experiment until the tuner has ended."""
    from nni_petridish.nni_adapter.trial import main as run_trial

    logging.basicConfig(format="%(levelname)s: %(message)s")
    serve(Path(sys.argv[1]), sys.stdin.fileno(), run_trial)
    os._exit(0)  # at an ordinary end packages of torch may write to stderr


if __name__ == "__main__":
    main()
