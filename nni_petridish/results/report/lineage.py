"""The lineage of a search as a tree."""

from __future__ import annotations

from markupsafe import Markup

from nni_petridish.registry import ERROR, Measure
from nni_petridish.results.report import svg
from nni_petridish.results.report.hull import short_size
from nni_petridish.results.report.tables import walk
from nni_petridish.search.search import Search

_ROW, _INDENT, _TOP = 24, 22, 34


def lineage_tree(search: Search, measure: Measure = ERROR) -> Markup:
    """Draw every model below its parent; models on the hull are filled."""
    rows = list(walk(search))
    on_hull = {record.id for record in search.hull()}
    depth = max((len(last) for _, last in rows), default=0)
    left = 20 + _INDENT * depth + 90
    timed = not search.complexity.is_count
    columns = (
        (measure.name, 70),
        (search.complexity.title if timed else "multiply-adds", 170),
        ("parameters", 270),
        ("times grown", 370),
    )
    parts = [svg.text(left + x, 18, title, "soft", "end") for title, x in columns]
    at: dict[str, tuple[float, float]] = {}
    for row, (record, last) in enumerate(rows):
        x, y = 16.0 + _INDENT * len(last), float(_TOP + _ROW * row)
        at[record.id] = (x, y)
        parent = at.get(record.parent or "")
        if parent:
            parts.append(
                svg.polyline([(parent[0], parent[1] + 6), (parent[0], y), (x - 6, y)], "kin")
            )
        hull = record.id in on_hull
        tip = f"{record.id} is {'on' if hull else 'above'} the hull"
        data = {"model": record.id}
        parts.append(svg.dot(x, y, 6, "mark f0" if hull else "mark", tip, data))
        parts.append(svg.text(x + 11, y + 4, record.id, "bold" if hull else ""))
        values = (
            measure.text(record.error),
            short_size(record, search.complexity)
            if timed
            else svg.short_count(record.multiply_adds),
            svg.short_count(record.parameters),
            str(search.times_chosen(record.id)),
        )
        parts += [
            svg.text(left + offset, y + 4, value, "", "end")
            for value, (_, offset) in zip(values, columns, strict=True)
        ]
    return svg.picture(left + 390, _TOP + _ROW * len(rows), parts, "lineage of the models")
