"""Charts with axes: error versus multiply-adds, and training curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from nni_petridish.results.report import svg
from nni_petridish.search.records import ModelRecord
from nni_petridish.search.search import Search

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Frame:
    """Axes of a chart: a map from values to positions in the picture."""

    width: float
    height: float
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    left: float = 58
    right: float = 16
    top: float = 16
    bottom: float = 42

    def x(self, value: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        span = self.height - self.top - self.bottom
        return self.top + (high - value) / (high - low) * span

    def place(self, points: Points) -> list[tuple[float, float]]:
        return [(self.x(x), self.y(y)) for x, y in points]

    def draw(self, x_label: str, y_label: str, short: bool = False) -> list[str]:
        bottom = self.height - self.bottom
        parts = []
        for tick in self.y_ticks:
            parts.append(
                svg.line(self.left, self.y(tick), self.width - self.right, self.y(tick), "axis")
            )
            parts.append(svg.text(self.left - 7, self.y(tick) + 4, f"{tick:g}", "soft", "end"))
        for tick in self.x_ticks:
            label = svg.short_count(tick) if short else f"{tick:g}"
            parts.append(svg.text(self.x(tick), bottom + 17, label, "soft", "middle"))
        middle = (self.left + self.width - self.right) / 2
        parts.append(svg.text(middle, self.height - 6, x_label, "soft", "middle"))
        parts.append(
            f'<g transform="translate(13 {(self.top + bottom) / 2:.0f}) rotate(-90)">'
            f"{svg.text(0, 0, y_label, 'soft', 'middle')}</g>"
        )
        return parts


def hull_chart(search: Search, error: str = "validation error") -> Markup:
    """Draw all models by multiply-adds and error, lines from parents to children, and the hull."""
    models = {record.id: record for record in search.models() if math.isfinite(record.error)}
    hull = search.hull()
    if not models:
        return svg.picture(640, 40, [svg.text(12, 25, "No model has a finite error.")], "no model")
    costs = [record.multiply_adds for record in models.values()]
    errors = [record.error for record in models.values()]
    x_ticks, y_ticks = svg.ticks(min(costs), max(costs), 6), svg.ticks(min(errors), max(errors))
    # Room above and to the right for the names of the outermost models.
    frame = _Frame(760, 400, x_ticks, y_ticks, right=66, top=28)
    parts = frame.draw("multiply-adds", error, short=True)
    at = {id: frame.place([(r.multiply_adds, r.error)])[0] for id, r in models.items()}
    for id, record in models.items():
        if record.parent in at:
            parts.append(svg.line(*at[record.parent], *at[id], "kin"))
    parts.append(svg.polyline([at[record.id] for record in hull], "curve s0"))
    on_hull = {record.id for record in hull}
    for id, record in sorted(models.items(), key=lambda item: item[0] in on_hull):
        css = "mark f0" if id in on_hull else "mark"
        parts.append(svg.dot(*at[id], 6 if id in on_hull else 5, css, _tip(record)))
    for record in hull:
        x, y = at[record.id]
        parts.append(svg.text(x + 9, y - 8, record.id))
    parts += _hull_legend(frame)
    return svg.picture(frame.width, frame.height, parts, f"{error} versus multiply-adds")


def _hull_legend(frame: _Frame) -> list[str]:
    x, y = frame.width - frame.right - 176, frame.top + 12
    return [
        svg.box(x - 8, y - 14, 180, 58, "box", 4),
        svg.line(x, y, x + 22, y, "curve s0"),
        svg.dot(x + 11, y, 6, "mark f0", "on the hull"),
        svg.text(x + 30, y + 4, "lower convex hull"),
        svg.dot(x + 11, y + 17, 5, "mark", "not on the hull"),
        svg.text(x + 30, y + 21, "other models"),
        svg.line(x, y + 34, x + 22, y + 34, "kin"),
        svg.text(x + 30, y + 38, "parent to child"),
    ]


def _tip(record: ModelRecord) -> str:
    parent = f", grown from {record.parent}" if record.parent else ", a seed"
    size = f"{svg.short_count(record.multiply_adds)} multiply-adds"
    return f"{record.id}: error {record.error:.4f}, {size}{parent}"


def training_chart(history: Mapping[str, Sequence[Mapping[str, Any]]]) -> Markup | None:
    """Draw the losses over all phases of a growth; None if there is nothing to draw."""
    curves = {name: _curve(history, key) for name, key in _CURVES.items()}
    drawn = {name: points for name, points in curves.items() if points}
    values = [y for points in drawn.values() for _, y in points]
    if not values:
        return None
    epochs = sum(len(records) for records in history.values())
    frame = _Frame(
        440, 230, svg.ticks(0, epochs, min(6, epochs)), svg.ticks(0, max(values), 4), top=30
    )
    parts = frame.draw("epoch", "loss")
    parts += _phases(history, frame)
    for i, (name, points) in enumerate(drawn.items()):
        parts.append(svg.polyline(frame.place(points), f"curve s{i}"))
        parts += [
            svg.dot(x, y, 2.5, f"f{i}", f"epoch {point[0]:g}: {name} {point[1]:.4g}")
            for point, (x, y) in zip(points, frame.place(points), strict=True)
        ]
        x = frame.left + 4 + 110 * i
        parts.append(svg.line(x, 11, x + 18, 11, f"curve s{i}"))
        parts.append(svg.text(x + 24, 15, name))
    return svg.picture(frame.width, frame.height, parts, "losses by epoch")


_CURVES = {"training": "loss", "validation": "validation_loss"}


def _curve(
    history: Mapping[str, Sequence[Mapping[str, Any]]], key: str
) -> list[tuple[float, float]]:
    records = [record for phase in history.values() for record in phase]
    values = ((i + 1.0, record.get(key)) for i, record in enumerate(records))
    return [(x, y) for x, y in values if isinstance(y, int | float) and math.isfinite(y)]


def _phases(history: Mapping[str, Sequence[object]], frame: _Frame) -> list[str]:
    """Mark the epoch at which the candidates were selected and finalized."""
    if not history.get("weak") or not history.get("final"):
        return []
    x = frame.x(len(history["weak"]) + 0.5)
    bottom = frame.height - frame.bottom
    return [
        svg.line(x, frame.top, x, bottom, "kin"),
        svg.text(x - 5, frame.top + 11, "weak learning", "soft", "end"),
        svg.text(x + 5, frame.top + 11, "finalized", "soft"),
    ]
