"""The training loop: epochs, checkpoints, validation, progress; the same for every problem.

Whatever is attached to a network trains along with it: the loop knows nothing of weak learners. A
`Trainer` knows the problem: its batches, its step, and what it measures.

A run is determined by network, data, recipe and seed, to the bit on a CPU (on CUDA as far as
`torch.use_deterministic_algorithms` goes), and so is one interrupted and continued: every epoch
seeds its own random numbers, and the checkpoint holds the rest.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from nni_petridish.errors import ConfigError, Interrupted, TrainingError
from nni_petridish.kernels.waiting import watch_the_machine
from nni_petridish.tasks.checkpoint import load_checkpoint, save_checkpoint
from nni_petridish.tasks.distributed import World
from nni_petridish.tasks.task import Callbacks, Phase, Progress, Record

_PROGRESS_SECONDS = 0.5
"""Least time between two calls of ``on_progress``: its text waits for a GPU."""


@dataclass(frozen=True)
class History:
    """Result of a training.

    Parameters
    ----------
    records
        One record per epoch, those from before an interruption included: ``epoch`` (from 1),
        ``loss``, ``error``, ``lr``, ``seconds``, and ``validation_loss`` and ``validation_error``
        if there is a validation set.
    resumed_at
        The number of epochs that were read from the checkpoint.
    """

    records: tuple[Record, ...]
    resumed_at: int = 0


class LoopOptions(TypedDict, total=False):
    """Options of `fit` and `fit_language` that do not depend on the problem.

    Parameters
    ----------
    on_epoch
        Called with the record of each new epoch, after its checkpoint is written; may raise to end
        the training.
    checkpoint
        The folder of the checkpoint. The state is written there after every epoch. A checkpoint
        that is found there is restored if it is of the same network, recipe, data and seed; of a
        finished training only the weights are restored. Of several processes (see
        `tasks.distributed`) the first one writes, and all must see the folder.
    progress
        Whether to show a bar on stderr if that is a terminal; true by default.
    label
        The name of the training in its bar; ``"training"`` by default.
    stop
        Asked before every step; true raises `Interrupted`.
    on_progress
        Called a few times a second at most, between two steps.
    """

    on_epoch: Callable[[Record], object] | None
    checkpoint: str | Path | None
    progress: bool
    label: str
    stop: Callable[[], bool] | None
    on_progress: Callable[[Progress], object] | None


def loop_options(phase: Phase, callbacks: Callbacks) -> LoopOptions:
    """Return the options of a phase of a growth, or of a retraining."""
    watch = callbacks.on_progress
    return {
        "on_progress": None if watch is None else partial(watch, phase.name),
        "on_epoch": lambda record: callbacks.on_epoch(phase.name, record),
        "checkpoint": phase.checkpoint,
        "progress": callbacks.progress,
        "label": phase.label,
        "stop": callbacks.should_stop,
    }


@dataclass(frozen=True)
class Bar:
    """The progress bar of a training.

    Parameters
    ----------
    length
        The number of units in an epoch.
    unit
        The name of the unit that is shown.
    scale
        The number of shown units in one unit of ``length``.
    """

    length: int
    unit: str
    scale: int = 1


class Steps:
    """The steps of the current epoch: they can be stopped, and they advance the progress bar."""

    def __init__(
        self,
        epoch: int,
        bar: tqdm[Any],
        should_stop: Callable[[], bool] | None,
        on_steps: Callable[[int, Callable[[], str]], object] | None = None,
    ) -> None:
        self._epoch, self._bar, self._should_stop = epoch, bar, should_stop
        self._on_steps, self._done = on_steps, 0

    def before(self, place: str) -> None:
        """Raise `Interrupted`, naming the place, if the training is asked to stop."""
        if self._should_stop is not None and self._should_stop():
            raise Interrupted(f"training was stopped at epoch {self._epoch + 1}, {place}.")

    def after(self, done: int, describe: Callable[[], str]) -> None:
        """Advance the bar; ``describe`` is called only if it is drawn, since it waits for a GPU."""
        if self._bar.update(done):
            self._bar.set_postfix_str(describe(), refresh=False)
        self._done += done
        if self._on_steps is not None:
            self._on_steps(self._done, describe)


class _Watch:
    """Calls of ``on_progress`` at a bounded rate."""

    def __init__(self, on_progress: Callable[[Progress], object], epochs: int, length: int) -> None:
        self._on_progress, self._epochs, self._length = on_progress, epochs, length
        self._next = 0.0

    def steps(self, epoch: int, done: int, describe: Callable[[], str]) -> None:
        """Tell that so much of the epoch is done, unless something was told a moment ago."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS_SECONDS
            part = min(1.0, done / self._length)
            self._on_progress(Progress(self._epochs, epoch + part, describe()))


