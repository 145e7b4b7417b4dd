"""A trial of NNI, which is one growth: ``python -m nni_petridish.trial``.

The model is saved before it is reported, so that nothing is lost if the manager dies. Exit codes: 0
done, 1 failed (the reason is in the journal and on stderr), 143 stopped by SIGTERM.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

from nni_petridish.errors import (
    MissingPackageError,
    Orphaned,
    PetridishError,
    RejectedError,
    needing,
)
from nni_petridish.nni_adapter.warm.client import run_warm
from nni_petridish.running.process import keep_freed_memory, set_threads
from nni_petridish.search.records import Growth, Outcome

_log = logging.getLogger(__name__)

GRACE_SECONDS = 3
"""Time for the running step to end after SIGTERM, before it is interrupted."""


class Stopping:
    """Request to stop this process, made by SIGTERM."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """Start to handle SIGTERM."""
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.alarm(GRACE_SECONDS)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt


def parameters_of(growth: Growth, gallery: str, concurrency: int) -> dict[str, Any]:
    """Return the parameters of a trial as plain data."""
    return {**growth.to_dict(), "gallery": gallery, "concurrency": concurrency}


def metrics_of(outcome: Outcome) -> dict[str, Any]:
    """Return the final result for NNI; its charts show ``default``."""
    return {
        "default": outcome.metrics.get("accuracy", -outcome.error),
        "error": outcome.error,
        "loss": outcome.metrics.get("loss"),
        "multiply_adds": outcome.multiply_adds,
        "parameters": outcome.parameters,
        "growth": outcome.id,
    }


def main() -> int:
    """Run one trial; return its exit code."""
    stopping = Stopping()
    stopping.listen()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        with needing("nni", "nni_petridish.trial"):
            import nni  # imports no torch: the number of threads can still be set

            from nni_petridish.nni_adapter.compat.plain_json import read_plain_json
    except MissingPackageError as error:
        print(f"nni_petridish: {error}", file=sys.stderr)
        return 1
    read_plain_json()
    parameters = nni.get_next_parameter()
    if not parameters or "gallery" not in parameters:
        print("nni_petridish.trial is run by NNI, see configs/petridish.yml.", file=sys.stderr)
        return 1
    set_threads(int(parameters["concurrency"]))
    keep_freed_memory()
    try:
        outcome = _grow(Growth.from_dict(parameters), parameters["gallery"], stopping)
    except RejectedError as error:  # no failure, and no model to report
        print(f"nni_petridish: {error}")
        return 0
    except PetridishError as error:
        print(f"nni_petridish: {error}", file=sys.stderr)
        return 143 if stopping.asked else 1
    except KeyboardInterrupt:
        return 143
    except Exception:
        _log.exception("the growth failed")
        return 1
    try:
        nni.report_final_result(metrics_of(outcome))
    except Exception as problem:
        print(f"nni_petridish: {outcome.id} is saved; {_no_answer(problem)}", file=sys.stderr)
    return 0


def run() -> NoReturn:
    """Run one trial and end the process with its exit code."""
    code = run_warm()
    if code is None:
        code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # NNI's channel thread may wait for a manager that is gone.
    os._exit(code)


def _grow(growth: Growth, folder: str, stopping: Stopping) -> Outcome:
    from nni_petridish.gallery.gallery import Gallery
    from nni_petridish.registry import kind_of
    from nni_petridish.running.config import SearchConfig
    from nni_petridish.running.worker import work_on
    from nni_petridish.tasks.task import Callbacks

    gallery = Gallery(folder)
    config = SearchConfig.of_gallery(gallery)
    is_share = kind_of(config.space).MEASURE.is_share
    callbacks = Callbacks(_reporter(growth, is_share), should_stop=lambda: stopping.asked)
    max_pause = config.settings.limits.max_pause
    return work_on(growth, gallery, config.load_task, config.plan, callbacks, max_pause)


def _reporter(growth: Growth, is_share: bool) -> Any:
    import nni

    def report(phase: str, record: dict[str, float]) -> None:
        error = record["validation_error"]
        default = 1 - error if is_share else -error  # as in the final result
        metrics = {"default": default, "phase": phase, "growth": growth.id, **record}
        try:
            nni.report_intermediate_result(metrics)
        except Exception as problem:
            raise Orphaned(_no_answer(problem)) from problem

    return report


def _no_answer(problem: Exception) -> str:
    return f"the NNI manager does not answer ({problem})."
