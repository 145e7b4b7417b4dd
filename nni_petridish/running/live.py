"""The live display on a terminal: a line for the work, and one for each worker."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich import live
from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nni_petridish.running.display import STOPPING, Headline
from nni_petridish.running.watch import EpochLines, Watch
from nni_petridish.running.worker_report import WorkerReport

_REFRESHES_PER_SECOND = 2
_BAR_WIDTH = 20
_QUIET_SECONDS = 60.0
"""Silence of a worker after which it is shown; a report comes every second."""
_LEAST_SHARE = 0.02
"""Part of the work after which the time left is estimated."""


class Live:
    """A live display on the standard error; whatever is printed meanwhile appears above it.

    Parameters
    ----------
    title
        The title of the work.
    watch
        The workers.
    is_verbose
        Whether to show a line for every epoch, too.
    console
        The terminal; by default that of the standard error.
    """

    def __init__(
        self, title: str, watch: Watch, is_verbose: bool = False, console: Console | None = None
    ) -> None:
        self._title, self._watch = title, watch
        self._epochs = EpochLines(watch) if is_verbose else None
        self._console = console or Console(stderr=True, highlight=False)
        self._headline: Headline | None = None
        self._is_stopping = False
        self._began, self._first = time.monotonic(), 0.0
        self._live = live.Live(
            console=self._console,
            get_renderable=self.render,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            # Output that goes elsewhere, such as to a file, is left alone.
            redirect_stdout=sys.stdout.isatty(),
        )

    def show(self, headline: Headline) -> None:
        """Show the present state; a change leaves a line behind."""
        if self._headline is None:
            self._first = float(headline.done)
        elif headline != self._headline:
            self.say(str(headline))
        self._headline = headline

    def say(self, text: str) -> None:
        """Show a line above the display."""
        self._live.console.print(text, markup=False, soft_wrap=True)

    def stopping(self) -> None:
        """Show that a request to stop has come."""
        self._is_stopping = True

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the display at this moment."""
        workers = self._watch.workers()
        if self._epochs is not None:
            for line in self._epochs.of([report for report, _ in workers]):
                self.say(line)
        table = Table.grid(padding=(0, 2, 0, 0))
        for name in ("name", "phase", "bar", "epoch", "numbers", "left"):
            is_last = name == "left"
            table.add_column(name, no_wrap=True, overflow="ellipsis" if is_last else "fold")
        for report, silence in workers:
            table.add_row(*_row(report, silence))
        parts: list[RenderableType] = [self._head([report.share for report, _ in workers])]
        if workers:
            parts.append(table)
        if self._is_stopping:
            parts.append(Text(STOPPING, "yellow"))
        return Group(*parts)

    def _head(self, shares: list[float]) -> Text:
        passed = time.monotonic() - self._began
        parts = [self._title]
        if self._headline is not None:
            of = "" if self._headline.total is None else f"/{self._headline.total}"
            parts.append(f"{self._headline.done}{of} {self._headline.unit}")
            parts.append(self._headline.text)
        parts.append(duration(passed))
        left = self._seconds_left(passed, shares)
        if left is not None:
            parts.append(f"about {duration(left)} left")
        head = Text(" · ".join(parts), no_wrap=True, overflow="ellipsis")
        head.stylize("bold", 0, len(self._title))
        return head

    def _seconds_left(self, passed: float, shares: list[float]) -> float | None:
        """Return the time that the rest takes at the pace so far."""
        if self._headline is None or self._headline.total is None:
            return None
        done = self._headline.done + sum(shares)
        here = done - self._first
        if here < _LEAST_SHARE * self._headline.total:
            return None
        return max(0.0, self._headline.total - done) * passed / here


def _row(report: WorkerReport, silence: float) -> list[RenderableType]:
    left = "" if report.seconds_left is None else f"{duration(report.seconds_left)} left"
    if silence > _QUIET_SECONDS:
        left = f"silent for {duration(silence)}"
    return [
        Text(report.name, "cyan"),
        report.phase,
        ProgressBar(total=1.0, completed=report.share, width=_BAR_WIDTH),
        f"epoch {report.epoch}/{report.epochs}",
        report.text,
        Text(left, "dim"),
    ]


def duration(seconds: float) -> str:
    """Return seconds as minutes and seconds, or as hours and minutes.

    Examples
    --------
    >>> duration(5), duration(125), duration(4000)
    ('0:05', '2:05', '1 h 06')
    """
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600} h {whole % 3600 // 60:02d}"
