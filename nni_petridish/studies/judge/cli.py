"""The command ``nni-petridish judge``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nni_petridish.errors import ConfigError
from nni_petridish.running.process import StopOnInterrupt, set_threads
from nni_petridish.search.settings import check_number

if TYPE_CHECKING:
    from nni_petridish.studies.judge.settings import Parent
    from nni_petridish.studies.judge.tables import TruthTable
    from nni_petridish.studies.judge.work import Judgement

TABLES = ("nas-bench-macro", "nas-bench-201")


def add_judge_command(subparsers: Any) -> None:
    """Add ``judge`` to the commands."""
    judge = subparsers.add_parser(
        "judge", help="judge scores and search policies by tables of trained architectures"
    )
    parts = judge.add_subparsers(required=True, metavar="WHAT")
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
    scores.add_argument("--jobs", type=int, default=1, metavar="K", help="processes (default: 1)")
    scores.add_argument("--show", action="store_true", help="only show what is finished")
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
    policies.set_defaults(command=_judge_policies)


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", choices=TABLES, default=TABLES[0], help="(nas-bench-macro)")
    parser.add_argument("--file", type=Path, metavar="FILE", help="the table; by default in data/")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the results")


def _judge_scores(options: argparse.Namespace) -> int:
    from nni_petridish.studies.judge.work import judge_scores

    check_number("--jobs", options.jobs, 1)
    set_threads(options.jobs)
    table = _table(options)
    judgement = _judgement(options, table)
    judgement.prepare()
    left = len(judgement.left())
    print(f"{len(judgement.parents)} parents, {len(judgement.parents) - left} finished")
    if not options.show and left:
        judge_scores(
            judgement,
            jobs=options.jobs,
            stop=StopOnInterrupt().asked,
            on_parent=_Progress(judgement).tell,
        )
    return _finish_scores(judgement)


class _Progress:
    """One line for each parent, with the time that is left."""

    def __init__(self, judgement: Judgement) -> None:
        self._judgement, self._start, self._done = judgement, time.monotonic(), 0

    def tell(self, parent: Parent, result: dict[str, Any]) -> None:
        """Print a finished parent."""
        self._done += 1
        left = len(self._judgement.left())
        minutes = left * (time.monotonic() - self._start) / self._done / 60
        of = f"{len(self._judgement.parents) - left}/{len(self._judgement.parents)}"
        error = 100 * result["validation_error"]
        print(f"{of}  {parent.name}  error {error:.1f} %  {minutes:.0f} min left", flush=True)


def _finish_scores(judgement: Judgement) -> int:
    from nni_petridish.studies.judge.report import write_scores_report

    left = len(judgement.left())
    if left == len(judgement.parents):
        print("Nothing is finished yet.")
        return 1
    print(write_scores_report(judgement.folder, judgement.table))
    if left:
        print(f"{left} parents are left: give the command again to go on.")
    return 1 if left else 0


def _judgement(options: argparse.Namespace, table: TruthTable) -> Judgement:
    from nni_petridish.studies.judge.settings import JudgeSettings
    from nni_petridish.studies.judge.training import load_images
    from nni_petridish.studies.judge.work import Judgement
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
    found = simulate(
        table, repetitions=options.repetitions, seed=options.seed, named=named, tell=print
    )
    options.out.mkdir(parents=True, exist_ok=True)
    print(write_policies_report(options.out, table, found))
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
