"""The report: one HTML page that works offline, with its pictures beside it as files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nni_petridish.errors import GalleryError, PetridishError
from nni_petridish.gallery.files import write_file
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.registry import ERROR, Measure, measure_of
from nni_petridish.results.report import svg
from nni_petridish.results.report.diary import (
    loss_at_selection_and_end,
    predicted_change,
    selected_shortcuts,
)
from nni_petridish.results.report.pictures import PICTURES, Documents, Pictures, draw_pictures
from nni_petridish.results.report.tables import hull_rows
from nni_petridish.search.search import Search

REPORT_FILE = "report.html"
TEMPLATE = "report.html.jinja"
"""Jinja template of the page, beside this module."""

_log = logging.getLogger(__name__)


def write_report(search: Search, folder: Path) -> Path:
    """Write the report of a gallery; return its path."""
    documents, measure = _read_gallery(search, folder)
    pictures = draw_pictures(search, documents, measure)
    page = _render(search, folder.name, documents, pictures)
    try:
        (folder / PICTURES).mkdir(exist_ok=True)
        for path, picture in pictures.files().items():
            write_file(folder / path, svg.standalone(picture).encode())
        write_file(folder / REPORT_FILE, page.encode())
    except OSError as error:
        raise GalleryError(f"Cannot write the report into {folder}: {error.strerror}.") from error
    return folder / REPORT_FILE


def _read_gallery(search: Search, folder: Path) -> tuple[dict[str, dict[str, Any]], Measure]:
    """Return the documents of all models that can be read, and the measure of their error."""
    documents = {}
    try:
        gallery = Gallery(folder)
    except PetridishError as error:
        _log.warning("The report has no cells and no diary: %s", error)
        return {}, ERROR
    for record in search.models():
        try:
            documents[record.id] = gallery.load_documents(record.id)
        except PetridishError as error:
            _log.warning(
                "The report leaves out the cells and the diary of %s: %s", record.id, error
            )
    return documents, _measure(gallery, documents)


def _measure(gallery: Gallery, documents: Documents) -> Measure:
    """Return the measure of the space; the error where the models were measured otherwise."""
    measure = measure_of(gallery.space)
    first: Mapping[str, Any] = next(iter(documents.values()), {})
    return measure if measure.name in first.get("metrics", {}).get("metrics", {}) else ERROR


def _render(search: Search, title: str, documents: Documents, pictures: Pictures) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["short_count"] = svg.short_count
    return environment.get_template(TEMPLATE).render(
        title=title,
        picture_style=Markup(svg.STYLE),
        best=search.best(),
        models=search.models(),
        hull=search.hull(),
        hull_rows=hull_rows(search),
        change_rows=_change_rows(search, documents),
        selected={
            id: selected_shortcuts(parts.get("alphas") or {}) for id, parts in documents.items()
        },
        pictures=pictures,
    )


def _change_rows(search: Search, documents: Documents) -> list[dict[str, str]]:
    """Return one row per growth: the changes of the loss and of the error."""
    rows = []
    models = {record.id: record for record in search.models()}
    for id, record in models.items():
        if record.parent is None or id not in documents:
            continue
        predicted = predicted_change(documents[id].get("alphas") or {})
        losses = loss_at_selection_and_end(documents[id].get("history") or {})
        before = models.get(record.parent)
        rows.append(
            {
                "growth": id,
                "parent": record.parent,
                "loss at selection": f"{losses[0]:.4f}" if losses else "-",
                "predicted Δ loss": _signed(predicted),
                "realized Δ loss": _signed(losses[1] - losses[0] if losses else None),
                "loss after training": f"{losses[1]:.4f}" if losses else "-",
                "Δ error": _signed(record.error - before.error if before else None),
            }
        )
    return rows


def _signed(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:+.4f}".replace("-", "−")
