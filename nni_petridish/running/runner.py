"""The in-process front: a whole search in this process, without the NNI manager."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from nni_petridish.errors import Interrupted
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.coordinator import Coordinator, refuse_unless_resuming
from nni_petridish.running.worker import describe_failure, work_on
from nni_petridish.search.records import Done, Growth
from nni_petridish.search.search import Search
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks

_log = logging.getLogger(__name__)

OnChange = Callable[[Search], object]
"""Callback for every change of a search."""


def run_search(
    config: SearchConfig,
    *,
    resume: bool = False,
    callbacks: Callbacks = NO_CALLBACKS,
    on_change: OnChange = lambda search: None,
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
    """
    gallery = config.open_gallery()
    make_task = functools.cache(config.load_task)
    chooser = config.make_chooser(gallery)
    with Coordinator(gallery, config.settings, chooser) as coordinator:
        refuse_unless_resuming(config.gallery, coordinator.search, resume)
        coordinator.resume()
        on_change(coordinator.search)
        while isinstance(answer := coordinator.ask(), Growth):
            try:
                work_on(answer, gallery, make_task, config.plan, callbacks)
            except Interrupted:
                break
            except Exception as error:
                # The journal has the reason, and the growth is tried once more.
                _warn(answer, error)
            coordinator.sync()
            on_change(coordinator.search)
        assert isinstance(answer, Done | Growth)  # with one worker there is nothing to wait for
        coordinator.sync()
        return coordinator.search


def _warn(growth: Growth, error: Exception) -> None:
    _log.warning("%s failed: %s", growth.id, describe_failure(error))
