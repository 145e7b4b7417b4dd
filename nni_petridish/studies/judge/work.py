"""Judge all parents, in this process or in several; the work can be stopped and shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nni_petridish.studies.judge.judgement import WORK, Judgement
from nni_petridish.studies.judge.settings import Parent, results_file
from nni_petridish.studies.runs import Result, run_all
from nni_petridish.tasks.task import Callbacks


@dataclass(frozen=True)
class ParentRun:
    """A parent that is to be judged.

    Parameters
    ----------
    judgement
        The judgement that it belongs to.
    parent
        The parent.
    """

    judgement: Judgement
    parent: Parent

    @property
    def file(self) -> Path:
        """The file of its result."""
        return results_file(self.judgement.folder, self.parent)

    @property
    def folder(self) -> Path:
        """The folder of its report; its lock is beside it."""
        return self.judgement.folder / WORK / self.parent.name

    def is_ready(self) -> bool:
        """Return True: it depends on no other run."""
        return True


OnParent = Callable[[ParentRun, Result | str], object]
"""Callback for every parent that ends, with its result or the reason of its failure."""


def runs_of(judgement: Judgement) -> list[ParentRun]:
    """Return all parents, the finished ones included."""
    return [ParentRun(judgement, parent) for parent in judgement.parents]


def judge_scores(
    judgement: Judgement,
    *,
    jobs: int = 1,
    stop: Callable[[], bool] = lambda: False,
    on_parent: OnParent = lambda parent, result: None,
) -> None:
    """Judge all parents that have no result yet.

    Parameters
    ----------
    judgement
        The table, data, settings and folder.
    jobs
        Processes on this machine; each judges one parent at a time.
    stop
        Asked before every training step; true ends the work.
    on_parent
        Called with each parent that ends, whichever of the jobs judged it; with a failed one only
        when there is one job.
    """
    judgement.prepare()
    run_all(
        runs_of(judgement),
        _carry_out,
        describe_run,
        jobs=jobs,
        stop=stop,
        on_run=on_parent,
        what="the judgement",
    )


def describe_run(run: ParentRun, result: Result | str) -> str:
    """Return the outcome of a parent in one line."""
    if isinstance(result, str):
        return f"{run.parent.name}: failed: {result}"
    return f"{run.parent.name}: error {100 * result['validation_error']:.1f} %"


def _carry_out(run: ParentRun, stop: Callable[[], bool]) -> Result:
    return run.judgement.judge(run.parent, Callbacks(should_stop=stop))
