"""Progress of a comparison: the outcome of a run in one line."""

from __future__ import annotations

from nni_petridish.running.pace import duration
from nni_petridish.studies.comparison.settings import CompareRun
from nni_petridish.studies.runs import Result


def describe_run(run: CompareRun, result: Result | str) -> str:
    """Return the outcome of a run in one line."""
    where = f"{run.name}, seed {run.seed}"
    if isinstance(result, str):
        return f"{where}: failed: {result}"
    name, final = run.measure.name, result["final"]
    found = f"validation {name} {result['best']['error']:.4f}, test {result['test_error']:.4f}"
    trained = f", after final training {final['test_error']:.4f}" if final else ""
    return f"{where}: {found}{trained} ({duration(result['seconds'])})"
