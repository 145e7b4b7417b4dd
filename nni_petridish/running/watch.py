"""Watching workers through their reports, by the clock of this machine alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

from nni_petridish.running.display import Lines
from nni_petridish.running.worker_report import EPOCH, REPORT_FILE, WorkerReport, read_report

_POLL_SECONDS = 0.5


class Worker(NamedTuple):
    """A worker that is alive: its report, the file of it, and the seconds since it has changed."""

    report: WorkerReport
    path: Path
    silence: float


@dataclass
class _Seen:
    """The last report at a path, and when it changed."""

    stamp: int
    changed: float
    is_live: bool = False
    report: WorkerReport | None = None


class Watch:
    """Reports of workers that are alive.

    A report counts from its first change on: one that never changes is left over from a worker
    that was killed.

    Parameters
    ----------
    folder
        The folder of the work.
    patterns
        Patterns of the folders with reports, relative to it.
    labels
        The names of folders; whatever a worker in one of them does is shown with the name of it.
    """

    def __init__(
        self, folder: Path, patterns: tuple[str, ...], labels: Mapping[Path, str] | None = None
    ) -> None:
        self._folder, self._patterns, self._labels = folder, patterns, labels or {}
        self._seen: dict[Path, _Seen] = {}
        self._is_first = True

    def workers(self) -> list[Worker]:
        """Return the present workers."""
        now, found = time.monotonic(), {}
        for pattern in self._patterns:
            for path in sorted(self._folder.glob(f"{pattern}/{REPORT_FILE}")):
                seen = self._look(path, now)
                if seen is not None:
                    found[path] = seen
        self._seen, self._is_first = found, False
        return [
            Worker(seen.report, path, now - seen.changed)
            for path, seen in found.items()
            if seen.is_live and seen.report is not None
        ]

    def _look(self, path: Path, now: float) -> _Seen | None:
        try:
            stamp = path.stat().st_mtime_ns
        except OSError:
            return None
        before = self._seen.get(path)
        if before is not None and before.stamp == stamp:
            return before
        # A report that appears while others are watched is new.
        is_live = before is not None or not self._is_first
        return _Seen(stamp, now, is_live, self._read(path))

    def _read(self, path: Path) -> WorkerReport | None:
        report = read_report(path)
        label = next((self._labels[p] for p in path.parents if p in self._labels), None)
        if report is None or label is None:
            return report
        return replace(report, name=f"{label}: {report.name}")


class VerboseLines(Lines):
    """Plain lines, with one for every epoch of every worker.

    Parameters
    ----------
    watch
        The workers.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._epochs = EpochLines(watch)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)

    def _run(self) -> None:
        while not self._end.wait(_POLL_SECONDS):
            for line in self._epochs.new():
                self.say(line)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()


class EpochLines:
    """Lines for the epochs that workers begin.

    Parameters
    ----------
    watch
        The workers.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._told: set[tuple[Path, str, int]] = set()

    def new(self) -> list[str]:
        """Return the lines that are new since the last call."""
        return self.of(self._watch.workers())

    def of(self, workers: list[Worker]) -> list[str]:
        """Return the lines of these workers that are new."""
        lines = []
        for report, path, _ in workers:
            # Steps are too many for a line each: their phases have one.
            place = (path, report.phase, report.epoch if report.unit == EPOCH else 0)
            if place not in self._told:
                self._told.add(place)
                where = f"{report.unit} {report.epoch}/{report.epochs}"
                lines.append(f"{report.name} {report.phase}, {where}, {report.text}")
        return lines
