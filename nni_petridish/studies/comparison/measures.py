"""Measures of one run: errors, the any-time curve, compute to a target, hypervolume.

All but the two test errors come from validation errors. The curve of a run is the lowest
validation error so far of a model within the limit; before the first model it is the error of an
untrained network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Result = Mapping[str, Any]
Curve = list[tuple[float, float]]
"""Pairs (compute, lowest error so far), in order of compute."""


def curve(result: Result, unit: str, limit: float | None, *, epochs: bool = False) -> Curve:
    """Return the any-time curve of a run.

    Parameters
    ----------
    result
        The result of the run.
    unit
        ``seconds`` or ``operations``.
    limit
        The largest number of multiply-adds of a model that counts.
    epochs
        Whether the networks after each epoch count too, and not only finished models.
    """
    lowest = float(result["untrained_error"])
    points: Curve = [(0.0, lowest)]
    found = _counted(result, limit)
    if epochs:  # earlier versions did not record them
        found += _counted({"models": result.get("epochs", [])}, limit)
        found.sort(key=lambda model: float(model[unit]))
    for model in found:
        lowest = min(lowest, float(model["error"]))
        points.append((float(model[unit]), lowest))
    return points


def error_at(points: Curve, compute: float) -> float:
    """Return the lowest error after some compute.

    >>> error_at([(0.0, 0.9), (10.0, 0.5), (20.0, 0.4)], 15.0)
    0.5
    """
    return [error for at, error in points if at <= compute][-1]


def area(points: Curve, end: float) -> float:
    """Return the mean of a curve from 0 to ``end``: its area over the compute.

    >>> area([(0.0, 0.9), (10.0, 0.5)], 20.0)
    0.7
    """
    if end <= 0:
        return points[0][1]
    inside = [(at, error) for at, error in points if at < end]
    ends = [*(at for at, _ in inside[1:]), end]
    parts = [(stop - at) * error for (at, error), stop in zip(inside, ends, strict=True)]
    return math.fsum(parts) / end


def compute_to(points: Curve, target: float) -> float:
    """Return the compute at which a curve reaches an error, infinite if it never does.

    >>> compute_to([(0.0, 0.9), (10.0, 0.5)], 0.6)
    10.0
    """
    return next((at for at, error in points if error <= target), math.inf)


def hypervolume(result: Result, limit: float | None) -> float:
    """Return the area that a run's models dominate, as a share.

    The axes are multiply-adds from 0 to the limit (without one, the largest model's) and error from
    0 to that of an untrained network.
    """
    worst = float(result["untrained_error"])
    models = [(float(m["multiply_adds"]), float(m["error"])) for m in _counted(result, limit)]
    most = limit or max((size for size, _ in models), default=1.0)
    volume, lowest = 0.0, worst
    front = sorted(models)
    for i, (size, error) in enumerate(front):
        lowest = min(lowest, error)
        following = front[i + 1][0] if i + 1 < len(front) else most
        volume += (following - size) * (worst - lowest)
    return volume / (most * worst)


def _counted(result: Result, limit: float | None) -> list[dict[str, Any]]:
    most = math.inf if limit is None else limit
    return [
        model
        for model in result["models"]
        if model["error"] is not None and model["multiply_adds"] <= most
    ]
