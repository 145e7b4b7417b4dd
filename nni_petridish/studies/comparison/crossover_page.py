"""The crossover of a comparison as a table and as a picture."""

from __future__ import annotations

import math
import statistics
from functools import partial

import numpy as np

from nni_petridish.results.report import svg
from nni_petridish.studies.comparison.crossover import (
    POINTS,
    Crossover,
    common_seeds,
    crossovers,
    curves,
    families,
)
from nni_petridish.studies.comparison.curves import Frame, draw_curves, style_of
from nni_petridish.studies.comparison.findings import Findings

CROSSOVER = (
    "The compute from which the mean curve of a growing method stays below that of its opponent"
    " until the end of the budget. A curve is the lowest validation error so far, with a point"
    " after every epoch. Of methods that differ in their shares of the budget alone, the best one"
    " counts at every compute. Intervals of 95 % come from resampled random seeds."
)
_WIDTH, _LEFT, _RIGHT = 760.0, 60.0, 20.0
_TOP, _CURVES, _FOOT, _LINE = 30.0, 320.0, 64.0, 20.0


def crossover_rows(found: Findings) -> list[dict[str, str]]:
    """Return one row for each growing method and each opponent."""
    return [
        {
            "method": own,
            "opponent": other,
            "ahead from": _shown(found, result.share),
            "interval": _interval(found, result),
            "ahead at the end": _percent(result.certainty),
            "lead at the end": f"{round(result.lead, 2) + 0.0:+.2f}".replace("-", "−"),
            "seeds": str(result.seeds),
        }
        for (own, other), result in crossovers(found).items()
    ]


def draw_crossover(found: Findings) -> str:
    """Return the mean curves over the compute as an SVG file."""
    lines = families(found)
    means = {
        name: [(i / (POINTS - 1), float(error)) for i, error in enumerate(mean)]
        for name, names in lines.items()
        if (mean := _mean(found, names)) is not None
    }
    frame = Frame(_LEFT, _WIDTH - _RIGHT, _TOP, _CURVES)
    axis = "processor time" if found.unit == "seconds" else "multiply-adds times examples"
    parts = draw_curves(
        found, means, frame, shown_from=0.2, label=partial(_compute, found), axis=axis
    )
    for i, name in enumerate(means):
        y = frame.bottom + _FOOT + i * _LINE
        parts += [
            svg.line(_LEFT, y - 4, _LEFT + 18, y - 4, style_of(i)),
            svg.text(_LEFT + 26, y, name),
        ]
    height = frame.bottom + _FOOT + _LINE * len(means)
    label = f"{found.measure.name} of the compared methods over their compute"
    return svg.standalone(svg.picture(_WIDTH, height, parts, label))


def _mean(found: Findings, names: list[str]) -> np.ndarray | None:
    seeds = common_seeds(found, names)
    if not seeds:
        return None
    mean: np.ndarray = curves(found, names, seeds).mean(axis=1).min(axis=0)
    return mean


def _compute(found: Findings, share: float) -> str:
    """Return a share of the mean budget as compute."""
    known = (found.budget(seed, found.unit) for seed in found.comparison.seeds)
    budgets = [budget for budget in known if budget is not None]
    compute = share * statistics.fmean(budgets) if budgets else 0.0
    if found.unit != "seconds":
        return svg.short_count(compute)
    return f"{compute:,.0f} s" if compute >= 100 else f"{compute:.3g} s"


def _shown(found: Findings, share: float) -> str:
    return "never" if math.isinf(share) else f"{_compute(found, share)} ({share:.0%})"


def _interval(found: Findings, result: Crossover) -> str:
    if math.isnan(result.low):
        return "-"
    return f"{_shown(found, result.low)} to {_shown(found, result.high)}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%} of the resamples"
