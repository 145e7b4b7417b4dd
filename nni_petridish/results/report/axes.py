"""Axes of charts: linear, or logarithmic where the values span decades."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from nni_petridish.results.report import svg

_DECADE = 10.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
_BETWEEN = 24
"""Points that a straight line is drawn with on a logarithmic axis, where it is bent."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """A map from values to the interval from 0 to 1.

    Parameters
    ----------
    ticks
        Round numbers in ascending order; the first and the last are the ends of the axis.
    is_log
        Whether the axis is logarithmic.
    """

    ticks: Sequence[float]
    is_log: bool = False

    @classmethod
    def covering(cls, values: Sequence[float], about: int = 5) -> Axis:
        """Return an axis with about so many ticks that covers all values.

        >>> Axis.covering([0.02, 0.03]).is_log, Axis.covering([0.02, 0.9]).is_log
        (False, True)
        """
        low, high = min(values), max(values)
        if low > 0 and high >= _DECADE * low:
            return cls(log_ticks(low, high, about), is_log=True)
        return cls(svg.ticks(low, high, about))

    def share(self, value: float) -> float:
        """Return the place of a value: 0 at the first tick, 1 at the last."""
        low, high = self._scaled(self.ticks[0]), self._scaled(self.ticks[-1])
        return (self._scaled(value) - low) / (high - low)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.is_log else value


def log_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers that cover a positive interval, for a logarithmic axis.

    >>> log_ticks(0.013, 0.18)
    [0.01, 0.02, 0.05, 0.1, 0.2]
    >>> log_ticks(3e-5, 0.9)
    [1e-05, 0.0001, 0.001, 0.01, 0.1, 1.0]
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if (math.log10(high / low)) * 3 <= about + 2 else (1,)
    # Parsed from text: 10.0 ** -5 is not the nearest number to 0.00001.
    numbers = [float(f"{n}e{power}") for power in range(first, last + 1) for n in steps]
    below = [n for n in numbers if n <= low * (1 + 1e-9)]
    above = [n for n in numbers if n >= high * (1 - 1e-9)]
    return [n for n in numbers if below[-1] <= n <= above[0]]


@dataclass(frozen=True)
class Frame:
    """The axes of a chart: a map from values to positions in the picture."""

    width: float
    height: float
    x_axis: Axis
    y_axis: Axis
    left: float = 58
    right: float = 16
    top: float = 16
    bottom: float = 42

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return self.left + self.x_axis.share(value) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        span = self.height - self.top - self.bottom
        return self.top + (1 - self.y_axis.share(value)) * span

    def place(self, points: Points) -> list[tuple[float, float]]:
        """Return the positions of points."""
        return [(self.x(x), self.y(y)) for x, y in points]

    def place_line(self, points: Points) -> list[tuple[float, float]]:
        """Return the positions of the straight lines through points, bent as the axes are."""
        if not (self.x_axis.is_log or self.y_axis.is_log):
            return self.place(points)
        dense = list(points[:1])
        for (x0, y0), (x1, y1) in pairwise(points):
            shares = [(i + 1) / _BETWEEN for i in range(_BETWEEN)]
            dense += [(x0 + t * (x1 - x0), y0 + t * (y1 - y0)) for t in shares]
        return self.place(dense)

    def draw(self, x_label: str, y_label: str, short: bool = False) -> list[str]:
        """Draw ticks and labels; ``short`` writes the numbers below with unit prefixes."""
        bottom = self.height - self.bottom
        parts = []
        for tick in self.y_axis.ticks:
            parts.append(
                svg.line(self.left, self.y(tick), self.width - self.right, self.y(tick), "axis")
            )
            parts.append(svg.text(self.left - 7, self.y(tick) + 4, f"{tick:g}", "soft", "end"))
        for tick in self.x_axis.ticks:
            label = svg.short_count(tick) if short else f"{tick:g}"
            parts.append(svg.text(self.x(tick), bottom + 17, label, "soft", "middle"))
        middle = (self.left + self.width - self.right) / 2
        parts.append(svg.text(middle, self.height - 6, x_label, "soft", "middle"))
        parts.append(
            f'<g transform="translate(13 {(self.top + bottom) / 2:.0f}) rotate(-90)">'
            f"{svg.text(0, 0, y_label, 'soft', 'middle')}</g>"
        )
        return parts
