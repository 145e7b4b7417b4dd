"""The compared methods: each spends a budget and returns its best network within the limit."""

from __future__ import annotations

import importlib
import math
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from nni_petridish.errors import SearchError, TrainingError, needing
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.saved_model import SavedModel, from_gallery, read_model, write_model
from nni_petridish.gallery.select import require_most_accurate
from nni_petridish.results.retrain.preparation import prepare_retraining
from nni_petridish.running.config import SearchConfig
from nni_petridish.running.cost import step_seconds
from nni_petridish.running.growth import load_network
from nni_petridish.running.runner import run_search
from nni_petridish.running.worker_report import EPOCH, reporting
from nni_petridish.search.records import growth_id
from nni_petridish.search.search import Search
from nni_petridish.studies.comparison.section import (
    DARTS,
    GROWTH,
    NNI_STRATEGIES,
    TRAIN_ON,
    WIDEN,
)
from nni_petridish.studies.comparison.settings import GALLERY, CompareRun
from nni_petridish.studies.comparison.trace import Spent, Trace, TracedTask
from nni_petridish.tasks.task import Callbacks, Phase, Progress, Record

if TYPE_CHECKING:
    from torch import nn

    from nni_petridish.core.genotype import Genotype

_TIMED_STEPS = 150
"""Steps that are timed, an epoch at most: enough that a short disturbance moves no median."""
_BEST = "best.safetensors"
_SUPERNET = "supernet"
_SEED_MODEL = growth_id(0)
_COMPUTE = ("max_models", "max_epochs", "max_seconds")
"""Limits that the budget replaces, unless a method sets them itself."""


@dataclass(frozen=True)
class Assignment:
    """The task of a method.

    Parameters
    ----------
    run
        The run.
    task
        The task; whatever it trains is recorded.
    trace
        The trace of the run.
    reference
        The result of the run that sets the budget; None if this is the one.
    stop
        Asked before every training step.
    clock
        The clock of compute.
    """

    run: CompareRun
    task: TracedTask
    trace: Trace
    reference: dict[str, Any] | None
    stop: Callable[[], bool]
    clock: Callable[[], float]

    @property
    def budget(self) -> float | None:
        """The compute to spend; None if the settings of the search decide."""
        if self.reference is None:
            return None
        spent = Spent(self.reference["seconds"], self.reference["operations"])
        return self.run.method.share * spent.of(self.run.budget)

    @property
    def limit(self) -> float:
        """The largest number of multiply-adds of the model that counts."""
        return math.inf if self.run.limit is None else self.run.limit

    def has_room(self) -> bool:
        """Return whether another model may begin."""
        return self.budget is None or self.trace.has_room(self.budget)

    def left(self) -> float:
        """Return the compute that is left, in units of the budget."""
        assert self.budget is not None
        return self.budget - self.trace.spent().of(self.run.budget)

    def described_space(self, task: TracedTask) -> dict[str, Any]:
        """Return the space of a task, for a `SavedModel`."""
        return {"space": self.run.config.space["space"], **task.task.space.describe()}

    def reporting(
        self,
        name: str,
        phase: Phase,
        on_epoch: Callable[[str, Record], object] = lambda phase, record: None,
        unit: str = EPOCH,
    ) -> AbstractContextManager[Callbacks]:
        """Report on a training in the folder of the run; see `worker_report.reporting`."""
        callbacks = Callbacks(on_epoch, self.stop)
        return reporting(self.run.folder, name, {phase.name: phase.epochs}, callbacks, unit)

    def save(self, task: TracedTask, net: nn.Module, genotype: Genotype, **facts: Any) -> None:
        """Keep a network as the best one so far."""
        multiply_adds, parameters = task.size(net)
        size = {"multiply_adds": multiply_adds, "parameters": parameters}
        known = {**task.data_facts(), **facts, **size}
        model = SavedModel(self.described_space(task), genotype, net.state_dict(), known)
        write_model(model, self.run.folder / _BEST)

    def best(self) -> SavedModel:
        """Return the best network so far."""
        path = self.run.folder / _BEST
        if not path.exists():
            raise SearchError(f"{self.run.name} found no model within the multiply-add limit.")
        return read_model(path)


