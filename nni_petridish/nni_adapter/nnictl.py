"""A configuration run through nnictl, in the foreground: create, watch, stop.

The results of the search are read from the gallery; NNI is asked only for its status.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nni_petridish.errors import PetridishError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.journal import Journal
from nni_petridish.nni_adapter.compat.guard import TOKEN_HEADER, guarded
from nni_petridish.running.config import SearchConfig, read_experiment
from nni_petridish.search.search import Search

START_SECONDS = 120
START_TRIES = 3
ANSWER_SECONDS = 20
SILENCE_SECONDS = 600
"""Silence after which a manager counts as gone; on a busy or sleeping machine it is long."""


class NniError(PetridishError):
    """A failure of NNI."""


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BusyError(NniError):
    """The machine was too busy: NNI's tuner did not connect within ten seconds."""


class SilentError(NniError):
    """The NNI manager did not answer in time, but is not gone."""


class Experiment:
    """An NNI experiment created by nnictl and stopped at the end of the ``with`` block.

    Parameters
    ----------
    config
        The configuration file.
    port
        Port of the manager. It listens on the loopback address only, unless workers on other
        machines have to reach it.
    """

    def __init__(self, config: Path, port: int) -> None:
        self.config, self.port = config, port
        # Other machines know no token, and must reach the manager.
        self.token = secrets.token_urlsafe(24) if is_local(config) else ""
        self.id = ""

    def __enter__(self) -> Experiment:
        # An experiment that is being created has no id yet by which it could be stopped.
        with _signals_deferred() as arrived:
            output = self._start("create", "--config", str(self.config))
        found = re.search(r"nnictl stop (\w+)", output)
        if found is None:
            raise NniError(f"nnictl create failed: {_last_line(output)}")
        self.id = found[1]
        if arrived:
            self.__exit__()
            raise KeyboardInterrupt
        return self

    def __exit__(self, *exception: object) -> None:
        with _signals_deferred():  # a second Ctrl-C would leave the manager behind
            nnictl("stop", self.id)

    @property
    def url(self) -> str:
        """Address of the web UI, with the token if there is one."""
        token = f"/?token={self.token}" if self.token else ""
        return f"http://127.0.0.1:{self.port}{token}"

    def resume(self) -> None:
        """Resume an experiment that was stopped or killed."""
        self._start("resume", self.id)

    def status(self) -> str:
        """Return the status of the experiment, in NNI's words."""
        try:
            status: dict[str, Any] = self._get("check-status")
        except (OSError, ValueError) as problem:
            # urllib wraps some time-outs in a URLError, which has a reason.
            if TimeoutError in (type(problem), type(getattr(problem, "reason", None))):
                raise SilentError("the NNI manager does not answer.") from problem
            raise NniError(f"the NNI manager is gone{self._reason()}.") from problem
        if status.get("status") == "ERROR":
            errors = status.get("errors") or ["no reason given"]
            kind = BusyError if "did not connect" in str(errors[0]) else NniError
            raise kind(f"NNI reports an error: {_last_line(str(errors[0]))}{self._reason()}")
        return str(status.get("status"))

    def _start(self, *arguments: str) -> str:
        return nnictl(*arguments, "--port", str(self.port), token=self.token)

    def _get(self, what: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/nni/{what}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.addheaders.append((TOKEN_HEADER, self.token))
        with opener.open(url, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)

    def _reason(self) -> str:
        """Return the first error in the log of the tuner or of the manager, in parentheses."""
        logs = Path.home() / "nni-experiments" / self.id / "log"
        for name, mark in (("dispatcher.log", "nni_petridish: "), ("nnimanager.log", "] ERROR ")):
            try:
                lines = (logs / name).read_text(encoding="utf-8").splitlines()
            except OSError:
                continue
            said = [line.split(mark, 1)[1] for line in lines if mark in line]
            if said:
                return f" ({said[0]})"
        return ""


@contextmanager
def _signals_deferred() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of acting on them; only in the main thread."""
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda n, frame: arrived.append(n)) for number in numbers]
    try:
        yield arrived
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def is_local(config: Path) -> bool:
    """Return whether the trials of a configuration run on this machine."""
    service = read_experiment(config)[3].get("trainingService")
    return isinstance(service, dict) and service.get("platform") == "local"


def nnictl(*arguments: str, token: str = "") -> str:
    """Run the nnictl of this Python installation; return its output.

    Parameters
    ----------
    *arguments
        Arguments of nnictl.
    token
        The token that a manager that it starts asks for; it then answers to this machine only.
    """
    folder = str(Path(sys.executable).parent)
    # Trials are started as `python -m ...`, which must be this Python.
    path = os.pathsep.join([folder, os.environ.get("PATH", "")])
    if shutil.which("nnictl", path=folder) is None:
        raise NniError(f"nnictl is not installed beside {sys.executable}: pip install nni==3.0.")
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "nni_petridish.nni_adapter.compat.nnictl", *arguments],
        env=guarded(environment, token) if token else environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_SECONDS,
        check=False,
        start_new_session=True,  # Ctrl-C in the terminal is for this process only
    )
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)


def run_experiment(
    path: Path,
    config: SearchConfig,
    port: int,
    *,
    on_start: Callable[[Experiment], object],
    on_change: Callable[[Search], object],
    on_stop: Callable[[], object] = lambda: None,
    seconds_between: float = 1.0,
) -> Search:
    """Run a search through nnictl until it is done; return its state.

    Ctrl-C stops the experiment and calls ``on_stop``, maybe twice. Finished models stay in the
    gallery.
    """
    search = Search(config.settings)
    for tries_left in reversed(range(START_TRIES)):
        try:
            with Experiment(path, port) as experiment:
                try:
                    on_start(experiment)
                    _follow(experiment, config, search, on_change, seconds_between)
                except KeyboardInterrupt:
                    on_stop()  # before NNI is stopped, which takes seconds
                    raise
            break
        except BusyError:
            if not tries_left:
                raise
        except KeyboardInterrupt:
            on_stop()
            break
    return search


def _follow(
    experiment: Experiment,
    config: SearchConfig,
    search: Search,
    on_change: Callable[[Search], object],
    seconds_between: float,
) -> None:
    """Apply new events of the journal until the experiment is done."""
    journal: Journal | None = None
    done, heard = False, time.monotonic()
    while True:
        time.sleep(seconds_between)
        try:
            done, heard = experiment.status() in ("DONE", "STOPPED"), time.monotonic()
        except SilentError:
            if time.monotonic() - heard > SILENCE_SECONDS:
                raise
        if journal is None and (config.gallery / "gallery.json").exists():
            journal = Gallery(config.gallery).journal
        if journal is not None and (events := journal.read_new()):
            for event in events:
                search.apply(event)
            on_change(search)
        if done:
            return


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
