"""Values in nested mappings by dotted names, such as ``recipe.lr``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nni_petridish.errors import ConfigError


def get_dotted(document: Mapping[str, Any], name: str) -> Any:
    """Return the value under a dotted name; None if there is none.

    >>> get_dotted({"recipe": {"lr": 0.05}}, "recipe.lr")
    0.05
    """
    value: Any = document
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def set_dotted(document: dict[str, Any], name: str, value: object, place: str) -> None:
    """Set the value under a dotted name.

    Parameters
    ----------
    document
        The mapping that is changed.
    name
        The dotted name; mappings on the way are made where they are missing.
    value
        The new value.
    place
        The place of the document, which goes before the name in an error.
    """
    *above, last = name.split(".")
    for key in above:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise ConfigError(f"{place}{name}: {key} is not a mapping.")
    document[last] = value
