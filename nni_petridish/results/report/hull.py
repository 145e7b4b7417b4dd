"""The chart of all models: error versus complexity, and the lower convex hull."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from nni_petridish.registry import ERROR, Measure
from nni_petridish.results.report import svg
from nni_petridish.results.report.axes import Axis, Frame
from nni_petridish.search.complexity import Complexity
from nni_petridish.search.records import ModelRecord
from nni_petridish.search.search import Search

WIDE, NARROW = (760, 400), (368, 330)
"""Sizes of the chart: of a page on a screen, and of one on a phone."""
_LETTER, _LINE = 7.0, 14.0
"""Width and height of a letter, about."""


def hull_chart(search: Search, measure: Measure = ERROR, size: tuple[int, int] = WIDE) -> Markup:
    """Draw all models, lines from parents to children, and the hull.

    An axis is logarithmic where its values span a decade. The hull is made of straight lines on
    linear axes, so they are bent there.
    """
    complexity = search.complexity
    models = {
        record.id: record
        for record in search.models()
        if math.isfinite(record.error) and math.isfinite(complexity.of(record.outcome))
    }
    if not models:
        note = svg.text(12, 25, "No model with a finite error is finished yet.", "soft")
        return svg.picture(size[0], 40, [note], "no model")
    frame = _frame(list(models.values()), measure, complexity, size)
    parts = frame.draw(complexity.title, f"validation {measure.name}{measure.unit}", short=True)
    values = {
        id: (float(complexity.of(record.outcome)), measure.scale * record.error)
        for id, record in models.items()
    }
    at = {id: frame.place([point])[0] for id, point in values.items()}
    for id, record in models.items():
        if record.parent in at:
            parts.append(svg.line(*at[record.parent], *at[id], "kin", {"child": id}))
    hull = search.hull()
    parts.append(svg.polyline(frame.place_line([values[r.id] for r in hull]), "curve s0"))
    on_hull = {record.id for record in hull}
    for id, record in sorted(models.items(), key=lambda item: item[0] in on_hull):
        css, radius = ("mark f0", 6) if id in on_hull else ("mark", 5)
        data = {"model": id, "parent": record.parent or ""}
        parts.append(svg.dot(*at[id], radius, css, tip(record, measure, complexity), data))
    parts += _names(hull, at, size[0])
    parts += _legend(frame)
    label = f"validation {measure.name} versus {complexity.title}"
    return svg.picture(frame.width, frame.height, parts, label)


def short_size(record: ModelRecord, complexity: Complexity) -> str:
    """Return the complexity of a model in words."""
    value = complexity.of(record.outcome)
    return complexity.phrase(svg.short_count(value) if complexity.is_count else f"{value:.3g}")


def tip(record: ModelRecord, measure: Measure, complexity: Complexity) -> str:
    """Return what is said about a model beside its point."""
    parent = f"grown from {record.parent}" if record.parent else "a seed"
    size = short_size(record, complexity)
    return f"{record.id}: {measure.name} {measure.text(record.error)}, {size}, {parent}"


def _frame(
    models: Sequence[ModelRecord], measure: Measure, complexity: Complexity, size: tuple[int, int]
) -> Frame:
    width, height = size
    return Frame(
        width,
        height,
        Axis.covering([complexity.of(record.outcome) for record in models], about=width // 120),
        Axis.covering([measure.scale * record.error for record in models]),
        left=58 if size == WIDE else 46,
        # Room for the names of the outermost models.
        right=62 if size == WIDE else 24,
        top=46,
    )


def _names(
    hull: Sequence[ModelRecord], at: dict[str, tuple[float, float]], width: float
) -> list[str]:
    """Write the names of hull models beside their points, except where they would overlap."""
    parts: list[str] = []
    taken: list[tuple[float, float]] = []
    for record in reversed(hull):  # the most accurate one first: its name is always written
        x, y = at[record.id]
        long = _LETTER * len(record.id)
        left = x + 9 if x + 9 + long <= width else width - long
        if all(abs(left - x0) > long or abs(y - y0) > _LINE for x0, y0 in taken):
            parts.append(svg.text(left, y - 9, record.id, "halo"))
            taken.append((left, y))
    return parts


def _legend(frame: Frame) -> list[str]:
    x, y = frame.left, 17.0
    parts = [
        svg.line(x, y, x + 22, y, "curve s0"),
        svg.dot(x + 11, y, 6, "mark f0", "on the hull"),
        svg.text(x + 30, y + 4, "convex hull"),
        svg.dot(x + 118, y, 5, "mark", "not on the hull"),
        svg.text(x + 129, y + 4, "other models"),
    ]
    if frame.width >= WIDE[0]:
        parts += [
            svg.line(x + 222, y, x + 244, y, "kin"),
            svg.text(x + 252, y + 4, "parent to child"),
        ]
    return parts
