"""The nnictl front: `PetridishTuner` hands growths to NNI's trials.

This module imports no torch, since NNI gives a tuner ten seconds to connect. The journal of the
gallery decides. Metrics and ends of trials that NNI reports are only reasons to read it, because
NNI may report them for the wrong trial.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
from nni import NoMoreTrialError
from nni.tuner import Tuner

from nni_petridish.errors import GalleryError, PetridishError, StorageError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.nni_adapter.compat.plain_json import read_plain_json
from nni_petridish.nni_adapter.manager import end_experiment, from_nni_space, show_space
from nni_petridish.nni_adapter.trial import parameters_of
from nni_petridish.nni_adapter.warm.server import Server
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.coordinator import Coordinator
from nni_petridish.running.patience import Outage
from nni_petridish.running.worker import HeartbeatWatch, describe_failure
from nni_petridish.search.records import Done, Growth

_log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
CLAIM_SECONDS = 20.0

Send = Callable[[int, dict[str, Any]], None]
Answer = TypeVar("Answer")


class PetridishTuner(Tuner):
    """A Petridish search as an NNI tuner; ``configs/petridish.yml`` explains its arguments."""

    def __init__(self, **class_args: Any) -> None:
        if "NNI_TUNER_COMMAND_CHANNEL" in os.environ:  # NNI connects it after this
            read_plain_json()
        self._class_args = class_args
        self._experiment = experiment_parameters()
        self._coordinator: Coordinator | None = None
        self._server: Server | None = None
        self._resumed = False
        self._waiting: deque[int] = deque()
        self._handed_out: dict[int, Growth] = {}
        self._send: Send = lambda parameter_id, parameters: None
        self._mutex = threading.RLock()
        self._finished = False
        self._ended = False
        self._search_space: dict[str, Any] = {}
        self._is_shown = False
        self._quiet_until = 0.0
        self._manager = find_manager()

    # Methods that NNI calls.

    def update_search_space(self, search_space: dict[str, Any]) -> None:
        """Start the search; this is NNI's first call."""
        if self._coordinator is not None:
            if from_nni_space(search_space) != self._search_space:
                _log.warning("the search space of a running search cannot change: ignored.")
            return
        with _or_exit():
            self._start(search_space)
        threading.Thread(target=self._check_forever, name="petridish", daemon=True).start()

    def generate_multiple_parameters(
        self, parameter_id_list: list[int], **kwargs: Any
    ) -> list[dict[str, Any]]:
        """Return the growths that are ready; the remaining ids get theirs later."""
        with self._mutex:
            self._send = kwargs.get("st_callback", self._send)
            self._waiting.extend(parameter_id_list)
            return [parameters for _, parameters in self._hand_out()]

    def generate_parameters(self, parameter_id: int, **kwargs: Any) -> dict[str, Any]:
        """Return one growth; NNI itself asks for several at once."""
        parameters = self.generate_multiple_parameters([parameter_id], **kwargs)
        if not parameters:
            raise NoMoreTrialError("no growth is ready")
        return parameters[0]

    def receive_trial_result(
        self, parameter_id: int, parameters: Any, value: Any, **kwargs: Any
    ) -> None:
        """Read the journal, which may have a new model."""
        self._pump()

    def trial_end(self, parameter_id: int, success: bool, **kwargs: Any) -> None:
        """Read the journal, and watch the growth of the trial if its outcome is missing."""
        with self._mutex:
            growth = self._handed_out.get(parameter_id)
            if growth is not None and self._coordinator is not None:
                self._watch.suspect(growth)
        self._pump()

    def load_checkpoint(self) -> None:
        """Record that NNI resumes an experiment; the state itself is in the gallery."""
        self._resumed = True

    def import_data(self, data: Any) -> None:
        """Ignore the results that NNI sends after a resume: the journal has them."""

    # Implementation.

    def _start(self, search_space: dict[str, Any]) -> None:
        # After a resume NNI sends the space as `show_space` has given it.
        self._search_space = from_nni_space(search_space)
        self._config = self._read_config(self._search_space)
        self._outage = Outage(self._config.settings.limits.max_pause)
        retries = self._config.has_new_device()
        gallery = self._config.open_gallery()
        self._watch = HeartbeatWatch(gallery)
        self._coordinator = self._claim(gallery)
        if "NNI_LOG_DIRECTORY" in os.environ:  # EXPERIMENT/log
            self._server = Server(Path(os.environ["NNI_LOG_DIRECTORY"]).parent)
        if retries:
            self._coordinator.retry_failed()
        if self._resumed:
            # NNI runs unfinished trials again. The watch finds those that it does not.
            for growth in self._coordinator.search.running():
                self._watch.suspect(growth, of_earlier_run=True)
        else:
            self._coordinator.resume()

    def _read_config(self, search_space: dict[str, Any]) -> SearchConfig:
        tuner = self._experiment.get("tuner") or {}
        base = Path(tuner.get("codeDirectory") or os.getcwd())
        config = SearchConfig.from_parts(search_space, self._class_args, base, self._experiment)
        config.check_gallery()
        return config

    def _claim(self, gallery: Gallery) -> Coordinator:
        """Become the coordinator of the gallery, once an earlier tuner has ended.

        A tuner whose manager died needs a moment to notice it.
        """
        deadline = time.monotonic() + CLAIM_SECONDS
        while True:
            try:
                chooser = self._config.make_chooser(gallery)
                return Coordinator(gallery, self._config.settings, chooser)
            except StorageError:
                raise
            except GalleryError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    def _hand_out(self) -> list[tuple[int, dict[str, Any]]]:
        """Return growths for the waiting ids, as many as are ready."""
        coordinator, config = self._coordinator, self._config
        assert coordinator is not None
        result = []
        while self._waiting and len(coordinator.search.running()) < config.concurrency:
            answers = self._or_later(lambda: [coordinator.ask()])
            if not answers:
                break
            (growth,) = answers
            if not isinstance(growth, Growth):
                if isinstance(growth, Done) and not self._finished:
                    _log.info("the search is done: %s", growth.reason)
                    self._finished = True
                break
            parameters = parameters_of(
                growth, str(coordinator.gallery.folder), config.at_once(growth)
            )
            parameter_id = self._waiting.popleft()
            self._handed_out[parameter_id] = growth
            result.append((parameter_id, parameters))
        return result

    def _pump(self) -> None:
        with self._mutex:
            if self._coordinator is None:
                return
            self._or_later(self._read_journal)
            for parameter_id, parameters in self._hand_out():
                self._send(parameter_id, parameters)

    def _read_journal(self) -> list[Growth]:
        assert self._coordinator is not None
        self._coordinator.sync()
        return self._watch.give_back(self._coordinator)

    def _or_later(self, action: Callable[[], list[Answer]]) -> list[Answer]:
        """Call a function, unless the disk is away: return nothing then, and try again later.

        NNI waits for the answers of its tuner, so this one does not sleep.
        """
        if time.monotonic() < self._quiet_until:
            return []
        try:
            result = action()
        except StorageError as error:
            with _or_exit():
                self._quiet_until = time.monotonic() + self._outage.met(error)
            return []
        self._outage.over()
        return result

    def _check_forever(self) -> None:
        """Check for dead workers, journal lines of other machines, and the end of the search."""
        pause = threading.Event()
        while not pause.wait(CHECK_SECONDS):
            try:
                if self._manager is not None and not self._manager.is_running():
                    _log.error("nni_petridish: the NNI manager is gone; its tuner ends.")
                    os._exit(1)  # releases the gallery
                self._pump()
                if not self._is_shown:
                    self._is_shown = show_space(self._search_space)
                if self._finished and not self._ended:
                    self._ended = end_experiment()
            except Exception:
                _log.exception("checking the search failed; trying again")


@contextmanager
def _or_exit() -> Iterator[None]:
    """End this process if the search cannot start, with the reason in one line of NNI's log.

    NNI ignores an exception here, but counts the experiment as failed when its tuner is gone.
    ``nni-petridish run`` finds the reason in the log.
    """
    try:
        yield
    except Exception as error:
        expected = isinstance(error, PetridishError)
        _log.error("nni_petridish: %s", describe_failure(error), exc_info=not expected)
        logging.shutdown()
        os._exit(1)


def experiment_parameters() -> dict[str, Any]:
    """Return the configuration of the experiment, which NNI passes on the command line."""
    if "--exp_params" not in sys.argv[:-1]:
        return {}
    encoded = sys.argv[sys.argv.index("--exp_params") + 1]
    return dict(json.loads(base64.b64decode(encoded)))


def find_manager() -> psutil.Process | None:
    """Return the process of the NNI manager that started this one."""
    try:
        ancestors = psutil.Process().parents()
    except psutil.Error:
        return None
    return next(filter(_is_manager, ancestors), None)


def _is_manager(process: psutil.Process) -> bool:
    try:
        return any("nni_node" in word for word in process.cmdline())
    except psutil.Error:  # of another user, or gone by now
        return False
