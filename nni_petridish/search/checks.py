"""Checking plain data that a user wrote: whatever is wrong is said in one line with its place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nni_petridish.errors import ConfigError
from nni_petridish.search.constraints import prefix as prefix


def resolve(place: str, folder: object, base: Path) -> Path:
    """Return the absolute path of a folder that is named relative to ``base``."""
    if not isinstance(folder, str) or not folder.strip():
        raise ConfigError(f"{place} must be the name of a folder but got {folder!r}.")
    return Path(os.path.abspath(base / Path(folder).expanduser()))


def mapping(place: str, value: object) -> dict[str, Any]:
    """Return the value if it is a mapping."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} must be a mapping but got {value!r}.")
    return dict(value)


def refuse_unknown(found: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
    """Raise if there is a key that is not known."""
    for key in found:
        if key not in known:
            allowed = ", ".join(known)
            raise ConfigError(
                f"{prefix}{key} is not a known key (value {found[key]!r}); allowed are {allowed}."
            )


def dig(document: Mapping[str, Any], name: str) -> Any:
    """Return what a document has under a dotted name; None if there is nothing.

    >>> dig({"recipe": {"lr": 0.05}}, "recipe.lr")
    0.05
    """
    value: Any = document
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def put(document: dict[str, Any], name: str, value: object, place: str) -> None:
    """Set what a document has under a dotted name; ``place`` goes before it in a complaint."""
    *above, last = name.split(".")
    for key in above:
        document = document.setdefault(key, {})
        if not isinstance(document, dict):
            raise ConfigError(f"{place}{name}: {key} is not a mapping.")
    document[last] = value
