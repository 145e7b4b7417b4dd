"""The registry of unary operations on images, by name, readable without torch.

A new operation is one decorated function, see `register_op`. For processes that do not import its
module, such as workers, a package lists the module in the entry point group ``nni_petridish.ops``.
These modules are imported when an unknown name is looked up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeAlias

from nni_petridish.errors import ConfigError, GenotypeError

if TYPE_CHECKING:
    from torch import nn

OpMaker: TypeAlias = "Callable[[int, int, bool], nn.Module]"
"""A function of (channels, stride, affine) that makes the module of an operation."""

VISION_OPS = (
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
    "max_pool_3x3",
    "avg_pool_3x3",
    "identity",
)
"""The eligible operations of the paper's vision tasks, in the order of the α tables."""
PLUGINS = "nni_petridish.ops"
"""The entry point group of modules that register operations."""

_makers: dict[str, OpMaker] = {}


def register_op(name: str) -> Callable[[OpMaker], OpMaker]:
    """Register an operation under this name, for spaces, genotypes and networks.

    The decorated function takes ``(channels, stride, affine)`` and returns a module with as many
    output as input channels. Stride is 1, or 2 to halve the resolution, rounding up. The module
    must end in ``nn.BatchNorm2d(channels, affine=affine)``, so that |α| is comparable across
    candidates.

    Parameters
    ----------
    name
        The name of the operation, a unique identifier.

    Examples
    --------
    ::

        @register_op("conv_3x3")
        def conv_3x3(channels: int, stride: int, affine: bool) -> nn.Module:
            conv = nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False)
            return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(channels, affine=affine))

        space = VisionSpace((3, 32, 32), 10, ops=["conv_3x3", "identity"])
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"the name of an op must be an identifier but got {name!r}.")

    def register(make: OpMaker) -> OpMaker:
        known = _makers.setdefault(name, make)
        if _origin(known) != _origin(make):
            raise ConfigError(f"op {name!r} is registered already, by {_origin(known)}.")
        _makers[name] = make  # of the same origin, such as a notebook cell that is run again
        return make

    return register


class _KnownOps(Sequence[str]):
    """All registered names, those of the paper first, always up to date.

    Looking up an unknown name imports the modules of the entry points.
    """

    def __contains__(self, op: object) -> bool:
        if op not in self._names():
            _import_plugins()
        return op in self._names()

    def __getitem__(self, index: Any) -> Any:
        return self._names()[index]

    def __len__(self) -> int:
        return len(self._names())

    @staticmethod
    def _names() -> tuple[str, ...]:
        return tuple(dict.fromkeys((*VISION_OPS, *_makers)))


KNOWN_OPS: Sequence[str] = _KnownOps()
"""The names of all operations on images."""


def op_maker(name: str) -> OpMaker:
    """Return the function registered for an operation; those of the paper are in `ops`."""
    if name not in KNOWN_OPS:
        raise GenotypeError(f"op must be one of {', '.join(KNOWN_OPS)} but got {name!r}.")
    return _makers[name]


def _origin(make: OpMaker) -> str:
    return f"{make.__module__}.{make.__qualname__}"


@functools.cache
def _import_plugins() -> None:
    for plugin in entry_points(group=PLUGINS):
        plugin.load()
