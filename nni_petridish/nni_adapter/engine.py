"""Trials on NNI's execution engines."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from typing import Any

from nni_petridish.nni_adapter.compat.nas import (
    FinalMetricEvent,
    ModelEvent,
    ModelEventType,
    SequentialExecutionEngine,
    TrainingEndEvent,
)
from nni_petridish.search.records import Growth

# NNI's manager runs trials of these states again when an experiment is resumed.
_UNFINISHED = ("WAITING", "RUNNING", "ADD_RESUMED")


class RunningTrials:
    """The submitted trials and the events that NNI reports about them.

    NNI swaps the parameters of trials that start at the same time, so it may report the end of a
    trial for the wrong growth. The outcome of a growth is therefore read from the gallery. This
    class only counts how many growths have lost their trials, and guesses which.

    Parameters
    ----------
    engine
        NNI's execution engine, the source of the events.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # The engine's listener thread puts, the strategy's thread takes.
        self._events: queue.SimpleQueue[ModelEvent] = queue.SimpleQueue()
        # The engine keeps weak references only and reports nothing about models that are gone. A
        # growth that was released and handed out again has an entry for each of its trials.
        self._submitted: list[tuple[Growth, Any]] = []
        self._ended: list[Growth] = []
        self._reported: set[str] = set()
        self._adopted: dict[str, Growth] = {}
        for kind in (ModelEventType.FinalMetric, ModelEventType.TrainingEnd):
            engine.register_model_event_callback(kind, self._events.put)

    def close(self) -> None:
        """Unregister from the engine's events."""
        for kind in (ModelEventType.FinalMetric, ModelEventType.TrainingEnd):
            self._engine.unregister_model_event_callback(kind, self._events.put)

    @property
    def count(self) -> int:
        """Number of trials that have not ended."""
        return len(self._submitted) - len(self._ended)

    def adopt(self, running: Iterable[Growth]) -> set[str]:
        """Find the trials of an earlier run that NNI's manager runs again after a resume.

        Parameters
        ----------
        running
            The growths that were under way.

        Returns
        -------
        set of str
            Ids of the growths that have a trial.
        """
        known = {(growth.id, growth.attempt): growth for growth in running}
        for trial, growth in _unfinished_trials(self._engine).items():
            ours = known.get((growth.id, growth.attempt))
            if ours is not None:
                self._adopted[trial] = ours
                self._submitted.append((ours, None))
        return {growth.id for growth in self._adopted.values()}

    def has_room(self) -> bool:
        """Return whether another trial can start; the engine does not count adopted trials."""
        if not self._engine.idle_worker_available():
            return False
        return not self._adopted or self.count < (engine_concurrency(self._engine) or 1)

    def add(self, growth: Growth, model: Any) -> None:
        """Record that a growth is submitted as a model."""
        self._submitted.append((growth, model))

    def wait(self, seconds: float) -> None:
        """Wait for an event, at most the given time, and process all that have arrived."""
        self._check_adopted()
        try:
            self._process(self._events.get(timeout=seconds))
            while True:
                self._process(self._events.get_nowait())
        except queue.Empty:
            return

    def without_trial(self, running: Iterable[Growth]) -> list[Growth]:
        """Return the running growths that most likely have lost their trials.

        Parameters
        ----------
        running
            The growths that are under way.

        Returns
        -------
        list of Growth
            As many growths as trials are missing. Those whose own trials are all said to have ended
            come first.
        """
        submitted = [growth for growth, _ in self._submitted]
        unresolved = [g for g in running if g in submitted and g.id not in self._reported]
        missing = len(unresolved) - self.count
        unresolved.sort(key=lambda g: self._ended.count(g) < submitted.count(g))
        return unresolved[: max(0, missing)]

    def _process(self, event: ModelEvent) -> None:
        growth = next((g for g, model in self._submitted if model is event.model), None)
        if isinstance(event, FinalMetricEvent) and isinstance(event.metric, dict):
            self._reported.add(str(event.metric.get("growth")))
        elif isinstance(event, TrainingEndEvent) and growth is not None:
            self._ended.append(growth)

    def _check_adopted(self) -> None:
        # The engine reports nothing about trials that it did not submit.
        if self._adopted:
            unfinished = _unfinished_trials(self._engine)
            for trial in [trial for trial in self._adopted if trial not in unfinished]:
                self._ended.append(self._adopted.pop(trial))


def is_sequential(engine: Any) -> bool:
    """Return whether models run in this process, one after the other."""
    return isinstance(engine, SequentialExecutionEngine)


def engine_concurrency(engine: Any) -> int | None:
    """Return the number of trials that run at a time; None if they run in this process."""
    if is_sequential(engine):
        return None
    return int(engine.nodejs_binding.config.canonical_copy().trial_concurrency)


def engine_machines(engine: Any) -> int:
    """Return the number of machines; a service with its own scheduler counts as one."""
    service = engine.nodejs_binding.config.canonical_copy().training_service
    services = service if isinstance(service, list) else [service]
    # Only the configuration of the remote service has a list of machines.
    return sum(max(1, len(getattr(one, "machine_list", ()))) for one in services)


def _unfinished_trials(engine: Any) -> dict[str, Growth]:
    """Return the growths of all trials that have not ended, by trial id."""
    if is_sequential(engine):
        return {}
    found = {}
    for trial in engine.nodejs_binding.list_trial_jobs():
        if trial.status in _UNFINISHED and trial.hyperParameters:
            evaluator = trial.hyperParameters[0].parameters.get("evaluator") or {}
            if "growth" in evaluator:
                found[trial.trialJobId] = Growth.from_dict(evaluator["growth"])
    return found


def is_over(engine: Any) -> bool:
    """Return whether an engine without budget has finished the trials that it had accepted."""
    if is_sequential(engine):
        return True
    return bool(engine.nodejs_binding.get_status() != "NO_MORE_TRIAL")
