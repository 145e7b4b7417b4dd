"""A module dictionary whose keys may contain dots."""

from __future__ import annotations

from torch import nn


class NamedModules(nn.ModuleDict):
    """A `torch.nn.ModuleDict` whose keys may contain dots, as the names of submodules do.

    PyTorch allows no dots in the name of a module, so they are stored as dashes.

    Examples
    --------
    >>> modules = NamedModules({"layer1.0": nn.Identity()})
    >>> "layer1.0" in modules, list(modules)
    (True, ['layer1-0'])
    """

    def __getitem__(self, key: str) -> nn.Module:
        return super().__getitem__(_own_name(key))

    def __setitem__(self, key: str, module: nn.Module) -> None:
        super().__setitem__(_own_name(key), module)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(_own_name(key))

    def __contains__(self, key: str) -> bool:
        return super().__contains__(_own_name(key))


def _own_name(key: str) -> str:
    return key.replace(".", "-")
