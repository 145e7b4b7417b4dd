"""A worker: carries out one growth of a gallery under a lock and with a heartbeat.

The outcome is written to the journal: the model, a failure with its reason, or the release of the
growth. A worker that is killed writes nothing; its heartbeat stops instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from nni_petridish.errors import (
    ConfigError,
    DamagedModelError,
    ExhaustedError,
    GalleryError,
    Interrupted,
    Orphaned,
    RejectedError,
    StorageError,
)
from nni_petridish.gallery.files import make_folder, touch_file
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.locks import ExclusiveLock, is_locked
from nni_petridish.running.heartbeat import Heartbeat
from nni_petridish.running.patience import outlast
from nni_petridish.running.worker_report import reporting
from nni_petridish.search.events import EXHAUSTED, REFUSED, REJECTED, fail_event, release_event
from nni_petridish.search.records import Growth, Outcome

if TYPE_CHECKING:
    from nni_petridish.running.coordinator import Coordinator
    from nni_petridish.search.settings import GrowthSettings
    from nni_petridish.tasks.task import Callbacks, Task

_log = logging.getLogger(__name__)

PULSE_SECONDS = 2.0
LOST_SECONDS = 30.0
"""Silence after which a worker counts as lost."""
SUSPECT_SECONDS = 8.0
"""The same for a worker that is reported to have ended."""
PULSE_FILE = "pulse"
LOCK_FILE = "lock"


def work_on(
    growth: Growth,
    gallery: Gallery,
    make_task: Callable[[], Task],
    plan: GrowthSettings,
    callbacks: Callbacks,
    max_pause: float | None = None,
) -> Outcome:
    """Carry out a growth and write its outcome to the journal.

    If several workers have the same growth (one may have outlived its manager), one works and the
    others wait for it. While the disk is full or gone the worker waits; then it goes on from its
    last checkpoint. That is no failure of the growth.

    Parameters
    ----------
    growth, gallery, plan
        The growth, its gallery, and the settings of all growths.
    make_task
        Makes the task, which is only called by a worker that trains.
    callbacks
        Callbacks of the growth.
    max_pause
        The limit of a search of the same name, see `Limits`.

    Raises
    ------
    Interrupted
        If `callbacks.should_stop` returned true; the growth is released.
    StorageError
        If the disk was away for longer than ``max_pause`` seconds.
    RejectedError
        If the growth would not pay; that is in the journal and no failure.
    Exception
        If the growth failed; the failure is in the journal.
    """
    loaded = cache(make_task)
    stop = callbacks.should_stop
    try:
        return outlast(
            lambda: _work_once(growth, gallery, loaded, plan, callbacks), stop, max_pause
        )
    except (Interrupted, KeyboardInterrupt):
        _release(growth, gallery)
        raise
    except SystemExit:  # Lightning exits by itself when its process is asked to stop
        if stop():
            _release(growth, gallery)
        raise
    except (Orphaned, StorageError):
        raise
    except DamagedModelError as error:
        failure = error
        outlast(lambda: _quarantine_parent(growth, gallery, failure), stop, max_pause)
        raise
    except Exception as error:
        event = fail_event(growth.id, growth.attempt, describe_failure(error), _kind(error))
        outlast(lambda: gallery.journal.append(event), stop, max_pause)
        raise


def _work_once(
    growth: Growth,
    gallery: Gallery,
    make_task: Callable[[], Task],
    plan: GrowthSettings,
    callbacks: Callbacks,
) -> Outcome:
    from nni_petridish.running.growth import run_growth

    folder = gallery.work_folder(growth.id, growth.attempt)
    with (
        beating(folder),
        _alone(folder, gallery, growth, callbacks.should_stop),
        reporting(folder, growth.id, _phases(growth, plan), callbacks) as told,
    ):
        return run_growth(growth, make_task(), plan, gallery, told)


def _release(growth: Growth, gallery: Gallery) -> None:
    try:
        gallery.journal.append(release_event(growth.id, growth.attempt))
    except StorageError as error:  # the next start releases what no worker is at
        _log.warning("%s %s is released when the search is resumed.", error, growth.id)


def _quarantine_parent(growth: Growth, gallery: Gallery, error: DamagedModelError) -> None:
    if growth.parent is not None:
        gallery.quarantine(growth.parent, str(error))
    gallery.journal.append(fail_event(growth.id, growth.attempt, str(error)))


def _kind(error: Exception) -> str | None:
    """Return the kind of a failure that another attempt would only repeat."""
    if isinstance(error, ConfigError):
        return REFUSED
    if isinstance(error, RejectedError):
        return REJECTED
    return EXHAUSTED if isinstance(error, ExhaustedError) else None


def _phases(growth: Growth, plan: GrowthSettings) -> dict[str, int]:
    """Return the epochs of the phases of a growth, in order."""
    if growth.parent is None:
        return {"seed": plan.seed_epochs}
    if growth.trains_on:
        return {"final": plan.final_epochs}
    return {"weak": plan.weak_epochs, "final": plan.final_epochs}


def describe_failure(error: BaseException) -> str:
    """Return the reason of a failure in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    known = type(error).__module__.startswith("nni_petridish")
    return text if known else f"{type(error).__name__}: {text}"


