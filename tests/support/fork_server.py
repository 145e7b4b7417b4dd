"""The process behind `tests.support.faults.SearchProcess`: it forks a process for each search."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from nni_petridish.__main__ import main
from nni_petridish.running import patience, worker
from tests.support.faults import OPERATIONS, Blow, Fault

FRONTS = ("tuner", "strategy")
"""Fronts that are no commands."""
library = ctypes.CDLL(None)


def serve(config: Path) -> None:
    """Answer the requests of `SearchProcess.run`."""
    patience.FIRST_SECONDS, patience.LONGEST_SECONDS = 0.01, 0.04
    worker.PULSE_SECONDS, worker.LOST_SECONDS, worker.SUSPECT_SECONDS = 0.1, 1.0, 0.4
    library.faults_share()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    assert main(["search", str(config)]) == 0  # imports all that the forks need
    warnings.simplefilter("ignore")  # of NNI, about the version of torch
    for line in sys.stdin:
        request = json.loads(line)
        if request["arguments"][0] in FRONTS:
            import tests.support.fronts  # noqa: F401  NNI takes seconds: once, and only if needed
        answer = _answer(request, config.with_name("output.txt"))
        print(json.dumps(answer), file=answers, flush=True)


def _answer(request: dict[str, Any], output: Path) -> dict[str, Any]:
    _arm(request)
    blows = [Blow(**blow) for blow in request["blows"]]
    child = os.fork()
    if child == 0:
        _run_in_child(request, output)
    with suppress(PermissionError):
        os.setpgid(child, child)  # the child does so too: whoever comes first
    met = _strike(child, [blow for blow in blows if blow.victim in ("main", "all")])
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie keeps its number
    if not any(blow.victim == "main" for blow in blows):
        os.killpg(child, signal.SIGKILL)  # otherwise its survivors meet the next search
    _, status = os.waitpid(child, 0)
    library.faults_disarm()
    text = output.read_text(errors="replace")
    met += text.count(STRUCK)
    return {
        "code": os.waitstatus_to_exitcode(status),
        "text": text,
        "counts": {name: library.faults_count(i) for i, name in enumerate(OPERATIONS)},
        "hits": library.faults_hits(),
        "blows": met,
    }


STRUCK = "struck: "
"""Beginning of the line about a signal that a front has sent to a process of its own."""


def _arm(request: dict[str, Any]) -> None:
    fault = Fault(**request["fault"])
    library.faults_arm(
        request["under"].encode(),
        OPERATIONS.index(fault.operation),
        ctypes.c_long(fault.nth),
        getattr(errno, fault.error),
        ctypes.c_long(fault.failures),
    )


def _strike(child: int, blows: list[Blow]) -> int:
    """Send the signals; return how many have met a living process."""
    met = 0
    for blow in blows:
        time.sleep(blow.pause)
        is_alive = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        if is_alive:
            (os.killpg if blow.victim == "all" else os.kill)(child, blow.number)
            met += 1
    return met


def _run_in_child(request: dict[str, Any], output: Path) -> None:
    with suppress(PermissionError):
        os.setpgid(0, 0)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    library.faults_shift_clock(ctypes.c_long(request["clock"]), ctypes.c_long(request["jumps"]))
    if request["counted"] == "main":
        library.faults_count_this_thread()
    code = 70
    try:
        code = _run(request)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(request: dict[str, Any]) -> int:
    front, *arguments = request["arguments"]
    if front not in FRONTS:
        return main(request["arguments"])
    from tests.support import fronts

    if front == "strategy":
        return fronts.strategy(Path(arguments[0]))
    blows = [Blow(**blow) for blow in request["blows"] if blow["victim"] in ("tuner", "trial")]
    return fronts.tuner(Path(arguments[0]), "--resume" in arguments, request["counted"], blows)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
