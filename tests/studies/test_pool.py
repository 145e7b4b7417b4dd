from __future__ import annotations

import sys

import pytest

from nni_petridish.errors import WorkerError
from nni_petridish.studies.pool import run_in_processes


def end(code: int, jobs: int) -> None:
    sys.exit(code * jobs)


def test_processes_that_all_crash_are_no_fault_of_the_configuration() -> None:
    with pytest.raises(WorkerError, match=r"All 2 processes of the test .* \(exit codes 6, 6\)"):
        run_in_processes(end, (3,), 2, lambda: False, "the test")


def test_processes_that_end_well_raise_nothing() -> None:
    run_in_processes(end, (0,), 2, lambda: False, "the test")
