"""The live display on a terminal: a line for the work, and one for each worker."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Self

from rich import live
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nni_petridish.running.display import STOPPING, Headline
from nni_petridish.running.pace import Pace, duration
from nni_petridish.running.watch import EpochLines, Watch, Worker

_REFRESHES_PER_SECOND = 2
_BAR_WIDTH = 20
_SHORT_BAR_WIDTH = 8
_ANY_WIDTH = 1000
_QUIET_SECONDS = 60.0
"""Silence of a worker after which it is shown; a report comes every second."""


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
        self._pace = Pace()
        self._before: dict[Path, float] = {}
        self._live = live.Live(
            console=self._console,
            get_renderable=self.render,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            # Output that goes elsewhere, such as to a file, is left alone.
            redirect_stdout=sys.stdout.isatty(),
        )

    def show(self, headline: Headline) -> None:
        """Show the present state; a change leaves a line behind if it tells an outcome."""
        self._pace.begin(headline.done)
        if self._headline is not None and headline != self._headline and headline.text:
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
            for line in self._epochs.of(workers):
                self.say(line)
        parts: list[RenderableType] = [self._head(workers)]
        if workers:
            parts.append(_Rows(workers))
        if self._is_stopping:
            parts.append(Text(STOPPING, "yellow"))
        return Group(*parts)

    def _head(self, workers: list[Worker]) -> RenderableType:
        count, outcome = "", ""
        if self._headline is not None:
            of = "" if self._headline.total is None else f"/{self._headline.total}"
            count = f"{self._headline.done}{of} {self._headline.unit}"
            outcome = self._headline.text
        times = (duration(self._pace.passed()), self._left(workers))
        return _Head(self._title, count, outcome, *times)

    def _left(self, workers: list[Worker]) -> str:
        """Return the time left in words."""
        self._before |= {worker.path: worker.report.before for worker in workers}
        if self._headline is None:
            return ""
        begun = sum(worker.report.share for worker in workers)
        return self._headline.left(self._pace, begun, sum(self._before.values()))


class _Head:
    """The line for the work; two lines where it is longer than the terminal is wide.

    Parameters
    ----------
    title, count, outcome, passed, left
        Its parts, in this order; empty ones are left out.
    """

    def __init__(self, title: str, count: str, outcome: str, passed: str, left: str) -> None:
        self._title, self._count, self._outcome = title, count, outcome
        self._times = (passed, left)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        whole = self._line(self._title, self._count, self._outcome, *self._times)
        if not self._outcome or whole.cell_len <= options.max_width:
            yield whole
        else:  # the time left would be cut off
            yield self._line(self._title, self._count, *self._times)
            yield self._line(self._outcome)

    def _line(self, *parts: str) -> Text:
        line = Text(" · ".join(filter(None, parts)), no_wrap=True, overflow="ellipsis")
        line.stylize("bold", 0, len(self._title) if parts[0] == self._title else 0)
        return line


class _Rows:
    """The lines for the workers, with short bars where long ones would hide the time left."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table(_BAR_WIDTH)
        wanted = Measurement.get(console, options.update(max_width=_ANY_WIDTH), table).maximum
        yield table if wanted <= options.max_width else self._table(_SHORT_BAR_WIDTH)

    def _table(self, bar_width: int) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        for name in ("name", "phase", "bar", "epoch", "numbers", "left"):
            is_last = name == "left"
            table.add_column(name, no_wrap=True, overflow="ellipsis" if is_last else "fold")
        for worker in self._workers:
            table.add_row(*_row(worker, bar_width))
        return table


def _row(worker: Worker, bar_width: int) -> list[RenderableType]:
    report = worker.report
    left = "" if report.seconds_left is None else f"{duration(report.seconds_left)} left"
    if worker.silence > _QUIET_SECONDS:
        left = f"silent for {duration(worker.silence)}"
    return [
        Text(report.name, "cyan"),
        report.phase,
        ProgressBar(total=1.0, completed=report.share, width=bar_width),
        f"{report.unit} {report.epoch}/{report.epochs}",
        report.text,
        Text(left, "dim"),
    ]