class Trainer(Protocol):
    """The part of a training that depends on the problem."""

    @property
    def net(self) -> nn.Module:
        """The network that is trained."""
        ...

    @property
    def state(self) -> nn.Module:
        """The module whose state a checkpoint holds: the network, or a module around it."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; a checkpoint holds its momenta."""
        ...

    @property
    def world(self) -> World:
        """The processes that train together."""
        ...

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        ...

    @property
    def bar(self) -> Bar:
        """The progress bar."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return the plain data of a checkpoint: all but its tensors and records."""
        ...

    def resume(self, tensors: dict[str, Tensor], facts: dict[str, Any], epochs: int) -> bool:
        """Restore a checkpoint after so many epochs; return False if it is of another run."""
        ...

    def epoch(self, epoch: int, seed: int, steps: Steps) -> Record:
        """Train for one epoch, counted from 0, in the order of the seed; return its metrics."""
        ...

    def validate(self, before: list[Record]) -> Record:
        """Return the metrics of the validation, if there is one; ``before`` has earlier epochs."""
        ...

    def finish(self) -> None:
        """Give the network its final weights."""
        ...


def run(
    trainer: Trainer,
    epochs: int,
    seed: int,
    *,
    on_epoch: Callable[[Record], object] | None = None,
    checkpoint: str | Path | None = None,
    progress: bool = True,
    label: str = "training",
    stop: Callable[[], bool] | None = None,
    on_progress: Callable[[Progress], object] | None = None,
) -> History:
    """Train to the end, from the checkpoint on if there is one; see `LoopOptions`."""
    watch_the_machine()
    net, world = trainer.net, trainer.world
    folder = None if checkpoint is None else Path(checkpoint)
    records = [] if folder is None else _resume(trainer, folder)
    start, length = len(records), trainer.bar.length
    devices = [torch.cuda.current_device()] if trainer.device.type == "cuda" else []
    bar = tqdm(
        total=length * epochs,
        initial=start * length,
        desc=label,
        unit=trainer.bar.unit,
        unit_scale=trainer.bar.scale if trainer.bar.scale > 1 else False,
        mininterval=0.5,
        disable=None if progress and world.is_main else True,  # None: shown on terminals only
    )
    watch = _Watch(on_progress, epochs, length) if on_progress and world.is_main else None
    with torch.random.fork_rng(devices), bar:
        for epoch in range(start, epochs):
            bar.set_description(f"{label}, epoch {epoch + 1}/{epochs}", refresh=False)
            began = time.perf_counter()
            order, noise = np.random.SeedSequence((seed, epoch)).generate_state(2, np.uint64)
            # Drop-path and dropout draw from here, in each process for its own examples.
            torch.manual_seed((int(noise) + world.rank) % 2**64)
            net.train()
            on_steps = None if watch is None else partial(watch.steps, epoch)
            numbers = trainer.epoch(epoch, int(order), Steps(epoch, bar, stop, on_steps))
            record = {"epoch": epoch + 1, **numbers, "seconds": time.perf_counter() - began}
            records.append(record | trainer.validate(records))
            if folder is not None and world.is_main:
                facts = trainer.facts() | {"records": records}
                save_checkpoint(folder, trainer.state, trainer.optimizer, facts)
            if on_epoch is not None:
                on_epoch(dict(records[-1]))
    trainer.finish()
    net.train()
    return History(tuple(records), start)


def check_seed(seed: int) -> None:
    """Raise `ConfigError` unless the value is a valid random seed."""
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ConfigError(f"seed must be a whole number of at least 0 but got {seed!r}.")


def _resume(trainer: Trainer, folder: Path) -> list[Record]:
    """Restore the checkpoint in a folder; return the records of the epochs done."""
    found = load_checkpoint(folder)
    known = None if found is None else len(found[1].get("records", []))
    if trainer.world.on_main(lambda: known) != known:  # also waits until all have read it
        raise TrainingError(f"{folder} must be a folder that all processes share.")
    if found is None:
        return []
    tensors, facts = found
    records: list[Record] = facts.pop("records", [])
    if not trainer.resume(tensors, facts, len(records)):
        warnings.warn(
            f"{folder} holds a checkpoint of another run; training starts anew.", stacklevel=4
        )
        return []
    return records
