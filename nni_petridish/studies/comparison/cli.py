"""The command ``nni-petridish compare``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.running.display import Headline, add_display_options, open_display
from nni_petridish.running.process import StopOnInterrupt, set_threads
from nni_petridish.studies.stopped import tell_study_stopped

if TYPE_CHECKING:
    from nni_petridish.studies.comparison.settings import CompareRun, Comparison
    from nni_petridish.studies.runs import Result

TABLES_FILE, RUNS_FILE, PICTURE_FILE = "compare.md", "compare.csv", "compare.svg"


def add_compare_command(subparsers: Any) -> None:
    """Add ``compare`` to the commands."""
    compare = subparsers.add_parser(
        "compare", help="compare Petridish with other methods at equal compute, over random seeds"
    )
    compare.add_argument(
        "config", type=Path, metavar="CONFIG", help="such as configs/compare_digits.yml"
    )
    compare.add_argument("--only", metavar="METHODS", help="some methods, such as random,tpe")
    compare.add_argument("--repeats", type=int, metavar="N", help="random seeds of each method")
    compare.add_argument(
        "--pilot", action="store_true", help="with the pilot's random seeds, which do not count"
    )
    compare.add_argument("--jobs", type=int, default=1, metavar="K", help="processes (default: 1)")
    compare.add_argument("--out", metavar="FOLDER", help="for the runs and the tables")
    add_display_options(compare)
    compare.add_argument("--show", action="store_true", help="only show what is finished")
    compare.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    from nni_petridish.studies.comparison.settings import Comparison

    comparison = Comparison.from_yaml(options.config).change(
        only=None if options.only is None else options.only.split(","),
        repeats=options.repeats,
        folder=None if options.out is None else str(Path(options.out).absolute()),
        pilot=options.pilot,
    )
    done, methods = _count_finished(comparison), len(comparison.methods)
    seeds = f"{len(comparison.seeds)} {'pilot ' if options.pilot else ''}seeds"
    runs = len(comparison.runs)
    print(f"{methods} methods, {seeds}: {runs} runs, {done} finished; {comparison.folder}")
    was_stopped = not options.show and _run(comparison, options)
    code = _finish(comparison)
    return tell_study_stopped(options) if was_stopped else code


def _run(comparison: Comparison, options: argparse.Namespace) -> bool:
    """Carry out the runs; return whether they were stopped."""
    from nni_petridish.studies.comparison.progress import describe_run, time_left
    from nni_petridish.studies.comparison.work import WORK_FOLDERS, compare

    set_threads(options.jobs)
    with open_display(options, "comparison", comparison.folder, WORK_FOLDERS) as display:
        stopping = StopOnInterrupt(display.stopping)

        def tell(run: CompareRun, result: Result | str) -> None:
            display.say(describe_run(run, result))
            show()

        def show() -> None:
            text = f"in {comparison.folder}{time_left(comparison, options.jobs)}"
            display.show(Headline(_count_finished(comparison), len(comparison.runs), "runs", text))

        show()
        compare(comparison, jobs=options.jobs, stop=stopping.asked, on_run=tell)
    return stopping.asked()


def _finish(comparison: Comparison) -> int:
    """Print the tables and keep them; 1 if something is missing in them."""
    from nni_petridish.gallery.files import write_file
    from nni_petridish.studies.comparison.chart import draw
    from nni_petridish.studies.comparison.findings import Findings
    from nni_petridish.studies.comparison.tables import to_csv, to_markdown, to_text

    done = _count_finished(comparison)
    if not done:
        print("Nothing is finished yet.")
        return 1
    found, pilot = Findings.of(comparison), Findings.of(comparison.change(pilot=True))
    files = {
        TABLES_FILE: to_markdown(found, pilot),
        RUNS_FILE: to_csv(found),
        PICTURE_FILE: draw(found),
    }
    start = "pilot-" if comparison.is_pilot else ""
    for name, content in files.items():
        write_file(comparison.folder / f"{start}{name}", content.encode())
    print(f"\n{to_text(found, pilot)}")
    print(f"{', '.join(f'{start}{name}' for name in files)} are in {comparison.folder}")
    missing = len(comparison.runs) - done
    if missing:
        print(f"{missing} runs are not finished: give the command again to go on.")
    return 1 if missing else 0


def _count_finished(comparison: Comparison) -> int:
    return sum(run.file.exists() for run in comparison.runs)
