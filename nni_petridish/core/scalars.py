"""Parameters that must not decay: single numbers such as α and η."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class HasScalars(Protocol):
    """A module with parameters that must not decay: single numbers such as α and η."""

    @property
    def no_weight_decay(self) -> Sequence[str]:
        """The attributes that are such parameters."""
        ...


def scalar_ids(net: nn.Module) -> set[int]:
    """Return the ids of the parameters of a network that must not decay."""
    return {
        id(getattr(module, name))
        for module in net.modules()
        if isinstance(module, HasScalars)
        for name in module.no_weight_decay
    }
