"""Registries of unary operations by name, readable without torch.

A package lists modules that register operations in the entry point group ``nni_petridish.ops``, for
processes that do not import them, such as workers. These modules are imported when an unknown name
is looked up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from nni_petridish.errors import ConfigError, GenotypeError

Maker = TypeVar("Maker", bound=Callable[..., Any])
"""A function that makes the module of an operation."""

PLUGINS = "nni_petridish.ops"
"""The entry point group of modules that register operations."""


class OpRegistry(Sequence[str], Generic[Maker]):
    """The names of all operations on one kind of features, always up to date.

    Parameters
    ----------
    names
        The names of this package, which come first. They are known before their functions are
        registered, which needs torch.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.makers: dict[str, Maker] = {}

    def register(self, name: str) -> Callable[[Maker], Maker]:
        """Return a decorator that registers a function under this name."""
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"the name of an op must be an identifier but got {name!r}.")

        def register(make: Maker) -> Maker:
            known = self.makers.setdefault(name, make)
            if _origin(known) != _origin(make):
                raise ConfigError(f"op {name!r} is registered already, by {_origin(known)}.")
            self.makers[name] = make  # of the same origin, such as a notebook cell run again
            return make

        return register

    def maker(self, name: str) -> Maker:
        """Return the function registered for an operation."""
        if name not in self:
            raise GenotypeError(f"op must be one of {', '.join(self)} but got {name!r}.")
        return self.makers[name]

    def __contains__(self, op: object) -> bool:
        if op not in self._known():
            _import_plugins()
        return op in self._known()

    def __getitem__(self, index: Any) -> Any:
        return self._known()[index]

    def __len__(self) -> int:
        return len(self._known())

    def _known(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.names, *self.makers)))


def _origin(make: Callable[..., Any]) -> str:
    return f"{make.__module__}.{make.__qualname__}"


@functools.cache
def _import_plugins() -> None:
    for plugin in entry_points(group=PLUGINS):
        plugin.load()
