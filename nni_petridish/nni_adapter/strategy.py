"""Petridish as an NNI strategy: ``NasExperiment(space, evaluator, Petridish(...))``.

The strategy only passes messages. The `Coordinator` decides on the next growth, `work_on` carries
it out in a trial, and the gallery keeps all results. NNI's own checkpoint adds nothing to them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nni.common.serializer import SerializableObject

from nni_petridish.core.selection import architecture
from nni_petridish.errors import ConfigError, SearchError, StorageError
from nni_petridish.nni_adapter.compat.nas import ModelStatus, SimplifiedModelSpace, Strategy
from nni_petridish.nni_adapter.compat.patches import (
    run_in_process_by_default,
    skip_commands_for_tuners,
)
from nni_petridish.nni_adapter.engine import (
    RunningTrials,
    engine_concurrency,
    engine_machines,
    is_over,
    is_sequential,
)
from nni_petridish.nni_adapter.evaluators.growth import GrowthEvaluator, trained_network
from nni_petridish.nni_adapter.evaluators.task import PERCENT, Metric
from nni_petridish.nni_adapter.prepared_search import PreparedSearch, StrategySettings
from nni_petridish.running.coordinator import Coordinator
from nni_petridish.running.patience import outlast
from nni_petridish.running.process import per_machine
from nni_petridish.running.worker import HeartbeatWatch, describe_failure
from nni_petridish.search.ranges import RANGED
from nni_petridish.search.records import Done, Growth, ModelRecord
from nni_petridish.search.search import Chooser, Search
from nni_petridish.search.settings import Limits

__all__ = ["Petridish"]

_log = logging.getLogger("nni.petridish")  # NNI prints and keeps what is logged below its name
_POLL_SECONDS = 1.0


def _never() -> bool:
    """Return that nobody asks to stop: NNI interrupts its strategies by an exception."""
    return False


class Petridish(Strategy):
    """Forward search by growing, for `nni.nas.experiment.NasExperiment`.

    It searches the spaces of this package, those of ``nni.nas.hub``, and a user's own spaces of
    NNI's cells and choices. An experiment without a configuration runs in this process.

    Parameters
    ----------
    gallery
        Folder of the models, their weights and the journal, shared with the trials. A gallery that
        holds an earlier part of the same search is continued.
    l1, i_max
        λ and I_max: numbers, or ranges such as ``{"low": 1e-5, "high": 0.1}``. With a range, Optuna
        chooses a value for every growth, see `OptunaChooser`. The defaults are those of the kind of
        space: 0.001 and 3, or 0.01 and 1 for recurrent cells.
    seed
        Random seed of the search.
    seeds
        Number of seed models.
    tolerance
        Relative width of the band above the hull whose models may be parents too.
    max_models, max_growths, max_multiply_adds, max_parameters, max_latency, max_epochs, max_seconds
        Limits of the search, see `Limits`. The limits of the experiment apply as well.
    oversize
        ``"train"`` or ``"skip"`` children beyond the limits of size, see `Limits`.
    max_failures, max_pause
        Further limits: growths that fail in a row, and seconds to wait for a disk that is full.
    retry_failed
        Whether to try the growths of a gallery again that were given up.
    seed_epochs, weak_epochs, final_epochs
        Epochs of a seed model, of weak learning, and after finalizing. The default is the number of
        epochs of the evaluator.
    seed_evaluator, weak_evaluator, final_evaluator
        An evaluator for one phase, in place of the experiment's.
    l1_schedule, weak_learning, score
        Variants of weak learning and of the selection, see `GrowthSettings`.
    complexity
        What the hull is made of beside the error, see `SearchSettings`.
    metric, optimize, error
        The reported number that the search uses and its conversion to an error, see `Metric`. By
        default, error = 1 − the reported accuracy, also if that is in percent; reports of NNI's
        Regression are minimized.
    chooser
        Chooses λ and I_max of each growth in place of `l1` and `i_max`, which must be numbers.
    start, start_model
        For spaces of this package: a gallery or an exported file, and the id of a model in it (by
        default the most accurate), to start from in place of the seed. See
        ``docs/guide/models.md``.
    allow_changed_evaluator
        Whether to continue a gallery whose models were trained with another evaluator, learning
        rate, batch size or other data. By default it is refused, as far as that can be seen.
    fixed
        For spaces of NNI's cells and choices: a sample, or a part of one, that does not grow. The
        rest starts from its simplest values. See ``docs/guide/drop-in.md``.
    settled
        The former name of `fixed`.

    Examples
    --------
    ::

        space = VisionSpace((1, 8, 8), num_classes=10).model_space()
        strategy = Petridish("gallery", max_models=10, weak_epochs=2)
        experiment = NasExperiment(space, evaluator, strategy)
        experiment.run()
        experiment.export_top_models(formatter="instance")  # trained networks
    """

    def __init__(
        self,
        gallery: str | os.PathLike[str],
        *,
        l1: float | Mapping[str, float] | None = None,
        i_max: int | Mapping[str, int] | None = None,
        seed: int = 0,
        seeds: int = 1,
        tolerance: float = 0.0,
        max_models: int | None = None,
        max_growths: int | None = None,
        max_multiply_adds: float | None = None,
        max_parameters: float | None = None,
        max_latency: float | None = None,
        oversize: str = "train",
        max_epochs: int | None = None,
        max_seconds: float | None = None,
        max_failures: int | None = 5,
        max_pause: float | None = 86_400.0,
        retry_failed: bool = False,
        seed_epochs: int | None = None,
        weak_epochs: int | None = None,
        final_epochs: int | None = None,
        seed_evaluator: Any = None,
        weak_evaluator: Any = None,
        final_evaluator: Any = None,
        l1_schedule: str = "constant",
        weak_learning: str = "isolated",
        score: str = "alpha",
        complexity: str = "multiply_adds",
        metric: str = "default",
        optimize: str = "auto",
        error: Callable[[float], float] | None = None,
        chooser: Chooser | None = None,
        start: str | os.PathLike[str] | None = None,
        start_model: str | None = None,
        allow_changed_evaluator: bool = False,
        fixed: Mapping[str, Any] | None = None,
        settled: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(gallery, str | os.PathLike):
            raise ConfigError(f"gallery must be a folder but got {gallery!r}.")
        if settled is not None:
            if fixed is not None:
                raise ConfigError("settled must not be given with fixed, its new name.")
            warnings.warn("settled is called fixed now.", DeprecationWarning, stacklevel=2)
            fixed = settled
        search = {"seed": seed, "seeds": seeds, "tolerance": tolerance, "l1": l1, "i_max": i_max}
        # Trials may have another working directory, so paths are absolute.
        self.folder = Path(gallery).expanduser().absolute()
        self._settings = StrategySettings(
            folder=self.folder,
            # The kind of the space, which is known only later, decides what is not given.
            search={name: value for name, value in search.items() if value is not None},
            limits=Limits(
                max_models=max_models,
                max_growths=max_growths,
                max_multiply_adds=max_multiply_adds,
                max_parameters=max_parameters,
                max_latency=max_latency,
                oversize=oversize,
                max_epochs=max_epochs,
                max_seconds=max_seconds,
                max_failures=max_failures,
                max_pause=max_pause,
            ),
            variants={
                "l1_schedule": l1_schedule,
                "weak_learning": weak_learning,
                "score": score,
                "complexity": complexity,
            },
            epochs={"seed": seed_epochs, "weak": weak_epochs, "final": final_epochs},
            evaluators={"seed": seed_evaluator, "weak": weak_evaluator, "final": final_evaluator},
            metric=Metric(metric, optimize, error),
            chooser=chooser,
            fixed=fixed,
            start=None if start is None else Path(start).expanduser().absolute(),
            start_model=start_model,
            allow_changed_evaluator=allow_changed_evaluator,
        )
        self._retry_failed = retry_failed
        self._prepared: PreparedSearch | None = None
        skip_commands_for_tuners()
        run_in_process_by_default(Petridish)

    def extra_repr(self) -> str:
        """Show the gallery, and λ and I_max as given."""
        search = self._settings.search
        given = [f"{name}={search[name]}" for name in RANGED if name in search]
        return ", ".join([repr(str(self.folder)), *given])

    # Results.

    def models(self) -> list[ModelRecord]:
        """Return all finished models of the gallery, the oldest first."""
        return self._replayed().models()

    def hull(self) -> list[ModelRecord]:
        """Return the models on the hull, from the cheapest to the most accurate."""
        return self._replayed().hull()

    def list_models(self, sort: bool = True, limit: int | None = None) -> Iterator[Any]:
        """List the models of the gallery, including those of earlier runs.

        Parameters
        ----------
        sort
            Whether to sort by error and leave out models without one, and all but the best of those
            with the same architecture; otherwise the oldest model is first.
        limit
            Largest number of models.

        Returns
        -------
        Iterator
            NNI's model objects: ``sample`` is the genotype, and ``executable_model()`` loads the
            network with its trained weights.
        """
        models = self.models()
        if sort:
            models = [model for model in models if model.error == model.error]
            models.sort(key=lambda model: (model.error, model.multiply_adds))
            models = self._distinct(models)
            if limit is not None and limit > len(models):
                _log.warning("%d models were asked for but there are %d.", limit, len(models))
        yield from map(self._nni_model, models[:limit])

    def state_dict(self) -> dict[str, Any]:
        """Return the folder of the gallery, which has the whole state."""
        return {"gallery": str(self.folder)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the gallery is the same; the state is read from it."""
        if state_dict["gallery"] != str(self.folder):
            raise ConfigError(
                f"gallery must be that of the resumed experiment, {state_dict['gallery']!r}, but"
                f" got {str(self.folder)!r}."
            )

    # Implementation.

    def _initialize(self, model_space: Any, engine: Any) -> Any:
        self._prepared = PreparedSearch(self._settings, model_space)
        return model_space

    def _run(self) -> None:
        prepared = self._prepared_search()
        trials = RunningTrials(self.engine)
        try:
            with Coordinator(prepared.gallery, prepared.settings, prepared.chooser) as coordinator:
                adopted = trials.adopt(coordinator.search.running())
                for growth in coordinator.search.running():
                    if growth.id not in adopted:
                        coordinator.release(growth.id)
                if self._retry_failed:
                    coordinator.retry_failed()
                reason = self._search_on(coordinator, trials)
                _log.info("The search is done: %s.", reason)
                for id, why in coordinator.search.dropped().items():
                    _log.warning("%s was given up: %s", id, why)
                if coordinator.search.refused():
                    raise SearchError(f"the search stopped: {reason}.")
                if coordinator.search.gave_up():
                    raise SearchError(f"the search gave up: {reason}.")
                if not coordinator.search.models():
                    raise SearchError(f"the search ended without a model: {reason}.")
        finally:
            trials.close()

    def _search_on(self, coordinator: Coordinator, trials: RunningTrials) -> str:
        """Hand out growths until the search is done; return the reason of its end."""
        watch = HeartbeatWatch(coordinator.gallery)
        max_pause = coordinator.search.settings.limits.max_pause
        for growth in coordinator.search.running():
            watch.forget(growth)  # adopted: a worker that was killed has left its heartbeat
        while True:
            for id in outlast(coordinator.sync, _never, max_pause):
                _log.info("%s is in the gallery.", id)
                self._tell_percent(coordinator.search, id)
            for growth in trials.without_trial(coordinator.search.running()):
                watch.suspect(growth)
            for growth in outlast(lambda: watch.give_back(coordinator), _never, max_pause):
                _log.warning("%s has lost its worker.", growth.id)
            if not self.engine.budget_available():  # raises if NNI's manager is gone
                if not trials.count or is_over(self.engine):
                    return "the experiment's budget is used up"
            elif trials.has_room():
                answer = outlast(coordinator.ask, _never, max_pause)
                if isinstance(answer, Done):
                    return answer.reason
                if isinstance(answer, Growth):
                    self._submit(answer, trials)
                    continue
            trials.wait(_POLL_SECONDS)

    def _tell_percent(self, search: Search, id: str) -> None:
        """Warn if reports are taken as percent though nothing says that they are."""
        record = next(model for model in search.models() if model.id == id)
        is_guess = self._settings.metric.optimize == "auto" and record.parent is None
        if is_guess and record.outcome.metrics.get(PERCENT):
            _log.warning(
                "%s reports %g, which is taken as an accuracy in percent; set optimize to"
                " percent, or to minimize if it is not.",
                *(id, record.outcome.metrics["metric"]),
            )

    def _submit(self, growth: Growth, trials: RunningTrials) -> None:
        prepared = self._prepared_search()
        model = self.model_space.freeze(prepared.sample(growth.parent))
        model.evaluator = GrowthEvaluator(
            growth,
            prepared.space,
            prepared.evaluators,
            str(self.folder),
            prepared.plan,
            self._metric_of(growth),
            self._at_once(growth),
            prepared.start,
            self._settings.limits.max_pause,
        )
        trials.add(growth, model)
        try:
            self.engine.submit_models(model)
        except Exception as error:
            if not is_sequential(self.engine) or isinstance(error, StorageError):
                raise
            _log.warning("%s failed: %s", growth.id, describe_failure(error))

    def _metric_of(self, growth: Growth) -> Metric:
        if growth.parent is None:
            return self._settings.metric
        prepared = self._prepared_search()
        outcome = prepared.gallery.load_documents(growth.parent)["metrics"]
        return self._settings.metric.of_children(outcome["metrics"], prepared.evaluators["final"])

    def _at_once(self, growth: Growth) -> int | None:
        """Return the number of growths that share a machine; None in the user's process."""
        concurrency = engine_concurrency(self.engine)
        if concurrency is None:
            return None
        seeds = self._prepared_search().settings.seeds
        is_seed = growth.parent is None
        return per_machine(is_seed, seeds, concurrency, engine_machines(self.engine))

    def _nni_model(self, record: ModelRecord) -> Any:
        prepared = self._prepared_search()
        weights = SerializableObject(
            trained_network,
            [],
            {"space": prepared.space, "gallery": str(self.folder), "id": record.id},
        )
        model = SimplifiedModelSpace(weights, {}, self.model_space.evaluator)
        model.sample = prepared.sample(record.id)
        model.status = ModelStatus.Trained
        metrics = record.outcome.metrics
        model.metrics.final = metrics.get("metric", metrics.get("accuracy"))
        return model

    def _distinct(self, models: list[ModelRecord]) -> list[ModelRecord]:
        """Return the first model of every architecture."""
        prepared = self._prepared_search()
        first: dict[object, ModelRecord] = {}
        for model in models:
            first.setdefault(architecture(prepared.genotype(model.id)), model)
        return list(first.values())

    def _replayed(self) -> Search:
        prepared = self._prepared_search()
        return Search.replay(prepared.settings, prepared.gallery.journal.read_all())

    def _prepared_search(self) -> PreparedSearch:
        if self._prepared is None:
            raise SearchError("the strategy has no space yet: run its experiment first.")
        return self._prepared
