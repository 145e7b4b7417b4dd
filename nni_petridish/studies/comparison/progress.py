"""Progress of a comparison: the outcome of a run in one line, and the time left."""

from __future__ import annotations

import statistics

from nni_petridish.running.cost import duration
from nni_petridish.studies.comparison.settings import CompareRun, Comparison
from nni_petridish.studies.runs import Result


def time_left(comparison: Comparison, jobs: int) -> str:
    """Return the time left in words, from the processor time of the finished runs of each method.

    Parameters
    ----------
    comparison
        The comparison.
    jobs
        Processes that work on it.
    """
    taken: dict[str, list[float]] = {}
    left: list[str] = []
    for run in comparison.runs:
        result = run.result()
        if result is None:
            left.append(run.name)
        else:
            taken.setdefault(run.name, []).append(result["total_seconds"])
    if not taken or not left:
        return ""
    means = {name: statistics.fmean(values) for name, values in taken.items()}
    usual = statistics.fmean(means.values())
    seconds = sum(means.get(name, usual) for name in left) / jobs
    return f", about {duration(seconds)} left"


def describe_run(run: CompareRun, result: Result | str) -> str:
    """Return the outcome of a run in one line."""
    where = f"{run.name}, seed {run.seed}"
    if isinstance(result, str):
        return f"{where}: failed: {result}"
    name, final = run.measure.name, result["final"]
    found = f"validation {name} {result['best']['error']:.4f}, test {result['test_error']:.4f}"
    trained = f", after final training {final['test_error']:.4f}" if final else ""
    return f"{where}: {found}{trained} ({duration(result['seconds'])})"
