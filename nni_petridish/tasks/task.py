"""The contract of a task: space, data and training, as a growth uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from nni_petridish.errors import ConfigError
from nni_petridish.registry import Measure

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nni_petridish.core.genotype import Genotype

PHASES = ("seed", "weak", "final")
"""The phases of a growth: training a seed model; weak learning; training after finalizing."""
RETRAINING = "retraining"
"""The phase of a training from scratch after a search."""

Record = dict[str, float]
"""The numbers of an epoch: ``epoch``, ``loss``, ``validation_error``, ..."""


@dataclass(frozen=True)
class Phase:
    """One training of a network.

    Parameters
    ----------
    name
        The purpose: one of `PHASES`, or `RETRAINING`.
    epochs
        The number of epochs.
    random_seed
        The seed of all random numbers in it, such as the order of examples.
    label
        The name of the training in its progress bar and in messages.
    checkpoint
        The folder that the state is written to after every epoch; a state found there is restored.
    lr_factor
        The factor of the recipe's learning rate.
    hold_epochs
        Epochs at the full learning rate, after which the recipe lets it decay.
    """

    name: str
    epochs: int
    random_seed: int = 0
    label: str = "training"
    checkpoint: Path | None = None
    lr_factor: float = 1.0
    hold_epochs: int = 0


@dataclass(frozen=True)
class Progress:
    """A moment within a training.

    Parameters
    ----------
    epochs
        The number of epochs of the training.
    done
        Epochs that are done; a part of the running one counts as a fraction.
    text
        The present numbers, such as ``"loss 0.412"``.
    """

    epochs: int
    done: float
    text: str


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a growth, and of each training in it.

    Parameters
    ----------
    on_epoch
        Called after every epoch with the name of the phase and the record of the epoch; may raise
        to end the training.
    should_stop
        Asked before every step; true ends the training with `Interrupted`.
    progress
        Whether to show progress bars.
    on_progress
        Called with the name of the phase and its `Progress` a few times a second at most, by tasks
        that know their steps.
    """

    on_epoch: Callable[[str, Record], object] = lambda phase, record: None
    should_stop: Callable[[], bool] = lambda: False
    progress: bool = False
    on_progress: Callable[[str, Progress], object] | None = None


NO_CALLBACKS = Callbacks()
"""Callbacks that do nothing."""


class Task(Protocol):
    """A problem that networks are grown for."""

    @property
    def measure(self) -> Measure:
        """Name and form of the ``error`` that `evaluate` returns."""
        ...

    def seed(self) -> Genotype:
        """Return the architecture that growth starts from."""
        ...

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network with fresh weights."""
        ...

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        """Train in place, candidates included; go on from the checkpoint if there is one.

        Returns
        -------
        list of Record
            One for each epoch, those from before an interruption included.
        """
        ...

    def steps(self, epochs: int) -> int:
        """Return the number of steps in so many epochs."""
        ...

    def evaluate(self, net: nn.Module) -> Record:
        """Return the metrics on the validation set; the search minimizes ``error``."""
        ...

    def validation_losses(self, net: nn.Module) -> Iterable[Tensor]:
        """Yield differentiable parts of the validation loss, or nothing if they are unknown.

        Their sum is the loss that `evaluate` measures.
        """
        ...

    def data_facts(self) -> dict[str, Any]:
        """Return what a user of a model must know of the data, as plain data; saved with it."""
        ...

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds, parameters)."""
        ...

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return inputs of a network for one example, for measurements of latency."""
        ...


@runtime_checkable
class CanWiden(Protocol):
    """A task whose networks can become wider."""

    def widened(self, genotype: Genotype, factor: float) -> Genotype:
        """Return an architecture with so many times the channels, and at least one more."""
        ...

    def widen(self, net: nn.Module, genotype: Genotype) -> nn.Module:
        """Return a wider network of the given architecture that predicts the same."""
        ...


def require_widening(task: Task) -> CanWiden:
    """Return the task if its networks can become wider, else raise `ConfigError`."""
    if not isinstance(task, CanWiden):
        raise ConfigError("grow must be shortcuts: the networks of this task cannot be widened.")
    return task
