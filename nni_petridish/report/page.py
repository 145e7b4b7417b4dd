"""The report: one page that needs no network, and its pictures beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nni_petridish.atomic import write_file
from nni_petridish.errors import GalleryError, PetridishError
from nni_petridish.gallery import Gallery
from nni_petridish.genotype import Genotype
from nni_petridish.records import ModelRecord
from nni_petridish.report import svg
from nni_petridish.report.cells import draw_cells, learners_of
from nni_petridish.report.charts import hull_chart, training_chart
from nni_petridish.report.diary import (
    alpha_chart,
    predicted_change,
    realised_change,
    selected_shortcuts,
)
from nni_petridish.report.lineage import lineage_tree
from nni_petridish.report.tables import hull_rows
from nni_petridish.search import Search

REPORT_FILE = "report.html"
PICTURE_FILE = "hull.svg"
PICTURES = "pictures"
"""Folder of the pictures beside `PICTURE_FILE`."""

_log = logging.getLogger(__name__)
Documents = Mapping[str, Mapping[str, Any]]


def write_report(search: Search, folder: Path) -> Path:
    """Write the report of a gallery; return its path."""
    documents = _read_documents(search, folder)
    pictures = _draw(search, documents)
    page = _page(search, folder.name, documents, pictures)
    try:
        (folder / PICTURES).mkdir(exist_ok=True)
        for name, drawn in pictures.items():
            # A label of NNI's may contain slashes.
            name = quote(name, safe="")
            path = folder / (name if name == PICTURE_FILE else f"{PICTURES}/{name}")
            write_file(path, svg.standalone(drawn).encode())
        write_file(folder / REPORT_FILE, page.encode())
    except OSError as error:
        raise GalleryError(f"Cannot write the report into {folder}: {error.strerror}.") from error
    return folder / REPORT_FILE


def _read_documents(search: Search, folder: Path) -> dict[str, dict[str, Any]]:
    """Read the documents of all models; what cannot be read is left out of the report."""
    documents = {}
    try:
        gallery = Gallery(folder)
    except PetridishError as error:
        _log.warning("The report has no cells and no diary: %s", error)
        return {}
    for record in search.models():
        try:
            documents[record.id] = gallery.load_documents(record.id)
        except PetridishError as error:
            _log.warning(
                "The report leaves out the cells and the diary of %s: %s", record.id, error
            )
    return documents


def _draw(search: Search, documents: Documents) -> dict[str, str]:
    """Return all pictures by the names of their files."""
    pictures = {
        PICTURE_FILE: hull_chart(search, _error_name(documents)),
        "lineage.svg": lineage_tree(search),
    }
    for record in search.hull():
        if record.id in documents:
            genotype = Genotype.from_dict(documents[record.id]["genotype"])
            cells = draw_cells(genotype, _authors(search.lineage(record.id), documents))
            pictures |= {f"{record.id}-{key}.svg": drawn for key, drawn in cells.items()}
    for id, parts in documents.items():
        curves = training_chart(parts.get("history") or {})
        if curves is not None:
            pictures[f"{id}-training.svg"] = curves
        alphas = parts.get("alphas") or {}
        for key, rows in alphas.get("tables", {}).items():
            pictures[f"{id}-alphas-{key}.svg"] = alpha_chart(key, rows, alphas["i_max"])
    return pictures


def _error_name(documents: Documents) -> str:
    first: Mapping[str, Any] = next(iter(documents.values()), {})
    measured = first.get("metrics", {}).get("metrics", {})
    return "validation perplexity" if "perplexity" in measured else "validation error"


def _authors(lineage: list[str], documents: Documents) -> dict[str, list[str]]:
    """Return which growth added each weak learner: the first of the lineage to have it."""
    authors: dict[str, list[str]] = {}
    for id in lineage:
        if id in documents:
            counts = learners_of(Genotype.from_dict(documents[id]["genotype"]))
            for key, count in counts.items():
                known = authors.setdefault(key, [])
                known += [id] * (count - len(known))
    return authors


def _page(search: Search, title: str, documents: Documents, pictures: Mapping[str, str]) -> str:
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{_summary(search)}</p>",
        _figure(pictures[PICTURE_FILE]),
        _table(hull_rows(search)),
        "<h2>Cells on the hull</h2>",
        "<p>Grey: the seed. Each colour is one growth.</p>",
        *(_cells(record, pictures) for record in reversed(search.hull())),
        "<h2>Lineage</h2>",
        "<p>Filled: on the hull.</p>",
        _figure(pictures["lineage.svg"]),
        "<h2>Growth diary</h2>",
        "<p>Candidates in order of |α|; ✓ marks those that were selected. The slope along a"
        " candidate is ⟨∇L, α·u⟩: how fast the validation loss begins to change when it is added."
        " The predicted change of the loss is the best that a step along the selected ones brings"
        " at once, nothing else changing; the realised one is what came of it, from the moment of"
        " selection to the end of training.</p>",
        _changes(search, documents),
        *(_entry(search, record, documents, pictures) for record in search.models()),
    ]
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Petridish: {escape(title)}</title><style>\n{svg.STYLE}{_STYLE}</style></head>"
        f"<body>\n{body}\n</body></html>\n"
    )


def _summary(search: Search) -> str:
    best, models = search.best(), len(search.models())
    if best is None:
        return f"{models} models; none has a finite error."
    size = svg.short_count(best.multiply_adds)
    return (
        f"{models} models, {len(search.hull())} of them on the lower convex hull of error versus"
        f" multiply-adds. Most accurate: <b>{best.id}</b>, error {best.error:.4f} with {size}"
        " multiply-adds."
    )


def _cells(record: ModelRecord, pictures: Mapping[str, str]) -> str:
    drawn = {
        name.removeprefix(f"{record.id}-").removesuffix(".svg"): picture
        for name, picture in pictures.items()
        if name.startswith(f"{record.id}-")
        and not name.startswith((f"{record.id}-alphas", f"{record.id}-training"))
    }
    if not drawn:
        return ""
    size = svg.short_count(record.multiply_adds)
    heading = f"<h3>{record.id} <small>error {record.error:.4f}, {size} multiply-adds</small></h3>"
    return heading + "".join(_figure(picture, key) for key, picture in drawn.items())


def _changes(search: Search, documents: Documents) -> str:
    rows = []
    models = {record.id: record for record in search.models()}
    for id, record in models.items():
        if record.parent is None or id not in documents:
            continue
        predicted = predicted_change(documents[id].get("alphas") or {})
        losses = realised_change(documents[id].get("history") or {})
        before = models.get(record.parent)
        rows.append(
            {
                "growth": id,
                "parent": record.parent,
                "loss at selection": f"{losses[0]:.4f}" if losses else "-",
                "predicted Δ loss": _signed(predicted),
                "realised Δ loss": _signed(losses[1] - losses[0] if losses else None),
                "loss in the end": f"{losses[1]:.4f}" if losses else "-",
                "Δ error": _signed(record.error - before.error if before else None),
            }
        )
    return _table(rows)


def _entry(
    search: Search, record: ModelRecord, documents: Documents, pictures: Mapping[str, str]
) -> str:
    parts = documents.get(record.id)
    if parts is None:
        return f"<p>{record.id}: its files cannot be read.</p>"
    chosen = "; ".join(
        f"{key}: {', '.join(names)}"
        for key, names in selected_shortcuts(parts.get("alphas") or {}).items()
    )
    origin = f"grown from {record.parent}" if record.parent else "seed"
    names = [name for name in pictures if name.startswith(f"{record.id}-alphas-")]
    figures = "".join(_figure(pictures[name]) for name in names)
    training = pictures.get(f"{record.id}-training.svg")
    is_open = " open" if record in search.hull() else ""
    return (
        f"<details{is_open}><summary><b>{record.id}</b> {origin}, error {record.error:.4f}"
        f"</summary><p>{escape(chosen)}</p>"
        f'<div class="row">{figures}{_figure(training) if training else ""}</div></details>'
    )


def _figure(picture: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{below}{picture}</figure>"


def _table(rows: list[dict[str, str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row.values()) + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _signed(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:+.4f}".replace("-", "−")


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem } small { font-weight: 400; color: var(--soft) }
h3 { margin-bottom: .25rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid var(--line) }
th { color: var(--soft); font-weight: 500 }
figure { margin: .75rem 0; overflow-x: auto } figcaption { color: var(--soft) }
details { border-bottom: 1px solid var(--line); padding: .5rem 0 } summary { cursor: pointer }
.row { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start }
"""
