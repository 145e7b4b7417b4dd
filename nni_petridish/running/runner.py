"""The in-process front: a whole search in this process, without the NNI manager."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import suppress

from nni_petridish.errors import (
    ExhaustedError,
    Interrupted,
    RejectedError,
    SearchError,
    StorageError,
)
from nni_petridish.gallery.description import DESCRIPTION
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.coordinator import Coordinator, refuse_unless_resuming
from nni_petridish.running.patience import outlast, wait
from nni_petridish.running.worker import describe_failure, work_on
from nni_petridish.search.records import Done, Growth, Wait
from nni_petridish.search.search import Search
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Task

_log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1
"""Time between two looks at the search while it waits after failures."""
OnChange = Callable[[Search], object]
"""Callback for every change of a search."""


def run_search(
    config: SearchConfig,
    *,
    resume: bool = False,
    callbacks: Callbacks = NO_CALLBACKS,
    on_change: OnChange = lambda search: None,
    make_task: Callable[[], Task] | None = None,
    proceed: Callable[[], bool] = lambda: True,
) -> Search:
    """Run a search to its end, one growth after the other, and return its state.

    Parameters
    ----------
    config
        The configuration of the search.
    resume
        Whether to go on with a search that the gallery already holds; without it such a gallery
        is refused, so that no two searches get mixed by accident.
    callbacks
        Callbacks of every growth. A search that is asked to stop returns the models so far and can
        be resumed. KeyboardInterrupt is passed on, and loses nothing either.
    on_change
        Called with the search after every growth, and at the start.
    make_task
        Makes the task in place of the configuration, for instance one that measures.
    proceed
        Asked before every growth; false ends the search, which can be resumed.

    Raises
    ------
    StorageError
        If the disk was full or gone for longer than the limit ``max_pause``. What was found is in
        the gallery, and the search can be resumed.
    """
    make_task = functools.cache(make_task or config.load_task)
    if not (config.gallery / DESCRIPTION).exists():
        config.check_task(make_task)  # a setting that cannot work leaves no gallery behind
    retries = config.has_new_device()
    gallery = config.open_gallery()
    chooser = config.make_chooser(gallery)
    with Coordinator(gallery, config.settings, chooser) as coordinator:
        refuse_unless_resuming(config.gallery, coordinator.search, resume)
        coordinator.resume()
        if retries:
            coordinator.retry_failed()
        on_change(coordinator.search)
        _grow_on(coordinator, config, make_task, callbacks, on_change, proceed)
        return coordinator.search


def _grow_on(
    coordinator: Coordinator,
    config: SearchConfig,
    make_task: Callable[[], Task],
    callbacks: Callbacks,
    on_change: OnChange,
    proceed: Callable[[], bool],
) -> None:
    """Carry out growths until the search is done or asked to stop."""
    stop, max_pause = callbacks.should_stop, config.settings.limits.max_pause
    try:
        while proceed() and not isinstance(
            answer := outlast(coordinator.ask, stop, max_pause), Done
        ):
            if isinstance(answer, Wait):
                if coordinator.search.running():
                    raise SearchError(f"the search cannot go on: {answer.reason}.")
                wait(PAUSE_SECONDS, stop)
                if stop():
                    return
                continue
            try:
                work_on(answer, coordinator.gallery, make_task, config.plan, callbacks, max_pause)
            except (Interrupted, StorageError):
                raise
            except (RejectedError, ExhaustedError) as error:
                _log.info("%s was not made: %s", answer.id, error)
            except Exception as error:
                # The journal has the reason, and the growth is tried once more.
                _warn(answer, error)
            outlast(coordinator.sync, stop, max_pause)
            on_change(coordinator.search)
    except Interrupted:
        with suppress(StorageError):  # the search as far as it is known
            coordinator.sync()


def _warn(growth: Growth, error: Exception) -> None:
    _log.warning("%s failed: %s", growth.id, describe_failure(error))
