"""One training in several processes, one per GPU, as torchrun starts them.

The batch of the recipe is that of all processes together, and each takes its part of every batch. A
run is the same for any number of processes, except for the order of sums, the batch norms (each
process uses the statistics of its own part, as usual) and drop-path. The first process writes the
files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from nni_petridish.errors import ConfigError, PetridishError

Result = TypeVar("Result")

#: The others wait while the first process reads data or measures on the test images.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class World:
    """The processes that train one network together.

    Parameters
    ----------
    rank
        The number of this process, from 0.
    size
        The number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and speaks to the user."""
        return self.rank == 0

    def share(self, batch_size: int) -> int:
        """Return the number of examples of a batch that each process takes."""
        if batch_size % self.size:
            raise ConfigError(
                f"batch_size must be a multiple of the number of processes ({self.size}) but got"
                f" {batch_size}."
            )
        return batch_size // self.size

    def on_main(self, do: Callable[[], Result]) -> Result:
        """Call a function in the first process; return its result, or raise its error, in all."""
        if self.size == 1:
            return do()
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = do()
            except PetridishError as error:
                answer[1] = error
        dist.broadcast_object_list(answer)
        if answer[1] is not None:
            raise cast(PetridishError, answer[1])
        return cast(Result, answer[0])

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def parallel(self, net: nn.Module) -> nn.Module:
        """Return the network to call in training: its gradients are the means over all processes.

        Batch norms keep the running statistics of the first process.
        """
        return net if self.size == 1 else nn.parallel.DistributedDataParallel(net)


ALONE = World()
"""The world of a single process."""


def current_world() -> World:
    """Return the processes that this one belongs to, see `joined_world`."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return ALONE


def started_by_torchrun() -> bool:
    """Return whether this process has the environment variables that torchrun sets."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))


@contextmanager
def joined_world(device: str = "auto") -> Iterator[World]:
    """Join the processes that torchrun started, for as long as the block lasts.

    Parameters
    ----------
    device
        ``cpu``, ``cuda`` or ``auto`` (cuda if there is one). Each process of a machine takes the
        GPU of its own number.
    """
    if not started_by_torchrun():
        yield ALONE
        return
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise ConfigError(f"torchrun must start one process per GPU ({gpus}), not {local + 1}.")
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    try:
        yield current_world()
    finally:
        dist.destroy_process_group()
