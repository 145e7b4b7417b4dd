"""The report: one HTML page that works offline, with its pictures beside it as files."""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from nni_petridish.errors import PetridishError
from nni_petridish.gallery.files import make_folder, remove_leftovers, write_file
from nni_petridish.gallery.gallery import Gallery
from nni_petridish.registry import Measure, measure_of
from nni_petridish.results.report import svg
from nni_petridish.results.report.facts import (
    Usage,
    duration,
    failure_rows,
    model_facts,
    setting_rows,
)
from nni_petridish.results.report.pictures import PICTURES, Documents, Pictures, draw_pictures
from nni_petridish.search.search import Search

REPORT_FILE = "report.html"
TEMPLATE, STYLE, SCRIPT = "report.html.jinja", "report.css", "report.js"
"""The Jinja template of the page, its style and its script, beside this module."""
_UNKNOWN = Measure("error", is_share=False)
"""The measure of models that were measured by a user's code: it may be any number."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """Contents of a report.

    Parameters
    ----------
    search
        The models.
    folder
        The folder of the gallery.
    space, settings
        Those of the gallery.
    documents
        The documents of all models that can be read.
    measure
        The measure of their error.
    """

    search: Search
    folder: Path
    space: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    documents: Documents = field(default_factory=dict)
    measure: Measure = _UNKNOWN


def write_report(search: Search, folder: Path) -> Path:
    """Write the report of a gallery; return its path."""
    contents = read_contents(search, folder)
    pictures = draw_pictures(search, contents.documents, contents.measure)
    page = render_page(contents, pictures)
    make_folder(folder / PICTURES)
    for leftover_of in (folder, folder / PICTURES):  # a report that was killed
        remove_leftovers(leftover_of)
    for path, picture in pictures.files().items():
        write_file(folder / path, svg.standalone(picture).encode())
    write_file(folder / REPORT_FILE, page.encode())
    return folder / REPORT_FILE


def report_html(
    search: Search,
    folder: Path,
    *,
    version: str | None = None,
    detailed: Container[str] | None = None,
) -> str:
    """Return the page of a report without writing anything.

    Parameters
    ----------
    search
        The models.
    folder
        The folder of their gallery.
    version
        The version of a page that is served and refreshes itself; None for a page that does not.
    detailed
        Ids of the models that are shown in detail; all by default.
    """
    contents = read_contents(search, folder)
    pictures = draw_pictures(search, contents.documents, contents.measure, detailed)
    return render_page(contents, pictures, version=version, detailed=detailed)


def read_contents(search: Search, folder: Path) -> Contents:
    """Read the documents of a gallery; what cannot be read is left out with a warning."""
    documents = {}
    try:
        gallery = Gallery(folder)
    except PetridishError as error:
        _log.warning("The report has no cells and no diary: %s", error)
        return Contents(search, folder)
    for record in search.models():
        try:
            documents[record.id] = gallery.load_documents(record.id)
        except PetridishError as error:
            _log.warning(
                "The report leaves out the cells and the diary of %s: %s", record.id, error
            )
    measure = _measure(gallery, documents)
    return Contents(search, folder, gallery.space, gallery.settings, documents, measure)


def _measure(gallery: Gallery, documents: Documents) -> Measure:
    """Return the measure of the space, if the models were measured by it."""
    measure = measure_of(gallery.space)
    first: Mapping[str, Any] = next(iter(documents.values()), {})
    return measure if measure.name in first.get("metrics", {}).get("metrics", {}) else _UNKNOWN


def render_page(
    contents: Contents,
    pictures: Pictures,
    *,
    version: str | None = None,
    detailed: Container[str] | None = None,
) -> str:
    """Return the page of a report; see `report_html`."""
    search, measure = contents.search, contents.measure
    models = model_facts(search, contents.documents, measure)
    times = [model.seconds for model in models if model.seconds is not None]
    script = _resource(SCRIPT)
    return _template().render(
        title=contents.folder.resolve().name,
        version=version,
        policy=_policy(script, is_live=version is not None),
        style=Markup(svg.STYLE + _resource(STYLE)),
        script=Markup(script),
        measure=measure,
        complexity=search.complexity,
        models=models,
        shown=[model for model in models if detailed is None or model.id in detailed],
        best=next((model for model in models if model.is_best), None),
        running=search.running(),
        failures=failure_rows(search),
        usage=Usage.of(contents.folder, contents.space),
        space_rows=list(setting_rows(contents.space)),
        setting_rows=list(setting_rows(contents.settings)),
        training_time=duration(sum(times)) if times else None,
        elapsed=duration(search.elapsed) if search.elapsed else None,
        pictures=pictures,
    )


def _policy(script: str, is_live: bool) -> str:
    """Return a policy that lets a browser run our script only, and connect to nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    connect = "'self'" if is_live else "'none'"
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}';"
        f" connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )


@cache
def _resource(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["short_count"] = svg.short_count
    return environment.get_template(TEMPLATE)
