"""The command ``nni-petridish ablate``."""

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
    from nni_petridish.studies.ablations.settings import Ablations

TABLES_FILE, RUNS_FILE, PICTURE_FILE = "ablations.md", "ablations.csv", "ablations.svg"


def add_ablate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ablate``."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="such as configs/ablations.yml")
    parser.add_argument("--only", metavar="TABLES", help="some of the tables, such as i_max,l1")
    parser.add_argument("--repeats", type=int, metavar="N", help="searches of each variant")
    parser.add_argument("--out", metavar="FOLDER", help="for the galleries and the tables")
    add_study_options(parser)
    parser.set_defaults(command=_ablate)


def _ablate(options: argparse.Namespace) -> int:
    from nni_petridish.studies.ablations.settings import Ablations

    ablations = Ablations.from_yaml(options.config).change(**changes_of(options))
    done = count_finished(ablations.runs)
    searches = len({run.config.gallery for run in ablations.runs})
    print(f"{len(ablations.runs)} runs of {searches} searches, {done} finished; {ablations.folder}")
    was_stopped = not options.show and _run(ablations, options)
    code = _finish(ablations)
    return tell_study_stopped(options) if was_stopped else code


def _run(ablations: Ablations, options: argparse.Namespace) -> bool:
    """Carry out the runs; return whether they were stopped."""
    from nni_petridish.studies.ablations.tables import describe_run
    from nni_petridish.studies.ablations.work import WORK_FOLDERS, ablate

    return run_study(
        options,
        ablations.runs,
        lambda stop, tell: ablate(ablations, jobs=options.jobs, stop=stop, on_run=tell),
        describe_run,
        title="ablations",
        unit="runs",
        folder=ablations.folder,
        patterns=WORK_FOLDERS,
        labels={run.folder: f"{run.name}, seed {run.seed}" for run in ablations.runs},
    )


def _finish(ablations: Ablations) -> int:
    """Print the tables and keep them; 1 if something is missing in them."""
    from nni_petridish.studies.ablations.chart import draw
    from nni_petridish.studies.ablations.tables import legend, to_csv, to_markdown, to_text

    if not count_finished(ablations.runs):
        return nothing_is_finished()
    files = {
        TABLES_FILE: to_markdown(ablations),
        RUNS_FILE: to_csv(ablations),
        PICTURE_FILE: draw(ablations),
    }
    text = f"\n{to_text(ablations)}\n\n{legend(ablations)}\n"
    print_fitting(text, files[TABLES_FILE])
    keep_files(ablations.folder, files)
    return tell_missing(ablations.runs, "runs")
