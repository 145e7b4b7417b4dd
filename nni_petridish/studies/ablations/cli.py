"""The command ``nni-petridish ablate``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.running.display import Headline, add_display_options, open_display
from nni_petridish.running.process import StopOnInterrupt, set_threads
from nni_petridish.studies.stopped import tell_study_stopped

if TYPE_CHECKING:
    from nni_petridish.studies.ablations.settings import AblationRun, Ablations

TABLES_FILE, RUNS_FILE, PICTURE_FILE = "ablations.md", "ablations.csv", "ablations.svg"


def add_ablate_command(subparsers: Any) -> None:
    """Add ``ablate`` to the commands."""
    ablate = subparsers.add_parser(
        "ablate", help="run ablations and print them as tables beside the paper's"
    )
    ablate.add_argument("config", type=Path, metavar="CONFIG", help="such as configs/ablations.yml")
    ablate.add_argument("--only", metavar="TABLES", help="some of the tables, such as i_max,l1")
    ablate.add_argument("--repeats", type=int, metavar="N", help="searches of each variant")
    ablate.add_argument("--jobs", type=int, default=1, metavar="K", help="processes (default: 1)")
    ablate.add_argument("--out", metavar="FOLDER", help="for the galleries and the tables")
    add_display_options(ablate)
    ablate.add_argument("--show", action="store_true", help="only show what is finished")
    ablate.set_defaults(command=_ablate)


def _ablate(options: argparse.Namespace) -> int:
    from nni_petridish.studies.ablations.settings import Ablations

    ablations = Ablations.from_yaml(options.config).change(
        only=None if options.only is None else options.only.split(","),
        repeats=options.repeats,
        folder=None if options.out is None else str(Path(options.out).absolute()),
    )
    done = _count_finished(ablations)
    searches = len({run.config.gallery for run in ablations.runs})
    print(f"{len(ablations.runs)} runs of {searches} searches, {done} finished; {ablations.folder}")
    was_stopped = not options.show and _run(ablations, options)
    code = _finish(ablations)
    return tell_study_stopped(options) if was_stopped else code


def _run(ablations: Ablations, options: argparse.Namespace) -> bool:
    """Carry out the runs; return whether they were stopped."""
    from nni_petridish.studies.ablations.tables import describe_run
    from nni_petridish.studies.ablations.work import WORK_FOLDERS, ablate

    set_threads(options.jobs)
    with open_display(options, "ablations", ablations.folder, WORK_FOLDERS) as display:
        stopping = StopOnInterrupt(display.stopping)

        def tell(run: AblationRun, result: dict[str, Any] | str) -> None:
            display.say(describe_run(run, result))
            show()

        def show() -> None:
            done = _count_finished(ablations)
            display.show(Headline(done, len(ablations.runs), "runs", f"in {ablations.folder}"))

        show()
        ablate(ablations, jobs=options.jobs, stop=stopping.asked, on_run=tell)
    return stopping.asked()


def _finish(ablations: Ablations) -> int:
    """Print the tables and keep them; 1 if something is missing in them."""
    from nni_petridish.gallery.files import write_file
    from nni_petridish.studies.ablations.chart import draw
    from nni_petridish.studies.ablations.tables import legend, to_csv, to_markdown, to_text

    done = _count_finished(ablations)
    if not done:
        print("Nothing is finished yet.")
        return 1
    files = {
        TABLES_FILE: to_markdown(ablations),
        RUNS_FILE: to_csv(ablations),
        PICTURE_FILE: draw(ablations),
    }
    for name, content in files.items():
        write_file(ablations.folder / name, content.encode())
    print(f"\n{to_text(ablations)}\n\n{legend(ablations)}\n")
    print(f"{', '.join(files)} are in {ablations.folder}")
    missing = len(ablations.runs) - done
    if missing:
        print(f"{missing} runs are not finished: give the command again to go on.")
    return 1 if missing else 0


def _count_finished(ablations: Ablations) -> int:
    return sum(run.file.exists() for run in ablations.runs)
