"""Averaged weights: the mean of the weights over the last epochs of a training.

The average is what a network is evaluated with and what is saved. Its training goes on from the
weights themselves, and a checkpoint holds both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from nni_petridish.core.modes import averaging_statistics, evaluation_mode
from nni_petridish.tasks.checkpoint import fits, restore

AVERAGED_STEPS = "averaged_steps"
"""Key of the number of averaged steps in a checkpoint."""
STATISTICS_BATCHES = 50
"""Batches from which the statistics of batch norms are computed anew."""


def first_averaged_epoch(epochs: int, share: float, held: int = 0) -> int | None:
    """Return the first epoch, counted from 0, whose steps are averaged; None without an average.

    Parameters
    ----------
    epochs
        Epochs of the training.
    share
        The share of them, the last ones, that is averaged.
    held
        Epochs at the full learning rate, which are never averaged: their weights are too far from
        one another.
    """
    return max(held, epochs - math.ceil(share * epochs)) if share else None


class AveragedWeights(nn.Module):
    """A network and, from some step on, the average of its weights since then.

    Parameters
    ----------
    net
        The network.
    first_epoch
        The epoch, counted from 0, with which the average begins; None if `begin` is called.
    show
        Shows the network training examples. The averaged weights then get batch norm statistics of
        their own, since those of the network belong to other weights. None leaves them alone.
    is_whole
        Whether checkpoints hold this module from the start, and not the network alone at first.
    """

    def __init__(
        self,
        net: nn.Module,
        first_epoch: int | None = None,
        show: Callable[[], object] | None = None,
        *,
        is_whole: bool = False,
    ) -> None:
        super().__init__()
        self.net = net
        self.first_epoch, self.show, self.is_whole = first_epoch, show, is_whole
        self.steps: int | None = None

    @property
    def state(self) -> nn.Module:
        """The module whose state a checkpoint holds: the network alone until there is more."""
        return self if self.is_whole or self.steps is not None else self.net

    def facts(self) -> dict[str, int]:
        """Return what a checkpoint must know of the average, nothing if there is none."""
        return {} if self.steps is None else {AVERAGED_STEPS: self.steps}

    def before(self, epoch: int) -> None:
        """Start to average if it is time."""
        if self.steps is None and self.first_epoch is not None and epoch >= self.first_epoch:
            self.begin()

    def begin(self, steps: int = 0) -> None:
        """Start to average; `steps` steps have been averaged before."""
        self.steps = steps
        for i, parameter in enumerate(self.net.parameters()):
            self.register_buffer(f"average_{i}", parameter.detach().clone())

    def add(self) -> None:
        """Add the weights after a step to the average."""
        if self.steps is not None:
            self.steps += 1
            for average, parameter in self._pairs():
                average.lerp_(parameter.detach(), 1 / self.steps)

    def resume(
        self, tensors: dict[str, Tensor], optimizer: torch.optim.Optimizer, steps: int | None
    ) -> bool:
        """Restore a checkpoint in which so many steps were averaged; False if it does not fit."""
        found = AveragedWeights(self.net, is_whole=self.is_whole)
        if steps is not None:
            found.begin(steps)
        if not fits(tensors, found.state, optimizer):
            return False
        if steps is not None:
            self.begin(steps)
        restore(tensors, self.state, optimizer)
        return True

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the network the averaged weights for as long as the context lasts."""
        if not self.steps:
            yield
            return
        own = [parameter for _, parameter in self._pairs()] + self._statistics()
        kept = [tensor.detach().clone() for tensor in own]
        self.settle()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(own, kept, strict=True):
                    tensor.copy_(value)

    @torch.no_grad()
    def settle(self) -> None:
        """Give the network the averaged weights."""
        if not self.steps:
            return
        for average, parameter in self._pairs():
            parameter.copy_(average)
        if self.show is not None and (norms := _norms(self.net)):
            for norm in norms:
                norm.reset_running_stats()
            # Without drop-path and dropout: evaluation has none either.
            with evaluation_mode(self.net), averaging_statistics(norms):
                self.show()

    def _pairs(self) -> list[tuple[Tensor, nn.Parameter]]:
        parameters = enumerate(self.net.parameters())
        return [(self.get_buffer(f"average_{i}"), parameter) for i, parameter in parameters]

    def _statistics(self) -> list[Tensor]:
        norms = [] if self.show is None else _norms(self.net)
        return [tensor for norm in norms for tensor in norm.buffers()]


def _norms(net: nn.Module) -> list[_BatchNorm]:
    norms = (module for module in net.modules() if isinstance(module, _BatchNorm))
    return [norm for norm in norms if norm.track_running_stats]
