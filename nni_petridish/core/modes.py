"""A context manager for evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
