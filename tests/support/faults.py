"""Searches on a disk that fails, with processes that are killed: ``faults.c`` preloaded.

`SearchProcess` imports torch and loads the data once. Each search is a fork of it, so that hundreds
of placements of a fault take well under a second each.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import yaml

from tests.support.chaos import ROOT, write_config

SOURCE = Path(__file__).with_name("faults.c")
OPERATIONS = ("open", "write", "fsync", "rename", "mkdir", "lock", "short")
"""Operations that can fail, as numbered in ``faults.c``; ``short`` is a write of half the data."""
FOREVER = -1
MAX_PAUSE = 0.15
SECONDS = 60


@dataclass(frozen=True)
class Fault:
    """A fault of the disk: it begins at the n-th call of an operation on files under a prefix.

    Parameters
    ----------
    operation
        One of `OPERATIONS`.
    nth
        The number of the first call that fails, from 1; 0 for none.
    error
        The name of the error, such as ENOSPC.
    failures
        The number of calls that fail; -1 for all from then on.
    """

    operation: str
    nth: int
    error: str = "ENOSPC"
    failures: int = 1

    def __str__(self) -> str:
        times = "forever" if self.failures == FOREVER else f"x{self.failures}"
        return f"{self.operation}-{self.nth}-{self.error}-{times}"


VARIANTS = (
    ("ENOSPC", 1),
    ("EIO", 4),
    ("EROFS", FOREVER),
    ("EDQUOT", 1),
    ("ENOSPC", 6),
    ("EIO", FOREVER),
    ("EROFS", 2),
    ("EDQUOT", FOREVER),
)
"""Errors and numbers of failures."""


def faults_at(operation: str, calls: Sequence[int]) -> list[Fault]:
    """Return a fault for each of these calls of an operation, of every variant in turn."""
    if operation == "short":
        return [Fault(operation, nth, *VARIANTS[0]) for nth in calls]
    variants = [(nth, *VARIANTS[nth % len(VARIANTS)]) for nth in calls]
    return [
        Fault(operation, nth, "ENOLCK" if operation == "lock" else error, failures)
        for nth, error, failures in variants
    ]


@dataclass(frozen=True)
class Blow:
    """A signal to a process of a search.

    Parameters
    ----------
    pause
        Seconds to wait before it.
    number
        The signal.
    victim
        ``all`` processes, the ``main`` one alone, or the ``tuner`` or a ``trial`` of a front that
        has them.
    """

    pause: float
    number: int
    victim: str = "main"


@dataclass(frozen=True)
class Ended:
    """The end of a search: exit code, text, calls of each operation, calls that failed.

    ``blows`` is the number of signals that have met a process.
    """

    code: int
    text: str
    counts: dict[str, int]
    hits: int
    blows: int


def compile_library(folder: Path) -> Path:
    """Compile the library; raises an error without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "a C compiler is needed for tests of faults"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "faults.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


def tiny_config(folder: Path, models: int = 2, concurrency: int = 1) -> Path:
    """Write the configuration of a search that takes a fraction of a second."""
    path = write_config(folder, models, concurrency)
    document = yaml.safe_load(path.read_text())
    arguments = document["tuner"]["classArgs"]
    arguments |= {"seed_epochs": 1, "weak_epochs": 1, "final_epochs": 1}
    arguments["data"] |= {"limit": 40}
    arguments["limits"] |= {"max_pause": MAX_PAUSE}
    path.write_text(yaml.safe_dump(document))
    return path


class SearchProcess:
    """A process that runs searches in forks of itself, each with a fault of the disk.

    Parameters
    ----------
    folder
        A folder for the compiled library and a first, small configuration.
    """

    def __init__(self, folder: Path) -> None:
        library = compile_library(folder)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(tiny_config(folder / "warm"))],
            cwd=ROOT,
            env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        arguments: list[str],
        under: Path,
        fault: Fault | None,
        clock: int = 0,
        blows: Sequence[Blow] = (),
        counted: str = "main",
        jumps: int = 0,
    ) -> Ended:
        """Run a front to its end.

        Parameters
        ----------
        arguments
            A command of ``nni-petridish``, or ``tuner`` or ``strategy`` and a configuration; see
            `tests.support.fronts`.
        under
            The prefix of the files whose system calls are counted, or fail.
        fault
            The fault of the disk, if any.
        clock
            Seconds that the clock of the day is ahead.
        blows
            Signals, in the order of time.
        counted
            Whose system calls are counted: ``main``, ``tuner`` or ``trial``.
        jumps
            Looks at the clock after which it jumps to ``clock`` and back; 0 if it stays there.
        """
        request = {
            "arguments": arguments,
            "under": str(under),
            "fault": asdict(fault or Fault("open", 0)),
            "clock": clock,
            "jumps": jumps,
            "blows": [asdict(blow) for blow in blows],
            "counted": counted,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return Ended(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> SearchProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)
