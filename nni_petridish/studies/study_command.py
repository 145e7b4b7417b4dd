"""Parts of every command of a study: options, the display of its runs, and the last lines."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nni_petridish.gallery.files import write_file
from nni_petridish.running.display import Headline, add_display_options, open_display
from nni_petridish.running.process import StopOnInterrupt, set_threads
from nni_petridish.studies.runs import AnyRun, Describe, OnRun, Run

Start = Callable[[Callable[[], bool], OnRun[AnyRun]], object]
"""Carries out runs, given ``stop`` and ``on_run``."""


def add_study_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that carries out runs: ``--jobs``, ``--show``, the display's."""
    parser.add_argument("--jobs", type=int, default=1, metavar="K", help="processes (default: 1)")
    add_display_options(parser)
    parser.add_argument("--show", action="store_true", help="only show what is finished")


def changes_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the changes that ``--only``, ``--repeats`` and ``--out`` make to a study."""
    return {
        "only": None if options.only is None else options.only.split(","),
        "repeats": options.repeats,
        "folder": None if options.out is None else str(Path(options.out).absolute()),
    }


def run_study(
    options: argparse.Namespace,
    runs: Sequence[AnyRun],
    start: Start[AnyRun],
    describe: Describe[AnyRun],
    *,
    title: str,
    unit: str,
    folder: Path,
    patterns: Sequence[str],
    labels: Mapping[Path, str] | None = None,
) -> bool:
    """Carry out the runs of a study and show how far they are; return whether they were stopped.

    Parameters
    ----------
    options
        The options of `add_study_options`.
    runs, start, describe
        The runs, the function that carries them out, and the outcome of one in words.
    title, unit
        The name of the study and of its runs.
    folder, patterns, labels
        The folder of the study, the folders in it with workers' reports, and the names of those
        that belong to one of many runs. Without names, a worker does one run at a time.
    """
    set_threads(options.jobs)
    with open_display(options, title, folder, patterns, labels) as display:
        stopping = StopOnInterrupt(display.stopping)

        def show() -> None:
            done, has_parts = count_finished(runs), labels is None
            display.show(Headline(done, len(runs), unit, "", has_parts=has_parts))

        def tell(run: AnyRun, result: dict[str, Any] | str) -> None:
            display.say(describe(run, result))
            show()

        show()
        start(stopping.asked, tell)
    return stopping.asked()


def count_finished(runs: Sequence[Run]) -> int:
    """Return the number of runs with a result."""
    return sum(run.file.exists() for run in runs)


def nothing_is_finished() -> int:
    """Say so; return the exit code."""
    print("Nothing is finished yet.")
    return 1


def print_fitting(text: str, document: str) -> None:
    """Print tables; on a terminal that is too narrow for them, in cells of several lines.

    Parameters
    ----------
    text
        The tables as lines of text.
    document
        The same in Markdown.
    """
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or all(len(line) <= width for line in text.splitlines()):
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(highlight=False, width=width).print(Markdown(document))


def keep_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write files into the folder of a study, and say so."""
    for name, content in files.items():
        write_file(folder / name, content.encode())
    print(f"{', '.join(files)} are in {folder}")


def tell_missing(runs: Sequence[Run], unit: str) -> int:
    """Say how many runs are left, if any; return the exit code."""
    missing = len(runs) - count_finished(runs)
    if missing:
        print(f"{missing} {unit} are not finished: give the command again to go on.")
    return 1 if missing else 0
