"""The command ``nni-petridish judge``."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import ConfigError
from nni_petridish.gallery.files import make_folder
from nni_petridish.running.display import Headline, add_display_options, open_display
from nni_petridish.running.process import INTERRUPTED, set_threads
from nni_petridish.search.settings import check_number
from nni_petridish.studies.stopped import tell_study_stopped
from nni_petridish.studies.study_command import (
    add_study_options,
    nothing_is_finished,
    print_fitting,
    run_study,
    tell_missing,
)

if TYPE_CHECKING:
    from nni_petridish.studies.judge.judgement import Judgement
    from nni_petridish.studies.judge.tables import TruthTable

TABLES = ("nas-bench-macro", "nas-bench-201")


def add_judge_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``judge``."""
    parts = parser.add_subparsers(required=True, metavar="WHAT")
    _add_scores(parts)
    _add_policies(parts)


def _add_scores(parts: Any) -> None:
    scores = parts.add_parser(
        "scores", help="the score of a candidate against the accuracy of the child it leads to"
    )
    _add_table(scores)
    scores.add_argument(
        "--data", type=Path, metavar="FOLDER", help="of CIFAR-10, as torchvision has it"
    )
    scores.add_argument(
        "--parents", default="2,16,14", metavar="N,N,...", help="after 0, 1, ... growths (2,16,14)"
    )
    scores.add_argument("--short", default="800,800", metavar="N,N", help=_STEPS.format("short"))
    scores.add_argument("--long", default="5000,2500", metavar="N,N", help=_STEPS.format("long"))
    scores.add_argument(
        "--checkpoints", default="50,100,200,300", metavar="N,...", help="steps of weak learning"
    )
    scores.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of parents")
    add_study_options(scores)
    scores.set_defaults(command=_judge_scores)


_STEPS = "training steps of the seed network and after each growth, of {} trainings"


def _add_policies(parts: Any) -> None:
    policies = parts.add_parser("policies", help="simulate searches that read the table")
    _add_table(policies)
    policies.add_argument("--repetitions", type=int, default=300, metavar="N", help="(300)")
    policies.add_argument(
        "--taus", default="0.3,0.5,0.7,0.9", metavar="X,...", help="Kendall's τ of the scores"
    )
    policies.add_argument("--seed", type=int, default=0, metavar="N", help="random seed")
    add_display_options(policies)
    policies.set_defaults(command=_judge_policies)


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", choices=TABLES, default=TABLES[0], help="(nas-bench-macro)")
    parser.add_argument("--file", type=Path, metavar="FILE", help="the table; by default in data/")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the results")


def _judge_scores(options: argparse.Namespace) -> int:
    check_number("--jobs", options.jobs, 1)
    set_threads(options.jobs)
    table = _table(options)
    judgement = _judgement(options, table)
    judgement.prepare()
    left = len(judgement.left())
    print(f"{len(judgement.parents)} parents, {len(judgement.parents) - left} finished")
    was_stopped = not options.show and left > 0 and _run_scores(judgement, options)
    code = _finish_scores(judgement)
    return tell_study_stopped(options) if was_stopped else code


def _run_scores(judgement: Judgement, options: argparse.Namespace) -> bool:
    """Judge the parents; return whether that was stopped."""
    from nni_petridish.studies.judge.judgement import WORK
    from nni_petridish.studies.judge.work import describe_run, judge_scores, runs_of

    return run_study(
        options,
        runs_of(judgement),
        lambda stop, tell: judge_scores(judgement, jobs=options.jobs, stop=stop, on_parent=tell),
        describe_run,
        title=f"scores on {judgement.table.name}",
        unit="parents",
        folder=judgement.folder,
        patterns=[f"{WORK}/*"],
    )


def _finish_scores(judgement: Judgement) -> int:
    from nni_petridish.studies.judge.report import write_scores_report
    from nni_petridish.studies.judge.work import runs_of

    if len(judgement.left()) == len(judgement.parents):
        return nothing_is_finished()
    page = write_scores_report(judgement.folder, judgement.table)
    print_fitting(page, page)
    print(f"scores.md, scores.csv and scores.svg are in {judgement.folder}")
    return tell_missing(runs_of(judgement), "parents")


def _judgement(options: argparse.Namespace, table: TruthTable) -> Judgement:
    from nni_petridish.studies.judge.judgement import Judgement
    from nni_petridish.studies.judge.settings import JudgeSettings
    from nni_petridish.studies.judge.training import load_images
    from search_spaces.tables.cells import CellsSpace
    from search_spaces.tables.macro import MacroSpace

    short, long = _numbers(options.short, "--short", 2), _numbers(options.long, "--long", 2)
    settings = JudgeSettings(
        parents=_numbers(options.parents, "--parents"),
        short_steps=short[0],
        short_grown_steps=short[1],
        long_steps=long[0],
        long_grown_steps=long[1],
        checkpoints=_numbers(options.checkpoints, "--checkpoints"),
        seed=options.seed,
    )
    data = load_images(options.data)
    space = MacroSpace() if options.table == MacroSpace.name else CellsSpace()
    return Judgement(table, space, data, settings, options.out.absolute())


def _judge_policies(options: argparse.Namespace) -> int:
    from nni_petridish.studies.judge.policies import policies
    from nni_petridish.studies.judge.report import write_policies_report
    from nni_petridish.studies.judge.simulate import simulate

    check_number("--repetitions", options.repetitions, 1)
    named = policies(_taus(options.taus))
    table = _table(options)
    make_folder(options.out)
    title, total = f"policies on {table.name}", len(table.limits) * len(named)
    try:
        with open_display(options, title, options.out, []) as display:
            done = itertools.count(1)

            def tell(line: str) -> None:
                display.say(line)
                display.show(Headline(next(done), total, "policies", ""))

            display.show(Headline(0, total, "policies", ""))
            found = simulate(
                table, repetitions=options.repetitions, seed=options.seed, named=named, tell=tell
            )
    except KeyboardInterrupt:
        print("Stopped: nothing is kept; fewer --repetitions take less time.", file=sys.stderr)
        return INTERRUPTED
    page = write_policies_report(options.out, table, found)
    print_fitting(page, page)
    print(f"policies.md and policies.csv are in {options.out}")
    return 0


def _table(options: argparse.Namespace) -> TruthTable:
    from nni_petridish.studies.judge.tables import read_table

    return read_table(options.table, options.file)


def _taus(text: str) -> tuple[float, ...]:
    try:
        taus = tuple(map(float, text.split(",")))
    except ValueError:
        taus = ()
    if not taus or not all(-1 <= tau <= 1 for tau in taus):
        raise ConfigError(f"--taus must be numbers from -1 to 1 but got {text!r}.")
    return taus


def _numbers(text: str, option: str, count: int | None = None) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or count not in (None, len(parts)):
        wanted = "whole numbers" if count is None else f"{count} whole numbers"
        raise ConfigError(f"{option} must be {wanted} with commas between but got {text!r}.")
    return tuple(int(part) for part in parts)
