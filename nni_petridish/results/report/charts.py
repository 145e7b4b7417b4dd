"""Training curves: the losses over the phases of a growth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from nni_petridish.results.report import svg
from nni_petridish.results.report.axes import Axis, Frame


def training_chart(history: Mapping[str, Sequence[Mapping[str, Any]]]) -> Markup | None:
    """Draw the losses over all phases of a growth; None if there is nothing to draw."""
    curves = {name: _curve(history, key) for name, key in _CURVES.items()}
    drawn = {name: points for name, points in curves.items() if points}
    values = [y for points in drawn.values() for _, y in points]
    if not values:
        return None
    epochs = sum(len(records) for records in history.values())
    frame = Frame(440, 246, Axis(svg.ticks(0, epochs, min(6, epochs))), _loss_axis(values), top=46)
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


def _loss_axis(values: Sequence[float]) -> Axis:
    axis = Axis.covering(values, 4)
    return axis if axis.is_log else Axis(svg.ticks(0, max(values), 4))


_CURVES = {"training": "loss", "validation": "validation_loss"}


def _curve(
    history: Mapping[str, Sequence[Mapping[str, Any]]], key: str
) -> list[tuple[float, float]]:
    records = [record for phase in history.values() for record in phase]
    values = ((i + 1.0, record.get(key)) for i, record in enumerate(records))
    return [(x, y) for x, y in values if isinstance(y, int | float) and math.isfinite(y)]


def _phases(history: Mapping[str, Sequence[object]], frame: Frame) -> list[str]:
    """Mark the epoch at which the candidates were selected and finalized."""
    if not history.get("weak") or not history.get("final"):
        return []
    x = frame.x(len(history["weak"]) + 0.5)
    bottom = frame.height - frame.bottom
    return [
        svg.line(x, frame.top - 18, x, bottom, "kin"),
        svg.text(x - 5, frame.top - 8, "weak learning", "soft", "end"),
        svg.text(x + 5, frame.top - 8, "finalized", "soft"),
    ]
