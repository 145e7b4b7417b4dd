"""The description of a gallery, ``gallery.json``: format version, space and settings of the search.

It is written once and sealed. A search with another description is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nni_petridish._support.reading import read_json
from nni_petridish.errors import GalleryError, show
from nni_petridish.gallery.files import in_one_line, seal, to_json, unseal, write_file
from nni_petridish.gallery.locks import file_lock

_VERSION = 1
DESCRIPTION = "gallery.json"


def make_description(space: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a gallery as plain data."""
    document = {"version": _VERSION, "space": dict(space), "settings": dict(settings)}
    return dict(json.loads(to_json(document)))


def read_description(folder: Path) -> dict[str, Any] | None:
    """Read the description of a gallery; None if the folder has none."""
    path = folder / DESCRIPTION
    try:
        with in_one_line(f"read {path}"):
            try:
                description = read_json(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
    except ValueError as error:
        raise GalleryError(f"{path} is damaged: {error}.") from error
    version = description.get("version") if isinstance(description, dict) else None
    if version != _VERSION:
        raise GalleryError(f"{path} must have version {_VERSION} but has {show(version)}.")
    for name in ("space", "settings"):
        if not isinstance(description.get(name), dict):
            raise GalleryError(f"{path} is damaged: {name} must be a mapping.")
    return unseal(description, path)


def write_description(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Write a description unless there is one; return that which is there."""
    # If several processes start at once, the first one writes.
    with file_lock(folder / ".create.lock"):
        found = read_description(folder)
        if found is None:
            write_file(folder / DESCRIPTION, seal(wanted))
    return found or wanted


def refuse_other_folders(folder: Path) -> None:
    """Raise a `GalleryError` if a folder is in use for something other than a gallery."""
    if folder.is_dir():
        # Another process may be creating the gallery right now: its lock and temporary file do not
        # count, and nothing does once gallery.json exists.
        visible = [name for name in os.listdir(folder) if not name.startswith(".")]
        if visible and read_description(folder) is None:
            raise GalleryError(f"{folder} is not a gallery and not empty: it has {visible[0]}.")


def refuse_differences(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a `GalleryError` that names each difference between two descriptions."""
    differences = find_differences(
        {name: found[name] for name in ("space", "settings")},
        {name: wanted[name] for name in ("space", "settings")},
    )
    if differences:
        raise GalleryError(f"The gallery {folder} is of another search: {'; '.join(differences)}.")


def find_differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """Return a line for each difference between plain data found on disk and data wanted now."""
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return [
            line
            for key in dict.fromkeys([*found, *wanted])
            for line in find_differences(
                found.get(key), wanted.get(key), f"{name}.{key}".strip(".")
            )
        ]
    return [] if found == wanted else [f"{name} is {show(found)} there but {show(wanted)} here"]
