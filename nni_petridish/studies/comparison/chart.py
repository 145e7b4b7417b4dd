"""A picture of a comparison: the any-time curves, and the errors of all runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from nni_petridish.results.report import svg
from nni_petridish.studies.comparison import measures
from nni_petridish.studies.comparison.curves import Frame, draw_curves, style_of
from nni_petridish.studies.comparison.findings import QUANTITIES, Findings, primary

_WIDTH, _LEFT, _RIGHT, _LINE = 760.0, 130.0, 20.0, 24.0
_CURVES, _GAP, _FOOT = 300.0, 60.0, 46.0
_STEPS = 100


def draw(found: Findings) -> str:
    """Return the picture as an SVG file."""
    methods = [method for method, results in found.results.items() if results]
    height = 30 + _CURVES + _GAP + _LINE * len(methods) + _FOOT
    parts = _curves(found, methods, 30) + _errors(found, methods, 30 + _CURVES + _GAP)
    label = f"{found.measure.name} of the compared methods"
    return svg.standalone(svg.picture(_WIDTH, height, parts, label))


def mean_curve(found: Findings, method: str) -> list[tuple[float, float]]:
    """Return the mean any-time curve over seeds: (share of the budget, error)."""
    curves = [
        (found.curve(method, seed, found.unit), budget)
        for seed in found.results[method]
        if (budget := found.budget(seed, found.unit))
    ]
    shares = [i / _STEPS for i in range(_STEPS + 1)]
    scale = found.measure.scale
    return [
        (share, scale * statistics.fmean(measures.error_at(c, share * b) for c, b in curves))
        for share in shares
        if curves
    ]


def _curves(found: Findings, methods: Sequence[str], top: float) -> list[str]:
    curves = {method: mean_curve(found, method) for method in methods}
    frame = Frame(_LEFT, _WIDTH - _RIGHT, top, _CURVES)
    return draw_curves(
        found, curves, frame, shown_from=0.3, label="{:.0%}".format, axis="of the budget"
    )


def _errors(found: Findings, methods: Sequence[str], top: float) -> list[str]:
    quantity = primary(found)
    values = {method: found.values(method, quantity) for method in methods}
    every = [value for of in values.values() for value in of.values()]
    ticks = svg.ticks(min(every, default=0.0), max(every, default=1.0), 6)

    def place(value: float) -> float:
        part = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)

    bottom = top + _LINE * len(methods)
    parts = [svg.line(place(tick), top - 4, place(tick), bottom + 4, "axis") for tick in ticks] + [
        svg.text(place(tick), bottom + 20, f"{tick:g}", "soft", "middle") for tick in ticks
    ]
    title = QUANTITIES[quantity].title.format(error=found.measure.name) + found.measure.unit
    parts.append(svg.text((_LEFT + _WIDTH) / 2, bottom + 38, title, "soft", "middle"))
    for i, (method, of) in enumerate(values.items()):
        y, hue = top + _LINE * (i + 0.5), i % svg.HUES
        parts.append(svg.text(_LEFT - 12, y + 4, method, "", "end"))
        if of:
            mean = place(statistics.fmean(of.values()))
            parts.append(svg.line(mean, y - 8, mean, y + 8, style_of(i)))
        parts += [
            svg.dot(place(value), y, 3.5, f"f{hue}", f"{method}, seed {seed}: {value:.2f}")
            for seed, value in of.items()
        ]
    return parts
