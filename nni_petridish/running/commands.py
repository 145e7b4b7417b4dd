"""``nni-petridish search``, and the parts that it shares with other commands."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nni_petridish.errors import PetridishError, StorageError
from nni_petridish.registry import measure_of
from nni_petridish.running.display import (
    Display,
    add_display_options,
    open_display,
    show_search,
)
from nni_petridish.running.process import INTERRUPTED, StopOnInterrupt

if TYPE_CHECKING:
    from nni_petridish.running.config import SearchConfig
    from nni_petridish.search.search import Search

ReadConfig = Callable[[Path], "SearchConfig"]
"""Reads and checks a configuration file with all of its sections."""
Finish = Callable[["Search", Path], int]
"""Prints the outcome of a search in a gallery and returns the exit code."""


def add_search_options(
    parser: argparse.ArgumentParser, read_config: ReadConfig, finish: Finish
) -> None:
    """Add the options of ``search``.

    Parameters
    ----------
    parser
        The parser of the command.
    read_config, finish
        The first and the last step of the command, from rooms above this one.
    """
    add_searching_options(parser)
    parser.set_defaults(command=lambda options: _search(options, read_config, finish))


def add_searching_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that runs the search of a configuration."""
    add_config(parser)
    add_display_options(parser)
    parser.add_argument(
        "--resume", action="store_true", help="go on with the search that the gallery holds"
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="the same, and try the growths again that were given up",
    )


def config_to_search(
    options: argparse.Namespace, read_config: ReadConfig
) -> tuple[SearchConfig, Search | None]:
    """Return the configuration, and the search that its gallery holds, if any.

    Raises
    ------
    PetridishError
        If the configuration does not fit its gallery, or another search uses the gallery, or it
        holds models and the options do not ask to resume.
    """
    config = read_config(options.config)
    config.check_gallery()
    found = refuse_unless_resuming(config, options.resume or options.retry_failed)
    if found is not None and options.retry_failed:
        _retry_failed(config)
        found = refuse_unless_resuming(config, resume=True)
    return config, found


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names the configuration."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, see configs/")


def refuse_unless_resuming(config: SearchConfig, resume: bool) -> Search | None:
    """Return the search that the gallery holds, if any; raise unless it may be resumed."""
    from nni_petridish.gallery.gallery import Gallery
    from nni_petridish.running.coordinator import refuse_unless_resuming
    from nni_petridish.search.search import Search

    if not (config.gallery / "gallery.json").exists():
        return None
    gallery = Gallery(config.gallery)
    gallery.refuse_if_in_use()  # else NNI would be started first, and its tuner would wait for it
    search = Search.replay(config.settings, gallery.journal.read_all())
    refuse_unless_resuming(config.gallery, search, resume)
    return search


def _retry_failed(config: SearchConfig) -> None:
    """Note in the journal that the growths are tried again that were given up."""
    from nni_petridish.gallery.gallery import Gallery
    from nni_petridish.running.coordinator import Coordinator

    with Coordinator(Gallery(config.gallery), config.settings) as coordinator:
        ids = coordinator.retry_failed()
        print(f"Trying again: {', '.join(ids) or 'no growth was given up'}.")


def _search(options: argparse.Namespace, read_config: ReadConfig, finish: Finish) -> int:
    config, before = config_to_search(options, read_config)
    began = start_of(before)
    from nni_petridish.running.runner import run_search
    from nni_petridish.tasks.task import Callbacks

    with open_search_display(options, config) as display:
        stopping = StopOnInterrupt(display.stopping)
        try:
            search = run_search(
                config,
                resume=True,
                callbacks=Callbacks(should_stop=stopping.asked),
                on_change=show_search(display, measure_of(config.space)),
            )
        except StorageError:
            show_so_far(config, finish)
            raise
    if not stopping.asked():
        tell_end(search, began)
    code = finish(search, config.gallery)
    return tell_stopped(search, options) if stopping.asked() else code


def start_of(search: Search | None) -> float:
    """Return when a search began, by the monotonic clock, as if it had not been interrupted."""
    return time.monotonic() - (0.0 if search is None else search.elapsed)


def tell_end(search: Search, began: float) -> None:
    """Say in one line why a search has ended, unless it failed, which is told with its hull."""
    reason = search.why_ended(time.monotonic() - began)
    if reason is not None and not search.gave_up() and not search.refused() and search.models():
        print(f"The search is done: {reason}.")


def open_search_display(options: argparse.Namespace, config: SearchConfig) -> Display:
    """Return the display of a search in a gallery."""
    return open_display(options, config.gallery.name, config.gallery, ["work/*"])


def tell_stopped(search: Search, options: argparse.Namespace) -> int:
    """Say what is kept of a search that was stopped and how to go on; return the exit code."""
    models = len(search.models())
    kept = f"{models} finished model{'s are' if models != 1 else ' is'} kept"
    if not models:
        kept = "there is no finished model yet"
    again = options.line if "--resume" in options.line else [*options.line, "--resume"]
    command = shlex.join(["nni-petridish", *again])
    print(
        f"Stopped: {kept}; go on from the last epoch with\n  {command}",
        file=sys.stderr,
    )
    return INTERRUPTED


def show_so_far(config: SearchConfig, finish: Finish) -> None:
    """Print what a search has found whose disk is full or gone, as far as it can be read."""
    from nni_petridish.gallery.select import open_search

    with suppress(PetridishError):
        _, search = open_search(config.gallery)
        finish(search, config.gallery)
