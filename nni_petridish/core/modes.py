"""Context managers for the modes of a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode, and restore the mode of every module on exit.

    ``net.train()`` would not restore modules that were in evaluation mode within a network in
    training, such as frozen batch norms.
    """
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def averaging_statistics(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Let batch norms, and nothing else, average their statistics over all batches of the block.

    Use it within `evaluation_mode`.
    """
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the plain average
        norm.train()
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.eval()
