"""Selection of a model of a gallery: by id, by its place on the hull, or up to a size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

from nni_petridish.errors import ConfigError, GalleryError, SearchError
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.gallery.recovery import read_events
from nni_petridish.search.records import ModelRecord
from nni_petridish.search.search import Search
from nni_petridish.search.settings import SearchSettings

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def parse_count(text: str) -> int:
    """Read a count such as ``60M``.

    >>> parse_count("60M"), parse_count("1.5G"), parse_count("250_000")
    (60000000, 1500000000, 250000)
    """
    number = _parse(text)
    if number < 1:
        raise ConfigError(f"A count must be a number such as 60M but got {text!r}.")
    return round(number)


def parse_size(text: str) -> float:
    """Read a count such as ``60M``, or milliseconds.

    >>> parse_size("60M"), parse_size("0.5")
    (60000000.0, 0.5)
    """
    number = _parse(text)
    if not number > 0:
        raise ConfigError(f"A size must be a number such as 60M, or 0.5 (ms), but got {text!r}.")
    return number


def _parse(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgb]?)", text.strip().lower().replace("_", ""))
    return float(match[1]) * _UNITS[match[2]] if match else 0.0


def open_search(folder: Path) -> tuple[Gallery, Search]:
    """Open a gallery and replay its journal, without writing; see `Gallery.read_events`."""
    gallery = Gallery(folder)
    # Only these affect the result. They are in the gallery's description in every front.
    names = ("tolerance", "complexity")
    settings = SearchSettings(**{k: v for k, v in gallery.settings.items() if k in names})
    return gallery, Search.replay(settings, read_events(gallery))


def select_model(
    search: Search,
    model: str | None = None,
    *,
    near: float | None = None,
    max: float | None = None,
    best: bool = False,
) -> ModelRecord:
    """Select a model by one of several criteria.

    Parameters
    ----------
    search
        The search that found the models.
    model
        Select the finished model with this id.
    near
        Select the hull model with multiply-adds, or another complexity that the search goes by,
        nearest to this number (the paper's rule), the more accurate one in case of ties.
    max
        Select the most accurate hull model with at most this complexity.
    best
        Select the most accurate model (default).
    """
    given = [model is not None, near is not None, max is not None, best]
    if sum(given) > 1:
        raise ConfigError("Only one of MODEL, --near, --max and --best can be given.")
    if model is not None:
        return _named(search, model)
    hull, complexity = search.hull(), search.complexity
    if not hull:
        raise GalleryError("No model with a finite error is finished yet.")
    if near is not None:
        return min(hull, key=lambda one: (abs(complexity.of(one.outcome) - near), one.error))
    limit = math.inf if max is None else max
    small = [record for record in hull if complexity.of(record.outcome) <= limit]
    if not small:
        least = complexity.phrase(complexity.text(complexity.of(hull[0].outcome)))
        raise GalleryError(
            f"The cheapest model, {hull[0].id}, has {least} but at most {complexity.text(limit)}"
            " are wanted."
        )
    return small[-1]


def _named(search: Search, id: str) -> ModelRecord:
    for record in search.models():
        if record.id == id:
            return record
    ids = [record.id for record in search.models()]
    shown = ", ".join(ids[:8]) + (", ..." if len(ids) > 8 else "")
    raise GalleryError(f"There is no model {id!r}; there are {shown or 'none yet'}.")


def most_accurate(
    records: Iterable[ModelRecord], max_multiply_adds: float | None
) -> ModelRecord | None:
    """Return the most accurate model of at most this size, the cheapest one in case of ties.

    The paper judges searches by "the most accurate models that take under 60 million multi-adds"
    (appendix B.5). Such a model need not be on the hull: it may lie above the line to a larger one.
    """
    limit = math.inf if max_multiply_adds is None else max_multiply_adds
    small = [
        record
        for record in records
        if math.isfinite(record.error) and record.multiply_adds <= limit
    ]
    return min(small, key=lambda record: (record.error, record.multiply_adds), default=None)


def require_most_accurate(
    search: Search, max_multiply_adds: float | None, where: str
) -> ModelRecord:
    """Return the most accurate model of at most this size, or raise the reason for its absence."""
    best = most_accurate(search.models(), max_multiply_adds)
    if best is None:
        failures = [*search.dropped().values(), *search.refused().values()]
        limit = max_multiply_adds
        reason = failures[-1] if failures else f"no model has at most {limit} multiply-adds"
        raise SearchError(f"the search in {where} found nothing: {reason.removesuffix('.')}.")
    return best
