"""Evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(net: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode; afterwards every module has its own mode again.

    ``net.train()`` would not do: a network in training may hold modules in evaluation mode, such as
    frozen batch norms.
    """
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
