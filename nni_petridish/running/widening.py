"""A growth of the width: a wider network that predicts the same, within the limits of size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from nni_petridish.core.genotype import Genotype
from nni_petridish.core.grow import genotype_of
from nni_petridish.core.selection import architecture
from nni_petridish.errors import ExhaustedError
from nni_petridish.tasks.sizes import sizes_of
from nni_petridish.tasks.task import Task, require_widening

_STEP = 0.9
"""Factor of the width from one try to the next, while a network is too large."""


def widen(
    task: Task,
    net: nn.Module,
    factor: float,
    limits: Mapping[str, float] | None,
    taken: Sequence[Genotype],
) -> nn.Module:
    """Return a network with more channels that predicts the same.

    Parameters
    ----------
    task
        The task of the network.
    net
        The network, without candidates.
    factor
        The number of channels as a multiple of those before, if the limits allow it.
    limits
        The largest sizes by name; None for any size.
    taken
        The architectures that it must not become.

    Raises
    ------
    ExhaustedError
        If every wider network is too large or taken.
    """
    able, start = require_widening(task), genotype_of(net)
    known = {architecture(genotype) for genotype in taken}
    narrowest = able.widened(start, 1.0)
    while True:
        genotype = able.widened(start, factor)
        wide = None if architecture(genotype) in known else able.widen(net, genotype)
        if wide is not None and _fits(task, wide, limits):
            return wide
        if genotype == narrowest:
            raise ExhaustedError("every wider network is too large, or was grown before.")
        factor *= _STEP


def _fits(task: Task, net: nn.Module, limits: Mapping[str, float] | None) -> bool:
    if limits is None:
        return True
    sizes = sizes_of(task, net, tuple(limits))
    return all(sizes[name] <= limit for name, limit in limits.items())
