"""The pictures of a report, for the page and as files of their own."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from nni_petridish.core.genotype import Genotype
from nni_petridish.registry import Measure
from nni_petridish.results.report.cells import draw_cells
from nni_petridish.results.report.charts import training_chart
from nni_petridish.results.report.diary import alpha_chart
from nni_petridish.results.report.hull import NARROW, hull_chart
from nni_petridish.results.report.lineage import lineage_tree
from nni_petridish.search.search import Search

PICTURE_FILE = "hull.svg"
PICTURES = "pictures"
"""Folder of all pictures but `PICTURE_FILE`."""

Documents = Mapping[str, Mapping[str, Any]]
"""The documents of the models, by model id."""


@dataclass(frozen=True)
class Pictures:
    """The pictures of a report.

    Parameters
    ----------
    hull, narrow_hull
        All models by multiply-adds and error, for screens and for phones.
    lineage
        All models as a tree.
    cells
        The cells of each model: by model and kind of cell.
    alphas
        The α of the candidates of each growth: by model and α table.
    training
        The losses of each model.
    """

    hull: Markup
    narrow_hull: Markup
    lineage: Markup
    cells: Mapping[str, Mapping[str, Markup]]
    alphas: Mapping[str, Mapping[str, Markup]]
    training: Mapping[str, Markup]

    def files(self) -> dict[str, Markup]:
        """Return the pictures by their paths in the gallery."""
        named = {"lineage": self.lineage}
        for id, cells in self.cells.items():
            named |= {f"{id}-{key}": picture for key, picture in cells.items()}
        for id, charts in self.alphas.items():
            named |= {f"{id}-alphas-{key}": picture for key, picture in charts.items()}
        named |= {f"{id}-training": picture for id, picture in self.training.items()}
        # NNI labels may contain slashes, so the names are quoted.
        return {PICTURE_FILE: self.hull} | {
            f"{PICTURES}/{quote(name, safe='')}.svg": picture for name, picture in named.items()
        }


def draw_pictures(
    search: Search, documents: Documents, measure: Measure, detailed: Container[str] | None = None
) -> Pictures:
    """Draw all pictures of a report.

    Parameters
    ----------
    search
        The models.
    documents
        Their documents; models without documents are in the overviews only.
    measure
        The measure of their error.
    detailed
        Ids of the models with pictures of their own; all by default.
    """
    cells, alphas, training = {}, {}, {}
    for id, parts in documents.items():
        if detailed is not None and id not in detailed:
            continue
        genotype = Genotype.from_dict(parts["genotype"])
        drawn = draw_cells(genotype, _authors(search.lineage(id), documents))
        if drawn:
            cells[id] = drawn
        tables = parts.get("alphas") or {}
        alphas[id] = {
            key: alpha_chart(key, rows, tables["i_max"])
            for key, rows in tables.get("tables", {}).items()
        }
        losses = training_chart(parts.get("history") or {})
        if losses is not None:
            training[id] = losses
    return Pictures(
        hull=hull_chart(search, measure),
        narrow_hull=hull_chart(search, measure, NARROW),
        lineage=lineage_tree(search, measure),
        cells=cells,
        alphas=alphas,
        training=training,
    )


def _authors(lineage: list[str], documents: Documents) -> dict[str, list[str]]:
    """Return the growth that added each weak learner: the first of the lineage that has it."""
    authors: dict[str, list[str]] = {}
    for id in lineage:
        if id in documents:
            genotype = Genotype.from_dict(documents[id]["genotype"])
            for key, learners in genotype.learners_by_key().items():
                known = authors.setdefault(key, [])
                known += [id] * (len(learners) - len(known))
    return authors