def grow(given: Assignment) -> SavedModel | None:
    """Search with Petridish; the score and all other settings are those of the configuration."""
    config = given.run.config
    if given.budget is not None:
        own = given.run.method.set
        lifted: dict[str, Any] = {
            n: None for n in _COMPUTE if f"limits.{n}" not in own and "limits" not in own
        }
        limits = replace(config.settings.limits, **lifted)
        config = replace(config, settings=replace(config.settings, limits=limits))

    def note(search: Search) -> None:
        known = {model["id"] for model in given.trace.models}
        for record in search.models():
            if record.id not in known:
                error = record.error if math.isfinite(record.error) else None
                size = record.multiply_adds
                given.trace.find(record.id, error, size, parameters=record.parameters)

    search = run_search(
        config,
        resume=True,
        callbacks=Callbacks(should_stop=given.stop),
        on_change=note,
        make_task=lambda: given.task,
        proceed=given.has_room,
    )
    if given.stop():
        return None
    best = require_most_accurate(search, given.run.limit, given.run.name)
    return from_gallery(config.gallery, best.id)


def train_on(given: Assignment) -> SavedModel:
    """Train the seed model of the reference run on, for all compute that is left after it."""
    assert given.reference is not None
    assert given.run.reference is not None
    seed = given.reference["models"][0]
    trace = given.trace
    if not trace.models:
        trace.spend("seed", seed["operations"], seed["seconds"])
        trace.find(seed["id"], seed["error"], seed["multiply_adds"])
    net = load_network(given.task, Gallery(given.run.reference.folder / GALLERY), _SEED_MODEL)
    _train_for_all(given, given.task, net)
    return given.best()


def widen(given: Assignment) -> SavedModel:
    """Train the seed with as many filters as the reference's best model allows, from scratch."""
    assert given.reference is not None
    assert given.run.reference is not None
    gallery = given.run.reference.folder / GALLERY
    own = given.task.task.space.describe()
    training = prepare_retraining(
        gallery,
        _SEED_MODEL,
        cells_per_stage=own["cells_per_stage"],
        max_multiply_adds=given.reference["best"]["multiply_adds"],
        epochs=1,
    )
    config: SearchConfig = given.run.config
    wider = replace(config, space={**config.space, **training.widths})
    task = TracedTask(wider.load_task(), given.trace)  # type: ignore[arg-type]
    torch.manual_seed(given.run.seed)
    net = task.build(task.seed())
    _train_for_all(given, task, net)
    return given.best()


def _train_for_all(given: Assignment, task: TracedTask, net: nn.Module) -> None:
    """Train one network for all compute that is left, and save it."""
    trace, genotype = given.trace, task.seed()
    if "epochs" not in trace.facts:
        trace.spend("building", 0)
        left, cost = given.left(), _epoch_cost(given, task)
        trace.skip()  # measuring plans the training and is no part of it
        trace.remember(epochs=max(1, round(left / cost)))
    multiply_adds, parameters = task.size(net)
    known = sum("epoch" in model for model in trace.models)

    def on_epoch(name: str, record: Record) -> None:
        epoch = int(record["epoch"])
        if epoch > known:
            error, facts = record["validation_error"], {"parameters": parameters, "epoch": epoch}
            trace.find(f"epoch {epoch}", error, multiply_adds, **facts)

    folder = given.run.folder / "checkpoint"
    phase = Phase("final", trace.facts["epochs"], given.run.seed, given.run.name, folder)
    with given.reporting("training", phase, on_epoch) as told:
        task.train(net, phase, told)
    error = task.evaluate(net)["error"]
    given.save(task, net, genotype, id=f"epoch {phase.epochs}", error=error)


def _epoch_cost(given: Assignment, task: TracedTask) -> float:
    """Return the compute of an epoch, measured on a network of its own."""
    net = task.build(task.seed())
    if given.run.budget != "processor_time":
        return float(task.task.operations(net, 1))
    steps = task.steps(1)
    step = step_seconds(task.task, net, "seed", min(steps, _TIMED_STEPS), given.clock)
    began = given.clock()
    task.evaluate(net)
    return steps * step + given.clock() - began


def sample(given: Assignment) -> SavedModel:
    """Search with a strategy of NNI that trains one architecture after the other from scratch."""
    from nni_petridish.nni_adapter.sampling import search_with_strategy

    untrained = 1.0 if given.task.measure.is_share else 1e6
    # The models of an earlier run are told to the strategy again, in the same order.
    told = list(given.trace.models)

    def evaluate(genotype: Genotype) -> float:
        known = told.pop(0)["error"] if told else _try(given, given.task, genotype)
        return -untrained if known is None else -float(known)

    search_with_strategy(
        NNI_STRATEGIES[given.run.method.kind],
        given.task.task.space,
        evaluate,
        lambda: bool(told) or given.has_room(),
        seed=given.run.seed,
        max_shortcuts=given.run.config.settings.i_max,
        options=given.run.method.options,
    )
    return given.best()


