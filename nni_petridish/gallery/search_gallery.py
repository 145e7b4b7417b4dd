"""The gallery of a search, with the same description of its space in every front."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from nni_petridish.errors import ConfigError, GalleryError
from nni_petridish.gallery.files import to_json
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.registry import kind_names, kind_of

Plain = Mapping[str, Any]


def open_gallery(
    folder: str | os.PathLike[str], space: Plain, settings: Plain, data: Plain | None = None
) -> Gallery:
    """Open the gallery of a search, or create it.

    Parameters
    ----------
    folder
        The folder of the gallery.
    space
        ``space`` (the kind) and options of the space.
    settings
        The settings that must not change during the search.
    data
        The data options, from which missing options of the space are derived; None if none is
        missing.
    """
    return Gallery.create(folder, _kept(folder, space, data or {}), settings)


def check_gallery(
    folder: str | os.PathLike[str], space: Plain, settings: Plain, data: Plain | None = None
) -> None:
    """Raise an error if `open_gallery` would, as far as can be checked without writing."""
    Gallery.check(folder, _kept(folder, space, data or {}), settings)


def describe_space(space: Plain, data: Plain) -> dict[str, Any]:
    """Return the kind and all options of a space, including defaults and those from the data."""
    if space.get("space") not in kind_names():  # NNI's cells and choices describe themselves
        return dict(space)
    return kind_of(space).describe_space(space, data)


def _kept(folder: str | os.PathLike[str], space: Plain, data: Plain) -> Plain:
    """Return the description to store: that of an existing gallery if it is equivalent.

    Galleries of earlier versions only have the options that were given in the configuration.
    """
    described = describe_space(space, data)
    try:
        found = Gallery(folder).space
        is_same = to_json(describe_space(found, data)) == to_json(described)
    except (GalleryError, ConfigError, KeyError, TypeError):  # no gallery, or of another space
        return described
    return found if is_same else described
