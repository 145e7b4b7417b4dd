"""The command ``nni-petridish tune``."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from nni_petridish.running.display import add_display_options, open_display
from nni_petridish.running.process import StopOnInterrupt, set_threads
from nni_petridish.studies.stopped import tell_study_stopped
from nni_petridish.studies.study_command import print_fitting
from nni_petridish.studies.tuning.section import PRUNERS, SAMPLERS

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

    from nni_petridish.studies.tuning.settings import Tuning

RESULTS_FILE = "results.md"


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``tune``."""
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file, see configs/")
    parser.add_argument("--trials", type=int, metavar="N", help="settings to try, earlier included")
    parser.add_argument("--storage", metavar="URL", help="a database, or journal:FILE")
    parser.add_argument("--study", metavar="NAME", help="of the study within the storage")
    parser.add_argument("--jobs", type=int, default=1, metavar="K", help="processes (default: 1)")
    parser.add_argument(
        "--multi-objective",
        action="store_true",
        default=None,
        help="minimize error and multiply-adds, not the error alone",
    )
    parser.add_argument("--sampler", metavar="NAME", help=", ".join(SAMPLERS))
    parser.add_argument("--pruner", metavar="NAME", help=", ".join(PRUNERS))
    add_display_options(parser)
    parser.add_argument("--show", action="store_true", help="only show what the study has found")
    parser.set_defaults(command=_tune)


def _tune(options: argparse.Namespace) -> int:
    from nni_petridish.search.settings import check_number
    from nni_petridish.studies.tuning.settings import Tuning

    tuning = Tuning.from_yaml(options.config).change(
        trials=options.trials,
        storage=options.storage,
        study=options.study,
        multi_objective=options.multi_objective,
        sampler=options.sampler,
        pruner=options.pruner,
    )
    check_number("--jobs", options.jobs, 1, whole=True)
    set_threads(options.jobs)
    from nni_petridish.studies.tuning.storage import open_study

    study = open_study(tuning, create=not options.show)
    print(f"Study {study.study_name!r} in {tuning.storage}")
    was_stopped = not options.show and _run(study, tuning, options)
    code = _finish(study, tuning)
    return tell_study_stopped(options) if was_stopped else code


def _run(study: optuna.Study, tuning: Tuning, options: argparse.Namespace) -> bool:
    """Carry out the trials; return whether they were stopped."""
    from nni_petridish.studies.tuning.study import tune
    from nni_petridish.studies.tuning.tables import describe_trial, headline_of

    if not tuning.default():
        print("The space leaves out the default setting: the study may end worse than it.")
    names = list(tuning.section.space)
    with open_display(options, study.study_name, tuning.folder, ["*/*/work/*"]) as display:
        stopping = StopOnInterrupt(display.stopping)
        display.show(headline_of(study, tuning))

        def tell(trial: FrozenTrial) -> None:
            display.say(describe_trial(trial, names, tuning.measure.name))
            display.show(headline_of(study, tuning))

        tune(tuning, jobs=options.jobs, stop=stopping.asked, on_trial=tell)
    return stopping.asked()


def _finish(study: optuna.Study, tuning: Tuning) -> int:
    """Print the tables and keep them with the plots; 1 if no trial is complete."""
    from nni_petridish.gallery.files import write_file
    from nni_petridish.studies.tuning import tables

    parts = {
        "Trials (* best)": tables.trial_rows(study),
        f"Average lowest {tuning.measure.name} per I_max": tables.ablation_by_i_max(study),
        f"Average lowest {tuning.measure.name} per λ": tables.ablation_by_l1(study),
    }
    for title, rows in parts.items():
        page = f"## {title}\n\n{tables.to_markdown(rows)}"
        print_fitting(f"\n{title}\n{tables.to_text(rows)}", page)
    if not tables.completed(study):
        return 1
    page = "\n\n".join(f"## {title}\n\n{tables.to_markdown(rows)}" for title, rows in parts.items())
    write_file(tuning.folder / RESULTS_FILE, f"# {study.study_name}\n\n{page}\n".encode())
    # Without a screen there is nothing else to draw with; with one, no window is wanted.
    os.environ.setdefault("MPLBACKEND", "Agg")
    from nni_petridish.studies.tuning.plots import plot_study

    pictures = plot_study(study, tuning.folder)
    print(f"\nResults: {tuning.folder / RESULTS_FILE}")
    print(f"Plots:   {', '.join(path.name for path in pictures)}")
    return 0
