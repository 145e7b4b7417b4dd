"""Searches on a disk that fails: ``faults.c`` preloaded into a process that forks one per search.

The process imports torch and loads the data once. Each search is a fork of it, so that hundreds of
placements of a fault take well under a second each.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

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


@dataclass(frozen=True)
class Ended:
    """The end of a search: exit code, text, calls of each operation, calls that failed."""

    code: int
    text: str
    counts: dict[str, int]
    hits: int


def compile_library(folder: Path) -> Path:
    """Compile the library; raises an error without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "a C compiler is needed for tests of faults"
    library = folder / "faults.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


def tiny_config(folder: Path, models: int = 2) -> Path:
    """Write the configuration of a search that takes a fraction of a second."""
    path = write_config(folder, models, concurrency=1)
    document = yaml.safe_load(path.read_text())
    arguments = document["tuner"]["classArgs"]
    arguments |= {"seed_epochs": 1, "weak_epochs": 1, "final_epochs": 1}
    arguments["data"] |= {"limit": 40}
    arguments["limits"] |= {"max_pause": MAX_PAUSE}
    path.write_text(yaml.safe_dump(document))
    return path


class SearchProcess:
    """A process that runs commands in forks of itself, each with a fault of the disk.

    Parameters
    ----------
    folder
        A folder for the compiled library and a first, small configuration.
    """

    def __init__(self, folder: Path) -> None:
        library = compile_library(folder)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.faults", str(tiny_config(folder / "warm"))],
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
        signals: Sequence[tuple[float, int]] = (),
    ) -> Ended:
        """Run a command of ``nni-petridish`` to its end.

        Parameters
        ----------
        arguments
            The command.
        under
            The prefix of the files whose system calls are counted, or fail.
        fault
            The fault of the disk, if any.
        clock
            Seconds that the clock of the day is ahead.
        signals
            Pauses in seconds, each with the signal that is sent after it.
        """
        request = {
            "arguments": arguments,
            "under": str(under),
            "fault": asdict(fault or Fault("open", 0)),
            "clock": clock,
            "signals": list(signals),
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


def _serve(config: Path) -> None:
    """Answer the requests of `SearchProcess.run`."""
    from nni_petridish.cli import main
    from nni_petridish.running import patience

    patience.FIRST_SECONDS, patience.LONGEST_SECONDS = 0.01, 0.04
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    assert main(["search", str(config)]) == 0  # imports all that the forks need
    for line in sys.stdin:
        output = config.with_name("output.txt")
        child = os.fork()
        request = json.loads(line)
        if child == 0:
            _run_in_child(request, output)
        for pause, number in request["signals"]:
            time.sleep(pause)
            os.kill(child, number)
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        text, mark, told = output.read_text(errors="replace").rpartition("\n#")
        counts = json.loads(told) if mark else {}
        hits = counts.pop("hits", 0)
        answer = {"code": code, "text": text, "counts": counts, "hits": hits}
        print(json.dumps(answer), file=answers, flush=True)


def _run_in_child(request: dict[str, Any], output: Path) -> None:
    from nni_petridish.cli import main

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    library = ctypes.CDLL(None)
    fault = Fault(**request["fault"])
    number = getattr(errno, fault.error)
    library.faults_shift_clock(ctypes.c_long(request["clock"]))
    library.faults_arm(
        request["under"].encode(),
        OPERATIONS.index(fault.operation),
        ctypes.c_long(fault.nth),
        number,
        ctypes.c_long(fault.failures),
    )
    code = 70
    try:
        code = main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        library.faults_disarm()
        sys.stdout.flush()
        sys.stderr.flush()
        counts = {name: library.faults_count(i) for i, name in enumerate(OPERATIONS)}
        os.write(1, f"\n#{json.dumps(counts | {'hits': library.faults_hits()})}".encode())
        os._exit(code)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
