"""SVG elements. Colors are CSS classes, so that one picture serves light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from markupsafe import Markup

#: Hues of the growths, in their order, on light and dark backgrounds; they repeat after the last.
_LIGHT = ("#2a78d6", "#eb6834", "#1baf7a", "#eda100", "#e87ba4", "#008300", "#4a3aa7", "#e34948")
_DARK = ("#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#008300", "#9085e9", "#e66767")
HUES = len(_LIGHT)


def _variables(hues: Sequence[str], **colors: str) -> str:
    named = {f"hue{i}": hue for i, hue in enumerate(hues)} | colors
    return "; ".join(f"--{name}: {color}" for name, color in named.items())


_LIGHT_COLORS = _variables(
    _LIGHT, ground="#fcfcfb", ink="#1c1c1a", soft="#5f5e59", line="#dedcd4", faint="#b9b7ae"
)
_DARK_COLORS = _variables(
    _DARK, ground="#1a1a19", ink="#f2f1ec", soft="#b4b2a9", line="#3a3936", faint="#6d6b65"
)
#: Style of the pictures and of the page around them.
STYLE = (
    f":root {{ color-scheme: light dark; {_LIGHT_COLORS} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK_COLORS} }} }}\n"
    "svg { background: var(--ground) }\n"
    "svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }\n"
    "svg .soft { fill: var(--soft) } svg .mono { font-family: ui-monospace, monospace }\n"
    "svg .bold { font-weight: 600 }\n"
    # A title stays readable where an edge runs through it.
    "svg .halo { paint-order: stroke; stroke: var(--ground); stroke-width: 4px }\n"
    "svg .axis { stroke: var(--line); fill: none } svg .kin { stroke: var(--faint); fill: none }\n"
    "svg .mark { fill: var(--faint); stroke: var(--ground); stroke-width: 2 }\n"
    "svg .box { fill: var(--ground); stroke-width: 1.5 }\n"
    "svg .edge { fill: none; stroke-width: 1.5; opacity: .75 }\n"
    "svg .curve { fill: none; stroke-width: 2; stroke-linejoin: round }\n"
    "svg .again { stroke-dasharray: 5 3 }\n"
    "svg .plain-s { stroke: var(--soft) } svg .plain-f { fill: var(--soft) }\n"
    "svg .muted-f { fill: var(--faint) }\n"
    + "\n".join(
        f"svg .s{i} {{ stroke: var(--hue{i}) }} svg .f{i} {{ fill: var(--hue{i}) }}"
        for i in range(HUES)
    )
    + "\n"
)


def picture(width: float, height: float, parts: Sequence[str], label: str) -> Markup:
    """Return an ``<svg>`` element to put into a page; ``parts`` are elements made here."""
    return Markup(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
        f' width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def standalone(svg: str) -> str:
    """Return a picture as a file of its own, with the style that the page provides otherwise."""
    start = svg.index(">") + 1
    return f"{svg[:start]}<style>{STYLE}</style>{svg[start:]}\n"


def text(x: float, y: float, content: str, css: str = "", anchor: str = "start") -> str:
    """Return a line of text; ``anchor`` is start, middle or end."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} class="{css}">{escape(content)}</text>'


Data = Mapping[str, str]
"""Attributes ``data-NAME`` of an element, which the script of a page reads."""


def _data(attributes: Data | None) -> str:
    given = attributes or {}
    return "".join(f' data-{name}="{escape(value)}"' for name, value in given.items())


def line(x1: float, y1: float, x2: float, y2: float, css: str, data: Data | None = None) -> str:
    """Return a straight line."""
    place = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {place} class="{css}"{_data(data)}/>'


def polyline(points: Sequence[tuple[float, float]], css: str) -> str:
    """Return a line through points."""
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="{css}"/>'


def curve(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """Return an edge that leaves and arrives horizontally."""
    bend = max(18.0, (x2 - x1) / 2)
    path = f"M{x1:.1f} {y1:.1f}C{x1 + bend:.1f} {y1:.1f} {x2 - bend:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    return f'<path d="{path}" class="{css}"/>'


def box(x: float, y: float, width: float, height: float, css: str, radius: float = 5) -> str:
    """Return a rectangle with round corners."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f' rx="{radius:g}" class="{css}"/>'
    )


def dot(x: float, y: float, radius: float, css: str, tip: str, data: Data | None = None) -> str:
    """Return a circle with the tooltip ``tip``."""
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{css}"{_data(data)}>'
        f"<title>{escape(tip)}</title></circle>"
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers that cover an interval.

    >>> ticks(0.03, 0.21)
    [0.0, 0.05, 0.1, 0.15, 0.2, 0.25]
    """
    if not high > low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def short_count(number: float) -> str:
    """Format a number with three digits and a unit prefix.

    >>> short_count(301_888), short_count(1_250_000_000), short_count(950)
    ('302k', '1.25G', '950')
    """
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return f"{number:g}"
