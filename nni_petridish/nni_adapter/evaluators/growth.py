"""One growth as the evaluator of an NNI trial."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import nni
import torch

from nni_petridish.core.space import Space
from nni_petridish.errors import Orphaned, TrainingError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.nni_adapter.compat.nas import Evaluator
from nni_petridish.nni_adapter.evaluators.task import EvaluatorTask, Metric
from nni_petridish.nni_adapter.metrics import Reporter
from nni_petridish.nni_adapter.trial import Stopping
from nni_petridish.running.growth import load_network
from nni_petridish.running.process import set_threads
from nni_petridish.running.warm_start import warm_task
from nni_petridish.running.worker import work_on
from nni_petridish.search.records import Growth, Outcome
from nni_petridish.search.settings import GrowthSettings
from nni_petridish.tasks.task import Callbacks, Record, Task

_PICKLE_SIZE = 64 * 1024  # NNI's own limit for what it sends to trials


class GrowthEvaluator(Evaluator):
    """Evaluator that carries out a growth in place of NNI's evaluation of a model.

    The network comes from the gallery, not from NNI, and the outcome is in the gallery before it is
    reported, because NNI may lose messages and swaps the parameters of trials.

    Parameters
    ----------
    growth
        The growth.
    space
        The space of its networks.
    evaluators
        The evaluator of each phase, or all of them as the string that is sent to a trial.
    gallery
        Folder of the gallery, the same on all machines.
    plan
        Lengths of the phases and variants of weak learning.
    metric
        The metric of the search among the evaluators' reports.
    concurrency
        Number of trials, each a process, that share the cores of a machine. None in the user's
        process, whose threads and signals are left unchanged.
    start
        The model to start from in place of the seed, see `nni_petridish.running.warm_start`.
    max_pause
        The limit of the search of the same name.
    """

    def __init__(
        self,
        growth: Growth,
        space: Space,
        evaluators: Mapping[str, Any] | str,
        gallery: str,
        plan: GrowthSettings,
        metric: Metric,
        concurrency: int | None = None,
        start: Mapping[str, Any] | None = None,
        max_pause: float | None = None,
    ) -> None:
        self.growth, self.space, self.evaluators = growth, space, evaluators
        self.gallery, self.plan, self.metric = gallery, plan, metric
        self.concurrency, self.start, self.max_pause = concurrency, start, max_pause

    def extra_repr(self) -> str:
        """Show the growth."""
        return repr(self.growth)

    def evaluate(self, model: Any = None) -> Outcome:
        """Carry out the growth and report its outcome."""
        stopping = Stopping()
        if self.concurrency is not None:
            set_threads(self.concurrency)
            stopping.listen()
        gallery, reporter = Gallery(self.gallery), Reporter()

        def report(phase: str, record: Record) -> None:
            value = {name: number for name, number in record.items() if name != "metric"}
            tags = {**self._tags(), "phase": phase}
            shown = {"default": _shown(phase, record), **value, **tags}
            try:
                reporter.intermediate(shown)
            except Exception as problem:
                raise Orphaned(f"NNI does not answer ({problem}).") from problem

        callbacks = Callbacks(report, should_stop=lambda: stopping.asked)
        outcome = work_on(self.growth, gallery, self._task, self.plan, callbacks, self.max_pause)
        reporter.final(self._final(outcome))
        return outcome

    def _task(self) -> Task:
        task: Task = EvaluatorTask(self.space, _unpacked(self.evaluators), self.metric)
        return task if self.start is None else warm_task(task, self.start)

    def _execute(self, model: Any) -> Outcome:
        """Evaluate without building NNI's network, which is not used."""
        return self.evaluate()

    def _final(self, outcome: Outcome) -> dict[str, Any]:
        numbers = dict(outcome.metrics)
        default = numbers.pop("metric", numbers.get("accuracy", -outcome.error))
        return {
            "default": default,
            **numbers,
            "error": outcome.error,
            "multiply_adds": outcome.multiply_adds,
            "parameters": outcome.parameters,
            **self._tags(),
        }

    def _tags(self) -> dict[str, Any]:
        return {"growth": self.growth.id, "attempt": self.growth.attempt}

    def _dump(self) -> dict[str, Any]:
        """Return the parameters of a trial: plain data except for the space and ``error``."""
        return {
            "growth": self.growth.to_dict(),
            "space": self.space,
            "evaluators": _packed(self.evaluators),
            "gallery": self.gallery,
            "plan": asdict(self.plan),
            "metric": {
                "name": self.metric.name,
                "optimize": self.metric.optimize,
                "error": self.metric.error,
            },
            "concurrency": self.concurrency,
            "start": None if self.start is None else dict(self.start),
            "max_pause": self.max_pause,
        }

    @staticmethod
    def _load(**data: Any) -> GrowthEvaluator:
        return GrowthEvaluator(
            Growth.from_dict(data["growth"]),
            data["space"],
            data["evaluators"],
            data["gallery"],
            GrowthSettings(**data["plan"]),
            Metric(**data["metric"]),
            data["concurrency"],
            data.get("start"),
            data.get("max_pause"),
        )


def _packed(evaluators: Mapping[str, Any] | str) -> str:
    """Serialize evaluators as one string that contains each of them, and its data, once.

    NNI loads the parameters of a trial again at its end, in the strategy's process. A string keeps
    it from loading the data there, and in the trial before the number of threads is set.
    """
    if isinstance(evaluators, str):
        return evaluators
    different: list[Any] = []
    places = {}
    for phase, evaluator in evaluators.items():
        known = [i for i, other in enumerate(different) if other is evaluator]
        places[phase] = known[0] if known else len(different)
        if not known:
            different.append(evaluator)
    limit = int(os.getenv("PICKLE_SIZE_LIMIT", _PICKLE_SIZE))
    return str(nni.dump({"evaluators": different, "phases": places}, pickle_size_limit=limit))


def _unpacked(evaluators: Mapping[str, Any] | str) -> Mapping[str, Any]:
    if not isinstance(evaluators, str):
        return evaluators
    data = nni.load(evaluators)
    return {phase: data["evaluators"][place] for phase, place in data["phases"].items()}


def trained_network(space: Space, gallery: str, id: str) -> torch.nn.Module:
    """Return a model of a gallery with its weights."""
    return load_network(EvaluatorTask(space, {}), Gallery(gallery), id)


def _shown(phase: str, record: Record) -> float:
    """Return the number that NNI's charts show for an epoch."""
    if "metric" in record:
        return record["metric"]
    if "validation_error" in record:
        return 1 - record["validation_error"]
    raise TrainingError(
        f"the {phase} evaluator must report a metric or a validation_error after every epoch but"
        f" reported {', '.join(record) or 'nothing'}."
    )