def _try(given: Assignment, task: TracedTask, genotype: Genotype) -> float | None:
    """Train an architecture from scratch; return its error, None if it does not count."""
    index = len(given.trace.models)
    seed = given.run.seed * 1009 + index
    torch.manual_seed(seed)
    net = task.build(genotype)
    multiply_adds, parameters = task.size(net)
    error: float | None = None
    if multiply_adds <= given.limit:
        folder, epochs = given.run.folder / f"trial-{index}", given.run.config.plan.seed_epochs
        phase = Phase("seed", epochs, seed, f"{given.run.name} {index}", folder)
        try:
            with given.reporting(f"trial {index}", phase) as told:
                task.train(net, phase, told)
            error = task.evaluate(net)["error"]
        except TrainingError:
            error = None  # what it cost counts
    errors = [model["error"] for model in given.trace.models if model["error"] is not None]
    if error is not None and error < min(errors, default=math.inf):
        given.save(task, net, genotype, id=f"trial {index}", error=error)
    given.trace.find(f"trial {index}", error, multiply_adds, parameters=parameters)
    shutil.rmtree(given.run.folder / f"trial-{index}", ignore_errors=True)
    return error


def darts(given: Assignment) -> SavedModel:
    """Search with NNI's DARTS, then train the architecture that it exports."""
    from nni_petridish.nni_adapter.darts import search_with_darts

    if not given.trace.models:
        given.trace.restart()
        with given.reporting("training", Phase(_SUPERNET, 100), unit="percent") as told:
            found = search_with_darts(
                given.task.task,
                share=lambda: _share(given, told),
                on_epoch=lambda operations: given.trace.spend(_SUPERNET, operations),
                stop=given.stop,
                seed=given.run.seed,
                options=given.run.method.options,
            )
        _try(given, *_within_limit(given, found))
    return given.best()


def _share(given: Assignment, told: Callbacks) -> float:
    """Return how much of the supernet's budget is spent: the training after it needs the rest."""
    share = _spent_share(given)
    if told.on_progress is not None:
        told.on_progress(_SUPERNET, Progress(100, min(100.0, 100 * share), ""))
    return share


def _spent_share(given: Assignment) -> float:
    assert given.reference is not None
    assert given.budget is not None
    seed = given.reference["models"][0]
    size = given.reference["best"]["multiply_adds"] / seed["multiply_adds"]
    training = size * Spent(seed["seconds"], seed["operations"]).of(given.run.budget)
    room = max(given.budget - training, given.budget / 2)
    return given.trace.spent().of(given.run.budget) / room


def _within_limit(given: Assignment, genotype: Genotype) -> tuple[TracedTask, Genotype]:
    """Return the task to train an architecture in: with fewer filters if it is too large."""
    net = given.task.build(genotype)
    multiply_adds, parameters = given.task.size(net)
    if multiply_adds <= given.limit:
        return given.task, genotype
    from nni_petridish.registry import kind_of

    facts = {"id": "darts", "multiply_adds": multiply_adds, "parameters": parameters}
    model = SavedModel(given.described_space(given.task), genotype, {}, facts)
    config = given.run.config
    options = {
        "cells_per_stage": model.space["cells_per_stage"],
        "max_multiply_adds": given.limit,
        "epochs": 1,
    }
    kind = kind_of(config.space)
    training = kind.make_retraining(model, (config.data, config.recipe), options, {})
    narrow = replace(config, space={**config.space, **training.widths})
    return TracedTask(narrow.load_task(), given.trace), genotype  # type: ignore[arg-type]


Method = Callable[[Assignment], SavedModel | None]
_IMPORTED = {
    **dict.fromkeys(NNI_STRATEGIES, "nni_petridish.nni_adapter.sampling"),
    DARTS: "nni_petridish.nni_adapter.darts",
}
"""Modules whose imports take seconds, by the kind of the method that needs them."""


def method_of(kind: str) -> Method:
    """Return a method by its kind; whatever it needs is imported."""
    if kind in _IMPORTED:
        with needing("nni", f"the method {kind}"):
            importlib.import_module(_IMPORTED[kind])
    return METHODS[kind]


METHODS: dict[str, Method] = {
    GROWTH: grow,
    TRAIN_ON: train_on,
    WIDEN: widen,
    **dict.fromkeys(NNI_STRATEGIES, sample),
    DARTS: darts,
}
"""The methods by their kinds; None is returned by a method that was stopped."""
