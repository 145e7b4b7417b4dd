"""Any-time curves as a part of a picture: errors over shares of the budget.

The axis of errors is logarithmic where they differ much, as those of trained and untrained do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nni_petridish.results.report import svg
from nni_petridish.results.report.axes import Axis, log_ticks
from nni_petridish.studies.comparison.findings import Findings

_MUCH = 3.0
"""Ratio of the largest to the lowest error from which their axis is logarithmic."""


@dataclass(frozen=True)
class Frame:
    """The place of the curves in a picture.

    Parameters
    ----------
    left, right
        The ends of the budget's axis.
    top, height
        The upper edge and the height of the curves; the title is above, the axis below.
    """

    left: float
    right: float
    top: float
    height: float

    @property
    def bottom(self) -> float:
        """The lower edge of the curves."""
        return self.top + self.height


def draw_curves(
    found: Findings,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    frame: Frame,
    *,
    shown_from: float,
    label: Callable[[float], str],
    axis: str,
) -> list[str]:
    """Return the parts of a picture with curves.

    Parameters
    ----------
    found
        The comparison, for the name of its measure.
    curves
        The curves by name: shares of the budget and errors.
    frame
        The place of the curves.
    shown_from
        The share of the budget from which errors decide about the scale. The start, where nothing
        is trained yet, would flatten the rest.
    label, axis
        The text of a share below the axis, and the name of the axis.
    """
    seen = [error for points in curves.values() for share, error in points if share >= shown_from]
    scale = _axis(seen or [0.0, 1.0])
    lowest, highest = scale.ticks[0], scale.ticks[-1]

    def place(share: float, error: float) -> tuple[float, float]:
        part = scale.share(min(max(error, lowest), highest))
        return frame.left + share * (frame.right - frame.left), frame.bottom - part * frame.height

    title = f"lowest validation {found.measure.name} so far{found.measure.unit}, mean of the seeds"
    parts = [svg.text(8, frame.top - 14, title, "bold")]
    for tick in scale.ticks:
        _, y = place(0, tick)
        parts += [
            svg.line(frame.left, y, frame.right, y, "axis"),
            svg.text(frame.left - 8, y + 4, f"{tick:g}", "soft", "end"),
        ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, _ = place(share, lowest)
        parts.append(svg.text(x, frame.bottom + 16, label(share), "soft", "middle"))
    middle = (frame.left + frame.right) / 2
    parts.append(svg.text(middle, frame.bottom + 34, axis, "soft", "middle"))
    for i, points in enumerate(curves.values()):
        parts.append(svg.polyline([place(*point) for point in points], style_of(i)))
    return parts


def _axis(errors: Sequence[float]) -> Axis:
    """Return an axis for errors; a linear one would flatten the low curves beside a high one."""
    low, high = min(errors), max(errors)
    if low > 0 and high >= _MUCH * low:
        return Axis(log_ticks(low, high), is_log=True)
    return Axis.covering(errors)


def style_of(place: int) -> str:
    """Return the CSS classes of the method at a place: a hue that comes again is dashed.

    >>> style_of(1), style_of(1 + svg.HUES)
    ('curve s1', 'curve s1 again')
    """
    return f"curve s{place % svg.HUES}" + (" again" if place >= svg.HUES else "")
