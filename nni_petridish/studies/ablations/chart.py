"""A picture of ablations: every run a dot, the mean and standard deviation of every variant."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from nni_petridish.registry import Measure
from nni_petridish.results.report import svg
from nni_petridish.studies.ablations.paper import PAPER
from nni_petridish.studies.ablations.section import Table
from nni_petridish.studies.ablations.settings import Ablations
from nni_petridish.studies.ablations.tables import Finding, findings

_WIDTH, _LEFT, _RIGHT = 760, 130, 90
_LINE, _TITLE, _FOOT = 24, 34, 44


def draw(ablations: Ablations) -> str:
    """Return the picture as an SVG file; the paper's errors stand at the right."""
    tables = [(table, findings(ablations, table)) for table in ablations.tables]
    errors = [e for _, found in tables for one in found for e in one.errors().values()]
    ticks = svg.ticks(min(errors, default=0.0), max(errors, default=1.0), 6)
    height = _FOOT + sum(_TITLE + _LINE * len(found) for _, found in tables)
    parts = [svg.text(_WIDTH - 8, 14, "paper", "soft", "end")]
    for tick in ticks:
        parts.append(svg.line(_x(tick, ticks), 18, _x(tick, ticks), height - _FOOT + 6, "axis"))
        parts.append(svg.text(_x(tick, ticks), height - 22, f"{tick:g}", "soft", "middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(svg.text(middle, height - 5, _axis(ablations.measure, tables), "soft", "middle"))
    top = 0.0
    for table, found in tables:
        parts.append(svg.text(8, top + 25, _short_title(table), "bold"))
        for i, one in enumerate(found):
            parts += _variant(table, one, top + _TITLE + _LINE * (i + 0.4), ticks)
        top += _TITLE + _LINE * len(found)
    label = f"{ablations.measure.name} of the variants"
    return svg.standalone(svg.picture(_WIDTH, height, parts, label))


def _variant(table: Table, one: Finding, y: float, ticks: Sequence[float]) -> list[str]:
    errors = one.errors()
    hue = 1 if one.variant == table.default else 0
    parts = [svg.text(_LEFT - 12, y + 4, one.variant, "", "end")]
    if errors:
        mean = statistics.fmean(errors.values())
        spread = statistics.stdev(errors.values()) if len(errors) > 1 else 0.0
        left, right = (
            min(max(_x(v, ticks), _LEFT), _WIDTH - _RIGHT) for v in _around(mean, spread)
        )
        parts.append(svg.line(left, y, right, y, f"curve s{hue}"))
        parts.append(svg.line(_x(mean, ticks), y - 7, _x(mean, ticks), y + 7, f"curve s{hue}"))
    parts += [
        svg.dot(_x(error, ticks), y, 3.5, f"f{hue}", f"seed {seed}: {error:.2f}")
        for seed, error in errors.items()
    ]
    paper = PAPER[table.name].rows.get(one.variant) if table.name in PAPER else None
    if paper is not None:
        parts.append(svg.text(_WIDTH - 8, y + 4, f"{paper.error:g}", "soft", "end"))
    return parts


def _around(mean: float, spread: float) -> tuple[float, float]:
    return mean - spread, mean + spread


def _x(value: float, ticks: Sequence[float]) -> float:
    share = (value - ticks[0]) / (ticks[-1] - ticks[0])
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _short_title(table: Table) -> str:
    paper = PAPER.get(table.name)
    return paper.title if paper else table.name


def _axis(measure: Measure, tables: Sequence[tuple[Table, Sequence[Finding]]]) -> str:
    results = [r for _, found in tables for one in found for r in one.results.values()]
    tested = any(result["final"] for result in results)
    kind = f"test {measure.name} after final training" if tested else f"validation {measure.name}"
    return f"{kind}{measure.unit}; dots: searches, bars: mean ± standard deviation"
