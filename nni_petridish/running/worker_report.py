"""Reports of workers on their present training: a small file that whoever likes may watch.

A worker may be any process on any machine that sees the folder. Its report is for display only:
nothing depends on it, and a report that cannot be written is left out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nni_petridish._support.reading import read_json
from nni_petridish.gallery.files import temporary_name
from nni_petridish.tasks.task import Callbacks, Progress, Record

REPORT_FILE = "progress.json"
EPOCH, STEP = "epoch", "step"
_VERSION = 1
_WRITE_SECONDS = 1.0


@dataclass(frozen=True)
class WorkerReport:
    """The present state of a worker.

    Parameters
    ----------
    name
        The name of its work: the id of a growth, or of a model that is retrained.
    phase
        The name of the phase.
    epoch, epochs
        The running epoch, from 1, and the number of epochs in the phase.
    share
        The part of the whole work that is done, by epochs.
    text
        The present numbers, such as ``"loss 0.412"``.
    seconds_left
        The estimated time to the end of the work; None at the beginning.
    before
        The part of the work that was done when the worker began, if it resumes.
    unit
        The name of what is counted as epochs.
    """

    name: str
    phase: str
    epoch: int
    epochs: int
    share: float
    text: str = ""
    seconds_left: float | None = None
    before: float = 0.0
    unit: str = EPOCH


def read_report(path: Path) -> WorkerReport | None:
    """Read a report; None if there is none, or none that this version understands."""
    try:
        values: dict[str, Any] = dict(read_json(path))
        if values.pop("version") != _VERSION:
            return None
        report = WorkerReport(**values)
        counts, shares = (report.epoch, report.epochs), (report.share, report.before)
        numbers = (*counts, *shares, report.seconds_left or 0)
        if all(isinstance(number, int | float) for number in numbers):
            return replace(report, name=str(report.name), phase=str(report.phase))
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


@contextmanager
def reporting(
    folder: Path,
    name: str,
    phases: Mapping[str, int],
    callbacks: Callbacks,
    unit: str = EPOCH,
) -> Iterator[Callbacks]:
    """Report on the trainings in the block; the report is removed at its end.

    Parameters
    ----------
    folder
        The folder of the report.
    name
        The name of the work.
    phases
        The number of epochs of every phase of the work, in their order.
    callbacks
        Callbacks of the work; those that are yielded call them too.
    unit
        The name of what is counted as epochs.
    """
    blank = WorkerReport(name, "", 1, 0, 0.0, "starting", unit=unit)
    reporter = _Reporter(folder / REPORT_FILE, blank, phases, callbacks)
    try:
        reporter.start()
        yield replace(callbacks, on_epoch=reporter.on_epoch, on_progress=reporter.on_progress)
    finally:
        reporter.remove()


class _Reporter:
    def __init__(
        self, path: Path, blank: WorkerReport, phases: Mapping[str, int], callbacks: Callbacks
    ) -> None:
        self._path, self._blank, self._phases, self._callbacks = path, blank, phases, callbacks
        self._phase, self._since = "", (0.0, 0.0)
        self._next = 0.0
        self._before: float | None = None

    def start(self) -> None:
        """Report that the work begins: loading data may take a while."""
        first, epochs = next(iter(self._phases.items()), ("", 0))
        _write(self._path, replace(self._blank, phase=first, epochs=epochs))

    def on_epoch(self, phase: str, record: Record) -> None:
        """Report an epoch that is done, and pass it on."""
        done, numbers = float(record.get("epoch", 0)), _numbers(record)
        self._report(phase, Progress(self._phases.get(phase, 0), done, numbers), done - 1)
        self._callbacks.on_epoch(phase, record)

    def on_progress(self, phase: str, progress: Progress) -> None:
        """Report a moment within an epoch, and pass it on."""
        self._report(phase, progress, int(progress.done))
        if self._callbacks.on_progress is not None:
            self._callbacks.on_progress(phase, progress)

    def remove(self) -> None:
        """Remove the report: the work is over."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _report(self, phase: str, progress: Progress, start: float) -> None:
        """Write a report; ``start`` is the beginning of the epoch that it is about."""
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._since, self._next = phase, (now, progress.done), 0.0
        if now < self._next:
            return
        self._next = now + _WRITE_SECONDS
        names = list(self._phases)
        place = names.index(phase) if phase in names else len(names)
        before = sum(self._phases[name] for name in names[:place])
        after = sum(self._phases[name] for name in names[place + 1 :])
        total = max(1, before + progress.epochs + after)
        if self._before is None:
            self._before = (before + max(0.0, start)) / total
        report = replace(
            self._blank,
            phase=phase,
            epoch=min(int(progress.done) + 1, max(1, progress.epochs)),
            epochs=progress.epochs,
            share=min(1.0, (before + progress.done) / total),
            text=progress.text,
            seconds_left=self._seconds_left(now, progress, after),
            before=self._before,
        )
        _write(self._path, report)

    def _seconds_left(self, now: float, progress: Progress, after: int) -> float | None:
        """Return the estimate that later epochs take as long as those of this phase."""
        began, start = self._since
        if progress.done - start <= 0:
            return None
        each = (now - began) / (progress.done - start)
        return round(each * (progress.epochs - progress.done + after), 1)


def _numbers(record: Record) -> str:
    """Return the numbers of an epoch in short."""
    loss = record.get("validation_loss", record.get("loss"))
    if loss is not None:
        return f"loss {loss:.3f}"
    return f"metric {record['metric']:.4g}" if "metric" in record else ""


def _write(path: Path, report: WorkerReport) -> None:
    """Replace the report at once; nothing is synced, since nothing depends on it."""
    temporary = temporary_name(path)
    try:
        temporary.write_text(json.dumps({"version": _VERSION, **asdict(report)}), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
