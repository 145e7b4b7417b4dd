"""The display of a long command: live on a terminal, plain lines without one.

Every command tells a `Display` how far it is. The workers are watched through their reports
(`running.worker_report`), so that it makes no difference in which process they are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from nni_petridish.registry import ERROR, Measure
from nni_petridish.running.pace import Pace, duration

if TYPE_CHECKING:
    from nni_petridish.search.search import Search

STOPPING = "Stopping; the running step is finished first."


@dataclass(frozen=True)
class Headline:
    """The state of a command.

    Parameters
    ----------
    done, total
        Units of work that are done, and their largest number; None without a limit.
    unit
        The name of the units.
    text
        The outcome so far; may be empty.
    is_limit
        Whether the total is a limit, which the work need not reach.
    has_parts
        Whether a worker works on one unit at a time, so that its share is a part of the unit.
    """

    done: int
    total: int | None
    unit: str
    text: str
    is_limit: bool = False
    has_parts: bool = True

    def __str__(self) -> str:
        most = "at most " if self.is_limit else ""
        of = "" if self.total is None else f" of {most}{self.total}"
        return ", ".join(part for part in (f"{self.done}{of} {self.unit}", self.text) if part)

    def left(self, pace: Pace, begun: float = 0.0, before: float = 0.0) -> str:
        """Return the time left in words; empty if it is not known.

        Parameters
        ----------
        pace
            The pace of the units.
        begun
            The sum of the shares of the workers.
        before
            The sum of those shares that were done before the pace was measured.
        """
        if self.total is None:
            return ""
        parts, known = (begun - before, before) if self.has_parts else (0.0, 0.0)
        seconds = pace.seconds_left(self.done + parts, self.total - known)
        return "" if seconds is None else f"about {duration(seconds)} left"


class Display(Protocol):
    """Shows the state of a command; a context manager, from the first to the last line."""

    def show(self, headline: Headline) -> None:
        """Show the present state."""
        ...

    def say(self, text: str) -> None:
        """Show a line that stays."""
        ...

    def stopping(self) -> None:
        """Show that a request to stop has come; may be called in a signal handler."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


class Lines:
    """Plain lines on the standard output, where there is no terminal.

    Parameters
    ----------
    is_quiet
        Whether to show nothing but a request to stop.
    """

    def __init__(self, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._last: Headline | None = None
        self._pace = Pace()
        self._is_stopping = False

    def show(self, headline: Headline) -> None:
        """Print the state if it has changed, with the time left."""
        self._pace.begin(headline.done)
        if headline != self._last:
            self._last = headline
            left = headline.left(self._pace)
            self.say(f"{headline}, {left}" if left else str(headline))

    def say(self, text: str) -> None:
        """Print a line."""
        if not self._is_quiet:
            print(text, flush=True)

    def stopping(self) -> None:
        """Say that a request to stop has come."""
        if not self._is_stopping:
            self._is_stopping = True
            print(STOPPING, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def add_display_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--quiet`` and ``--verbose``."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-q", "--quiet", action="store_true", help="show the outcome only")
    how.add_argument(
        "-v", "--verbose", action="store_true", help="show a line for every epoch of every worker"
    )


def open_display(
    options: argparse.Namespace,
    title: str,
    folder: Path,
    patterns: Iterable[str],
    labels: Mapping[Path, str] | None = None,
) -> Display:
    """Return the display that fits the options and the terminal.

    Parameters
    ----------
    options
        The options of `add_display_options`.
    title
        The title of the work.
    folder, patterns
        The folder of the work, and patterns in it of the folders with workers' reports.
    labels
        Names of folders, for the workers in them.
    """
    if options.quiet:
        return Lines(is_quiet=True)
    from nni_petridish.running.watch import VerboseLines, Watch

    watch = Watch(folder, tuple(patterns), labels)
    if sys.stderr.isatty():
        from nni_petridish.running.live import Live

        return Live(title, watch, is_verbose=options.verbose)
    return VerboseLines(watch) if options.verbose else Lines()


def headline_of(search: Search, measure: Measure) -> Headline:
    """Return the state of a search."""
    models, best = search.models(), search.best()
    text = "training the seed"
    if best is not None:
        hull = len(search.hull())
        text = f"best {measure.name} {best.error:.4f} ({best.id}), hull {hull}"
    return Headline(len(models), search.settings.limits.max_models, "models", text, is_limit=True)


def show_search(display: Display, measure: Measure = ERROR) -> Any:
    """Return a callback that shows every change of a search."""
    return lambda search: display.show(headline_of(search, measure))
