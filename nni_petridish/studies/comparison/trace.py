"""The trace of a run: what it spent, and the models it found, epoch by epoch on the disk.

A run that was killed goes on from its trace. All compute counts: weak learning, supernets, failed
trials. An epoch that is repeated after an interruption counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nni_petridish.gallery.journal import Journal
from nni_petridish.registry import Measure
from nni_petridish.tasks.task import NO_CALLBACKS, Callbacks, Phase, Record

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nni_petridish.core.genotype import Genotype
    from nni_petridish.tasks.space_task import SpaceTask

TRACE_FILE = "trace.jsonl"
_SPENT, _MODEL, _FACT = "spent", "model", "fact"


class Spent(NamedTuple):
    """Compute: seconds of the processor, and multiply-adds of the forward passes in training."""

    seconds: float
    operations: float

    def of(self, budget: str) -> float:
        """Return the one that a budget limits."""
        return self.seconds if budget == "processor_time" else self.operations


class Trace:
    """The trace of one run.

    Parameters
    ----------
    folder
        The folder of the run.
    budget
        The unit of the budget.
    clock
        Returns seconds.
    """

    def __init__(self, folder: Path, budget: str, clock: Callable[[], float]) -> None:
        self._journal = Journal(folder / TRACE_FILE)
        self._budget, self._clock = budget, clock
        self._seconds, self._operations = 0.0, 0.0
        self.models: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        for event in self._journal.read_all():
            self._apply(event)
        self._mark = clock()

    def spent(self) -> Spent:
        """Return the compute so far."""
        return Spent(self._seconds + self._clock() - self._mark, self._operations)

    def spend(
        self, what: str, operations: float, seconds: float | None = None, **epoch: Any
    ) -> None:
        """Record the seconds since the last record, or those given, and multiply-adds.

        ``epoch`` has the ``error`` and the ``multiply_adds`` of the network after it, if measured.
        """
        now = self._clock()
        taken = now - self._mark if seconds is None else seconds
        spent = {"what": what, "seconds": taken, "operations": float(operations)}
        self._write({"event": _SPENT, **spent, **epoch})
        if seconds is None:
            self._mark = now

    def find(self, id: str, error: float | None, multiply_adds: int, **facts: Any) -> None:
        """Record a model; an error of None is that of a model that does not count."""
        self.spend("model", 0)
        model = {"id": id, "error": error, "multiply_adds": multiply_adds, **facts}
        spent = {"seconds": self._seconds, "operations": self._operations}
        self._write({"event": _MODEL, **model, **spent})

    def skip(self) -> None:
        """Forget the seconds since the last record."""
        self._mark = self._clock()

    def restart(self) -> None:
        """Forget everything: an interrupted supernet is trained anew, and counts once."""
        self._journal.path.unlink(missing_ok=True)
        self._seconds, self._operations, self._mark = 0.0, 0.0, self._clock()
        self.epochs.clear()

    def remember(self, **facts: Any) -> None:
        """Record facts that a resumed run must know."""
        self._write({"event": _FACT, "facts": facts})

    def has_room(self, budget: float) -> bool:
        """Return whether at least half of another model, of average cost, fits into the budget.

        So the compute of a method differs from the budget by half a model at most, on either side.
        """
        spent = self.spent().of(self._budget)
        costs = [Spent(m["seconds"], m["operations"]).of(self._budget) for m in self.models]
        later = len(costs) - 1
        average = (costs[-1] - costs[0]) / later if later > 0 else sum(costs)
        return spent + average / 2 <= budget

    def _write(self, event: dict[str, Any]) -> None:
        self._journal.append(event)
        self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["event"] == _SPENT:
            self._seconds += event["seconds"]
            self._operations += event["operations"]
            if "error" in event:
                network = {name: event[name] for name in ("error", "multiply_adds")}
                spent = {"seconds": self._seconds, "operations": self._operations}
                self.epochs.append(network | spent)
        elif event["event"] == _MODEL:
            self.models.append({k: v for k, v in event.items() if k != "event"})
        else:
            self.facts |= event["facts"]


@dataclass(frozen=True)
class TracedTask:
    """A task whose training is recorded in a trace.

    Parameters
    ----------
    task
        The task.
    trace
        The trace.
    """

    task: SpaceTask
    trace: Trace

    @property
    def measure(self) -> Measure:
        """Name and form of the error."""
        measure: Measure = self.task.measure
        return measure

    def seed(self) -> Genotype:
        """Return the architecture that growth starts from."""
        return self.task.seed()

    def build(self, genotype: Genotype) -> nn.Module:
        """Build a network with fresh weights."""
        return self.task.build(genotype)

    def train(
        self, net: nn.Module, phase: Phase, callbacks: Callbacks = NO_CALLBACKS
    ) -> list[Record]:
        """Train; record the compute of every epoch before its callback is called."""
        operations = self.task.operations(net, 1)
        # Nobody would take a network with candidates attached.
        size = None if phase.name == "weak" else self.task.size(net)[0]

        def on_epoch(name: str, record: Record) -> None:
            epoch: dict[str, Any] = {}
            if size is not None and "validation_error" in record:
                epoch = {"error": record["validation_error"], "multiply_adds": size}
            self.trace.spend(name, operations, **epoch)
            callbacks.on_epoch(name, record)

        return self.task.train(net, phase, replace(callbacks, on_epoch=on_epoch))

    def steps(self, epochs: int) -> int:
        """Return the number of steps in so many epochs."""
        return self.task.steps(epochs)

    def evaluate(self, net: nn.Module) -> Record:
        """Return the metrics on the validation set."""
        return self.task.evaluate(net)

    def validation_losses(self, net: nn.Module) -> Iterable[Tensor]:
        """Yield parts of the validation loss."""
        return self.task.validation_losses(net)

    def data_facts(self) -> dict[str, Any]:
        """Return what a user of a model must know of the data."""
        return self.task.data_facts()

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds, parameters)."""
        return self.task.size(net)

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return inputs of a network for one example."""
        return self.task.example(net)

    def widened(self, genotype: Genotype, factor: float) -> Genotype:
        """Return an architecture with so many times the channels."""
        return self.task.widened(genotype, factor)

    def widen(self, net: nn.Module, genotype: Genotype) -> nn.Module:
        """Return a wider network that predicts the same."""
        return self.task.widen(net, genotype)


def make_clock(device: str) -> Callable[[], float]:
    """Return a clock of compute: the processor's, or on a GPU that of the wall.

    Parameters
    ----------
    device
        The device of the recipe.
    """
    from nni_petridish.tasks.device import resolve_device

    if resolve_device(device).type != "cuda":
        return time.process_time
    import torch

    def seconds() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return seconds
