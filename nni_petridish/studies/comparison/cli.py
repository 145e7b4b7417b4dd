"""The command ``nni-petridish compare``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from nni_petridish.studies.stopped import tell_study_stopped
from nni_petridish.studies.study_command import (
    add_study_options,
    changes_of,
    count_finished,
    keep_files,
    nothing_is_finished,
    print_fitting,
    run_study,
    tell_missing,
)

if TYPE_CHECKING:
    from nni_petridish.studies.comparison.settings import Comparison

TABLES_FILE, RUNS_FILE, PICTURE_FILE = "compare.md", "compare.csv", "compare.svg"
CROSSOVER_FILE = "crossover.svg"


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare``."""
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="such as configs/compare_digits.yml"
    )
    parser.add_argument("--only", metavar="METHODS", help="some methods, such as random,tpe")
    parser.add_argument("--repeats", type=int, metavar="N", help="random seeds of each method")
    parser.add_argument(
        "--pilot", action="store_true", help="with the pilot's random seeds, which do not count"
    )
    parser.add_argument("--out", metavar="FOLDER", help="for the runs and the tables")
    add_study_options(parser)
    parser.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> int:
    from nni_petridish.studies.comparison.settings import Comparison

    comparison = Comparison.from_yaml(options.config).change(
        **changes_of(options), pilot=options.pilot
    )
    done, methods = count_finished(comparison.runs), len(comparison.methods)
    seeds = f"{len(comparison.seeds)} {'pilot ' if options.pilot else ''}seeds"
    runs = len(comparison.runs)
    print(f"{methods} methods, {seeds}: {runs} runs, {done} finished; {comparison.folder}")
    was_stopped = not options.show and _run(comparison, options)
    code = _finish(comparison)
    return tell_study_stopped(options) if was_stopped else code


def _run(comparison: Comparison, options: argparse.Namespace) -> bool:
    """Carry out the runs; return whether they were stopped."""
    from nni_petridish.studies.comparison.progress import describe_run
    from nni_petridish.studies.comparison.work import WORK_FOLDERS, compare

    return run_study(
        options,
        comparison.runs,
        lambda stop, tell: compare(comparison, jobs=options.jobs, stop=stop, on_run=tell),
        describe_run,
        title="comparison",
        unit="runs",
        folder=comparison.folder,
        patterns=WORK_FOLDERS,
        labels={run.folder: f"{run.name}, seed {run.seed}" for run in comparison.runs},
    )


def _finish(comparison: Comparison) -> int:
    """Print the tables and keep them; 1 if something is missing in them."""
    from nni_petridish.studies.comparison.chart import draw
    from nni_petridish.studies.comparison.crossover_page import draw_crossover
    from nni_petridish.studies.comparison.findings import Findings
    from nni_petridish.studies.comparison.tables import to_csv, to_markdown, to_text

    if not count_finished(comparison.runs):
        return nothing_is_finished()
    found, pilot = Findings.of(comparison), Findings.of(comparison.change(pilot=True))
    start = "pilot-" if comparison.is_pilot else ""
    files = {
        f"{start}{TABLES_FILE}": to_markdown(found, pilot),
        f"{start}{RUNS_FILE}": to_csv(found),
        f"{start}{PICTURE_FILE}": draw(found),
        f"{start}{CROSSOVER_FILE}": draw_crossover(found),
    }
    print_fitting(f"\n{to_text(found, pilot)}", files[f"{start}{TABLES_FILE}"])
    keep_files(comparison.folder, files)
    return tell_missing(comparison.runs, "runs")
