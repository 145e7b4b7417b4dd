"""Sizes of a network by the names of the complexities."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor, nn

from nni_petridish.core.latency import measure_latency
from nni_petridish.search.complexity import MULTIPLY_ADDS, PARAMETERS
from nni_petridish.search.records import LATENCY


class Sized(Protocol):
    """A space or a task: what can tell the size of its networks."""

    def size(self, net: nn.Module) -> tuple[int, int]:
        """Return (multiply-adds, parameters)."""
        ...

    def example(self, net: nn.Module) -> tuple[Tensor, ...]:
        """Return inputs of a network for one example."""
        ...


def sizes_of(sized: Sized, net: nn.Module, names: Collection[str]) -> dict[str, float]:
    """Return the named sizes of a network; the latency is measured only if it is named."""
    multiply_adds, parameters = sized.size(net)
    sizes: dict[str, float] = {MULTIPLY_ADDS: multiply_adds, PARAMETERS: parameters}
    if LATENCY in names:
        sizes[LATENCY] = measure_latency(net, sized.example(net))
    return {name: sizes[name] for name in names}
