"""Public names of a package that load their modules on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attach(
    package: str, homes: Mapping[str, str], defined: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package with lazy names.

    Type checkers do not see these names: import them under ``TYPE_CHECKING`` as well.

    Parameters
    ----------
    package
        Name of the package: its ``__name__``.
    homes
        For each lazy name the module that defines it, absolute or relative to the package.
    defined
        Further public names, which the package defines itself.

    Examples
    --------
    >>> load, names, _ = attach("collections", {"Mapping": ".abc", "sqrt": "math"})
    >>> load("sqrt")(9.0), load("Mapping").__name__, names()
    (3.0, 'Mapping', ['Mapping', 'sqrt'])
    """
    public = sorted([*homes, *defined])

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name], package), name)

    return load, lambda: list(public), public
