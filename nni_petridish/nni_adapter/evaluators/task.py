"""A task that trains with an NNI evaluator, as its user made it.

Weak learning requires nothing of an evaluator. The candidates are modules of the network and train
with it, and the L1 term is added to the gradient of α by a hook.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.core.space import Space
from nni_petridish.errors import ConfigError, Interrupted, TrainingError
from nni_petridish.nni_adapter.compat.patches import lbfgs_of_any_layout, trial_channel
from nni_petridish.nni_adapter.evaluators.lengths import (
    TaskEvaluator,
    current_epoch,
    is_minimized,
    run_evaluator,
    seeded,
    steps_per_epoch,
)
from nni_petridish.nni_adapter.metrics import Listener, to_record
from nni_petridish.registry import ERROR, Measure
from nni_petridish.tasks.checkpoint import fits, load_checkpoint, restore, save_checkpoint
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record

OPTIMIZE = ("auto", "maximize", "percent", "minimize")
PERCENT = "percent"
"""The metric of a model whose evaluator reports accuracies in percent."""


@dataclass(frozen=True)
class Metric:
    """The number of an evaluator's report that the search uses, and its conversion to an error.

    Parameters
    ----------
    name
        Its name, if the evaluator reports several numbers by name.
    optimize
        ``"maximize"``: error = 1 − metric, for accuracies between 0 and 1; ``"percent"``: error =
        1 − metric / 100; ``"minimize"``: the metric is the error; ``"auto"``: reports of NNI's
        Regression are minimized, all others maximized, in percent if the first model reports more
        than 1.
    error
        Function from the metric to the error; replaces ``optimize``.
    """

    name: str = "default"
    optimize: str = "auto"
    error: Callable[[float], float] | None = None

    def __post_init__(self) -> None:
        if self.optimize not in OPTIMIZE:
            raise ConfigError(
                f"optimize must be one of {', '.join(OPTIMIZE)} but got {self.optimize!r}."
            )
        if self.error is not None and not callable(self.error):
            raise ConfigError(f"error must be a function of the metric but got {self.error!r}.")

    def measure(self, evaluator: Any) -> Measure:
        """Return the name and form of the error that the metric of an evaluator becomes."""
        is_share = self.error is None and not self._is_error(evaluator)
        return ERROR if is_share else Measure("error", is_share=False)

    def check(self, value: float, evaluator: Any) -> None:
        """Raise `ConfigError` if no error can be made of a report: the settings are wrong."""
        most = 1 if self.optimize == "maximize" else 100
        if self.error is None and not self._is_error(evaluator) and value > most:
            in_percent = " in percent" if most == 100 else ""
            raise ConfigError(
                f"the metric must be an accuracy{in_percent}, at most {most}, but is {value:g}; set"
                f" optimize to {'percent or ' if most == 1 else ''}minimize, or error to a function"
                " that makes an error of it."
            )

    def to_error(self, record: Record, evaluator: Any) -> Record:
        """Return the error of a final report and, if it is in percent, the note of that."""
        value = record["metric"]
        self.check(value, evaluator)
        if self.error is not None:
            return {"error": float(self.error(value))}
        if self._is_error(evaluator):
            return {"error": value}
        if self.optimize == "percent" or (self.optimize == "auto" and value > 1):
            return {"error": 1 - value / 100, PERCENT: True}
        return {"error": 1 - value}

    def of_children(self, metrics: Mapping[str, Any], evaluator: Any) -> Metric:
        """Return the metric of a growth, given the metrics of its parent and its evaluator.

        The first model decides whether reports are in percent: a network of 1 % must not pass for
        one of 100 %.
        """
        if self.optimize != "auto" or self.error is not None or self._is_error(evaluator):
            return self
        return replace(self, optimize="percent" if metrics.get(PERCENT) else "maximize")

    def _is_error(self, evaluator: Any) -> bool:
        return self.optimize == "minimize" or (self.optimize == "auto" and is_minimized(evaluator))


@dataclass(frozen=True)
class _Trained:
    """The network trained last, its phase, and the record of its last epoch."""

    net: weakref.ref[nn.Module]
    phase: str
    last: Record


@dataclass
class EvaluatorTask:
    """Growing in a space with NNI evaluators.

    After an interruption, finished phases are not repeated, and an unfinished one starts again. A
    `TaskEvaluator`, such as `RecipeEvaluator`, continues from its last epoch.

    Parameters
    ----------
    space
        The space of the networks.
    evaluators
        The evaluator of each phase: ``seed``, ``weak``, ``final``.
    metric
        The metric of the search among their reports.
    """

    space: Space
    evaluators: Mapping[str, Any]
    metric: Metric = field(default_factory=Metric)
    _trained: _Trained | None = None

    @property
    def measure(self) -> Measure:
        """Name and form of the error of a trained network."""
        evaluator = self.evaluators["final"]
        if isinstance(evaluator, TaskEvaluator):
            return evaluator.task(self.space).measure
        return self.metric.measure(evaluator)

    def seed(self) -> Genotype:
        """Return the space's simplest member."""
        return self.space.seed()

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network with fresh weights."""
        return self.space.build(genotype)

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        """Train with the evaluator of the phase."""
        evaluator = self.evaluators[phase.name]
        if isinstance(evaluator, TaskEvaluator):
            records = evaluator.task(self.space).train(net, phase, callbacks)
        elif phase.hold_epochs:
            raise ConfigError("anneal must be 0 with an evaluator, which has its own schedule.")
        elif phase.lr_factor != 1:
            raise ConfigError(
                "lr_after_growth must be 1 with an evaluator, which has its own learning rate."
            )
        else:
            records = self._train_once(evaluator, net, phase, callbacks)
        self._trained = _Trained(weakref.ref(net), phase.name, records[-1])
        return records

    def steps(self, epochs: int) -> int:
        """Return the number of steps of weak learning in a number of epochs."""
        evaluator = self.evaluators["weak"]
        if isinstance(evaluator, TaskEvaluator):
            return evaluator.task(self.space).steps(epochs)
        steps = steps_per_epoch(evaluator)
        if steps is None:
            raise ConfigError(
                "l1_schedule must be constant, and weak_halving and eta_fade 0, with an evaluator"
                f" whose steps cannot be counted: {evaluator!r}."
            )
        return epochs * steps

    def evaluate(self, net: nn.Module) -> Record:
        """Return the metric reported at the end of the last training, and its error."""
        trained = self._trained
        if trained is None or trained.net() is not net:
            raise TrainingError("an evaluator measures a network when it trains it, not later.")
        evaluator = self.evaluators[trained.phase]
        if isinstance(evaluator, TaskEvaluator):
            task = evaluator.task(self.space)
            return task.evaluate(net)
        record = {name: value for name, value in trained.last.items() if name != "epoch"}
        return {**self.metric.to_error(record, evaluator), **record}

    def validation_losses(self, net: nn.Module) -> Iterable[Tensor]:
        """Return the losses of the weak phase's task; none with other evaluators."""
        evaluator = self.evaluators["weak"]
        if not isinstance(evaluator, TaskEvaluator):
            return ()
        return evaluator.task(self.space).validation_losses(net)

    def data_facts(self) -> dict[str, Any]:
        """Return the facts of the last phase's task; none with other evaluators."""
        evaluator = self.evaluators["final"]
        if not isinstance(evaluator, TaskEvaluator):
            return {}
        return evaluator.task(self.space).data_facts()

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds of one example, parameters)."""
        return self.space.size(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return inputs of a network for one example."""
        return self.space.example(net)

    def _train_once(
        self, evaluator: Any, net: nn.Module, phase: Phase, callbacks: Callbacks
    ) -> list[Record]:
        """Run the evaluator, unless the checkpoint has a finished phase."""
        folder, facts = phase.checkpoint, {"seed": phase.random_seed, "epochs": phase.epochs}
        restored = None if folder is None else _restored(net, folder, facts)
        if restored is not None:
            return restored
        records = self._run(evaluator, net, phase, callbacks)
        if folder is not None:
            save_checkpoint(folder, net, _no_optimizer(net), facts | {"records": records})
        return records

    def _run(
        self, evaluator: Any, net: nn.Module, phase: Phase, callbacks: Callbacks
    ) -> list[Record]:
        records: list[Record] = []

        def on_intermediate(value: Any) -> None:
            record = to_record(value, self.metric.name)
            self.metric.check(record["metric"], evaluator)  # before more is trained in vain
            record["epoch"] = current_epoch(evaluator) or len(records) + 1
            records.append(record)
            callbacks.on_epoch(phase.name, dict(record))
            if callbacks.should_stop():
                raise Interrupted(f"{phase.label} was stopped at epoch {record['epoch']:g}.")

        listener = Listener(on_intermediate)
        net.train()
        with trial_channel(listener), seeded(phase.random_seed), lbfgs_of_any_layout():
            trained = run_evaluator(evaluator, net, phase.epochs)
        if listener.last is None:
            raise TrainingError(
                f"the evaluator must report a metric to NNI but {phase.label} ended without any."
            )
        last = to_record(listener.last, self.metric.name)
        return _one_per_epoch(records, trained, last)


def _one_per_epoch(records: list[Record], trained: int, last: Record) -> list[Record]:
    """Return one record for each epoch, the last of them with the final result."""
    by_epoch = {int(record["epoch"]): record for record in records}
    count = trained or max([1, *by_epoch])
    listed: list[Record] = [by_epoch.get(epoch, {"epoch": epoch}) for epoch in range(1, count + 1)]
    listed[-1] = {**listed[-1], **last}
    return listed


def _restored(net: nn.Module, folder: Path, facts: dict[str, Any]) -> list[Record] | None:
    """Restore a finished phase; return its records, None if there is no such phase."""
    found = load_checkpoint(folder)
    if found is None:
        return None
    tensors, remembered = found
    records: list[Record] = remembered.pop("records", [])
    if remembered != facts or not records or not fits(tensors, net, _no_optimizer(net)):
        return None
    restore(tensors, net, _no_optimizer(net))
    return records


def _no_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer without state, since that of the evaluator ends with its phase."""
    return torch.optim.SGD(net.parameters(), lr=0.0)
