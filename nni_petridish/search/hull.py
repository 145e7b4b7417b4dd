"""The lower convex hull of (multiply-adds, error), and the choice of a parent on it.

A model is worth growing if no mixture of other models is both cheaper and more accurate. The hull
runs from the cheapest model to the most accurate one; models more expensive than the most accurate
one are never on it. Orientation is computed exactly, so that the hull does not depend on the order
of the points.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from nni_petridish.errors import SearchError

if TYPE_CHECKING:
    from random import Random

Point = tuple[float, float]
Id = TypeVar("Id")

# Bound on the relative rounding error of a cross product in floating point, with a wide margin.
_DOUBT = 1e-14
# Points slightly above the band are kept too, so that rounding cannot lose one permanently.
_SLACK = 1e-9


def lower_hull(points: Sequence[Point]) -> list[int]:
    """Find the lower convex hull, from the cheapest point to the most accurate one.

    Parameters
    ----------
    points
        Pairs (multiply-adds, error). Pairs that are not finite are ignored.

    Returns
    -------
    list of int
        Indices of the strictly convex vertices, with increasing cost and decreasing error. Among
        points of equal cost the most accurate wins, among points of equal error the cheapest,
        among equal points the first.

    Examples
    --------
    >>> lower_hull([(1, 0.5), (2, 0.4), (3, 0.1), (4, 0.2), (2, 0.2)])
    [0, 4, 2]
    """
    finite = [i for i, (cost, error) in enumerate(points) if _finite(cost, error)]
    hull: list[int] = []
    for i in sorted(finite, key=lambda i: (points[i][0], points[i][1], i)):
        if hull and points[i][1] >= points[hull[-1]][1]:
            continue
        while len(hull) > 1 and not _is_below(points[hull[-2]], points[hull[-1]], points[i]):
            hull.pop()
        hull.append(i)
    return hull


def within_band(points: Sequence[Point], hull: Sequence[int], tolerance: float = 0.0) -> list[int]:
    """Return the hull and every point at most a relative ``tolerance`` above it.

    Beyond its ends the hull is continued horizontally. A tolerance of 0 returns the hull itself.

    Parameters
    ----------
    points
        Pairs (multiply-adds, error).
    hull
        The result of `lower_hull` for these points.
    tolerance
        0.025 accepts errors up to 2.5 % above the hull's error at the same cost.

    Returns
    -------
    list of int
        Indices, ordered by cost, then error, then index.

    Examples
    --------
    >>> cloud = [(1, 0.40), (2, 0.31), (3, 0.20), (2, 0.35)]
    >>> within_band(cloud, lower_hull(cloud), tolerance=0.05)
    [0, 1, 2]
    """
    if tolerance <= 0 or not hull:
        return list(hull)
    costs = [float(points[i][0]) for i in hull]
    errors = [float(points[i][1]) for i in hull]
    near = [
        i
        for i, (cost, error) in enumerate(points)
        if _finite(cost, error) and error <= _raised(_height(cost, costs, errors), tolerance)
    ]
    return sorted(near, key=lambda i: (points[i][0], points[i][1], i))


class Hull:
    """The lower hull, updated one point at a time in O(log n + vertices removed).

    Parameters
    ----------
    tolerance
        Relative width of the band that `band` returns.

    Examples
    --------
    >>> hull = Hull()
    >>> [hull.add(*point) for point in [(0, 1, 0.5), (1, 3, 0.1), (2, 2, 0.4), (3, 2, 0.2)]]
    [True, True, False, True]
    >>> hull.ids
    [0, 3, 1]
    """

    def __init__(self, tolerance: float = 0.0) -> None:
        self.tolerance = tolerance
        self.ids: list[int] = []
        self._costs: list[float] = []
        self._errors: list[float] = []
        self._near: dict[int, Point] = {}
        self._band: list[tuple[float, float, int]] = []  # (error, cost, id) of points in the band

    def add(self, id: int, cost: float, error: float) -> bool:
        """Add a point and return whether it is a vertex. Of equal points the smallest id wins."""
        if not _finite(cost, error):
            return False
        cost, error = float(cost), float(error)
        changed = self._add_vertex(id, cost, error)
        if self.tolerance > 0:
            self._add_near(id, (cost, error), changed)
        return changed

    def band(self) -> Iterator[int]:
        """Return the ids on the hull or within the tolerance above it, most accurate first."""
        if self.tolerance <= 0:
            return reversed(self.ids)
        return (id for _, _, id in self._band)

    def _add_near(self, id: int, point: Point, hull_changed: bool) -> None:
        if self._is_inside(point, _SLACK):
            self._near[id] = point
        if hull_changed:
            # The hull only moves down: a point that left the band never returns to it.
            self._near = {i: p for i, p in self._near.items() if self._is_inside(p, _SLACK)}
            inside = [(p[1], p[0], i) for i, p in self._near.items() if self._is_inside(p)]
            self._band = sorted(inside)
        elif self._is_inside(point):
            insort(self._band, (point[1], point[0], id))

    def _add_vertex(self, id: int, cost: float, error: float) -> bool:
        costs, errors = self._costs, self._errors
        at = bisect_left(costs, cost)
        if at and errors[at - 1] <= error:
            return False
        if at < len(costs) and costs[at] == cost:
            if (errors[at], self.ids[at]) <= (error, id):
                return False
            self._remove(at)
        elif 0 < at < len(costs) and not _is_below(
            (costs[at - 1], errors[at - 1]), (cost, error), (costs[at], errors[at])
        ):
            return False
        costs.insert(at, cost)
        errors.insert(at, error)
        self.ids.insert(at, id)
        self._restore_convexity(at)
        return True

    def _restore_convexity(self, at: int) -> None:
        while at + 1 < len(self.ids) and self._errors[at + 1] >= self._errors[at]:
            self._remove(at + 1)
        while at + 2 < len(self.ids) and not self._vertex_is_below(at + 1):
            self._remove(at + 1)
        while at > 1 and not self._vertex_is_below(at - 1):
            self._remove(at - 1)
            at -= 1

    def _vertex_is_below(self, at: int) -> bool:
        left, middle, right = ((self._costs[i], self._errors[i]) for i in (at - 1, at, at + 1))
        return _is_below(left, middle, right)

    def _remove(self, at: int) -> None:
        del self._costs[at], self._errors[at], self.ids[at]

    def _is_inside(self, point: Point, slack: float = 0.0) -> bool:
        height = _height(point[0], self._costs, self._errors)
        return point[1] <= _raised(height, self.tolerance + slack)


def choose_parent(
    ids_most_accurate_first: Iterable[Id], times_chosen: Mapping[Id, int], rng: Random
) -> Id:
    """Choose the model to grow next, as in appendix A.1 of the paper.

    The paper loops over the hull from the most accurate model m to the least, takes m with
    probability p(m) = 1 / (n(m) + 1), where n(m) is how often m was chosen before, and repeats the
    loop until a model is taken.

    The loop is not needed. One pass takes the k-th model with probability
    ``w_k = p_k (1 - p_1) ... (1 - p_{k-1})``, and none with probability ``r = 1 - Σ w``. Passes are
    independent, so the k-th model is eventually taken with probability
    ``w_k (1 + r + r² + ...) = w_k / (1 - r) = w_k / Σ w``: one draw from the normalized weights of
    the first pass has the same distribution, and its cost does not grow with n.

    Parameters
    ----------
    ids_most_accurate_first
        The models that may be chosen. It is read up to the first model that was never chosen, for
        which p = 1.
    times_chosen
        n(m); a missing model counts as never chosen.
    rng
        The random generator, used for one number.

    Examples
    --------
    >>> import random
    >>> choose_parent(["best", "cheap"], {}, random.Random(0))
    'best'
    """
    ids, weights = [], []
    nothing_taken_yet = 1.0
    for id in ids_most_accurate_first:
        n = times_chosen.get(id, 0)
        ids.append(id)
        weights.append(nothing_taken_yet / (n + 1))
        # n / (n + 1) instead of 1 - p keeps its digits when n is huge.
        nothing_taken_yet *= n / (n + 1)
        if nothing_taken_yet == 0:
            break
    if not ids:
        raise SearchError("choose_parent needs at least 1 model to choose from but got none.")
    left = rng.random() * math.fsum(weights)
    for id, weight in zip(ids, weights, strict=True):
        left -= weight
        if left < 0:
            return id
    # By rounding, no weight is left: return the last model with a positive weight.
    return next(id for id, weight in zip(ids[::-1], weights[::-1], strict=True) if weight)


def _finite(cost: float, error: float) -> bool:
    return math.isfinite(cost) and math.isfinite(error)


def _is_below(left: Point, middle: Point, right: Point) -> bool:
    """Return whether ``middle`` is strictly below the segment from ``left`` to ``right``."""
    rise = (middle[0] - left[0]) * (right[1] - left[1])
    fall = (right[0] - left[0]) * (middle[1] - left[1])
    if abs(rise - fall) > _DOUBT * (abs(rise) + abs(fall)):
        return rise > fall
    (x0, y0), (x1, y1), (x2, y2) = ((Fraction(x), Fraction(y)) for x, y in (left, middle, right))
    return (x1 - x0) * (y2 - y0) > (x2 - x0) * (y1 - y0)


def _height(cost: float, costs: Sequence[float], errors: Sequence[float]) -> float:
    """Return the error of the hull at ``cost``, constant beyond its ends."""
    at = bisect_left(costs, cost)
    if at == len(costs):
        return errors[-1]
    if at == 0 or costs[at] == cost:
        return errors[at]
    share = (cost - costs[at - 1]) / (costs[at] - costs[at - 1])
    return errors[at - 1] + share * (errors[at] - errors[at - 1])


def _raised(error: float, tolerance: float) -> float:
    return error + tolerance * abs(error)