@contextmanager
def beating(folder: Path) -> Iterator[None]:
    """Touch a file in the work folder of a growth every few seconds for as long as it lasts."""
    path = folder / PULSE_FILE

    def touch() -> bool:
        try:
            touch_file(path)
        except FileNotFoundError:
            return False  # the growth is finished and its folder gone
        except OSError:
            pass  # the disk may come back
        return True

    try:
        with Heartbeat(touch, PULSE_SECONDS):
            yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


class HeartbeatWatch:
    """Finder of running growths that have lost their worker, by the clock of this machine alone.

    Parameters
    ----------
    gallery
        The gallery in which the workers work.
    """

    def __init__(self, gallery: Gallery) -> None:
        self._folder = gallery.folder / "work"
        self._lost_before: set[tuple[str, int]] = set()
        self._of_earlier_worker: dict[tuple[str, int], float] = {}
        self._seen: dict[tuple[str, int], tuple[float, float]] = {}
        self._suspects: set[tuple[str, int]] = set()
        self._of_earlier_run: set[tuple[str, int]] = set()

    def suspect(self, growth: Growth, of_earlier_run: bool = False) -> None:
        """Record that the worker of a growth is reported to have ended.

        Parameters
        ----------
        growth
            The growth.
        of_earlier_run
            Whether that was before this start of the search: it says nothing about the growth, and
            is not counted.
        """
        key = (growth.id, growth.attempt)
        self._suspects.add(key)
        if of_earlier_run:
            self._of_earlier_run.add(key)
        self._seen.setdefault(key, (0.0, time.monotonic()))

    def give_back(self, coordinator: Coordinator) -> list[Growth]:
        """Release the growths that have lost their worker; return them.

        A released growth continues from its last checkpoint. If its worker is lost a second time,
        the growth has failed.
        """
        lost = self.silent(coordinator.search.running())
        for growth in lost:
            key = (growth.id, growth.attempt)
            if key in self._lost_before:
                coordinator.fail(growth.id, "its worker was lost twice", growth.attempt)
            else:
                coordinator.release(growth.id)
            if key not in self._of_earlier_run:
                self._lost_before.add(key)
            self.forget(growth)  # last: a disk that is full keeps the others from being written
        return lost

    def silent(self, growths: list[Growth]) -> list[Growth]:
        """Return the running growths whose worker is lost.

        A worker that was never seen may be waiting for a machine: it is lost only if suspected.
        """
        now = time.monotonic()
        running = {(growth.id, growth.attempt): growth for growth in growths}
        self._seen = {key: seen for key, seen in self._seen.items() if key in running}
        self._suspects &= running.keys()
        return [growth for key, growth in running.items() if self._is_lost(key, now)]

    def forget(self, growth: Growth) -> None:
        """Start anew with a growth that is handed out again; its new worker may have to queue."""
        key = (growth.id, growth.attempt)
        self._seen.pop(key, None)
        self._suspects.discard(key)
        self._of_earlier_run.discard(key)
        self._of_earlier_worker[key] = self._last_beat(key)

    def _is_lost(self, key: tuple[str, int], now: float) -> bool:
        touched = self._last_beat(key)
        if touched == self._of_earlier_worker.get(key):
            touched = 0.0
        if touched and self._seen.get(key, (0.0, 0.0))[0] != touched:
            self._seen[key] = (touched, now)
        if key not in self._seen:
            return False
        patience = SUSPECT_SECONDS if key in self._suspects else LOST_SECONDS
        if now - self._seen[key][1] <= patience:
            return False
        # A worker that is stopped, or waits for a disk, is silent but keeps its lock.
        return not is_locked(self._work_folder(key) / LOCK_FILE)

    def _work_folder(self, key: tuple[str, int]) -> Path:
        return self._folder / f"{key[0]}-{key[1]:d}"

    def _last_beat(self, key: tuple[str, int]) -> float:
        """Return the time of the last heartbeat, 0 if there was none."""
        try:
            return (self._work_folder(key) / PULSE_FILE).stat().st_mtime
        except OSError:
            return 0.0


@contextmanager
def _alone(
    folder: Path, gallery: Gallery, growth: Growth, stop: Callable[[], bool]
) -> Iterator[None]:
    """Hold the lock of a growth; wait while another worker has it and there is no model."""
    lock = ExclusiveLock(folder / LOCK_FILE, f"Another worker works in {folder}")
    warned = False
    while not gallery.has_model(growth.id):  # whoever finishes it removes the folder
        try:
            make_folder(folder)
            lock.acquire()
            break
        except StorageError:
            raise
        except GalleryError as error:
            if not warned:
                _log.warning("%s This one waits.", error)
                warned = True
            if stop():
                raise Interrupted("stopped while another worker was at the same growth.") from None
            time.sleep(0.5)
    try:
        yield
    finally:
        lock.release()
